# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The whole stack in virtual time: sampler, stages, router, engines, trainer.

What decides is real: ``DynamicSampler`` (or rounds, :mod:`benchmarks.synchronous`), ``StageScheduler`` and, behind the
router, ``BackendPool``. What takes time is simulated: the engines of :mod:`benchmarks.engines`, tools, the shell
around them, sandboxes and the trainer. Whatever is drawn of a rollout depends on the seed and its id alone, so that
stacks which decide otherwise meet the same rollouts.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.engines import Engines, Request, Rollout, Router, Trace
from benchmarks.synchronous import Rounds
from benchmarks.traces import PROMPT, SYSTEM, drawn_turns
from nemo_gym_prorl.dapo.contract import Decision, SamplerConfig
from nemo_gym_prorl.dapo.group import Fate, Fates, Usage
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.scheduler import PoolSizes, StageScheduler, Start


RUN = "ablation"
"""Begins all ids, which are what rollouts are drawn by."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Log-normal, by its median and its 99th percentile."""

    p50_s: float
    p99_s: float

    def at(self, z: float) -> float:
        """So many standard deviations off the median."""
        return self.p50_s * math.exp(z * math.log(self.p99_s / self.p50_s) / 2.326)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of what no policy decides.

    Attributes:
        init_s: starting a sandbox and preparing the task in it.
        eval_s: scoring.
        release_s: from a cancel until the sandbox is gone and its slot free.
        train_tokens: that the trainer learns from in a second.
        refit_s: until the engines have the new weights, while they go on.
    """

    init_s: float
    eval_s: float
    release_s: float
    train_tokens: float
    refit_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What is trained, and on what.

    Attributes:
        groups: with variance, of a batch.
        size: of a group.
        informative: share of prompts whose rollouts have various rewards.
        pools: slots of the stages, over all rollout services.
        engines: how many.
        capacity: tokens of an engine's KV cache.
    """

    groups: int
    size: int
    informative: float
    pools: PoolSizes
    engines: int
    capacity: int

    @property
    def max_in_flight(self) -> int:
        """As many as may hold a session, and be scored."""
        return self.pools.run + self.pools.ready + self.pools.eval


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the ablation.

    Attributes:
        router: places turns.
        shell: what a tool call takes beyond its command.
        staleness: of the sampler.
        cancels: what the sampler calls off ends at once; else it runs to its end, and nobody wants it.
        rounds: batches of prompts per synchronous round; ``None`` for the sampler.
    """

    router: Callable[[], Router]
    shell: Latency
    staleness: int
    cancels: bool = True
    rounds: int | None = None


class Schedule(Protocol):
    """Which rollouts are wanted next."""

    fates: Fates
    submitted: int

    @property
    def in_flight(self) -> int: ...

    @property
    def held(self) -> int: ...

    def ask(self) -> None: ...

    def weights(self, version: int) -> None: ...

    def scored(self, rollout: str, reward: float, usage: Usage) -> None: ...

    def cancelled(self, rollout: str, usage: Usage) -> None: ...

    def decide(self) -> Decision: ...


@dataclass(slots=True)
class Sums:
    """What had come about at some time."""

    now: float = 0.0
    busy_s: float = 0.0
    """Of all engines."""
    hits: int = 0
    prompts: int = 0
    of_use: int = 0
    """Rollouts of batches, and of groups that turned out to have no variance."""
    of_use_s: float = 0.0
    """Their time in slots."""
    wasted: int = 0
    """All others that had begun RUN."""
    wasted_s: float = 0.0
    actions: int = 0
    actions_s: float = 0.0
    shell_s: float = 0.0


@dataclass(slots=True)
class _Job:
    rollout: Rollout
    prompt: int
    stage: Stage = Stage.INIT
    request: Request | None = None
    """At the engines."""
    worked_s: float = 0.0
    """In slots, before the stage that works on it."""
    since: float | None = None
    """When that began."""
    written: int = 0
    ran: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Over:
    """INIT or EVAL is done with a rollout."""

    rollout: str


@dataclass(frozen=True, slots=True)
class _Gone:
    """The sandbox of a cancelled rollout does not exist any more."""

    rollout: str


@dataclass(frozen=True, slots=True)
class _Trained:
    """The engines have new weights."""


class Stack(Engines):
    """One variant, under the rollouts of one seed."""

    def __init__(self, variant: Variant, work: Work, times: Times, seed: int) -> None:
        super().__init__(Trace(RUN, SYSTEM, PROMPT, ()), work.engines, variant.router(), work.capacity)
        self.schedule: Schedule = _schedule(variant, work)
        self.sums = Sums()
        self.ended = 0
        """Rollouts whose end the schedule was told."""
        self._variant, self._work, self._times, self._seed = variant, work, times, seed
        self._scheduler = StageScheduler(work.pools)
        self._jobs: dict[str, _Job] = {}
        self._never_ran = 0
        self._tokens: dict[str, int] = {}
        """Of the rollouts that were scored."""
        self._batches: deque[int] = deque()
        """Their tokens."""
        self._training = False
        self._trained = 0
        self.schedule.ask()
        self._decide()

    def steps(self, count: int) -> list[Sums]:
        """Train so many more steps; what had come about after each."""
        after: list[Sums] = []
        while len(after) < count:
            event = self.next_event()
            if isinstance(event, Request):
                self._turn(event)
            elif isinstance(event, _Over):
                self._over(event.rollout)
            elif isinstance(event, _Gone):
                self._gone(self._jobs[event.rollout])
            elif isinstance(event, _Trained):
                self._new_weights()
                after.append(self._sums())
        return after

    @property
    def in_stages(self) -> int:
        """Rollouts that have not ended."""
        return len(self._jobs)

    # The trainer

    def _decide(self) -> None:
        """Carry out what the schedule decides, until that is nothing."""
        while (decision := self.schedule.decide()) != Decision():
            if self._variant.cancels:
                for name in decision.cancel:
                    self._cancel(self._jobs[name])
            for batch in decision.batches:
                names = [scored.rollout for group in batch.groups.values() for scored in group]
                self._batches.append(sum(self._tokens[name] for name in names))
            for submission in decision.submit:
                name = submission.rollout
                turns = drawn_turns(random.Random(f"{self._seed}:{name}:turns"))
                rollout = Rollout(name, submission.group, self.now, turns)
                self._jobs[name] = _Job(rollout, submission.prompt)
                self._carry_out(self._scheduler.submit(name, "trainer", int(submission.urgent)))
        self._train()

    def _train(self) -> None:
        if self._batches and not self._training:
            self._training = True
            seconds = self._batches.popleft() / self._times.train_tokens + self._times.refit_s
            self.at(self.now + seconds, _Trained())

    def _new_weights(self) -> None:
        self._training = False
        self._trained += 1
        for engine in self.engines:
            engine.advance(self.now)
            engine.forget()
        self.schedule.weights(self._trained)
        self.schedule.ask()
        self._decide()

    # Rollouts

    def _carry_out(self, starts: list[Start]) -> None:
        for start in starts:
            job = self._jobs[start.job_id]
            job.since = self.now
            if start.stage is Stage.RUN:
                job.ran = True
                self.at(self.now, Request(job.rollout, 0, SYSTEM + PROMPT, self.now))
            else:
                seconds = self._times.init_s if start.stage is Stage.INIT else self._times.eval_s
                self.at(self.now + seconds, _Over(start.job_id))

    def _goes_on(self, job: _Job, stage: Stage | None) -> None:
        """A stage is done with a rollout."""
        self._pause_clock(job)
        if stage is not None:
            job.stage = stage
        self._carry_out(self._scheduler.worked(job.rollout.id, stage))

    def _turn(self, request: Request) -> None:
        """A rollout wants its next turn, unless it was cancelled meanwhile."""
        job = self._jobs.get(request.rollout.id)
        if job is not None and not job.cancelled:
            job.request = request
            self.send(request)

    def answered(self, request: Request) -> None:
        rollout = request.rollout
        job = self._jobs[rollout.id]
        job.request = None
        turn = rollout.turns[request.index]
        job.written += turn.written
        if request.index + 1 == len(rollout.turns):
            self._tokens[rollout.id] = request.footprint
            self.router.finished(rollout)
            self._goes_on(job, Stage.EVAL)
            return
        z = random.Random(f"{self._seed}:{rollout.id}:shell:{request.index}").gauss(0, 1)
        shell_s = self._variant.shell.at(z)
        self.sums.actions += 1
        self.sums.actions_s += turn.tool_s + shell_s
        self.sums.shell_s += shell_s
        then = self.now + turn.tool_s + shell_s
        self.at(then, Request(rollout, request.index + 1, request.footprint, then))

    def _over(self, name: str) -> None:
        """INIT or EVAL ends, unless the rollout was cancelled meanwhile."""
        job = self._jobs.get(name)
        if job is None or job.cancelled:
            return
        if job.stage is Stage.INIT:
            self._goes_on(job, Stage.RUN)
            return
        self._goes_on(job, None)
        del self._jobs[name]
        self.ended += 1
        reward = _drawn_reward(self._seed, self._work.informative, job.prompt, name)
        self.schedule.scored(name, reward, Usage(job.worked_s, job.written))
        self._decide()

    def _cancel(self, job: _Job) -> None:
        name = job.rollout.id
        job.cancelled = True
        if self._scheduler.is_waiting(name):
            self._carry_out(self._scheduler.pause(name))
            has_sandbox = job.stage is Stage.RUN
        else:
            has_sandbox = True
            if job.stage is Stage.RUN:
                self.drop(job.rollout, job.request)
        self.at(self.now + (self._times.release_s if has_sandbox else 0.0), _Gone(name))

    def _gone(self, job: _Job) -> None:
        name = job.rollout.id
        works = job.since is not None
        self._pause_clock(job)
        self._carry_out(self._scheduler.worked(name, None) if works else self._scheduler.remove(name))
        del self._jobs[name]
        self.ended += 1
        self._never_ran += not job.ran
        self.schedule.cancelled(name, Usage(job.worked_s, job.written))
        self._decide()

    def _pause_clock(self, job: _Job) -> None:
        if job.since is not None:
            job.worked_s += self.now - job.since
            job.since = None

    # Sums

    def _sums(self) -> Sums:
        for engine in self.engines:
            engine.advance(self.now)
        tallies = {fate: self.schedule.fates[fate] for fate in Fate}
        of_use = [tallies.pop(fate) for fate in (Fate.EMITTED, Fate.NO_VARIANCE)]
        return replace(
            self.sums,
            now=self.now,
            busy_s=sum(engine.busy_s for engine in self.engines),
            hits=self.hits,
            prompts=self.prompts,
            of_use=sum(tally.rollouts for tally in of_use),
            of_use_s=sum(tally.seconds for tally in of_use),
            wasted=sum(tally.rollouts for tally in tallies.values()) - self._never_ran,
            wasted_s=sum(tally.seconds for tally in tallies.values()),
        )


def _schedule(variant: Variant, work: Work) -> Schedule:
    if variant.rounds is not None:
        return Rounds(work.groups, work.size, variant.rounds, RUN)
    config = SamplerConfig(work.groups, work.size, work.max_in_flight, variant.staleness, max_fruitless=10**9)
    return DynamicSampler(config, Epochs([{}] * 100_000, seed=None), run=RUN)


def _drawn_reward(seed: int, informative: float, prompt: int, sample: str) -> float:
    """0 or 1: of a prompt that is informative (by that probability) at even odds, of others always the same."""
    kind = random.Random(f"{seed}:kind:{prompt}").random()
    if kind >= informative:
        return float(kind < (1 + informative) / 2)
    return float(random.Random(f"{seed}:reward:{sample}").random() < 0.5)
