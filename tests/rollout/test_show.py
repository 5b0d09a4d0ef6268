# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl show`` and ``prorl status`` by filter: rollouts for a person to read."""

import asyncio
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nemo_gym_prorl.commands.jobs import Service
from nemo_gym_prorl.commands.show import SHORT_CHARACTERS, file_table, rollout_table, shorten, turns
from nemo_gym_prorl.rollout.client import RolloutClient
from tests.rollout.command_line import TOKEN, begin, prorl, service
from tests.rollout.standalone import standalone


def call(name: str, arguments: str, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, **more}


def observation(text: str, call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


TOKENS = {"prompt_token_ids": [1] * 512, "generation_token_ids": [2] * 64, "generation_log_probs": [0.0] * 64}
OUTPUT = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "First I look around."}]},
    call("bash", json.dumps({"command": "cat <<EOF\nthree\nlines\nEOF", "timeout_s": 5}), **TOKENS),
    observation("\n".join(f"line {number}" for number in range(400))),
    call("bash", '{"command": ', status="incomplete"),
    observation("Invalid tool call"),
    said("Done \x1b]0;owned\x07 [red]now[/].", **TOKENS),
]
ROW = {
    "responses_create_params": {
        "input": [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Go"}]
    },
    "response": {"output": OUTPUT},
    "reward": 1.0,
    "verdict": "passed",
}


async def test_a_trajectory_reads_well_in_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    code, output = await prorl("show", str(path), COLUMNS="80")
    assert code == 0
    assert max(len(line) for line in output.splitlines()) <= 80
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in (
        "turn item text", "reward 1.0", "verdict passed", "message system Be good.", "message user Go",
        "1 reasoning First I look around.", "1 function_call_output line 0", "[… 1889 characters]", "line 399",
        "2 function_call bash (malformed) {\"command\":", "3 message assistant Done \\x1b]0;owned\\x07 [red]now[/].",
    ):  # fmt: skip
        assert any(line in one for one in lines), (line, output)
    assert 'EOF", "timeout_s": 5}' in output
    assert "\x1b" not in output
    assert "line 150 " not in output
    code, output = await prorl("show", str(path), "--full")
    assert "line 150 " in output
    code, output = await prorl("show", f"{path}:1", "--json")
    assert json.loads(output) == ROW


@pytest.mark.parametrize(
    "odd", [5, "x", [1], {"output": "x", "input": 7}, {"output": [1, None, {"type": 7}]}, [], None]
)
def test_an_environments_own_answers_can_be_shown_whatever_they_are(odd: Any) -> None:
    page = io.StringIO()
    row = {
        "response": odd,
        "responses_create_params": odd,
        "rollout": odd,
        "reward": odd,
        "note": "\u202egnp.exe\x1b[2J",
    }
    Console(file=page, width=80).print(rollout_table(row, full=False))
    assert "\\u202egnp.exe\\x1b[2J" in page.getvalue()
    Console(file=page).print(file_table({1: row}))


async def test_a_file_of_several_rollouts_is_listed_and_each_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"reward": 0.25, "task_id": "other"}) + "\n")
    code, output = await prorl("show", str(path))
    assert (code, [line.split() for line in output.splitlines()][1:]) == (
        0,
        [["1", "1.0", "3"], ["2", "other", "0.25", "3"]],
    )
    code, output = await prorl("show", f"{path}:2")
    assert (code, ["task_id", "other"] in [line.split() for line in output.splitlines()]) == (0, True)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("{path}:7", "rollouts.jsonl:7: there is no rollout in this line; the file has 1"),
        ("{folder}/none.jsonl", "none.jsonl: there is no such file"),
        ("{folder}/none.jsonl:3", "there is no such file"),
        ("{rows}", "rows.jsonl:1: is no rollout"),
    ],
)
async def test_what_cannot_be_shown_is_said_in_one_line(tmp_path: Path, what: str, complaint: str) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "rows.jsonl").write_text('{"responses_create_params": {"input": "x"}}\n')
    names = {"path": tmp_path / "rollouts.jsonl", "folder": tmp_path, "rows": tmp_path / "rows.jsonl"}
    code, output = await prorl("show", what.format(**names))
    assert (code, complaint in output, "Traceback" in output) == (1, True, False)


