# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rim of :mod:`.pool`: clock, tasks and probes around the pure pool.

A request runs under a *ticket*. The pool says where; a backend that fails gives the ticket back, and the same request
is sent elsewhere. The task that awaits :meth:`Dispatcher.run` may be cancelled at any time: that closes the request's
connection, which aborts the request at the engine, and the slot is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.background import BackgroundLoops, is_cancelled, log_exceptions, spawn_task
from nemo_gym_prorl.policy.engines.engine import BackendErred, BackendFailed, Misconfigured, RequestRefused
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.pool.backend import Abort, Assign, Backend, Decision, GiveUp, Health, Probe
from nemo_gym_prorl.policy.pool.pool import BackendPool


class Wait:
    """Seconds in which at least one turn of a rollout waited for a backend, or through a pause."""

    def __init__(self) -> None:
        self._turns = 0
        self._since = self._over_s = 0.0

    @contextlib.contextmanager
    def of_a_turn(self) -> Iterator[None]:
        """A turn of the rollout waits while this is entered."""
        if not self._turns:
            self._since = time.monotonic()
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self._over_s += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._over_s + (time.monotonic() - self._since if self._turns else 0.0)


_log = logging.getLogger(__name__)

_FAILOVERS = 8
"""How often one turn is sent to another backend before it fails."""


@dataclass(slots=True)
class _Lease:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    assign: Assign | None = None
    given_up: str | None = None
    task: asyncio.Task[object] | None = None
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Placed[T]:
    """A request's result, where it ran, and with which weights it began and ended."""

    result: T
    backend: str
    weight_version: str | None
    last_version: str | None
    queued_s: float


