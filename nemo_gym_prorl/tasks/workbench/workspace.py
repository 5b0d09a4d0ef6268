# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's working folder and tools inside a running sandbox.

A failure caused by the agent's command is an observation. The end of the sandbox is an :class:`InfrastructureError`
with ``session_lost``. An agent can kill the process that reports to the server, so both failures look alike: after a
call without a reply, the sandbox is probed before the failure is attributed.

``bash`` and ``python`` are persistent sessions where the sandbox has them, else one process per call
(:mod:`.interactive_tools`).

Files are accessed through the provider if the sandbox is a :class:`.HasFiles`, else through a program in the sandbox
(:class:`ToolboxFiles`). The agent can forge replies of the program, so replies are untrusted and never blame the
machine. The provider's upload and download are not used: in a folder shared with the host, both would follow the
agent's symlinks on the *host*.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import posixpath
import secrets
import shlex
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nemo_gym_prorl.failures import MACHINE_ERRNOS, AgentError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.tasks.sandbox import ExecResult, HasFiles, HasHealthCheck, HasSessions, Sandbox
from nemo_gym_prorl.tasks.task import ExtractedFile
from nemo_gym_prorl.tasks.workbench.editor import Editor
from nemo_gym_prorl.tasks.workbench.interactive_tools import (
    ANSWER_MARGIN_S,
    SHELL_VARIABLES,
    Ask,
    Bash,
    Python,
    StatelessTools,
)
from nemo_gym_prorl.tasks.workbench.observations import (
    TOOLS,
    BadArguments,
    BashArguments,
    EditorArguments,
    Output,
    PythonArguments,
    SubmitArguments,
    ToolCallStats,
    error_text,
    parse_arguments,
)


READ_BYTES = 256 << 10
"""Bytes that one toolbox request reads: providers limit a command's output."""

WRITTEN_BYTES = 48 << 10
"""Bytes that one toolbox request writes: the kernel limits an argument to 128 KiB."""


class ToolboxUnavailable(OSError):
    """The toolbox program was killed, or another process forged the program's reply."""


class ToolboxFiles:
    """File access through the toolbox program; a :class:`~nemo_gym_prorl.tasks.sandbox.HasFiles`.

    Args:
        ask: sends a request to the toolbox program.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def read_file(self, path: str, *, limit: int) -> bytes:
        content = bytearray()
        while len(content) <= limit:
            request = {"op": "read", "path": path, "from": len(content), "size": READ_BYTES}
            answer = await self._asked(request)
            try:
                part = base64.b64decode(str(answer["content"]), validate=True)
            except (KeyError, ValueError) as error:
                raise ToolboxUnavailable("another process answered in place of the reader") from error
            content += part
            if len(part) < READ_BYTES:
                break
        if len(content) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return bytes(content)

    async def write_file(self, path: str, data: bytes) -> bool:
        existed = []
        for at in range(0, max(1, len(data)), WRITTEN_BYTES):
            content = base64.b64encode(data[at : at + WRITTEN_BYTES]).decode()
            answer = await self._asked({"op": "write", "path": path, "content": content, "more": at > 0})
            existed.append(answer.get("existed") is True)
        return existed[0]

    async def _asked(self, request: dict[str, object]) -> dict[str, object]:
        answer = await self._ask(request, 0.0)
        if answer is None:
            raise ToolboxUnavailable("the program that accesses the sandbox's files was killed")
        if "problem" in answer:
            number, said = answer.get("errno"), str(answer["problem"])
            raise OSError(said) if number in MACHINE_ERRNOS else OSError(number, said)
        return answer


PROBE_TIMEOUT_S = 30.0
"""Maximum seconds until the reply to a liveness probe, on a loaded machine."""

PROBES = 4
PROBE_PAUSE_S = 0.3
"""Maximum probes of a silent sandbox, and the pause between probes: a provider may notice the end late."""

MAX_COUNT = 10**15
MAX_SIGNALS = 128
"""Bounds of numbers in untrusted replies: byte counts, and the signal that ended a command (negative)."""

MAX_REASON_CHARS = 500
"""Maximum characters of an error message about an extracted file."""

SUBMITTED = "Submitted. The task is over: answer without calling a tool."
ALREADY_SUBMITTED = "Error: the solution was submitted already, the workspace is closed."

_UNREADABLE = {
    errno.EACCES: "can't be read: permission denied",
    errno.EBUSY: "can't be read: a program has it open",
    errno.EINVAL: "is no regular file",
    errno.EISDIR: "is a folder",
    errno.ELOOP: "is a link that leads to itself",
}
"""Reasons why a file cannot be extracted; any other error means that the file does not exist."""

_PROBE_MARK = "prorl-alive"


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of one tool call.

    Attributes:
        timeout_s: default time limit in seconds.
        max_timeout_s: largest time limit that the policy may request, in seconds.
        silence_s: seconds without output after which a persistent shell's command is reported as waiting for input.
        output_bytes: maximum bytes of an observation.
    """

    timeout_s: float = 30.0
    max_timeout_s: float = 120.0
    silence_s: float = 10.0
    output_bytes: int = 16_000