async def test_rollouts_of_a_service_by_id_group_state_and_failure() -> None:
    params = {"responses_create_params": {"input": "hi"}}
    async with service() as (url, _), RolloutClient(url, TOKEN) as client:
        await client.submit(params, id="good", group="g")
        await client.submit({**params, "plan": {"run": [{"how": "agent"}]}}, id="bad", group="g")
        retried = {"init": [{"how": "infrastructure"}, {"how": "ok"}]}
        await client.submit({**params, "plan": retried}, id="late", group="h")
        await client.submit({**params, "plan": {"run": [{"seconds": 600}]}}, id="live")
        await client.submit({**params, "plan": {"run": [{"how": "defect"}]}}, id="bug", max_attempts=1)
        twice = {"init": [{"how": "infrastructure"}, {"how": "infrastructure"}]}
        await client.submit({**params, "plan": twice}, id="gone", max_attempts=2)
        async with asyncio.timeout(30):
            for ends in ("good", "bad", "late", "bug", "gone"):
                await client.wait(ends)
        shown = {
            "show good": ["good: succeeded, reward 1"],
            "show bad": ["bad: failed", "agent_run_error in run (agent)", "the agent gave up"],
            "show late": ["late: succeeded", "failed attempt", "in init (infrastructure)", "the sandbox is gone"],
            "show gone": ["gone: failed", "in init, 2 attempts (infrastructure)", "the sandbox is gone"],
            "show bug": ["bug: failed", "KeyError: 'a bug'", "Traceback (most recent call last)"],
            "show live": ["live: ", "it has not ended"],
            "status --group g": ["good", "bad", "2 rollouts"],
            "status --state succeeded": ["good", "late", "2 rollouts"],
            "status --failed": [
                "bad failed",
                "agent_run_error in run (agent): the agent gave up",
                "Traceback",
                "in init, 2 attempts (infrastructure): the sandbox is gone",
                "3 rollouts",
            ],
        }
        for command, parts in shown.items():
            code, output = await prorl(*command.split(), url=url)
            assert code == 0, output
            assert [part for part in parts if part not in output] == [], (command, output)
            assert output.count("the agent gave up") <= 1, output
            assert output.count("the sandbox is gone") <= 1, output
        assert "live" not in (await prorl("status", "--group", "g", url=url))[1]
        code, output = await prorl("status", "--state", "sleeping", url=url)
        assert (code, "state" in output, "Traceback" in output) == (1, True, False)


async def test_a_listing_goes_on_behind_its_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym_prorl.rollout.client._PAGE", 2)
    monkeypatch.setattr("nemo_gym_prorl.commands.jobs._PAGE", 2)
    async with service() as (url, _), RolloutClient(url, TOKEN) as client:
        ids = [(await client.submit({"responses_create_params": {"input": "hi"}}, id=f"r{n}")).id for n in range(5)]
        assert [job.id async for job in client.every()] == ids
        there = Service(url, TOKEN)
        assert await asyncio.to_thread(lambda: [job["id"] for job in there.rollouts()]) == ids


@given(st.text(max_size=5000), st.integers(0, 40))
def test_what_is_shortened_is_short_and_keeps_both_ends(text: str, repeats: int) -> None:
    text = "\n".join([text] * repeats)
    short = shorten(text)
    assert len(short) <= min(len(text), SHORT_CHARACTERS) + 40
    assert (short[:9], short[-9:]) == (text[:9], text[-9:])


@given(st.lists(st.sampled_from([OUTPUT[0], OUTPUT[1], OUTPUT[2], OUTPUT[5], said("x")]), max_size=20))
def test_turns_are_all_items_in_order(output: list[dict[str, Any]]) -> None:
    split = list(turns(output))
    assert [item for turn in split for item in turn] == output
    assert all(turn for turn in split)


async def test_tail_of_a_group_goes_on_when_the_service_was_restarted() -> None:
    async with standalone(TOKEN) as there:
        process = await begin(there.url, "tail", "--group", "mine")
        assert process.stdout is not None
        try:
            for _ in range(2):
                seen: set[str] = set()
                async with asyncio.timeout(60), RolloutClient(there.url, TOKEN) as client:
                    reading = asyncio.create_task(process.stdout.readline())
                    while "succeeded" not in seen:
                        for group in ("mine", "theirs"):
                            job = await client.submit({"responses_create_params": {"input": "hi"}}, group=group)
                            await client.wait(job.id)
                        while (await asyncio.wait([reading], timeout=0.2))[0]:
                            words = reading.result().decode().split()
                            assert "theirs" not in words
                            seen.update(words)
                            reading = asyncio.create_task(process.stdout.readline())
                    reading.cancel()
                await there.end()
                await there.start()
        finally:
            process.send_signal(signal.SIGINT)
            await process.communicate()
        assert process.returncode == 130


async def test_a_file_that_is_being_written_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:100])
    code, output = await prorl("show", str(path))
    assert (code, "3 message assistant Done" in " ".join(output.split())) == (0, True)
    path.write_text(json.dumps(ROW)[:100] + "\n" + json.dumps(ROW) + "\n")
    code, output = await prorl("show", str(path))
    assert (code, f"{path}:1: is not JSON" in output) == (1, True)


async def test_what_a_terminal_would_obey_is_shown_as_text_in_json_too(tmp_path: Path) -> None:
    path, obeyed = tmp_path / "rollouts.jsonl", "\x1b[31m\x9b\x7f\u202e\u200f\u061c"
    path.write_text(json.dumps(ROW | {"said": f"[/nope]{obeyed}"}) + "\n")
    for how in (["--json"], []):
        code, output = await prorl("show", f"{path}:1", *how)
        assert (code, {*obeyed} - {*"[31m"} & {*output}) == (0, set())
    assert "[/nope]\\x1b[31m" in output
