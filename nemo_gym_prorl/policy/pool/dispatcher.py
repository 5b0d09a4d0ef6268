# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous driver of the pure :mod:`.pool`: clock, tasks and health probes.

A request runs under a *ticket*, to which the pool assigns a backend. If the backend fails, the ticket is assigned
again, and the same request goes to another backend. The task that awaits :meth:`BackendDispatcher.run` may be
cancelled at any time. Cancellation closes the request's connection, which aborts the request at the engine and frees
the slot.
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

from nemo_gym_prorl.async_tasks import BackgroundLoops, is_cancelled, log_exceptions, spawn_task, start_eager_task
from nemo_gym_prorl.policy.engines.engine import BackendErred, BackendFailed, Misconfigured, RequestRefused
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.pool.backend import Abort, Assign, Backend, Decision, GiveUp, Health, Probe
from nemo_gym_prorl.policy.pool.pool import BackendPool


class WaitClock:
    """Clock of the seconds in which at least one turn of a rollout waited for a backend, pauses included."""

    def __init__(self) -> None:
        self._turns = 0
        self._since = self._over_s = 0.0

    @contextlib.contextmanager
    def waiting_turn(self) -> Iterator[None]:
        """Count a turn as waiting within the context."""
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
        """Seconds so far, a wait in progress included."""
        return self._over_s + (time.monotonic() - self._since if self._turns else 0.0)


_log = logging.getLogger(__name__)

_TICK_S = 0.5
"""Seconds between checks for probes and idle rollouts."""
_REPORT_S = 2.0
"""Seconds between load reports."""
_MAX_FAILOVERS = 8
"""Number of times that one turn is sent again after a backend's failure, before the turn fails."""


@dataclass(slots=True)
class _TicketState:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    assign: Assign | None = None
    given_up_reason: str | None = None
    task: asyncio.Task[object] | None = None
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class PlacedResult[T]:
    """A request's result, the id of its backend, the labels of the weights when the request began and ended (``None``
    without labels), and the seconds of waiting for a backend.
    """

    result: T
    backend: str
    weight_version: str | None
    last_version: str | None
    queued_s: float


