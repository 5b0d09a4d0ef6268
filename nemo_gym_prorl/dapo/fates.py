# SPDX-License-Identifier: Apache-2.0
"""What became of every rollout that was submitted: each has one fate, and the sums tell what was wasted and who.

Groups that finish late are dropped more often than others, which teaches short answers to the policy. So each fate has
the length and the time of its rollouts: what was dropped can be compared with what was trained on.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """The end of a rollout, as the trainer sees it."""

    EMITTED = "emitted"
    NO_VARIANCE = "no_variance"
    """Scored, but all of its group have the same reward: nothing to learn."""
    STALE = "stale"
    """Scored, but under weights too old for the batch to come."""
    GROUP_FAILED = "group_failed"
    """Scored, but one of its group never was."""
    LEFT_OVER = "left_over"
    """Scored, when training ended."""
    CANCELLED = "cancelled"
    """Ended by us, since nothing of it could be used."""
    FAILED = "failed"
    """Never scored: a machine's, the policy's or the row's doing."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a rollout cost.

    Attributes:
        seconds: that stages worked on it.
        length: of what the policy wrote, in whatever the driver counts (tokens, turns).
    """

    seconds: float = 0.0
    length: float = 0.0


@dataclass(slots=True)
class Tally:
    """Rollouts of one fate, and sums of what they cost."""

    rollouts: int = 0
    seconds: float = 0.0
    length: float = 0.0

    def add(self, usage: Usage) -> None:
        """One more."""
        self.rollouts += 1
        self.seconds += usage.seconds
        self.length += usage.length


class Fates:
    """Tallies by fate.

    Args:
        saved: what :meth:`state` gave.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._tallies = {fate: Tally(**(saved or {}).get(fate.value, {})) for fate in Fate}

    def __getitem__(self, fate: Fate) -> Tally:
        return self._tallies[fate]

    def add(self, fate: Fate, usage: Usage) -> None:
        """A rollout met its fate."""
        self._tallies[fate].add(usage)

    @property
    def rollouts(self) -> int:
        """All that have met theirs."""
        return sum(tally.rollouts for tally in self._tallies.values())

    @property
    def wasted(self) -> float:
        """Share of all time that went into rollouts that were not emitted, 0 to 1."""
        spent = sum(tally.seconds for tally in self._tallies.values())
        return 1 - self._tallies[Fate.EMITTED].seconds / spent if spent else 0.0

    @property
    def length_bias(self) -> float | None:
        """Mean length of what was emitted over that of what was dropped for being late (stale or cancelled).

        Below 1, long rollouts are trained on less often than they are sampled. What was cancelled counts with the
        length it had, so the truth is lower still. ``None`` where one of the two is empty.
        """
        emitted = self._tallies[Fate.EMITTED]
        late = Tally()
        for fate in (Fate.STALE, Fate.CANCELLED):
            late.rollouts += self._tallies[fate].rollouts
            late.length += self._tallies[fate].length
        if not emitted.rollouts or not late.length:
            return None
        return (emitted.length / emitted.rollouts) / (late.length / late.rollouts)

    def state(self) -> dict[str, Any]:
        """The tallies as JSON, by fate."""
        return {fate.value: asdict(tally) for fate, tally in self._tallies.items()}
