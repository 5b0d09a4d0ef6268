# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What each part is worth: the stack without one of them at a time, as in ProRL's Table 3, on a simulated clock.

Decisions are those of the real ``DynamicSampler``, ``StageScheduler`` and ``BackendPool``, on 8 engines, for batches
of 32 groups of 8, with 64 slots of INIT, 256 of RUN, 64 of EVAL, and 64 sandboxes that wait in READY. All rows of a
seed meet the same rollouts. The rows, each the full stack but for one thing: no load balancing (every turn to the next
engine, or every rollout to the engine that its hash says, wherever the load is); a process per command instead of a
persistent shell (ours, or that of Gym's ``apptainer`` provider; the paper's is tmux); no early termination (what the
sampler calls off runs to its end, in its slot); synchronous rounds instead of the sampler, of 3 batches of prompts,
the best of those in bench-dapo for heavy tails, groups of 8 and 50 % informative prompts. Once with 4 versions of
staleness, the sampler's default, and once strictly on-policy, which is closest to the paper's; rounds are on-policy
always.

Measured, and read from the results beside this page: the shell's latencies (shell: p50 and p99, log-normal between
them), a sandbox's INIT and EVAL (tasks: means of its software-engineering rollouts), and from a cancel until the
sandbox is gone (early_termination: the median).

Assumed, once and before there was a result: the engines (12,000 prompt tokens a second; a decoding step of 12 ms and
0.6 ms for each further request; 400,000 tokens of KV cache; prefill halves decoding) and the rollouts (turns in the
median 10, tool calls 1.5 s, 300 tokens read and 120 written a turn, all with heavy tails) are those of bench-routing.
Half of the prompts are informative, as in bench-dapo. The trainer has GPUs of its own and learns from 28,000 tokens a
second (14 billion parameters, 8 operations for each and a token, 8 GPUs of 989 teraflop/s at 40 %); new weights are at
the engines 10 s later, which go on meanwhile and then have no prefix cached. Network, service and model server take no
time.

Of use are rollouts of batches and of groups which turned out to have no variance; wasted are all others that had begun
RUN. An engine is busy while it has a request. Ours are medians over seeds. The paper's are of 8 H100s with a 14 B
model, its own engines, tasks and tools, GPU utilisation instead of busy engines and instances instead of rollouts:
what can be held against ours is the direction and the ratio, not the figure. It has neither rounds nor other figures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from benchmarks.report import Figure, publish, published
from benchmarks.routers import Ours, RoundRobin, SessionHash
from benchmarks.stack import Latency, Stack, Sums, Times, Variant, Work
from nemo_gym_prorl.rollout.scheduler import PoolSizes


WORK = Work(32, 8, 0.5, PoolSizes(init=64, ready=64, run=256, eval=64), engines=8, capacity=400_000)
TRAIN_TOKENS = 28_000.0
REFIT_S = 10.0
ROUNDS = 3
STALENESS = {"staleness 4": 4, "on-policy": 0}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run.

    Attributes:
        work: of every row.
        warm_up: steps that are not counted: engines are empty at first.
        steps: that are.
        seeds: of every row.
    """

    work: Work
    warm_up: int
    steps: int
    seeds: tuple[int, ...]


WHOLE = Scale(WORK, warm_up=3, steps=6, seeds=(201, 202, 203))
QUARTER = replace(WORK, groups=8, pools=PoolSizes(init=16, ready=16, run=64, eval=16), engines=2)
QUICK = Scale(QUARTER, warm_up=1, steps=2, seeds=(201,))

FULL = "full"
NO_BALANCE = ("no load balancing, round robin", "no load balancing, by hash")
OUR_EXEC, GYM_EXEC = "a process per command", "a process per command, Gym's provider"
NO_STOP = "no early termination"
SYNCHRONOUS = "synchronous rounds"


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the paper's Table 3."""

    action_s: float
    gpu: float
    per_s: float


PAPER = "ProRL's paper"
_PAPERS_NO_BALANCE = Published(0.42, 0.42, 0.25)
_PAPERS_EXEC = Published(0.78, 0.68, 0.29)
TABLE_3 = {
    FULL: Published(0.42, 0.78, 0.37),
    **dict.fromkeys(NO_BALANCE, _PAPERS_NO_BALANCE),
    OUR_EXEC: _PAPERS_EXEC,
    GYM_EXEC: _PAPERS_EXEC,
    NO_STOP: Published(0.42, 0.65, 0.30),
}
"""Rows that it lacks are not there."""
SHELLS = (FULL, OUR_EXEC, GYM_EXEC)
"""The rows that differ in the shell."""


def measured_times() -> Times:
    """Of sandboxes, as the committed results have them."""
    tasks, cancels = published("tasks"), published("early_termination")
    return Times(
        init_s=tasks["of these, policy: INIT"].value,
        eval_s=tasks["of these, grading: EVAL"].value,
        release_s=cancels["the same, median"].value,
        train_tokens=TRAIN_TOKENS,
        refit_s=REFIT_S,
    )


def measured_shell(peer: str | None = None) -> Latency:
    """What a shell action takes beyond its command: in our persistent shell, or a peer's way."""
    figures = published("shell")
    p50, p99 = (figures[f"shell action, {quantile}"] for quantile in ("p50", "p99"))
    if peer is None:
        return Latency(p50.value / 1e3, p99.value / 1e3)
    return Latency(p50.peers[peer] / 1e3, p99.peers[peer] / 1e3)


