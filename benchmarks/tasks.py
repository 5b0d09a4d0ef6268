# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What EVAL costs, by family of tasks.

Code: programs with tests on standard input and output, graded as ``prorl_code`` grades them, in a fresh sandbox each,
and, in the same sandboxes, by a loop that starts an interpreter for each test and isolates nothing. Both have the same
programs, of three kinds, and compare the same outputs. Counted is processors' time: of this process, of the supervisor
and of all in the sandboxes, their start included.

Software engineering: the tasks that `make swe-tasks` makes, each rolled out by a policy that takes 20 turns, thinks
for 1 s before each, tries what it wrote, and hands in the fix; all at once, for fewer slots. The staged way is the
pipeline over the sessions of `prorl_swe`, without HTTP. The in-tree way is rebuilt after Gym's `swe_agents`, on the
same sandboxes: one semaphore around the whole rollout, in which the policy's container and the grading one start
together and the latter waits for the patch (there it looks for it every 5 s, here it is told at once). Both have the
same number of rollouts in their slots. A sandbox is held from the first step of its start until it is gone, READY's
queue included. What EVAL costs is processors' time again, against a fresh sandbox in which the fix and the hidden
tests' patch are applied, the same command runs, and its exit code is believed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from nemo_gym.sandbox import SandboxSpec

from benchmarks import processes, swe_rollouts
from benchmarks.report import Figure, publish
from benchmarks.swe_rollouts import PARTS, Policy, Way
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.sandbox import started
from nemo_gym_prorl.sandbox.images.building.default import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.tasks.code.grading import CodeLimits, grade_in
from nemo_gym_prorl.tasks.code.rows import Case, Problem
from nemo_gym_prorl.tasks.swe.changes import Solution
from nemo_gym_prorl.tasks.swe.repository import NotTaken
from nemo_gym_prorl.tasks.task import Grade, SandboxNeeds
from scripts.swe_tasks.making import ROWS, default_folder


ROUNDS = 3
FRESH = "an interpreter each"
IN_TREE = "in-tree way"
BELIEVED = "applied and believed"

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
SORT = (
    "import sys\nfrom collections import Counter\nc = Counter(sys.stdin.read().split())\nprint(*sorted(c, key=int))\n"
)
HEAP = (
    "import heapq, sys\nfrom functools import reduce\ndata = list(map(int, sys.stdin.buffer.read().split()))\n"
    "heap = []\nfor x in data:\n    heapq.heappush(heap, -x)\n"
    "print(sum(-heapq.heappop(heap) for _ in range(len(data) // 2)))\n"
)
"""Three programs: two of a few lines with imports, as policies write them."""

LOOP = """\
import json, subprocess, sys
job = json.load(sys.stdin)
with open("/tmp/solution.py", "w") as file: file.write(job["source"])
for test in job["tests"]:
    said = subprocess.run([sys.executable, "-I", "/tmp/solution.py"], input=test[0], capture_output=True, text=True)
    assert said.stdout.split() == test[1].split(), said
print("passed")
"""
"""The peer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A right program and its problem."""

    problem: Problem
    source: str


