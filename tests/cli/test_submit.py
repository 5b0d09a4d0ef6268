# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl submit``: every row gets exactly one outcome. Services, processes and signals are real."""

import asyncio
import io
import json
import signal
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nemo_gym_prorl.cli.submit import SubmitOptions, submit
from nemo_gym_prorl.cli.submit_report import RowRepeat, RunSummary, pass_at_k, print_report
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Origin, Stage
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import FailureView
from tests.cli.command_line import DEFECT, GOOD, LONG, TOKEN, begin, prorl, service, write
from tests.rollout.handlers import Bench
from tests.rollout.standalone import standalone


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def started(bench: Bench) -> dict[str, int]:
    """How often each rollout has begun, by id."""
    return {rollout: count for (rollout, what), count in bench.handler.calls.items() if what == "init"}


async def until_running(url: str, count: int) -> None:
    async with asyncio.timeout(60), RolloutClient(url, TOKEN) as client:
        while (await client.status()).states["running"] < count:
            await asyncio.sleep(0.05)


# -- rows and results ------------------------------------------------------------------------------------------------


async def test_rows_go_to_the_environment_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD)
    async with service() as (url, bench):
        assert await submit(SubmitOptions(rows, run="right", environment=bench.handler.name), url, TOKEN)
        assert not await submit(SubmitOptions(rows, run="wrong", environment="nope"), url, TOKEN)
        assert "environment: no environment 'nope'" in " ".join(capsys.readouterr().out.split())
        assert list(started(bench)) == ["right-1-0"]


async def test_each_refused_row_is_named_by_its_line_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD, "{oops", {"task_id": 7}, "", "[1]", '{"a": "\\ud800"}', GOOD)
    write(rows, *rows.read_text().splitlines(), GOOD | {"rollout": {"priority": "high"}})
    write(rows, *rows.read_text().splitlines(), GOOD | {"verifier_metadata": {"inputs": [[10**29]]}})
    output = tmp_path / "not" / "there" / "results.jsonl"
    async with service() as (url, bench):
        assert not await submit(SubmitOptions(rows, run="r", output=output), url, TOKEN)
        assert started(bench) == {"r-1-0": 1, "r-7-0": 1}
        said = capsys.readouterr().out
        assert "rows.jsonl:2: is not JSON" in said
        assert "rows.jsonl:3: row.responses_create_params: missing" in said
        assert "rows.jsonl:5: row: must be an object" in said
        assert "rows.jsonl:6: " in said
        assert "rows.jsonl:8: row.rollout.priority: Input should be a valid integer" in said
        assert "rows.jsonl:9: verifier_metadata.inputs.0.0: cannot be written as JSON: Integer exceeds" in said
        assert "2 succeeded, 6 rows refused" in said
        assert [line["rollout"]["source"]["line"] for line in lines_of(output)] in ([1, 7], [7, 1])

        write(rows, "# my rows", GOOD)
        assert not await submit(SubmitOptions(rows), url, TOKEN)
        said = capsys.readouterr().out
        assert "rows.jsonl:1: is not JSON" in said
        assert "1 succeeded, 1 row refused" in said

        # What only the service can refuse: the id belongs to another row.
        write(rows, GOOD | {"task_id": 9}, GOOD)
        assert not await submit(SubmitOptions(rows, repeats=2, run="r"), url, TOKEN)
        said = capsys.readouterr().out
        assert "rows.jsonl:1: " in said
        assert "3 succeeded, 1 row refused" in said


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("\n", r"rows\.jsonl: has no rows"),
        ('{"reward": 1.0, "response": {"output": []}, "rollout": {"id": "a"}}', r"rows\.jsonl:1: is a result"),
    ],
)
async def test_a_file_without_rows_is_refused(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(CallerError, match=complaint):
        await submit(SubmitOptions(write(tmp_path / "rows.jsonl", line)), "http://127.0.0.1:9", TOKEN)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "question,answer\n1,2\n"),
        ("rows.csv", "1,2\n" * 100),
        ("rows.parquet", "PAR1\x15\x04"),
        ("rows.json", '[{"question": "1"}]'),
        ("rows.json", '[\n  {"question": "1"}\n]\n'),
        ("rows.jsonl", "? 1\n"),
        ("folder", None),
    ],
)
async def test_what_is_no_jsonl_is_refused_with_the_way_to_rows(
    tmp_path: Path, name: str, content: str | None
) -> None:
    file = tmp_path / name
    file.mkdir() if content is None else file.write_text(content)
    code, said = await prorl("submit", str(file), url="http://127.0.0.1:9")
    assert (code, len(said.splitlines())) == (1, 1), said
    assert f"{file}: must be JSONL" in said
    assert "make rows of a dataset's records by `prorl data`" in said


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"run": "a/b"}, r"--run: must not contain / \? # or control characters"),
        ({"output": Path("/dev/null/results.jsonl")}, "cannot be written"),
    ],
)
async def test_wrong_options_are_told_before_anything_is_submitted(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(CallerError, match=complaint):
        await submit(SubmitOptions(rows, **change), "http://127.0.0.1:9", TOKEN)


async def test_what_a_row_says_of_its_rollout_holds(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD | {"rollout": {"client": "theirs", "priority": 3}}, GOOD | {"n": 2})
    async with service() as (url, _), RolloutClient(url, TOKEN) as client:
        assert await submit(SubmitOptions(rows, run="own"), url, TOKEN)
        told = {job.id: (job.client, job.priority) for job in (await client.list()).rollouts}
    assert told == {"own-1-0": ("theirs", 3), "own-2-0": ("cli", 0)}


async def test_what_is_in_the_output_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD, DEFECT, GOOD)
    output = tmp_path / "results.jsonl"
    async with service() as (url, bench):
        assert not await submit(SubmitOptions(rows, repeats=2, output=output), url, TOKEN)
        assert len(started(bench)) == 6
        whole = output.read_bytes()
        # As a full disk would leave it: two results missing, and one cut off.
        output.write_bytes(b"\n".join(whole.split(b"\n")[:3]) + b'\n{"reward": 1.0, "resp')
        capsys.readouterr()
        assert not await submit(SubmitOptions(rows, repeats=2, output=output), url, TOKEN)
        said = capsys.readouterr().out
        assert "3 rollouts have a result in" in said
        assert "2 failed, 4 succeeded" in said
        assert len(started(bench)) == 6, "the file knows its run, so that what was finished is fetched"
        assert len({(line["rollout"]["id"]) for line in lines_of(output)}) == len(lines_of(output)) == 6
        before = output.read_bytes()
        assert not await submit(SubmitOptions(rows, repeats=2, output=output), "http://127.0.0.1:9", TOKEN)
        assert output.read_bytes() == before


