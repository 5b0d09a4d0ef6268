# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start a sandbox: directly from its prepared image, or by the container runtime.

With both methods the first process reports on the sandbox's channel, the supervisor records the PID namespace, and
the control group's limits are set. ``start: auto`` is decided once, before the supervisor's first such sandbox:
directly if a sandbox of an empty root folder starts directly, else by the runtime.

At most :data:`MAX_CONCURRENT_STARTS` sandboxes start at a time. As many again may start if no other sandbox of the
same image is starting. So an image whose sandboxes start slowly, or never, does not delay other images.

The first request for an image prepares the image; concurrent requests wait for the same preparation. The cache key is
``image_identity``, which changes when the image is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_gym_prorl.async_tasks import log_exceptions, run_uncancellable, spawn_task
from nemo_gym_prorl.failures import MACHINE_ERRNOS
from nemo_gym_prorl.network_access import NONE, PROXY_PORT, has_proxy
from nemo_gym_prorl.sandbox import signals
from nemo_gym_prorl.sandbox.isolation import layer_archive, mounts
from nemo_gym_prorl.sandbox.isolation.prepared_image import (
    PreparedImage,
    from_reply,
    idmapped_image,
    make_request,
    prepare_image,
    prerequisites,
)
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.launcher.requests import ProcDirectory, SandboxNamespaces, unshared_namespaces
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.runtime.launch import become_runtime, read_environment, runtime_command
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.children import Child, Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.connection import Message, PeerGone, close_all, drop, ready
from nemo_gym_prorl.sandbox.supervisor.egress_process import Egress
from nemo_gym_prorl.sandbox.supervisor.protocol import SHORTAGES, CreateRequest, Refused, failure
from nemo_gym_prorl.sandbox.supervisor.sandbox import STUCK_S, Sandbox


MAX_CONCURRENT_STARTS = 2 * (os.cpu_count() or 1)
"""Two starts per core: more starts would only delay each other and the commands of running sandboxes."""


class StartLimiter:
    """Limits concurrent sandbox starts (FIFO) to :data:`MAX_CONCURRENT_STARTS`. As many again may start if no other
    sandbox of the same image is starting."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._starting: list[str] = []

    @contextlib.asynccontextmanager
    async def slot(self, image: str) -> AsyncIterator[None]:
        """Wait for a start slot for a sandbox of ``image``, and hold the slot within the block."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((image, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if (image, granted) in self._waiting:
                self._waiting.remove((image, granted))
            else:
                self._starting.remove(image)
            self._grant()

    def _grant(self) -> None:
        while len(self._starting) < 2 * MAX_CONCURRENT_STARTS:
            blocked = self._starting if len(self._starting) >= MAX_CONCURRENT_STARTS else []
            found = next((waiting for waiting in self._waiting if waiting[0] not in blocked), None)
            if found is None:
                return
            self._waiting.remove(found)
            self._starting.append(found[0])
            if not found[1].done():
                found[1].set_result(None)


