# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The report of a run, for a person: counts, failures by cause, a histogram of rewards, pass@k.

Only rollouts that were scored have a reward; failed ones are counted beside it and never as 0. Failures have one cause
if kind, stage and reason agree, apart from what tells one rollout from another in the reason: ids, numbers, names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.cli.rows import Place, Refusal
from nemo_gym_prorl.cli.show import visible
from nemo_gym_prorl.rollout.api.schemas import FailureView, JobView
from nemo_gym_prorl.rollout.job import JobState


MAX_CAUSES = 20
"""Causes that are printed with an example; the rest is counted."""

_REASON_CHARS = 400
_MAX_BARS = 10
"""Distinct rewards that have a bar each; more are sorted into as many intervals."""
_BAR_CHARS = 40

_WORD = r"[^\s,;:=()\[\]]"
_DIFFERS = re.compile(rf"""(?<!\w)(?:'[^']*'|"[^"]*")|(?<!{_WORD})(?<!HTTP ){_WORD}*\d{_WORD}*""")
"""Of a reason, what may differ between failures of one cause: quoted text, and words with a digit but for statuses."""


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
    failures: list[tuple[Place, str, FailureView]] = field(default_factory=list)
    rewards: dict[int, list[float]] = field(default_factory=dict)

    def add(self, place: Place, job: JobView) -> None:
        """Count one that ended."""
        self.states[job.state] += 1
        if job.failure is not None:
            self.failures.append((place, job.id, job.failure))
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
        kinds = Counter(str(failure.kind) for _, _, failure in self.failures)
        parts += [f"{kind}: {count}" for kind, count in sorted(kinds.items())]
        return ", ".join(parts) or "none ended yet"


def causes[T](found: Iterable[T], reason_of: Callable[[T], tuple[str, ...]]) -> list[list[T]]:
    """``found``, one list for each cause, the most frequent first.

    Args:
        found: what went wrong.
        reason_of: its names, and its reason as the last one.
    """
    by_cause: dict[tuple[str, ...], list[T]] = {}
    for one in found:
        *names, reason = reason_of(one)
        by_cause.setdefault((*names, _DIFFERS.sub("#", reason)[:_REASON_CHARS]), []).append(one)
    return sorted(by_cause.values(), key=len, reverse=True)


def print_report(console: Console, tally: Tally, repeats: int) -> None:
    """The whole report."""
    if tally.rewards:
        console.print(_histogram([reward for of in tally.rewards.values() for reward in of]))
        if repeats > 1:
            alike = sum(len(set(of)) == 1 for of in tally.rewards.values() if len(of) > 1)
            console.print(f"{alike} of {len(tally.rewards)} rows have one reward in all their rollouts", style="dim")
        console.print(_pass_at(tally.rewards, repeats))
    if tally.failures:
        _print_failures(console, tally.failures)
    console.print(tally.line(), highlight=False, soft_wrap=True)


def print_refused(console: Console, file: str, refused: Sequence[Refusal]) -> None:
    """One line for each cause for which rows are not run."""
    found = causes(refused, lambda refusal: (refusal.reason,))
    for alike in found[:MAX_CAUSES]:
        first, more = alike[0], len(alike) - 1
        lines = ", ".join(str(refusal.line) for refusal in alike[1:6]) + ", …" * (more > 5)
        like_it = f" (and {more} more row{'s' * (more > 1)} like it: {lines})" if more else ""
        console.print(f"{file}:{first.line}: {first.reason}{like_it}", style="red", markup=False, soft_wrap=True)
    _print_rest(console, found)


def _print_rest(console: Console, found: Sequence[Sequence[object]]) -> None:
    if rest := found[MAX_CAUSES:]:
        console.print(f"… and {len(rest)} more causes, {sum(map(len, rest))} in all", style="red", highlight=False)


def _histogram(rewards: Sequence[float]) -> Table:
    """A bar for each reward, or for each of equal intervals between the lowest and the highest one."""
    counts: Counter[float] = Counter(rewards)
    bars = [(f"{reward:.6g}", count) for reward, count in sorted(counts.items())]
    if len(counts) > _MAX_BARS:
        lowest, width = min(counts), (max(counts) - min(counts)) / _MAX_BARS
        filled = Counter(min(int((reward - lowest) / width), _MAX_BARS - 1) for reward in rewards)
        edges = [f"{lowest + width * place:.3g}" for place in range(_MAX_BARS + 1)]
        bars = [(f"{edges[place]} … {edges[place + 1]}", filled[place]) for place in range(_MAX_BARS)]
    table = Table(box=None, pad_edge=False)
    for column in ("reward", "rollouts"):
        table.add_column(column, justify="right")
    table.add_column("")
    most = max(count for _, count in bars)
    for name, count in bars:
        table.add_row(name, str(count), "█" * -(-count * _BAR_CHARS // most))
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


def _print_failures(console: Console, failures: Sequence[tuple[Place, str, FailureView]]) -> None:
    """By cause, with one example each."""
    found = causes(failures, lambda one: (one[2].kind, one[2].stage or "", one[2].reason))
    table = Table("failure", "stage", box=None, pad_edge=False)
    table.add_column("count", justify="right")
    table.add_column("for example", overflow="fold")
    for alike in found[:MAX_CAUSES]:
        place, rollout_id, failure = alike[0]
        reason = failure.reason[:_REASON_CHARS] + "…" * (len(failure.reason) > _REASON_CHARS)
        where = f"line {place.line}, {rollout_id}: {reason}"
        table.add_row(failure.kind, failure.stage or "", str(len(alike)), escape(visible(where)))
    console.print(table)
    _print_rest(console, found)
