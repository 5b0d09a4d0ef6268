# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Whether what a policy said is the expected answer, decided in processes that may be lost.

Comparing is done by ``math-verify`` and sympy, which some answers keep busy for ever or have eat all memory; so it
happens in children of a few worker processes (:mod:`.worker`), off the event loop and within bounds of CPU time and
memory. Nothing of a policy's sandbox comes near them: an answer is text.

A comparison that ends without a word is blamed as code is in ``tasks/code/grading.py``. What no answer can bring
about (a worker is gone, a process was killed from outside, nothing came long after the CPU time was over) is the
machine's. Anything else the answer may have done: it is compared once more, unless it has used up its CPU time, and
then the expected answer with itself. If that is fine, the answer is to blame and has no reward; if not, nobody could
be graded on the row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, TaskError
from nemo_gym_prorl.processes import interpreter_environ
from nemo_gym_prorl.tasks.extras import require_extras
from nemo_gym_prorl.tasks.final_answer import MAX_ANSWER_CHARS, final_answer
from nemo_gym_prorl.tasks.math.answers import unwrapped
from nemo_gym_prorl.tasks.math.verdicts import Verdict


TRIES = 2
"""So often an answer may break its comparison, and so often the machine may."""

START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to import sympy; about one where the machine is idle."""

STARVED_S = 120.0
"""Seconds that a comparison may take beyond its CPU time before it counts as the machine's trouble."""

_CONTROLLED = 10_000


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Bounds of comparisons.

    Attributes:
        cpu_s: CPU seconds of one.
        memory_mib: address space of one, in MiB; sympy alone takes about 150.
        workers: how many run at a time.
    """

    cpu_s: int = 5
    memory_mib: int = 1024
    workers: int = 2


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of an answer.

    Attributes:
        right: it is the expected one.
        verdict: a word of :class:`.Verdict`.
        extracted: the answer as it stands in the message; empty if there is none.
        detail: why, for a person.
    """

    right: bool
    verdict: Verdict
    extracted: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Lost:
    """A comparison that ended without a word."""

    verdict: Verdict
    why: str
    by_machine: bool


