# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The folder in which an agent works, and its tools, inside a sandbox that somebody else started.

Two things are kept apart. What the agent's command did, however bad, is an observation. A sandbox that no longer
answers is :class:`InfrastructureError` with ``session_lost``. They look alike from outside, since an agent can kill
the process that reports to us; so when a call brings no answer, the sandbox is asked for a sign of life before anybody
is blamed.

``bash`` and ``python`` are sessions where the sandbox has them (:mod:`.consoles`), else each call is a process of its
own (:class:`.Processes`). A session begins with the first call that needs it: most rollouts never use one of the two.

Files are had from the sandbox itself where it :class:`.HasFiles`, which looks names up inside: a tenth of the CPU of
a program there, which is what others have (:class:`InsideFiles`). What that program answers is the agent's word, since
the agent can answer in its place: it is read with care, and speaks of no machine. The provider's upload and download
are never used: where those share a folder with the host they would follow a symlink of the agent's on the *host*.
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
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nemo_gym_prorl.failures import MACHINE_ERRNOS, AgentError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.tasks.arguments import BadArguments, parse_arguments
from nemo_gym_prorl.tasks.sandbox import HasFiles, HasSessions, Sandbox
from nemo_gym_prorl.tasks.workbench.consoles import ANSWER_MARGIN_S, Ask, Bash, Processes, Python
from nemo_gym_prorl.tasks.workbench.editor import Editor
from nemo_gym_prorl.tasks.workbench.tools import (
    TOOLS,
    BashArguments,
    EditorArguments,
    Output,
    PythonArguments,
    SubmitArguments,
    Tally,
    error_text,
)


READ_BYTES = 256 << 10
"""So much is read at once: providers bound what a command prints."""

WRITTEN_BYTES = 48 << 10
"""So much is written at once: the kernel takes no argument beyond 128 KiB."""


class NotAnswered(OSError):
    """The program was killed, or something else answered for it; says which."""


class InsideFiles:
    """A :class:`~nemo_gym_prorl.tasks.sandbox.HasFiles`.

    Args:
        ask: carries out a request.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """An ordinary file of at most ``limit`` bytes."""
        content = bytearray()
        while len(content) <= limit:
            request = {"op": "read", "path": path, "from": len(content), "size": READ_BYTES}
            answer = await self._asked(request)
            try:
                part = base64.b64decode(str(answer["content"]), validate=True)
            except (KeyError, ValueError) as error:
                raise NotAnswered("something else answered for the reader") from error
            content += part
            if len(part) < READ_BYTES:
                break
        if len(content) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return bytes(content)

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a whole file, and the folders above it; says whether there was one."""
        existed = []
        for at in range(0, max(1, len(data)), WRITTEN_BYTES):
            content = base64.b64encode(data[at : at + WRITTEN_BYTES]).decode()
            answer = await self._asked({"op": "write", "path": path, "content": content, "more": at > 0})
            existed.append(answer.get("existed") is True)
        return existed[0]

    async def _asked(self, request: dict[str, object]) -> dict[str, object]:
        answer = await self._ask(request, 0.0)
        if answer is None:
            raise NotAnswered("the program that has its files was killed")
        if "problem" in answer:
            number, said = answer.get("errno"), str(answer["problem"])
            raise OSError(said) if number in MACHINE_ERRNOS else OSError(number, said)
        return answer


PROBE_TIMEOUT_S = 30.0
"""How long a sandbox may take to show a sign of life, in seconds."""

PROBES = 4
PROBE_PAUSE_S = 0.3
"""A sandbox that does not answer but is said to run is asked so often: it may be just about to be found dead."""

MOST_BYTES = 10**15
MOST_SIGNALS = 128
"""Numbers beyond these are no counts and no exit codes."""

MAX_PROBLEM = 500
"""Most characters of what is said of a file that was taken out."""

SUBMITTED = "Submitted. The task is over: answer without calling a tool."
ALREADY_SUBMITTED = "Error: the solution was submitted already, the workspace is closed."

