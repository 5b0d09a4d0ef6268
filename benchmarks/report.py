# SPDX-License-Identifier: Apache-2.0
"""What every benchmark writes: ``results/<name>.json``, and from all of them the tables in ``README.md``.

A goal that was missed stays in the table as missed.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


HERE = Path(__file__).parent
RESULTS = HERE / "results"

_HEAD = """# Benchmarks

`make bench-NAME` measures this package and the named peers in the same run and rewrites `results/NAME.json` and this
page; `make bench-NAME ARGS=--quick` takes under a minute and writes nothing.
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
    """

    name: str
    value: float
    unit: str
    goal: str | None = None
    goal_value: float | None = None
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; ``None`` without one."""
        if self.goal is None:
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
        "machine": f"{os.cpu_count()} cores, {_memory_gib()} GiB, {platform.system()} {platform.machine()}",
        "versions": versions,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    _rebuild_page()


def _rebuild_page() -> None:
    parts = [_HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        about = ", ".join(f"{package} {number}" for package, number in document["versions"].items())
        figures = []
        for entry in document["figures"]:
            entry.pop("met")
            figures.append(Figure(**entry))
        parts.append(f"## {path.stem}\n\n{document['machine']}; {about}\n\n{_table(figures)}\n")
    (HERE / "README.md").write_text("\n".join(parts))


def _table(figures: list[Figure]) -> str:
    lines = ["| figure | ours | peers | goal | met |", "|---|---|---|---|---|"]
    for figure in figures:
        peers = ", ".join(f"{name}: {_number(value)}" for name, value in figure.peers.items()) or "—"
        goal = figure.goal or "—"
        if figure.goal_value is not None:
            goal += f" (is {_number(figure.goal_value)})"
        met = {True: "yes", False: "**missed**", None: "—"}[figure.met]
        lines.append(f"| {figure.name} | {_number(figure.value)} {figure.unit} | {peers} | {goal} | {met} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
