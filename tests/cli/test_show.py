# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl show``, ``prorl view`` and ``prorl status`` by filter: rollouts for a person to read."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from nemo_gym_prorl import tasks
from nemo_gym_prorl.cli.service import Service
from nemo_gym_prorl.cli.show import file_table, rollout_table
from nemo_gym_prorl.rollout.api.client import RolloutClient
from tests.cli.command_line import TOKEN, begin, prorl, service, write
from tests.policy.engines import free_port


def call(name: str, arguments: str, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, **more}


def observation(text: str, call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


def step(items: int, *tools: str, **more: Any) -> dict[str, Any]:
    times = [{"call_id": call_id, "started_at": 11.0, "seconds": 0.5} for call_id in tools]
    timed = {"started_at": 10.0, "seconds": 1.0, "input_tokens": 7, "output_tokens": 2}
    return {**timed, "items": items, "tools": times, **more}


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
        "turn item text", "reward 1", "verdict passed", "message system Be good.", "message user Go",
        "1 reasoning First I look around.", "1 function_call_output line 0", "[… 1889 characters]", "line 399",
        "2 function_call bash (malformed) {\"command\":", "3 message assistant Done \\x1b]0;owned\\x07 [red]now[/].",
    ):  # fmt: skip
        assert any(line in one for one in lines), (line, output)
    assert 'EOF", "timeout_s": 5}' in output
    assert "\x1b" not in output
    assert "line 150 " not in output
    code, output = await prorl("show", str(path), "--full")
    assert "line 150 " in output


async def test_a_file_of_several_rollouts_is_listed_and_each_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"reward": 0.25, "task_id": "other"}) + "\n")
    code, output = await prorl("show", str(path))
    assert (code, [line.split() for line in output.splitlines()][1:]) == (
        0,
        [["1", "1", "3"], ["2", "other", "0.25", "3"]],
    )
    code, output = await prorl("show", f"{path}:2")
    assert (code, ["task_id", "other"] in [line.split() for line in output.splitlines()]) == (0, True)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("{path}:7", "rollouts.jsonl:7: has no result in this line; the file has 1 results"),
        ("{folder}/none.jsonl:3", "none.jsonl:3: no such file"),
        ("{rows}", "rows.jsonl:1: is not a rollout"),
    ],
)
async def test_what_cannot_be_shown_is_said_in_one_line(tmp_path: Path, what: str, complaint: str) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "rows.jsonl").write_text('{"responses_create_params": {"input": "x"}}\n')
    names = {"path": tmp_path / "rollouts.jsonl", "folder": tmp_path, "rows": tmp_path / "rows.jsonl"}
    code, output = await prorl("show", what.format(**names))
    assert (code, complaint in output, "Traceback" in output) == (1, True, False)


async def test_rollouts_of_a_service_by_id_group_and_failure() -> None:
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
            "show live": ["live: running"],
            "status --group g": ["good", "bad", "2 rollouts"],
            "status --failed": [
                "in init (infrastructure): the sandbox is gone",
                "agent_run_error in run (agent): the agent gave up",
                "in init, 2 attempts (infrastructure): the sandbox is gone",
                "4 rollouts",
            ],
        }
        for command, parts in shown.items():
            code, output = await prorl(*command.split(), url=url)
            assert code == 0, output
            assert [part for part in parts if part not in output] == [], (command, output)
            assert output.count("the agent gave up") <= 1, output
            assert output.count("the sandbox is gone") <= 1 + command.endswith("--failed"), output
        assert "live" not in (await prorl("status", "--group", "g", url=url))[1]


async def test_a_listing_goes_on_behind_its_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym_prorl.rollout.api.client._PAGE", 2)
    monkeypatch.setattr("nemo_gym_prorl.cli.service._PAGE", 2)
    async with service() as (url, _), RolloutClient(url, TOKEN) as client:
        ids = [(await client.submit({"responses_create_params": {"input": "hi"}}, id=f"r{n}")).id for n in range(5)]
        assert [job.id async for job in client.every()] == ids
        there = Service(url, TOKEN)
        assert await asyncio.to_thread(lambda: [job["id"] for job in there.rollouts()]) == ids


