# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grading of HumanEval in real sandboxes, and attribution of lost sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.code.code_rows import (
    CodeProblem,
    HumanEvalProblem,
    humaneval_row,
    problems,
    read_metadata,
    read_problem,
)
from nemo_gym_prorl.tasks.code.grading import CodeLimits, CodeVerdict, grade, grade_in
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import Grade
from tests.conftest import LONG
from tests.sandbox.running import kill_supervisor
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
LIMITS = CodeLimits(time_s=5, total_s=20)
TRUNCATE = "HumanEval/2"  # truncate_number(number): float


def problem_of(task: str) -> CodeProblem:
    return read_problem(read_metadata(humaneval_row(problems()[task])), None)


async def judge(sandbox: Sandbox, task: str, source: str, limits: CodeLimits = LIMITS) -> Grade:
    outcome = await grade_in(sandbox, problem_of(task), source, limits, containers.ROOT)
    assert isinstance(outcome, Grade), outcome
    return outcome


async def grade_all(sandbox: Sandbox, source: Callable[[HumanEvalProblem], str]) -> dict[str, Grade]:
    """Grade problems in one sandbox, four at a time."""
    gate, chosen = asyncio.Semaphore(4), [*problems().values()][:: 1 if LONG else 5]

    async def one(problem: HumanEvalProblem) -> Grade:
        async with gate:
            return await judge(sandbox, problem.task_id, source(problem))

    verdicts = await asyncio.gather(*map(one, chosen))
    return dict(zip((problem.task_id for problem in chosen), verdicts, strict=True))


@pytest.mark.longer("all problems, else every fifth")
async def test_references_pass_and_empty_functions_fail(sandbox: Sandbox) -> None:
    verdicts = await grade_all(sandbox, lambda problem: problem.reference_source)
    assert {task: verdict for task, verdict in verdicts.items() if not verdict.passed} == {}
    empty = await grade_all(sandbox, lambda problem: f"{problem.prompt.rstrip()}\n    return None\n")
    assert {task: grade for task, grade in empty.items() if grade.reward} == {}


@asynccontextmanager
async def attacked(attack: Callable[[Sandbox], Coroutine[Any, Any, None]]) -> AsyncIterator[Sandbox]:
    async with containers.running() as sandbox:
        attacking = asyncio.create_task(attack(sandbox))
        try:
            yield sandbox
        finally:
            attacking.cancel()
            await asyncio.wait([attacking])


async def test_candidate_that_kills_its_grader_scores_zero() -> None:
    """The sandbox kills the grader at the candidate's request, since no direct way is known."""
    before = containers.instances()

    async def kill_when_told(sandbox: Sandbox) -> None:
        while True:
            told = await sandbox.exec("cat /tmp/work-*/tester")
            if tester := (told.stdout or "").strip():
                await sandbox.exec(f"kill -9 {int(tester)}")
                return
            await asyncio.sleep(0.01)

    source = (
        "import re, os, time\n"
        "tester = re.search(r'PPid:\\s(\\d+)', open('/proc/%d/status' % os.getppid()).read())[1]\n"
        "print(tester, file=open('tester', 'w'), flush=True)\n"
        "time.sleep(100)\n"
    )
    verdict = await grade(lambda: attacked(kill_when_told), problem_of(TRUNCATE), source, LIMITS, containers.ROOT)
    assert verdict.verdict == CodeVerdict.CRASHED
    assert "terminated its grader 2 times" in verdict.detail
    assert containers.instances() == before


NEVER = "import time\nopen('begun', 'w').close()\ndef truncate_number(x): time.sleep(1000)\n"


@pytest.mark.parametrize("killed", ["sandbox", "supervisor"])
async def test_machine_failure_during_a_solution_is_no_verdict(killed: str) -> None:
    """The solution is graded again instead of scored 0, although a control program would pass."""
    opened = 0

    async def kill_when_begun(sandbox: Sandbox) -> None:
        nonlocal opened
        opened += 1
        while True:
            if (await sandbox.exec("ls /tmp/work-*/begun")).return_code == 0:
                break
            await asyncio.sleep(0.01)
        if killed == "sandbox":
            containers.kill_instance(sandbox.sandbox_id)
        else:
            kill_supervisor()

    with pytest.raises(InfrastructureError) as caught:
        await grade(lambda: attacked(kill_when_begun), problem_of(TRUNCATE), NEVER, LIMITS, containers.ROOT)
    assert caught.value.kind is FailureKind.VERIFIER_ERROR
    assert opened == 2


async def test_failure_before_the_solution_is_infrastructure() -> None:
    """The sandbox has no place for the grader's folder."""

    @asynccontextmanager
    async def open_sandbox() -> AsyncIterator[Sandbox]:
        nonlocal opened
        opened += 1
        async with containers.running() as sandbox:
            if opened < 3:
                await sandbox.exec("rm -r /tmp && ln -s /nowhere /tmp", cwd="/")
            yield sandbox

    opened = 0
    with pytest.raises(InfrastructureError, match="FileNotFoundError"):
        await grade(open_sandbox, problem_of(TRUNCATE), "x = 1", LIMITS, containers.ROOT)
    assert opened == 2


TAKE_DOWN = """
import os, signal, time
def truncate_number(x):
    for _ in range(100):
        try: os.kill(-1, signal.SIGKILL)
        except OSError: pass
        time.sleep(0.01)
"""


@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_solution_that_destroys_its_sandbox_scores_zero(start: str) -> None:
    """The loss is the candidate's; a machine failure would be retried and finally masked."""
    limits = CodeLimits(time_s=2, total_s=6)
    problem = problem_of(TRUNCATE)
    verdict = await grade(lambda: containers.running(start=start), problem, TAKE_DOWN, limits, containers.ROOT)
    assert (verdict.reward, verdict.passed) == (0.0, False), verdict
