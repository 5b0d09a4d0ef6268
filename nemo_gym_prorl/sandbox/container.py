# SPDX-License-Identifier: Apache-2.0
"""One sandbox: a rootless Apptainer or SingularityCE container in which commands are run and files exchanged.

The container is one ``exec`` of the runtime whose only process waits. Whatever is to run joins it from outside, by way
of the supervisor, so the image needs ``/bin/sh`` and nothing else, no port is open, and a command costs milliseconds.

Safe by default: no network, namespaces of its own for users, processes, IPC and mounts, nothing of the host's file
system but what is bound, nothing of the host's environment, writes in an overlay that goes with the sandbox. Root
inside is an ordinary user outside: the caller, or where the caller is root, a user id that nobody has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox import limits
from nemo_gym_prorl.sandbox.command import DEFAULT_EXEC_TIMEOUT_S, OUTPUT_LIMIT, Completed, complete, shell_command
from nemo_gym_prorl.sandbox.imagecheck import UNPACK
from nemo_gym_prorl.sandbox.link import Link, Process, SandboxLost, SandboxRefused
from nemo_gym_prorl.sandbox.runtime import Runtime, require_runtime
from nemo_gym_prorl.sandbox.spec import (
    SHARED_FOLDER,
    ContainerSpec,
    check,
    check_path,
    check_variable,
    command_environment,
    order,
)
from nemo_gym_prorl.sandbox.transfer import FILE_LIMIT, open_source, open_target
from nemo_gym_prorl.sandbox.wire import Message


__all__ = ["DEFAULT_EXEC_TIMEOUT_S", "OUTPUT_LIMIT", "SHARED_FOLDER", "Completed", "Container", "ContainerSpec"]

KNOWN_CAUSES = {
    "no space left|disk quota": "make room where PRORL_STATE is, or set it to a folder on another local disk",
    "it can't be prepared": "set PRORL_STATE to a folder of yours on a local disk",
    "squashfuse|squashfs|/dev/fuse": "the image is damaged, or FUSE is not to be had here: build it "
    f"again, or unpack it with '{UNPACK} IMAGE' and name FOLDER",
    "other owners|value too large": "the file system of the image can't show other owners: copy it to a local disk",
    "overlay": "PRORL_STATE must be a folder on a local disk that can carry an overlay (ext4, xfs, tmpfs; not NFS)",
}
"""What the runtime's words, by regular expression, ask to be done; the first that fits counts."""

FIRST_HOST_ID = 1_879_048_192
HOST_IDS = 65_536
"""Where the server is root, each sandbox runs under one of these user ids, which systemd leaves unused."""


