# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Result rows and result files of the benchmarks, and the headline table of the page ``README.md``.

A goal is a bound on the ratio of our figure to the peer's, both of the same run. ``python -m benchmarks.report``
rewrites the table of the page from the result files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
RESULTS = HERE / "results"
QUICK_RESULTS = RESULTS / "quick"
"""Results of ``--quick``, which git ignores."""
PAGE = HERE / "README.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NAMES = ("stack", "shell", "node", "pipeline", "journal", "agents", "tokens", "routing", "tasks", "dapo", "fleet")
LOAD_BEFORE = os.getloadavg()[0]
"""Load average of the last minute before the benchmark."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figure of this package, and the peer's figure.

    Attributes:
        name: measured quantity.
        unit: unit of both figures; empty for a ratio or a count.
        ours: figure of this package; the median of repeated measurements.
        peer: the peer's figure of the same run; ``None`` without a peer.
        against: name of the peer.
        goal: bound on ``ours / peer``, such as ``"<= 0.5"``. Only rows with a goal are in the page's table.
    """

    name: str
    unit: str
    ours: float
    peer: float | None = None
    against: str | None = None
    goal: str | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio meets the goal, which it does not without the peer's figure; ``None`` without a goal."""
        if self.goal is None:
            return None
        sign, bound = self.goal.split()
        ratio = self.ratio
        return ratio is not None and (ratio >= float(bound) if sign == ">=" else ratio <= float(bound))

    @property
    def verdict(self) -> str:
        return {None: "no goal", True: "met", False: "missed"}[self.is_met]


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options of all benchmarks; the first line of ``text`` is its description."""
    made = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="under a minute; writes to results/quick, not to the page")
    return made


def median(values: Sequence[float]) -> float:
    """Return the median; NaN without values, which meets no goal."""
    return statistics.median(values) if values else float("nan")


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def publish(name: str, rows: Sequence[Row], *, packages: Sequence[str] = ("nemo-gym",), quick: bool) -> None:
    """Print the rows and write the result file; a full run also rewrites the page's table."""
    for row in rows:
        print(_line(row))
    setting = {
        "machine": f"{os.cpu_count()} cores, {_memory_gib()} GiB, {platform.system()} {platform.machine()}",
        "load": round(LOAD_BEFORE, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tree": _tree(),
        "packages": ", ".join(
            [f"python {platform.python_version()}", *(f"{each} {_version(each)}" for each in packages)]
        ),
    }
    folder = QUICK_RESULTS if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / f"{name}.json", setting, rows)
    if not quick:
        rebuild_table()


def write(path: Path, setting: dict[str, Any], rows: Sequence[Row]) -> None:
    body = [json.dumps({**{k: _short(v) for k, v in asdict(row).items()}, "ratio": _short(row.ratio)}) for row in rows]
    head = json.dumps(setting)[:-1]
    path.write_text(head + ', "rows": [\n ' + ",\n ".join(body) + "\n]}\n")


def read(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the setting and the rows of the newest full run."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [Row(**{key: value for key, value in row.items() if key != "ratio"}) for row in document.pop("rows")]
    return document, rows


def table() -> str:
    lines = ["| bench | figure | ours | peer | ratio | goal | |", "|---|---|---|---|---|---|---|"]
    for name in NAMES:
        rows = [row for row in read(name)[1] if row.goal] if (RESULTS / f"{name}.json").exists() else []
        for row in rows:
            peer = f"{number(row.peer)} ({row.against})" if row.peer is not None else "-"
            ratio = "-" if row.ratio is None else number(row.ratio)
            verdict = f"**{row.verdict}**" if row.is_met is False else row.verdict
            ours = f"{number(row.ours)} {row.unit}".rstrip()
            lines.append(f"| {name} | {row.name} | {ours} | {peer} | {ratio} | {row.goal} | {verdict} |")
    return "\n".join(lines) + "\n" + programs_table()


def programs_table() -> str:
    """Return the table of :mod:`benchmarks.harnesses`: per program and environment, the verdict and the number of
    rollouts that worked, summed over users; empty without results."""
    rows: dict[str, dict[str, tuple[str, int, int]]] = {}
    for cell in _cells(RESULTS / "harnesses.json"):
        row = rows.setdefault(f"{cell['harness']} {cell['version']} | {cell['gym']}", {})
        verdict, works, count = row.get(cell["environment"], (cell["verdict"], 0, 0))
        verdict = verdict if verdict == cell["verdict"] else "unstable"
        row[cell["environment"]] = verdict, works + cell["works"], count + cell["rollouts"]
    names = sorted({name for row in rows.values() for name in row})
    lines = ["", f"| program | Gym | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for key, row in sorted(rows.items()):
        lines.append(f"| {key} | {' | '.join('{}, {}/{}'.format(*row.get(one, ('-', 0, 0))) for one in names)} |")
    return "\n".join(lines) + "\n" if rows else ""


def rebuild_table() -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + rest.partition(END)[2])


def publish_cell(cell: dict[str, Any], *, quick: bool) -> None:
    """Write a cell of :mod:`benchmarks.harnesses` instead of that of the same program, environment, Gym and user."""
    path = (QUICK_RESULTS if quick else RESULTS) / "harnesses.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    key = itemgetter("harness", "environment", "gym", "user")
    cell = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "tree": _tree(), **cell}
    cells = sorted([*(one for one in _cells(path) if key(one) != key(cell)), cell], key=key)
    path.write_text("[\n " + ",\n ".join(map(json.dumps, cells)) + "\n]\n")
    if not quick:
        rebuild_table()


def _cells(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path.exists() else []


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(row: Row) -> str:
    peer = f" | {row.against}: {number(row.peer)} | ratio {number(row.ratio or 0.0)}" if row.peer is not None else ""
    return f"{row.name}: {number(row.ours)} {row.unit}{peer} | goal {row.goal or '-'}: {row.verdict}"


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _tree() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    return done.stdout.strip() or "unknown"


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


if __name__ == "__main__":
    rebuild_table()
