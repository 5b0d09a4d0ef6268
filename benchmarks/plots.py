# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Draw the three plots of the page from the results: ``python -m benchmarks.plots`` writes ``results/*.svg``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks import report
from benchmarks.report import NAMES, RESULTS, Row, number


OURS, PEER, MISSED, INK, FAINT = "#0b7a75", "#b8860b", "#b3261e", "#333", "#ddd"
COLOURS = (OURS, "#5b4b9a", PEER, "#777")
WIDTH, LEFT, RIGHT, LINE = 900, 400, 190, 20
TOP, BOTTOM = 50, 300
"""Edges of a line chart, in pixels."""

Curves = Mapping[str, Sequence[tuple[float, float]]]


def drawings() -> dict[str, str]:
    rows = {name: report.read(name)[1] for name in NAMES if (RESULTS / f"{name}.json").exists()}
    return {
        "ratios.svg": ratios([(name, row) for name, each in rows.items() for row in each if row.goal and row.ratio]),
        "tokens.svg": lines("Server CPU per turn", "tokens of context", "ms", turns(rows.get("tokens", []))),
        "dapo.svg": lines("Seconds per step, heavy tail", "staleness + 1", "s", steps(rows.get("dapo", []))),
    }


def turns(rows: Sequence[Row]) -> Curves:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.name.startswith("server CPU") and row.peer is not None:
            _, length, case = row.name.split(", ")
            tokens = 1000 * float(length.split("k")[0])
            found.setdefault(f"prorl_model, {case}", []).append((tokens, row.ours))
            if case == "shared":
                found.setdefault(str(row.against), []).append((tokens, row.peer))
    return found


def steps(rows: Sequence[Row]) -> Curves:
    found: dict[str, list[tuple[float, float]]] = {"ours": []}
    for row in rows:
        if row.name.startswith("seconds per step, heavy tail") and row.against != "bound" and row.peer:
            versions = 1 + float(row.name.rsplit(" ", 1)[1])
            if (versions, row.ours) not in found["ours"]:
                found["ours"].append((versions, row.ours))
            found.setdefault(str(row.against), []).append((versions, row.peer))
    return found


def ratios(rows: Sequence[tuple[str, Row]]) -> str:
    """Return a bar chart: per goal, the factor by which this package beats the peer (logarithmic), with the goal as a
    tick."""
    bars = []
    for name, row in rows:
        assert row.goal is not None
        assert row.ratio is not None
        sign, bound = row.goal.split()
        better, wanted = row.ratio, float(bound)
        if sign == "<=":
            better, wanted = 1 / better, 1 / wanted
        bars.append((f"{name}: {row.name}", str(row.against), better, wanted, bool(row.is_met)))
    top = max([10.0, *(value for *_, better, wanted, _ in bars for value in (better, wanted))])
    low = min([0.5, *(better for *_, better, _, _ in bars)])
    scale = (WIDTH - LEFT - RIGHT) / math.log(top / low)

    def x_of(value: float) -> float:
        return LEFT + scale * math.log(value / low)

    parts = [_text(10, 20, "Times better than the peer (tick: goal; red: missed)", size=15)]
    for index, (label, against, better, wanted, is_met) in enumerate(bars):
        y, begin, end = 40 + LINE * index, *sorted((x_of(1), x_of(better)))
        colour = OURS if is_met else MISSED
        parts.append(
            f'<rect x="{begin:.0f}" y="{y}" width="{max(2, end - begin):.0f}" height="12" fill="{colour}"/>'
            f'<rect x="{x_of(wanted) - 1:.0f}" y="{y - 3}" width="2" height="18" fill="{INK}"/>'
            + _text(LEFT - 6, y + 11, label, anchor="end")
            + _text(max(x_of(better), x_of(wanted)) + 6, y + 11, f"{number(better)} ({against})")
        )
    return _svg(50 + LINE * len(bars), parts)


def lines(title: str, below: str, unit: str, curves: Curves) -> str:
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return _svg(60, [_text(10, 20, f"{title}: not run", size=15)])
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points) / 1.5, max(y for _, y in points) * 1.5

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_low) / math.log(x_high / x_low) if x_high > x_low else 0.5
        up = math.log(y / y_low) / math.log(y_high / y_low)
        return 60 + across * (WIDTH - 380), BOTTOM - up * (BOTTOM - TOP)

    parts = [_text(10, 20, f"{title} ({unit}, logarithmic)", size=15)]
    parts += [_text(at(x, y_low)[0], BOTTOM + 18, number(x), anchor="middle") for x in sorted({x for x, _ in points})]
    parts.append(_text(60, BOTTOM + 38, below) + f'<path d="M60 {BOTTOM}H{WIDTH - 320}" stroke="{FAINT}"/>')
    ends = sorted((at(*sorted(curve)[-1])[1], name) for name, curve in curves.items())
    label_y: dict[str, float] = {}
    for y, name in ends:
        label_y[name] = max([y, *(before + 16 for before in label_y.values())])
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        placed = [at(*point) for point in sorted(curve)]
        path = "L".join(f"{x:.0f} {y:.0f}" for x, y in placed)
        marks = "".join(
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>'
            + _text(x, y - 7, number(value), anchor="middle")
            for (x, y), (_, value) in zip(placed, sorted(curve), strict=True)
        )
        label = _text(placed[-1][0] + 24, label_y[name] + 4, name, colour=colour)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>{marks}{label}')
    return _svg(BOTTOM + 50, parts)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = INK) -> str:
    attributes = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {attributes}>{escape(text)}</text>"


def _svg(height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "".join([head, back, *parts, "</svg>\n"])


if __name__ == "__main__":
    for file, text in drawings().items():
        (RESULTS / file).write_text(text)
