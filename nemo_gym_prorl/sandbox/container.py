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
import os
import resource
import secrets
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.link import Link, Process, SandboxLost, SandboxRefused
from nemo_gym_prorl.sandbox.linux import walled_in
from nemo_gym_prorl.sandbox.output import HeadTail
from nemo_gym_prorl.sandbox.runtime import Runtime, require_runtime
from nemo_gym_prorl.sandbox.wire import Message


FIRST_HOST_ID = 1_879_048_192
HOST_IDS = 65_536
"""Where the server is root, each sandbox runs under one of these user ids, which systemd leaves unused."""

OUTPUT_LIMIT = 1 << 20
"""Bytes kept of each output stream of a command, half from its beginning and half from its end."""

FILE_LIMIT = 1 << 30
"""Largest file that is uploaded or downloaded."""

SHARED_FOLDER = "/.prorl"
"""Where a sandbox sees the folder that it shares with its server, for sockets."""

LARGEST_ARGUMENT = 100_000
"""A longer command travels as a file; the kernel takes no argument beyond 128 KiB."""

DEFAULT_EXEC_TIMEOUT_S = 180.0

_RUNTIME_VARIABLES = ("APPTAINER_", "SINGULARITY_", "PS1", "PROMPT_COMMAND", "PWD", "SHLVL", "_")


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a sandbox is to be.

    Attributes:
        image: path of an unpacked root folder (fastest) or of a SIF.
        env: variables of every command, over those that the image sets.
        workdir: where commands start; made if it is not there. ``/root``, or ``/tmp`` without root, if not given.
        network: share the host's network; otherwise there is only a loopback device.
        root: be root inside. Without it commands run under user id 1000.
        binds: more of the host's files, as ``HOST:INSIDE`` or ``HOST:INSIDE:ro``.
        memory_mib: the largest process is killed when all together use more; 0 for no limit.
        processes: most processes and threads at a time.
        disk_mib: the sandbox is ended when it has written more; no single file can be larger. 0 for no limit.
        shared_memory_mib: size of ``/dev/shm``.
        ttl_s: seconds after which the sandbox is ended, however busy it is.
        start_timeout_s: how long the runtime may take to start it.
    """

    image: Path
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    network: bool = False
    root: bool = True
    binds: Sequence[str] = ()
    memory_mib: int = 8192
    processes: int = 512
    disk_mib: int = 10240
    shared_memory_mib: int = 64
    ttl_s: float | None = None
    start_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of a command.

    Attributes:
        stdout: its output, at most the limit, with one line in place of what is left out.
        stderr: the same of its errors.
        exit_code: as a shell would say: 128 + N after signal N.
        timed_out: it was killed because its time was up.
        omitted: bytes of output left out.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    omitted: int


class Container:
    """A live sandbox. Made by :meth:`start`, ended by :meth:`close`, which must be called, or with ``async with``."""

    def __init__(self, name: str, spec: ContainerSpec, link: Link, host_id: int) -> None:
        self.name = name
        self._host_id = host_id
        self.spec = spec
        self.notes: list[str] = []
        """Limits that the sandbox ran into, as told by the supervisor."""
        self.alive = True
        self.environment: dict[str, str] = {}
        self.workdir = "/root" if spec.root else "/tmp"
        self._link = link
        link.watch(name, self._on_event)

    @classmethod
    async def start(cls, spec: ContainerSpec, runtime: Runtime | None = None) -> Container:
        """Start a sandbox; about 60 ms from a root folder.

        Raises:
            CallerError: the specification is wrong; names the field.
            InfrastructureError: it does not start; the message says what the runtime said and how to mend it.
        """
        if runtime is None:
            runtime = await asyncio.to_thread(require_runtime)
        _check(spec, runtime)
        link = await Link.get()
        host_id = os.geteuid() or FIRST_HOST_ID + secrets.randbelow(HOST_IDS)
        container = cls(f"b-{secrets.token_hex(6)}", spec, link, host_id)
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                answer, _files = await link.ask(_order(container.name, container._host_id, spec, runtime, link.folder))
        except SandboxRefused as error:
            link.watch(container.name, None)
            raise _start_error(error, spec, runtime) from error
        except BaseException as error:
            await container.close()
            if isinstance(error, TimeoutError):
                raise InfrastructureError(f"the sandbox was not up within {spec.start_timeout_s:g} s") from error
            raise
        try:
            container.environment = _environment(answer["environment"], spec)
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
            _check_variable(name, value)
        self.environment = {**self.environment, **env}
        if workdir:
            _check_path(workdir, "workdir")
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
        _refuse_nul(command, "command")
        if len(command) < LARGEST_ARGUMENT:
            return await self.execute(
                ["/bin/sh", "-c", command], cwd=cwd, env=env, timeout_s=timeout_s, output_limit=output_limit
            )
        script = os.memfd_create("command", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(script), "wb") as file:
                file.write(command.encode("utf-8", "surrogateescape"))
            os.lseek(script, 0, os.SEEK_SET)
            return await self.execute(
                ["/bin/sh", "/dev/fd/3"],
                cwd=cwd,
                env=env,
                timeout_s=timeout_s,
                output_limit=output_limit,
                files=[self.give(script)],
            )
        finally:
            os.close(script)

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
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        streams = [_Stream(output_limit), _Stream(output_limit)]
        passed = [null, *(self.give(stream.writer) for stream in streams), *files]
        try:
            try:
                process = await self.spawn(argv, passed, cwd=cwd, env=env)
            finally:
                for descriptor in passed[:3]:
                    os.close(descriptor)
            timed_out = not await self._ends_within(process, timeout_s)
        finally:
            for stream in streams:
                stream.finish()
        code = process.ended.result()
        stdout, stderr = (stream.kept.text() for stream in streams)
        return Completed(
            stdout,
            stderr,
            exit_code=code if code >= 0 else 128 - code,
            timed_out=timed_out,
            omitted=sum(stream.kept.omitted for stream in streams),
        )

    async def _ends_within(self, process: Process, timeout_s: float | None) -> bool:
        """Wait for a process's end; when time is up, or the caller goes away, kill its process group."""
        try:
            await asyncio.wait_for(asyncio.shield(process.ended), timeout_s)
        except TimeoutError:
            await self.signal(process, signal.SIGKILL)
            await asyncio.shield(process.ended)
            return False
        except asyncio.CancelledError:
            await asyncio.shield(self.signal(process, signal.SIGKILL))
            raise
        return True

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
        for name, value in (env or {}).items():
            _check_variable(name, value)
        order = {
            "do": "spawn",
            "argv": list(argv),
            "env": {**self.environment, **(env or {})},
            "cwd": cwd or self.workdir,
            "tty": terminal,
            "echo": echo,
            "sandbox": self.name,
        }
        self._check_alive()
        try:
            return await self._link.spawn(order, files)
        except SandboxRefused as error:
            if error.number:
                raise CallerError(error.reason, field="cwd" if "working folder" in error.reason else None) from error
            raise

    def give(self, descriptor: int) -> int:
        """Let the sandbox's user open a pipe or memory file of ours by its name under ``/dev/fd``, as shells do."""
        if os.geteuid() == 0:
            os.fchown(descriptor, self._host_id, self._host_id)
        return descriptor

    async def signal(self, process: Process, number: int) -> None:
        """Send a signal to the process group of a spawned process; nothing happens if it has ended."""
        if not process.ended.done():
            await self._link.ask({"do": "signal", "pid": process.pid, "signal": int(number)})

    async def upload(self, source: Path, target: str, *, limit: int = FILE_LIMIT) -> None:
        """Copy a file of the host to the absolute path ``target`` inside; missing folders are made.

        Raises:
            CallerError: not a file, too large, or the path inside is not one for a file.
        """
        _check_path(target, "target_path")
        descriptor = await asyncio.to_thread(_open_source, source, limit)
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
        _check_path(source, "source_path")
        descriptor, fresh = await asyncio.to_thread(_open_target, target)
        try:
            await self._transfer({"do": "get", "path": source, "limit": limit}, descriptor, "source_path")
            await asyncio.to_thread(fresh.replace, target)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    async def close(self) -> None:
        """End the sandbox. Returns when no process and no file of it is left; harmless when it has ended already.

        Raises:
            InfrastructureError: it does not die; the supervisor goes on trying.
        """
        self.alive = False
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
            self.alive = False

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


