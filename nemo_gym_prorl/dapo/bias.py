# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling bias: compare rollouts that are trained on with first tries that ran to their end. Pure.

A schedule that cancels or resamples slow rollouts trains on short rollouts. Cancelled rollouts do not show this bias,
since their full length is unknown. Therefore a random share of prompts, drawn before any of their rollouts begins, are
*references*: the first try of each member runs to its end, even if no batch can use the result.

The policy's distribution is then known from two kinds of prompts: prompts whose first tries all ended by themselves,
and a random sample of the prompts whose first tries were cut off. The bias is a ratio of two means, in tokens or in
accuracy: rollouts that were trained on, over the first tries that pass the filter. 1 is unbiased. The confidence
interval covers the sampling of references and resampled groups; without either the bias is known exactly.

Invariant: the comparison ends before the first prompt with an outstanding first try. Otherwise the longest references,
which are still running, would be missing from the comparison.

Limit: the next try replaces a rollout that infrastructure broke. If infrastructure breaks long rollouts more often
than short rollouts, the measurement misses that bias.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any


_WINDOW = 4096
"""Number of latest prompts that are compared, because the policy changes during training."""
_MIN_REFERENCES = 5
"""Minimum of finished references to estimate their spread; with fewer, twice the spread of uncut prompts is used."""
_Z = 1.96  # standard normal quantile of a 95 % interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its 95 % confidence interval.

    Attributes:
        end: group number at which the comparison ends, exclusive.
    """

    value: float
    low: float
    high: float
    end: int

    def by_suffix(self) -> Iterator[tuple[str, float]]:
        """Yield the suffixes of metric names, with the ratio and the bounds of its interval."""
        return zip(("", "_low", "_high"), (self.value, self.low, self.high), strict=True)


@dataclass(frozen=True, slots=True)
class GroupSums:
    """Sums over the rollouts of one group; zeros for a group that does not pass the variance filter."""

    rollouts: int = 0
    length: float = 0.0
    accuracy: float = 0.0

    @classmethod
    def of(cls, rollouts: Iterable[tuple[float, float]]) -> GroupSums:
        known = [*rollouts]
        return cls(len(known), sum(length for length, _ in known), sum(accuracy for _, accuracy in known))


class BiasMeter:
    """Measurement of the sampling bias in length and in accuracy; see the module.

    Args:
        share: share of prompts that are references, 0 to 1.
        run: name of the training run, which with a group's number decides whether the group's prompt is a reference.
    """

    def __init__(self, share: float, run: str) -> None:
        self._share, self._run = share, run
        self._open: dict[int, list[tuple[float, float] | None]] = {}
        """Length and accuracy of each member's first try, by group number; ``None`` while the try is outstanding."""
        self._whole: dict[int, GroupSums] = {}
        """Groups whose first tries have all ended."""
        self._cut: set[int] = set()
        """Groups whose first tries were cut off, or would have been if they were not references."""
        self._emitted: dict[int, GroupSums] = {}

    def opened(self, number: int, size: int) -> None:
        """Record a group of ``size`` members before its first rollout begins."""
        self._open[number] = [None] * size

    def record_outcome(self, number: int, index: int, length: float, accuracy: float) -> None:
        """Record a member's first try: sampled tokens and accuracy. Later outcomes of the member are ignored."""
        tries = self._open.get(number)
        if tries is None or tries[index] is not None:
            return
        tries[index] = (length, accuracy)
        known = [one for one in tries if one is not None]
        if len(known) == len(tries):
            del self._open[number]
            self._whole[number] = GroupSums.of(known) if len({right for _, right in known}) > 1 else GroupSums()

    def cut(self, number: int, index: int) -> bool:
        """Record that no batch can use a member's running rollout; return whether to keep it as a reference."""
        if number not in self._open or self._open[number][index] is not None:
            return False
        self._cut.add(number)
        if random.Random(f"{self._run}:reference:{number}").random() < self._share:
            return True
        del self._open[number]
        return False

    def gave_up(self, number: int, unless_recorded: int | None = None) -> None:
        """Exclude a group whose first tries cannot all be scored, because of infrastructure or of its row. A
        recorded outcome of the member ``unless_recorded`` keeps the group."""
        if unless_recorded is not None and (
            number not in self._open or self._open[number][unless_recorded] is not None
        ):
            return
        self._open.pop(number, None)
        self._cut.discard(number)

    def emitted(self, number: int, rollouts: Iterable[tuple[float, float]]) -> None:
        """Record lengths in tokens and accuracies of a group's rollouts that are trained on."""
        self._emitted[number] = GroupSums.of(rollouts)
        for numbers in (self._emitted, self._whole):
            for old in [known for known in numbers if known < number - 2 * _WINDOW]:
                del numbers[old]
        self._cut = {known for known in self._cut if known >= number - 2 * _WINDOW}

    def length(self, settled: int) -> Estimate | None:
        """Return the ratio of mean lengths, of trained rollouts over first tries that pass the variance filter.

        ``None`` without enough data.

        Args:
            settled: number of the first group that may still be trained on.
        """
        return self._ratio(settled, lambda sums: sums.length)

    def accuracy(self, settled: int) -> Estimate | None:
        """Return the ratio of mean accuracies, as :meth:`length`; ``None`` also if a mean is not above 0."""
        return self._ratio(settled, lambda sums: sums.accuracy)

    def _ratio(self, settled: int, of: Callable[[GroupSums], float]) -> Estimate | None:
        end = min([settled, *self._open])
        begin = end - _WINDOW
        trained = {number: sums for number, sums in self._emitted.items() if begin <= number < end}
        whole = {number: sums for number, sums in self._whole.items() if begin <= number < end}
        cut = [number for number in self._cut if begin <= number < end]
        sample = [whole.pop(number) for number in cut if number in whole]
        weight = len(cut) / len(sample) if sample else 0.0
        rollouts = sum(s.rollouts for s in whole.values()) + weight * sum(s.rollouts for s in sample)
        total = sum(map(of, whole.values())) + weight * sum(map(of, sample))
        trained_total = sum(map(of, trained.values()))
        if total <= 0 or trained_total <= 0:  # services report no lengths, or all correct rollouts are masked
            return None
        true = total / rollouts
        ratio = trained_total / sum(sums.rollouts for sums in trained.values()) / true

        def spread(known: Iterable[GroupSums]) -> float:
            return statistics.stdev(of(sums) - true * sums.rollouts for sums in known)

        # Variance of resampled groups: even an unbiased second sample has another mean than the first tries.
        mean, count = true * ratio, sum(sums.rollouts for sums in trained.values())
        redrawn = 0.0
        for number in trained.keys() | whole.keys():
            used, first = trained.get(number, GroupSums()), whole.get(number, GroupSums())
            redrawn += (
                (of(used) - mean * used.rollouts) / (count * mean) - (of(first) - true * first.rollouts) / total
            ) ** 2
        error = _Z * math.sqrt(redrawn)
        if len(cut) > len(sample) and len(sample) >= _MIN_REFERENCES:
            freedom = len(sample) - 1
            quantile = _Z + (_Z**3 + _Z) / (4 * freedom)  # Student's t, Cornish and Fisher's expansion
            unseen = 1 - len(sample) / len(cut)
            unknown = quantile * len(cut) * spread(sample) * math.sqrt(unseen / len(sample)) / total
            error = math.hypot(error, unknown)
        elif len(cut) > len(sample):
            if len(whole) < _MIN_REFERENCES:
                return None
            unknown = 2 * _Z * len(cut) * spread(whole.values()) / math.sqrt(max(len(sample), 1)) / total
            error = math.hypot(error, unknown)
        return Estimate(ratio, ratio * math.exp(-error), ratio * math.exp(error), end)

    def state(self) -> dict[str, Any]:
        return {
            "open": [[number, tries] for number, tries in self._open.items()],
            "whole": [[number, *astuple(sums)] for number, sums in self._whole.items()],
            "cut": sorted(self._cut),
            "emitted": [[number, *astuple(sums)] for number, sums in self._emitted.items()],
        }

    def restore(self, state: Mapping[str, Any], run: str) -> None:
        self._run = run
        self._open = {number: [tuple(one) if one else None for one in tries] for number, tries in state["open"]}
        self._whole = {number: GroupSums(*sums) for number, *sums in state["whole"]}
        self._cut = set(state["cut"])
        self._emitted = {number: GroupSums(*sums) for number, *sums in state["emitted"]}