class Container:
    """A live sandbox. Made by :meth:`start`, ended by :meth:`close`, which must be called, or with ``async with``."""

    def __init__(self, name: str, spec: ContainerSpec, link: Link, host_id: int) -> None:
        self.name = name
        self._host_id = host_id
        self.spec = spec
        self.notes: list[str] = []
        """Limits that the sandbox ran into, as told by the supervisor."""
        self.alive = True
        self.paused = False
        self.environment: dict[str, str] = {}
        self.workdir = "/root" if spec.root else "/tmp"
        self._on_end: list[Callable[[], None]] = []
        self._link = link
        link.watch(name, self._on_event)

    @classmethod
    async def start(cls, spec: ContainerSpec, runtime: Runtime | None = None, held: Sequence[int] = ()) -> Container:
        """Start a sandbox; some 80 ms from a root folder, some 200 ms from a SIF. Files that are ``held`` stay open
        until it is gone.

        Raises:
            CallerError: the specification is wrong; names the field.
            InfrastructureError: it does not start; the message says what the runtime said and how to mend it.
        """
        if runtime is None:
            runtime = await asyncio.to_thread(require_runtime)
        await asyncio.to_thread(check, spec, runtime)
        link = await Link.get()
        host_id = os.geteuid() or FIRST_HOST_ID + secrets.randbelow(HOST_IDS)
        container = cls(f"b-{secrets.token_hex(6)}", spec, link, host_id)
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                start = order(container.name, container._host_id, spec, runtime, link.folder)
                answer, _files = await link.ask(start, held)
        except SandboxRefused as error:
            link.watch(container.name, None)
            raise _start_error(error, spec, runtime) from error
        except BaseException as error:
            await container.close()
            if isinstance(error, TimeoutError):
                raise InfrastructureError(f"the sandbox was not up within {spec.start_timeout_s:g} s") from error
            raise
        try:
            limits.say_once(frozenset(answer["controllers"]))
            container.environment = command_environment(answer["environment"], spec)
            await container.configure(spec.env, spec.workdir)
        except BaseException:
            await container.close()
            raise
        return container

    async def configure(self, env: Mapping[str, str], workdir: str | None) -> None:
        """Set variables for all commands, and where they start; the folder is made.

        Raises:
            CallerError: the folder can't be made.
        """
        for name, value in env.items():
            check_variable(name, value)
        self.environment = {**self.environment, **env}
        if workdir:
            check_path(workdir, "workdir")
            made = await self.execute(["mkdir", "-p", "--", workdir], cwd="/", timeout_s=30.0)
            if made.exit_code:
                raise CallerError(f"can't be made in the sandbox: {made.stderr.strip()}", field="workdir")
            self.workdir = workdir

    @property
    def shared_folder(self) -> Path:
        """The host's side of :data:`SHARED_FOLDER`. What is in it is the sandbox's word."""
        return self._link.folder / self.name / "shared"

    def describe(self) -> dict[str, Any]:
        """What :meth:`attach` needs, as JSON."""
        spec = {**asdict(self.spec), "image": str(self.spec.image)}
        return {
            "sandbox_id": self.name,
            "supervisor": str(self._link.folder),
            "host_id": self._host_id,
            "environment": self.environment,
            "workdir": self.workdir,
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
        await link.ask({"do": "check", "sandbox": container.name})
        return container

    async def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_EXEC_TIMEOUT_S,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Completed:
        """Run a command with ``/bin/sh``, without a terminal and with empty input, and wait for its end.

        What it leaves running in the background goes on running, but its output is no longer read.

        Raises:
            CallerError: there is a NUL in the command, or ``cwd`` is not a folder.
            SandboxLost: the sandbox ended before the command did.
        """
        with shell_command(command) as (argv, files):
            return await self.execute(
                argv,
                cwd=cwd,
                env=env,
                timeout_s=timeout_s,
                output_limit=output_limit,
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
    ) -> Completed:
        """As :meth:`run`, for a program and its arguments. ``files`` become its open files 3, 4, ..."""

        async def spawn(streams: Sequence[int]) -> Process:
            null, *outputs = streams
            return await self.spawn(argv, [null, *map(self.give, outputs), *files], cwd=cwd, env=env)

        return await complete(spawn, self._kill, timeout_s, output_limit)

    async def spawn(
        self,
        argv: Sequence[str],
        files: Sequence[int] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
        echo: bool = False,
    ) -> Process:
        """Start a program in a session of its own.

        Args:
            argv: the program, looked up on the sandbox's PATH, and its arguments.
            files: its open files from 0 on; with a terminal, which takes the first three, from 3 on.
            cwd: where it starts; the sandbox's working folder if not given.
            env: more variables.
            terminal: rows and columns of a new terminal.
            echo: have the terminal behave as for a person: echo what is typed, end lines with CR and LF.

        Raises:
            CallerError: there is no such program or folder.
        """
        message = {"do": "spawn", "sandbox": self.name, "tty": terminal, "echo": echo}
        message |= self.program(argv, cwd=cwd, env=env)
        self._check_alive()
        try:
            return await self._link.spawn(message, files)
        except SandboxRefused as error:
            if error.number:
                raise CallerError(error.reason, field="cwd" if "working folder" in error.reason else None) from error
            raise

    def program(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """What :func:`.enter.spawn` is told of a program: with the sandbox's own variables and folder."""
        for name, value in (env or {}).items():
            check_variable(name, value)
        return {"argv": list(argv), "env": {**self.environment, **(env or {})}, "cwd": cwd or self.workdir}

    def give(self, descriptor: int) -> int:
        """Let the sandbox's user open a pipe or memory file of ours by its name under ``/dev/fd``, as shells do."""
        if os.geteuid() == 0:
            os.fchown(descriptor, self._host_id, self._host_id)
        return descriptor

    async def signal(self, process: Process, number: int) -> None:
        """Send a signal to the process group of a spawned process; nothing happens if it has ended."""
        if not process.ended.done():
            # A process that went with its supervisor has ended; whoever waits for its end is told so.
            with contextlib.suppress(SandboxLost):
                await self._link.ask({"do": "signal", "pid": process.pid, "signal": int(number)})

    async def _kill(self, process: Process) -> None:
        await self.signal(process, signal.SIGKILL)

    async def upload(self, source: Path, target: str, *, limit: int = FILE_LIMIT) -> None:
        """Copy a file of the host to the absolute path ``target`` inside; missing folders are made.

        Raises:
            CallerError: not a file, too large, or the path inside is not one for a file.
        """
        check_path(target, "target_path")
        descriptor = await asyncio.to_thread(open_source, source, limit)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            await self._transfer({"do": "put", "path": target, "mode": mode}, descriptor, "target_path")
        finally:
            os.close(descriptor)

    async def download(self, source: str, target: Path, *, limit: int = FILE_LIMIT) -> None:
        """Copy the ordinary file at the absolute path ``source`` inside to the host. ``target`` is whole or untouched.

        Raises:
            CallerError: there is no such file, it is not an ordinary one, or it is too large.
        """
        check_path(source, "source_path")
        descriptor, fresh = await asyncio.to_thread(open_target, target)
        try:
            await self._transfer({"do": "get", "path": source, "limit": limit}, descriptor, "source_path")
            await asyncio.to_thread(fresh.replace, target)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    async def connect(self, port: int) -> socket.socket:
        """A connection to what listens on ``port`` of the sandbox's own loopback device, made from inside.

        Raises:
            SandboxRefused: nothing listens.
            SandboxLost: the sandbox has ended.
        """
        _answer, files = await self.ask("connect", port=port)
        connection = socket.socket(fileno=files[0])
        connection.setblocking(False)
        return connection

    async def ask(self, do: str, **details: Any) -> tuple[Message, list[int]]:
        """Ask the supervisor something about this sandbox; the files of its answer are the caller's to close.

        Raises:
            SandboxRefused: it could not be done.
            SandboxLost: the sandbox has ended.
        """
        self._check_alive()
        return await self._link.ask({"do": do, "sandbox": self.name, **details})

    async def pause(self) -> None:
        """Stop everything that runs inside; commands are refused until :meth:`resume`.

        Raises:
            SandboxRefused: something does not stop.
        """
        await self.ask("pause")
        self.paused = True

    async def resume(self) -> None:
        """Let everything go on."""
        await self.ask("resume")
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
            await asyncio.shield(self._link.ask({"do": "destroy", "sandbox": self.name}))
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
        else:
            self._ended()

    def _ended(self) -> None:
        self.alive = False
        while self._on_end:
            self._on_end.pop()()

    def _check_alive(self) -> None:
        if not self.alive:
            raise SandboxLost(f"sandbox {self.name} has ended" + "".join(f"; {note}" for note in self.notes))

    async def _transfer(self, message: Message, descriptor: int, field_name: str) -> None:
        self._check_alive()
        try:
            await self._link.ask({**message, "sandbox": self.name}, [descriptor])
        except SandboxRefused as error:
            if error.number:
                raise CallerError(error.reason, field=field_name) from error
            raise


def _start_error(error: SandboxRefused, spec: ContainerSpec, runtime: Runtime) -> InfrastructureError:
    """What the runtime said when it did not start, with what to do about the causes that are known."""
    said = "; ".join(line for line in error.log.splitlines() if line.strip())[-800:] or error.reason
    fix = next((f"; {fix}" for sign, fix in KNOWN_CAUSES.items() if re.search(sign, said, re.IGNORECASE)), "")
    return InfrastructureError(f"{runtime.flavor} could not start a sandbox of {spec.image}: {said}{fix}")
