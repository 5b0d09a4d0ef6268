# SPDX-License-Identifier: Apache-2.0
"""The folder in which an agent works, and its tools, inside a sandbox that somebody else started.

Two things are kept apart. What the agent's command did, however bad, is an observation. A sandbox that no longer
answers is :class:`InfrastructureError` with ``session_lost``. They look alike from outside, since an agent can kill
the process that reports to us; so when a call brings no answer, the sandbox is asked for a sign of life before anybody
is blamed.

``bash`` and ``python`` are sessions where the sandbox has them (:mod:`.consoles`), else each call is a process of its
own (:mod:`.one_off`).

Files are only touched by a program inside the sandbox, never through the provider's upload and download: with a
provider that shares a folder with the host those would follow a symlink of the agent's on the *host*. What that
program answers is the agent's word, since the agent can answer in its place: it is read with care.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import shlex
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.code import observations
from nemo_gym_prorl.tasks.code.consoles import ANSWER_MARGIN_S, Bash, Python
from nemo_gym_prorl.tasks.code.observations import Output
from nemo_gym_prorl.tasks.code.one_off import Processes
from nemo_gym_prorl.tasks.code.tools import (
    SOLUTION_FILE,
    BadArguments,
    BashArguments,
    EditorArguments,
    PythonArguments,
    parse_arguments,
)
from nemo_gym_prorl.tasks.sandbox import HasSessions, Sandbox


logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 30.0
"""How long a sandbox may take to show a sign of life, in seconds."""

PROBES = 4
PROBE_PAUSE_S = 0.3
"""A sandbox that does not answer but is said to run is asked so often: it may be just about to be found dead."""

MOST_BYTES = 10**15
MOST_SIGNALS = 128
"""Numbers beyond these are no counts and no exit codes."""

MAX_PROBLEM = 500
"""Most characters of what is said of an artefact."""

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
class Artefact:
    """The one file that leaves the sandbox.

    Attributes:
        source: its text, or ``None`` if there is none that can be graded.
        problem: why there is none.
    """

    source: str | None
    problem: str | None = None


class Workspace:
    """A working folder in a running sandbox.

    Args:
        sandbox: a started sandbox with ``sh``, ``bash`` and ``python3`` (3.8 or later).
        folder: absolute path of the working folder inside; made by :meth:`prepare`.
        limits: bounds of tool calls.
    """

    MAX_ARTEFACT_BYTES = 256 * 1024
    """Longest solution that is graded."""

    def __init__(self, sandbox: Sandbox, folder: str, limits: ToolLimits) -> None:
        self._sandbox = sandbox
        self._folder = folder
        self._limits = limits
        self._processes = Processes(self._ask, limits.output_bytes)
        self._bash: Bash | None = None
        self._python: Python | None = None

    async def prepare(self, contents: Mapping[str, str]) -> None:
        """Make the folder with these files (path to text), and start shell and kernel.

        Raises:
            InfrastructureError: the sandbox did not do it.
        """
        answer = await self._ask({"op": "write", "files": dict(contents)}, timeout_s=0.0)
        if answer is None or "problem" in answer:
            problem = "no answer; the image needs sh, bash and python3" if answer is None else answer["problem"]
            raise InfrastructureError(f"could not set up the workspace: {problem}")
        if isinstance(self._sandbox, HasSessions):
            await self._start_sessions(self._sandbox, with_kernel=answer.get("kernel") is True)

    async def close(self) -> None:
        """Let go of shell and kernel; best after their sandbox has ended."""
        for console in (self._bash, self._python):
            if console is not None:
                await console.close()
        self._bash = self._python = None

    async def call(self, tool: str, arguments: object) -> str:
        """Run ``bash``, ``python`` or ``str_replace_editor`` and return the observation.

        Raises:
            InfrastructureError: ``session_lost``, the sandbox is gone.
        """
        limit = self._limits.output_bytes
        try:
            parsed = parse_arguments(tool, arguments)
        except BadArguments as error:
            return str(Output(str(error)).within(limit))
        if isinstance(parsed, EditorArguments):
            answer = await self._ask({"op": "edit", "limit": limit} | parsed.model_dump(), 0.0)
            if answer is None:
                return observations.error("the editor was killed before it answered.", limit=limit)
            if isinstance(text := answer.get("text"), str):
                return str(Output(text).within(limit))
            return observations.error(answer.get("problem") or "something else answered for the editor.", limit=limit)
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
        raise ValueError(f"{tool} does not work in a workspace")

    async def take_artefact(self) -> Artefact:
        """Read the solution.

        Raises:
            InfrastructureError: ``session_lost``, the sandbox is gone.
        """
        request = {"op": "read", "path": SOLUTION_FILE, "limit": self.MAX_ARTEFACT_BYTES}
        answer = await self._ask(request, timeout_s=0.0)
        if answer is None:
            return Artefact(None, f"{SOLUTION_FILE} could not be read: the reader was killed inside the sandbox")
        if "problem" in answer:
            return Artefact(None, f"{SOLUTION_FILE} {answer['problem']}"[:MAX_PROBLEM])
        try:
            content = base64.b64decode(answer["content"], validate=True)
            return Artefact(content[: self.MAX_ARTEFACT_BYTES].decode("utf-8"))
        except UnicodeDecodeError:
            return Artefact(None, f"{SOLUTION_FILE} is not UTF-8 text")
        except (KeyError, TypeError, ValueError):
            return Artefact(None, f"{SOLUTION_FILE} could not be read: something else answered for the reader")

    async def _start_sessions(self, sandbox: HasSessions, *, with_kernel: bool) -> None:
        limit = self._limits.output_bytes
        starts: list[Awaitable[Bash | Python]] = [
            Bash.start(sandbox, self._folder, self._limits.silence_s, limit, self._require_sandbox)
        ]
        if with_kernel:
            starts.append(Python.start(sandbox, self._folder, limit, self._require_sandbox))
        else:
            logger.warning("the sandbox image has no ipykernel: the python tool keeps nothing between calls")
        failures = []
        for started in await asyncio.gather(*starts, return_exceptions=True):
            match started:
                case Bash():
                    self._bash = started
                case Python():
                    self._python = started
                case _:
                    failures.append(started)
        for failure in failures:
            if isinstance(failure, CallerError):
                raise InfrastructureError(f"could not set up the workspace: {failure.reason}") from failure
            raise failure

    def _timeout(self, asked: float | None) -> float:
        return min(asked or self._limits.timeout_s, self._limits.max_timeout_s)

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """One request to the toolbox; ``None`` if the sandbox lives but the toolbox was killed inside it."""
        mark = secrets.token_hex(8)
        text = json.dumps({"mark": mark, "cwd": self._folder} | dict(request))
        encoded = base64.b64encode(text.encode()).decode()
        command = f"exec python3 -I -c {shlex.quote(_toolbox_source())} {encoded}"
        failure = "no answer"
        try:
            result = await self._sandbox.exec(command, cwd="/", timeout_s=timeout_s + ANSWER_MARGIN_S)
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
        if not await is_alive(self._sandbox):
            reason = f"the sandbox is gone: {trouble}" if trouble else "the sandbox is gone"
            raise InfrastructureError(reason[:600], kind=FailureKind.SESSION_LOST)


async def is_alive(sandbox: Sandbox) -> bool:
    """Whether the sandbox still runs.

    One that can't even ``echo`` may still live: its agent may have removed what ``echo`` takes, or used up its
    processes. Then its provider's word counts.
    """
    for _ in range(PROBES):
        try:
            result = await sandbox.exec(f"echo {_PROBE_MARK}", cwd="/", timeout_s=PROBE_TIMEOUT_S)
            if result.error_type is None and _PROBE_MARK in (result.stdout or ""):
                return True
            if result.error_type == "timeout" or (await sandbox.status()).value != "running":
                return False
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
    return files("nemo_gym_prorl.tasks.code").joinpath("inside/toolbox.py").read_text(encoding="utf-8")