class Creation:
    """Creates one supervisor's sandboxes, with control groups below the folder ``groups`` (``None`` for none)."""

    def __init__(
        self, folder: Path, children: Children, groups: Path | None, launcher: Launcher, egress: Egress
    ) -> None:
        self._children = children
        self._groups = groups
        self._egress = egress
        self._launcher = launcher
        self._prepared = PreparedImages(folder, children, launcher)
        self._folder = folder
        self._probing = asyncio.Lock()
        self._fallback_reason: str | None = None

    async def create(self, sandbox: Sandbox) -> None:
        """Start a sandbox. After a failure or cancellation, the caller kills its processes and removes its folder.

        Raises:
            Refused: the sandbox does not start; the reply has the reason.
            OSError: a file, folder or control group of the sandbox cannot be created.
        """
        request = sandbox.request
        with sandbox.step("folder"):
            make_folder(sandbox.folder, request)
            if self._groups:
                path = self._groups / cgroups.group_name(sandbox.folder)
                (sandbox.folder / state_dir.GROUP_FILE).write_text(str(path))
                sandbox.group = cgroups.Group.make(path)
            await self._make_layer(sandbox)
        if request.start == "auto":
            with sandbox.step("probe"):
                sandbox.fallback_reason = await self._why_not_directly(request)
        if request.start == "runtime" or sandbox.fallback_reason:
            await self._start_by_runtime(sandbox)
        else:
            await self._start_directly(sandbox)
        with sandbox.step("limits"), _setup_errors():
            if sandbox.group:
                memory = request.memory_mib << 20
                sandbox.group.set_limits(memory=memory, processes=request.processes, cpus=request.cpus)
        if has_proxy(request.network):
            with sandbox.step("egress"), _setup_errors():
                await self._egress.open(sandbox, PROXY_PORT, {"network": request.network})

    async def _why_not_directly(self, request: CreateRequest) -> str:
        """Return why ``start: auto`` uses the runtime; empty if sandboxes start directly on this machine.

        Raises:
            Refused: a helper was killed, or the machine lacked a resource. Then the next sandbox is a probe again.
        """
        async with self._probing:
            if self._fallback_reason is None:
                self._fallback_reason = await self._probe(request)
        return self._fallback_reason

    async def _probe(self, request: CreateRequest) -> str:
        """Start a sandbox of an empty root folder directly; return why it does not start, or an empty text."""
        folder = self._folder / f"m-{secrets.token_hex(6)}"
        image = folder / "empty"
        empty = replace(
            request, image=str(image), image_identity=str(image), scripted=False, users=False, network=NONE, binds=[]
        )
        try:
            async with throwaway_sandbox(folder, empty, self._launcher) as sandbox:
                image.mkdir()
                await self._start_directly(sandbox)
        except (Refused, OSError) as error:
            trouble = failure(error)
            if trouble.get("killed") or trouble.get("errno") in SHORTAGES:
                raise
            return str(trouble.get("log") or trouble["error"])
        return ""

    async def _start_directly(self, sandbox: Sandbox) -> None:
        sandbox.start_method, request = "direct", sandbox.request
        with sandbox.step("direct"):
            prepared = await self._prepared.get(request)
        sandbox.environment = prepared.environment
        reply: Message = {}
        files: list[int] = []
        if action := prerequisites(prepared, request):
            with sandbox.step("ids and binds"):
                reply, files = await self._children.run(action, [prepared.image, prepared.parent_namespace])
        owners = [files.pop(0)] if reply.get("owners") else []
        try:
            with sandbox.step("first process"):
                first = await run_uncancellable(self._start_first(sandbox, prepared, files))
                try:
                    self._record_first_process(sandbox, first.pid)
                    _send_image(sandbox, prepared, owners[0] if owners else None)
                except OSError as error:
                    if first.alive and not signals.is_exiting(first.pid):
                        raise
                    raise await _first_process_error(first) from error
        finally:
            close_all(owners)
            close_all(files)
        with sandbox.step("its own setup"):
            await _wait_ready(sandbox, first)

    async def _start_first(self, sandbox: Sandbox, prepared: PreparedImage, files: list[int]) -> Child:
        """Start the sandbox's first process, which waits on its channel for a message that may carry the image."""
        request = make_request(prepared, sandbox.request, str(sandbox.folder))
        parent, *shown = files if sandbox.request.users else [prepared.parent_namespace, *files]
        with open_channel(sandbox, socket.SOCK_SEQPACKET) as channel, self._children.starting() as register:
            own = [parent, channel.fileno(), self._launcher.program()]
            given = [*own, *shown, *mounts.namespace_without_overmounts()]
            reply, _files = await self._launcher.run(request, given, sandbox.group)
            sandbox.starter = register(reply["pid"])
            return sandbox.starter

    async def _make_layer(self, sandbox: Sandbox) -> None:
        """Create the writable layer, empty or restored from a snapshot. The start's time limit excludes restoring."""
        make_overlay(sandbox)
        request = sandbox.request
        if not request.snapshot:
            return
        action = partial(layer_archive.unpack, request.snapshot, sandbox.folder / "overlay" / "upper", request)
        sandbox.start_timeout.reschedule(None)
        try:
            await self._children.run(action)
        except Refused as error:
            if error.reply.get("errno") in MACHINE_ERRNOS or error.reply.get("killed"):
                raise
            reason = f"{request.snapshot} can't be restored: {error.reply['error']}"
            raise Refused({"error": reason, "field": "snapshot_id"}) from error
        sandbox.start_timeout.reschedule(asyncio.get_running_loop().time() + request.start_timeout_s)

    async def _start_by_runtime(self, sandbox: Sandbox) -> None:
        sandbox.start_method = "runtime"
        if sandbox.request.uid:
            # Apptainer fails for a user id without an account; the image's own user may have none on the host.
            sandbox.request = replace(sandbox.request, uid=mounts.SANDBOX_UID)
        with sandbox.step("runtime"):
            namespace = await start_by_runtime(self._children, sandbox)
        with sandbox.step("setup inside"), _setup_errors():
            self._record_first_process(sandbox, namespace.init)
            assert sandbox.namespaces
            sandbox.environment = await self._set_up_inside(sandbox.namespaces, sandbox.request)
        sandbox.take_log()

    async def _set_up_inside(self, namespaces: SandboxNamespaces, request: CreateRequest) -> dict[str, str]:
        """Adjust a sandbox of the runtime to match a direct start; return the variables that the image sets."""
        variables = os.memfd_create("variables", os.MFD_CLOEXEC)
        try:
            await self._launcher.run(requests.prepare(namespaces, request), [variables])
            return read_environment(f"/proc/self/fd/{variables}")
        finally:
            os.close(variables)

    def _record_first_process(self, sandbox: Sandbox, pid: int) -> None:
        process = ProcDirectory(pid)
        namespace = state_dir.PidNamespace.of(pid)
        if sandbox.pid_namespace not in (namespace, None):
            raise OSError(f"process {pid} has ended")
        if namespace.number == os.stat("/proc/self/ns/pid").st_ino:
            raise OSError(f"process {pid} is in the supervisor's own PID namespace, not a sandbox's")
        sandbox.pid_namespace = namespace
        namespace.record(sandbox.folder)
        spaces = unshared_namespaces(process)
        added = frozenset(sandbox.request.capabilities)
        rooted = sandbox.start_method == "direct"
        sandbox.namespaces = SandboxNamespaces(
            process, sandbox.request.uid, sandbox.request.limits, spaces, is_pivoted=rooted, capabilities=added
        )


