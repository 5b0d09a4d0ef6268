# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that cannot be reached: whoever would meet one waits for it, and no attempt is spent.

A dead server fails every rollout that meets it within milliseconds, so a queue of hours would be gone in seconds.
While one cannot be reached, no rollout of the environment begins, and none goes on into a stage in which that server
failed one. A server that hangs fails nothing and keeps everything: if its handler says twice that it does not answer,
it is out as well, for the stages that need it. The handler is asked (``unreachable``), and a server that answers is in
again. Where a handler cannot tell, only the job that met the server waits, and comes again ever more rarely.

Each environment of a service is held up by its own servers only. A server that several share is found dead by each for
itself, with its first rollout that meets it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial

from nemo_gym_prorl.background import BackgroundLoops
from nemo_gym_prorl.failures import Failure, FailureKind, Stage
from nemo_gym_prorl.rollout.handler_calls import HandlerCalls
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.scheduler import StageScheduler, Start


LOGGER = logging.getLogger(__name__)

LOOK_S = 5.0
"""Pause between two questions whether all servers answer, while a stage works."""


@dataclass(slots=True)
class Outage:
    """A server that is out for an environment.

    Attributes:
        server: its name.
        environment: whose rollouts do not begin meanwhile.
        reason: what the first job met.
        since: by the pipeline's clock.
        at: the same, in seconds since the epoch.
        stages: in which nothing may start for its sake.
    """

    server: str
    environment: str
    reason: str
    since: float
    at: float = field(default_factory=time.time)
    stages: frozenset[Stage] = frozenset({Stage.INIT})


class CircuitBreaker:
    """Puts stages on hold, and asks handlers for their servers, for one pipeline.

    Args:
        calls: asks handlers.
        scheduler: whose stages are put on hold.
        carry_out: what to do with jobs that may start.
        tick: called with an environment after each look at its servers, to give up what has waited too long.
        clock: monotonic seconds.
        probe_s: pause between two looks, while a server is out.
        loops: supervises the looks.
    """

    def __init__(
        self,
        calls: HandlerCalls,
        scheduler: StageScheduler,
        carry_out: Callable[[list[Start]], None],
        tick: Callable[[str], None],
        clock: Callable[[], float],
        probe_s: float,
        loops: BackgroundLoops,
    ) -> None:
        self._calls, self._scheduler, self._carry_out = calls, scheduler, carry_out
        self._tick, self._clock, self._probe_s, self._loops = tick, clock, probe_s, loops
        self._out: defaultdict[str, dict[str, Outage]] = defaultdict(dict)
        """By environment and name of the server, the first one first."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._silent: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        """By environment, servers that did not answer the last look and are not out yet."""
        self._was_out_s: defaultdict[str, float] = defaultdict(float)
        """Seconds by environment; since one began that goes on, less the time of its beginning."""

    @property
    def all(self) -> list[Outage]:
        """Those that there are now."""
        return [outage for servers in self._out.values() for outage in servers.values()]

    def first(self, environment: str) -> Outage | None:
        """The one of an environment that has lasted the longest."""
        return next(iter(self._out[environment].values()), None)

    def out_s(self, environment: str) -> float:
        """For how many seconds so far rollouts of the environment have been held up."""
        return self._was_out_s[environment] + (self._clock() if self._out[environment] else 0.0)

    def look_at(self, environment: str) -> None:
        """A stage works on a job of an environment, or a server of it is out: its servers are asked now and then."""
        watch = self._watches.get(environment)
        if watch is None or watch.done():
            self._silent.pop(environment, None)
            watch = self._loops.start(
                "outage-watch", partial(self._look, environment), delay_s=self._pause(environment)
            )
            self._watches[environment] = watch

    async def met(self, job: Job, stage: Stage, failure: Failure) -> bool:
        """A job lost its connection: ``True`` if the server is out, so that it is not the job's attempt that failed.

        A server that answers all the same has dropped this one call, and may do so again whenever it gets it. Where
        nobody can tell, one that takes no connection is out.
        """
        server, environment = failure.server, job.environment
        assert server is not None, "only a connection to a server that has a name is looked at"
        if server not in self._out[environment]:
            down = await self._calls.unreachable(environment)
            if down is None:
                return failure.kind is not FailureKind.TRANSPORT_PEER_DROP
            if server not in down:
                return False
        self._is_out(environment, server, {stage}, failure.reason)
        return True

    async def close(self) -> None:
        """Look no more."""
        watches = [*self._watches.values()]
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def _is_out(self, environment: str, server: str, stages: Set[Stage], reason: str) -> None:
        servers = self._out[environment]
        if not servers:
            self._was_out_s[environment] -= self._clock()
        if server not in servers:
            LOGGER.warning("%s is out, no rollout of %s begins until it answers: %s", server, environment, reason)
            servers[server] = Outage(server, environment, reason, self._clock())
        servers[server].stages |= stages
        self._hold(environment)
        self.look_at(environment)

    def _is_back(self, environment: str, server: str) -> None:
        LOGGER.warning("%s answers again", server)
        del self._out[environment][server]
        if not self._out[environment]:
            self._was_out_s[environment] += self._clock()
        self._hold(environment)

    def _hold(self, environment: str) -> None:
        """Have nothing start in INIT as long as any server is out, nor in stages in which jobs have met that."""
        held = frozenset[Stage]().union(*(outage.stages for outage in self._out[environment].values()))
        if self._scheduler.held(environment) != held:
            self._carry_out(self._scheduler.hold(environment, held))

    async def _look(self, environment: str) -> float | None:
        """Ask the servers of an environment; returns the pause, or ``None`` if no stage works and no server is out.

        A server that does not answer may be busy, so two silent looks in a row take it out.
        """
        servers = self._out[environment]
        down = await self._calls.unreachable(environment)
        if down is None and not servers:
            return None  # the handler cannot tell
        if down is not None:
            for server in servers.keys() - down.keys():
                self._is_back(environment, server)
            for server in self._silent[environment] & (down.keys() - servers.keys()):
                self._is_out(environment, server, down[server], "it does not answer")
            self._silent[environment] = frozenset(down.keys() - servers.keys())
        self._tick(environment)
        return self._pause(environment) if servers or self._scheduler.works_on(environment) else None

    def _pause(self, environment: str) -> float:
        return self._probe_s if self._out[environment] or self._silent[environment] else LOOK_S
