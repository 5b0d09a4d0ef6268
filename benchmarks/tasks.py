# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""CPU cost of grading programs by tests on standard input and output.

``prorl_code`` grades each program in a fresh sandbox. The peer is a loop in the same kind of sandbox, which starts an
interpreter for each test and isolates nothing. The cost is the CPU time of this process, the supervisor and the
sandboxes, including their starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

from nemo_gym.sandbox import SandboxSpec

from benchmarks import processes
from benchmarks.report import Row, median, parser, publish
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.tasks.code.code_rows import CodeProblem, CodeTestCase
from nemo_gym_prorl.tasks.code.grading import CodeLimits, grade_in
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import Grade


ROUNDS = 3
LIMITS = {"memory_mib": 8192, "processes": 512, "disk_mib": 10_240}
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
SORT = (
    "import sys\nfrom collections import Counter\nc = Counter(sys.stdin.read().split())\nprint(*sorted(c, key=int))\n"
)
HEAP = (
    "import heapq, sys\nfrom functools import reduce\ndata = list(map(int, sys.stdin.buffer.read().split()))\n"
    "heap = []\nfor x in data:\n    heapq.heappush(heap, -x)\n"
    "print(sum(-heapq.heappop(heap) for _ in range(len(data) // 2)))\n"
)
PROGRAMS: Mapping[str, tuple[int, Callable[[list[int]], object]]] = {
    ADD: (2, sum),
    SORT: (30, lambda n: " ".join(map(str, sorted(set(n))))),
    HEAP: (30, lambda n: sum(sorted(n)[-(len(n) // 2) :])),
}
"""Correct programs as policies write them, each with the number of integers that it reads and the expected answer."""
LOOP = """\
import json, subprocess, sys
job = json.load(sys.stdin)
with open("/tmp/solution.py", "w") as file: file.write(job["source"])
for test in job["tests"]:
    said = subprocess.run([sys.executable, "-I", "/tmp/solution.py"], input=test[0], capture_output=True, text=True)
    assert said.stdout.split() == test[1].split(), said
print("passed")
"""
"""Program of the peer's grader."""


def problem_of(source: str, tests: int) -> CodeProblem:
    """Return a problem with ``tests`` tests that the program ``source`` solves."""
    random, (size, answer) = Random(7), PROGRAMS[source]
    given = [[random.randint(0, 10**6) for _ in range(size)] for _ in range(tests)]
    cases = [CodeTestCase(" ".join(map(str, numbers)) + "\n", f"{answer(numbers)}\n") for numbers in given]
    return CodeProblem(cases, None, {"kind": "tokens"})


async def by_us(sandbox: Sandbox, problem: CodeProblem, source: str) -> None:
    grade = await grade_in(sandbox, problem, source, CodeLimits(), "/sandbox")
    if not isinstance(grade, Grade) or not grade.passed:
        raise RuntimeError(f"a right program was not rewarded: {grade}")


async def by_loop(sandbox: Sandbox, problem: CodeProblem, source: str) -> None:
    job = json.dumps({"source": source, "tests": [[case.input, case.expected] for case in problem.tests]})
    command = f"exec python3 -I -c {shlex.quote(LOOP)} <<'END'\n{job}\nEND\n"
    result = await sandbox.exec(command, cwd="/", timeout_s=600)
    if "passed" not in (result.stdout or ""):
        raise RuntimeError(f"a right program failed: {(result.stderr or '')[-500:]}")


async def tests_per_core_second(
    provider: SingularityProvider, image: str, tests: int, grade: Callable[..., Awaitable[None]]
) -> float:
    """Grade each program in a fresh sandbox, and return the tests per CPU second."""
    before = processes.core_seconds(os.getpid())
    for source in PROGRAMS:
        sandbox = Sandbox(provider, await provider.create(SandboxSpec(image=image, workdir="/")))
        try:
            await grade(sandbox, problem_of(source, tests), source)
        finally:
            await sandbox.stop()
    return tests * len(PROGRAMS) / (processes.core_seconds(os.getpid()) - before)


async def programs(provider: SingularityProvider, *, quick: bool) -> list[Row]:
    image, tests = str(await asyncio.to_thread(ensure_image, KERNEL, print)), 100 if quick else 500
    await tests_per_core_second(provider, image, 5, by_us)  # warm up
    rates: dict[Any, list[float]] = {by_us: [], by_loop: []}
    for turn in range(1 if quick else ROUNDS):
        for grade in rates if turn % 2 == 0 else reversed(rates):
            rates[grade].append(await tests_per_core_second(provider, image, tests, grade))
    ours, theirs = map(median, rates.values())
    return [Row(f"programs of {tests} tests", "tests/core-s", ours, theirs, "an interpreter each", ">= 2.84")]


async def main() -> None:
    quick = parser(__doc__).parse_args().quick
    processes.subreaper()
    ensure_runtime(print).activate()
    provider = SingularityProvider(**LIMITS)
    try:
        rows = await programs(provider, quick=quick)
    finally:
        await provider.aclose()
    publish("tasks", rows, quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
