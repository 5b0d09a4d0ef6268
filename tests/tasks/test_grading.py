# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HumanEval in real containers: right verdicts for right and wrong solutions, and none by cheating; and what of a lost
sandbox is whose doing, which goes for all problems."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from textwrap import indent
from typing import Any

import pytest
from nemo_gym.sandbox import AsyncSandbox

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.factory import SandboxWithSessions
from nemo_gym_prorl.sandbox.supervisor import client
from nemo_gym_prorl.tasks.code.grading import CodeLimits, Lost, Verdict, grade, grade_in
from nemo_gym_prorl.tasks.code.rows import (
    HumanEvalProblem,
    Problem,
    humaneval_row,
    problems,
    read_metadata,
    read_problem,
)
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import Grade
from scripts.scripted_turns.humaneval import CHEATS
from tests.conftest import LONG
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
LIMITS = CodeLimits(time_s=5, total_s=20)
TRUNCATE = "HumanEval/2"  # truncate_number(number): float
INTERSPERSE = "HumanEval/5"  # intersperse(numbers, delimiter): list


def problem_of(task: str) -> Problem:
    return read_problem(read_metadata(humaneval_row(problems()[task])), None)


async def judge(sandbox: Sandbox, task: str, source: str, limits: CodeLimits = LIMITS) -> Grade:
    outcome = await grade_in(sandbox, problem_of(task), source, limits, containers.ROOT)
    assert isinstance(outcome, Grade), outcome
    return outcome


async def grade_all(sandbox: Sandbox, source: Callable[[HumanEvalProblem], str], every: int = 1) -> dict[str, Grade]:
    """All problems in one container, four at a time; every so manieth of them."""
    gate, chosen = asyncio.Semaphore(4), [*problems().values()][::every]

    async def one(problem: HumanEvalProblem) -> Grade:
        async with gate:
            return await judge(sandbox, problem.task_id, source(problem))

    verdicts = await asyncio.gather(*map(one, chosen))
    return dict(zip((problem.task_id for problem in chosen), verdicts, strict=True))


async def test_all_references_pass(sandbox: AsyncSandbox) -> None:
    verdicts = await grade_all(sandbox, lambda problem: problem.reference_source)
    assert {task: verdict for task, verdict in verdicts.items() if not verdict.passed} == {}


@pytest.mark.longer("all problems, else every fifth")
@pytest.mark.parametrize("body", ["raise NotImplementedError", "return None"])
async def test_no_function_that_does_nothing_passes(sandbox: AsyncSandbox, body: str) -> None:
    empty = await grade_all(sandbox, lambda problem: f"{problem.prompt.rstrip()}\n    {body}\n", 1 if LONG else 5)
    assert {task: grade for task, grade in empty.items() if grade.reward} == {}


# One that returns floats, strings, lists, and one with a checker of its own.
TASKS = ["HumanEval/2", "HumanEval/15", "HumanEval/32", "HumanEval/33", "HumanEval/38"]


async def test_no_cheat_passes() -> None:
    gate = asyncio.Semaphore(4)

    async def attempt(task: str, source: str) -> Grade | Lost:
        async with gate, containers.running() as sandbox:  # one each: a cheat may damage its sandbox
            return await grade_in(sandbox, problem_of(task), source, LIMITS, containers.ROOT)

    tried = [(task, CHEATS[name]) for task, name in zip(TASKS * len(CHEATS), CHEATS, strict=False)]
    outcomes = await asyncio.gather(*(attempt(task, source(problems()[task])) for task, source in tried))
    for name, outcome in zip(CHEATS, outcomes, strict=True):
        assert isinstance(outcome, Grade), (name, outcome)
        assert not outcome.passed, name


