# SPDX-License-Identifier: Apache-2.0
"""Which servers are out, what may not start meanwhile, and when to try one job again.

A dead server fails every rollout that meets it within milliseconds, so a queue of hours would be gone in seconds.
While one cannot be reached, no rollout of the environment begins, and none goes on into a stage in which that server
failed one. A server that hangs fails nothing and keeps everything: if its handler says twice that it does not answer,
it is out as well, for the stages that need it. There are two ways back:

- a handler that can ask its servers whether they answer (``unreachable``) is asked, and one that answers is in again;
- where it cannot, one job is let through as a trial after a pause that doubles each time: if the stage in which
  the server failed goes well for it, the server is in again.

Each environment of a service has a breaker of its own, so that the dead server of one holds up no other's rows. A
server that several share is found dead by each for itself, with its first rollout that meets it.

Pure: it owns no task and no clock. Each method takes the time; the pipeline carries out what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nemo_gym_prorl.failures import Stage


@dataclass(slots=True)
class Outage:
    """A server that cannot be reached.

    Attributes:
        since: when the first job met it.
        reason: what that job met, for people.
        stages: where jobs have met it.
        probed: its handler can tell when it answers again.
    """

    since: float
    reason: str
    stages: set[Stage] = field(default_factory=set)
    probed: bool = False


class Breaker:
    """The outages of one environment.

    Args:
        first_s: pause before the first trial.
        longest_s: longest pause between trials.
    """

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._outages: dict[str, Outage] = {}
        self._pause_s = first_s
        self._next_trial = 0.0
        self._trial: str | None = None

    @property
    def outages(self) -> Mapping[str, Outage]:
        """The servers that are out."""
        return MappingProxyType(self._outages)

    @property
    def held(self) -> frozenset[Stage]:
        """The stages in which nothing may start: INIT as long as any server is out, and where jobs have met that."""
        if not self._outages:
            return frozenset()
        return frozenset({Stage.INIT}.union(*(outage.stages for outage in self._outages.values())))

    def wants_trial(self, now: float) -> bool:
        """It is time to let one job through: none is on its way, and nobody can tell without."""
        if not self._outages or any(outage.probed for outage in self._outages.values()):
            return False
        return self._trial is None and now >= self._next_trial

    # -- events --------------------------------------------------------------------------------------------------

    def failed(self, server: str, job_id: str, stage: Stage, reason: str, now: float) -> None:
        """A job could not reach a server. If it was the trial, the next one comes after twice the pause."""
        if not self._outages:
            self._pause_s = self._first_s
            self._next_trial = now + self._pause_s
        self._outages.setdefault(server, Outage(now, reason)).stages.add(stage)
        if job_id == self._trial:
            self._trial = None
            self._pause_s = min(self._pause_s * 2, self._longest_s)
            self._next_trial = now + self._pause_s

    def silent(self, server: str, stages: Iterable[Stage], now: float) -> None:
        """A server does not answer its handler, which knows what needs it."""
        outage = self._outages.setdefault(server, Outage(now, "it does not answer"))
        outage.stages |= {*stages}
        outage.probed = True

    def trying(self, job_id: str) -> None:
        """That job is let through."""
        self._trial = job_id

    def ended(self, job_id: str, stage: Stage, now: float, *, well: bool) -> None:
        """A stage's work on a job ended without such a failure. Only the trial says anything about a server, and only
        if the work went well and was of the kind that failed before."""
        if job_id != self._trial:
            return
        self._trial = None
        if well:
            self.answered([name for name, out in self._outages.items() if stage in out.stages])
        else:
            self._next_trial = now + self._pause_s

    def answered(self, servers: Iterable[str]) -> None:
        """These servers can be reached again."""
        for server in servers:
            self._outages.pop(server, None)
        if not self._outages:
            self._trial = None
