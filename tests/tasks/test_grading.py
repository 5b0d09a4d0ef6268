# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grading of HumanEval in real sandboxes, and attribution of lost sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import product
from textwrap import indent
from typing import Any

import pytest
from nemo_gym.sandbox import AsyncSandbox

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.servers.task_sandboxes import SandboxWithSessions
from nemo_gym_prorl.tasks.code.code_rows import (
    CodeProblem,
    HumanEvalProblem,
    humaneval_row,
    problems,
    read_metadata,
    read_problem,
)
from nemo_gym_prorl.tasks.code.grading import CodeLimits, CodeVerdict, NoVerdict, grade, grade_in
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import Grade
from scripts.scripted_turns.humaneval import CHEATS
from tests.conftest import LONG, tiered
from tests.sandbox.running import kill_supervisor
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
LIMITS = CodeLimits(time_s=5, total_s=20)
TRUNCATE = "HumanEval/2"  # truncate_number(number): float
INTERSPERSE = "HumanEval/5"  # intersperse(numbers, delimiter): list


def problem_of(task: str) -> CodeProblem:
    return read_problem(read_metadata(humaneval_row(problems()[task])), None)


async def judge(sandbox: Sandbox, task: str, source: str, limits: CodeLimits = LIMITS) -> Grade:
    outcome = await grade_in(sandbox, problem_of(task), source, limits, containers.ROOT)
    assert isinstance(outcome, Grade), outcome
    return outcome


async def grade_all(sandbox: Sandbox, source: Callable[[HumanEvalProblem], str], every: int = 1) -> dict[str, Grade]:
    """Grade every ``every``-th problem in one sandbox, four at a time."""
    gate, chosen = asyncio.Semaphore(4), [*problems().values()][::every]

    async def one(problem: HumanEvalProblem) -> Grade:
        async with gate:
            return await judge(sandbox, problem.task_id, source(problem))

    verdicts = await asyncio.gather(*map(one, chosen))
    return dict(zip((problem.task_id for problem in chosen), verdicts, strict=True))


EVERY = 1 if LONG else 5


@pytest.mark.longer("all problems, else every fifth")
async def test_all_references_pass(sandbox: AsyncSandbox) -> None:
    verdicts = await grade_all(sandbox, lambda problem: problem.reference_source, EVERY)
    assert {task: verdict for task, verdict in verdicts.items() if not verdict.passed} == {}


@pytest.mark.longer("all problems, else every fifth")
async def test_empty_functions_fail(sandbox: AsyncSandbox) -> None:
    empty = await grade_all(sandbox, lambda problem: f"{problem.prompt.rstrip()}\n    return None\n", EVERY)
    assert {task: grade for task, grade in empty.items() if grade.reward} == {}


# Functions that return floats, strings and lists, and one with its own checker.
TASKS = ["HumanEval/2", "HumanEval/15", "HumanEval/32", "HumanEval/33", "HumanEval/38"]


async def test_no_cheat_passes() -> None:
    gate = asyncio.Semaphore(4)

    async def attempt(task: str, source: str) -> Grade | NoVerdict:
        async with gate, containers.running() as sandbox:  # one sandbox each, since a cheat may damage it
            return await grade_in(sandbox, problem_of(task), source, LIMITS, containers.ROOT)

    tried = [(task, CHEATS[name]) for task, name in zip(TASKS * len(CHEATS), CHEATS, strict=False)]
    outcomes = await asyncio.gather(*(attempt(task, source(problems()[task])) for task, source in tried))
    for name, outcome in zip(CHEATS, outcomes, strict=True):
        assert isinstance(outcome, Grade), (name, outcome)
        assert not outcome.passed, name


@asynccontextmanager
async def attacked(attack: Callable[[SandboxWithSessions], Coroutine[Any, Any, None]]) -> AsyncIterator[Sandbox]:
    """A sandbox with a concurrent attack."""
    async with containers.running_ours() as sandbox:
        attacking = asyncio.create_task(attack(sandbox))
        try:
            yield sandbox
        finally:
            attacking.cancel()
            await asyncio.wait([attacking])


async def test_candidate_that_kills_its_grader_scores_zero() -> None:
    """The sandbox kills the grader at the candidate's request, since no direct way is known."""
    before = containers.instances()

    async def kill_when_told(sandbox: SandboxWithSessions) -> None:
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


class Dying(AsyncSandbox):
    """Real sandbox that is killed when it executes a command."""

    async def exec(self, *arguments: Any, **options: Any) -> Any:
        containers.kill_instance(self._require_handle().sandbox_id)
        return await super().exec(*arguments, **options)