class _Stream:
    """One output stream of a command: the writing end is the command's, the reading end is drained by the loop."""

    def __init__(self, limit: int) -> None:
        self.kept = HeadTail(limit)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._reader)
        self.kept.add(data)
        return bool(data)

    def finish(self) -> None:
        """Take what is there, and close. Bounded, since what runs on in the background may write for ever."""
        for _ in range(64):
            if not self._read():
                break
        self._loop.remove_reader(self._reader)
        os.close(self._reader)


def _order(name: str, host_id: int, spec: ContainerSpec, runtime: Runtime, folder: Path) -> Message:
    """The supervisor's order to start a container."""
    overlay = str(folder / name / "overlay")
    shared = str(folder / name / "shared")
    command = [str(runtime.path), "exec", "--userns", "--containall", "--cleanenv", "--no-init"]
    command += ["--hostname", "sandbox", "--bind", f"{shared}:{SHARED_FOLDER}"]
    command += ["--no-mount", "home,tmp", "--overlay", overlay]
    if not spec.network:
        command += ["--net", "--network", "none"]
    for bind in spec.binds:
        command += ["--bind", bind]
    limits = {resource.RLIMIT_NPROC: spec.processes, resource.RLIMIT_CORE: 0}
    if spec.disk_mib:
        limits[resource.RLIMIT_FSIZE] = spec.disk_mib << 20
    return {
        "do": "create",
        "sandbox": name,
        "argv": command,
        "image": str(spec.image),
        "overlay": overlay,
        "shared": shared,
        "env": {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", "PRORL_SANDBOX_OWNER": str(folder)},
        "uid": 0 if spec.root else 1000,
        "host_uid": host_id,
        "host_gid": os.getegid() if os.geteuid() else host_id,
        "limits": limits,
        "memory_mib": spec.memory_mib,
        "disk_mib": spec.disk_mib,
        "shared_memory_mib": spec.shared_memory_mib,
        "ttl_s": spec.ttl_s,
    }


def _environment(found: Mapping[str, str], spec: ContainerSpec) -> dict[str, str]:
    """The variables of commands: what the image sets, less what the runtime says about itself."""
    own = {name: value for name, value in found.items() if not name.startswith(_RUNTIME_VARIABLES)}
    home = "/root" if spec.root else "/tmp"
    return {**own, "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}


def _check(spec: ContainerSpec, runtime: Runtime) -> None:
    # An image is shown to the sandbox's user elsewhere, but the runtime finds its parts by its own path.
    if os.geteuid() == 0 and (wall := walled_in(runtime.path)):
        raise InfrastructureError(
            f"sandboxes of root run under unprivileged user ids, which can't enter {wall} to run {runtime.path}; set "
            "PRORL_CACHE to a folder that all may enter and run 'prorl setup'"
        )
    if not spec.image.exists():
        raise CallerError(f"there is no {spec.image}; 'prorl setup' builds the default image", field="image")
    if spec.workdir is not None:
        _check_path(spec.workdir, "workdir")
    for name, value in spec.env.items():
        _check_variable(name, value)
    for name in ("memory_mib", "disk_mib"):
        if getattr(spec, name) < 0:
            raise CallerError("must be 0 (no limit) or more", field=name)
    for name in ("processes", "shared_memory_mib", "start_timeout_s"):
        if getattr(spec, name) <= 0:
            raise CallerError("must be more than 0", field=name)


def _check_variable(name: str, value: str) -> None:
    if not name or "=" in name or "\0" in name + value:
        raise CallerError(f"{name!r} can't be the name or value of a variable", field="env")


def _check_path(path: str, name: str) -> None:
    _refuse_nul(path, name)
    if not path.startswith("/"):
        raise CallerError(f"must be an absolute path in the sandbox, not {path!r}", field=name)


def _refuse_nul(text: str, name: str) -> None:
    if "\0" in text:
        raise CallerError("must not hold a NUL character", field=name)


def _open_source(source: Path, limit: int) -> int:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CallerError(f"{source}: {error.strerror}", field="source_path") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        os.close(descriptor)
        reason = f"larger than {limit} bytes" if stat.S_ISREG(found.st_mode) else "not an ordinary file"
        raise CallerError(f"{source} is {reason}", field="source_path")
    return descriptor


def _open_target(target: Path) -> tuple[int, Path]:
    if target.is_dir():
        raise CallerError(f"{target} is a folder; name the file", field="target_path")
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    os.fchmod(descriptor, 0o644)
    return descriptor, Path(name)


def _start_error(error: SandboxRefused, spec: ContainerSpec, runtime: Runtime) -> InfrastructureError:
    """What the runtime said when it did not start, with what to do about the causes that are known."""
    said = "; ".join(line for line in error.log.splitlines() if line.strip())[-800:] or error.reason
    return InfrastructureError(f"{runtime.flavor} could not start a sandbox of {spec.image}: {said}")