@contextlib.contextmanager
def _setup_errors() -> Iterator[None]:
    try:
        yield
    except (Refused, OSError) as error:
        raise Refused({"error": f"the sandbox can't be set up: {failure(error)['error']}"}) from error


def _send_image(sandbox: Sandbox, prepared: PreparedImage, owners: int | None) -> None:
    """Send ``go`` to the first process; as machine root, with the image from :func:`idmapped_image`."""
    assert sandbox.channel
    assert sandbox.starter
    image = idmapped_image(prepared, sandbox.starter.pid, owners)
    try:
        socket.send_fds(sandbox.channel, [b"go"], [] if image is None else [image])
    finally:
        if image is not None:
            os.close(image)


async def _wait_ready(sandbox: Sandbox, first: Child) -> None:
    """Wait until the first process has sent ``ready``, and has closed its channel by executing the idle program."""
    assert sandbox.channel
    message: Message = {}
    while "error" not in message:
        await ready(sandbox.channel)
        try:
            message, _files = requests.receive_reply(sandbox.channel)
        except PeerGone:
            if "ready" in message:
                return
            raise await _first_process_error(first) from None
    raise Refused({"error": "the sandbox can't be made", "log": message["error"]})


async def _first_process_error(first: Child) -> Refused:
    code = await first.wait()
    return Refused({"error": f"the sandbox's first process ended with {code}", "killed": code == -signal.SIGKILL})


MAX_PREPARED_IMAGES = 256
"""Prepared images in the cache, each with two open descriptors."""


class PreparedImages:
    """LRU cache of prepared images."""

    def __init__(self, folder: Path, children: Children, launcher: Launcher) -> None:
        self._folder = folder
        self._children = children
        self._launcher = launcher
        self._made: dict[str, PreparedImage] = {}
        """By ``image_identity``, the most recently used last."""
        self._making: dict[str, asyncio.Task[PreparedImage]] = {}

    async def get(self, request: CreateRequest) -> PreparedImage:
        """Return the prepared image of a request's image, which is prepared unless it is in the cache.

        Raises:
            Refused: the image cannot be prepared; the reply has the reason.
        """
        key = request.image_identity
        if prepared := self._made.pop(key, None):
            self._made[key] = prepared
            return prepared
        if key not in self._making:
            self._making[key] = spawn_task(self._make(key, request), expected=Refused)
            self._making[key].add_done_callback(lambda _task: self._making.pop(key))
        return await asyncio.shield(self._making[key])

    async def _make(self, key: str, request: CreateRequest) -> PreparedImage:
        environment = await self._script_variables(request) if request.scripted else {}
        made = from_reply(environment, *await self._children.run(partial(prepare_image, request.image)))
        self._made[key] = made
        if len(self._made) > MAX_PREPARED_IMAGES:
            del self._made[next(iter(self._made))]
        return made

    async def _script_variables(self, request: CreateRequest) -> dict[str, str]:
        """Return the variables that the image's scripts set, by starting the image once with the container runtime,
        which evaluates the scripts. ``/proc/PID/environ`` of the first process, a waiting shell, has the variables."""
        folder = self._folder / f"m-{secrets.token_hex(6)}"
        isolated = replace(request, uid=0, network=NONE, binds=[])
        async with throwaway_sandbox(folder, isolated, self._launcher) as sandbox:
            namespace = await start_by_runtime(self._children, sandbox)
            environment = f"/proc/{namespace.init}/environ"
            # In a forked child, since the process can make the text very large.
            return (await self._children.run(lambda: (read_environment(environment), [])))[0]


