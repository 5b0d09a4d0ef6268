# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``bash`` and ``python`` of one workspace, as sessions that live as long as its sandbox.

Invariants:

- What the agent did, however bad, is an observation: a shell or kernel that ended is replaced, and the model is told.
- A sandbox that is gone is ``session_lost``. The two look alike from here, so a session that ends is followed by a
  look at the sandbox before anybody is blamed.
- Every call ends: a session that does not answer long after its own time limit is replaced as well.
- Calls at the same time wait for each other, since there is one shell and one kernel.
- Either begins with its first call: a kernel costs as much as three sandboxes, and few rollouts use both.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.session_results import CellResult, ShellResult
from nemo_gym_prorl.tasks.sandbox import HasSessions, KernelSession, ShellSession
from nemo_gym_prorl.tasks.workbench.tools import (
    FAILED,
    OK,
    ONLY_FILES,
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
"""How much longer than its own time limit a session may take to answer, in seconds."""

RENEW_TIMEOUT_S = 60.0
"""How long a session may take to be replaced, in seconds."""

SHELL_VARIABLES: dict[str, str] = {"TERM": "dumb", "NO_COLOR": "1"}
"""Programs see a terminal, and would colour what only a model reads."""

KEYS: Mapping[str, str] = {"C-c": "\x03", "C-d": "\x04"}
"""Names of what can be typed besides lines."""

MOST_STATE = 256 << 10
"""Bytes of a shell's variables and functions that are carried over; one that has more is begun anew."""

_SAVE = r"""\builtin declare -p
\builtin declare -f
\builtin alias -p
\builtin trap -p
\builtin umask -p
\builtin shopt -p
\builtin set +o"""
"""Has bash write down what it knows, as commands."""

_BASHS_OWN = re.compile(
    r"^(declare -\S+ (BASH\w*|COMP_WORDBREAKS|DIRSTACK|EPOCH\w+|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID"
    r"|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID|_)(=.*)?|set [-+]o (monitor|history|histexpand|emacs|vi))(\n|$)",
    re.MULTILINE,
)
"""Variables that are each bash's own: at some that are set it leaves out all that follows. And how it serves a
terminal, which it would set up anew."""

_OPTION = re.compile(r"^shopt -[su] \w+$", re.MULTILINE)

_ENTER_KERNEL = """\
import os as _os, sys as _sys
try: _os.chdir({folder!r})
except OSError: pass
_sys.path.insert(0, "")
del _os, _sys
get_ipython().execution_count = 1
"""
"""Run in a fresh kernel: it is to work, and to look for modules, where the shell does, and to count from 1."""

RequireSandbox = Callable[[object], Awaitable[None]]
"""Raises ``session_lost``, with the given trouble as its reason, unless the sandbox lives."""


class _Unusable(Exception):
    """The session can't be replaced though its sandbox lives; says why."""


class _Session(Protocol):
    """A shell or a kernel."""

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


class _Console[Session: _Session, Asked](ABC):
    """What both have in common: one call at a time, and replacement.

    Args:
        what: ``shell`` or ``kernel``.
        sandbox: where it runs.
        folder: where it starts.
        limit: bytes of an observation.
        require_sandbox: tells an agent's doing from a lost sandbox.
    """

    def __init__(
        self, what: str, sandbox: HasSessions, folder: str, limit: int, require_sandbox: RequireSandbox
    ) -> None:
        self._what = what
        self._sandbox = sandbox
        self._folder = folder
        self._limit = limit
        self._require_sandbox = require_sandbox
        self._session: Session | None = None
        self._lock = asyncio.Lock()
        self._to_tell: list[str] = []
        """Notes on what was lost between two sandboxes, for the next call."""

    async def call(self, arguments: Asked, timeout_s: float) -> str:
        """One call; returns the observation, whatever becomes of the session.

        Raises:
            InfrastructureError: ``session_lost``.
        """
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
            except _Unusable as error:
                return self._error(str(error))

    @property
    def begun(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    def _told(self) -> list[str]:
        notes, self._to_tell = self._to_tell, []
        return notes

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    @abstractmethod
    async def _call(self, arguments: Asked, timeout_s: float) -> str:
        """Carry it out."""

    @abstractmethod
    async def _open(self) -> Session:
        """Start the first session."""

    @abstractmethod
    async def _enter(self, session: Session) -> None:
        """Have a fresh one work in the folder, which the agent may have removed."""

    async def _begun(self) -> Session:
        """The session; started if this is the first call."""
        if self._session is None:
            await self._renew(f"no {self._what} could be started")
        assert self._session is not None
        return self._session

    async def _replace(self, output: Output, status: str, notes: Sequence[str] = ()) -> str:
        await self._renew()
        return observation(output, status, notes, limit=self._limit)

    async def _renew(self, trouble: str = "") -> None:
        try:
            async with asyncio.timeout(RENEW_TIMEOUT_S):
                if self._session is None:
                    self._session = await self._open()
                else:
                    await self._session.restart()
                await self._enter(self._session)
        except (RolloutError, TimeoutError) as error:
            await self._require_sandbox(error)
            reason = error.reason if isinstance(error, RolloutError) else "it did not answer"
            trouble = trouble or f"the {self._what} ended and no new one could be started"
            raise _Unusable(f"{trouble}: {reason}") from error

    def _error(self, reason: str) -> str:
        return error_text(reason, limit=self._limit)


class Bash(_Console[ShellSession, BashArguments]):
    """The ``bash`` tool.

    Args:
        sandbox: where it runs.
        folder: where it starts.
        silence_s: a command without output for so long is reported as waiting.
        limit: bytes of an observation.
        require_sandbox: tells an agent's doing from a lost sandbox.
        variables: what the shell finds set, over what the image sets.
    """

    def __init__(
        self,
        sandbox: HasSessions,
        folder: str,
        silence_s: float,
        limit: int,
        require_sandbox: RequireSandbox,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("shell", sandbox, folder, limit, require_sandbox)
        self._silence_s = silence_s
        self._variables = SHELL_VARIABLES | dict(variables or {})
        self._seen = ""
        self._code = 0
        """With which the last command ended."""
        self._saved: Mapping[str, Any] = {}
        """What the first session goes on from."""

    async def save(self) -> dict[str, Any] | None:
        """Folder, variables, functions and options of the shell, as bash itself writes them; empty where there is no
        shell, ``None`` where they can't be had, as while a command runs."""
        async with self._lock:
            if self._session is None:
                return dict(self._saved)
            if self._session.running or self._session.exited:
                return None
            try:
                said = await self._session.aside(_SAVE, timeout_s=ANSWER_MARGIN_S, output_limit=MOST_STATE)
            except RolloutError:
                return None  # whatever it was, the next call meets it
            if said.exit_code is None or said.timed_out or said.exited or said.omitted:
                return None
            return {"state": _BASHS_OWN.sub("", said.output), "folder": said.cwd, "code": self._code}

    def resume(self, saved: Mapping[str, Any] | None, lost: Sequence[str]) -> None:
        """Begin with what :meth:`save` gave."""
        self._saved = saved or {}
        if "shell" in lost:
            self._to_tell.append(had_ended("shell"))
        elif "programs" in lost:
            self._to_tell.append(stopped_programs())

    async def _call(self, arguments: BashArguments, timeout_s: float) -> str:
        if arguments.restart:
            return await self._replace(Output(), restarted("shell"))
        shell = await self._begun()
        if arguments.input is not None:
            return await self._type(shell, arguments.input, timeout_s)
        assert arguments.command is not None
        left, notes = Output(), self._told()
        if shell.running and not shell.exited:
            action = await shell.wait(timeout_s=timeout_s, silence_s=0.0)
            if action.waiting:
                return self._error(
                    'the command before still runs: answer it with input, end it with input "C-c", or restart.'
                )
            left = self._fresh(action)
            notes.append(ended_before(action.exit_code))
        if shell.exited:
            await self._require_sandbox(None)
            await self._renew()
            notes.append(had_ended("shell"))
        self._seen = ""
        action = await shell.run(
            arguments.command, timeout_s=timeout_s, silence_s=self._silence_s, output_limit=self._limit
        )
        return await self._report(action, timeout_s, left, notes)

    async def _type(self, shell: ShellSession, line: str, timeout_s: float) -> str:
        if not shell.running or shell.exited:
            return self._error("no command is running that could take input.")
        if line:
            await shell.send(KEYS.get(line, line if line.endswith("\n") else line + "\n"))
        action = await shell.wait(timeout_s=timeout_s, silence_s=self._silence_s)
        return await self._report(action, timeout_s, Output(), [])

    async def _report(self, action: ShellResult, timeout_s: float, left: Output, notes: list[str]) -> str:
        output = left.then(self._fresh(action))
        if action.waiting:
            status = waiting(self._silence_s)
        elif action.timed_out or action.exit_code is None:
            status = timed_out(timeout_s)
        else:
            status = exit_code(action.exit_code)
        if not action.exited:
            self._code = self._code if action.exit_code is None else action.exit_code
            return observation(output, status, notes, limit=self._limit)
        await self._require_sandbox(None)
        return await self._replace(output, status, [*notes, ended("shell")])

    def _fresh(self, action: ShellResult) -> Output:
        """What the command has printed since the model last read it; all of it again once it is too long for that."""
        text, seen = action.output, self._seen
        self._seen = text if action.waiting and not action.omitted else ""
        if action.omitted or not text.startswith(seen):
            return Output.of(text, action.omitted)
        return Output(text[len(seen) :])

    async def _open(self) -> ShellSession:
        return await self._sandbox.shell(env=self._variables)

    async def _enter(self, session: ShellSession) -> None:
        self._seen, self._code = "", 0
        saved, self._saved = self._saved, {}
        begin = f"cd -- {shlex.quote(saved.get('folder', self._folder))}"
        await session.run(begin, timeout_s=ANSWER_MARGIN_S, silence_s=None)
        if saved:
            # Some functions can only be read with the options that they were written with. Those of ``set`` come last
            # in what bash wrote: with some of them what follows would end it.
            options = "\n".join(_OPTION.findall(saved["state"]))
            for known in (options, f"{{ {saved['state']}\n}} 2>/dev/null"):
                begun = await session.run(known, timeout_s=ANSWER_MARGIN_S, silence_s=None)
            if begun.exit_code != 0:
                self._to_tell.append(had_ended("shell"))
            self._code = saved["code"]
        if self._code:
            await session.run(f"(exit {self._code})", timeout_s=ANSWER_MARGIN_S, silence_s=None)


class Python(_Console[KernelSession, PythonArguments]):
    """The ``python`` tool; arguments as of :class:`_Console`."""

    def __init__(self, sandbox: HasSessions, folder: str, limit: int, require_sandbox: RequireSandbox) -> None:
        super().__init__("kernel", sandbox, folder, limit, require_sandbox)

    def resume(self, lost: Sequence[str]) -> None:
        """Tell at the first call what is lost."""
        if "kernel" in lost:
            self._to_tell.append(had_ended("kernel"))

    async def _call(self, arguments: PythonArguments, timeout_s: float) -> str:
        if arguments.restart:
            return await self._replace(Output(), restarted("kernel"))
        assert arguments.code is not None
        kernel, notes = await self._begun(), self._told()
        try:
            cell = await kernel.run(arguments.code, timeout_s=timeout_s, output_limit=self._limit)
        except RolloutError as error:
            # It ended between two calls, by what runs in the background.
            await self._require_sandbox(error)
            await self._renew()
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
        await self._require_sandbox(None)
        return await self._replace(output, status, [*notes, ended("kernel")])

    async def _open(self) -> KernelSession:
        return await self._sandbox.kernel()

    async def _enter(self, session: KernelSession) -> None:
        await session.run(_ENTER_KERNEL.format(folder=self._folder), timeout_s=ANSWER_MARGIN_S)


Ask = Callable[[Mapping[str, Any], float], Awaitable[dict[str, Any] | None]]
"""Asks the program inside the sandbox, within so many seconds; ``None`` if it was killed there."""


class Processes:
    """The two tools.

    Args:
        ask: carries out a request.
        limit: bytes of an observation.
    """

    def __init__(self, ask: Ask, limit: int) -> None:
        self._ask = ask
        self._limit = limit

    async def bash(self, arguments: BashArguments, timeout_s: float) -> str:
        """One call of ``bash``; returns the observation."""
        if arguments.restart:
            return self._said(Output(), restarted("shell"))
        if arguments.command is None:
            return error_text("no command is running that could take input.", limit=self._limit)
        return await self._run(["bash", "-c", arguments.command], "", timeout_s, exit_code)

    async def python(self, arguments: PythonArguments, timeout_s: float) -> str:
        """One call of ``python``; returns the observation."""
        if arguments.code is None:
            return self._said(Output(), restarted("kernel"))
        return await self._run(["python3", "-"], arguments.code, timeout_s, lambda code: FAILED if code else OK)

    async def _run(self, argv: list[str], stdin: str, timeout_s: float, status: Callable[[int], str]) -> str:
        request = {"op": "run", "argv": argv, "stdin": stdin, "timeout_s": timeout_s, "limit": self._limit}
        match await self._ask(request, timeout_s):
            case None:
                reason = "the command killed the process that reports on it; its output is lost."
            case {"timed_out": True, "head": str(head), "omitted": int(omitted), "tail": str(tail)}:
                return self._said(Output(head, max(0, omitted), tail), timed_out(timeout_s))
            case {"exit_code": int(code), "head": str(head), "omitted": int(omitted), "tail": str(tail)}:
                # As a shell would say it: 128 + N after signal N.
                return self._said(Output(head, max(0, omitted), tail), status(code if code >= 0 else 128 - code))
            case answer:
                reason = str(answer.get("problem", "something else answered for the command."))
        return error_text(reason, limit=self._limit)

    def _said(self, output: Output, status: str) -> str:
        return observation(output, status, [ONLY_FILES], limit=self._limit)
