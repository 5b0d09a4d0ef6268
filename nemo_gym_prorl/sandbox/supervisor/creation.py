# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start a sandbox: directly from its prepared image, or by the container runtime.

Either way, the first process reports on the sandbox's channel, its namespace is noted, and limits are set.
``start: auto`` is decided once for the supervisor, by the first sandbox: directly if that works, else by the runtime.

At most :data:`AT_ONCE` sandboxes start at a time, and as many again of which each is the only one of its image: an
image whose sandboxes start slowly, or never, does not delay those of others.

An image is prepared when a sandbox of it is first asked for; later requests for it wait for that one. An image is
identified by its path and by what changes when it is replaced (``image_identity`` of the request).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_gym_prorl.background import log_exceptions, run_uncancellable, spawn_task
from nemo_gym_prorl.failures import OF_THE_MACHINE
from nemo_gym_prorl.sandbox.isolation import layer_archive, mounts, namespaces
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
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.runtime.launch import become_runtime, read_environment, runtime_command
from nemo_gym_prorl.sandbox.supervisor import signals, state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import Message, PeerGone, close_all, drop, ready
from nemo_gym_prorl.sandbox.supervisor.errors import SHORTAGES, Refused, failure, in_words
from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest
from nemo_gym_prorl.sandbox.supervisor.processes import TRIES, Answer, Child, Children, Launcher, LauncherLost
from nemo_gym_prorl.sandbox.supervisor.sandbox import STUCK_S, Sandbox


AT_ONCE = 2 * (os.cpu_count() or 1)
"""Sandboxes that are created at a time: more would only slow each other, and whoever waits for a command. Beyond them
as many again may be, each the only one of its image."""


class StartLimiter:
    """Limits concurrent sandbox starts, first come, first served."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._having: list[str] = []

    @contextlib.asynccontextmanager
    async def of(self, image: str) -> AsyncIterator[None]:
        """Wait for the turn of a sandbox of that image, which it has within the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((image, turn))
        self._next()
        try:
            await turn
            yield
        finally:
            if (image, turn) in self._waiting:
                self._waiting.remove((image, turn))
            else:
                self._having.remove(image)
            self._next()

    def _next(self) -> None:
        while len(self._having) < 2 * AT_ONCE:
            late = self._having if len(self._having) >= AT_ONCE else []
            found = next((waiting for waiting in self._waiting if waiting[0] not in late), None)
            if found is None:
                return
            self._waiting.remove(found)
            self._having.append(found[0])
            if not found[1].done():
                found[1].set_result(None)