async def test_results_of_other_rows_are_not_taken_for_these(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD)
    output = tmp_path / "results.jsonl"
    async with service() as (url, _):
        assert await submit(SubmitOptions(rows, output=output), url, TOKEN)
        write(rows, GOOD | {"task_id": 3})
        with pytest.raises(CallerError, match="another row than line"):
            await submit(SubmitOptions(rows, output=output), url, TOKEN)
        alone = tmp_path / "alone.jsonl"
        alone.write_text(json.dumps(GOOD))  # without a newline at its end
        with pytest.raises(CallerError, match="is not a result"):
            await submit(SubmitOptions(alone, output=alone), url, TOKEN)
        assert alone.read_text() == json.dumps(GOOD)


async def test_the_report_tells_failures_with_reasons_and_pass_at_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD, DEFECT)
    async with service() as (url, _):
        assert not await submit(SubmitOptions(rows, repeats=4, run="r"), url, TOKEN)
    said = capsys.readouterr().out
    table = [line.split() for line in said.splitlines()]
    assert ["1", "4", "█" * 40] in table
    assert [line for line in table if len(line) == 3 and line[1] == "1.000"] == [
        ["1", "1.000", "1"], ["2", "1.000", "1"], ["4", "1.000", "1"],
    ]  # fmt: skip
    assert "agent_run_error" in said
    assert "the agent gave up" in " ".join(said.split())


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        pytest.param(
            [
                (FailureKind.VERIFIER_ERROR, Stage.EVAL, "judge at http://10.0.0.1:8000: HTTP 500: x"),
                (FailureKind.VERIFIER_ERROR, Stage.EVAL, "judge at http://10.0.0.2:8001: HTTP 500: x"),
                (FailureKind.VERIFIER_ERROR, Stage.EVAL, "judge at http://10.0.0.2:8001: HTTP 404: x"),
            ],
            ["verifier_error eval 2 row of line 1, r-1-0:", "verifier_error eval 1 row of line 3, r-3-0:"],
            id="an address differs, a status tells",
        ),
        pytest.param(
            [(FailureKind.AGENT_RUN_ERROR, None, "\x1b[31mred[/] [bold]")], ["\\x1b[31mred[/] [bold]"], id="odd text"
        ),
    ],
)
def test_failures_are_summed_up_by_cause(failures: list[tuple[FailureKind, Stage | None, str]], told: list[str]):
    tally = RunSummary(len(failures))
    for line, (kind, stage, reason) in enumerate(failures, 1):
        failure = FailureView(kind=kind, origin=Origin.TASK, stage=stage, reason=reason)
        tally.failures.append((RowRepeat(line, 0), f"r-{line}-0", failure))
    said = io.StringIO()
    print_report(Console(file=said, width=200), tally, 1)
    lines = [" ".join(line.split()) for line in said.getvalue().splitlines()]
    assert all(any(expected in line for line in lines) for expected in told), said.getvalue()
    assert len(lines) == len(failures) + 2 if len(told) == len(failures) else len(lines) <= 24


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143)])
async def test_a_signal_cancels_what_was_submitted_and_the_run_can_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD | {"plan": {"run": [{"seconds": 600}]}})
    async with service() as (url, bench), RolloutClient(url, TOKEN) as client:
        theirs = await client.submit(LONG)
        process = await begin(url, "submit", str(rows), "--repeats", "2", "--run", "r")
        await until_running(url, 3)
        process.send_signal(number)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == code, output
        states = {job.id: job.state for job in (await client.list()).rollouts}
        assert states == {"r-1-0": "cancelled", "r-1-1": "cancelled", theirs.id: "running"}
        assert len(bench.handler.sessions) == 1

        # The service remembers those ids as cancelled; the same run again is a new try of each.
        process = await begin(url, "submit", str(rows), "--repeats", "2", "--run", "r")
        await until_running(url, 3)
        assert {job.id for job in (await client.list(state="running")).rollouts} >= {"r-1-0.2", "r-1-1.2"}
        process.kill()
        await process.wait()


