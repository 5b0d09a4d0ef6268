# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One sandbox: a rootless Apptainer container in which commands are run and files exchanged.

The container is one ``exec`` of the runtime whose only process waits. Whatever is to run joins it from outside, by way
of the supervisor, so the image needs ``/bin/sh`` and nothing else, no port is open, and a command costs milliseconds.

Safe by default: no network, namespaces of its own for users, processes, IPC and mounts, nothing of the host's file
system but what is bound, nothing of the host's environment, writes in an overlay that goes with the sandbox. Root
inside is an ordinary user outside: the caller, or where the caller is root, a user id that nobody has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox import transfer
from nemo_gym_prorl.sandbox.fields import Bounds, Program, SandboxPath, checked
from nemo_gym_prorl.sandbox.images.rootfs import UNPACK_COMMAND
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime
from nemo_gym_prorl.sandbox.sessions.commands import (
    DEATH_S,
    DEFAULT_EXEC_TIMEOUT_S,
    OUTPUT_LIMIT,
    Completed,
    complete,
    shell_command,
)
from nemo_gym_prorl.sandbox.spec import ContainerSpec, create_request
from nemo_gym_prorl.sandbox.supervisor.client import Link, Process
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxBroken, SandboxExhausted, SandboxLost, SandboxRefused
from nemo_gym_prorl.sandbox.supervisor.messages import (
    CheckRequest,
    DestroyRequest,
    PauseRequest,
    Request,
    ResumeRequest,
    SignalRequest,
    SpawnRequest,
    StartReply,
)
from nemo_gym_prorl.sandbox.transfer import FILE_LIMIT


if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.base import SandboxHandle


__all__ = ["DEFAULT_EXEC_TIMEOUT_S", "OUTPUT_LIMIT", "Completed", "Container", "ContainerSpec"]

LOGGER = logging.getLogger(__name__)

LITTLE_ROOM = 16 << 20
"""With fewer bytes free than that a disk counts as full: what failed in a sandbox then may have failed for that."""

NO_ROOM = "the disk that sandboxes are kept on is full; make room where PRORL_STATE is"

KILLED = 128 + signal.SIGKILL


