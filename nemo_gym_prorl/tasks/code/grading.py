# SPDX-License-Identifier: Apache-2.0
"""From a candidate's source to a grade: one fresh sandbox, in which a grader runs all tests; see :mod:`..trials`.

The control, where a candidate may have taken its grader down, is a program that does nothing: any verdict on it shows
that machine and row are fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from nemo_gym_prorl.failures import AgentError, TaskError
from nemo_gym_prorl.tasks.code.rows import Problem
from nemo_gym_prorl.tasks.program import BYTE_ORDER_MARK, program
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade
from nemo_gym_prorl.tasks.trials import Lost, TakenDown, attempt, settle


_INSIDE = "nemo_gym_prorl.tasks.code.inside"
_GRADER = (
    f"{_INSIDE}.grader",
    "nemo_gym_prorl.tasks.inside.privileges",
    "nemo_gym_prorl.tasks.inside.walls",
    f"{_INSIDE}.calls",
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
    """It raised, ended with an exit status other than 0, or was ended by a signal."""
    NO_SOLUTION = "no_solution"
    """There is no file that can be read, nothing is in it, or it defines no such function."""
    SYNTAX_ERROR = "syntax_error"
    EXHAUSTED = EXHAUSTED
    """The agent, or its solution when it was tested, used up its sandbox's disk."""


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
    open_sandbox: OpenSandbox, problem: Problem, source: str, limits: CodeLimits, rule: RewardRule, root: str
) -> Grade:
    """Grade a candidate, each try in a fresh sandbox.

    Args:
        open_sandbox: starts a fresh sandbox with ``sh`` and ``python3`` (3.8 or later).
        problem: what to test with.
        source: the submitted file.
        limits: bounds of the candidate.
        rule: ``all``: 1 if all tests pass, and the rest is not run once one fails; ``fraction``: the share that pass.
        root: a folder of the sandbox that uploads reach.

    Raises:
        TaskError: the row's checker judges nothing.
        InfrastructureError: no sandbox could be had (as ``open_sandbox`` says), or none gave a verdict
            (``verifier_error``).
    """

    async def graded(source: str) -> Grade | Lost:
        async with open_sandbox() as sandbox:
            return await grade_in(sandbox, problem, source, limits, rule, root)

    async def control() -> bool:
        return isinstance(await graded(NOTHING), Grade)

    outcome = await settle(lambda: graded(source), control)
    return failed(Verdict.CRASHED, outcome.why) if isinstance(outcome, TakenDown) else outcome


async def grade_in(
    sandbox: Sandbox, problem: Problem, source: str, limits: CodeLimits, rule: RewardRule, root: str
) -> Grade | Lost:
    """Grade a candidate once in the given sandbox.

    Raises:
        TaskError: the row's checker judges nothing.
    """
    bounds = asdict(limits)
    for name, own in (("time_s", problem.time_limit_s), ("memory_mib", problem.memory_limit_mib)):
        bounds[name] = min(bounds[name], own or bounds[name])
    job = {
        "source": source.removeprefix(BYTE_ORDER_MARK),
        "function": problem.function,
        "tests": [{"input": test.input, "expected": test.expected} for test in problem.tests],
        "checker": problem.checker,
        "checker_limits": CHECKER_LIMITS,
        "limits": bounds,
        "total_s": limits.total_s,
        "stop_at_failure": rule == "all",
    }
    try:
        told = await told_of(sandbox, job, CLOCK_FACTOR * limits.total_s, root)
    except AgentError as error:
        return failed(Verdict.EXHAUSTED, error.reason)
    if isinstance(told, Lost):
        return told
    if "row" in told:
        raise TaskError(f"verifier_metadata.checker: {told['row']}")
    return _grade(told, rule)


async def told_of(sandbox: Sandbox, job: Mapping[str, Any], timeout_s: float, root: str) -> Any | Lost:
    """What the grader says of a job, run once in the given sandbox.

    Raises:
        AgentError: the candidate used up the sandbox.
    """
    return await attempt(
        sandbox,
        program(*_GRADER),
        job,
        timeout_s=timeout_s,
        root=root,
        doubtful=lambda report: bool(report.get("killed")) or report.get("verdict") == Verdict.CRASHED,
        before=f"ulimit -S -s {STACK_KIB} 2>/dev/null; ",
    )


def _grade(told: Mapping[str, Any], rule: RewardRule) -> Grade:
    verdict, tests = Verdict(told["verdict"]), told["tests"]
    reward = float(verdict is Verdict.PASSED)
    if rule == "fraction":
        reward = tests["passed"] / tests["total"]
    return Grade(reward, verdict.value, told["detail"], {"tests": tests})
