# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What every benchmark writes: ``results/<name>.json``, and from all of them the page ``README.md``.

A goal that was missed stays in the table as missed. Run as a program (``make bench-report``), it writes the page anew.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


LOAD_BEFORE = os.getloadavg()[0]
"""What the machine had to do before this benchmark: its average load of a minute, in processes."""
HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "README.md"

_HEAD = """# Benchmarks

`make bench-NAME` measures this package and the named peers in the same run and rewrites `results/NAME.json` and this
page; `make bench-NAME ARGS=--quick` takes minutes and writes nothing. `make bench-report` writes the page anew from
the results that are there. Where there were several runs a figure is their median, with the lowest and the highest in
brackets (or an interval, where the text says so); goals are held against the figure itself. The load is that of others
at the start: what they left was measured.
"""


@dataclass
class Figure:
    """One measured figure.

    Attributes:
        name: what was measured.
        value: ours.
        unit: of the value and of the peers'.
        goal: e.g. ``">= 0.95"``; compared with the value, or with what ``goal_value`` says.
        goal_value: the number that the goal speaks of, where that is not the value itself (a ratio, say).
        peers: the same figure of others, measured in the same run.
        interval: the lowest and the highest of several runs, or an interval of confidence.
        peer_intervals: those of peers.
        goal_interval: half the width of the 95 % confidence interval of what the goal speaks of.
        undecided: the goal was not reached, but that interval does not lie beyond it either. Only where a benchmark
            says beforehand that it judges so.
    """

    name: str
    value: float
    unit: str
    goal: str | None = None
    goal_value: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    peer_intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    goal_interval: float | None = None
    undecided: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        runs: Sequence[float],
        unit: str,
        goal: str | None = None,
        peers: Mapping[str, Sequence[float]] | None = None,
    ) -> Figure:
        """The median of several runs, with the lowest and the highest; of peers likewise."""
        peers = peers or {}
        return cls(
            name,
            statistics.median(runs),
            unit,
            goal,
            peers={peer: statistics.median(theirs) for peer, theirs in peers.items()},
            interval=_spread(runs),
            peer_intervals={peer: spread for peer, theirs in peers.items() if (spread := _spread(theirs))},
        )

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; ``None`` without one, or where that is undecided."""
        if self.goal is None or self.undecided:
            return None
        sign, bound = self.goal.split()
        judged = self.value if self.goal_value is None else self.goal_value
        return judged >= float(bound) if sign == ">=" else judged <= float(bound)


def publish(name: str, figures: list[Figure], *, packages: tuple[str, ...] = ("nemo-gym",), quick: bool) -> None:
    """Print the figures; unless the run was a quick one, write them and rebuild the page."""
    print(_table(figures))
    if quick:
        return
    versions = {"python": platform.python_version()} | {package: _version(package) for package in packages}
    document = {
        "machine": f"{os.cpu_count()} cores, {_memory_gib()} GiB, {platform.system()} {platform.machine()}, "
        f"load {LOAD_BEFORE:.1f} before",
        "versions": versions,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    rebuild_page()


def published(name: str) -> dict[str, Figure]:
    """The committed figures of a benchmark, by their name."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    return {figure.name: figure for figure in _figures(document)}


def rebuild_page() -> None:
    """Write ``README.md`` from all results; each begins with the first lines of its benchmark's own description."""
    parts = [_HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        about = ", ".join(f"{package} {number}" for package, number in document["versions"].items())
        figures = _figures(document)
        source = ast.parse((HERE / f"{path.stem}.py").read_text())
        what = (ast.get_docstring(source) or "").replace("``", "`")
        paragraphs = [part for part in what.split("\n\n") if not part.startswith(("Run with", "Run:"))]
        text = "\n\n".join(paragraphs)
        parts.append(f"## {path.stem}\n\n{text}\n\n{document['machine']}; {about}\n\n{_table(figures)}\n")
    PAGE.write_text("\n".join(parts))


def _figures(document: dict[str, Any]) -> list[Figure]:
    entries = ({key: value for key, value in entry.items() if key != "met"} for entry in document["figures"])
    return [Figure(**entry) for entry in entries]


def _table(figures: list[Figure]) -> str:
    lines = ["| figure | ours | peers | goal | met |", "|---|---|---|---|---|"]
    for figure in figures:
        theirs = [
            f"{n}: {_number(value)}{_between(figure.peer_intervals.get(n))}" for n, value in figure.peers.items()
        ]
        goal = figure.goal or "—"
        if figure.goal_value is not None:
            spread = "" if figure.goal_interval is None else f" ± {figure.goal_interval:.2g}"
            goal += f" (is {_number(figure.goal_value)}{spread})"
        met = "undecided" if figure.undecided else {True: "yes", False: "**missed**", None: "—"}[figure.met]
        ours = f"{_number(figure.value)}{_between(figure.interval)} {figure.unit}".rstrip()
        lines.append(f"| {figure.name} | {ours} | {', '.join(theirs) or '—'} | {goal} | {met} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _between(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({_number(interval[0])} – {_number(interval[1])})"


def _spread(runs: Sequence[float]) -> tuple[float, float] | None:
    return (min(runs), max(runs)) if len(runs) > 1 else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


if __name__ == "__main__":
    rebuild_page()
