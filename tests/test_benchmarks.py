# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks import, report what they measured, and judge goals by the ratio to the peer."""

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path

import pytest

import benchmarks
from benchmarks import agents, plots, report, tokens
from benchmarks.model_agents import EchoingAgent, KeepAliveClient
from benchmarks.report import Row


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py")))
def test_a_benchmark_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("a", "ms", 1.0, 4.0, "peer", "<= 0.25"), "met"),
        (Row("a", "ms", 1.1, 4.0, "peer", "<= 0.25"), "missed"),
        (Row("a", "1/s", 8.0, 4.0, "peer", ">= 2"), "met"),
        (Row("a", "1/s", 7.9, 4.0, "peer", ">= 2"), "missed"),
        (Row("a", "ms", float("nan"), 4.0, "peer", "<= 1"), "missed"),
        (Row("a", "ms", 1.0, None, "peer", "<= 1"), "missed"),
        (Row("a", "ms", 1.0, 4.0, "peer"), "no goal"),
    ],
)
def test_a_goal_is_judged_by_the_ratio(row: Row, verdict: str) -> None:
    assert row.verdict == verdict


@pytest.mark.parametrize("quick", [True, False])
def test_a_run_is_written_and_only_a_full_one_changes_the_table(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}old\n{report.END}after\n")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "QUICK_RESULTS", tmp_path / "quick")
    monkeypatch.setattr(report, "PAGE", page)
    rows = [Row("start", "ms", 3.0, 2.0, "peer", "<= 1"), Row("end", "ms", 5.0)]
    report.publish("shell", rows, quick=quick)
    if quick:
        assert (tmp_path / "quick" / "shell.json").exists()
        assert "old" in page.read_text()
        return
    setting, read = report.read("shell")
    assert read == rows
    assert {"machine", "load", "date", "tree", "packages"} <= setting.keys()
    line = "| shell | start | 3 ms | 2 (peer) | 1.5 | <= 1 | **missed** |"
    assert page.read_text() == f"before\n{report.BEGIN}{report.table()}{report.END}after\n"
    assert page.read_text().splitlines()[4] == line


def test_the_page_and_the_plots_are_those_of_the_results() -> None:
    assert report.table() in report.PAGE.read_text(), "run: python -m benchmarks.report"
    for name, text in plots.drawings().items():
        assert (report.RESULTS / name).read_text() == text, "run: python -m benchmarks.plots"


def test_the_page_is_short() -> None:
    prose = re.sub(r"[|*`]", " ", report.PAGE.read_text())
    assert len(prose.split()) <= 1500


def test_a_turn_is_judged_at_its_length() -> None:
    shared = tokens.Played(cpu=[0.001 * turn for turn in range(100)], context=[640.0 * turn for turn in range(100)])
    assert shared.at(64_000, shared.cpu) == pytest.approx(0.0985)
    assert shared.at(1_920, shared.cpu) == pytest.approx(0.003)


@pytest.mark.long("three processes of servers that a benchmark measures; their answers are tested in tests/policy")
async def test_agents_of_both_servers_are_answered() -> None:
    rows = {row.name: row for row in await agents.measure(agents.Scale(4, 3, 2, 0.1, 1))}
    failed = rows["rollouts of 4 that failed"]
    assert (failed.ours, failed.peer) == (0, 0)
    cost = next(row for name, row in rows.items() if name.startswith("server CPU"))
    assert cost.ours > 0
    assert cost.peer
    assert cost.peer > 0


async def test_an_answer_that_agents_cannot_use_is_an_error() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno")

    server = await asyncio.start_server(refuse, "127.0.0.1")
    client = KeepAliveClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ValueError, match="answered 500: b'no'"):
        await EchoingAgent(client, ["hello"]).turn()
    client.close()
    server.close()
