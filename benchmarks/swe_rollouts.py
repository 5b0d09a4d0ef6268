# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of software-engineering tasks, the staged way and the in-tree way, and who holds a sandbox for how long.

Both have the same tasks, sandboxes, tools, grader and policy; a policy of so many turns that thinks before each. The
staged way is :class:`~nemo_gym_prorl.rollout.pipeline.Pipeline` over
:class:`~nemo_gym_prorl.tasks.sessions.Sessions`, as the servers have them. The in-tree way is rebuilt after Gym's
``swe_agents``: one semaphore around the whole rollout, the policy's container and the grading one started at once,
the latter held until there is a patch. In its favour, it finds the patch without polling for it (there: every 5 s),
and its sandboxes are ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from nemo_gym.sandbox import SandboxSpec

from nemo_gym_prorl.failures import Failure, Stage
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.scheduler import PoolSizes
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.sandbox.started import StartedSandbox, Starter
from nemo_gym_prorl.tasks.sessions import SessionLimits, Sessions
from nemo_gym_prorl.tasks.swe.grading import GradingLimits
from nemo_gym_prorl.tasks.swe.instance import row_of
from nemo_gym_prorl.tasks.swe.repository import PatchLimits
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering
from nemo_gym_prorl.tasks.swe.testing import TestLimits
from nemo_gym_prorl.tasks.task import OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from scripts.scripted_turns.swe import patching


Row = Mapping[str, Any]
Call = Callable[[str, Mapping[str, Any]], Awaitable[str]]

PARTS = ("policy: INIT", "policy: READY", "policy: RUN", "grading: idle", "grading: EVAL")
"""What a sandbox is held for, in the order in which a rollout comes to it."""


@dataclass(slots=True)
class Span:
    """For how long a sandbox is held: from the first step of its start until it is gone."""

    since: float
    ended: float | None = None

    def take(self) -> float:
        """Seconds since it was last asked."""
        now = time.monotonic() if self.ended is None else self.ended
        since, self.since = self.since, now
        return now - since