def candidates(tests: int) -> list[Candidate]:
    """One of each kind, with so many tests."""
    random = Random(7)
    numbers = [[random.randint(0, 10**6) for _ in range(30)] for _ in range(tests)]
    answers: dict[str, Callable[[list[int]], object]] = {
        ADD: lambda n: n[0] + n[1],
        SORT: lambda n: " ".join(map(str, sorted(set(n)))),
        HEAP: lambda n: sum(sorted(n)[-(len(n) // 2) :]),
    }
    return [
        Candidate(
            Problem(
                [Case(" ".join(map(str, given[:size])) + "\n", f"{answer(given[:size])}\n") for given in numbers],
                None,
                {"kind": "tokens"},
            ),
            source,
        )
        for (source, answer), size in zip(answers.items(), (2, 30, 30), strict=True)
    ]


async def by_us(sandbox: started.StartedSandbox, candidate: Candidate) -> None:
    """As the server does it."""
    grade = await grade_in(sandbox, candidate.problem, candidate.source, CodeLimits(), "/sandbox")
    if not isinstance(grade, Grade) or not grade.passed:
        raise RuntimeError(f"a right program was not rewarded: {grade}")


async def by_loop(sandbox: started.StartedSandbox, candidate: Candidate) -> None:
    """As the peer does it."""
    tests = [[case.input, case.expected] for case in candidate.problem.tests]
    job = json.dumps({"source": candidate.source, "tests": tests})
    command = f"exec python3 -I -c {shlex.quote(LOOP)} <<'END'\n{job}\nEND\n"
    result = await sandbox.exec(command, cwd="/", timeout_s=600)
    if "passed" not in (result.stdout or ""):
        raise RuntimeError(f"a right program failed: {(result.stderr or '')[-500:]}")


async def tests_per_core_second(
    starter: started.Starter,
    image: str,
    chosen: list[Candidate],
    grade: Callable[[started.StartedSandbox, Candidate], Awaitable[None]],
) -> float:
    """Each candidate in a fresh sandbox."""
    before = processes.core_seconds(os.getpid())
    for candidate in chosen:
        sandbox = await starter.start(SandboxSpec(image=image, workdir="/"))
        try:
            await grade(sandbox, candidate)
        finally:
            await sandbox.stop()
    used = processes.core_seconds(os.getpid()) - before
    return sum(len(candidate.problem.tests) for candidate in chosen) / used


async def code_figures(*, quick: bool) -> list[Figure]:
    """What is said of programs with tests."""
    image = str(await asyncio.to_thread(ensure_image, KERNEL, print))
    starter = started.Starter({"singularity": {"memory_mib": 4096, "processes": 256, "disk_mib": 2048}})
    figures = []
    # What comes first pays for the supervisor and the image being prepared.
    await tests_per_core_second(starter, image, candidates(5), by_us)
    for tests, goal in ((20, None), (100 if quick else 500, ">= 150")):
        chosen = candidates(tests)
        ours: list[float] = []
        fresh: list[float] = []
        for number in range(1 if quick else ROUNDS):
            for mine in (True, False) if number % 2 == 0 else (False, True):
                rate = await tests_per_core_second(starter, image, chosen, by_us if mine else by_loop)
                (ours if mine else fresh).append(rate)
                print(f"{tests} tests a program, {'ours' if mine else FRESH}: {rate:.0f}/s and core", flush=True)
        title = f"programs of {tests} tests: tests per second and core"
        figures.append(Figure.of(title, ours, "1/s", goal, {FRESH: fresh}))
    await starter.aclose()
    return figures


def swe_rows() -> list[dict[str, Any]]:
    """The made tasks.

    Raises:
        SystemExit: there are none.
    """
    file = default_folder() / ROWS
    if not file.exists():
        raise SystemExit(f"there is no {file}: make swe-tasks")
    return [json.loads(line) for line in file.read_text().splitlines()]


async def swe_figures(rows: Sequence[Mapping[str, Any]], *, quick: bool) -> list[Figure]:
    """What is said of software engineering."""
    starter = started.Starter({"singularity": {"memory_mib": 8192, "processes": 512, "disk_mib": 10_240}})
    try:
        for row in rows:
            # The first sandbox of an image pays for unpacking it.
            await (await starter.start(SandboxSpec(image=row["image"], workdir="/"))).stop()
        return await held(starter, rows, quick=quick) + await evals(starter, rows[::4], quick=quick)
    finally:
        await starter.aclose()


async def held(starter: started.Starter, rows: Sequence[Mapping[str, Any]], *, quick: bool) -> list[Figure]:
    """Sandbox-seconds of both ways, which take turns at being first."""
    policy, slots = (Policy(10, 0.5), 3) if quick else (Policy(20, 1.0), 8)
    pools = PoolSizes(init=2, ready=slots // 4, run=slots, eval=max(1, slots // 4))
    ways: tuple[list[Way], list[Way]] = ([], [])
    for number in range(1 if quick else 2):
        for peer in (False, True) if number % 2 == 0 else (True, False):
            if peer:
                way = await swe_rollouts.in_tree(starter, rows, policy, slots)
            else:
                way = await swe_rollouts.staged(starter, rows, policy, pools)
            ways[peer].append(way)
            per = {part: round(seconds / len(rows), 1) for part, seconds in way.seconds.items()}
            print(f"{IN_TREE if peer else 'staged'}: {per}, {way.wall_s:.0f} s, {way.most} at a time", flush=True)
    ours, theirs = ways

    def figure(title: str, unit: str, of: Callable[[Way], float]) -> Figure:
        return Figure.of(title, [of(way) for way in ours], unit, None, {IN_TREE: [of(way) for way in theirs]})

    title = f"{len(rows)} SWE rollouts, {slots} in RUN"
    total = figure(f"{title}: sandbox-seconds per rollout", "s", lambda way: way.total / len(rows))
    total.goal, total.goal_value = "<= 0.7", total.value / total.peers[IN_TREE]
    parts = [figure(f"of these, {part}", "s", partial(_of_part, part=part, rollouts=len(rows))) for part in PARTS]
    return [
        total,
        *parts,
        figure("wall time of all", "s", lambda way: way.wall_s),
        figure("most sandboxes at a time", "sandboxes", lambda way: way.most),
    ]


def _of_part(way: Way, part: str, rollouts: int) -> float:
    return way.seconds[part] / rollouts


async def evals(starter: started.Starter, rows: Sequence[Mapping[str, Any]], *, quick: bool) -> list[Figure]:
    """What grading costs."""
    task = swe_rollouts.make_task()

    @asynccontextmanager
    async def opening(needs: SandboxNeeds) -> AsyncIterator[started.StartedSandbox]:
        sandbox = await starter.start(SandboxSpec(image=needs.image, workdir="/"))
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async def fix(row: Mapping[str, Any]) -> Solution | NotTaken:
        async with opening(task.needs(row)) as sandbox:
            bench = await task.tools.open(sandbox, task.needs(row))
            await task.prepare(row, bench)
            await bench.call("bash", {"command": _applying(row["swe"]["patch"])})
            taken = await task.artefacts(row, bench)
            await bench.close()
            return taken

    async def graded(row: Mapping[str, Any]) -> bool:
        grade = await task.grade(row, solutions[row["instance_id"]], {}, lambda needs=None: opening(task.needs(row)))
        return grade.passed

    async def believed(row: Mapping[str, Any]) -> bool:
        swe = row["swe"]
        steps = [_applying(swe["patch"]), _applying(swe["test_patch"]), swe["test_command"]]
        async with opening(task.needs(row)) as sandbox:
            done = await sandbox.exec(f"sh -c {shlex.quote(' && '.join(steps))}", cwd="/testbed", timeout_s=600)
        return done.return_code == 0

    solutions = {row["instance_id"]: await fix(row) for row in rows}
    ours: list[float] = []
    naive: list[float] = []
    for number in range(1 if quick else ROUNDS):
        for mine in (True, False) if number % 2 == 0 else (False, True):
            before = processes.core_seconds(os.getpid())
            for row in rows:
                if not await (graded if mine else believed)(row):
                    raise RuntimeError(f"the fix of {row['instance_id']} was not resolved")
            cost = (processes.core_seconds(os.getpid()) - before) / len(rows)
            (ours if mine else naive).append(60 / cost)
            print(f"{'ours' if mine else BELIEVED}: {cost:.2f} core-s each", flush=True)
    title = f"EVAL of {len(rows)} fixes: per minute and core"
    return [Figure.of(title, ours, "1/min", None, {BELIEVED: naive})]


def _applying(patch: str) -> str:
    return f"echo {base64.b64encode(patch.encode()).decode()} | base64 -d | git apply"


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of all, one round; 2 minutes; writes nothing")
    quick = parser.parse_args().quick
    processes.subreaper()
    ensure_runtime(print).activate()
    rows = swe_rows()
    figures = await code_figures(quick=quick)
    figures += await swe_figures(rows[::4] if quick else rows, quick=quick)
    publish("tasks", figures, quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
