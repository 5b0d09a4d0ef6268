# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether what is trained on is what the policy samples, measured against first tries that always run to their end.

A schedule that drops, redraws or passes over rollouts because they take long trains on short ones, and what it dropped
can't tell: its length is that of the part that ran. So a random share of prompts, drawn before anything of them is
known, are *references*: each of their first tries runs to its end, whatever the schedule thinks of it. What the policy
samples is then known of two kinds of prompts: those whose first tries ran to their end anyway, and, by a random sample
of them, those whose first tries were cut off. The bias is the mean of the rollouts that were trained on over that
of the first tries of the same prompts that the filter lets pass, in tokens and in accuracy. 1 is unbiased. The
interval is of that sample, and of what was sampled again; where nothing was, the bias is known. Of a rollout that
machines broke nobody knows how long it would have been: its next try stands for it, so where machines break long ones
the meter does not see it.

Only prompts are compared that nothing is outstanding of, and none behind one that something is: else the references
that are still running, the longest, would be left out of the truth.

Pure.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any


_WINDOW = 4096
"""Prompts that are compared: policies change, and so does what they sample."""
_FEW = 5
"""References of what was cut off, below which their spread is taken from what was not, and doubled."""
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its 95 % confidence interval.

    Attributes:
        value: the ratio.
        low: of the interval.
        high: of the interval.
        end: it is of prompts before this one.
    """

    value: float
    low: float
    high: float
    end: int

    def told(self) -> Iterator[tuple[str, float]]:
        """For a log: the ratio and its ends, with what their names end in."""
        return zip(("", "_low", "_high"), (self.value, self.low, self.high), strict=True)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the rollouts of one group that the filter lets pass; nothing, where it does not.

    Attributes:
        rollouts: how many.
        length: of what the policy wrote, in tokens.
        accuracy: as the filter reads it.
    """

    rollouts: int = 0
    length: float = 0.0
    accuracy: float = 0.0

    @classmethod
    def of(cls, rollouts: Iterable[tuple[float, float]]) -> Sums:
        """Of lengths and accuracies."""
        known = [*rollouts]
        return cls(len(known), sum(length for length, _ in known), sum(accuracy for _, accuracy in known))


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
        self._whole: dict[int, Sums] = {}
        """Prompts whose first tries have all ended."""
        self._cut: set[int] = set()
        """Prompts whose first tries were cut off, or would have been if they were no references."""
        self._emitted: dict[int, Sums] = {}

    def opened(self, number: int, size: int) -> None:
        """A prompt is about to be sampled for the first time."""
        self._open[number] = [None] * size

    def ended(self, number: int, place: int, length: float, accuracy: float) -> None:
        """An outcome. All but the first of a member say nothing here."""
        tries = self._open.get(number)
        if tries is None or tries[place] is not None:
            return
        tries[place] = (length, accuracy)
        known = [one for one in tries if one is not None]
        if len(known) == len(tries):
            del self._open[number]
            self._whole[number] = Sums.of(known) if len({right for _, right in known}) > 1 else Sums()

    def cut(self, number: int, place: int) -> bool:
        """A rollout that runs is of no use any more: whether it is to run to its end all the same."""
        if number not in self._open or self._open[number][place] is not None:
            return False
        self._cut.add(number)
        if random.Random(f"{self._run}:reference:{number}").random() < self._share:
            return True
        del self._open[number]
        return False

    def gave_up(self, number: int, unless_heard: int | None = None) -> None:
        """First tries that can't be had: the machines', or the row's, fault. Nothing is said of this prompt.

        Args:
            number: of the prompt.
            unless_heard: place of a member that has ended; if its outcome was heard, this is none.
        """
        if unless_heard is not None and (number not in self._open or self._open[number][unless_heard] is not None):
            return
        self._open.pop(number, None)
        self._cut.discard(number)

    def emitted(self, number: int, rollouts: Iterable[tuple[float, float]]) -> None:
        """Lengths and accuracies of what is trained on of a group."""
        self._emitted[number] = Sums.of(rollouts)
        for numbers in (self._emitted, self._whole):
            for old in [known for known in numbers if known < number - 2 * _WINDOW]:
                del numbers[old]
        self._cut = {known for known in self._cut if known >= number - 2 * _WINDOW}

    def length(self, settled: int) -> Estimate | None:
        """Mean length of what is trained on over that of first tries.

        Args:
            settled: prompts before this one are trained on, or dropped for good.
        """
        return self._ratio(settled, lambda sums: sums.length)

    def accuracy(self, settled: int) -> Estimate | None:
        """Mean accuracy of what is trained on over that of first tries; ``None`` where either is not above 0."""
        return self._ratio(settled, lambda sums: sums.accuracy)

    def _ratio(self, settled: int, of: Callable[[Sums], float]) -> Estimate | None:
        end = min([settled, *self._open])
        begin = end - _WINDOW
        trained = {number: sums for number, sums in self._emitted.items() if begin <= number < end}
        whole = {number: sums for number, sums in self._whole.items() if begin <= number < end}
        cut = [number for number in self._cut if begin <= number < end]
        sample = [whole.pop(number) for number in cut if number in whole]
        weight = len(cut) / len(sample) if sample else 0.0
        rollouts = sum(s.rollouts for s in whole.values()) + weight * sum(s.rollouts for s in sample)
        total = sum(map(of, whole.values())) + weight * sum(map(of, sample))
        learnt = sum(map(of, trained.values()))
        if total <= 0 or learnt <= 0:  # no ratio: nobody said a length, say, or what was right is masked
            return None
        true = total / rollouts
        ratio = learnt / sum(sums.rollouts for sums in trained.values()) / true

        def spread(known: Iterable[Sums]) -> float:
            return statistics.stdev(of(sums) - true * sums.rollouts for sums in known)

        # Of what was sampled again: another sample has another mean, without any bias.
        mean, count = true * ratio, sum(sums.rollouts for sums in trained.values())
        redrawn = 0.0
        for number in trained.keys() | whole.keys():
            ours, first = trained.get(number, Sums()), whole.get(number, Sums())
            redrawn += (
                (of(ours) - mean * ours.rollouts) / (count * mean) - (of(first) - true * first.rollouts) / total
            ) ** 2
        error = _Z * math.sqrt(redrawn)
        if len(cut) > len(sample) and len(sample) >= _FEW:
            freedom = len(sample) - 1
            quantile = _Z + (_Z**3 + _Z) / (4 * freedom)  # Student's t, Cornish and Fisher's expansion
            unseen = 1 - len(sample) / len(cut)
            unknown = quantile * len(cut) * spread(sample) * math.sqrt(unseen / len(sample)) / total
            error = math.hypot(error, unknown)
        elif len(cut) > len(sample):
            if len(whole) < _FEW:
                return None
            unknown = 2 * _Z * len(cut) * spread(whole.values()) / math.sqrt(max(len(sample), 1)) / total
            error = math.hypot(error, unknown)
        return Estimate(ratio, ratio * math.exp(-error), ratio * math.exp(error), end)

    def state(self) -> dict[str, Any]:
        """It as JSON."""
        return {
            "open": [[number, tries] for number, tries in self._open.items()],
            "whole": [[number, *astuple(sums)] for number, sums in self._whole.items()],
            "cut": sorted(self._cut),
            "emitted": [[number, *astuple(sums)] for number, sums in self._emitted.items()],
        }

    def restore(self, state: Mapping[str, Any], run: str) -> None:
        """Goes on from there."""
        self._run = run
        self._open = {number: [tuple(one) if one else None for one in tries] for number, tries in state["open"]}
        self._whole = {number: Sums(*sums) for number, *sums in state["whole"]}
        self._cut = set(state["cut"])
        self._emitted = {number: Sums(*sums) for number, *sums in state["emitted"]}