class Creation:
    """Creates the sandboxes of one supervisor.

    Args:
        folder: the supervisor's.
        children: its children.
        groups: where control groups are made, if they can be.
        launcher: what starts first processes.
        held: the prepared images of all sandboxes that are not gone yet.
    """

    def __init__(
        self,
        folder: Path,
        children: Children,
        groups: Path | None,
        launcher: Launcher,
        held: Callable[[], Iterable[PreparedImage | None]],
    ) -> None:
        self._children = children
        self._groups = groups
        self._launcher = launcher
        self._prepared = PreparedImages(folder, children, launcher, held)
        self._direct_works = False
        self._why_not_direct = ""

    async def create(self, sandbox: Sandbox) -> None:
        """Have a sandbox come up. Who is cancelled, or fails, leaves ``starter`` and ``space`` to be ended.

        Raises:
            Refused: it does not; says why.
            OSError: something on disk could not be made.
        """
        order = sandbox.order
        with sandbox.step("folder"):
            make_folder(sandbox.folder, order)
            if self._groups:
                path = self._groups / cgroups.group_name(sandbox.folder)
                state_dir.note_group(sandbox.folder, path)
                sandbox.group = cgroups.Group.make(path)
            await self._lay_out(sandbox)
        if order.start == "runtime" or (order.start == "auto" and self._why_not_direct):
            sandbox.fallback_reason = self._why_not_direct if order.start == "auto" else ""
            await self._by_runtime(sandbox)
        elif order.start == "direct" or self._direct_works:
            await self._directly(sandbox)
        else:
            await self._try_both(sandbox)
        with sandbox.step("limits"), _setting_up():
            sandbox.bound()

    async def _try_both(self, sandbox: Sandbox) -> None:
        """Decide how ``start: auto`` starts sandboxes on this machine: directly, else by the runtime."""
        try:
            await self._directly(sandbox)
            self._direct_works = True
        except (Refused, OSError) as error:
            if _of_the_machine(failure(error)):
                raise
            trouble = error.answer if isinstance(error, Refused) else {"error": in_words(error)}
            sandbox.fallback_reason = str(trouble.get("log") or trouble["error"])
            with sandbox.step("undoing"):
                await self._undo(sandbox)
            await self._by_runtime(sandbox)
            # An image that cannot be started by the runtime either says nothing of the machine.
            self._why_not_direct = sandbox.fallback_reason

    # Directly

    async def _directly(self, sandbox: Sandbox) -> None:
        sandbox.start_method, order = "direct", sandbox.order
        with sandbox.step("direct"):
            prepared = sandbox.prepared = await self._prepared.get(order)
        sandbox.environment = prepared.environment
        answer: Message = {}
        files: list[int] = []
        if action := prerequisites(prepared, order):
            with sandbox.step("ids and binds"):
                answer, files = await self._children.run(action, [prepared.image, prepared.parent_namespace])
        owners = [files.pop(0)] if answer.get("owners") else []
        try:
            with sandbox.step("first process"):
                first = await run_uncancellable(self._start_first(sandbox, prepared, files))
                try:
                    self._note(sandbox, first.pid)
                    _hand_over(sandbox, prepared, owners[0] if owners else None)
                except OSError as error:
                    if first.alive and not signals.is_exiting(first.pid):
                        raise
                    raise await _end_of(first) from error
        finally:
            close_all(owners)
            close_all(files)
        with sandbox.step("its own setup"):
            await _until_ready(sandbox, first)

    async def _start_first(self, sandbox: Sandbox, prepared: PreparedImage, files: list[int]) -> Child:
        """Have its first process started, which waits for the image then."""
        request = make_request(prepared, sandbox.order, str(sandbox.folder))
        parent, *shown = files if sandbox.order.users else [prepared.parent_namespace, *files]
        for left in reversed(range(TRIES)):
            with (
                open_channel(sandbox, socket.SOCK_SEQPACKET) as channel,
                self._children.starting() as adopt,
            ):
                given = [
                    parent,
                    channel.fileno(),
                    self._launcher.program(),
                    *shown,
                    *mounts.namespace_without_overmounts(),
                ]
                try:
                    answer, _files = await self._launcher.run_once(request, given, sandbox.group)
                except LauncherLost:
                    # Of what it may have begun nothing goes on: that channel of the sandbox's is closed.
                    if not left:
                        raise
                else:
                    sandbox.starter = adopt(answer["pid"])
                    return sandbox.starter
        raise AssertionError

    async def _undo(self, sandbox: Sandbox) -> None:
        """Have nothing left of a direct try."""
        if sandbox.starter:
            sandbox.starter.kill()
            await sandbox.starter.wait()
        sandbox.starter = None
        sandbox.place = sandbox.space = None
        (sandbox.folder / state_dir.SPACE_FILE).unlink(missing_ok=True)
        for entry in sandbox.folder.iterdir():
            if entry.is_dir():
                await self._launcher.run(requests.erase(entry, None))
        await self._lay_out(sandbox)

    async def _lay_out(self, sandbox: Sandbox) -> None:
        """Make what is on disk of it: an empty layer, or one that is filled from a snapshot.

        The time in which a sandbox has to come up does not include filling its layer.
        """
        lay_out(sandbox)
        order = sandbox.order
        if not order.snapshot:
            return
        action = partial(layer_archive.unpack, order.snapshot, sandbox.folder / "overlay" / "upper", order)
        sandbox.wanted.reschedule(None)
        try:
            await self._children.run(action)
        except Refused as error:
            if error.answer.get("errno") in OF_THE_MACHINE or error.answer.get("killed"):
                raise
            reason = f"{order.snapshot} can't be restored: {error.answer['error']}"
            raise Refused({"error": reason, "field": "snapshot_id"}) from error
        sandbox.wanted.reschedule(asyncio.get_running_loop().time() + order.start_timeout_s)

    # By the container runtime

    async def _by_runtime(self, sandbox: Sandbox) -> None:
        sandbox.start_method, sandbox.prepared = "runtime", None
        if sandbox.order.uid:
            # Apptainer starts only as a user with an account on the host, which an image's own user need not have.
            sandbox.order = replace(sandbox.order, uid=mounts.SANDBOX_UID)
        with sandbox.step("runtime"):
            space = await start_by_runtime(self._children, sandbox)
        with sandbox.step("setup inside"), _setting_up():
            self._note(sandbox, space.init)
            assert sandbox.place
            sandbox.environment = await self._prepare(sandbox.place, sandbox.order)
        sandbox.take_log()

    async def _prepare(self, place: namespaces.SandboxNamespaces, order: CreateRequest) -> dict[str, str]:
        """Have it made as others are; the variables that its image sets."""
        variables = os.memfd_create("variables", os.MFD_CLOEXEC)
        try:
            await self._launcher.run(requests.prepare(place, order), [variables])
            return read_environment(f"/proc/self/fd/{variables}")
        finally:
            os.close(variables)

    def _note(self, sandbox: Sandbox, pid: int) -> None:
        """Its first process is known."""
        process = namespaces.ProcDirectory(pid)
        space = state_dir.Space.of(pid)
        if sandbox.space not in (space, None):
            raise OSError(f"process {pid} has ended")
        if space.number == os.stat("/proc/self/ns/pid").st_ino:
            raise OSError(f"process {pid} is none of a sandbox's")
        sandbox.space = space
        space.note(sandbox.folder)
        spaces = namespaces.unshared_namespaces(process)
        added = frozenset(sandbox.order.capabilities)
        rooted = sandbox.start_method == "direct"
        sandbox.place = namespaces.SandboxNamespaces(
            process, sandbox.order.uid, sandbox.order.limits, spaces, is_pivoted=rooted, capabilities=added
        )


