# SPDX-License-Identifier: Apache-2.0
"""Servers that cannot be reached: whoever would meet one waits for it, and no attempt is spent.

A dead server fails every rollout that meets it within milliseconds, so a queue of hours would be gone in seconds.
While one cannot be reached, no rollout of the environment begins, and none goes on into a stage in which that server
failed one. A server that hangs fails nothing and keeps everything: if its handler says twice that it does not answer,
it is out as well, for the stages that need it. There are two ways back:

- a handler that can ask its servers whether they answer (``unreachable``) is asked, and one that answers is in again;
- where it cannot, one job is let through as a trial, now and then and ever more rarely: if the stage in which the
  server failed goes well for it, the server is in again.

Each environment of a service is held up by its own servers only. A server that several share is found dead by each for
itself, with its first rollout that meets it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nemo_gym_prorl.failures import Failure, FailureKind, Stage
from nemo_gym_prorl.rollout.calls import HandlerCalls
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.scheduler import StageScheduler, Start


LOGGER = logging.getLogger(__name__)

LOOK_S = 5.0
"""Pause between two questions whether all servers answer, while a stage works."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Pause before the first trial, and the longest between two."""


@dataclass(slots=True)
class Outage:
    """A server that is out.

    Attributes:
        since: by the pipeline's clock.
        reason: what the first job met.
        stages: in which nothing may start for its sake.
    """

    since: float
    reason: str
    stages: set[Stage] = field(default_factory=set)


@dataclass(slots=True)
class Outages:
    """Those of one environment. Pure: it has no clock, and what follows is carried out elsewhere.

    Attributes:
        servers: that are out.
        trial: the job that was let through, while it is on its way.
    """

    servers: dict[str, Outage] = field(default_factory=dict)
    trial: str | None = None
    _next_trial: float = 0.0

    @property
    def since(self) -> float | None:
        """Since when any server has been out; ``None`` if all are in."""
        return min((out.since for out in self.servers.values()), default=None)

    @property
    def held(self) -> frozenset[Stage]:
        """The stages in which nothing may start: INIT as long as any server is out, and where jobs have met that."""
        return frozenset({Stage.INIT}.union(*(out.stages for out in self.servers.values())) if self.servers else ())

    def wants_trial(self, now: float) -> bool:
        """It is time to let one job through, and none is on its way."""
        return bool(self.servers) and self.trial is None and now >= self._next_trial

    def out(self, server: str, stages: Iterable[Stage], reason: str, now: float, job_id: str | None = None) -> None:
        """A server cannot be reached, since a job has met it or its handler says so. If that job was the trial, the
        next one comes after as long a pause as the outage has lasted."""
        first = not self.servers
        self.servers.setdefault(server, Outage(now, reason)).stages.update(stages)
        if first or (job_id is not None and job_id == self.trial):
            self._pause(now)

    def ended(self, job_id: str, stage: Stage, now: float, *, well: bool) -> None:
        """A stage's work on a job ended without such a failure. Only the trial says anything about a server, and only
        if the work went well and was of the kind that failed before."""
        if job_id != self.trial:
            return
        self.trial = None
        if well:
            self.answered([name for name, out in self.servers.items() if stage in out.stages])
        else:
            self._pause(now)

    def answered(self, servers: Iterable[str]) -> None:
        """These servers can be reached again."""
        for server in servers:
            self.servers.pop(server, None)
        if not self.servers:
            self.trial = None

    def _pause(self, now: float) -> None:
        assert self.since is not None, "there is something to try out"
        self.trial, self._next_trial = None, now + min(max(now - self.since, FIRST_S), LONGEST_S)


@dataclass(frozen=True, slots=True)
class HeldUp:
    """Why rollouts do not begin: a server is out.

    Attributes:
        reason: what the first job met.
        since: seconds since the epoch.
        environments: those whose rollouts do not begin.
    """

    reason: str
    since: float
    environments: tuple[str, ...]


