# SPDX-License-Identifier: Apache-2.0
"""From a candidate's source to a verdict, in sandboxes that its author never touched; see :mod:`..trials`.

A verdict is a statement about the candidate: a slow, crashing or unparsable solution has one, with reward 0. Where a
candidate may have taken its grader down, the problem's own reference is the control.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum

from nemo_gym_prorl.failures import AgentError
from nemo_gym_prorl.tasks.humaneval.problems import Problem
from nemo_gym_prorl.tasks.program import BYTE_ORDER_MARK, program
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade
from nemo_gym_prorl.tasks.trials import Lost, TakenDown, attempt, settle


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
        processes: how many processes and threads the candidate may have.
        file_mib: largest file that it may write, in MiB.
    """

    timeout_s: float = 20.0
    memory_mib: int = 1024
    processes: int = 64
    file_mib: int = 64


OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Starts a fresh sandbox and stops it in the end."""


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
        "reference": problem.reference_source,
        "test": problem.test,
        "entry_point": problem.entry_point,
        "source": source.removeprefix(BYTE_ORDER_MARK),
        "timeout_s": limits.timeout_s,
        "limits": asdict(limits) | {"cpu_s": math.ceil(limits.timeout_s) + 1},
    }
    try:
        told = await attempt(
            sandbox,
            program(
                "nemo_gym_prorl.tasks.humaneval.inside.grader",
                "nemo_gym_prorl.tasks.inside.privileges",
                "nemo_gym_prorl.tasks.inside.walls",
            ),
            job,
            timeout_s=limits.timeout_s,
            root=root,
            doubtful=lambda verdict: verdict["reason"] == Reason.CRASHED,
        )
    except AgentError as error:
        return judged(Reason.EXHAUSTED, error.reason)
    return told if isinstance(told, Lost) else judged(Reason(told["reason"]), told["detail"])
