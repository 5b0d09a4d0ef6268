# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Comparison of a policy's answer with the expected answer, in worker processes with bounded CPU time and memory.

``math-verify`` and sympy (:mod:`.comparison`) may run forever or use all memory on a hostile answer. Therefore workers
(:mod:`nemo_gym_prorl.tasks.forked_workers`) run the comparison off the event loop. Workers get the answer's text only,
and nothing from a policy's sandbox.

A comparison that ends without a result is attributed as follows:

- Causes that no answer can bring about are infrastructure failures: a worker ended, another process killed the child,
  or the result is missing long after the CPU limit.
- Otherwise the answer is compared once more, unless the comparison exceeded its CPU time. Then the expected answer is
  compared with itself. If this comparison succeeds, the answer gets no reward, else the row is at fault
  (:class:`TaskError`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, TaskError
from nemo_gym_prorl.tasks import require_extras
from nemo_gym_prorl.tasks.final_answer import MAX_ANSWER_CHARS, extract_final_answer
from nemo_gym_prorl.tasks.forked_workers import JobLost, WorkerPool
from nemo_gym_prorl.tasks.math.spelling import unwrapped


MAX_TRIES = 2
"""Maximum lost comparisons of an answer, counted separately for the two causes (machine and answer)."""

_CACHED_ANSWERS = 10_000
"""Maximum expected answers that are remembered as gradeable, to bound memory."""

ANOTHER_VALUE = "another value"
"""Detail of a wrong answer if both answers could be parsed and differ in value."""


class MathVerdict(StrEnum):
    """Verdict on an answer; only ``RIGHT`` earns a reward."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    UNREADABLE = "unreadable"
    """The answer cannot be parsed, is too long, or broke the parser."""
    UNFINISHED = "unfinished"
    """The answer leaves a computation to the reader, or repeats the question."""
    CONTRADICTORY = "contradictory"
    """The answer states two different values."""
    TIMED_OUT = "timed_out"
    """The comparison exceeded its CPU time."""


Judgement = tuple[MathVerdict, str]
"""Verdict and a human-readable reason."""


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of comparisons.

    Attributes:
        cpu_s: CPU seconds of a comparison.
        memory_mib: address space of a comparison in MiB; sympy alone takes about 150.
        workers: number of concurrent comparisons.
    """

    cpu_s: int = 5
    memory_mib: int = 1024
    workers: int = 2


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """Verdict on the final answer of a message.

    Attributes:
        extracted: answer as written in the message; empty if there is none.
        detail: human-readable reason.
    """

    verdict: MathVerdict
    extracted: str
    detail: str = ""

    @property
    def right(self) -> bool:
        return self.verdict is MathVerdict.RIGHT


class MathChecker:
    """Checker of answers, with worker processes that start on the first comparison.

    Raises:
        InfrastructureError: ``math-verify`` is not installed; the message names the extra to install.
    """

    def __init__(self, limits: CheckLimits | None = None) -> None:
        require_extras("math")
        self._limits = limits or CheckLimits()
        self._workers = WorkerPool("nemo_gym_prorl.tasks.math.comparison", self._limits.workers)
        self._gradeable: set[str] = set()

    async def check(self, expected: str, said: str, question: str = "") -> CheckedAnswer:
        """Compare the final answer of a message with the expected answer.

        Args:
            expected: expected answer in LaTeX, with or without delimiters or a box.
            said: last message of the policy.
            question: question text; an answer that only repeats an unsolved part of the question is ``UNFINISHED``.

        Raises:
            TaskError: the expected answer cannot be compared with itself.
            InfrastructureError: ``verifier_error``: :data:`MAX_TRIES` comparisons were lost by the machine.
        """
        answer = extract_final_answer(said)
        if answer is None:
            return CheckedAnswer(MathVerdict.NO_ANSWER, "", r"there is no \boxed{...} and no line with an answer")
        if len(answer) > MAX_ANSWER_CHARS:
            shown = answer[:MAX_ANSWER_CHARS]
            return CheckedAnswer(MathVerdict.UNREADABLE, shown, f"it is longer than {MAX_ANSWER_CHARS} characters")
        outcome = await self._compared(expected, answer, question)
        if isinstance(outcome, JobLost):
            await self.require_gradeable(expected)
            verdict = MathVerdict.TIMED_OUT if outcome.timed_out else MathVerdict.UNREADABLE
            return CheckedAnswer(verdict, answer, f"the comparison was lost: {outcome}")
        return CheckedAnswer(outcome[0], answer, outcome[1])

    async def require_gradeable(self, expected: str) -> None:
        """Check that the expected answer itself would get the verdict ``RIGHT``; successes are cached.

        Raises:
            TaskError: the expected answer would get another verdict, or cannot be compared with itself.
            InfrastructureError: ``verifier_error``: :data:`MAX_TRIES` comparisons were lost by the machine.
        """
        if expected in self._gradeable:
            return
        answer = unwrapped(expected)
        outcome = await self._compared(expected, answer, "", control=True) if answer else (MathVerdict.NO_ANSWER, "")
        if isinstance(outcome, JobLost):
            raise TaskError(f"the expected answer can't be compared with itself: {outcome}")
        if outcome[0] is not MathVerdict.RIGHT:
            raise TaskError(f"the expected answer is not right itself: {outcome[0]}, {outcome[1]}")
        if len(self._gradeable) >= _CACHED_ANSWERS:
            self._gradeable.clear()
        self._gradeable.add(expected)

    async def aclose(self) -> None:
        """Stop the workers; comparisons in progress are lost."""
        await self._workers.aclose()

    async def _compared(
        self, expected: str, answer: str, question: str, *, control: bool = False
    ) -> tuple[MathVerdict, str] | JobLost:
        """Compare in a worker, and again if the comparison is lost. Return the loss if the answer is the cause."""
        job = {"expected": expected, "said": answer, "question": question, "control": control}
        cpu_s, memory_mib = self._limits.cpu_s, self._limits.memory_mib
        losses = {True: 0, False: 0}
        while True:
            try:
                verdict, why = await self._workers.ask(job, cpu_s=cpu_s, memory_mib=memory_mib)
                return MathVerdict(verdict), why
            except JobLost as loss:
                losses[loss.by_machine] += 1
                if losses[loss.by_machine] < MAX_TRIES and (loss.by_machine or not loss.timed_out):
                    continue
                if not loss.by_machine:
                    return loss
                reason = f"workers lost {MAX_TRIES} comparisons: {loss}"
                raise InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR) from loss
