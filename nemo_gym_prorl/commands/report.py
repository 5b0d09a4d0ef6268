# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What became of a run, for a person: counts, failures with their reasons, reward per prompt, pass@k.

Only rollouts that were scored have a reward; failed ones are counted beside it and never as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.commands.rows import Place, Refusal
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import FailureView, JobView


MOST_LINES = 40
"""Rows of a table, and refused lines, that are printed; the rest is counted."""


def best_of(rewards: Sequence[float], k: int) -> float:
    """The expected best reward of ``k`` of these rollouts, drawn without replacement.

    For rewards of 0 and 1 this is the unbiased estimator of pass@k, ``1 - C(n - c, k) / C(n, k)``; for others it needs
    no threshold. ``len(rewards)`` must be at least ``k``.
    """
    ways = comb(len(rewards), k)
    # The i-th smallest (from 0) is the best of those draws that take the others from the i below it.
    return sum(reward * (comb(i, k - 1) / ways) for i, reward in enumerate(sorted(rewards)))


def doubling(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``."""
    return [1 << power for power in range(most.bit_length())]


@dataclass
class Tally:
    """What became of the rollouts of a run so far. A row is known by its line."""

    total: int
    refused: list[Refusal] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[tuple[Place, str, FailureView]]] = field(default_factory=dict)
    rewards: dict[int, list[float]] = field(default_factory=dict)

    def add(self, place: Place, job: JobView) -> None:
        """Count one that ended."""
        self.states[job.state] += 1
        if job.failure is not None:
            self.failures.setdefault(job.failure.kind, []).append((place, job.id, job.failure))
        if job.reward is not None:
            self.rewards.setdefault(place.line, []).append(job.reward)

    @property
    def ended(self) -> int:
        """Rollouts with an outcome."""
        return self.states.total()

    @property
    def fine(self) -> bool:
        """Every rollout was scored and no row was refused."""
        return not self.refused and self.states[JobState.SUCCEEDED] == self.total

    def line(self) -> str:
        """In words."""
        parts = [f"{count} {state}" for state, count in sorted(self.states.items())]
        if count := len(self.refused):
            parts.append(f"{count} row{'s' * (count > 1)} refused")
        if scored := [reward for rewards in self.rewards.values() for reward in rewards]:
            parts.append(f"mean reward {sum(scored) / len(scored):.3f} over {len(scored)}")
        parts += [f"{kind}: {len(found)}" for kind, found in sorted(self.failures.items())]
        return ", ".join(parts) or "none ended yet"


def print_report(console: Console, tally: Tally, repeats: int) -> None:
    """The whole report."""
    if tally.rewards:
        console.print(_prompts(tally.rewards))
        if len(tally.rewards) > MOST_LINES:
            console.print(f"… and {len(tally.rewards) - MOST_LINES} more rows", style="dim")
        console.print(_pass_at(tally.rewards, repeats))
    if tally.failures:
        console.print(_failures(tally.failures))
    console.print(tally.line(), highlight=False, soft_wrap=True)


def print_refused(console: Console, file: str, refused: Sequence[Refusal]) -> None:
    """One line for each row that is not run."""
    for refusal in refused[:MOST_LINES]:
        console.print(f"{file}:{refusal.line}: {refusal.reason}", style="red", markup=False, soft_wrap=True)
    if len(refused) > MOST_LINES:
        console.print(f"… and {len(refused) - MOST_LINES} more rows", style="red")


def _prompts(rewards: Mapping[int, Sequence[float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("line", "scored", "mean", "lowest", "highest"):
        table.add_column(column, justify="right")
    for line in sorted(rewards)[:MOST_LINES]:
        of = rewards[line]
        table.add_row(str(line), str(len(of)), *(f"{value:.3f}" for value in (sum(of) / len(of), min(of), max(of))))
    return table


def _pass_at(rewards: Mapping[int, Sequence[float]], repeats: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("k", "pass@k", "rows"):
        table.add_column(column, justify="right")
    for k in doubling(repeats):
        # A row with fewer scored rollouts says nothing about k of them.
        each = [best_of(of, k) for of in rewards.values() if len(of) >= k]
        if each:
            table.add_row(str(k), f"{sum(each) / len(each):.3f}", str(len(each)))
    return table


def _failures(failures: Mapping[str, Sequence[tuple[Place, str, FailureView]]]) -> Table:
    table = Table("failure", box=None, pad_edge=False)
    table.add_column("count", justify="right")
    table.add_column("for example", overflow="fold")
    for kind, found in sorted(failures.items(), key=lambda item: -len(item[1])):
        place, rollout_id, failure = found[0]
        where = f"line {place.line}, {rollout_id}" + (f", {failure.stage}" if failure.stage else "")
        table.add_row(kind, str(len(found)), escape(f"{where}: {failure.reason[:400]}"))
    return table
