# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What became of every rollout that was submitted: each has one fate, and the sums tell what was wasted and who.

What that makes of the lengths that are trained on is another question: :mod:`nemo_gym_prorl.dapo.bias`.

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
    """Never scored: a machine's or the row's doing."""
    REFERENCE = "reference"
    """Of no use any more, and run to its end all the same, to measure bias."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a rollout cost.

    Attributes:
        seconds: that stages worked on it.
        length: of what the policy wrote, in tokens.
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

    def state(self) -> dict[str, Any]:
        """The tallies as JSON, by fate."""
        return {fate.value: asdict(tally) for fate, tally in self._tallies.items()}
