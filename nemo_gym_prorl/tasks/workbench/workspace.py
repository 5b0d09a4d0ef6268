# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's working folder and tools inside a running sandbox.

A failure caused by the agent's command is an observation. The end of the sandbox is an :class:`InfrastructureError`
with ``session_lost``. An agent can kill the process that reports to the server, so both failures look alike: after a
call without a reply, the sandbox is probed before the failure is attributed.

``bash`` and ``python`` are persistent sessions (:mod:`.interactive_tools`). The provider accesses files with the
rights of the sandbox's user, so no link of the agent leads out of the sandbox.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import shlex
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nemo_gym_prorl.failures import MACHINE_ERRNOS, AgentError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.tasks.sandbox import ExecResult, Sandbox
from nemo_gym_prorl.tasks.task import ExtractedFile, FurtherTool, OpenTools
from nemo_gym_prorl.tasks.workbench.editor import Editor
from nemo_gym_prorl.tasks.workbench.interactive_tools import (
    ANSWER_MARGIN_S,
    SHELL_VARIABLES,
    Bash,
    Python,
    StatelessPython,
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


PROBE_TIMEOUT_S = 30.0
"""Maximum seconds until the reply to a liveness probe, on a loaded machine."""

PROBES = 4
PROBE_PAUSE_S = 0.3
"""Maximum probes of a silent sandbox, and the pause between probes: a provider may notice the end late."""

MAX_ENTRIES = 500
"""Maximum names in a folder's listing, to bound the observation."""

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


@dataclass(frozen=True, slots=True)
class InstalledPrograms:
    """Programs of an image that tools need; ``kernel``: whether its Python (3.7 or later) has IPython."""

    bash: bool = True
    python: bool = True
    kernel: bool = False


_PROBE_IMAGE = (
    "command -v bash > /dev/null && echo bash; command -v python3 > /dev/null && echo python && "
    "python3 -I -c 'import importlib.util as u, sys; "
    'print(sys.version_info >= (3, 7) and u.find_spec("IPython") and "kernel")\''
)


async def probe_image(sandbox: Sandbox) -> InstalledPrograms:
    """Return the programs that a fresh sandbox's image has installed."""
    result = await sandbox.exec(_PROBE_IMAGE, cwd="/", timeout_s=ANSWER_MARGIN_S)
    if result.error_type is not None:
        raise InfrastructureError(f"could not probe the image: {(result.stderr or '')[:MAX_REASON_CHARS]}")
    found = (result.stdout or "").split()
    return InstalledPrograms(bash="bash" in found, python="python" in found, kernel="kernel" in found)


class Workspace(OpenTools):
    """Working folder and tools in a running sandbox.

    Args:
        folder: absolute path of the working folder in the sandbox; created on first use.
        submitted: observation of ``submit``.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        folder: str,
        limits: ToolLimits,
        installed: InstalledPrograms = InstalledPrograms(),
        submitted: str = SUBMITTED,
        further: Mapping[str, FurtherTool] = MappingProxyType({}),
    ) -> None:
        self.sandbox = sandbox
        self.over = False
        self._call_stats = ToolCallStats()
        self._limits = limits
        self._submitted = submitted
        self._further = further
        self._has_kernel = installed.kernel
        self._limits_told = 0
        self.work_in(folder)

    def work_in(
        self, folder: str, variables: Mapping[str, str] | None = None, *, user: str | int | None = None
    ) -> None:
        """Set the tools' initial working folder, before the first call.

        Args:
            folder: absolute path in the sandbox.
            variables: environment variables of the shell, overriding the image's.
            user: user that runs commands and owns new files; ``None`` for the sandbox's own.
        """
        limit, sandbox = self._limits.output_bytes, self.sandbox
        self.folder = folder
        self._user = user
        self._variables = {**SHELL_VARIABLES, **(variables or {})}
        self._editor = Editor(self, folder, limit)
        self._bash = Bash(sandbox, folder, self._limits.silence_s, limit, self._require_sandbox, self._variables, user)
        self._python: Python | StatelessPython = (
            Python(sandbox, folder, limit, self._require_sandbox)
            if self._has_kernel
            else StatelessPython(self.run_script, limit, self._require_sandbox)
        )

    async def write(self, contents: Mapping[str, str | bytes]) -> None:
        """Write files by path; relative paths are relative to the working folder."""
        try:
            for name, content in contents.items():
                data = content if isinstance(content, bytes) else content.encode()
                await self.write_file(posixpath.join(self.folder, name), data)
        except OSError as error:
            raise InfrastructureError(f"could not set up the workspace: {error}") from error

    async def run_script(self, script: str, *, timeout_s: float) -> ExecResult:
        folder = shlex.quote(self.folder)
        exports = (f"export {name}={shlex.quote(value)}" for name, value in self._variables.items())
        begin = f"mkdir -p -- {folder} && cd -- {folder} || exit 126"
        script = "\n".join([begin, *exports, script])
        return await self.sandbox.exec(script, cwd="/", timeout_s=timeout_s, user=self._user)

    async def close(self) -> None:
        """Close shell and kernel, preferably after the end of the sandbox, which is cheaper."""
        await self._bash.close()
        await self._python.close()

    async def call(self, tool: str, arguments: object) -> str:
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
        if "bash" in offered:
            await self._bash.start()

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        shell = await self._bash.save()
        lost = [*(["shell"] if shell is None else []), *(["kernel"] if self._python.begun else [])]
        return {"tally": self.tool_use(), "over": self.over, "shell": shell}, lost

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        self._call_stats.resume(saved["tally"])
        self.over = saved["over"]
        self._bash.resume(saved["shell"], lost)
        self._python.resume(lost)

    async def _call(self, tool: str, arguments: object) -> str:
        if (further := self._further.get(tool)) is not None:
            return await further.call(arguments)
        limit = self._limits.output_bytes
        try:
            parsed = parse_arguments(tool, TOOLS[tool], arguments)
        except BadArguments as error:
            return str(Output(str(error)).within(limit))
        if isinstance(parsed, EditorArguments):
            try:
                return str(Output(await self._bounded(self._editor.call(parsed))).within(limit))
            except OSError as error:
                raise_if_machine_error(error)
                raise
        if isinstance(parsed, BashArguments):
            return await self._bash.call(parsed, self._timeout(parsed.timeout_s))
        if isinstance(parsed, PythonArguments):
            return await self._python.call(parsed, self._timeout(parsed.timeout_s))
        assert isinstance(parsed, SubmitArguments)
        self.over = True
        return self._submitted

    async def extract_file(self, path: str, *, limit: int) -> ExtractedFile:
        """Return the content of a regular file of at most ``limit`` bytes, or the reason why the policy's file cannot
        be read. The path is absolute, or relative to the working folder.

        Raises:
            AgentError: the agent exceeded a limit of its sandbox.
            InfrastructureError: ``session_lost``: the sandbox has ended.
        """
        try:
            return ExtractedFile(await self._bounded(self.read_file(posixpath.join(self.folder, path), limit=limit)))
        except OSError as error:
            raise_if_machine_error(error)
            reason = _UNREADABLE.get(error.errno or 0, "does not exist")
            if error.errno == errno.EFBIG:
                reason = f"is longer than {limit} bytes"
            return ExtractedFile(None, f"{path} {reason}"[:MAX_REASON_CHARS])

    async def read_file(self, path: str, *, limit: int) -> bytes:
        return await self.sandbox.read_file(path, limit=limit)

    async def write_file(self, path: str, data: bytes) -> bool:
        existed = await self.sandbox.write_file(path, data)
        if self._user is not None and not existed:
            await self.sandbox.exec(f"chown -h -- {shlex.quote(str(self._user))} {shlex.quote(path)}")
        return existed

    async def list_folder(self, path: str) -> str:
        """Return the sorted names in a folder, one a line and with a slash after folders; or why this failed."""
        command = f"cd -- {shlex.quote(path)} && LC_ALL=C ls -1ApL"
        listed = await self.sandbox.exec(command, cwd="/", timeout_s=ANSWER_MARGIN_S, user=self._user)
        if listed.error_type is not None:
            await self._require_sandbox(listed.stderr)
        names = sorted((listed.stdout or "").splitlines())
        if listed.return_code and not names:
            return f"Error: {(listed.stderr or '').strip() or 'the folder cannot be listed'}"
        if len(names) > MAX_ENTRIES:
            names[MAX_ENTRIES:] = [f"[... {len(names) - MAX_ENTRIES} more ...]"]
        return "\n".join(names) or "[empty folder]"

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

    async def _require_sandbox(self, reason: object) -> Sequence[str]:
        """Check that the sandbox lives; return the latest limit reached since the previous check, if any."""
        if not await is_alive(self.sandbox):
            message = f"the sandbox has ended: {reason}" if reason else "the sandbox has ended"
            raise InfrastructureError(message[:600], kind=FailureKind.SESSION_LOST)
        met: Sequence[str] = ()
        with suppress(RolloutError):  # the next use of the sandbox reports the error
            met = await self.sandbox.check()
        told, self._limits_told = self._limits_told, max(self._limits_told, len(met))
        return met[told:][-1:]


def raise_if_machine_error(error: OSError) -> None:
    """Raise InfrastructureError if the machine, and not the agent, caused a file error."""
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