async def test_a_file_that_is_being_written_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:100])
    code, output = await prorl("show", str(path))
    assert (code, "3 message assistant Done" in " ".join(output.split())) == (0, True)
    path.write_text(json.dumps(ROW)[:100] + "\n" + json.dumps(ROW) + "\n")
    code, output = await prorl("show", str(path))
    assert (code, f"{path}:1: is not JSON" in output) == (1, True)


async def test_what_a_terminal_would_obey_is_shown_as_text(tmp_path: Path) -> None:
    path, obeyed = tmp_path / "rollouts.jsonl", "\x1b[31m\x9b\x7f\u202e\u200f\u061c"
    path.write_text(json.dumps(ROW | {"said": f"[/nope]{obeyed}"}) + "\n")
    code, output = await prorl("show", f"{path}:1")
    assert (code, {*obeyed} - {*"[31m"} & {*output}) == (0, set())
    assert "[/nope]\\x1b[31m" in output


THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
ABOUT = {
    "id": "run-1-0", "state": "succeeded", "finish_reason": "max_steps", "submitted_at": 8.0, "finished_at": 30.0,
    "source": {"line": 4}, "timings": {"init": {"waited_s": 1.0, "worked_s": 2.0, "attempts": 1}},
}  # fmt: skip
GOOD = {
    "task_id": "HumanEval/0",
    "responses_create_params": {
        "input": [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Go"}]
    },
    "response": {
        "model": "policy",
        "output": [
            THOUGHT,
            said("I look."),
            call("bash", '{"command": "ls"}', "c1"),
            call("bash", '{"command": ', "c2"),
            observation("<img src=http://example.com>", "c1"),
            observation("bad", "c2"),
            said("Done."),
        ],
    },
    "reward": 0.5,
    "mask_sample": True,
    "rollout": {**ABOUT, "steps": [step(4, "c1"), step(1, started_at=20.0)]},
}
FAILED = {
    **GOOD,
    "response": {"output": []},
    "reward": 0.0,
    "failure_kind": "session_lost",
    "failure_reason": "gone",
    "rollout": {
        "id": "run-1-1",
        "state": "failed",
        "source": {"line": 4},
        "failure": {"kind": "session_lost", "reason": "gone"},
    },
}
ODD = {"response": 5, "rollout": {"steps": 7, "timings": []}, "reward": "x"}


@pytest.mark.parametrize(
    ("row", "listed", "shown"),
    [
        (ROW | {"reward": 0.0}, "1 0 3", "reward 0"),
        (GOOD, "1 run-1-0 succeeded 0.5 masked 2", "run-1-0: succeeded, reward 0.5 masked, ended by max_steps"),
        (GOOD | {"mask_sample": False}, "1 run-1-0 succeeded 0.5 2", "reward 0.5, ended by max_steps"),
        (FAILED, "1 run-1-1 failed - masked 0", "run-1-1: failed, reward - masked"),
        (FAILED | {"rollout": None, "task_id": ""}, "1 - masked 0", "reward - masked"),
    ],
    ids=["scored", "scored and masked", "ended by its limit", "failed", "failed in Gym's own run"],
)
def test_no_reward_is_shown_where_none_was_earned(row: dict[str, Any], listed: str, shown: str) -> None:
    page = io.StringIO()
    console = Console(file=page, width=120)
    console.print(file_table({1: row}), rollout_table(row, full=False))
    lines = [" ".join(line.split()) for line in page.getvalue().splitlines()]
    assert lines[1] == listed
    assert any(line.endswith(shown) for line in lines), lines


READ = """
import sys
from inspect_ai.log import list_eval_logs, read_eval_log
[log] = list_eval_logs(sys.argv[1])
print(read_eval_log(log, resolve_attachments=True).model_dump_json())
"""
"""Inspect's reader, in a process of its own: what Inspect imports changes asyncio for everybody."""


async def said_by(*command: str, cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_a_static_site_has_turns_calls_rewards_failures_and_times(tmp_path: Path) -> None:
    """In a folder of this machine, whatever it is called: Inspect would publish this one elsewhere."""
    results, site = write(tmp_path / "first#1.jsonl", GOOD, FAILED, ODD), tmp_path / "hf" / "any" / "space"
    command = (sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()")
    await said_by(*command, "view", str(results), "--bundle", "hf/any/space", cwd=tmp_path)
    assert "<script" in (site / "index.html").read_text()
    log = json.loads((await said_by(sys.executable, "-c", READ, str(site / "logs"), cwd=tmp_path)).splitlines()[-1])
    [reward] = log["results"]["scores"]
    assert (reward["metrics"]["mean"]["value"], reward["unscored_samples"]) == (0.5, 2)
    assert log["eval"]["viewer"]["trust_content"] is False
    samples = {(sample["id"], sample["epoch"]): sample for sample in log["samples"]}
    good, failed, odd = (samples.pop(key) for key in (("4: HumanEval/0", 1), ("4: HumanEval/0", 2), ("row", 1)))
    assert not samples
    assert [event["event"] for event in good["events"]] == ["model", "tool", "tool", "model", "score"]
    first, shell, refused, last, _ = good["events"]
    begun = datetime.fromisoformat(first["timestamp"]).timestamp()
    assert (begun, first["working_time"], last["working_start"]) == (10.0, 1.0, 10.0)
    assert [message["role"] for message in last["input"]] == ["system", "user", "assistant", "tool", "tool"]
    assert (shell["function"], shell["arguments"], shell["result"], shell["working_time"]) == (
        "bash", {"command": "ls"}, "<img src=http://example.com>", 0.5
    )  # fmt: skip
    assert refused.get("working_time") is None
    message = first["output"]["choices"][0]["message"]
    assert {"type": "text", "text": "I look."}.items() <= message["content"][-1].items()
    assert message["tool_calls"][1]["parse_error"] == 'not a JSON object: {"command": '
    assert (good["scores"]["reward"]["value"], good["working_time"], good["total_time"]) == (0.5, 2.0, 22.0)
    assert good["model_usage"]["policy"]["total_tokens"] == 18
    assert (good["metadata"]["masked"], good["metadata"]["rollout"]["finish_reason"]) == (True, "max_steps")
    assert failed["error"]["message"] == "session_lost: gone"
    assert failed.get("scores") is None
    assert failed["metadata"]["failure_kind"] == "session_lost"
    assert [event["event"] for event in failed["events"]] == ["error"]
    assert (odd["events"], odd.get("scores")) == ([], None)


@pytest.mark.long("the site that is made of the same log takes a second; the viewer, six of them to be imported")
async def test_the_viewer_is_inspects_own_and_ends_with_an_interrupt(tmp_path: Path) -> None:
    port = free_port()
    results = write(tmp_path / "first.jsonl", GOOD)
    viewer = await begin("", "view", str(results), "--port", str(port))
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            while True:
                try:
                    async with http.get("/") as page:
                        assert "Inspect" in await page.text()
                    async with http.get("/api/logs") as listed:
                        assert "first.eval" in json.dumps(await listed.json())
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)
        viewer.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(viewer.wait(), 20) in (0, 130)
    finally:
        if viewer.returncode is None:
            viewer.kill()


async def test_what_cannot_be_viewed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def view_of(*arguments: str) -> Any:
        return prorl("view", *arguments)

    empty, results = write(tmp_path / "empty.jsonl"), write(tmp_path / "first.jsonl", GOOD)
    assert await view_of(str(empty)) == (1, f"prorl: {empty}: has no rollouts\n")
    code, said_ = await view_of(str(results), "--bundle", str(tmp_path))
    assert (code, "--bundle: exists already" in said_) == (1, True)
    code, said_ = await view_of(str(results), "--bundle", f"{results}/site")
    assert (code, "/site is not available: File exists; choose another" in said_) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said_ = await view_of(str(results), "--port", port)
        assert (code, f"--port: port {port} is not available: Address already in use" in said_) == (1, True)
    monkeypatch.setitem(tasks.EXTRAS, "view", ("no_such_inspect",))  # type: ignore[index]
    code, said_ = await view_of(str(results))
    assert (code, said_) == (1, "prorl: not installed: no_such_inspect. pip install 'nemo-gym-prorl[view]'\n")