class Container:
    """A live sandbox. Made by :meth:`start`, ended by :meth:`close`, which must be called, or with ``async with``."""

    def __init__(self, name: str, spec: ContainerSpec, link: Link, host_id: int) -> None:
        self.name = name
        self._host_id = host_id
        self.spec = spec
        self.image = spec.image
        """As it was named, wherever it was started from."""
        self.notes: list[str] = []
        """Limits that the sandbox ran into, as told by the supervisor."""
        self.start_method: Literal["direct", "runtime"] = "runtime"
        """How it was made."""
        self.alive = True
        self._fault: AgentError | None = None
        """Set if what ran in it has ended it."""
        self.paused = False
        self.worked: set[str] = set()
        """Programs that have served as sessions in it."""
        self.environment: dict[str, str] = {}
        self.workdir = "/root" if spec.root else "/tmp"
        self.fallback_reason = ""
        """Why it was not made directly, which would be faster."""
        self._on_end: list[Callable[[], None]] = []
        self._link = link
        link.watch(name, self._on_event)

    @classmethod
    async def start(
        cls,
        spec: ContainerSpec,
        runtime: Runtime | None = None,
        held: Sequence[int] = (),
        snapshot: Path | None = None,
    ) -> Container:
        """Start a sandbox; some 20 ms directly, 90 by the runtime. Files that are ``held`` stay open
        until it is gone. With a ``snapshot`` it begins with the files of another one of the same image.

        Raises:
            CallerError: the specification is wrong; names the field.
            InfrastructureError: it does not start; the message says what the runtime said and how to mend it.
        """
        if runtime is None:
            runtime = await asyncio.to_thread(require_runtime)
        name = f"b-{secrets.token_hex(6)}"
        request, defaults = await asyncio.to_thread(create_request, name, spec, runtime)
        link = await Link.get()
        container = cls(name, spec, link, request.host_uid)
        try:
            answer, _files = await link.ask(replace(request, snapshot=str(snapshot or "")), held)
        except SandboxRefused as error:
            link.watch(name, None)
            raise _start_error(error, spec, runtime) from error
        except BaseException:
            await container.close()
            raise
        try:
            reply = StartReply(**answer)
            LOGGER.debug("sandbox %s is up: %s", name, reply.steps)
            rlimits.warn_weak_limits_once(frozenset(reply.controllers), in_memory=reply.in_memory)
            container.start_method, container.fallback_reason = reply.start_method, reply.fallback_reason
            rlimits.warn_slow_start_once(reply.fallback_reason)
            container.environment = {**defaults.environment(reply.environment, root=spec.root), **spec.env}
            await container.configure({}, spec.workdir or (defaults.config.workdir if defaults.config else ""))
        except BaseException:
            await container.close()
            raise
        return container

    async def configure(self, env: Mapping[str, str], workdir: str | None) -> None:
        """Set variables for all commands, and where they start; the folder is made.

        Raises:
            CallerError: the folder can't be made.
        """
        self.environment = {**self.environment, **env}
        if workdir:
            checked(workdir, SandboxPath, "workdir")
            self.workdir = workdir
            if workdir != "/":
                made = await self.execute(["mkdir", "-p", "--", workdir], cwd="/", timeout_s=30.0)
                if made.exit_code:
                    raise CallerError(f"can't be made in the sandbox: {made.stderr.strip()}", field="workdir")

    @property
    def folder(self) -> Path:
        """The host's folder of the sandbox's files. Contents are untrusted: the sandbox controls them."""
        return self._link.folder / self.name

    def describe(self) -> dict[str, Any]:
        """What :meth:`attach` needs, as JSON."""
        spec = {**asdict(self.spec), "image": str(self.spec.image)}
        return {
            "sandbox_id": self.name,
            "supervisor": str(self._link.folder),
            "host_id": self._host_id,
            "environment": self.environment,
            "workdir": self.workdir,
            "image": str(self.image),
            "spec": spec,
        }

    @classmethod
    async def attach(cls, description: Mapping[str, Any]) -> Container:
        """A sandbox that another process of this user on this machine started, by what its :meth:`describe` gave.

        Raises:
            SandboxLost: it has ended.
        """
        folder = Path(description["supervisor"])
        if not await asyncio.to_thread((folder / "socket").exists):
            raise SandboxLost(f"sandbox {description['sandbox_id']} has ended, and its owner too")
        link = await Link.to(folder)
        spec = ContainerSpec(**{**description["spec"], "image": Path(description["spec"]["image"])})
        container = cls(description["sandbox_id"], spec, link, description["host_id"])
        container.environment = dict(description["environment"])
        container.workdir = description["workdir"]
        container.image = Path(description["image"])
        await link.ask(CheckRequest(container.name))
        return container

    async def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_EXEC_TIMEOUT_S,
        output_limit: int = OUTPUT_LIMIT,
        user: str | int | None = None,
    ) -> Completed:
        """Run a command with ``/bin/sh``, without a terminal and with empty input, and wait for its end.

        What it leaves running in the background goes on running, but its output is no longer read.

        Raises:
            CallerError: there is a NUL in the command, ``cwd`` is not a folder, or the sandbox has no such ``user``.
            SandboxLost: the sandbox ended before the command did.
        """
        with shell_command(command) as (argv, files):
            return await self.execute(
                argv,
                cwd=cwd,
                env=env,
                timeout_s=timeout_s,
                output_limit=output_limit,
                user=user,
                files=[self.give(descriptor) for descriptor in files],
            )

    async def execute(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_EXEC_TIMEOUT_S,
        output_limit: int = OUTPUT_LIMIT,
        files: Sequence[int] = (),
        user: str | int | None = None,
    ) -> Completed:
        """As :meth:`run`, for a program and its arguments. ``files`` become its open files 3, 4, ..."""
        Bounds(timeout_s=timeout_s, output_limit=output_limit)

        async def spawn(streams: Sequence[int]) -> Process:
            null, *outputs = streams
            return await self.spawn(argv, [null, *map(self.give, outputs), *files], cwd=cwd, env=env, user=user)

        done = await complete(spawn, self.kill, timeout_s, output_limit)
        if self._fault:
            # It did not end by itself.
            raise self._fault
        if done.exit_code == KILLED and not done.timed_out:
            # Nor did this one, if it went with its sandbox.
            await self.check_living()
        return done

    async def spawn(
        self,
        argv: Sequence[str],
        files: Sequence[int] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
        echo: bool = False,
        user: str | int | None = None,
    ) -> Process:
        """Start a program in a session of its own.

        Args:
            argv: the program, looked up on the sandbox's PATH, and its arguments.
            files: its open files from 0 on; with a terminal, which takes the first three, from 3 on.
            cwd: where it starts; the sandbox's working folder if not given.
            env: more variables.
            terminal: rows and columns of a new terminal.
            echo: have the terminal behave as for a person: echo what is typed, end lines with CR and LF.
            user: who runs it, by name or number in the sandbox's ``/etc/passwd``; the sandbox's own user if not given.

        Raises:
            CallerError: there is no such program, folder or user.
        """
        program = Program(argv=argv, cwd=cwd, env=env or {}, user=user)
        request = SpawnRequest(
            sandbox=self.name,
            spawn=self._link.new_name(),
            argv=list(program.argv),
            env={**self.environment, **program.env},
            cwd=program.cwd or self.workdir,
            user=program.user,
            tty=list(terminal) if terminal else None,
            echo=echo,
        )
        self.check_alive()
        try:
            return await self._link.spawn(request, files)
        except SandboxLost:
            self.check_alive()
            raise
        except SandboxRefused as error:
            if error.number:
                raise CallerError(error.reason, field="cwd" if "working folder" in error.reason else None) from error
            raise

    def give(self, descriptor: int) -> int:
        """Let the sandbox's user open a pipe or memory file of ours by its name under ``/dev/fd``, as shells do."""
        if is_machine_root():
            os.fchown(descriptor, self._host_id, self._host_id)
        if self.spec.users:
            os.fchmod(descriptor, 0o666)
        return descriptor

    async def signal(self, process: Process, number: int) -> None:
        """Send a signal to the process group of a spawned process; nothing happens if it has ended."""
        if not process.ended.done():
            # A process that went with its supervisor has ended; whoever waits for its end is told so.
            with contextlib.suppress(SandboxLost):
                await self._link.ask(SignalRequest(process.name, int(number)))

    def kill(self, process: Process) -> None:
        """End a spawned process, with its group, wherever it is on its way; waits for nothing."""
        self._link.kill(process.name)

    async def end(self, process: Process) -> None:
        """End a spawned process, with its group, and wait until it has ended; not for long, since who traces it inside
        keeps its end from being told."""
        if self.alive and not process.ended.done():
            await self.signal(process, signal.SIGKILL)
            await asyncio.wait([process.ended], timeout=DEATH_S)

    async def upload(self, source: Path, target: str, *, limit: int = FILE_LIMIT) -> None:
        """Copy a file of the host into the sandbox; see :func:`.transfer.upload`."""
        await transfer.upload(self, source, target, limit)

    async def download(self, source: str, target: Path, *, limit: int = FILE_LIMIT) -> None:
        """Copy a file of the sandbox to the host; see :func:`.transfer.download`."""
        await transfer.download(self, source, target, limit)

    async def ask(self, request: Request, files: Sequence[int] = ()) -> tuple[Message, list[int]]:
        """Ask the supervisor something about this sandbox; the files of its answer are the caller's to close.

        Raises:
            SandboxRefused: it could not be done.
            SandboxLost: the sandbox has ended.
        """
        self.check_alive()
        try:
            return await self._link.ask(request, files)
        except SandboxLost:
            # Why was told before.
            self.check_alive()
            raise

    async def check(self) -> None:
        """Whether it lives, and is not about to end.

        Raises:
            AgentError: what ran in it has ended it.
            SandboxLost: it ended otherwise; or what was ended in it was so for want of the machine's memory; or the
                machine's disk is full.
        """
        await self.ask(CheckRequest(self.name, memory=True))
        if not await self.has_room():
            raise SandboxLost(f"sandbox {self.name}: {NO_ROOM}")

    async def has_room(self) -> bool:
        """Whether there is any left on the disk that all sandboxes are kept on."""
        try:
            disk = await asyncio.to_thread(os.statvfs, self._link.folder)
        except OSError:
            return True  # its supervisor is gone, which other calls tell
        return disk.f_bavail * disk.f_frsize >= LITTLE_ROOM

    async def check_living(self) -> None:
        """As :meth:`check`, whatever was ended in it: for a program that was killed, perhaps with its sandbox.

        Raises:
            AgentError: what ran in it has ended it.
            SandboxLost: it ended otherwise.
        """
        await self.ask(CheckRequest(self.name))

    async def pause(self) -> None:
        """Stop all that runs inside; commands are refused until :meth:`resume`. It goes on if this is cancelled.

        Raises:
            SandboxRefused: something does not stop.
        """
        try:
            await self.ask(PauseRequest(self.name))
        except asyncio.CancelledError:
            self._link.post(ResumeRequest(self.name))
            self.paused = False
            raise
        self.paused = True

    async def resume(self) -> None:
        """Let everything go on."""
        await self.ask(ResumeRequest(self.name))
        self.paused = False

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the sandbox ends, or is about to be closed."""
        self._on_end.append(callback)

    async def close(self) -> None:
        """End the sandbox. Returns when no process and no file of it is left; harmless when it has ended already.

        Raises:
            InfrastructureError: it does not die; the supervisor goes on trying.
        """
        self._ended()
        self._link.watch(self.name, None)
        try:
            await asyncio.shield(self._link.ask(DestroyRequest(self.name)))
        except SandboxLost:
            # It went with its supervisor.
            return

    async def __aenter__(self) -> Container:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    def _on_event(self, event: Message) -> None:
        if event["event"] == "limit":
            self.notes.append(event["reason"])
            return
        if event.get("resource"):
            self._fault = SandboxExhausted(f"sandbox {self.name} was ended: {event['reason']}", event["resource"])
        elif event.get("inside"):
            self._fault = SandboxBroken(f"sandbox {self.name} was ended from inside")
        self._ended()

    def _ended(self) -> None:
        self.alive = False
        while self._on_end:
            self._on_end.pop()()

    def check_alive(self) -> None:
        """By what was told of it so far.

        Raises:
            AgentError: what ran in it has ended it.
            SandboxLost: it ended otherwise.
        """
        if self._fault:
            raise self._fault
        if not self.alive:
            raise SandboxLost(f"sandbox {self.name} has ended" + "".join(f"; {note}" for note in self.notes))


def container_of(handle: SandboxHandle) -> Container:
    """Return our own object behind Gym's handle.

    Raises:
        CallerError: it is another provider's.
    """
    if not isinstance(handle.raw, Container):
        raise CallerError(f"{handle.sandbox_id} is not a sandbox of this provider", field="handle")
    return handle.raw


KNOWN_CAUSES = {
    "no user namespaces": "'prorl doctor' says what an administrator can do",
    "function not implemented": "sandboxes of root need Linux 5.19; an ordinary user's do not",
    "no space left|disk quota": "make room where PRORL_STATE is, or set it to a folder on another local disk",
    "it can't be prepared": "set PRORL_STATE to a folder of yours on a local disk",
    "squashfuse|squashfs|/dev/fuse": "the image is damaged, or FUSE is not to be had here: build it "
    f"again, or unpack it with '{UNPACK_COMMAND} IMAGE' and name FOLDER",
    "other owners|value too large": "the file system of the image can't show other owners: copy it to a local disk",
    "overlay": "PRORL_STATE must be a folder on a local disk that can carry an overlay (ext4, xfs, tmpfs; not NFS)",
}
"""Fixes by regular expression of what the runtime or the kernel said; the first that matches counts."""


def _start_error(error: SandboxRefused, spec: ContainerSpec, runtime: Runtime) -> InfrastructureError:
    """Return why a sandbox did not start, in the runtime's words, with what to do about the causes that are known."""
    said = "; ".join(line for line in error.log.splitlines() if line.strip())[-800:] or error.reason
    fix = next((f"; {fix}" for sign, fix in KNOWN_CAUSES.items() if re.search(sign, said, re.IGNORECASE)), "")
    kind = error.kind if error.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED else None
    return InfrastructureError(f"{runtime.flavor} could not start a sandbox of {spec.image}: {said}{fix}", kind=kind)
