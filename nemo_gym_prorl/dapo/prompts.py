# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from: a numbered stream, so that a place in it is all that there is to save.

Pure.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_gym_prorl.failures import CallerError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A dataset row, and the name by which it is known in every epoch."""

    key: str
    row: Mapping[str, Any]


class Epochs:
    """The rows of a dataset again and again, each time in another order.

    Prompts are known by their number, from 0. The same number is the same prompt, also after a restart.

    Args:
        rows: the dataset. ``key`` names a field with a row's own name; without one a row's place is its name.
        seed: of the orders. ``None`` keeps the dataset's own.
        epochs: how often; ``None`` for ever.

    Raises:
        CallerError: there are no rows, or two of them have one name.
    """

    _KEPT = 4
    """Orders that are remembered: groups that are still open may be of an epoch before."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        key: str | None = None,
        seed: int | None = 0,
        epochs: int | None = None,
    ) -> None:
        if not rows:
            raise CallerError("the dataset has no rows", field="rows")
        self._prompts = [Prompt(str(place if key is None else row.get(key)), row) for place, row in enumerate(rows)]
        twice = [name for name, times in Counter(prompt.key for prompt in self._prompts).items() if times > 1]
        if twice:
            raise CallerError(f"it must name each row; several are named {twice[0]!r}", field=key)
        self._seed = seed
        self._epochs = epochs
        self._orders: OrderedDict[int, list[int]] = OrderedDict()

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self._prompts)

    def __getitem__(self, number: int, /) -> Prompt | None:
        """The prompt of this number, or ``None`` behind the last epoch."""
        epoch, place = divmod(number, self.size)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return self._prompts[place if self._seed is None else self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = [*range(self.size)]
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._orders[epoch] = order
            if len(self._orders) > self._KEPT:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]


class Curriculum(Protocol):
    """Which prompts are worth their rollouts. What it knows must be JSON, to be saved with the sampler."""

    def skips(self, key: str) -> bool:
        """Whether to leave this prompt out now."""

    def saw(self, key: str, rewards: Sequence[float]) -> None:
        """A group of this prompt is complete."""

    def state(self) -> dict[str, Any]:
        """What it knows, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Knows what was saved."""


class SkipSolved:
    """Leaves out prompts that all rollouts of a group solved, several times in a row.

    Args:
        times: how often in a row.
        solved: the least reward of a solution.
    """

    def __init__(self, times: int, solved: float = 1.0) -> None:
        if times < 1:
            raise CallerError("it must be at least 1", field="times")
        self._times = times
        self._solved = solved
        self._in_a_row: Counter[str] = Counter()

    def skips(self, key: str) -> bool:
        """Whether it was solved often enough."""
        return self._in_a_row[key] >= self._times

    def saw(self, key: str, rewards: Sequence[float]) -> None:
        """Counts, or begins anew."""
        if min(rewards) >= self._solved:
            self._in_a_row[key] += 1
        else:
            self._in_a_row.pop(key, None)

    def state(self) -> dict[str, Any]:
        """Times in a row, by prompt."""
        return {"in_a_row": dict(self._in_a_row)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._in_a_row = Counter(state["in_a_row"])
