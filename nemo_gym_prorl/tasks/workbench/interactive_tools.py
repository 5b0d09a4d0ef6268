# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tools ``bash`` and ``python``: persistent sessions. Without IPython, ``python`` is one process per call.

Invariants of sessions:

- A session that the agent's code ends is replaced, and the observation reports the replacement.
- The end of the sandbox is ``session_lost``. The end of a session looks the same in both cases, so the sandbox is
  probed after each session's end.
- Every call returns: a session that does not answer long after its time limit is replaced, too.
- Concurrent calls of a tool are serialized, since there is one shell and one kernel.
- A kernel starts with its first call, since kernels are expensive. A shell starts earlier (:meth:`Bash.start`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.sandbox_results import CellResult, ShellResult
from nemo_gym_prorl.tasks.sandbox import ExecResult, Sandbox
from nemo_gym_prorl.tasks.workbench.observations import (
    FAILED,
    OK,
    ONLY_FILES_KEPT,
    BashArguments,
    Output,
    PythonArguments,
    ended,
    ended_before,
    error_text,
    exit_code,
    had_ended,
    observation,
    restarted,
    result_text,
    stopped_programs,
    timed_out,
    waiting,
)


ANSWER_MARGIN_S = 20.0
"""Seconds that a session may take beyond a call's time limit, for the transport and a loaded machine."""

RESTART_TIMEOUT_S = 60.0
"""Seconds for starting or replacing a session; a kernel's imports take several seconds on a loaded machine."""

SHELL_VARIABLES: dict[str, str] = {"TERM": "dumb", "NO_COLOR": "1"}
"""Environment variables against colours, which programs print on a terminal and policies should not read."""

KEYS: Mapping[str, str] = {"C-c": "\x03", "C-d": "\x04"}
"""Control characters by the names with which the policy sends them."""

MAX_STATE_BYTES = 256 << 10
"""Maximum bytes of a shell's saved state; a shell with more state counts as lost."""

_SAVE_STATE_SCRIPT = r"""\builtin declare -p
\builtin declare -f
\builtin alias -p
\builtin trap -p
\builtin umask -p
\builtin shopt -p
\builtin set +o"""
"""Script that prints the shell's state as bash commands."""

_BASH_INTERNALS = re.compile(
    r"^(declare -\S+ (BASH\w*|COMP_WORDBREAKS|DIRSTACK|EPOCH\w+|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID"
    r"|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID|_)(=.*)?|set [-+]o (monitor|history|histexpand|emacs|vi))(\n|$)",
    re.MULTILINE,
)
"""Lines that must not be restored: read-only variables, on which bash would stop reading, and terminal options."""

_OPTION = re.compile(r"^shopt -[su] \w+$", re.MULTILINE)

_KERNEL_SETUP = """\
import os as _os, sys as _sys
try: _os.chdir({folder!r})
except OSError: pass
_sys.path.insert(0, "")
del _os, _sys
get_ipython().execution_count = 1
"""
"""Code that sets a fresh kernel's working folder, module path and cell counter."""

RequireSandbox = Callable[[object], Awaitable[Sequence[str]]]
"""Function that raises ``session_lost`` with a given reason if the sandbox has ended; returns limits newly reached."""


class _SessionUnavailable(Exception):
    """The session cannot be replaced although its sandbox lives; the message contains the reason."""


class _InteractiveTool[Asked](ABC):
    """Tool with one session: serializes calls, and replaces the session when it ends.

    Args:
        what: kind of the session, ``shell`` or ``kernel``, for messages.
        folder: initial working folder.
        limit: maximum bytes of an observation.
    """

    def __init__(self, what: str, sandbox: Sandbox, folder: str, limit: int, require_sandbox: RequireSandbox) -> None:
        self._what = what
        self._sandbox = sandbox
        self._folder = folder
        self._limit = limit
        self._require_sandbox = require_sandbox
        self._session: Any = None
        self._lock = asyncio.Lock()
        self._pending_notes: list[str] = []
        """Notes for the next observation about state that was lost with a checkpoint."""

    async def call(self, arguments: Asked, timeout_s: float) -> str:
        """Execute a call and return the observation, even if the session ends during the call."""
        async with self._lock:
            try:
                try:
                    async with asyncio.timeout(timeout_s + ANSWER_MARGIN_S):
                        return await self._call(arguments, timeout_s)
                except CallerError as error:
                    return self._error(error.reason)
                except TimeoutError:
                    await self._require_sandbox(None)
                    return await self._replace(Output(), timed_out(timeout_s), [ended(self._what)])
                except RolloutError as error:
                    await self._require_sandbox(error)
                    return await self._replace(Output(), ended(self._what))
            except _SessionUnavailable as error:
                return self._error(str(error))

    @property
    def begun(self) -> bool:
        return self._session is not None

    def _take_notes(self) -> list[str]:
        notes, self._pending_notes = self._pending_notes, []
        return notes

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @abstractmethod
    async def _call(self, arguments: Asked, timeout_s: float) -> str:
        """Execute a call; errors of the session are handled in :meth:`call`."""

    @abstractmethod
    async def _open(self) -> Any:
        """Start the first session, a shell or a kernel."""

    @abstractmethod
    async def _enter(self, session: Any) -> None:
        """Prepare a fresh session, for example its working folder, which the agent may have removed."""

    async def _require_session(self) -> Any:
        if self._session is None:
            await self._restart(f"no {self._what} could be started")
        return self._session

    async def _replace(self, output: Output, status: str, notes: Sequence[str] = ()) -> str:
        await self._restart()
        return observation(output, status, notes, limit=self._limit)

    async def _restart(self, trouble: str = "") -> None:
        try:
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                if self._session is None:
                    self._session = await self._open()
                else:
                    await self._session.restart()
                await self._enter(self._session)
        except (RolloutError, TimeoutError) as error:
            await self._require_sandbox(error)
            reason = error.reason if isinstance(error, RolloutError) else f"no answer within {RESTART_TIMEOUT_S:g} s"
            trouble = trouble or f"the {self._what} ended and no new one could be started"
            raise _SessionUnavailable(f"{trouble}: {reason}") from error

    def _error(self, reason: str) -> str:
        return error_text(reason, limit=self._limit)


class Bash(_InteractiveTool[BashArguments]):
    """Tool ``bash`` as a persistent shell; further arguments as of :class:`_InteractiveTool`.

    Args:
        silence_s: seconds without output after which a command is reported as waiting.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        folder: str,
        silence_s: float,
        limit: int,
        require_sandbox: RequireSandbox,
        variables: Mapping[str, str],
        user: str | int | None,
    ) -> None:
        super().__init__("shell", sandbox, folder, limit, require_sandbox)
        self._user = user
        self._silence_s = silence_s
        self._variables = variables
        self._seen = ""
        self._code = 0
        """Exit code of the last command, which a resumed shell restores as ``$?``."""
        self._saved: Mapping[str, Any] = {}
        """State that the next shell restores when it starts."""

    async def start(self) -> None:
        """Start the shell before the first call. A failed start in a live sandbox is not raised: the first call tries
        again, and reports its own failure."""
        async with self._lock:
            with suppress(_SessionUnavailable):
                await self._require_session()

    async def save(self) -> dict[str, Any] | None:
        """Return the shell's folder, last exit code, and variables, functions and options as bash commands.

        Returns:
            The state that was to be restored (``{}`` if none) if no shell was started; ``None`` if the state is lost,
            for example because a command runs.
        """
        async with self._lock:
            if self._session is None:
                return dict(self._saved)
            if self._session.running or self._session.exited:
                return None
            try:
                state = await self._session.aside(
                    _SAVE_STATE_SCRIPT, timeout_s=ANSWER_MARGIN_S, output_limit=MAX_STATE_BYTES
                )
            except RolloutError:
                return None  # the next call reports the failure
            if state.exit_code is None or state.timed_out or state.exited or state.omitted:
                return None
            return {"state": _BASH_INTERNALS.sub("", state.output), "folder": state.cwd, "code": self._code}

    def resume(self, saved: Mapping[str, Any] | None, lost: Sequence[str]) -> None:
        """Restore a state of :meth:`save` when the shell starts; report the parts in ``lost`` that concern shells."""
        self._saved = saved or {}
        if "shell" in lost:
            self._pending_notes.append(had_ended("shell"))
        elif "programs" in lost:
            self._pending_notes.append(stopped_programs())

    async def _call(self, arguments: BashArguments, timeout_s: float) -> str:
        if arguments.restart:
            return await self._replace(Output(), restarted("shell"))
        shell = await self._require_session()
        if arguments.input is not None:
            return await self._send_input(shell, arguments.input, timeout_s)
        assert arguments.command is not None
        left, notes = Output(), self._take_notes()
        if shell.running and not shell.exited:
            action = await shell.wait(timeout_s=timeout_s, silence_s=0.0)
            if action.waiting:
                return self._error(
                    'the command before still runs: answer it with input, end it with input "C-c", or restart.'
                )
            left = self._unread_output(action)
            notes.append(ended_before(action.exit_code))
        if shell.exited:
            await self._require_sandbox(None)
            await self._restart()
            notes.append(had_ended("shell"))
        self._seen = ""
        action = await shell.run(
            arguments.command, timeout_s=timeout_s, silence_s=self._silence_s, output_limit=self._limit
        )
        return await self._report(action, timeout_s, left, notes)

    async def _send_input(self, shell: Any, line: str, timeout_s: float) -> str:
        if not shell.running or shell.exited:
            return self._error("no command is running that could take input.")
        if line:
            await shell.send(KEYS.get(line, line if line.endswith("\n") else line + "\n"))
        action = await shell.wait(timeout_s=timeout_s, silence_s=self._silence_s)
        return await self._report(action, timeout_s, Output(), [])

    async def _report(self, action: ShellResult, timeout_s: float, left: Output, notes: list[str]) -> str:
        output = left.then(self._unread_output(action))
        if action.waiting:
            status = waiting(self._silence_s)
        elif action.timed_out or action.exit_code is None:
            status = timed_out(timeout_s)
        else:
            status = exit_code(action.exit_code)
        if action.exited or action.exit_code == 128 + signal.SIGKILL:
            notes += await self._require_sandbox(None)
        if not action.exited:
            self._code = self._code if action.exit_code is None else action.exit_code
            return observation(output, status, notes, limit=self._limit)
        return await self._replace(output, status, [*notes, ended("shell")])

    def _unread_output(self, action: ShellResult) -> Output:
        """Return the output that the policy has not seen, or all output if some was omitted."""
        text, seen = action.output, self._seen
        self._seen = text if action.waiting and not action.omitted else ""
        if action.omitted or not text.startswith(seen):
            return Output.of(text, action.omitted)
        return Output(text[len(seen) :])

    async def _open(self) -> Any:
        return await self._sandbox.shell(env=self._variables, user=self._user)

    async def _enter(self, session: Any) -> None:
        self._seen, self._code = "", 0
        saved, self._saved = self._saved, {}
        # A program runs here, since the first program of a bash starts slowly and would delay the policy.
        begin = f"cd -- {shlex.quote(saved.get('folder', self._folder))}; command cat </dev/null"
        await session.run(begin, timeout_s=ANSWER_MARGIN_S, silence_s=None)
        if saved:
            # Options of ``shopt`` come first, since functions may need options. Options of ``set`` come last, since
            # some (errexit) would end the shell during the rest.
            options = "\n".join(_OPTION.findall(saved["state"]))
            for known in (options, f"{{ {saved['state']}\n}} 2>/dev/null"):
                begun = await session.run(known, timeout_s=ANSWER_MARGIN_S, silence_s=None)
            if begun.exit_code != 0:
                self._pending_notes.append(had_ended("shell"))
            self._code = saved["code"]
        if self._code:
            await session.run(f"(exit {self._code})", timeout_s=ANSWER_MARGIN_S, silence_s=None)


class Python(_InteractiveTool[PythonArguments]):
    """Tool ``python`` as a persistent IPython kernel; arguments as of :class:`_InteractiveTool`."""

    def __init__(self, sandbox: Sandbox, folder: str, limit: int, require_sandbox: RequireSandbox) -> None:
        super().__init__("kernel", sandbox, folder, limit, require_sandbox)

    def resume(self, lost: Sequence[str]) -> None:
        """Report the loss of the kernel, if in ``lost``, with the first observation."""
        if "kernel" in lost:
            self._pending_notes.append(had_ended("kernel"))

    async def _call(self, arguments: PythonArguments, timeout_s: float) -> str:
        if arguments.restart:
            return await self._replace(Output(), restarted("kernel"))
        assert arguments.code is not None
        kernel, notes = await self._require_session(), self._take_notes()
        try:
            cell = await kernel.run(arguments.code, timeout_s=timeout_s, output_limit=self._limit)
        except RolloutError as error:
            # The kernel died between two calls, for example killed by a background thread or by a shell command.
            await self._require_sandbox(error)
            await self._restart()
            notes.append(had_ended("kernel"))
            cell = await kernel.run(arguments.code, timeout_s=timeout_s, output_limit=self._limit)
        return await self._report(cell, timeout_s, notes)

    async def _report(self, cell: CellResult, timeout_s: float, notes: list[str]) -> str:
        output = Output.of(cell.output, cell.omitted)
        for data in cell.data:
            output = output.then(Output(result_text(data)))
        if cell.error is not None:
            output = output.then(Output(cell.error))
        status = FAILED if cell.error is not None or cell.died else OK
        if cell.timed_out:
            status = timed_out(timeout_s)
        if not cell.died:
            return observation(output, status, notes, limit=self._limit)
        notes += await self._require_sandbox(None)
        return await self._replace(output, status, [*notes, ended("kernel")])

    async def _open(self) -> Any:
        return await self._sandbox.kernel()

    async def _enter(self, session: Any) -> None:
        await session.run(_KERNEL_SETUP.format(folder=self._folder), timeout_s=ANSWER_MARGIN_S)


class StatelessPython:
    """Tool ``python`` with a new process for each call, for images without IPython."""

    begun = False

    def __init__(
        self, run_script: Callable[..., Awaitable[ExecResult]], limit: int, require_sandbox: RequireSandbox
    ) -> None:
        self._run_script = run_script
        self._limit = limit
        self._require_sandbox = require_sandbox

    async def call(self, arguments: PythonArguments, timeout_s: float) -> str:
        if arguments.code is None:
            return self._observation("", restarted("kernel"))
        if "\0" in arguments.code:
            return error_text("the code must not hold a NUL character.", limit=self._limit)
        end = secrets.token_hex(8)
        script = f"exec python3 - 2>&1 <<'{end}'\n{arguments.code}\n{end}\n"
        done = await self._run_script(script, timeout_s=timeout_s)
        if done.error_type == "sandbox":
            await self._require_sandbox(done.stderr)
            return error_text(done.stderr or "the process could not start.", limit=self._limit)
        status = FAILED if done.return_code else OK
        return self._observation(done.stdout or "", status if done.error_type is None else timed_out(timeout_s))

    def resume(self, lost: Sequence[str]) -> None:
        """Do nothing, since no state can be lost."""

    async def close(self) -> None:
        """Do nothing, since no process is left."""

    def _observation(self, text: str, status: str) -> str:
        return observation(Output(text), status, [ONLY_FILES_KEPT], limit=self._limit)
