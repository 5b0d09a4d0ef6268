# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl init``: an environment of the user's own, from an empty folder to its first reward."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.cli import environments
from nemo_gym_prorl.deployment import gym_cli
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.servers.task_server import TaskServerConfig
from tests.cli.command_line import prorl
from tests.deployment.test_serve import Service
from tests.policy.engines import MODEL
from tests.policy.families import TEMPLATES
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve


SERVER = Path("resources_servers/adder")
TOKENIZER = "a tokenizer, v=1"  # in the user's folder, and no name that Hydra takes without quotes


class Adder(ScriptedEngine):
    """A model that calls tools over tokens, and believes that 2 + 2 is 5."""

    def say(self, body: dict[str, Any]) -> str:
        prompt = self.tokenizer.decode(body["prompt"])
        result = sum(map(int, re.findall(r"\d+", prompt.partition("the sum of ")[2].partition(" into")[0])))
        written = 5 if result == 4 else result
        call = {"name": "bash", "arguments": {"command": f"echo {written} > answer"}}
        if "<tool_call>" in prompt:
            call = {"name": "submit", "arguments": {}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"


@pytest.fixture
async def adding_policy(tmp_path: Path) -> AsyncIterator[str]:
    """URL of :class:`Adder`; its tokenizer lies in the user's folder."""
    template = (TEMPLATES / "chatml.jinja").read_text()
    tokenizer = tokenizer_of("bytes", template)
    (tmp_path / TOKENIZER).mkdir()
    saved(tmp_path / TOKENIZER, tokenizer, template)
    async with serve(Adder(tokenizer).app()) as url:
        yield f"{url}/v1"


@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_from_an_empty_folder_to_rewards_through_gyms_command_line(
    adding_policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one path through Gym's command line of the first tier: init, serve, submit, show, and a clean end."""
    monkeypatch.chdir(tmp_path)
    assert (await prorl("init", "adder"))[0] == 0
    rows = [json.loads(line) for line in (SERVER / "data/example.jsonl").read_text().splitlines()]
    tools = rows[0]["responses_create_params"] | {"tools": [{"type": "function", "name": "bassh", "parameters": {}}]}
    wrong = [{**rows[0], "answer": True}, {**rows[0], "responses_create_params": tools}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *wrong]))  # noqa: ASYNC240
    own = Service(tmp_path, "adder")
    own.model = MODEL
    try:
        await own.start(adding_policy, "--tokenizer", TOKENIZER)
        code, said = await prorl("submit", "rows.jsonl", "--output", "results.jsonl", url=own.urls["adder_agent"])
        assert (code, "5 succeeded" in said, "bad_row: 2" in said) == (1, True, True), said
        results = [json.loads(line) for line in Path("results.jsonl").read_text().splitlines()]  # noqa: ASYNC240
        by_line = {result["rollout"]["source"]["line"]: result["rollout"] for result in results}
        assert [by_line[line]["reward"] for line in range(1, 8)] == [1.0, 1.0, 1.0, 1.0, 0.0, None, None]
        reasons = [by_line[line]["failure"]["reason"] for line in (6, 7)]
        assert "answer: must be the sum" in reasons[0]
        assert "responses_create_params.tools.0.name: this environment has no tool bassh" in reasons[1]
        code, said = await prorl("show", by_line[1]["id"], url=own.urls["adder_agent"])
        assert (code, "bash" in said, "submit" in said) == (0, True, True), said
        assert await own.stop() == 0
    finally:
        assert await own.mark.kill(settle_s=5) == {}
        shutil.rmtree(own.state, ignore_errors=True)
    mine = {TOKENIZER, "rows.jsonl", "results.jsonl", "serve.log", "tmp", "gym"}
    left = {path.name for path in tmp_path.iterdir()} - mine  # noqa: ASYNC240
    assert left == {"environments", "resources_servers"}, "Gym has written into the user's folder"


async def test_its_own_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environments.create("adder", tmp_path)
    root = Path(environments.__file__).parents[2]
    ended = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", str(SERVER)),
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(ended.communicate(), 280)
    assert b"12 passed" in said, said.decode()


def test_the_files_are_the_users_and_name_the_tools_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = {path: path.read_text() for path in environments.create("adder", tmp_path)}
    assert [path for path, text in written.items() if "Copyright" in text or "SPDX" in text] == []
    limits = re.findall(r"# (\w+): (\d+) ", written[Path("environments/adder/config.yaml")])
    assert {name for name, _ in limits} == {
        "tool_timeout_s",
        "max_tool_timeout_s",
        "tool_silence_s",
        "max_output_bytes",
    }
    assert all(float(value) == TaskServerConfig.model_fields[name].default for name, value in limits)
    with pytest.raises(CallerError, match="tool_silence: there is no such setting; the nearest: tool_silence_s;"):
        environments.check_overrides(["adder"], "prorl_model", ["++adder.resources_servers.adder.tool_silence=20"])


@pytest.mark.parametrize("name", ["", "Adder", "a-b", "../up", "prorl_code", "adder", "other", "json"])
def test_a_name_that_is_none_or_taken_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environments.create("adder", tmp_path)
    (tmp_path / "resources_servers/other").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CallerError, match="NAME"):
        environments.create(name, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_are_joined_and_the_first_wins(tmp_path: Path) -> None:
    own, ours, folder = (tmp_path / name for name in ("own", "ours", "joined"))
    for path in (
        *("resources_servers/a/app.py", "environments/a/config.yaml", "env.yaml", ".secret", "rows/r.jsonl"),
        "resources_servers/both/app.py",
    ):
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text("own")
    for path in ("resources_servers/both/app.py", "responses_api_agents/b/app.py", "docs/page.md"):
        (ours / path).parent.mkdir(parents=True, exist_ok=True)
        (ours / path).write_text("ours")
    for _ in range(2):  # the second time over what is there
        gym_cli.link_roots(folder, [own, ours])
    links = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink())
    assert links == [
        *("env.yaml", "environments/a", "resources_servers/a", "resources_servers/both"),
        *("responses_api_agents/b", "rows"),
    ]
    assert (folder / "resources_servers/both/app.py").read_text() == "own"
    assert (own / "resources_servers/both/app.py").read_text() == "own"
