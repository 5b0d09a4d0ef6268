# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock jumps to the next timer instead of waiting for it.

Hours of stages, budgets and graces pass in milliseconds, and a schedule plays the same way every time.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything is ready to run, and jumps when nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        # While a thread works timers pass by quickly; above 2**24 s a nanosecond is lost and none would ever be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def run_in_virtual_time[T](work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
