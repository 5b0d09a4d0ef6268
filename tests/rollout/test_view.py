# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl view``: what Inspect's own reader finds in the log, and what its own viewer serves."""

import asyncio
import json
import signal
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.tasks import extras
from tests.rollout.command_line import begin, prorl, write
from tests.rollout.test_show import call, observation, said
from tests.rollout.test_trajectory import step


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
    command = (sys.executable, "-c", "from nemo_gym_prorl.cli import main; main()")
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
    assert message["tool_calls"][1]["parse_error"] == 'no JSON object: {"command": '
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
    assert (code, "--bundle: is there already" in said_) == (1, True)
    code, said_ = await view_of(str(results), "--bundle", f"{results}/site")
    assert (code, said_) == (1, "prorl: --bundle: can't be made: Not a directory\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said_ = await view_of(str(results), "--port", port)
        assert (code, said_) == (
            1,
            f"prorl: --port: {port} can't be listened on: Address already in use; choose another\n",
        )
    monkeypatch.setitem(extras.EXTRAS, "view", ("no_such_inspect",))  # type: ignore[index]
    code, said_ = await view_of(str(results))
    assert (code, said_) == (1, "prorl: not installed: no_such_inspect. pip install 'nemo-gym-prorl[view]'\n")