async def test_a_candidate_that_has_its_tester_killed_is_to_blame() -> None:
    """It can't do that itself, as far as is known; so here its sandbox does, at its word."""
    before = containers.instances()

    async def kill_when_told(sandbox: SandboxWithSessions) -> None:
        while True:
            told = await sandbox.exec("cat /tmp/work-*/tester")
            if tester := (told.stdout or "").strip():
                await sandbox.exec(f"kill -9 {int(tester)}")
                return
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def open_sandbox() -> AsyncIterator[Sandbox]:
        async with containers.running_ours() as sandbox:
            killing = asyncio.create_task(kill_when_told(sandbox))
            try:
                yield sandbox
            finally:
                killing.cancel()
                await asyncio.wait([killing])

    source = (
        "import re, os, time\n"
        "tester = re.search(r'PPid:\\s(\\d+)', open('/proc/%d/status' % os.getppid()).read())[1]\n"
        "print(tester, file=open('tester', 'w'), flush=True)\n"
        "time.sleep(100)\n"
    )
    verdict = await grade(open_sandbox, problem_of(TRUNCATE), source, LIMITS, containers.ROOT)
    assert verdict.verdict == Verdict.CRASHED
    assert "taken down, twice" in verdict.detail
    assert containers.instances() == before


class Dying(AsyncSandbox):
    """A real sandbox whose instance is killed when it is to grade."""

    async def exec(self, *arguments: Any, **options: Any) -> Any:
        containers.kill_instance(self._require_handle().sandbox_id)
        return await super().exec(*arguments, **options)


async def test_a_lost_sandbox_costs_a_try_and_no_reward() -> None:
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


async def test_machines_that_never_answer_are_infrastructure_and_no_reward() -> None:
    with pytest.raises(InfrastructureError) as caught:
        await grade(lambda: containers.running(Dying), problem_of(INTERSPERSE), "x = 1", LIMITS, containers.ROOT)
    assert caught.value.kind is FailureKind.VERIFIER_ERROR


NEVER = "import time\nopen('begun', 'w').close()\ndef truncate_number(x): time.sleep(1000)\n"


@pytest.mark.parametrize("killed", ["sandbox", "supervisor"])
async def test_what_the_machine_ends_while_a_solution_runs_is_no_verdict_though_machines_are_fine(killed: str) -> None:
    """The reference would pass in the next sandbox, and the solution is to be graded again, not to be given a zero."""
    opened = 0

    async def kill_when_begun(sandbox: SandboxWithSessions) -> None:
        while True:
            if (await sandbox.exec("ls /tmp/work-*/begun")).return_code == 0:
                break
            await asyncio.sleep(0.01)
        if killed == "sandbox":
            containers.kill_instance(sandbox.sandbox_id)
        else:
            assert client.own_supervisor
            os.kill(client.own_supervisor.popen.pid, signal.SIGKILL)

    @asynccontextmanager
    async def open_sandbox() -> AsyncIterator[Sandbox]:
        nonlocal opened
        opened += 1
        async with containers.running_ours() as sandbox:
            killing = asyncio.create_task(kill_when_begun(sandbox))
            try:
                yield sandbox
            finally:
                killing.cancel()
                await asyncio.wait([killing])

    with pytest.raises(InfrastructureError) as caught:
        await grade(open_sandbox, problem_of(TRUNCATE), NEVER, LIMITS, containers.ROOT)
    assert caught.value.kind is FailureKind.VERIFIER_ERROR
    assert opened == 2


async def test_what_ends_before_the_solution_is_run_is_not_its_doing() -> None:
    """A machine that can't carry the tester, say: here one whose sandbox has no room for the solution's folder."""

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


long = pytest.mark.long("what the runtime started is taken down by two of them")


@pytest.mark.parametrize(
    ("start", "attack"),
    [
        *(("direct", attack) for attack in TAKE_DOWN),
        *(
            pytest.param("runtime", attack, marks=[] if attack in ("kill_all", "fork_bomb") else long)
            for attack in TAKE_DOWN
        ),
    ],
)
async def test_a_solution_that_takes_its_sandbox_down_has_its_zero(attack: str, start: str) -> None:
    """It has no way to be taken for a victim of the machine, which would be tried again and left out in the end."""
    source = f"import os, resource, signal, time\ndef truncate_number(x):\n{indent(TAKE_DOWN[attack], '    ')}"
    options = {"start": start, "memory_mib": 1024, "processes": 128}
    limits = CodeLimits(time_s=2, total_s=6, memory_mib=512)
    problem = problem_of(TRUNCATE)
    verdict = await grade(lambda: containers.running_ours(**options), problem, source, limits, containers.ROOT)
    assert (verdict.reward, verdict.passed) == (0.0, False), verdict