class _FileUnavailable(Exception):
    """The file cannot be extracted; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class InstalledPrograms:
    """Programs of an image that tools need.

    Attributes:
        bash: whether ``bash`` is installed.
        python: whether ``python3`` is installed.
        kernel: whether ``python3`` (3.7 or later) has IPython.
    """

    bash: bool = True
    python: bool = True
    kernel: bool = False


_PROBE_IMAGE = (
    "command -v bash > /dev/null && echo bash; command -v python3 > /dev/null && echo python && "
    "python3 -I -c 'import importlib.util as u, sys; "
    'print(sys.version_info >= (3, 7) and u.find_spec("IPython") and "kernel")\''
)


async def probe_image(sandbox: Sandbox) -> InstalledPrograms:
    """Return the programs that a fresh sandbox's image has installed.

    Raises:
        InfrastructureError: the probe failed.
    """
    result = await sandbox.exec(_PROBE_IMAGE, cwd="/", timeout_s=ANSWER_MARGIN_S)
    if result.error_type is not None:
        raise InfrastructureError(f"could not probe the image: {(result.stderr or '')[:MAX_REASON_CHARS]}")
    found = (result.stdout or "").split()
    return InstalledPrograms(bash="bash" in found, python="python" in found, kernel="kernel" in found)


class Workspace:
    """Working folder and tools in a running sandbox; an :class:`~nemo_gym_prorl.tasks.task.OpenTools`.

    Args:
        sandbox: a started sandbox with ``sh``.
        folder: absolute path of the working folder in the sandbox; created on first use.
        limits: limits of tool calls.
        installed: programs of the image.
        submitted: observation of ``submit``.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        folder: str,
        limits: ToolLimits,
        installed: InstalledPrograms = InstalledPrograms(),
        submitted: str = SUBMITTED,
    ) -> None:
        self.sandbox = sandbox
        self.over = False
        self._call_stats = ToolCallStats()
        self._limits = limits
        self._submitted = submitted
        self._stateless_tools = StatelessTools(self._ask, limits.output_bytes)
        self._files = sandbox if isinstance(sandbox, HasFiles) else ToolboxFiles(self._ask)
        self._has_kernel = installed.kernel
        self._limits_told = 0
        self.work_in(folder)

    def work_in(self, folder: str, variables: Mapping[str, str] | None = None) -> None:
        """Set the tools' initial working folder, before the first call.

        Args:
            folder: absolute path in the sandbox.
            variables: environment variables of the shell, overriding the image's.
        """
        limit, sandbox = self._limits.output_bytes, self.sandbox
        self.folder = folder
        self._variables = {**SHELL_VARIABLES, **(variables or {})}
        self._editor = Editor(self._files, folder, self._ask, limit)
        self._bash: Bash | None = None
        self._python: Python | None = None
        if isinstance(sandbox, HasSessions):
            self._bash = Bash(sandbox, folder, self._limits.silence_s, limit, self._require_sandbox, variables)
            if self._has_kernel:
                self._python = Python(sandbox, folder, limit, self._require_sandbox)

    async def write(self, contents: Mapping[str, str | bytes]) -> None:
        """Write files by path; relative paths are relative to the working folder.

        Raises:
            InfrastructureError: the sandbox failed.
        """
        try:
            for name, content in contents.items():
                data = content if isinstance(content, bytes) else content.encode()
                await self._files.write_file(posixpath.join(self.folder, name), data)
        except OSError as error:
            raise InfrastructureError(f"could not set up the workspace: {error}") from error

    async def run_script(self, script: str, *, timeout_s: float) -> ExecResult:
        """Run a shell script in the working folder with the tools' variables; see :class:`.task.RunsScripts`."""
        folder = shlex.quote(self.folder)
        exports = (f"export {name}={shlex.quote(value)}" for name, value in self._variables.items())
        begin = f"mkdir -p -- {folder} && cd -- {folder} || exit 126"
        return await self.sandbox.exec("\n".join([begin, *exports, script]), cwd="/", timeout_s=timeout_s)

    async def close(self) -> None:
        """Close shell and kernel, preferably after the end of the sandbox, which is cheaper."""
        for tool in (self._bash, self._python):
            if tool is not None:
                await tool.close()
        self._bash = self._python = None

    async def call(self, tool: str, arguments: object) -> str:
        """Execute a call of one of :data:`.observations.TOOLS`; see :meth:`.task.OpenTools.call`."""
        if self.over:
            return ALREADY_SUBMITTED
        try:
            observation = await self._call(tool, arguments)
        except AgentError as error:
            observation = error_text(error.reason, limit=self._limits.output_bytes)
            if (await self.sandbox.status()).value != "running":
                self._call_stats.count(tool, observation)
                raise
        self._call_stats.count(tool, observation)
        return observation

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        return self._call_stats.as_json()

    async def start_sessions(self, offered: Collection[str]) -> None:
        if self._bash is not None and "bash" in offered:
            await self._bash.start()

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        saved: dict[str, Any] = {"tally": self.tool_use(), "over": self.over}
        lost: list[str] = []
        if self._bash is not None:
            saved["shell"] = await self._bash.save()
            lost += ["shell"] if saved["shell"] is None else []
        if self._python is not None and self._python.begun:
            lost.append("kernel")
        return saved, lost

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        self._call_stats.resume(saved["tally"])
        self.over = saved["over"]
        if self._bash is not None:
            self._bash.resume(saved.get("shell"), lost)
        if self._python is not None:
            self._python.resume(lost)

    async def _call(self, tool: str, arguments: object) -> str:
        limit = self._limits.output_bytes
        try:
            parsed = parse_arguments(tool, TOOLS[tool], arguments)
        except BadArguments as error:
            return str(Output(str(error)).within(limit))
        if isinstance(parsed, EditorArguments):
            answer = await self._edit(parsed)
            if answer is None:
                return error_text("the editor was killed before it answered.", limit=limit)
            if isinstance(text := answer.get("text"), str):
                return str(Output(text).within(limit))
            return error_text(answer.get("problem") or "another process answered in place of the editor.", limit=limit)
        if isinstance(parsed, BashArguments):
            timeout_s = self._timeout(parsed.timeout_s)
            if self._bash is None:
                return await self._stateless_tools.bash(parsed, timeout_s)
            return await self._bash.call(parsed, timeout_s)
        if isinstance(parsed, PythonArguments):
            timeout_s = self._timeout(parsed.timeout_s)
            if self._python is None:
                return await self._stateless_tools.python(parsed, timeout_s)
            return await self._python.call(parsed, timeout_s)
        assert isinstance(parsed, SubmitArguments)
        self.over = True
        return self._submitted

    async def extract_file(self, path: str, *, limit: int) -> ExtractedFile:
        """Return a regular file's content, or the reason why the policy's file cannot be read.

        Args:
            path: relative to the working folder, or absolute.
            limit: maximum bytes.

        Raises:
            AgentError: the agent exceeded a limit of its sandbox.
            InfrastructureError: ``session_lost``: the sandbox has ended.
        """
        try:
            content = await self._read(path, limit)
        except _FileUnavailable as error:
            return ExtractedFile(None, f"{path} {error}"[:MAX_REASON_CHARS])
        return ExtractedFile(content)

    async def _read(self, path: str, limit: int) -> bytes:
        try:
            return await self._bounded(self._files.read_file(posixpath.join(self.folder, path), limit=limit))
        except ToolboxUnavailable as error:
            raise _FileUnavailable(f"could not be read: {error}") from error
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise _FileUnavailable(f"is longer than {limit} bytes") from error
            raise_if_machine_error(error)
            raise _FileUnavailable(_UNREADABLE.get(error.errno or 0, "does not exist")) from error

    async def _edit(self, arguments: EditorArguments) -> dict[str, Any] | None:
        try:
            return await self._bounded(self._editor.call(arguments))
        except OSError as error:
            raise_if_machine_error(error)
            raise

    async def _bounded[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a file operation within a time limit; raise ``session_lost`` after a timeout or the sandbox's end."""
        try:
            async with asyncio.timeout(ANSWER_MARGIN_S):
                return await work
        except TimeoutError as error:
            await self._require_sandbox(f"no access to its files within {ANSWER_MARGIN_S:g} s")
            raise InfrastructureError(
                "the sandbox's files cannot be accessed", kind=FailureKind.SESSION_LOST
            ) from error
        except RolloutError as error:
            await self._require_sandbox(error.reason)
            raise

    def _timeout(self, asked: float | None) -> float:
        return min(asked or self._limits.timeout_s, self._limits.max_timeout_s)

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the toolbox program's reply to a request; ``None`` if a live sandbox sends no valid reply."""
        mark = secrets.token_hex(8)
        text = json.dumps({"mark": mark, "cwd": self.folder} | dict(request))
        encoded = base64.b64encode(text.encode()).decode()
        command = f"exec python3 -I -c {shlex.quote(_toolbox_source())} {encoded}"
        failure = "no answer"
        try:
            result = await self.sandbox.exec(command, cwd="/", timeout_s=timeout_s + ANSWER_MARGIN_S)
        except (RuntimeError, OSError) as error:
            failure = str(error)
        else:
            for line in (result.stdout or "").splitlines():
                if line.startswith(mark):
                    return _parsed(line.removeprefix(mark))
            failure = (result.stderr or "").strip() or f"exit code {result.return_code}"
        await self._require_sandbox(failure)
        return None

    async def _require_sandbox(self, reason: object) -> Sequence[str]:
        """Check that the sandbox lives; return the latest limit reached since the previous check, if any."""
        if not await is_alive(self.sandbox):
            message = f"the sandbox has ended: {reason}" if reason else "the sandbox has ended"
            raise InfrastructureError(message[:600], kind=FailureKind.SESSION_LOST)
        met: Sequence[str] = ()
        if isinstance(self.sandbox, HasHealthCheck):
            with suppress(RolloutError):  # the next use of the sandbox reports the error
                met = await self.sandbox.check()
        told, self._limits_told = self._limits_told, max(self._limits_told, len(met))
        return met[told:][-1:]


def raise_if_machine_error(error: OSError) -> None:
    """Raise if the machine, and not the agent, caused a file error.

    Raises:
        InfrastructureError: the machine's disk failed or is full, or no more files can be opened.
    """
    if error.errno in MACHINE_ERRNOS:
        reason = f"the machine failed to access the sandbox's files: {error}"
        raise InfrastructureError(reason, kind=FailureKind.SESSION_LOST) from error


async def is_alive(sandbox: Sandbox) -> bool:
    """Return whether the sandbox still runs.

    A sandbox that cannot run ``echo`` may live: the agent may have exhausted the process limit, for example. The
    provider's status then decides.

    Raises:
        AgentError: sandboxed code ended the sandbox.
    """
    for _ in range(PROBES):
        try:
            result = await sandbox.exec(f"echo {_PROBE_MARK}", cwd="/", timeout_s=PROBE_TIMEOUT_S)
            if result.error_type is None and _PROBE_MARK in (result.stdout or ""):
                return True
            if result.error_type == "timeout" or (await sandbox.status()).value != "running":
                return False
        except AgentError:
            if (await sandbox.status()).value != "running":
                raise
        except (RuntimeError, OSError):
            return False
        await asyncio.sleep(PROBE_PAUSE_S)
    return True


def _parsed(text: str) -> dict[str, Any] | None:
    """Parse an untrusted toolbox reply; keep texts and bounded integers only. ``None`` if malformed."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    return {
        name: value
        for name, value in answer.items()
        if isinstance(value, str) or (isinstance(value, int) and -MAX_SIGNALS < value < MAX_COUNT)
    }


@cache
def _toolbox_source() -> str:
    return files("nemo_gym_prorl.tasks.workbench").joinpath("toolbox.py").read_text(encoding="utf-8")
