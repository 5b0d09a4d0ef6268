# SPDX-License-Identifier: Apache-2.0
"""Carries out what the breaker decides: puts stages on hold, asks handlers for their servers, lets trials through."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from nemo_gym_prorl.failures import Failure, FailureKind, Stage
from nemo_gym_prorl.rollout.breaker import Breaker
from nemo_gym_prorl.rollout.calls import HandlerCalls
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.stages import StageScheduler, Start


LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldUp:
    """Why rollouts do not begin: a server is out.

    Attributes:
        reason: what the first job met.
        since: seconds since the epoch.
    """

    reason: str
    since: float


class OutageWatch:
    """The servers of one pipeline that cannot be reached.

    Args:
        calls: asks handlers.
        scheduler: whose stages are put on hold.
        carry_out: what to do with jobs that may start.
        tick: called after each look at the servers, to give up what has waited too long.
        clock: monotonic seconds.
        probe_s: pause between two looks.
    """

    def __init__(
        self,
        calls: HandlerCalls,
        scheduler: StageScheduler,
        carry_out: Callable[[list[Start]], None],
        tick: Callable[[], None],
        clock: Callable[[], float],
        probe_s: float,
    ) -> None:
        self.breaker = Breaker()
        self._calls = calls
        self._scheduler = scheduler
        self._carry_out = carry_out
        self._tick = tick
        self._clock = clock
        self._probe_s = probe_s
        self._watch: asyncio.Task[None] | None = None

    @property
    def held(self) -> dict[str, HeldUp]:
        """Each server that is out."""
        ago = time.time() - self._clock()
        return {name: HeldUp(out.reason, ago + out.since) for name, out in self.breaker.outages.items()}

    @property
    def since(self) -> float | None:
        """Since when any server has been out, by the pipeline's clock; ``None`` if all are in."""
        return min((outage.since for outage in self.breaker.outages.values()), default=None)

    async def met(self, job: Job, stage: Stage, failure: Failure) -> bool:
        """A job lost its connection: ``True`` if the server is out, so that it is not the job's attempt that failed.

        A server that answers all the same has dropped this one call, and may do so again whenever it gets it.
        """
        server = failure.server
        assert server is not None, "only a connection to a server that has a name is looked at"
        probed = False
        if server not in self.breaker.outages:
            down = await self._calls.unreachable(job.handler)
            probed = down is not None
            if not (server in down if down is not None else failure.kind is not FailureKind.TRANSPORT_PEER_DROP):
                return False
        if server not in self.breaker.outages:
            LOGGER.warning("%s is out, no rollout begins until it answers: %s", server, failure.reason)
        self.breaker.failed(server, job.id, job.handler, stage, failure.reason, self._clock())
        self.breaker.outages[server].probed |= probed
        self._hold()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._until_all_answer())
        return True

    def ended(self, job: Job, stage: Stage, *, well: bool) -> None:
        """A stage's work on a job ended without losing a server."""
        self.breaker.ended(job.id, job.handler, stage, self._clock(), well=well)
        self._hold()

    async def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    def _hold(self) -> None:
        if self._scheduler.held != (held := self.breaker.held):
            self._carry_out(self._scheduler.hold(held))

    async def _until_all_answer(self) -> None:
        while outages := self.breaker.outages:
            await asyncio.sleep(self._probe_s)
            for handler in {outage.handler for outage in outages.values()}:
                down = await self._calls.unreachable(handler)
                for outage in outages.values():
                    if outage.handler == handler:
                        outage.probed = down is not None
                if down is not None:
                    back = [name for name, out in outages.items() if out.handler == handler and name not in down]
                    self.breaker.answered(back)
                    for name in back:
                        LOGGER.warning("%s answers again", name)
            self._hold()
            self._tick()
            if self.breaker.wants_trial(self._clock()):
                for start in self._scheduler.admit():
                    self.breaker.trying(start.job_id)
                    self._carry_out([start])