async def test_lost_sandbox_is_retried() -> None:
    opened = 0

    @asynccontextmanager
    async def open_sandbox() -> AsyncIterator[Sandbox]:
        nonlocal opened
        opened += 1
        async with containers.running(Dying if opened == 1 else AsyncSandbox) as sandbox:
            yield sandbox

    source = problems()[INTERSPERSE].reference_source
    verdict = await grade(open_sandbox, problem_of(INTERSPERSE), source, LIMITS, containers.ROOT)
    assert verdict.passed
    assert opened == 2


NEVER = "import time\nopen('begun', 'w').close()\ndef truncate_number(x): time.sleep(1000)\n"


@pytest.mark.parametrize("killed", ["sandbox", "supervisor"])
async def test_machine_failure_during_a_solution_is_no_verdict(killed: str) -> None:
    """The solution is graded again instead of scored 0, although a control program would pass."""
    opened = 0

    async def kill_when_begun(sandbox: SandboxWithSessions) -> None:
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
        async with containers.running_ours() as sandbox:
            if opened < 3:
                await sandbox.exec("rm -r /tmp && ln -s /nowhere /tmp", cwd="/")
            yield sandbox

    opened = 0
    with pytest.raises(InfrastructureError, match="FileNotFoundError"):
        await grade(open_sandbox, problem_of(TRUNCATE), "x = 1", LIMITS, containers.ROOT)
    assert opened == 2


class Limited(AsyncSandbox):
    """Real sandbox on a machine with few open files."""

    async def exec(self, command: str, **options: Any) -> Any:
        return await super().exec(f"ulimit -n {self.open_files}; {command}", **options)


@pytest.mark.parametrize("open_files", [12, 100, 255])
async def test_a_machine_with_few_open_files_gives_no_reward(open_files: int) -> None:
    @asynccontextmanager
    async def open_sandbox() -> AsyncIterator[Sandbox]:
        async with containers.running(Limited) as sandbox:
            sandbox.open_files = open_files
            yield sandbox

    source = problems()[INTERSPERSE].reference_source
    with pytest.raises(InfrastructureError) as caught:
        await grade(open_sandbox, problem_of(INTERSPERSE), source, LIMITS, containers.ROOT)
    assert caught.value.kind is FailureKind.VERIFIER_ERROR


TAKE_DOWN = {
    "kill_all": """
for _ in range(100):
    try: os.kill(-1, signal.SIGKILL)
    except OSError: pass
    time.sleep(0.01)
""",
    "signal_the_first_process": """
for number in [*range(1, 65)] * 3:
    try: os.kill(1, number)
    except OSError: pass
""",
    "have_the_first_process_use_up_its_time": """
try: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))
except (OSError, ValueError): pass
me, tester, end = os.getpid(), os.getppid(), time.time() + 15
while time.time() < end:
    for pid in open("/proc/1/task/1/children").read().split():
        try:
            if int(pid) not in (me, tester) and "exec 3<" in open(f"/proc/{pid}/cmdline").read(): os.kill(int(pid), 9)
        except OSError: pass
""",
    "limit_the_first_process": """
for name in dir(resource):
    if name.startswith("RLIMIT_"):
        try: resource.prlimit(1, getattr(resource, name), (0, 0))
        except (OSError, ValueError): pass
for _ in range(100):
    try: os.kill(-1, signal.SIGKILL)
    except OSError: pass
    time.sleep(0.01)
""",
    "fork_bomb": """
while True:
    try:
        if os.fork() == 0: time.sleep(100)
    except OSError:
        for pid in os.listdir("/proc"):
            try:
                if pid.isdigit() and os.getpgid(int(pid)) != os.getpgid(0): os.kill(int(pid), signal.SIGKILL)
            except OSError: pass
""",
    "memory": """
for _ in range(8):
    if os.fork() == 0:
        held = []
        while True:
            try: held.append(bytearray(1 << 24))
            except MemoryError: time.sleep(100)
time.sleep(4)
os.kill(os.getppid(), signal.SIGKILL)
""",
}


FIRST = [("direct", "kill_all"), ("direct", "fork_bomb"), ("direct", "memory"), ("runtime", "kill_all")]


@pytest.mark.parametrize("case", tiered(product(("direct", "runtime"), TAKE_DOWN), FIRST), ids=", ".join)
async def test_solution_that_destroys_its_sandbox_scores_zero(case: tuple[str, str]) -> None:
    """The loss is the candidate's; a machine failure would be retried and finally masked."""
    start, attack = case
    source = f"import os, resource, signal, time\ndef truncate_number(x):\n{indent(TAKE_DOWN[attack], '    ')}"
    options = {"start": start, "memory_mib": 1024, "processes": 128}
    limits = CodeLimits(time_s=2, total_s=6, memory_mib=512)
    problem = problem_of(TRUNCATE)
    verdict = await grade(lambda: containers.running_ours(**options), problem, source, limits, containers.ROOT)
    assert (verdict.reward, verdict.passed) == (0.0, False), verdict
