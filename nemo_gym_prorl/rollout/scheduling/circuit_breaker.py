# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker per environment server.

- Failing to reach a dead server does not use up an attempt. A dead server fails each rollout within milliseconds, and
  would otherwise fail a queue of hours in seconds.
- While a server is down, no rollout of its environment starts, and none enters a stage in which that server failed a
  rollout.
- The breaker probes the servers through the handler (``unreachable``). A server that answers is up again. A server
  that does not answer two probes in a row is down, for the stages that need it.
- If the handler cannot probe, only the job that lost its connection waits, with growing delays.

Each environment is held up by its own servers only. Environments that share a server detect its outage independently.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial

from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.failures import Failure, FailureKind, Stage
from nemo_gym_prorl.rollout.handler_calls import HandlerCalls
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.scheduling.scheduler import StageScheduler, Start


LOGGER = logging.getLogger(__name__)

PROBE_INTERVAL_S = 5.0
"""Seconds between two probes while jobs of the environment are in a stage and all its servers answer."""


@dataclass(slots=True)
class Outage:
    """A server that is down for an environment.

    Attributes:
        server: name of the server.
        environment: environment whose rollouts do not start during the outage.
        reason: failure of the first job that lost its connection, or that the server answers no probe.
        since: start in monotonic seconds, by the pipeline's clock.
        at: start in seconds since the epoch.
        stages: stages on hold because of the server.
    """

    server: str
    environment: str
    reason: str
    since: float
    at: float = field(default_factory=time.time)
    stages: frozenset[Stage] = frozenset({Stage.INIT})


class CircuitBreaker:
    """Circuit breaker of one pipeline: holds stages while their servers are down.

    Args:
        execute: starts the jobs that the scheduler releases.
        on_probe: called with an environment after each probe, to fail jobs that have waited too long.
        probe_s: seconds between two probes while a server is down.
    """

    def __init__(
        self,
        calls: HandlerCalls,
        scheduler: StageScheduler,
        execute: Callable[[list[Start]], None],
        on_probe: Callable[[str], None],
        clock: Callable[[], float],
        probe_s: float,
        loops: BackgroundLoops,
    ) -> None:
        self._calls, self._scheduler, self._execute = calls, scheduler, execute
        self._on_probe, self._clock, self._probe_s, self._loops = on_probe, clock, probe_s, loops
        self._out: defaultdict[str, dict[str, Outage]] = defaultdict(dict)
        """Outages by environment and server, in order of their start."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._unanswered: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        """Per environment, servers that did not answer the last probe and are not down yet."""
        self._total_outage_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of outages per environment; during an outage, minus the clock's value at its start."""

    @property
    def all(self) -> list[Outage]:
        return [outage for servers in self._out.values() for outage in servers.values()]

    def first(self, environment: str) -> Outage | None:
        """Return the outage of an environment that began first; ``None`` if all its servers are up."""
        return next(iter(self._out[environment].values()), None)

    def outage_s(self, environment: str) -> float:
        """Return the total seconds in which a server of an environment was down."""
        return self._total_outage_s[environment] + (self._clock() if self._out[environment] else 0.0)

    def watch(self, environment: str) -> None:
        """Start to probe the servers of an environment, until no job is in a stage and no server is down."""
        watch = self._watches.get(environment)
        if watch is None or watch.done():
            self._unanswered.pop(environment, None)
            watch = self._loops.start(
                "outage-watch", partial(self._probe, environment), delay_s=self._pause(environment)
            )
            self._watches[environment] = watch

    async def record_lost_connection(self, job: Job, stage: Stage, failure: Failure) -> bool:
        """Handle a job's lost connection; return ``True`` if the server is down, so that the attempt does not count.

        A server that answers the probe dropped only this call. The attempt then counts, because the row itself may
        crash the server. If the handler cannot probe, a server that cannot be connected to counts as down.
        """
        server, environment = failure.server, job.environment
        assert server is not None, "callers check connection_lost"
        if server not in self._out[environment]:
            down = await self._calls.unreachable(environment)
            if down is None:
                return failure.kind is not FailureKind.TRANSPORT_PEER_DROP
            if server not in down:
                return False
        self._mark_down(environment, server, {stage}, failure.reason)
        return True

    async def close(self) -> None:
        watches = [*self._watches.values()]
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def _mark_down(self, environment: str, server: str, stages: Set[Stage], reason: str) -> None:
        servers = self._out[environment]
        if not servers:
            self._total_outage_s[environment] -= self._clock()
        if server not in servers:
            LOGGER.warning("%s is down; no rollout of %s starts until it answers: %s", server, environment, reason)
            servers[server] = Outage(server, environment, reason, self._clock())
        servers[server].stages |= stages
        self._hold(environment)
        self.watch(environment)

    def _mark_up(self, environment: str, server: str) -> None:
        LOGGER.warning("%s answers again", server)
        del self._out[environment][server]
        if not self._out[environment]:
            self._total_outage_s[environment] += self._clock()
        self._hold(environment)

    def _hold(self, environment: str) -> None:
        """Put INIT and the stages that lost a server on hold for the environment; release all others."""
        held = frozenset[Stage]().union(*(outage.stages for outage in self._out[environment].values()))
        if self._scheduler.held(environment) != held:
            self._execute(self._scheduler.hold(environment, held))

    async def _probe(self, environment: str) -> float | None:
        """Probe the environment's servers once; return the seconds until the next probe. ``None`` ends probing: no
        server is down, and no job of the environment is in a stage or the handler cannot probe."""
        servers = self._out[environment]
        down = await self._calls.unreachable(environment)
        if down is None and not servers:
            return None  # the handler cannot probe
        if down is not None:
            for server in servers.keys() - down.keys():
                self._mark_up(environment, server)
            for server in self._unanswered[environment] & (down.keys() - servers.keys()):
                self._mark_down(environment, server, down[server], "it does not answer")
            self._unanswered[environment] = frozenset(down.keys() - servers.keys())
        self._on_probe(environment)
        return self._pause(environment) if servers or self._scheduler.works_on(environment) else None

    def _pause(self, environment: str) -> float:
        return self._probe_s if self._out[environment] or self._unanswered[environment] else PROBE_INTERVAL_S