def _of_the_machine(trouble: Message) -> bool:
    """Whether something was killed, or could not be had for now: that says nothing about the image, from which others
    are made."""
    return bool(trouble.get("killed")) or trouble.get("errno") in SHORTAGES


@contextlib.contextmanager
def _setting_up() -> Iterator[None]:
    """What goes wrong in the block is told as what it is."""
    try:
        yield
    except (Refused, OSError) as error:
        raise Refused({"error": f"it can't be set up: {failure(error)['error']}"}) from error


def _hand_over(sandbox: Sandbox, prepared: PreparedImage, owners: int | None) -> None:
    """Send the first process its word, by root with the image."""
    assert sandbox.channel
    assert sandbox.starter
    image = idmapped_image(prepared, sandbox.starter.pid, owners)
    try:
        socket.send_fds(sandbox.channel, [b"go"], [] if image is None else [image])
    finally:
        if image is not None:
            os.close(image)


async def _until_ready(sandbox: Sandbox, first: Child) -> None:
    """It is up once its channel is closed, if nothing but the word was said."""
    assert sandbox.channel
    said: Message = {}
    while "error" not in said:
        await ready(sandbox.channel)
        try:
            said, _files = requests.receive_reply(sandbox.channel)
        except PeerGone:
            if "ready" in said:
                return
            raise await _end_of(first) from None
    raise Refused({"error": "it can't be made", "log": said["error"]})


async def _end_of(first: Child) -> Refused:
    """How a first process ended that never was ready, as it is told."""
    code = await first.wait()
    return Refused({"error": f"its first process ended with {code}", "killed": code == -signal.SIGKILL})


MOST_PREPARED = 256
"""Prepared images that are kept. The least recently used one goes first, of those of which no sandbox is left."""


