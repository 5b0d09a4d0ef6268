# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From a candidate's source to a grade: one fresh sandbox, in which a grader runs all tests; see :mod:`..trials`.

Where a candidate may have taken its grader down, a control tells whether machine and row are fine: of a program that
does nothing any verdict will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from nemo_gym_prorl.failures import AgentError, TaskError
from nemo_gym_prorl.tasks.code.filters import filters
from nemo_gym_prorl.tasks.code.rows import Problem
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade
from nemo_gym_prorl.tasks.trials import BYTE_ORDER_MARK, Lost, TakenDown, attempt, program, settle


_INSIDE = "nemo_gym_prorl.tasks.code.inside"
_GRADER = (
    f"{_INSIDE}.grader",
    f"{_INSIDE}.walls",
    f"{_INSIDE}.zygote",
    f"{_INSIDE}.checkers",
)
"""What runs in the sandbox, as :func:`.program` takes it."""

CLOCK_FACTOR = 10
"""All tests may take so much longer by the clock: waiting for a processor is no fault of a candidate's."""

RewardRule = Literal["all", "fraction"]

CHECKER_LIMITS = {"time_s": 10.0, "memory_mib": 1024}
NOTHING = "pass\n"
STACK_KIB = 256 << 10
"""Of the first thread, before the interpreter starts: what deep recursion in C takes."""


class Verdict(StrEnum):
    """Why a candidate earned what it did."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    TIMED_OUT = "timed_out"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    CRASHED = "crashed"
    """It raised, ended with an exit status other than 0, was ended by a signal, or took the grader down with it."""
    NO_SOLUTION = "no_solution"
    """There is no file that can be read, nothing is in it, or it defines no such function."""
    SYNTAX_ERROR = "syntax_error"
    EXHAUSTED = EXHAUSTED
    """The agent, or its solution when it was tested, used up its sandbox's disk, memory or processes."""


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Bounds of one candidate.

    Attributes:
        time_s: processor time of one test, where the row says nothing, and the most that it may say.
        memory_mib: address space of one test's process, the same.
        total_s: all tests together, without the time for which they waited for a processor.
        output_bytes: longest output of one test.
        file_mib: largest file that a test may write, in MiB.
        threads: how many threads it may have, about.
    """

    time_s: float = 10.0
    memory_mib: int = 1024
    total_s: float = 300.0
    output_bytes: int = 16 << 20
    file_mib: int = 64
    threads: int = 64


OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Starts a fresh sandbox and stops it in the end."""


def failed(verdict: Verdict, detail: str = "") -> Grade:
    """A grade of nothing that ran."""
    return Grade(0.0, verdict.value, detail)


async def grade(
    open_sandbox: OpenSandbox, problem: Problem, source: str, limits: CodeLimits, root: str, rule: RewardRule = "all"
) -> Grade:
    """Grade a candidate, each try in a fresh sandbox.

    Args:
        open_sandbox: starts a fresh sandbox with ``sh`` and ``python3`` (3.8 or later).
        problem: what to test with.
        source: the submitted file.
        limits: bounds of the candidate.
        root: a folder of the sandbox that uploads reach.
        rule: ``all``: 1 if all tests pass, and the rest is not run once one fails; ``fraction``: the share that pass.

    Raises:
        TaskError: the row's checker judges nothing.
        InfrastructureError: no sandbox could be had (as ``open_sandbox`` says), or none gave a verdict
            (``verifier_error``).
    """

    async def graded(source: str) -> Grade | Lost:
        async with open_sandbox() as sandbox:
            return await grade_in(sandbox, problem, source, limits, root, rule)

    async def control() -> bool:
        return isinstance(await graded(NOTHING), Grade)

    outcome = await settle(lambda: graded(source), control)
    return failed(Verdict.CRASHED, outcome.why) if isinstance(outcome, TakenDown) else outcome


async def grade_in(
    sandbox: Sandbox, problem: Problem, source: str, limits: CodeLimits, root: str, rule: RewardRule = "all"
) -> Grade | Lost:
    """Grade a candidate once in the given sandbox.

    Raises:
        TaskError: the row's checker judges nothing.
    """
    job = {"source": source.removeprefix(BYTE_ORDER_MARK), "stop_at_failure": rule == "all"}
    job |= _tests(problem, limits)
    try:
        told = await attempt(
            sandbox,
            program(*_GRADER),
            job,
            timeout_s=CLOCK_FACTOR * limits.total_s,
            root=root,
            doubtful=lambda report: bool(report.get("killed")) or report.get("verdict") == Verdict.CRASHED,
            before=f"ulimit -S -s {STACK_KIB} 2>/dev/null; ",
        )
    except AgentError as error:
        return failed(Verdict.EXHAUSTED, error.reason)
    if isinstance(told, Lost):
        return told
    if "row" in told:
        raise TaskError(f"verifier_metadata.checker: {told['row']}")
    return _grade(told, rule)


def _tests(problem: Problem, limits: CodeLimits) -> dict[str, Any]:
    """What the grader is told of a problem."""
    bounds = {**asdict(limits), "filters": filters()}
    for name, own in (("time_s", problem.time_limit_s), ("memory_mib", problem.memory_limit_mib)):
        bounds[name] = min(bounds[name], own or bounds[name])
    return {
        "function": problem.function,
        "tests": [{"input": test.input, "expected": test.expected} for test in problem.tests],
        "checker": problem.checker,
        "checker_limits": CHECKER_LIMITS,
        "limits": bounds,
        "total_s": limits.total_s,
    }


def _grade(told: Mapping[str, Any], rule: RewardRule) -> Grade:
    verdict, tests = Verdict(told["verdict"]), told["tests"]
    reward = tests["passed"] / tests["total"] if rule == "fraction" else float(verdict is Verdict.PASSED)
    return Grade(reward, verdict.value, told["detail"], {"tests": tests})