@dataclass(slots=True)
class BackendDispatcher:
    """Dispatcher of requests to the backends of a pool.

    Args:
        pool: makes the decisions; no other object may send events to the pool.
        engine: client for health probes and load reports.
        loops: supervises the background loops.
    """

    pool: BackendPool
    engine: HttpEngine
    loops: BackgroundLoops = field(default_factory=BackgroundLoops)
    _ticket_states: dict[int, _TicketState] = field(default_factory=dict)
    _tickets: itertools.count[int] = field(default_factory=itertools.count)
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _state_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        """Start the background loops; needs a running event loop."""
        self.loops.start("backend-tick", self._tick, delay_s=_TICK_S)
        self.loops.start("backend-reports", self._report)

    async def aclose(self) -> None:
        """Stop background work; requests of :meth:`run` belong to their callers and continue."""
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
        wait: WaitClock | None = None,
    ) -> PlacedResult[T]:
        """Run one request, which ``call`` sends, on the backend that the pool assigns.

        The other arguments are those of :meth:`.BackendPool.request`; ``wait`` records the wait for a backend.

        Raises:
            BackendFailed: too many attempts failed, no other backend is up after an error of the engine, or no backend
                of the run served for ``unreachable_s``.
            RequestRefused: every backend would refuse the request, or the engine errs on this request alone.
        """
        ticket = next(self._tickets)
        state = self._ticket_states[ticket] = _TicketState()
        wait, queued_s, failovers = wait or WaitClock(), 0.0, 0
        over = False
        try:
            self.apply(self.pool.request(ticket, rollout, group, time.monotonic(), tokens, blocks, run))
            while True:
                asked = time.monotonic()
                with wait.waiting_turn():
                    assign = await self._assigned(state)
                queued_s += time.monotonic() - asked
                backend = self.pool.backends[assign.backend]
                state.task = start_eager_task(self._send(call, backend))
                try:
                    result = await state.task
                except BackendFailed as error:
                    if failovers >= _MAX_FAILOVERS:
                        raise
                    # An engine that answers with an error would answer the same again: only another backend may help.
                    if isinstance(error, BackendErred | Misconfigured) and not self._has_other_backend(backend):
                        raise
                    failovers += 1
                    if backend.health is not Health.DOWN:
                        _log.warning("engine %s is down, its turns wait: %s", backend.url, error.reason)
                    self.apply(self.pool.failed(ticket, time.monotonic()))
                except asyncio.CancelledError:
                    if not state.aborted or is_cancelled():
                        raise
                else:
                    over = not state.aborted
                    last = backend.weight_version
                    return PlacedResult(result, assign.backend, assign.weight_version, last, queued_s)
        finally:
            if state.task is not None and not state.task.done():
                state.task.cancel()
            state.task = None  # the task's exception references this frame: break the cycle
            del self._ticket_states[ticket]
            self.apply((self.pool.answered if over else self.pool.withdraw)(ticket, time.monotonic()))

    async def _send[T](self, call: Callable[[Backend], Awaitable[T]], backend: Backend) -> T:
        """Send one request, and a second time after an engine error.

        If the engine errs again but answers another request, this request is at fault and refused. The backend keeps
        its health, and no other backend is tried.
        """
        with contextlib.suppress(BackendErred):
            return await call(backend)
        try:
            return await call(backend)
        except BackendErred as error:
            if await self.engine.can_sample(backend.url):
                raise RequestRefused(error.reason, field="request") from error
            raise

    def _has_other_backend(self, backend: Backend) -> bool:
        return any(peer is not backend and peer.health is Health.UP for peer in self.pool.of_run(backend.run))

    async def _assigned(self, state: _TicketState) -> Assign:
        while state.assign is None:
            if state.given_up_reason is not None:
                raise BackendFailed(state.given_up_reason, final=True)
            state.changed.clear()
            await state.changed.wait()
        assign, state.assign, state.aborted = state.assign, None, False
        return assign

    def apply(self, decisions: list[Decision]) -> None:
        """Carry out the pool's decisions."""
        self._state_changed.set()
        for decision in decisions:
            match decision:
                case Assign(ticket=ticket):
                    state = self._ticket_states[ticket]
                    state.assign = decision
                    state.changed.set()
                case Abort(ticket=ticket):
                    state = self._ticket_states[ticket]
                    state.assign, state.aborted = None, True
                    if state.task is not None:
                        state.task.cancel()
                case GiveUp(ticket=ticket, reason=reason):
                    state = self._ticket_states[ticket]
                    state.given_up_reason = reason
                    state.changed.set()
                case Probe(backend=backend_id):
                    self.spawn(self._probe(backend_id))

    async def pause(self, backend_id: str | None = None, timeout_s: float = 600.0, run: str | None = None) -> bool:
        """Pause one backend or all of a run; return whether the requests in flight ended within ``timeout_s``."""
        chosen = self.pool.pause(backend_id, run, time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                while any(backend.in_flight for backend in chosen):
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError:
            return False
        return True

    async def _tick(self) -> float:
        self.apply(self.pool.tick(time.monotonic()))
        return _TICK_S

    async def _report(self) -> float:
        backends = list(self.pool.backends.values())
        loads = await asyncio.gather(*(self.engine.load(backend.url) for backend in backends))
        for backend, load in zip(backends, loads, strict=True):
            if load is not None:
                report = self.pool.report(backend.id, waiting=load.waiting, kv_use=load.kv_use, capacity=load.capacity)
                self.apply(report)
        return _REPORT_S

    async def _probe(self, backend_id: str) -> None:
        backend = self.pool.backends.get(backend_id)
        if backend is not None:
            alive = False  # also after an exception: without a result the pool would schedule no further probe
            with log_exceptions():
                alive = await self.engine.healthy(backend.url)
            if alive:
                _log.warning("engine %s answers again", backend.url)
            else:
                self.engine.forget(backend.url)
            self.apply(self.pool.probed(backend_id, alive, time.monotonic()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; :meth:`aclose` cancels the task."""
        task = spawn_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
