# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl init``: an environment of the user's own, from an empty folder to its first reward."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.commands import new_environment
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.gym import config_files
from nemo_gym_prorl.rollout.client import RolloutClient
from tests.gym.test_serve import Service


SERVER = Path("resources_servers/adder")


@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_a_new_environment_serves_and_scores_at_once(
    scripted_policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new_environment.create("adder", tmp_path)
    own = Service(tmp_path, "adder")
    try:
        await own.start(scripted_policy)
        async with RolloutClient(own.urls["adder_agent"]) as client:
            rows = [json.loads(line) for line in (SERVER / "data/example.jsonl").read_text().splitlines()]
            jobs = [await client.submit(row) for row in rows]
            assert [(await client.wait(job.id)).reward for job in jobs] == [1.0, 1.0, 1.0, 1.0, 0.0]
            # A wrong row is known by its field.
            wrong = await client.wait((await client.submit({**rows[0], "answer": "3"})).id)
            assert wrong.failure is not None
            assert (wrong.failure.kind, "answer: it must be the sum" in wrong.failure.reason) == ("bad_row", True)
        assert await own.stop() == 0
    finally:
        assert await own.mark.kill(settle_s=5) == {}
    left = {path.name for path in tmp_path.iterdir()} - {"serve.log", "tmp", "gym"}  # noqa: ASYNC240
    assert left == {"environments", "resources_servers"}, "Gym has written into the user's folder"


async def test_its_own_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_environment.create("adder", tmp_path)
    root = Path(new_environment.__file__).parents[3]
    ended = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", str(SERVER)),
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(ended.communicate(), 120)
    assert b"5 passed" in said, said.decode()


@pytest.mark.parametrize("name", ["", "Adder", "1st", "a-b", "../up", "a/b", "a" * 80, "prorl_code", "adder", "other"])
def test_a_name_that_is_none_or_taken_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_environment.create("adder", tmp_path)
    (tmp_path / "resources_servers/other").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CallerError, match="NAME"):
        new_environment.create(name, tmp_path)
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
        config_files.joined(folder, [own, ours])
    links = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink())
    assert links == [
        *(
            "env.yaml",
            "environments/a",
            "resources_servers/a",
            "resources_servers/both",
            "responses_api_agents/b",
            "rows",
        ),
    ]
    assert (folder / "resources_servers/both/app.py").read_text() == "own"
    assert (own / "resources_servers/both/app.py").read_text() == "own"