@pytest.mark.long("waits for a service that is gone; that a signal cancels is told by the test above")
async def test_a_signal_ends_it_also_where_the_service_is_gone(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", LONG)
    async with standalone(TOKEN) as there:
        process = await begin(there.url, "submit", str(rows))
        await until_running(there.url, 1)
        await there.end()
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while b"waiting for the service" not in await process.stdout.readline():
                pass
        process.send_signal(signal.SIGTERM)
        said, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 143
        assert b"1 rollouts were not cancelled, because the service does not answer" in said


# -- a service that goes away ----------------------------------------------------------------------------------------


async def test_a_killed_submit_is_joined_by_the_next_one(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", *[GOOD | {"plan": {"run": [{"how": "held"}]}}] * 3)
    async with service() as (url, bench):
        process = await begin(url, "submit", str(rows), "--run", "r")
        await until_running(url, 3)
        process.kill()
        await process.wait()
        again = asyncio.create_task(submit(SubmitOptions(rows, run="r"), url, TOKEN))
        await asyncio.sleep(0.3)
        bench.handler.let_go.set()
        assert await again
        assert started(bench) == {"r-1-0": 1, "r-2-0": 1, "r-3-0": 1}


async def test_what_the_service_has_forgotten_runs_under_a_new_id(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD, GOOD | {"task_id": 2})
    async with service(retain_bytes=10_000) as (url, bench):
        for run in ("r", "s", "r"):  # what ends last makes what was read before be forgotten
            assert await submit(SubmitOptions(rows, run=run), url, TOKEN)
        assert started(bench).items() >= {"r-1-0": 1, "r-2-0": 1, "r-1-0.2": 1}.items()
        assert all(count == 1 for count in started(bench).values())


async def test_a_service_that_stays_away_ends_the_run_and_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    rows = write(tmp_path / "rows.jsonl", LONG)
    async with standalone(TOKEN) as there:
        running = asyncio.create_task(submit(SubmitOptions(rows, run="r", patience_s=1), there.url, TOKEN))
        await until_running(there.url, 1)
        await there.end()
        with pytest.raises(InfrastructureError, match=r"unreachable for 1 s.*--run r$"):
            await asyncio.wait_for(running, 60)


# -- pass@k ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
def test_best_of_k_is_the_mean_over_all_draws(rewards: Sequence[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    draws = [max(draw) for draw in combinations(rewards, k)]
    assert pass_at_k(rewards, k) == pytest.approx(sum(draws) / len(draws))
