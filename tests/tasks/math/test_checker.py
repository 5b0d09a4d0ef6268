# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The checker with real workers: answers that hang or use all memory, cheats, and failures of infrastructure."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, TaskError
from nemo_gym_prorl.processes import process_command_line
from nemo_gym_prorl.tasks import forked_workers
from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker, MathVerdict
from scripts.scripted_turns.math import CHEATS, EXAMPLES


pytestmark = pytest.mark.asyncio(loop_scope="module")


def worker_pids() -> list[int]:
    """Return the process ids of this process's workers, without their children."""
    ours = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, ours) if b"tasks.forked_workers" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_right_wrong_and_none(checker: MathChecker) -> None:
    right = await checker.check(r"\frac{1}{2}", r"So it is \boxed{0.5}.")
    assert (right.right, right.verdict, right.extracted) == (True, MathVerdict.RIGHT, "0.5")
    many = [r"\boxed{2}", "", r"\boxed{}", "1/2", r"\boxed{" + "1" * 1001 + "}", r"\boxed{1/2} \boxed{3}"]
    checked = await asyncio.gather(*(checker.check("1/2", one) for one in many))
    assert not any(one.right for one in checked)
    assert [one.verdict for one in checked] == ["wrong", "no_answer", "no_answer", "no_answer", "unreadable", "wrong"]
    assert len(worker_pids()) == 2
    await checker.aclose()
    assert worker_pids() == []


async def test_no_scripted_cheat_is_paid(checker: MathChecker) -> None:
    for name, turns in CHEATS.items():
        message = turns(EXAMPLES[0])[-1]["content"]
        checked = await checker.check(EXAMPLES[0].answer, message, EXAMPLES[0].question)
        assert not checked.right, (name, message)


async def test_an_answer_that_hangs_its_comparison_is_to_blame(
    checker: MathChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = forked_workers.WorkerPool.ask

    async def noted(pool: forked_workers.WorkerPool, job: dict[str, Any], **bounds: int) -> Any:
        asked.append(job["said"])
        return await ask(pool, job, **bounds)

    monkeypatch.setattr(forked_workers.WorkerPool, "ask", noted)
    checked = await checker.check("x + 5", r"\boxed{9^{9^{9^{9}}} + \sin(1)}")
    assert (checked.right, checked.verdict) == (False, MathVerdict.TIMED_OUT), checked
    assert asked == [r"9^{9^{9^{9}}} + \sin(1)", "x + 5"], "it is tried once, and then the expected answer"
    assert (await checker.check("5", r"\boxed{5}")).right


async def test_memory_is_bounded() -> None:
    small = MathChecker(CheckLimits(cpu_s=5, memory_mib=512, workers=1))
    try:
        checked = await small.check("x", r"\boxed{10^{10^{9}} - 10^{10^{9}} + x}")
        assert checked.verdict in (MathVerdict.UNREADABLE, MathVerdict.TIMED_OUT, MathVerdict.WRONG)
        assert not checked.right
    finally:
        await small.aclose()


async def test_an_expected_answer_that_nobody_could_give_is_the_tasks_fault(checker: MathChecker) -> None:
    for expected in ("", "$$", r"\boxed{}", r"\(\)"):
        with pytest.raises(TaskError, match="not right itself"):
            await checker.require_gradeable(expected)
    for expected in (r"\frac{1}{", "(1, 2", "1 +", r"\sqrt", "x^", r"5 \text{ if } n > 3", r"2, \frac{1}"):
        with pytest.raises(TaskError, match="can't read"):
            await checker.require_gradeable(expected)
    for expected in (r"\frac\pi2", "Friday", r"\{1, 2, \ldots\}", "10:30", r"x \in (1, 2)", r"5\,."):
        await checker.require_gradeable(expected)


async def test_where_the_expected_answer_breaks_too_nobody_is_graded() -> None:
    # No known answer breaks the comparison with itself, so the CPU limit breaks all comparisons.
    starved = MathChecker(CheckLimits(cpu_s=0, workers=1))
    try:
        with pytest.raises(TaskError, match="compared with itself"):
            await starved.check("x^2 + 1", r"\boxed{(x+1)^2}")
    finally:
        await starved.aclose()


async def test_a_worker_that_was_killed_is_replaced_and_nobody_notices(checker: MathChecker) -> None:
    assert (await checker.check("5", r"\boxed{5.0}")).right
    for pid in worker_pids():
        os.kill(pid, signal.SIGKILL)
    assert (await checker.check("5", r"\boxed{5.0}")).right


async def test_workers_that_always_die_are_a_failure_and_no_reward(
    checker: MathChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.aclose()
    monkeypatch.setattr(forked_workers.sys, "executable", "/bin/false")
    with pytest.raises(InfrastructureError) as failure:
        await checker.check("5", r"\boxed{5.0}")
    assert failure.value.kind is FailureKind.VERIFIER_ERROR
    monkeypatch.undo()
    assert (await checker.check("5", r"\boxed{5.0}")).right


async def test_a_comparison_that_nobody_waits_for_answers_nobody_else(checker: MathChecker) -> None:
    await checker.check("5", r"\boxed{5.0}")
    hanging = r"\boxed{9^{9^{9^{9}}} + \sin(1)}"
    asked = [asyncio.create_task(checker.check("x + 5", hanging)) for _ in range(2)]
    await asyncio.sleep(0.2)
    for task in asked:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*asked, return_exceptions=True))
    assert (await checker.check("5", r"\boxed{5.0}")).right
    assert not (await checker.check("5", r"\boxed{6.0}")).right


async def test_a_worker_ends_with_whoever_started_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, os\n"
        "from nemo_gym_prorl.tasks.math.checker import MathChecker\n"
        "async def main():\n"
        "    checker = MathChecker()\n"
        "    await checker.check('5', r'\\boxed{5.0}')\n"
        "    print([one._process.pid for one in checker._workers._workers if one._process][0], flush=True)\n"
        "    os._exit(1)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout)
    with contextlib.suppress(OSError):  # the process has ended
        while b"worker" in process_command_line(pid):
            await asyncio.sleep(0.05)
