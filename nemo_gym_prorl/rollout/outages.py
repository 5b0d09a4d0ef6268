# SPDX-License-Identifier: Apache-2.0
"""Carries out what the breakers decide: puts stages on hold, asks handlers for their servers, lets trials through."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from nemo_gym_prorl.failures import Failure, FailureKind, Stage
from nemo_gym_prorl.rollout.breaker import Breaker
from nemo_gym_prorl.rollout.calls import HandlerCalls
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.scheduler import StageScheduler, Start


LOGGER = logging.getLogger(__name__)

LOOK_S = 5.0
"""Pause between two questions whether all servers answer, while a stage works."""


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
    """The servers of one pipeline that cannot be reached.

    Args:
        calls: asks handlers.
        scheduler: whose stages are put on hold.
        carry_out: what to do with jobs that may start.
        tick: called with an environment after each look at its servers, to give up what has waited too long.
        clock: monotonic seconds.
        probe_s: pause between two looks.
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
        self._breakers: dict[str, Breaker] = {}
        self._calls = calls
        self._scheduler = scheduler
        self._carry_out = carry_out
        self._tick = tick
        self._clock = clock
        self._probe_s = probe_s
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._out_since: dict[str, float] = {}
        self._was_out_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of outages that are over, by environment."""

    @property
    def held(self) -> dict[str, HeldUp]:
        """Each server that is out for some environment."""
        ago = time.time() - self._clock()
        found: dict[str, HeldUp] = {}
        for environment, breaker in self._breakers.items():
            for server, outage in breaker.outages.items():
                since, known = ago + outage.since, found.get(server)
                if known is None:
                    found[server] = HeldUp(outage.reason, since, (environment,))
                else:
                    first = min(known.since, since)
                    found[server] = HeldUp(known.reason, first, (*known.environments, environment))
        return found

    def since(self, environment: str) -> float | None:
        """Since when any server of an environment has been out, by the pipeline's clock; ``None`` if all are in."""
        return min((outage.since for outage in self._of(environment).outages.values()), default=None)

    def reason(self, environment: str) -> tuple[str, str]:
        """A server of the environment that is out, and what the first job met."""
        server, outage = next(iter(self._of(environment).outages.items()))
        return server, outage.reason

    def out_s(self, environment: str) -> float:
        """For how many seconds so far rollouts of the environment have been held up."""
        now = self._clock()
        return self._was_out_s[environment] + now - self._out_since.get(environment, now)

    def look_at(self, environment: str) -> None:
        """A stage begins to work on a job of an environment: a server that hangs is to be noticed."""
        look = self._looks.get(environment)
        if look is None or look.done():
            self._looks[environment] = asyncio.create_task(self._while_it_works(environment))

    async def met(self, job: Job, stage: Stage, failure: Failure) -> bool:
        """A job lost its connection: ``True`` if the server is out, so that it is not the job's attempt that failed.

        A server that answers all the same has dropped this one call, and may do so again whenever it gets it.
        """
        server, environment = failure.server, job.environment
        assert server is not None, "only a connection to a server that has a name is looked at"
        breaker = self._of(environment)
        probed = False
        if server not in breaker.outages:
            down = await self._calls.unreachable(environment)
            probed = down is not None
            if not (server in down if down is not None else failure.kind is not FailureKind.TRANSPORT_PEER_DROP):
                return False
        if server not in breaker.outages:
            LOGGER.warning(
                "%s is out, no rollout of %s begins until it answers: %s", server, environment, failure.reason
            )
        breaker.failed(server, job.id, stage, failure.reason, self._clock())
        breaker.outages[server].probed |= probed
        self._hold(environment)
        return True

    def ended(self, job: Job, stage: Stage, *, well: bool) -> None:
        """A stage's work on a job ended without losing a server."""
        if job.environment in self._breakers:
            self._breakers[job.environment].ended(job.id, stage, self._clock(), well=well)
            self._hold(job.environment)

    async def close(self) -> None:
        """Look no more."""
        tasks = {*self._watches.values(), *self._looks.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _of(self, environment: str) -> Breaker:
        return self._breakers.setdefault(environment, Breaker())

    def _hold(self, environment: str) -> None:
        held, now = self._of(environment).held, self._clock()
        if held:
            self._out_since.setdefault(environment, now)
        else:
            self._was_out_s[environment] += now - self._out_since.pop(environment, now)
        if self._scheduler.held(environment) != held:
            self._carry_out(self._scheduler.hold(environment, held))
        watch = self._watches.get(environment)
        if held and (watch is None or watch.done()):
            self._watches[environment] = asyncio.create_task(self._until_all_answer(environment))

    async def _while_it_works(self, environment: str) -> None:
        """Look for servers that keep silent, twice before it counts: they may be busy."""
        breaker, before = self._of(environment), frozenset[str]()
        while self._scheduler.works_on(environment):
            await asyncio.sleep(self._probe_s if before else LOOK_S)
            down = await self._calls.unreachable(environment)
            if down is None:
                return
            for server in before & (down.keys() - breaker.outages.keys()):
                LOGGER.warning("%s does not answer, no rollout of %s begins until it does", server, environment)
                breaker.silent(server, down[server], self._clock())
                self._hold(environment)
            before = frozenset(down.keys() - breaker.outages.keys())

    async def _until_all_answer(self, environment: str) -> None:
        breaker = self._of(environment)
        while breaker.outages:
            await asyncio.sleep(self._probe_s)
            down = await self._calls.unreachable(environment)
            for outage in breaker.outages.values():
                outage.probed = down is not None
            if down is not None:
                back = [name for name in breaker.outages if name not in down]
                breaker.answered(back)
                for name in back:
                    LOGGER.warning("%s answers again", name)
            self._hold(environment)
            self._tick(environment)
            if breaker.wants_trial(self._clock()):
                for start in self._scheduler.admit(environment):
                    breaker.trying(start.job_id)
                    self._carry_out([start])