@contextlib.asynccontextmanager
async def throwaway_sandbox(folder: Path, request: CreateRequest, launcher: Launcher) -> AsyncIterator[Sandbox]:
    """Yield a sandbox that the block starts, and that ends with the block: its untrusted processes are killed.

    Raises:
        Refused: the block takes longer than ``start_timeout_s``.
    """
    sandbox = Sandbox(folder.name, folder, request, [], [])
    try:
        async with asyncio.timeout(request.start_timeout_s):
            make_folder(folder, request)
            make_overlay(sandbox)
            yield sandbox
    except TimeoutError:
        raise Refused({"error": f"{request.image} was not started within {request.start_timeout_s:g} s"}) from None
    finally:
        with log_exceptions():
            await run_uncancellable(_end_throwaway(sandbox, launcher))


async def _end_throwaway(sandbox: Sandbox, launcher: Launcher) -> None:
    if sandbox.channel:
        drop(sandbox.channel)
    find_pid_namespace(sandbox)
    async with asyncio.timeout(STUCK_S):
        while sandbox.pid_namespace and sandbox.pid_namespace.alive:  # no event reports the end of a non-child
            sandbox.pid_namespace.kill()
            await asyncio.sleep(state_dir.POLL_S)
    if sandbox.starter:
        sandbox.starter.kill()
        await sandbox.starter.wait()
    sandbox.take_log()
    await launcher.run(requests.erase(sandbox.folder, None))


def make_folder(path: Path, request: CreateRequest) -> None:
    """Create a folder that belongs to the sandbox's user on the host, with mode 0700."""
    path.mkdir(mode=0o700)
    if is_machine_root():
        os.chown(path, request.host_uid, request.host_gid)


def make_overlay(sandbox: Sandbox) -> None:
    overlay = sandbox.folder / "overlay"
    for path in (overlay, overlay / "upper", overlay / "work"):
        make_folder(path, sandbox.request)
    (overlay / "upper").chmod(0o755)


def open_channel(sandbox: Sandbox, kind: int) -> socket.socket:
    """Create the sandbox's channel, a socket of type ``kind``, closing an earlier one; return the other end."""
    if sandbox.channel:
        drop(sandbox.channel)
    sandbox.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
    sandbox.channel.setblocking(False)
    return theirs


async def start_by_runtime(children: Children, sandbox: Sandbox) -> state_dir.PidNamespace:
    """Start a sandbox by the container runtime, and wait until its first process reports; return its PID namespace.

    After a failure or cancellation, the caller ends the sandbox's processes.

    Raises:
        Refused: the runtime does not start the image; the reply has the runtime's output.
    """
    with open_channel(sandbox, socket.SOCK_STREAM) as theirs:
        sandbox.log = launch.create_log()
        command = runtime_command(sandbox.request, sandbox.folder)
        uncovered = mounts.namespace_without_overmounts()
        program = partial(become_runtime, sandbox.request, command, sandbox.folder, theirs, sandbox.log, uncovered)
        starter = sandbox.starter = children.fork(program, [theirs.fileno(), sandbox.log, *uncovered], sandbox.group)
    state_dir.record_starter(sandbox.folder, starter.pid)
    # Cleanup needs the PID namespace, so it is recorded before untrusted programs report, which they may never do.
    while starter.alive and not find_pid_namespace(sandbox):  # noqa: ASYNC110  # no event reports the namespace
        await asyncio.sleep(state_dir.POLL_S)
    assert sandbox.channel
    await ready(sandbox.channel, unless=starter.wait())
    if sandbox.pid_namespace is None or not starter.alive or not sandbox.channel.recv(64):
        code = await starter.wait()
        raise Refused({"error": f"the runtime ended with {code}", "log": sandbox.take_log()})
    return sandbox.pid_namespace


def find_pid_namespace(sandbox: Sandbox) -> bool:
    """Record the PID namespace that the runtime has created, if there is one; return whether one is recorded."""
    starter = sandbox.starter if sandbox.start_method == "runtime" else None
    if starter and starter.alive and sandbox.pid_namespace is None:
        sandbox.pid_namespace = state_dir.PidNamespace.below(starter.pid)
        if sandbox.pid_namespace:
            sandbox.pid_namespace.record(sandbox.folder)
    return sandbox.pid_namespace is not None
