# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, which nobody runs every day, at least find what they need, and report what they found."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import asdict
from pathlib import Path

import pytest

import benchmarks
from benchmarks import agents, humaneval, report, tokens
from benchmarks.keep_alive import KeepAliveClient
from benchmarks.model_agents import EchoingAgent
from benchmarks.model_servers import OURS, PEER
from benchmarks.report import Figure
from nemo_gym_prorl.tasks.code.rows import problems


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py")))
def test_a_benchmark_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("played", humaneval.GOALS)
def test_what_humaneval_plays_is_there(played: str) -> None:
    problem = next(iter(problems().values()))
    assert humaneval.script_for(problem, played)


def test_several_runs_are_told_as_their_median_and_spread(capsys: pytest.CaptureFixture[str]) -> None:
    figure = Figure.of("a turn", [3.0, 1.0, 2.0], "ms", "<= 1.5", {"peer": [7.0, 5.0, 6.0], "once": [4.0]})
    assert (figure.value, figure.interval, figure.met) == (2.0, (1.0, 3.0), False)
    assert Figure(**asdict(figure)) == figure
    report.publish("any", [figure], quick=True)
    assert "| a turn | 2 (1 – 3) ms | peer: 6 (5 – 7), once: 4 | <= 1.5 | **missed** |" in capsys.readouterr().out


def test_a_result_says_how_busy_the_machine_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "README.md")
    monkeypatch.setattr(report, "LOAD_BEFORE", 7.25)
    report.publish("node", [Figure("any", 1.0, "s")], quick=False)
    assert ", load 7.2 before; python" in (tmp_path / "README.md").read_text()


def test_the_page_is_what_the_results_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = report.PAGE.read_text()
    monkeypatch.setattr(report, "PAGE", tmp_path / "README.md")
    report.rebuild_page()
    assert (tmp_path / "README.md").read_text() == there, "run: make bench-report"


def test_a_turn_is_judged_at_its_length() -> None:
    """What is told of a length is taken where the prompt has it, not over the way there."""
    shared = tokens.Played(cpu=[0.001 * turn for turn in range(100)], context=[640.0 * turn for turn in range(100)])
    assert shared.at(64_000, shared.cpu) == pytest.approx(0.0985)
    assert shared.at(1_920, shared.cpu) == pytest.approx(0.003)


@pytest.mark.long("four processes of servers that a benchmark measures; what they answer is asked in tests/policy")
async def test_agents_of_both_servers_are_answered() -> None:
    """Real servers over the stand-in engine, whose answers both take for vLLM's."""
    figures = {figure.name: figure for figure in await agents.measure(agents.Scale(4, 3, 2, 0.1), servers=2)}
    errors = [figure for name, figure in figures.items() if "errors" in name]
    assert [figure.value for figure in errors] == [0, 0]
    cost = figures["server CPU per turn"]
    assert cost.value > 0, OURS
    assert cost.peers[PEER] > 0


async def test_what_agents_cannot_go_on_with_is_an_error() -> None:
    """A server that refuses is not measured as a fast one."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno")

    server = await asyncio.start_server(refuse, "127.0.0.1")
    client = KeepAliveClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ValueError, match="answered 500: b'no'"):
        await EchoingAgent(client, ["hello"]).turn()
    client.close()
    server.close()
