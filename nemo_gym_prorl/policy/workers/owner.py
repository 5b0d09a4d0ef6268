# SPDX-License-Identifier: Apache-2.0
"""The one pool that all workers ask: turns come in as messages, and what the pool decides goes back as messages.

A worker names its tickets itself; here a ticket is ``its number * workers + worker``, so both can be told from it.
Each assignment has a number, which the worker says when the request is over: what is said of an assignment that was
taken back meanwhile (its backend was removed) counts as a withdrawal. What a worker must know of the backends goes
ahead of the decisions that need it, in the same message.

Invariant: when a worker dies, all that its rollouts held is free again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.backends import Backends
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.metrics import SharedMetrics
from nemo_gym_prorl.policy.pool.backend import Abort, Assign, Decision, GiveUp, RequestOutcome
from nemo_gym_prorl.policy.pool.dispatcher import Dispatcher
from nemo_gym_prorl.policy.workers.channel import Channel


_METRICS_S = 2.0
"""How long a worker may take to tell its metrics; what it told last counts after that."""


@dataclass(slots=True)
class _Worker:
    channel: Channel
    open: dict[int, str] = field(default_factory=dict)
    """The rollouts of its tickets that wait or run."""
    rollouts: set[str] = field(default_factory=set)
    assigned: dict[int, int] = field(default_factory=dict)
    """Numbers of the assignments that hold."""
    asked: set[asyncio.Task[None]] = field(default_factory=set)
    told: asyncio.Event = field(default_factory=asyncio.Event)


class _Shared(Dispatcher):
    """Requests run in the workers; what concerns a ticket is told to the one that has it."""

    tell: Callable[[list[Decision]], None]

    def apply(self, decisions: list[Decision]) -> None:
        """Carry out what the pool decided."""
        super().apply([decision for decision in decisions if not isinstance(decision, Assign | Abort | GiveUp)])
        self.tell([decision for decision in decisions if isinstance(decision, Assign | Abort | GiveUp)])


class Owner(Backends):
    """The backends of a server with several workers.

    Args:
        config: see there.
        workers: how many there are.
    """

    def __init__(self, config: PolicyConfig, workers: int) -> None:
        super().__init__(config)
        self.on_change = self._publish
        self._count = workers
        self._workers: dict[int, _Worker] = {}
        self._numbers = itertools.count()
        self._published: Any = None
        self._sums = SharedMetrics(self.pool)
        self.memory: Callable[[], dict[str, int]] = dict
        self.restarts = 0

    def _dispatcher(self, engine: HttpEngine) -> Dispatcher:
        dispatcher = _Shared(self.pool, engine)
        dispatcher.tell = self._tell
        return dispatcher

    def joined(self, index: int, channel: Channel) -> None:
        """A worker has started."""
        self._workers[index] = _Worker(channel)
        channel.send({"view": self._view()})

    def left(self, index: int) -> None:
        """A worker is gone: its turns are withdrawn, and its rollouts live nowhere."""
        worker = self._workers.pop(index, None)
        if worker is None:
            return
        self._sums.gone(index)
        for task in worker.asked:
            task.cancel()
        for rollout in sorted(worker.rollouts):
            self.apply(self.pool.drop(rollout, time.monotonic()))

    def said(self, index: int, message: Any) -> None:
        """A message of a worker."""
        worker, now = self._workers.get(index), time.monotonic()
        if worker is None:
            return  # its last words
        match message:
            case ["request", own, rollout, group, tokens, blocks, run]:
                ticket = own * self._count + index
                worker.open[ticket] = rollout
                worker.rollouts.add(rollout)
                self.apply(self.pool.request(ticket, rollout, group, now, tokens, bytes.fromhex(blocks), run))
            case ["done", own, outcome, number]:
                self._done(worker, own * self._count + index, RequestOutcome(outcome), number, now)
            case ["withdraw", own]:
                ticket = own * self._count + index
                self._closed(worker, ticket)
                self.apply(self.pool.withdraw(ticket, now))
            case ["finish", rollout]:
                self.apply(self.pool.finish(rollout))
            case ["drop", rollout]:
                worker.rollouts.discard(rollout)
                for ticket in [ticket for ticket, whose in worker.open.items() if whose == rollout]:
                    self._closed(worker, ticket)
                self.apply(self.pool.drop(rollout, now))
            case ["metrics", families]:
                self._sums.told(index, families)
                worker.told.set()
            case ["ask", number, what, arguments]:
                task = asyncio.ensure_future(self._answer(worker, number, what, arguments))
                worker.asked.add(task)
                task.add_done_callback(worker.asked.discard)

    def _done(self, worker: _Worker, ticket: int, outcome: RequestOutcome, number: int, now: float) -> None:
        if ticket not in worker.open:
            return  # its rollout was dropped
        if worker.assigned.get(ticket) != number:
            # Its backend was removed, and it was queued again. Another one is only wanted if this one failed.
            if outcome is RequestOutcome.FAILED:
                return
            self._closed(worker, ticket)
            self.apply(self.pool.withdraw(ticket, now))
            return
        if outcome is RequestOutcome.FAILED:
            del worker.assigned[ticket]
        else:
            self._closed(worker, ticket)
        self.apply(self.pool.done(ticket, outcome, now))

    @staticmethod
    def _closed(worker: _Worker, ticket: int) -> None:
        worker.open.pop(ticket, None)
        worker.assigned.pop(ticket, None)

    # What workers are told

    def _view(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "trouble": self.trouble,
            "keys": self.by_origin,
            "backends": [[b.id, b.url, b.weight_version, b.health, b.run] for b in self.pool.backends.values()],
        }

    def _publish(self) -> None:
        self._tell([])

    def _tell(self, decisions: list[Decision]) -> None:
        mine: dict[int, list[Any]] = {}
        for decision in decisions:
            match decision:
                case Assign(ticket=ticket, backend=backend, weight_version=version):
                    number = next(self._numbers)
                    if (worker := self._workers.get(ticket % self._count)) is not None:
                        worker.assigned[ticket] = number
                    said = ["assign", ticket // self._count, backend, version, number]
                case Abort(ticket=ticket, backend=backend):
                    if (worker := self._workers.get(ticket % self._count)) is not None:
                        worker.assigned.pop(ticket, None)
                    said = ["abort", ticket // self._count, backend]
                case GiveUp(ticket=ticket, reason=reason):
                    said = ["give_up", ticket // self._count, reason]
                case _:
                    continue
            mine.setdefault(ticket % self._count, []).append(said)
        view = self._view()
        changed = view != self._published
        if changed:
            # What is compared must not change with what it is compared to.
            self._published = {**view, "keys": dict(self.by_origin)}
        for index, worker in self._workers.items():
            if changed or index in mine:
                news = {"view": view} if changed else {}
                worker.channel.send({**news, "decisions": mine.get(index, [])})

    # What workers ask on behalf of their callers

    async def _answer(self, worker: _Worker, number: int, what: str, arguments: dict[str, Any]) -> None:
        asked: dict[str, Callable[..., Awaitable[Any]]] = {
            "add": self.add,
            "listing": self.listing,
            "remove": self.remove,
            "clear": self.clear,
            "pause": self.pause,
            "resume": self.resume,
            "label": self.label,
            "metrics": self._metrics,
        }
        try:
            worker.channel.send({"answer": number, "result": await asked[what](**arguments)})
        except CallerError as error:
            said = {"status": error.http_status, "problem": error.problem}
            worker.channel.send(
                {"answer": number, "refused": said | {"reason": error.complaint, "field": error.field}}
            )

    async def _metrics(self) -> str:
        workers = list(self._workers.values())
        for worker in workers:
            worker.told.clear()
            worker.channel.send({"metrics": True})
        asked = [asyncio.ensure_future(worker.told.wait()) for worker in workers]
        if asked:
            _, late = await asyncio.wait(asked, timeout=_METRICS_S)
            for waiting in late:
                waiting.cancel()
        return self._sums.exposition(self.memory(), self.restarts).decode()