def variants(staleness: int) -> dict[str, Variant]:
    """The rows."""
    full = Variant(Ours, measured_shell(), staleness)
    return {
        FULL: full,
        NO_BALANCE[0]: replace(full, router=RoundRobin),
        NO_BALANCE[1]: replace(full, router=SessionHash),
        OUR_EXEC: replace(full, shell=measured_shell("our exec")),
        GYM_EXEC: replace(full, shell=measured_shell("Gym apptainer")),
        NO_STOP: replace(full, cancels=False),
        SYNCHRONOUS: replace(full, rounds=ROUNDS),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """What one variant came to under one seed, after its warm-up."""

    step_s: float
    busy: float
    wasted: float
    wasted_time: float
    per_hour: float
    hit_rate: float
    action_s: float
    shell_ms: float


def row(begin: Sums, end: Sums, steps: int, engines: int) -> Row:
    """Of the steps between."""
    seconds = end.now - begin.now
    of_use, wasted = end.of_use - begin.of_use, end.wasted - begin.wasted
    of_use_s, wasted_s = end.of_use_s - begin.of_use_s, end.wasted_s - begin.wasted_s
    actions = end.actions - begin.actions
    return Row(
        step_s=seconds / steps,
        busy=(end.busy_s - begin.busy_s) / (seconds * engines),
        wasted=wasted / (of_use + wasted),
        wasted_time=wasted_s / (of_use_s + wasted_s),
        per_hour=of_use / seconds * 3600,
        hit_rate=(end.hits - begin.hits) / (end.prompts - begin.prompts),
        action_s=(end.actions_s - begin.actions_s) / actions,
        shell_ms=(end.shell_s - begin.shell_s) / actions * 1e3,
    )


def trained(variant: Variant, scale: Scale, seed: int) -> Row:
    """One variant under one seed."""
    sums = Stack(variant, scale.work, measured_times(), seed).steps(scale.warm_up + scale.steps)
    return row(sums[scale.warm_up - 1], sums[-1], scale.steps, scale.work.engines)


def ablation(scale: Scale) -> list[Figure]:
    """The table, a column after the other."""
    rows = {(setting, name): each for setting, lag in STALENESS.items() for name, each in variants(lag).items()}
    del rows["staleness 4", SYNCHRONOUS]  # there is no staleness in rounds
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as processes:
        jobs = [(variant, scale, seed) for variant in rows.values() for seed in scale.seeds]
        done = iter(processes.map(trained, *zip(*jobs, strict=True)))
        results = {key: list(itertools.islice(done, len(scale.seeds))) for key in rows}
    figures = []
    for setting in STALENESS:
        own = {name: runs for (of, name), runs in results.items() if of == setting}
        own.setdefault(SYNCHRONOUS, results["on-policy", SYNCHRONOUS])
        figures += table(setting, own)
    return figures


def table(setting: str, rows: dict[str, list[Row]]) -> list[Figure]:
    """All columns of one setting; ratios are those of means."""

    def mean(name: str, of: Callable[[Row], float]) -> float:
        return statistics.fmean(of(run) for run in rows[name])

    def column(
        text: str,
        unit: str,
        of: Callable[[Row], float],
        papers: Callable[[Published], float] | None = None,
        names: Iterable[str] = tuple(rows),
    ) -> Iterator[Figure]:
        for name in names:
            runs = rows[name]
            theirs = {PAPER: [papers(TABLE_3[name])]} if papers and name in TABLE_3 else None
            yield Figure.of(f"{setting}, {text}: {name}", [of(run) for run in runs], unit, peers=theirs)

    def over_full(
        text: str, of: Callable[[Row], float], papers: Callable[[Published], float] | None = None
    ) -> Iterator[Figure]:
        for name in list(rows)[1:]:
            theirs = {PAPER: papers(TABLE_3[name]) / papers(TABLE_3[FULL])} if papers and name in TABLE_3 else {}
            yield Figure(f"{setting}, {text}, over full's: {name}", mean(name, of) / mean(FULL, of), "", peers=theirs)

    return [
        *column("seconds per step", "s", lambda run: run.step_s),
        *over_full("seconds per step", lambda run: run.step_s),
        *column("rollouts of use per hour", "", lambda run: run.per_hour, lambda theirs: theirs.per_s * 3600),
        *over_full("rollouts of use per hour", lambda run: run.per_hour, lambda theirs: theirs.per_s),
        *column("engines busy", "", lambda run: run.busy, lambda theirs: theirs.gpu),
        *column("rollouts wasted", "", lambda run: run.wasted),
        *column("time in slots wasted", "", lambda run: run.wasted_time),
        *column("prompt tokens cached", "", lambda run: run.hit_rate),
        *column("shell action, mean", "s", lambda run: run.action_s, lambda theirs: theirs.action_s, SHELLS),
        *column("of it the shell itself", "ms", lambda run: run.shell_ms, names=SHELLS),
    ]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="what each part of the stack is worth, on a simulated clock")
    parser.add_argument("--quick", action="store_true", help="a quarter of everything, one seed; write nothing")
    quick = parser.parse_args().quick
    publish("ablation", ablation(QUICK if quick else WHOLE), packages=(), quick=quick)


if __name__ == "__main__":
    main()
