# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Background work: loops that are restarted after an exception, and tasks that no caller awaits.

Invariants of a loop in :class:`BackgroundLoops`:

- An exception never ends a loop. The loop is restarted after a pause that doubles up to ``LONGEST_PAUSE_S``.
- A loop is *failing* from an exception until its work has returned once, or has run for ``SETTLED_S``.
- Each restart is counted. A traceback is logged once per exception type and line, so a loop cannot flood the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5  # before the first restart; doubled for each further one
LONGEST_PAUSE_S = 30.0  # after an operator has fixed the cause, the loop works again within half a minute
SETTLED_S = 5.0  # a pass that never returns, such as an event stream, counts as recovered after this time

type Work = Callable[[], Coroutine[Any, Any, float | None]]
"""One pass of a loop. Returns the pause in seconds before the next pass, or ``None`` to end the loop."""


@dataclass(slots=True, eq=False)
class LoopState:
    """Restart decisions of one loop (pure).

    Attributes:
        name: the loop's name in health checks, metrics and logs.
        error: type name of the last exception; ``None`` after a completed pass.
        failures: exceptions since the last pass that completed or ran for ``SETTLED_S``.
        running_since: start of the current pass by the caller's clock, in seconds; ``None`` between passes.
    """

    name: str
    error: str | None = None
    failures: int = 0
    running_since: float | None = None

    def failed(self, error: BaseException, now: float) -> float:
        """Record an exception; return the seconds to wait before the restart."""
        if self._has_settled(now):
            self.failures = 0
        self.error, self.running_since = type(error).__name__, None
        self.failures += 1
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.failures - 1, 16)))

    def completed(self) -> None:
        """Record a pass without an exception."""
        self.error, self.running_since, self.failures = None, None, 0

    def is_failing(self, now: float) -> bool:
        """Return whether no pass has completed, or run for ``SETTLED_S``, since the last exception."""
        return self.error is not None and not self._has_settled(now)

    def _has_settled(self, now: float) -> bool:
        return self.running_since is not None and now - self.running_since >= SETTLED_S


@dataclass(slots=True)
class BackgroundLoops:
    """The supervised loops of one server or component.

    Args:
        clock: returns monotonic seconds.
        sleep: waits a number of seconds between passes.
        restart: ``False`` in a client, which has no health route: an exception ends the loop's task.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    restart: bool = True
    restarts: Counter[str] = field(default_factory=Counter)
    """Number of restarts by name of the loop, also of loops that have ended."""
    _states: set[LoopState] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _logged: set[tuple[str, str, int]] = field(default_factory=set)

    @property
    def failing(self) -> Mapping[str, str]:
        """Type name of the last exception, by name of each failing loop."""
        now = self.clock()
        return {state.name: state.error or "" for state in self._states.copy() if state.is_failing(now)}

    def start(self, name: str, work: Work, *, delay_s: float = 0.0) -> asyncio.Task[None]:
        """Start a loop; cancelling the returned task ends it.

        Args:
            name: the loop's name; several loops of one kind may share a name.
            work: runs one pass.
            delay_s: seconds before the first pass.
        """
        task = asyncio.create_task(self._run(name, work, delay_s), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_thread(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in the calling thread until ``work`` returns; call ``work`` again after each exception."""
        state = LoopState(name)
        self._states.add(state)
        try:
            while True:
                state.running_since = self.clock()
                try:
                    return work()
                except Exception as error:
                    time.sleep(self._failed(state, error))
        finally:
            self._states.discard(state)

    async def aclose(self) -> None:
        """Cancel every loop and wait until all have ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str, work: Work, delay_s: float) -> None:
        state = LoopState(name)
        self._states.add(state)
        pause_s: float | None = delay_s
        try:
            while pause_s is not None:
                if pause_s:
                    await self.sleep(pause_s)
                state.running_since = self.clock()
                try:
                    pause_s = await work()
                    if pause_s is not None and not 0 <= pause_s < math.inf:
                        raise ValueError(f"a pause of {pause_s!r} seconds")
                    state.completed()
                except asyncio.CancelledError as error:
                    # A cancelled future that the pass awaits raises the same error, and must not end the loop.
                    if is_cancelled() or not self.restart:
                        raise
                    pause_s = self._failed(state, error)
                except Exception as error:
                    if not self.restart:
                        raise
                    pause_s = self._failed(state, error)
        finally:
            self._states.discard(state)

    def _failed(self, state: LoopState, error: BaseException) -> float:
        pause_s = state.failed(error, self.clock())
        self.restarts[state.name] += 1
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        kind = state.name, type(error).__name__, where.tb_lineno if where is not None else 0
        trace = None if kind in self._logged else error
        self._logged.add(kind)
        _log.error("background loop %s failed, restart in %g s: %r", state.name, pause_s, error, exc_info=trace)
        return pause_s


PROCESS_LOOPS = BackgroundLoops()
"""Loops of a process that belong to no server: loops of sandbox pools, and of the sandbox supervisor."""

_spawned: set[asyncio.Task[Any]] = set()


def start_eager_task[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task on the running event loop; the task runs to its first suspension before this function returns."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)


def spawn_task[T](work: Coroutine[Any, Any, T], *, expected: type[Exception] | tuple[()] = ()) -> asyncio.Task[T]:
    """Start a coroutine that no caller awaits. Its exception is logged and does not propagate.

    Args:
        work: runs to its first suspension before this function returns.
        expected: types of exceptions that are not logged.
    """

    def ended(task: asyncio.Task[T]) -> None:
        _spawned.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, expected):
            _log.error("background task failed: %r", error, exc_info=error)

    task = start_eager_task(work)
    if task.done():
        ended(task)
    else:
        _spawned.add(task)
        task.add_done_callback(ended)
    return task


@contextlib.contextmanager
def log_exceptions() -> Iterator[None]:
    """Log an exception of the block and continue after the block."""
    try:
        yield
    except Exception as error:
        _log.error("background work failed: %r", error, exc_info=error)


async def run_uncancellable[T](work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even if the caller is cancelled; the cancellation is raised afterwards."""
    task = start_eager_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})  # a cancelled wait does not cancel the tasks that it waits for
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return await task


def is_cancelled() -> bool:
    """Return whether the current task itself is being cancelled, and not only a future that the task awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
