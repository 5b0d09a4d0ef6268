# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox: a rootless container that runs commands and exchanges files.

The container's only permanent process just waits. The supervisor, on the host, makes commands join the container's
namespaces, so an image needs only ``/bin/sh``, and no port is open.

Safe by default: a sandbox has no network, and its own user, PID, IPC and mount namespaces. A sandbox sees only bound
files of the host, and no environment variables of the host. Writes go to an overlay that is removed with the sandbox.
Root in the sandbox is an unprivileged user on the host: the caller, or an unassigned user id if the caller is root.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError
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
from nemo_gym_prorl.sandbox.strict_types import Argv, OutputBytes, SandboxPath, Timeout, User, Variables, checked
from nemo_gym_prorl.sandbox.supervisor.client import SandboxProcess, SupervisorConnection
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.protocol import (
    CheckRequest,
    DestroyRequest,
    Request,
    SandboxBroken,
    SandboxExhausted,
    SandboxLost,
    SandboxRefused,
    SignalRequest,
    SpawnRequest,
    StartReply,
)
from nemo_gym_prorl.sandbox.transfer import FileTransfer


if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.base import SandboxHandle


__all__ = ["DEFAULT_EXEC_TIMEOUT_S", "OUTPUT_LIMIT", "Completed", "Container", "ContainerSpec"]

LOGGER = logging.getLogger(__name__)

MIN_FREE_BYTES = 16 << 20
"""Free bytes below which the host's disk counts as full; failures in sandboxes are then not the agent's."""

DISK_FULL = "the disk that sandboxes are kept on is full; make room where PRORL_STATE is"

SIGKILL_EXIT_CODE = 128 + signal.SIGKILL

_Cwd, _User = SandboxPath | None, User | None


