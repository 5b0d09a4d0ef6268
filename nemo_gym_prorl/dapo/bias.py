# SPDX-License-Identifier: Apache-2.0
"""Whether what is trained on is what the policy samples, measured against first tries that always run to their end.

A schedule that drops, redraws or passes over rollouts because they take long trains on short ones, and what it dropped
can't tell: its length is that of the part that ran. So a random share of prompts, drawn before anything of them is
known, are *references*: each of their first tries runs to its end, whatever the schedule thinks of it. The bias is the
mean of the rollouts that were trained on over the mean of those of the references that the filter lets pass, in tokens
and in accuracy. 1 is unbiased.

Only prompts are compared that nothing is outstanding of, and none behind one that something is: else the references
that are still running, the longest, would be left out of the truth as well.

Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any


_WINDOW = 4096
"""Prompts that are compared: policies change, and so does what they sample."""
_FEWEST = 10
"""References that an interval needs."""
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def told(self) -> Iterator[tuple[str, float]]:
        """For a log: the ratio and its ends, with what their names end in."""
        return zip(("", "_low", "_high"), (self.value, self.low, self.high), strict=True)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the rollouts of one group.

    Attributes:
        rollouts: how many.
        length: of what the policy wrote, in tokens.
        accuracy: as the filter reads it.
    """

    rollouts: int
    length: float
    accuracy: float

    @classmethod
    def of(cls, rollouts: Iterable[tuple[float, float]]) -> Sums:
        """Of lengths and accuracies."""
        lengths, accuracies = zip(*rollouts, strict=True) if (rollouts := [*rollouts]) else ((), ())
        return cls(len(rollouts), sum(lengths), sum(accuracies))


class BiasMeter:
    """See the module.

    Args:
        share: of prompts that are references, 0 to 1.
        run: name of the run; which prompts are references follows from it and their numbers.
    """

    def __init__(self, share: float, run: str) -> None:
        self._share, self._run = share, run
        self._open: dict[int, list[tuple[float, float] | None]] = {}
        """Lengths and accuracies of first tries, by prompt and place; ``None`` while one is outstanding."""
        self._references: dict[int, Sums] = {}
        """Those whose first tries have all ended, and vary."""
        self._emitted: dict[int, Sums] = {}

    def opened(self, number: int, size: int) -> None:
        """A prompt is about to be sampled for the first time."""
        if random.Random(f"{self._run}:reference:{number}").random() < self._share:
            self._open[number] = [None] * size

    def wants(self, number: int, place: int) -> bool:
        """Whether this member's outcome is the first one of a reference: it is to run to its end."""
        return number in self._open and self._open[number][place] is None

    def ended(self, number: int, place: int, length: float, accuracy: float) -> None:
        """An outcome. All but the first of a member say nothing here."""
        if not self.wants(number, place):
            return
        tries = self._open[number]
        tries[place] = (length, accuracy)
        known = [one for one in tries if one is not None]
        if len(known) == len(tries):
            del self._open[number]
            if len({accuracy for _, accuracy in known}) > 1:
                self._references[number] = Sums.of(known)

    def gave_up(self, number: int) -> None:
        """A first try that can't be had: the machines', or the row's, fault. The prompt is no reference."""
        self._open.pop(number, None)

    def emitted(self, number: int, rollouts: Iterable[tuple[float, float]]) -> None:
        """Lengths and accuracies of what is trained on of a group."""
        self._emitted[number] = Sums.of(rollouts)
        for numbers in (self._emitted, self._references):
            while numbers and (oldest := next(iter(numbers))) < number - _WINDOW:
                del numbers[oldest]

    @property
    def outstanding(self) -> Iterator[int]:
        """References of which something is."""
        return iter(self._open)

    def length(self, settled: float) -> Estimate | None:
        """Mean length of what is trained on over that of references.

        Args:
            settled: the first prompt that something is outstanding of, but for references.
        """
        return self._ratio(settled, lambda sums: sums.length)

    def accuracy(self, settled: float) -> Estimate | None:
        """Mean accuracy of what is trained on over that of references."""
        return self._ratio(settled, lambda sums: sums.accuracy)

    def _ratio(self, settled: float, of: Callable[[Sums], float]) -> Estimate | None:
        """Of two means over groups of which many are the same ones, so that their errors are: the delta method."""
        end = min([settled, *self._open])
        begin = end - _WINDOW
        trained, true = (
            {number: sums for number, sums in numbers.items() if begin <= number < end}
            for numbers in (self._emitted, self._references)
        )
        counted = [sum(sums.rollouts for sums in numbers.values()) for numbers in (trained, true)]
        if len(true) < _FEWEST or not counted[0]:
            return None
        means = [
            sum(map(of, numbers.values())) / count for numbers, count in zip((trained, true), counted, strict=True)
        ]
        if min(means) <= 0:
            return None

        def deviation(numbers: Mapping[int, Sums], number: int, mean: float, count: int) -> float:
            sums = numbers.get(number)
            return (of(sums) - mean * sums.rollouts) / (count * mean) if sums else 0.0

        variance = sum(
            (deviation(trained, n, means[0], counted[0]) - deviation(true, n, means[1], counted[1])) ** 2
            for n in trained.keys() | true.keys()
        )
        freedom = len(true) - 1
        quantile = _Z + (_Z**3 + _Z) / (4 * freedom)  # Student's t, Cornish and Fisher's expansion
        error = quantile * math.sqrt(variance * len(true) / freedom)
        ratio = means[0] / means[1]
        return Estimate(ratio, ratio * math.exp(-error), ratio * math.exp(error))

    def state(self) -> dict[str, Any]:
        """It as JSON."""
        return {
            "open": [[number, tries] for number, tries in self._open.items()],
            "references": [[number, *astuple(sums)] for number, sums in self._references.items()],
            "emitted": [[number, *astuple(sums)] for number, sums in self._emitted.items()],
        }

    def restore(self, state: Mapping[str, Any], run: str) -> None:
        """Goes on from there."""
        self._run = run
        self._open = {number: [tuple(one) if one else None for one in tries] for number, tries in state["open"]}
        self._references = {number: Sums(*sums) for number, *sums in state["references"]}
        self._emitted = {number: Sums(*sums) for number, *sums in state["emitted"]}
