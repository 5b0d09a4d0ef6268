# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts as a numbered stream, whose position is its only state. Pure."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_gym_prorl.failures import CallerError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A dataset row, with its index as its name (``key``), which is the same in every epoch."""

    key: str
    row: Mapping[str, Any]


class Epochs:
    """Endless or bounded repetition of a dataset, with another shuffle in each epoch.

    Prompts have numbers from 0. Invariant: a number always means the same prompt, also after a restart.

    Args:
        rows: dataset rows.
        seed: seed of the shuffles; ``None`` keeps the dataset's order.
        epochs: number of repetitions; ``None`` for an endless stream.

    Raises:
        CallerError: there are no rows.
    """

    _CACHED_ORDERS = 4
    """Number of epochs whose shuffles stay in memory; open groups may belong to earlier epochs."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        seed: int | None = 0,
        epochs: int | None = None,
    ) -> None:
        if not rows:
            raise CallerError("the dataset has no rows", field="rows")
        self._prompts = [Prompt(str(index), row) for index, row in enumerate(rows)]
        self._seed = seed
        self._epochs = epochs
        self._orders: OrderedDict[int, list[int]] = OrderedDict()

    @property
    def size(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: int, /) -> Prompt | None:
        """Return the prompt with this number, or ``None`` after the last epoch."""
        epoch, position = divmod(number, self.size)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return self._prompts[position if self._seed is None else self._order(epoch)[position]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = [*range(self.size)]
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._orders[epoch] = order
            if len(self._orders) > self._CACHED_ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]


class Curriculum(Protocol):
    """Selection of prompts. A curriculum's state must be JSON, because the sampler saves it."""

    def skips(self, key: str) -> bool:
        """Return whether to skip the prompt with the name ``key`` in this epoch."""

    def saw(self, key: str, accuracies: Sequence[float]) -> None:
        """Record the accuracies of a complete group of the prompt, once the group cannot start again."""

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


class SkipSolved:
    """Curriculum that skips prompts that every rollout of ``times`` consecutive groups solved, with accuracy 1."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._in_a_row: Counter[str] = Counter()

    def skips(self, key: str) -> bool:
        """Return whether enough consecutive groups solved the prompt."""
        return self._in_a_row[key] >= self._times

    def saw(self, key: str, accuracies: Sequence[float]) -> None:
        """Count a solved group, or reset the count of its prompt."""
        if min(accuracies) >= 1.0:
            self._in_a_row[key] += 1
        else:
            self._in_a_row.pop(key, None)

    def state(self) -> dict[str, Any]:
        """Return the number of consecutive solved groups by prompt."""
        return {"in_a_row": dict(self._in_a_row)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._in_a_row = Counter(state["in_a_row"])