class Container:
    """A running sandbox, created by :meth:`start`. The caller must :meth:`close` the sandbox, or use ``async with``.

    Attributes:
        image: path of the image as the caller named it; ``spec.image`` may be its unpacked copy.
        files: copies files into and out of the sandbox.
        notes: limits that the sandbox has reached, as text for people.
        fallback_reason: why a direct start was not possible; empty if it was possible or not tried.
        alive: ``False`` once the sandbox has ended or is being closed.
        environment: environment variables of commands.
        workdir: working directory of commands.
        sessions_started: names of the programs, such as ``bash``, that have started a persistent session.
        published: working folder and user that the image's registry configuration names; each empty if not named.
    """

    def __init__(self, name: str, spec: ContainerSpec, supervisor: SupervisorConnection, host_id: int) -> None:
        self.name = name
        self._host_id = host_id
        self.spec = spec
        self.image = spec.image
        self.files = FileTransfer(name, spec.disk_mib, self.ask)
        self.notes: list[str] = []
        self.start_method: Literal["direct", "runtime"] = "runtime"
        self.fallback_reason = ""
        self.alive = True
        self._fault: AgentError | None = None
        """Error that calls raise after the sandbox's own programs have ended the sandbox; ``None`` before."""
        self.sessions_started: set[str] = set()
        self.environment: dict[str, str] = {}
        self.workdir = "/root" if spec.root else "/tmp"
        self.published = ("", "")
        self._supervisor = supervisor
        supervisor.watch(name, self._on_event)

    @classmethod
    async def start(
        cls,
        spec: ContainerSpec,
        runtime: Runtime | None = None,
        held_files: Sequence[int] = (),
        snapshot: Path | None = None,
    ) -> Container:
        """Start a sandbox.

        Args:
            runtime: the container runtime; ``None`` looks it up.
            held_files: descriptors, such as an image's lock, that the supervisor keeps open until the sandbox is gone.
            snapshot: archive of the writable layer of another sandbox of the image; ``None`` for an empty layer.

        Raises:
            CallerError: the specification is wrong; names the field.
            InfrastructureError: the sandbox does not start; the message has the runtime's output and the fix.
        """
        if runtime is None:
            runtime = await asyncio.to_thread(require_runtime)
        name = f"b-{secrets.token_hex(6)}"
        request, defaults = await asyncio.to_thread(create_request, name, spec, runtime, snapshot)
        supervisor = await SupervisorConnection.get()
        container = cls(name, spec, supervisor, request.host_uid)
        try:
            message, _files = await supervisor.ask(request, held_files)
        except SandboxRefused as error:
            supervisor.watch(name, None)
            raise _start_error(error, spec) from error
        except BaseException:
            await container.close()
            raise
        try:
            reply = StartReply(**message)
            LOGGER.debug("sandbox %s is up: %s", name, reply.steps)
            rlimits.warn_weak_limits_once(frozenset(reply.controllers), in_memory=reply.in_memory)
            container.start_method, container.fallback_reason = reply.start_method, reply.fallback_reason
            rlimits.warn_slow_start_once(reply.fallback_reason)
            container.environment = {**defaults.environment(reply.environment, spec), **spec.env}
            container.published = (own.workdir, own.user) if (own := defaults.config) else ("", "")
            if workdir := spec.workdir or container.published[0]:
                await container._enter(workdir)
        except BaseException:
            await container.close()
            raise
        return container

    async def _enter(self, workdir: str) -> None:
        """Make a folder the working directory of commands, and create it if missing."""
        self.workdir = workdir
        if workdir != "/":
            made = await self.execute(["mkdir", "-p", "--", workdir], cwd="/", timeout_s=30.0)
            if made.exit_code:
                raise CallerError(f"can't be made in the sandbox: {made.stderr.strip()}", field="workdir")

    @property
    def folder(self) -> Path:
        """Host folder with the sandbox's files. Contents are untrusted: the sandbox controls them."""
        return self._supervisor.folder / self.name

    def describe(self) -> dict[str, Any]:
        """Return a description of the sandbox for :meth:`attach`, as a JSON object."""
        return {
            "sandbox_id": self.name,
            "supervisor": str(self._supervisor.folder),
            "host_id": self._host_id,
            "environment": self.environment,
            "workdir": self.workdir,
            "image": str(self.image),
            "spec": {**asdict(self.spec), "image": str(self.spec.image)},
        }

    @classmethod
    async def attach(cls, description: Mapping[str, Any]) -> Container:
        """Connect to a sandbox of another process of the same user and machine, by what its :meth:`describe` returned.

        Raises:
            SandboxLost: the sandbox has ended.
        """
        folder = Path(description["supervisor"])
        if not await asyncio.to_thread((folder / "socket").exists):
            raise SandboxLost(f"sandbox {description['sandbox_id']} has ended, and its owner too")
        spec = ContainerSpec(**{**description["spec"], "image": Path(description["spec"]["image"])})
        supervisor = await SupervisorConnection.to(folder)
        container = cls(description["sandbox_id"], spec, supervisor, description["host_id"])
        container.environment, container.workdir = dict(description["environment"]), description["workdir"]
        container.image = Path(description["image"])
        await supervisor.ask(CheckRequest(container.name))
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

        Background processes of the command keep running, but their further output is discarded.

        Args:
            cwd, env, user: as for :meth:`spawn`.
            timeout_s: seconds until the command's process group is killed; ``None`` for no limit.
            output_limit: bytes kept of each output stream.

        Raises:
            CallerError: the command has a NUL, ``cwd`` is not a folder, or the sandbox has no such ``user``.
            AgentError: programs in the sandbox have ended the sandbox.
            SandboxLost: the sandbox ended otherwise before the command did.
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
        """Run a program with arguments, as :meth:`run`; ``files`` become the program's descriptors 3, 4, ..."""
        checked(timeout_s, Timeout, "timeout_s")
        checked(output_limit, OutputBytes, "output_limit")

        async def spawn(streams: Sequence[int]) -> SandboxProcess:
            null, *outputs = streams
            return await self.spawn(argv, [null, *map(self.give, outputs), *files], cwd=cwd, env=env, user=user)

        done = await complete(spawn, self.kill, timeout_s, output_limit)
        if self._fault:
            raise self._fault
        if done.exit_code == SIGKILL_EXIT_CODE and not done.timed_out:
            # The SIGKILL may be part of the sandbox's end, of which the supervisor's event arrives later.
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
        user: str | int | None = None,
    ) -> SandboxProcess:
        """Start a program in a POSIX session of its own.

        Args:
            argv: the program, looked up on the sandbox's PATH, and its arguments.
            files: become the program's descriptors 0, 1, ...; with a terminal 3, 4, ..., after the terminal's 0 to 2.
            cwd: working directory; ``None`` for the sandbox's.
            env: additional environment variables.
            terminal: rows and columns of a new terminal; ``None`` for no terminal.
            user: name or number of a user in the sandbox's ``/etc/passwd``; ``None`` for the sandbox's own user.

        Raises:
            CallerError: the program, folder or user does not exist.
            AgentError: programs in the sandbox have ended the sandbox.
            SandboxLost: the sandbox ended otherwise.
        """
        for value, kind, field in (
            (argv, Argv, "argv"),
            (cwd, _Cwd, "cwd"),
            (env or {}, Variables, "env"),
            (user, _User, "user"),
        ):
            checked(value, kind, field)
        request = SpawnRequest(
            sandbox=self.name,
            spawn=self._supervisor.new_name(),
            argv=list(argv),
            env={**self.environment, **(env or {})},
            cwd=cwd or self.workdir,
            user=user,
            tty=list(terminal) if terminal else None,
        )
        self.check_alive()
        try:
            return await self._supervisor.spawn(request, files)
        except SandboxLost:
            self.check_alive()
            raise
        except SandboxRefused as error:
            if error.number:
                raise CallerError(error.reason, field="cwd" if "working folder" in error.reason else None) from error
            raise

    def give(self, descriptor: int) -> int:
        """Let the sandbox's user open a pipe or memory file by its name under ``/dev/fd``; return the descriptor."""
        if is_machine_root():
            os.fchown(descriptor, self._host_id, self._host_id)
        if self.spec.users:
            os.fchmod(descriptor, 0o666)
        return descriptor

    async def signal(self, process: SandboxProcess, number: int) -> None:
        """Send a signal to the process group of a spawned process; a no-op if the process has ended."""
        if not process.ended.done():
            # If the supervisor has ended, so has the process, and ``process.ended`` reports that.
            with contextlib.suppress(SandboxLost):
                await self._supervisor.ask(SignalRequest(process.name, int(number)))

    def kill(self, process: SandboxProcess) -> None:
        """Kill a spawned process and its group, at any stage of its start, without waiting."""
        self._supervisor.kill(process.name)

    async def end(self, process: SandboxProcess) -> None:
        """Kill a spawned process and its group, and wait for the end of the process, at most ``DEATH_S`` seconds. The
        wait is bounded because a tracer in the sandbox can delay the end."""
        if self.alive and not process.ended.done():
            await self.signal(process, signal.SIGKILL)
            await asyncio.wait([process.ended], timeout=DEATH_S)

    async def ask(self, request: Request, files: Sequence[int] = ()) -> tuple[Message, list[int]]:
        """Send a request about this sandbox to the supervisor; the caller closes the descriptors of the reply.

        Raises:
            SandboxRefused: the request failed.
            AgentError: programs in the sandbox have ended the sandbox.
            SandboxLost: the sandbox ended otherwise.
        """
        self.check_alive()
        try:
            return await self._supervisor.ask(request, files)
        except SandboxLost:
            # An event that arrived before the reply may have the reason.
            self.check_alive()
            raise

    async def check(self) -> list[str]:
        """Return the limits that the sandbox has reached, as text for people.

        Raises:
            AgentError: programs in the sandbox have ended the sandbox.
            SandboxLost: the sandbox ended otherwise, the machine's OOM killer ended a process, or the disk is full.
        """
        await self.ask(CheckRequest(self.name, memory=True))
        if not await self.has_room():
            raise SandboxLost(f"sandbox {self.name}: {DISK_FULL}")
        return self.notes

    async def has_room(self) -> bool:
        """Return whether the disk with all sandboxes' files has :data:`MIN_FREE_BYTES` free; ``True`` if unknown."""
        try:
            disk = await asyncio.to_thread(os.statvfs, self._supervisor.folder)
        except OSError:
            return True  # the supervisor has ended, which other calls report
        return disk.f_bavail * disk.f_frsize >= MIN_FREE_BYTES

    async def check_living(self) -> None:
        """Check that the sandbox is up and not ending. The supervisor knows this before its event arrives.

        Raises:
            AgentError: programs in the sandbox have ended the sandbox.
            SandboxLost: the sandbox ended otherwise.
        """
        await self.ask(CheckRequest(self.name))

    async def close(self) -> None:
        """End the sandbox and wait until its processes and files are gone. Idempotent.

        Raises:
            InfrastructureError: processes or files remain; the supervisor keeps retrying.
        """
        self.alive = False
        self._supervisor.watch(self.name, None)
        try:
            await asyncio.shield(self._supervisor.ask(DestroyRequest(self.name)))
        except SandboxLost:
            return  # the sandbox ended with its supervisor

    async def __aenter__(self) -> Container:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    def _on_event(self, event: Message) -> None:
        if event["event"] == "limit":
            if not any(note.startswith(event["resource"]) for note in self.notes):
                LOGGER.warning("sandbox %s has met a limit: %s", self.name, event["reason"])
            self.notes.append(event["reason"])
            return
        LOGGER.warning("sandbox %s has ended early: %s", self.name, event["reason"])
        if event.get("resource"):
            self._fault = SandboxExhausted(f"sandbox {self.name} was ended: {event['reason']}")
        elif event.get("inside"):
            self._fault = SandboxBroken(f"sandbox {self.name} was ended from inside: {event['reason']}")
        elif event["reason"] not in self.notes:
            self.notes.append(event["reason"])
        self.alive = False

    def check_alive(self) -> None:
        """Raise if the sandbox is closed, or the supervisor has reported its end; asks no other process.

        Raises:
            AgentError: programs in the sandbox have ended the sandbox.
            SandboxLost: the sandbox ended otherwise.
        """
        if self._fault:
            raise self._fault
        if not self.alive:
            raise SandboxLost(f"sandbox {self.name} has ended" + "".join(f"; {note}" for note in self.notes))


