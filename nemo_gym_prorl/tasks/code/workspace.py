# SPDX-License-Identifier: Apache-2.0
"""The folder in which an agent works, inside a sandbox that somebody else started.

Two things are kept apart. What the agent's command did, however bad, is an observation. A sandbox that no longer
answers is :class:`InfrastructureError` with ``session_lost``. They look alike from outside, since an agent can kill
the process that reports to us; so when a call brings no answer, the sandbox is asked for a sign of life before anybody
is blamed.

Files are only touched by a program inside the sandbox, never through the provider's upload and download: with a
provider that shares a folder with the host those would follow a symlink of the agent's on the *host*.
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.code.tools import (
    SOLUTION_FILE,
    BadArguments,
    BashArguments,
    EditorArguments,
    PythonArguments,
    parse_arguments,
    render_run,
)


ANSWER_MARGIN_S = 20.0
"""How much longer than a command itself the sandbox may take to answer for it, in seconds."""

PROBE_TIMEOUT_S = 30.0
"""How long a sandbox may take to show a sign of life, in seconds."""

_PROBE_MARK = "prorl-alive"


class ExecResult(Protocol):
    """What a sandbox says of a command."""

    @property
    def stdout(self) -> str | None: ...

    @property
    def stderr(self) -> str | None: ...

    @property
    def return_code(self) -> int: ...

    @property
    def error_type(self) -> str | None: ...


class Sandbox(Protocol):
    """The part of Gym's ``AsyncSandbox`` that a coding task uses."""

    async def exec(
        self, command: str, *, cwd: str | None = None, timeout_s: int | float | None = None
    ) -> ExecResult: ...

    async def upload(self, local_path: Path | str, remote_path: str) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds of one tool call.

    Attributes:
        timeout_s: seconds a command may run if the model names no limit.
        max_timeout_s: the most that the model may ask for, in seconds.
        output_bytes: how much of its output is kept, in bytes, half from each end.
    """

    timeout_s: float = 30.0
    max_timeout_s: float = 120.0
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

    async def prepare(self, contents: Mapping[str, str]) -> None:
        """Make the folder with these files (path to text).

        Raises:
            InfrastructureError: the sandbox did not do it.
        """
        answer = await self._ask({"op": "write", "files": dict(contents)}, timeout_s=0.0)
        problem = "the sandbox gave no answer" if answer is None else answer.get("problem")
        if problem:
            raise InfrastructureError(f"could not set up the workspace: {problem}")

    async def call(self, tool: str, arguments: object) -> str:
        """Run ``bash``, ``python`` or ``str_replace_editor`` and return the observation.

        Raises:
            InfrastructureError: ``session_lost``, the sandbox is gone.
        """
        try:
            parsed = parse_arguments(tool, arguments)
        except BadArguments as error:
            return str(error)
        if isinstance(parsed, EditorArguments):
            answer = await self._ask({"op": "edit", "limit": self._limits.output_bytes} | parsed.model_dump(), 0.0)
            if answer is None:
                return "Error: the editor was killed before it answered."
            return str(answer["text"]) if "text" in answer else f"Error: {answer['problem']}"
        if isinstance(parsed, BashArguments):
            timeout_s = min(parsed.timeout_s or self._limits.timeout_s, self._limits.max_timeout_s)
            return await self._run(["bash", "-c", parsed.command], "", timeout_s)
        if isinstance(parsed, PythonArguments):
            return await self._run(["python3", "-"], parsed.code, self._limits.timeout_s)
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
            return Artefact(None, f"{SOLUTION_FILE} {answer['problem']}")
        try:
            return Artefact(base64.b64decode(answer["content"]).decode("utf-8"))
        except UnicodeDecodeError:
            return Artefact(None, f"{SOLUTION_FILE} is not UTF-8 text")

    async def _run(self, argv: list[str], stdin: str, timeout_s: float) -> str:
        request = {"op": "run", "argv": argv, "stdin": stdin, "timeout_s": timeout_s}
        answer = await self._ask(request | {"limit": self._limits.output_bytes}, timeout_s)
        if answer is None:
            return "Error: the command killed the process that reports on it; its output is lost."
        return render_run(answer, timeout_s) if "exit_code" in answer else f"Error: {answer['problem']}"

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
                    answer = json.loads(line.removeprefix(mark))
                    return answer if isinstance(answer, dict) else None
            failure = (result.stderr or "").strip() or f"exit code {result.return_code}"
        if not await is_alive(self._sandbox):
            raise InfrastructureError(f"the sandbox is gone: {failure[-500:]}", kind=FailureKind.SESSION_LOST)
        return None


async def is_alive(sandbox: Sandbox) -> bool:
    """Whether the sandbox still runs commands."""
    try:
        result = await sandbox.exec(f"echo {_PROBE_MARK}", cwd="/", timeout_s=PROBE_TIMEOUT_S)
    except (RuntimeError, OSError):
        return False
    return result.error_type is None and _PROBE_MARK in (result.stdout or "")


@cache
def _toolbox_source() -> str:
    return files("nemo_gym_prorl.tasks.code").joinpath("inside/toolbox.py").read_text(encoding="utf-8")