@dataclass(slots=True)
class Dispatcher:
    """Runs requests on the backends of a pool.

    Args:
        pool: the decisions; only this object may send it events.
        engine: answers probes and load reports.
        tick_s: interval of probes and idle checks.
        report_s: interval of load reports; 0 for none.
        loops: supervises the ticking and the load reports.
    """

    pool: BackendPool
    engine: HttpEngine
    tick_s: float = 0.5
    report_s: float = 2.0
    loops: BackgroundLoops = field(default_factory=BackgroundLoops)
    _leases: dict[int, _Lease] = field(default_factory=dict)
    _tickets: itertools.count[int] = field(default_factory=itertools.count)
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        """Start the background work; needs a running event loop."""
        self.loops.start("backend-tick", self._tick, delay_s=self.tick_s)
        if self.report_s:
            self.loops.start("backend-reports", self._report)

    async def aclose(self) -> None:
        """Stop the background work. Requests belong to their callers."""
        await self.loops.aclose()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def run[T](
        self,
        rollout: str,
        group: str | None,
        call: Callable[[Backend], Awaitable[T]],
        tokens: int = 0,
        blocks: bytes = b"",
        run: str | None = None,
        wait: Wait | None = None,
    ) -> Placed[T]:
        """Run one request where the pool says.

        Args:
            rollout: whose turn it is.
            group: the same for all rollouts of one prompt, if that is known.
            call: sends the request to a backend.
            tokens: length of its prompt, if that is known.
            blocks: of that prompt (:func:`.prefixes.blocks_of`); only a rollout's first are read.
            run: whose backends may carry it out.
            wait: where it is booked how long it waits.

        Raises:
            BackendFailed: no backend did it after so many were tried, or there was none for too long.
            RequestRefused: every backend would choke on it.
        """
        ticket = next(self._tickets)
        lease = self._leases[ticket] = _Lease()
        wait, queued_s, failovers = wait or Wait(), 0.0, 0
        over = False
        try:
            self.apply(self.pool.request(ticket, rollout, group, time.monotonic(), tokens, blocks, run))
            while True:
                asked = time.monotonic()
                with wait.of_a_turn():
                    assign = await self._assigned(lease)
                queued_s += time.monotonic() - asked
                backend = self.pool.backends[assign.backend]
                lease.task = asyncio.ensure_future(self._ask(call, backend))
                try:
                    result = await lease.task
                except BackendFailed as error:
                    if failovers >= _FAILOVERS:
                        raise
                    # It lives and would fail again: if no other can do it, whoever waits had better know at once.
                    if isinstance(error, BackendErred | Misconfigured) and not self._others(backend):
                        raise
                    failovers += 1
                    if backend.health is not Health.DOWN:
                        _log.warning("backend %s is out, its turns wait: %s", backend.id, error.reason)
                    self.apply(self.pool.failed(ticket, time.monotonic()))
                except asyncio.CancelledError:
                    if not lease.aborted or is_cancelled():
                        raise
                else:
                    over = not lease.aborted
                    last = backend.weight_version
                    return Placed(result, assign.backend, assign.weight_version, last, queued_s)
        finally:
            if lease.task is not None and not lease.task.done():
                lease.task.cancel()
            lease.task = None  # what it raised holds this frame, and all that it was about
            del self._leases[ticket]
            self.apply((self.pool.answered if over else self.pool.withdraw)(ticket, time.monotonic()))

    async def _ask[T](self, call: Callable[[Backend], Awaitable[T]], backend: Backend) -> T:
        """One request. If the engine answers with an error twice, though not to a request that nothing is wrong with,
        the request is to blame: no backend is the worse for it, and none is tried in vain."""
        with contextlib.suppress(BackendErred):
            return await call(backend)
        try:
            return await call(backend)
        except BackendErred as error:
            if await self.engine.samples(backend.url):
                raise RequestRefused(error.reason, field="request") from error
            raise

    def _others(self, backend: Backend) -> bool:
        """Whether another backend of its run is up."""
        return any(peer is not backend and peer.health is Health.UP for peer in self.pool.of_run(backend.run))

    async def _assigned(self, lease: _Lease) -> Assign:
        while lease.assign is None:
            if lease.given_up is not None:
                raise BackendFailed(lease.given_up)
            lease.changed.clear()
            await lease.changed.wait()
        assign, lease.assign, lease.aborted = lease.assign, None, False
        return assign

    def apply(self, decisions: list[Decision]) -> None:
        """Carry out what the pool decided after something moved."""
        self._moved.set()
        for decision in decisions:
            match decision:
                case Assign(ticket=ticket):
                    lease = self._leases[ticket]
                    lease.assign = decision
                    lease.changed.set()
                case Abort(ticket=ticket):
                    lease = self._leases[ticket]
                    lease.assign, lease.aborted = None, True
                    if lease.task is not None:
                        lease.task.cancel()
                case GiveUp(ticket=ticket, reason=reason):
                    lease = self._leases[ticket]
                    lease.given_up = reason
                    lease.changed.set()
                case Probe(backend=backend_id):
                    self.spawn(self._probe(backend_id))

    async def pause(self, backend_id: str | None = None, timeout_s: float = 600.0, run: str | None = None) -> bool:
        """Pause one backend or all of a run, and wait until nothing runs there; ``False`` if something still does."""
        chosen = self.pool.pause(backend_id, run)
        try:
            async with asyncio.timeout(timeout_s):
                while any(backend.in_flight for backend in chosen):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    async def _tick(self) -> float:
        self.apply(self.pool.tick(time.monotonic()))
        return self.tick_s

    async def _report(self) -> float:
        backends = list(self.pool.backends.values())
        loads = await asyncio.gather(*(self.engine.load(backend.url) for backend in backends))
        for backend, load in zip(backends, loads, strict=True):
            if load is not None:
                report = self.pool.report(backend.id, waiting=load.waiting, kv_use=load.kv_use, capacity=load.capacity)
                self.apply(report)
        return self.report_s

    async def _probe(self, backend_id: str) -> None:
        backend = self.pool.backends.get(backend_id)
        if backend is not None:
            alive = False  # the pool hears of every probe, or no further probe would be due
            with log_exceptions():
                alive = await self.engine.healthy(backend.url)
            if alive:
                _log.warning("backend %s answers again", backend_id)
            else:
                self.engine.forget(backend.url)
            self.apply(self.pool.probed(backend_id, alive, time.monotonic()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the background, until it is done or this is closed."""
        task = spawn_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