_PROBE_MARK = "prorl-alive"


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds of one tool call.

    Attributes:
        timeout_s: seconds a command may run if the model names no limit.
        max_timeout_s: the most that the model may ask for, in seconds.
        silence_s: seconds without output after which a command of a lasting shell is reported as waiting.
        output_bytes: the longest observation, in bytes.
    """

    timeout_s: float = 30.0
    max_timeout_s: float = 120.0
    silence_s: float = 10.0
    output_bytes: int = 16_000


@dataclass(frozen=True, slots=True)
class Taken:
    """A file that was taken out of the sandbox.

    Attributes:
        content: what is in it, or ``None`` if it can't be had.
        problem: why it can't.
    """

    content: bytes | None
    problem: str | None = None


class _NotTaken(Exception):
    """There is nothing to take; says what is the matter with the file."""


@dataclass(frozen=True, slots=True)
class Equipment:
    """What an image has for the tools.

    Attributes:
        bash: there is a bash.
        python: there is a Python.
        kernel: there is an IPython that runs as a kernel.
    """

    bash: bool = True
    python: bool = True
    kernel: bool = False


_LOOK = (
    "command -v bash > /dev/null && echo bash; command -v python3 > /dev/null && echo python && "
    "python3 -I -c 'import importlib.util as u, sys; "
    'print(sys.version_info >= (3, 7) and u.find_spec("IPython") and "kernel")\''
)


async def look(sandbox: Sandbox) -> Equipment:
    """What the image of a fresh sandbox has.

    Raises:
        InfrastructureError: it does not say.
    """
    result = await sandbox.exec(_LOOK, cwd="/", timeout_s=ANSWER_MARGIN_S)
    if result.error_type is not None:
        raise InfrastructureError(f"the sandbox does not say what is in it: {(result.stderr or '')[:MAX_PROBLEM]}")
    found = (result.stdout or "").split()
    return Equipment(bash="bash" in found, python="python" in found, kernel="kernel" in found)


class Workspace:
    """A working folder in a running sandbox; an :class:`~nemo_gym_prorl.tasks.task.OpenTools`.

    Args:
        sandbox: a started sandbox with ``sh``.
        folder: absolute path of the working folder inside; made by whatever first needs it.
        limits: bounds of tool calls.
        equipment: what its image has.
        submitted: what ``submit`` answers.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        folder: str,
        limits: ToolLimits,
        equipment: Equipment = Equipment(),
        submitted: str = SUBMITTED,
    ) -> None:
        self.sandbox = sandbox
        self.over = False
        self._tally = Tally()
        self._limits = limits
        self._submitted = submitted
        self._processes = Processes(self._ask, limits.output_bytes)
        self._files = sandbox if isinstance(sandbox, HasFiles) else InsideFiles(self._ask)
        self._has_kernel = equipment.kernel
        self.work_in(folder)

    def work_in(self, folder: str, variables: Mapping[str, str] | None = None) -> None:
        """Have the tools begin in another folder; comes before the first call.

        Args:
            folder: absolute path inside.
            variables: what the shell finds set, over what the image sets.
        """
        limit, sandbox = self._limits.output_bytes, self.sandbox
        self.folder = folder
        self._editor = Editor(self._files, folder, self._ask, limit)
        self._bash: Bash | None = None
        self._python: Python | None = None
        if isinstance(sandbox, HasSessions):
            self._bash = Bash(sandbox, folder, self._limits.silence_s, limit, self._require_sandbox, variables)
            if self._has_kernel:
                self._python = Python(sandbox, folder, limit, self._require_sandbox)

    async def write(self, contents: Mapping[str, str]) -> None:
        """Make the folder with these files (path in it, or absolute, to text).

        Raises:
            InfrastructureError: the sandbox did not do it.
        """
        try:
            for name, text in contents.items():
                await self._files.write_file(posixpath.join(self.folder, name), text.encode())
        except OSError as error:
            raise InfrastructureError(f"could not set up the workspace: {error}") from error

    async def close(self) -> None:
        """Let go of shell and kernel; best after their sandbox has ended."""
        for console in (self._bash, self._python):
            if console is not None:
                await console.close()
        self._bash = self._python = None

    async def call(self, tool: str, arguments: object) -> str:
        """Run one of :data:`.tools.TOOLS` and return the observation.

        Raises:
            AgentError: the agent used up its sandbox, which is gone.
            InfrastructureError: ``session_lost``, the sandbox is gone.
        """
        if self.over:
            return ALREADY_SUBMITTED
        try:
            observation = await self._call(tool, arguments)
        except AgentError as error:
            observation = error_text(error.reason, limit=self._limits.output_bytes)
            if (await self.sandbox.status()).value != "running":
                self._tally.count(tool, observation)
                raise
        self._tally.count(tool, observation)
        return observation

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """How the calls so far went, by tool; see :class:`~.tally.ToolCounts`."""
        return self._tally.as_json()

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """What tools know beyond files, and what of that is lost; see :class:`.task.ResumableTools`."""
        saved: dict[str, Any] = {"tally": self.tool_use(), "over": self.over}
        lost: list[str] = []
        if self._bash is not None:
            saved["shell"] = await self._bash.save()
            lost += ["shell"] if saved["shell"] is None else []
        if self._python is not None and self._python.begun:
            lost.append("kernel")
        return saved, lost

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Go on from there."""
        self._tally.resume(saved["tally"])
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
            return error_text(answer.get("problem") or "something else answered for the editor.", limit=limit)
        if isinstance(parsed, BashArguments):
            timeout_s = self._timeout(parsed.timeout_s)
            if self._bash is None:
                return await self._processes.bash(parsed, timeout_s)
            return await self._bash.call(parsed, timeout_s)
        if isinstance(parsed, PythonArguments):
            timeout_s = self._timeout(parsed.timeout_s)
            if self._python is None:
                return await self._processes.python(parsed, timeout_s)
            return await self._python.call(parsed, timeout_s)
        assert isinstance(parsed, SubmitArguments)
        self.over = True
        return self._submitted

    async def take(self, path: str, *, limit: int) -> Taken:
        """Take an ordinary file out.

        Args:
            path: in the working folder, or absolute.
            limit: its longest, in bytes.

        Raises:
            AgentError: the agent used up its sandbox.
            InfrastructureError: ``session_lost``, the sandbox is gone.
        """
        try:
            content = await self._read(path, limit)
        except _NotTaken as error:
            return Taken(None, f"{path} {error}"[:MAX_PROBLEM])
        return Taken(content)

    async def _read(self, path: str, limit: int) -> bytes:
        try:
            return await self._bounded(self._files.read_file(posixpath.join(self.folder, path), limit=limit))
        except NotAnswered as error:
            raise _NotTaken(f"could not be read: {error}") from error
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise _NotTaken(f"is longer than {limit} bytes") from error
            if error.errno == errno.EBUSY:
                raise _NotTaken("can't be read, since a program holds it") from error
            require_machine(error)
            raise _NotTaken("is not there") from error

    async def _edit(self, arguments: EditorArguments) -> dict[str, Any] | None:
        try:
            return await self._bounded(self._editor.call(arguments))
        except OSError as error:
            require_machine(error)
            raise

    async def _bounded[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Have the sandbox do something with its files, which depends on nothing that runs in it."""
        try:
            async with asyncio.timeout(ANSWER_MARGIN_S):
                return await work
        except TimeoutError as error:
            await self._require_sandbox("its files are out of reach")
            raise InfrastructureError("the sandbox does not give its files", kind=FailureKind.SESSION_LOST) from error
        except RolloutError as error:
            await self._require_sandbox(error.reason)
            raise

    def _timeout(self, asked: float | None) -> float:
        return min(asked or self._limits.timeout_s, self._limits.max_timeout_s)

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """One request to the toolbox; ``None`` if the sandbox lives but the toolbox was killed inside it."""
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

    async def _require_sandbox(self, trouble: object) -> None:
        if not await is_alive(self.sandbox):
            reason = f"the sandbox is gone: {trouble}" if trouble else "the sandbox is gone"
            raise InfrastructureError(reason[:600], kind=FailureKind.SESSION_LOST)


def require_machine(error: OSError) -> None:
    """Judge an error of a sandbox's file.

    Raises:
        InfrastructureError: it is the machine's: a disk that fails or is full, no file that could be opened any more.
    """
    if error.errno in MACHINE_ERRNOS:
        reason = f"the machine does not give the sandbox's files: {error}"
        raise InfrastructureError(reason, kind=FailureKind.SESSION_LOST) from error


async def is_alive(sandbox: Sandbox) -> bool:
    """Whether the sandbox still runs.

    One that can't even ``echo`` may still live: its agent may have removed what ``echo`` takes, or used up its
    processes. Then its provider's word counts.

    Raises:
        AgentError: it does not, by the agent's doing.
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
    """An answer, of which only texts and reasonable numbers are taken."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    return {
        name: value
        for name, value in answer.items()
        if isinstance(value, str) or (isinstance(value, int) and -MOST_SIGNALS < value < MOST_BYTES)
    }


@cache
def _toolbox_source() -> str:
    return files("nemo_gym_prorl.tasks.workbench").joinpath("toolbox.py").read_text(encoding="utf-8")
