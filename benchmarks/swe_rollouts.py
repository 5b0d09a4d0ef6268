# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Software-engineering rollouts in two ways, and for how long each way holds its sandboxes.

The tasks of ``make swe-tasks`` are rolled out by a scripted policy that thinks before each turn. The staged way is the
pipeline over the sessions of ``prorl_swe``; the in-tree way follows Gym's ``swe_agents``: one semaphore around the
rollout, in which the policy's and the grading sandbox start together. Both have the same slots, tools and grader. The
in-tree way is flattered: it waits for the patch without polling, in sandboxes of ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from nemo_gym.sandbox import SandboxSpec

from nemo_gym_prorl.failures import Failure, Stage
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes
from nemo_gym_prorl.sandbox.factory import SandboxFactory, StartedSandbox
from nemo_gym_prorl.tasks.sessions import SessionLimits, Sessions
from nemo_gym_prorl.tasks.swe.grading import GradingLimits
from nemo_gym_prorl.tasks.swe.instance import parse_row
from nemo_gym_prorl.tasks.swe.patches import PatchLimits
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering
from nemo_gym_prorl.tasks.swe.testing import TestLimits
from nemo_gym_prorl.tasks.task import OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from scripts.scripted_turns.swe import patching


Row = Mapping[str, Any]
Script = Sequence[tuple[float, Sequence[tuple[str, Mapping[str, Any]]]]]
"""Seconds of thought and tool calls, by turn."""

TURNS, THINK_S = 20, 1.0
"""Turns of the policy, and its mean seconds before each."""


class Meter:
    """Starts sandboxes and sums for how long they are held."""

    def __init__(self, starter: SandboxFactory) -> None:
        self._starter = starter
        self.held_s = 0.0

    async def start(self, needs: SandboxNeeds) -> StartedSandbox:
        """Start a fresh sandbox."""
        since: float | None = time.monotonic()
        sandbox = await self._starter.start(SandboxSpec(image=needs.image, workdir="/"))
        stop = sandbox.stop

        async def stopping() -> None:
            nonlocal since
            await stop()
            if since is not None:
                self.held_s, since = self.held_s + time.monotonic() - since, None

        sandbox.stop = stopping  # type: ignore[method-assign]
        return sandbox

    async def fetch_image(self, needs: SandboxNeeds) -> None:
        """Fetch the image."""
        await self._starter.fetch_image(SandboxSpec(image=needs.image, workdir="/"))


def make_task() -> SoftwareEngineering:
    """Return the task as the server makes it."""
    grading = GradingLimits(TestLimits(timeout_s=600))
    return SoftwareEngineering(ToolLimits(timeout_s=120, silence_s=120), PatchLimits(), grading)


def script_of(row: Row) -> Script:
    """Look around, apply the fix, try it and submit; thinking times are drawn by the task."""
    instance, rng = parse_row(row).swe, Random(row["instance_id"])
    turns = patching(instance.patch)[:-1]
    fixing = [[(call["name"], call["arguments"]) for call in turn["tool_calls"]] for turn in turns]
    looking = [
        "git ls-files | head -50",
        "grep -rn 'def ' --include=*.py . | head -40",
        "git ls-files | grep 'py$' | head -1 | xargs head -60",
    ]
    trying = ["python3 -m compileall -q .", f"{instance.test_command} -q -x || true"]
    before = TURNS - len(fixing) - len(trying)
    calls = [[("bash", {"command": looking[number % len(looking)]})] for number in range(before)]
    calls += fixing[:-1] + [[("bash", {"command": command, "timeout_s": 120})] for command in trying] + fixing[-1:]
    return [(THINK_S * rng.lognormvariate(-0.32, 0.8), each) for each in calls]


async def act(row: Row, call: Callable[[str, Mapping[str, Any]], Awaitable[str]]) -> None:
    """Play the policy."""
    for seconds, calls in script_of(row):
        await asyncio.sleep(seconds)
        for tool, arguments in calls:
            await call(tool, arguments)


class StagedHandler:
    """Handler of the pipeline over the server's sessions."""

    name = "swe"

    def __init__(self, meter: Meter) -> None:
        self._sessions = Sessions(make_task(), meter.start, SessionLimits(), meter.fetch_image)

    async def init(self, job: Job) -> str:
        await self._sessions.seed(job.id, job.row)
        return job.id

    async def run(self, job: Job, session: str) -> Trajectory:
        await act(job.row, lambda tool, arguments: self._sessions.call(job.id, tool, arguments))
        return Trajectory({})

    async def release(self, job: Job, session: str) -> None:
        await self._sessions.release(job.id)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        grade = await self._sessions.verify(job.id, {})
        await self._sessions.close(job.id)
        return Verdict(grade.reward, {})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        return Outcome(failure_state(failure), {}, failure=failure)


async def staged(meter: Meter, rows: Sequence[Row], slots: int) -> list[float | None]:
    """Run the rollouts in stages; return the rewards."""
    pools = PoolSizes(init=2, ready=max(1, slots // 4), run=slots, eval=max(1, slots // 4))
    pipeline = Pipeline(Environments.of(StagedHandler(meter)), PipelineSettings(stages=pools))
    jobs = [pipeline.submit(JobRequest(dict(row))) for row in rows]
    await pipeline.drain()
    return [job.outcome.reward if job.outcome else None for job in jobs]


async def in_tree(meter: Meter, rows: Sequence[Row], slots: int) -> list[float | None]:
    """Run the rollouts as the peer does; return the rewards."""
    task, places = make_task(), asyncio.Semaphore(slots)

    async def rollout(row: Row) -> float:
        needs = task.needs(row)
        async with places:
            acting, grading = await asyncio.gather(meter.start(needs), meter.start(needs))
            try:
                bench = await task.tools.open(acting, needs)
                await task.prepare(row, bench)
                await act(row, bench.call)
                solution = await task.artefacts(row, bench)
                await bench.close()
                await acting.stop()
                return (await task.grade(row, solution, {}, _held(grading, needs, meter))).reward
            finally:
                await asyncio.gather(acting.stop(), grading.stop())

    return await asyncio.gather(*map(rollout, rows))


def _held(sandbox: StartedSandbox, usual: SandboxNeeds, meter: Meter) -> OpenSandbox:
    """Give the held sandbox first, and fresh ones after that."""
    held = [sandbox]

    @asynccontextmanager
    async def opening(needs: SandboxNeeds | None = None) -> AsyncIterator[StartedSandbox]:
        opened = held.pop() if held else await meter.start(needs or usual)
        try:
            yield opened
        finally:
            if opened is not sandbox:  # its owner stops that one
                await opened.stop()

    return opening