class OutageWatch:
    """Puts stages on hold, asks handlers for their servers, lets trials through, for one pipeline.

    Args:
        calls: asks handlers.
        scheduler: whose stages are put on hold.
        carry_out: what to do with jobs that may start.
        tick: called with an environment after each look at its servers, to give up what has waited too long.
        clock: monotonic seconds.
        probe_s: pause between two looks, while a server is out.
    """

    def __init__(
        self,
        calls: HandlerCalls,
        scheduler: StageScheduler,
        carry_out: Callable[[list[Start]], None],
        tick: Callable[[str], None],
        clock: Callable[[], float],
        probe_s: float,
    ) -> None:
        self._calls, self._scheduler, self._carry_out = calls, scheduler, carry_out
        self._tick, self._clock, self._probe_s = tick, clock, probe_s
        self._outages: defaultdict[str, Outages] = defaultdict(Outages)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._out_since: dict[str, float] = {}
        self._was_out_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of outages that are over, by environment."""

    @property
    def held(self) -> dict[str, HeldUp]:
        """Each server that is out for some environment."""
        ago = time.time() - self._clock()
        found: dict[str, HeldUp] = {}
        for environment, outages in self._outages.items():
            for server, out in outages.servers.items():
                known = found.get(server, HeldUp(out.reason, ago + out.since, ()))
                first = min(known.since, ago + out.since)
                found[server] = HeldUp(known.reason, first, (*known.environments, environment))
        return found

    def since(self, environment: str) -> float | None:
        """Since when any server of an environment has been out, by the pipeline's clock; ``None`` if all are in."""
        return self._outages[environment].since

    def reason(self, environment: str) -> tuple[str, str]:
        """A server of the environment that is out, and what the first job met."""
        server, out = next(iter(self._outages[environment].servers.items()))
        return server, out.reason

    def out_s(self, environment: str) -> float:
        """For how many seconds so far rollouts of the environment have been held up."""
        now = self._clock()
        return self._was_out_s[environment] + now - self._out_since.get(environment, now)

    def look_at(self, environment: str) -> None:
        """A stage works on a job of an environment, or a server of it is out: its servers are asked now and then."""
        watch = self._watches.get(environment)
        if watch is None or watch.done():
            self._watches[environment] = asyncio.create_task(self._watch(environment))

    async def met(self, job: Job, stage: Stage, failure: Failure) -> bool:
        """A job lost its connection: ``True`` if the server is out, so that it is not the job's attempt that failed.

        A server that answers all the same has dropped this one call, and may do so again whenever it gets it.
        """
        server, environment = failure.server, job.environment
        assert server is not None, "only a connection to a server that has a name is looked at"
        if server not in self._outages[environment].servers:
            down = await self._calls.unreachable(environment)
            if not (server in down if down is not None else failure.kind is not FailureKind.TRANSPORT_PEER_DROP):
                return False
        self._is_out(environment, server, {stage}, failure.reason, job.id)
        return True

    def ended(self, job: Job, stage: Stage, *, well: bool) -> None:
        """A stage's work on a job ended without losing a server."""
        self._outages[job.environment].ended(job.id, stage, self._clock(), well=well)
        self._hold(job.environment)

    async def close(self) -> None:
        """Look no more."""
        for task in self._watches.values():
            task.cancel()
        if self._watches:
            await asyncio.wait(self._watches.values())

    def _is_out(
        self, environment: str, server: str, stages: Iterable[Stage], reason: str, job_id: str | None = None
    ) -> None:
        outages = self._outages[environment]
        if server not in outages.servers:
            LOGGER.warning("%s is out, no rollout of %s begins until it answers: %s", server, environment, reason)
        outages.out(server, stages, reason, self._clock(), job_id)
        self._hold(environment)

    def _hold(self, environment: str) -> None:
        held, now = self._outages[environment].held, self._clock()
        if held:
            self._out_since.setdefault(environment, now)
            self.look_at(environment)
        else:
            self._was_out_s[environment] += now - self._out_since.pop(environment, now)
        if self._scheduler.held(environment) != held:
            self._carry_out(self._scheduler.hold(environment, held))

    async def _watch(self, environment: str) -> None:
        """Ask as long as a stage works or a server is out. One that keeps silent may be busy: twice counts."""
        outages, silent = self._outages[environment], frozenset[str]()
        while outages.servers or self._scheduler.works_on(environment):
            await asyncio.sleep(self._probe_s if outages.servers or silent else LOOK_S)
            down = await self._calls.unreachable(environment)
            if down is None and not outages.servers:
                return  # nobody can tell
            if down is not None:
                back = outages.servers.keys() - down.keys()
                for server in back:
                    LOGGER.warning("%s answers again", server)
                outages.answered(back)
                for server in silent & (down.keys() - outages.servers.keys()):
                    self._is_out(environment, server, down[server], "it does not answer")
                silent = frozenset(down.keys() - outages.servers.keys())
            self._hold(environment)
            self._tick(environment)
            if down is None and outages.wants_trial(self._clock()):
                for start in self._scheduler.admit(environment):
                    outages.trial = start.job_id
                    self._carry_out([start])