class Meter:
    """Starts sandboxes, and knows how long each is held."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.held = 0
        self.most = 0

    async def start(self, needs: SandboxNeeds) -> tuple[StartedSandbox, Span]:
        """A fresh sandbox."""
        span = Span(time.monotonic())
        self.held += 1
        self.most = max(self.most, self.held)
        sandbox = await self._starter.start(SandboxSpec(image=needs.image, workdir="/"))
        stop = sandbox.stop

        async def stopping() -> None:
            await stop()
            if span.ended is None:
                span.ended = time.monotonic()
                self.held -= 1

        sandbox.stop = stopping  # type: ignore[method-assign]
        return sandbox, span

    async def fetch_image(self, needs: SandboxNeeds) -> None:
        """Have its image here."""
        await self._starter.fetch_image(SandboxSpec(image=needs.image, workdir="/"))


@dataclass(slots=True)
class Way:
    """What rollouts took, one way.

    Attributes:
        seconds: sandbox-seconds by part, of all rollouts.
        wall_s: from the first to the last.
        most: sandboxes at a time.
    """

    seconds: Mapping[str, float]
    wall_s: float
    most: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def make_task() -> SoftwareEngineering:
    """As the server makes it."""
    tests = TestLimits(timeout_s=600)
    return SoftwareEngineering(ToolLimits(timeout_s=120, silence_s=120), PatchLimits(), GradingLimits(tests))


@dataclass(frozen=True, slots=True)
class Policy:
    """Looks around, brings in the fix, tries it, and hands in.

    Attributes:
        turns: how many, at least 8.
        think_s: seconds of thought before each, on average; they are drawn, and the same in every run.
    """

    turns: int
    think_s: float

    def script(self, row: Row) -> list[tuple[float, list[tuple[str, Mapping[str, Any]]]]]:
        """Seconds and tool calls of each turn."""
        instance = row_of(row).swe
        turns = patching(instance.patch)[:-1]
        fixing = [[(call["name"], call["arguments"]) for call in turn["tool_calls"]] for turn in turns]
        looking = [
            "git ls-files | head -50",
            "grep -rn 'def ' --include=*.py . | head -40",
            "git ls-files | grep 'py$' | head -1 | xargs head -60",
        ]
        trying = ["python3 -m compileall -q .", f"{instance.test_command} -q -x || true"]
        before = self.turns - len(fixing) - len(trying)
        calls = [[("bash", {"command": looking[number % len(looking)]})] for number in range(before)]
        calls += fixing[:-1] + [[("bash", {"command": command, "timeout_s": 120})] for command in trying] + fixing[-1:]
        drawn = Random(row["instance_id"])
        return [(self.think_s * drawn.lognormvariate(-0.32, 0.8), each) for each in calls]

    async def act(self, row: Row, call: Call) -> None:
        """Play it."""
        for seconds, calls in self.script(row):
            await asyncio.sleep(seconds)
            for tool, arguments in calls:
                await call(tool, arguments)


class StagedHandler:
    """Rollouts for the pipeline. Each task is rolled out once, so its image tells whose sandbox it is."""

    name = "swe"

    def __init__(self, meter: Meter, policy: Policy) -> None:
        self._meter = meter
        self._policy = policy
        self._spans: dict[str | None, Span] = {}
        self._sessions = Sessions(make_task(), self._start, SessionLimits(), meter.fetch_image)

    async def _start(self, needs: SandboxNeeds) -> StartedSandbox:
        sandbox, self._spans[needs.image] = await self._meter.start(needs)
        return sandbox

    def _book(self, job: Job, part: str) -> None:
        self._meter.seconds[part] += self._spans[job.row["image"]].take()

    async def init(self, job: Job) -> str:
        await self._sessions.seed(job.id, job.row)
        self._book(job, "policy: INIT")
        return job.id

    async def run(self, job: Job, session: str) -> Trajectory:
        self._book(job, "policy: READY")
        await self._policy.act(job.row, lambda tool, arguments: self._sessions.call(job.id, tool, arguments))
        return Trajectory({})

    async def release(self, job: Job, session: str) -> None:
        await self._sessions.release(job.id)
        self._book(job, "policy: RUN")

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        grade = await self._sessions.verify(job.id, {})
        self._book(job, "grading: EVAL")
        await self._sessions.close(job.id)
        return Verdict(grade.reward, {})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        return Outcome(failure_state(failure), {}, failure=failure)


async def staged(starter: Starter, rows: Sequence[Row], policy: Policy, pools: PoolSizes) -> Way:
    """Our way."""
    meter = Meter(starter)
    handler = StagedHandler(meter, policy)
    pipeline = Pipeline(Environments.of(handler), PipelineSettings(stages=pools))
    started = time.monotonic()
    jobs = [pipeline.submit(JobRequest(dict(row))) for row in rows]
    await pipeline.drain()
    _require_resolved([job.outcome.reward if job.outcome else None for job in jobs])
    return Way(dict(meter.seconds), time.monotonic() - started, meter.most)


async def in_tree(starter: Starter, rows: Sequence[Row], policy: Policy, slots: int) -> Way:
    """The peer's."""
    meter, task, places = Meter(starter), make_task(), asyncio.Semaphore(slots)

    async def rollout(row: Row) -> float:
        needs = task.needs(row)
        async with places:
            pair = await asyncio.gather(meter.start(needs), meter.start(needs))
            (acting, acts), (grading, grades) = pair
            try:
                bench = await task.tools.open(acting, needs)
                await task.prepare(row, bench)
                meter.seconds["policy: INIT"] += acts.take()
                await policy.act(row, bench.call)
                solution = await task.artefacts(row, bench)
                await bench.close()
                await acting.stop()
                meter.seconds["policy: RUN"] += acts.take()
                meter.seconds["grading: idle"] += grades.take()
                grade = await task.grade(row, solution, {}, _held(grading, needs, meter))
            finally:
                await asyncio.gather(acting.stop(), grading.stop())
            meter.seconds["grading: EVAL"] += grades.take()
        return grade.reward

    started = time.monotonic()
    _require_resolved(await asyncio.gather(*map(rollout, rows)))
    return Way(dict(meter.seconds), time.monotonic() - started, meter.most)


def _held(sandbox: StartedSandbox, usual: SandboxNeeds, meter: Meter) -> OpenSandbox:
    """Opens the sandbox that is there, and leaves it to its owner; further ones, for which nothing idles, are new."""
    held = [sandbox]

    @asynccontextmanager
    async def opening(needs: SandboxNeeds | None = None) -> AsyncIterator[StartedSandbox]:
        if held:
            yield held.pop()
            return
        fresh, lives = await meter.start(needs or usual)
        try:
            yield fresh
        finally:
            await fresh.stop()
            meter.seconds["grading: EVAL"] += lives.take()

    return opening


def _require_resolved(rewards: Sequence[float | None]) -> None:
    if any(reward != 1.0 for reward in rewards):
        raise RuntimeError(f"{sum(reward == 1.0 for reward in rewards)} of {len(rewards)} fixes were resolved")
