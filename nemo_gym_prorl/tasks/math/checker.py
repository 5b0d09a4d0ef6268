# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Whether what a policy said is the expected answer, decided in processes that may be lost.

Comparing is done by ``math-verify`` and sympy (:mod:`.comparison`), which some answers keep busy for ever or have eat
all memory; so it happens in workers (:mod:`nemo_gym_prorl.tasks.workers`), off the event loop and within bounds of CPU
time and memory. Nothing of a policy's sandbox comes near them: an answer is text.

A comparison that ends without a word is blamed as code is in ``tasks/code/grading.py``. What no answer can bring
about (a worker is gone, a process was killed from outside, nothing came long after the CPU time was over) is the
machine's. Anything else the answer may have done: it is compared once more, unless it has used up its CPU time, and
then the expected answer with itself. If that is fine, the answer is to blame and has no reward; if not, nobody could
be graded on the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, TaskError
from nemo_gym_prorl.tasks.extras import require_extras
from nemo_gym_prorl.tasks.final_answer import MAX_ANSWER_CHARS, final_answer
from nemo_gym_prorl.tasks.math.spelling import unwrapped
from nemo_gym_prorl.tasks.workers import JobLost, WorkerPool


TRIES = 2
"""So often an answer may break its comparison, and so often the machine may."""

_CONTROLLED = 10_000

ANOTHER_VALUE = "another value"
"""Why an answer is wrong if both could be read, and are not the same."""


class Verdict(StrEnum):
    """What became of an answer; only the first has a reward."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """The message has none."""
    UNREADABLE = "unreadable"
    """It is no mathematics that can be read, or too long, or broke the reader."""
    UNFINISHED = "unfinished"
    """It leaves the work to the reader, or repeats the question."""
    CONTRADICTORY = "contradictory"
    """It says two things."""
    TIMED_OUT = "timed_out"
    """Comparing it took longer than is allowed."""


Judged = tuple[Verdict, str]
"""What an answer is worth, and why, for a person."""


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
        verdict: a word of :class:`.Verdict`.
        extracted: the answer as it stands in the message; empty if there is none.
        detail: why, for a person.
    """

    verdict: Verdict
    extracted: str
    detail: str = ""

    @property
    def right(self) -> bool:
        """Whether it is the expected one."""
        return self.verdict is Verdict.RIGHT


class MathChecker:
    """Compares answers; starts its workers when it is first asked.

    Raises:
        InfrastructureError: ``math-verify`` is not installed; says how to get it.
    """

    def __init__(self, limits: CheckLimits | None = None) -> None:
        require_extras("math")
        self._limits = limits or CheckLimits()
        self._workers = WorkerPool("nemo_gym_prorl.tasks.math.comparison", self._limits.workers)
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
            return Checked(Verdict.NO_ANSWER, "", r"there is no \boxed{...} and no line with an answer")
        if len(answer) > MAX_ANSWER_CHARS:
            shown = answer[:MAX_ANSWER_CHARS]
            return Checked(Verdict.UNREADABLE, shown, f"it is longer than {MAX_ANSWER_CHARS} characters")
        outcome = await self._compared(expected, answer, question)
        if isinstance(outcome, JobLost):
            await self.require_gradeable(expected)
            verdict = Verdict.TIMED_OUT if outcome.timed_out else Verdict.UNREADABLE
            return Checked(verdict, answer, f"the comparison was lost: {outcome}")
        return Checked(outcome[0], answer, outcome[1])

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
        if isinstance(outcome, JobLost):
            raise TaskError(f"the expected answer can't be compared with itself: {outcome}")
        if outcome[0] is not Verdict.RIGHT:
            raise TaskError(f"the expected answer is not right itself: {outcome[0]}, {outcome[1]}")
        if len(self._controlled) >= _CONTROLLED:
            self._controlled.clear()
        self._controlled.add(expected)

    async def aclose(self) -> None:
        """End the workers. Comparisons that run are lost."""
        await self._workers.aclose()

    async def _compared(
        self, expected: str, answer: str, question: str, *, control: bool = False
    ) -> tuple[Verdict, str] | JobLost:
        """One comparison, tried again if it is lost; a loss is the answer's doing.

        Raises:
            InfrastructureError: the machine lost it.
        """
        job = {"expected": expected, "said": answer, "question": question, "control": control}
        cpu_s, memory_mib = self._limits.cpu_s, self._limits.memory_mib
        losses = {True: 0, False: 0}
        while True:
            try:
                verdict, why = await self._workers.ask(job, cpu_s=cpu_s, memory_mib=memory_mib)
                return Verdict(verdict), why
            except JobLost as loss:
                losses[loss.by_machine] += 1
                if losses[loss.by_machine] < TRIES and (loss.by_machine or not loss.timed_out):
                    continue
                if not loss.by_machine:
                    return loss
                reason = f"no answer could be compared: {loss}"
                raise InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR) from loss
