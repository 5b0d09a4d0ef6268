# SPDX-License-Identifier: Apache-2.0
"""HumanEval's form of a test, a program that calls the submitted function: from source to grade as in :mod:`.grading`.

Where a candidate may have taken its grader down, the problem's own reference is the control.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_gym_prorl.failures import AgentError
from nemo_gym_prorl.tasks.code.grading import OpenSandbox, told_of
from nemo_gym_prorl.tasks.code.humaneval import Problem
from nemo_gym_prorl.tasks.program import BYTE_ORDER_MARK
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade
from nemo_gym_prorl.tasks.trials import Lost, TakenDown, settle


class Reason(StrEnum):
    """Why a candidate passed or did not."""

    PASSED = "passed"
    FAILED = "failed"
    """A test failed, or the function raised."""
    TIMED_OUT = "timed_out"
    SYNTAX_ERROR = "syntax_error"
    NO_SOLUTION = "no_solution"
    """There is no solution.py that can be read, or it defines no such function."""
    CRASHED = "crashed"
    """Importing it failed, its process ended, or it took the tester down with it."""
    EXHAUSTED = EXHAUSTED
    """The agent, or its solution when it was tested, used up its sandbox's disk, memory or processes."""


def judged(reason: Reason, detail: str = "") -> Grade:
    """A grade: all tests or nothing."""
    return Grade(1.0 if reason is Reason.PASSED else 0.0, reason.value, detail)


@dataclass(frozen=True, slots=True)
class GradingLimits:
    """Bounds of one candidate.

    Attributes:
        timeout_s: seconds for all tests of the problem, start of both processes included.
        memory_mib: address space of a process of the candidate, in MiB.
        threads: how many threads it may have, about.
        file_mib: largest file that it may write, in MiB.
    """

    timeout_s: float = 20.0
    memory_mib: int = 1024
    threads: int = 64
    file_mib: int = 64


async def grade(open_sandbox: OpenSandbox, problem: Problem, source: str, limits: GradingLimits, root: str) -> Grade:
    """Grade a candidate, each try in a fresh sandbox.

    Args:
        open_sandbox: starts a fresh sandbox with ``sh`` and ``python3`` (3.8 or later).
        problem: what to test against.
        source: the submitted file.
        limits: bounds of the candidate.
        root: a folder of the sandbox that uploads reach.

    Raises:
        InfrastructureError: no sandbox could be had (as ``open_sandbox`` says), or none gave a verdict
            (``verifier_error``).
    """

    async def graded(source: str) -> Grade | Lost:
        async with open_sandbox() as sandbox:
            return await grade_in(sandbox, problem, source, limits, root)

    async def control() -> bool:
        outcome = await graded(problem.reference_source)
        return isinstance(outcome, Grade) and outcome.passed

    outcome = await settle(lambda: graded(source), control)
    return judged(Reason.CRASHED, outcome.why) if isinstance(outcome, TakenDown) else outcome


async def grade_in(sandbox: Sandbox, problem: Problem, source: str, limits: GradingLimits, root: str) -> Grade | Lost:
    """Grade a candidate once in the given sandbox."""
    job = {
        "source": source.removeprefix(BYTE_ORDER_MARK),
        "serves": problem.entry_point,
        "reference": problem.reference_source,
        "check": problem.test,
        "limits": {
            "time_s": limits.timeout_s,
            "memory_mib": limits.memory_mib,
            "file_mib": limits.file_mib,
            "threads": limits.threads,
        },
        "total_s": limits.timeout_s,
    }
    try:
        told = await told_of(sandbox, job, limits.timeout_s, root)
    except AgentError as error:
        return judged(Reason.EXHAUSTED, error.reason)
    return told if isinstance(told, Lost) else judged(Reason(told["verdict"]), told["detail"])