def container_of(handle: SandboxHandle) -> Container:
    """Return the :class:`Container` of one of Gym's sandbox handles.

    Raises:
        CallerError: the handle belongs to another provider.
    """
    if not isinstance(handle.raw, Container):
        raise CallerError(f"{handle.sandbox_id} is not a sandbox of this provider", field="handle")
    return handle.raw


KNOWN_CAUSES = {
    "no user namespaces": "'prorl doctor' says what an administrator can do",
    "function not implemented": "sandboxes of root need Linux 5.19; an ordinary user's do not",
    "no space left|disk quota": "make room where PRORL_STATE is, or set it to a folder on another local disk",
    "sandbox can't be prepared": "set PRORL_STATE to a folder of yours on a local disk",
    "other owners|value too large": "the file system of the image can't show other owners: copy it to a local disk",
    "overlay": "PRORL_STATE must be a folder on a local disk that can carry an overlay (ext4, xfs, tmpfs; not NFS)",
}
"""Fix by regular expression that is searched in the runtime's or kernel's error message; the first match counts."""


def _start_error(error: SandboxRefused, spec: ContainerSpec) -> InfrastructureError:
    output = "; ".join(line for line in error.log.splitlines() if line.strip())[-800:] or error.reason
    fix = next((f"; {fix}" for sign, fix in KNOWN_CAUSES.items() if re.search(sign, output, re.IGNORECASE)), "")
    kind = error.kind if error.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED else None
    return InfrastructureError(f"could not start a sandbox of {spec.image}: {output}{fix}", kind=kind)