class MathChecker:
    """Compares answers; starts its workers when it is first asked.

    Raises:
        InfrastructureError: ``math-verify`` is not installed; says how to get it.
    """

    def __init__(self, limits: CheckLimits | None = None) -> None:
        require_extras("math")
        self._limits = limits or CheckLimits()
        self._workers = [_Worker() for _ in range(self._limits.workers)]
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._controlled: set[str] = set()

    async def check(self, expected: str, said: str, question: str = "") -> Checked:
        """Whether a message gives the expected answer, which :func:`.final_answer.final_answer` finds in it.

        Args:
            expected: the right answer, in LaTeX, with or without delimiters or a box around it.
            said: the policy's last message.
            question: what was asked. An answer that repeats a part of it which is to be worked out is none.

        Raises:
            TaskError: the expected answer can't be compared with itself.
            InfrastructureError: ``verifier_error``, nothing could be compared.
        """
        answer = final_answer(said)
        if answer is None:
            return Checked(False, Verdict.NO_ANSWER, "", r"there is no \boxed{...} and no line with an answer")
        if len(answer) > MAX_ANSWER_CHARS:
            shown = answer[:MAX_ANSWER_CHARS]
            return Checked(False, Verdict.UNREADABLE, shown, f"it is longer than {MAX_ANSWER_CHARS} characters")
        outcome = await self._compared(expected, answer, question)
        if isinstance(outcome, _Lost):
            await self.require_gradeable(expected)
            return Checked(False, outcome.verdict, answer, outcome.why)
        verdict, why = outcome
        return Checked(verdict is Verdict.RIGHT, verdict, answer, why)

    async def require_gradeable(self, expected: str) -> None:
        """See that the expected answer, if a policy gave it, would be right. Remembered.

        Raises:
            TaskError: it would not.
            InfrastructureError: ``verifier_error``, nothing could be compared.
        """
        if expected in self._controlled:
            return
        answer = unwrapped(expected)
        outcome = await self._compared(expected, answer, "", control=True) if answer else (Verdict.NO_ANSWER, "")
        if isinstance(outcome, _Lost):
            raise TaskError(f"the expected answer can't be compared with itself: {outcome.why}")
        if outcome[0] is not Verdict.RIGHT:
            raise TaskError(f"the expected answer is not right itself: {outcome[0]}, {outcome[1]}")
        if len(self._controlled) >= _CONTROLLED:
            self._controlled.clear()
        self._controlled.add(expected)

    async def aclose(self) -> None:
        """End the workers. Comparisons that run are lost."""
        await asyncio.gather(*(worker.end() for worker in self._workers))

    async def _compared(
        self, expected: str, answer: str, question: str, *, control: bool = False
    ) -> tuple[Verdict, str] | _Lost:
        """One comparison, tried again if it is lost; a loss is the answer's doing.

        Raises:
            InfrastructureError: the machine lost it.
        """
        job = {
            "expected": expected,
            "said": answer,
            "question": question,
            "control": control,
            "cpu_s": self._limits.cpu_s,
            "memory_mib": self._limits.memory_mib,
        }
        losses = {True: 0, False: 0}
        while True:
            outcome = await self._tried(job)
            if not isinstance(outcome, _Lost):
                return outcome
            losses[outcome.by_machine] += 1
            if outcome.verdict is Verdict.TIMED_OUT and not outcome.by_machine:
                break
            if losses[outcome.by_machine] == TRIES:
                break
        if outcome.by_machine:
            raise InfrastructureError(f"no answer could be compared: {outcome.why}", kind=FailureKind.VERIFIER_ERROR)
        return outcome

    async def _tried(self, job: dict[str, Any]) -> tuple[Verdict, str] | _Lost:
        worker = await self._free.get()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.start()
            async with asyncio.timeout(self._limits.cpu_s + STARVED_S):
                word = await worker.ask(job)
        except TimeoutError:
            await worker.end()
            return _Lost(Verdict.TIMED_OUT, "nothing came for too long", by_machine=True)
        except (OSError, EOFError, ValueError) as error:
            await worker.end()
            return _Lost(Verdict.UNREADABLE, f"a worker is gone: {type(error).__name__} {error}", by_machine=True)
        except BaseException:
            await worker.end()  # what it says next would be the answer to this question
            raise
        finally:
            self._free.put_nowait(worker)
        if "verdict" in word:
            return Verdict(word["verdict"]), word["why"]
        return _blamed(word["died"], word["why"])


def _blamed(code: int, why: str) -> _Lost:
    """Whose doing a child's end is."""
    match -code:
        case signal.SIGXCPU:
            return _Lost(Verdict.TIMED_OUT, "comparing it took too much CPU time", by_machine=False)
        case signal.SIGKILL:
            return _Lost(Verdict.UNREADABLE, "the comparison was killed from outside", by_machine=True)
    return _Lost(Verdict.UNREADABLE, f"comparing it failed: {why or f'exit code {code}'}", by_machine=False)


class _Worker:
    """One worker process, which is started when it is needed and not there."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def start(self) -> None:
        """Have it running.

        Raises:
            OSError: it does not start.
            EOFError: it ended at once.
        """
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-s", "-P", "-m", "nemo_gym_prorl.tasks.math.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # No secrets; and sympy's order of symbols is that of their hashes.
            env=interpreter_environ() | {"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
        )
        await self._line(self._process)

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Its word on a job.

        Raises:
            OSError: it is gone.
            EOFError: it ended.
            ValueError: it said something else.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        await process.stdin.drain()
        return await self._line(process)

    async def end(self) -> None:
        """Kill it, with its child."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    @staticmethod
    async def _line(process: Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("it ended")
        word = json.loads(line)
        if not isinstance(word, dict):
            raise ValueError("it said something else")
        return word
