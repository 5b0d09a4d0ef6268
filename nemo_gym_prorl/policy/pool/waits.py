# SPDX-License-Identifier: Apache-2.0
"""How long rollouts have waited for a backend: nobody's time, so that no budget is charged for it."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


_REMEMBERED = 100_000
"""Rollouts whose waiting is known at most; the agent of one that nobody asked about for so long is gone."""


@dataclass(slots=True)
class _Wait:
    turns: int = 0
    since: float = 0.0
    over_s: float = 0.0


class Waits:
    """Seconds in which at least one turn of a rollout waited for a backend, or through a pause."""

    def __init__(self) -> None:
        self._waits: OrderedDict[str, _Wait] = OrderedDict()

    @contextlib.contextmanager
    def waiting(self, rollout: str) -> Iterator[None]:
        """A turn of the rollout waits while this is entered."""
        wait = self._waits.setdefault(rollout, _Wait())
        self._waits.move_to_end(rollout)
        while len(self._waits) > _REMEMBERED:
            self._waits.popitem(last=False)
        if not wait.turns:
            wait.since = time.monotonic()
        wait.turns += 1
        try:
            yield
        finally:
            wait.turns -= 1
            if not wait.turns:
                wait.over_s += time.monotonic() - wait.since

    def of(self, rollout: str) -> float | None:
        """Seconds until now; ``None`` for a rollout that never asked for a backend, or is forgotten."""
        wait = self._waits.get(rollout)
        if wait is None:
            return None
        return wait.over_s + (time.monotonic() - wait.since if wait.turns else 0.0)

    def forget(self, rollout: str) -> None:
        """The rollout is over."""
        self._waits.pop(rollout, None)