class PreparedImages:
    """See the module.

    Args:
        folder: the owner's.
        children: its children.
        launcher: what erases for it.
        held: those from which sandboxes were made that are not gone yet.
    """

    def __init__(
        self, folder: Path, children: Children, launcher: Launcher, held: Callable[[], Iterable[PreparedImage | None]]
    ) -> None:
        self._folder = folder
        self._children = children
        self._launcher = launcher
        self._held = held
        self._made: dict[str, PreparedImage] = {}
        """The last in order is the last used."""
        self._making: dict[str, asyncio.Task[PreparedImage]] = {}

    async def get(self, order: CreateRequest) -> PreparedImage:
        """The prepared image for an order.

        Raises:
            Refused: there is none; says why.
        """
        key = order.image_identity
        if prepared := self._made.pop(key, None):
            self._made[key] = prepared
            return prepared
        if key not in self._making:
            self._making[key] = spawn_task(self._make(key, order), expected=Refused)
            self._making[key].add_done_callback(lambda _task: self._making.pop(key))
        return await asyncio.shield(self._making[key])

    async def _make(self, key: str, order: CreateRequest) -> PreparedImage:
        environment = await self._variables(order) if order.scripted else {}
        made = from_reply(environment, *await self._children.run(partial(prepare_image, order.image)))
        self._made[key] = made
        self._forget_oldest()
        return made

    async def _variables(self, order: CreateRequest) -> dict[str, str]:
        """What scripts of the image's own set, as only its runtime knows.

        It is started once, with no network, no file of the host, and nothing in it but the waiting shell, whose
        variables are read.
        """
        folder = self._folder / f"m-{secrets.token_hex(6)}"
        alone = replace(order, uid=0, network=False, binds=[])
        asked = Sandbox(folder.name, folder, alone, [], [])
        try:
            async with asyncio.timeout(order.start_timeout_s):
                make_folder(folder, order)
                lay_out(asked)
                space = await start_by_runtime(self._children, asked)
                return (await self._children.run(partial(_read, space.init)))[0]
        except TimeoutError:
            raise Refused(
                {"error": f"the runtime did not start the image within {order.start_timeout_s:g} s"}
            ) from None
        finally:
            with log_exceptions():
                await run_uncancellable(self._end(asked))

    async def _end(self, asked: Sandbox) -> None:
        """An honest shell ends with its socket, and the runtime with that; neither is asked whether it would."""
        if asked.channel:
            drop(asked.channel)
        look_for_first(asked)
        async with asyncio.timeout(STUCK_S):
            while asked.space and asked.space.alive:  # only the kernel knows
                asked.space.kill()
                await asyncio.sleep(state_dir.LOOK_S)
        if asked.starter:
            asked.starter.kill()
            await asked.starter.wait()
        asked.take_log()
        await self._launcher.run(requests.erase(asked.folder, None))

    def _forget_oldest(self) -> None:
        held = {id(prepared) for prepared in self._held()}
        for key, prepared in list(self._made.items())[:-MOST_PREPARED]:
            if id(prepared) not in held:
                os.close(prepared.image)
                os.close(prepared.parent_namespace)
                del self._made[key]


def _read(first: int) -> Answer:
    """In a child forked for it: the shell may say of any part of its memory that they are there."""
    return read_environment(f"/proc/{first}/environ"), []


def make_folder(path: Path, order: CreateRequest) -> None:
    """Make a folder of a sandbox's user."""
    path.mkdir(mode=0o700)
    if is_machine_root():
        os.chown(path, order.host_uid, order.host_gid)


def lay_out(sandbox: Sandbox) -> None:
    """Make what is on disk of it."""
    overlay = sandbox.folder / "overlay"
    for path in (overlay, overlay / "upper", overlay / "work"):
        make_folder(path, sandbox.order)
    (overlay / "upper").chmod(0o755)


def open_channel(sandbox: Sandbox, kind: int) -> socket.socket:
    """Make its channel, in place of one that there may be; returns the first process's end."""
    if sandbox.channel:
        drop(sandbox.channel)
    sandbox.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
    sandbox.channel.setblocking(False)
    return theirs


async def start_by_runtime(children: Children, sandbox: Sandbox) -> state_dir.Space:
    """Have the runtime start it; who is cancelled, or fails, leaves ``starter`` and ``space`` to be ended.

    Raises:
        Refused: it does not; says why.
    """
    with open_channel(sandbox, socket.SOCK_STREAM) as theirs:
        sandbox.log = launch.create_log()
        command = runtime_command(sandbox.order, sandbox.folder)
        uncovered = mounts.namespace_without_overmounts()
        program = partial(become_runtime, sandbox.order, command, sandbox.folder, theirs, sandbox.log, uncovered)
        starter = sandbox.starter = children.fork(program, [theirs.fileno(), sandbox.log, *uncovered], sandbox.group)
    state_dir.note_starter(sandbox.folder, starter.pid)
    # What the image runs may never say a word.
    while starter.alive and not look_for_first(sandbox):  # noqa: ASYNC110  # only the kernel knows
        await asyncio.sleep(state_dir.LOOK_S)
    assert sandbox.channel
    await ready(sandbox.channel, unless=starter.wait())
    if sandbox.space is None or not starter.alive or not sandbox.channel.recv(64):
        code = await starter.wait()
        raise Refused({"error": f"the runtime ended with {code}", "log": sandbox.take_log()})
    return sandbox.space


def look_for_first(sandbox: Sandbox) -> bool:
    """Note the namespace that the runtime has made down, if it has."""
    if sandbox.start_method == "runtime" and sandbox.starter and sandbox.starter.alive and sandbox.space is None:
        sandbox.space = state_dir.Space.below(sandbox.starter.pid)
        if sandbox.space:
            sandbox.space.note(sandbox.folder)
    return sandbox.space is not None
