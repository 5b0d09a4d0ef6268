# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A handler that does in each stage what a plan says, and keeps the books that the tests check."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import FastAPI

from nemo_gym_prorl.failures import AgentError, Failure, FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.http.key_guard import KeyGuard
from nemo_gym_prorl.http.problems import add_problem_handlers
from nemo_gym_prorl.rollout.api.routes import PipelineMetrics, rollout_router
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, JobState, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.rollout.storage.journal import Journal


@dataclass(frozen=True)
class Act:
    """What one call of the handler does: work for ``seconds``, be held until it is let go, end as ``how`` says."""

    how: str = "ok"
    seconds: float = 0.0


class PlannedHandler:
    """Acts by ``row["plan"]``: stage or "release" → list of acts, one per attempt; the last one repeats."""

    name = "planned"

    def __init__(self, _: Any = None) -> None:
        self._numbers = itertools.count()
        self.let_go = asyncio.Event()
        self.inside: Counter[Stage] = Counter()
        self.most_inside: Counter[Stage] = Counter()
        self.most_sessions = 0
        self.sessions: set[int] = set()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.releases: Counter[int] = Counter()

    async def init(self, job: Job) -> int:
        await self._act(job, Stage.INIT)
        session = next(self._numbers)
        self.sessions.add(session)
        self.most_sessions = max(self.most_sessions, len(self.sessions))
        return session

    async def run(self, job: Job, session: int) -> Trajectory:
        assert session in self.sessions, "RUN gets a live session"
        job.trajectory = Trajectory({"output": ["so far"]})
        how = await self._act(job, Stage.RUN)
        return RETURNS_OF_RUN[how]() if how in RETURNS_OF_RUN else job.trajectory

    async def release(self, job: Job, session: int) -> None:
        self.releases[session] += 1
        try:
            await self._perform(self._next(job, "release"))
        finally:
            self.sessions.discard(session)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        assert job.session is None, "EVAL starts when the session is gone"
        how = await self._act(job, Stage.EVAL)
        return RETURNS_OF_EVAL[how]() if how in RETURNS_OF_EVAL else Verdict(1.0, {"reward": 1.0})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        match job.row.get("on_failure"):
            case "raise":
                raise RuntimeError("no outcome from me")
            case "exit":
                raise SystemExit(4)
            case str(how) if how in RETURNS_OF_ON_FAILURE:
                return RETURNS_OF_ON_FAILURE[how](failure)
        partial = job.trajectory.response if job.trajectory else None
        return Outcome(failure_state(failure), {"partial": partial}, failure=failure)

    async def _act(self, job: Job, stage: Stage) -> str:
        self.inside[stage] += 1
        self.most_inside[stage] = max(self.most_inside[stage], self.inside[stage])
        try:
            act = self._next(job, stage.value)
            await self._perform(act)
            return act.how
        finally:
            self.inside[stage] -= 1

    def _next(self, job: Job, what: str) -> Act:
        acts = job.row.get("plan", {}).get(what) or [Act()]
        call = self.calls[job.id, what]
        self.calls[job.id, what] += 1
        act = acts[min(call, len(acts) - 1)]
        return act if isinstance(act, Act) else Act(**act)  # over HTTP an act comes as a JSON object

    async def _perform(self, act: Act) -> None:
        if act.how == "deaf":  # goes on, whatever it is told
            end = asyncio.get_running_loop().time() + act.seconds
            while (left := end - asyncio.get_running_loop().time()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    continue
            return
        await asyncio.sleep(act.seconds)
        if act.how == "held":
            await self.let_go.wait()
        if act.how in ENDINGS:
            raise ENDINGS[act.how]()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text from me")


def _self_cancelled() -> BaseException:
    return asyncio.CancelledError()


ENDINGS: Mapping[str, Callable[[], BaseException]] = {
    "infrastructure": lambda: InfrastructureError("the sandbox is gone"),
    "agent": lambda: AgentError("the agent gave up"),
    "defect": lambda: KeyError("a bug"),
    "exit": lambda: SystemExit(3),
    "cancels itself": _self_cancelled,
    "interrupts": KeyboardInterrupt,
    "generator's exit": GeneratorExit,
    "group": lambda: ExceptionGroup("tools", [ValueError("one"), InfrastructureError("the sandbox is gone")]),
    "no text": lambda: Unprintable(),
    "odd text": lambda: InfrastructureError("\ud800"),
    "session lost": lambda: InfrastructureError("no such session", kind=FailureKind.SESSION_LOST),
}

RETURNS_OF_RUN: Mapping[str, Callable[[], Any]] = {
    "no trajectory": lambda: None,
    "odd trajectory": lambda: Trajectory(["no", "response"]),  # type: ignore[arg-type]
}
RETURNS_OF_EVAL: Mapping[str, Callable[[], Any]] = {
    "no verdict": lambda: None,
    "reward nan": lambda: Verdict(float("nan"), {}),
    "reward inf": lambda: Verdict(float("inf"), {}),
    "reward text": lambda: Verdict("1", {}),  # type: ignore[arg-type]
    "result text": lambda: Verdict(1.0, "{}"),  # type: ignore[arg-type]
    "result surrogate": lambda: Verdict(1.0, {"text": "\ud800"}),
}
RETURNS_OF_ON_FAILURE: Mapping[str, Callable[[Failure], Any]] = {
    "nothing": lambda failure: None,
    "not terminal": lambda failure: Outcome(JobState.RUNNING, {}, failure=failure),
    "succeeded": lambda failure: Outcome(JobState.SUCCEEDED, {}, reward=1.0),
    "no failure": lambda failure: Outcome(JobState.FAILED, {}),
    "surrogate": lambda failure: Outcome(JobState.FAILED, {"text": "\ud800"}, failure=failure),
    "a word as its state": lambda failure: Outcome("failed", {}, failure=failure),  # type: ignore[arg-type]
    "a word as its failure": lambda failure: Outcome(JobState.FAILED, {}, failure="it"),  # type: ignore[arg-type]
}


class FastSettings(PipelineSettings):
    """Settings with short pauses before retries and probes."""

    retry_delay_s: ClassVar[float] = 0.01
    probe_s: ClassVar[float] = 0.1


@dataclass
class Bench:
    """A pipeline with a planned handler."""

    settings: PipelineSettings
    handler: PlannedHandler = field(default_factory=PlannedHandler)

    def pipeline(self, journal: Journal | None = None) -> Pipeline:
        clock = asyncio.get_running_loop().time
        return Pipeline(Environments.of(self.handler), self.settings, clock, journal)


def application(pipeline: Pipeline, key: str | None = None) -> FastAPI:
    """The job API of a pipeline, behind a key if there is one."""
    app = FastAPI()
    add_problem_handlers(app)
    app.add_middleware(KeyGuard, key=key)
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
    return app
