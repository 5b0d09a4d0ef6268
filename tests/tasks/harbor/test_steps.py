# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of several steps, and separate verifiers, over HTTP."""

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiered
from tests.prorl_code.conftest import RESPONSE, Client, build, serving
from tests.rollout.serving import serve
from tests.tasks.harbor.folders import PLAIN, make_task, play, row_of, says, shown, snapshots


pytestmark = pytest.mark.sandbox

CHECK = """\
#!/bin/bash
step=$(cat /tests/step)
if [ "$(cat /app/$step)" = ${DONE-done} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""

Steps = Mapping[str, str]

FILES: Steps = {
    "steps/one/instruction.md": "First.\n",
    "steps/one/tests/step": "one",
    "steps/one/solution/solve.sh": "echo done > one",
    "steps/two/instruction.md": "Second.\n",
    "steps/two/tests/step": "two",
    "steps/two/solution/solve.sh": "echo done > two",
    "steps/two/workdir/data": "seven",
    "steps/two/workdir/setup.sh": "[ ! -e broken ] && cp data copy",
}


def steps_task(folder: Path, *, one: str = "", two: str = "", top: str = "", files: Steps = FILES) -> dict[str, Any]:
    """Return the row of a task of two steps, with lines for the tables of the steps and of the top."""
    tables = f'[[steps]]\nname = "one"\n{one}\n[[steps]]\nname = "two"\n{two}\n'
    return row_of(make_task(folder, toml=f"{top}\n{PLAIN}{tables}", test=CHECK, solve=None, files=files))


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with serving("prorl_harbor") as url:
        yield url


ONE, TWO = "echo done > one", "echo done > two"

ROLLOUTS = {
    "both steps": ({}, [ONE, "SUBMIT", TWO], 1, (200, 1.0, "passed")),
    "the first step alone": ({}, [ONE, "SUBMIT"], 1, (200, 0.5, "partial")),
    "work of the second step on the first does not count": ({}, ["SUBMIT", ONE], 1, (200, 0.0, "failed")),
    "an early end does not pay": ({}, [ONE], 0, (200, 0.5, "partial")),
    "below the minimum nothing later counts": ({"one": "min_reward = 1.0"}, ["SUBMIT", TWO], 1, (200, 0.0, "failed")),
    "the minimum of a key that is missing": (
        {"one": "min_reward = { speed = 0.1 }"},
        [ONE, "SUBMIT", TWO],
        1,
        (200, 1.0, "passed"),
    ),
    "the last step counts": (
        {"top": 'multi_step_reward_strategy = "final"'},
        ["SUBMIT", TWO],
        1,
        (200, 1.0, "passed"),
    ),
    "files of a step arrive with it": (
        {},
        ["ls data; [ ! -e data ] && echo done > one", "SUBMIT", "[ $(cat copy) = seven ] && echo done > two"],
        1,
        (200, 1.0, "passed"),
    ),
    "who breaks the set-up of the next step": ({}, [f"{ONE}; touch broken", "SUBMIT", TWO], 0, (200, 0.0, "tampered")),
    "a step's variables and limit": (
        {"two": "[steps.verifier]\ntimeout_sec = 50\nenv = { DONE = '2' }"},
        [ONE, "SUBMIT", "echo 2 > two"],
        1,
        (200, 1.0, "passed"),
    ),
    "a step's own tests replace the task's": (
        {"files": {**FILES, "steps/two/tests/test.sh": "[ -e /app/two ] && echo 0.5 > /logs/verifier/reward.txt"}},
        [ONE, "SUBMIT", TWO],
        1,
        (200, 0.75, "partial"),
    ),
}


FIRST = (
    *("both steps", "the first step alone", "an early end does not pay", "files of a step arrive with it"),
    *("below the minimum nothing later counts", "who breaks the set-up of the next step"),
)


@pytest.mark.parametrize("name", tiered(ROLLOUTS, FIRST))
async def test_rewards_of_several_steps(base_url: str, tmp_path: Path, name: str) -> None:
    task, commands, submits, result = ROLLOUTS[name]
    reply = await play(base_url, steps_task(tmp_path / "t", **task), *commands, submits=submits)
    assert shown(reply) == result, reply


async def test_submit_answers_with_the_next_instruction_and_nothing_is_left(base_url: str, tmp_path: Path) -> None:
    row = steps_task(tmp_path / "t")
    async with Client(base_url) as client:
        assert (await client.post("/seed_session", row))[0] == 200
        assert await client.tool("submit") == "Submitted. Step 2 of 2 follows.\n\nSecond.\n"
        assert len(snapshots()) == 1
        assert (await client.tool("submit")).startswith("Submitted.")
        status, body, _ = await client.post("/verify", {**row, "response": RESPONSE})
        assert (status, body["tool_use"]["submit"]["calls"]) == (200, 2)
        assert body["steps"] == [
            {"name": "one", "rewards": {"reward": 0.0}},
            {"name": "two", "rewards": {"reward": 0.0}},
        ]
        assert snapshots() == []
        assert (await client.post("/close_session"))[0] == 200


async def test_a_closed_session_leaves_no_snapshot(base_url: str, tmp_path: Path) -> None:
    async with Client(base_url) as client:
        assert (await client.post("/seed_session", steps_task(tmp_path / "t")))[0] == 200
        await client.tool("submit")
        assert (await client.post("/close_session"))[0] == 200
    assert snapshots() == []


async def test_the_sweeper_spares_snapshots_of_live_sessions(tmp_path: Path) -> None:
    server = build("prorl_harbor")
    async with serve(server.setup_webserver()) as url, Client(url) as client:
        assert (await client.post("/seed_session", steps_task(tmp_path / "t")))[0] == 200
        await client.tool("submit")
        [held] = snapshots()
        orphan = held.with_name(f"{server.snapshot_prefix}-{'0' * 12}")
        orphan.touch()
        for path in (held, orphan):
            os.utime(path, (0, 0))
        await server._sweep_snapshots()
        assert snapshots() == [held]
        assert (await client.post("/close_session"))[0] == 200


async def test_a_set_up_that_always_fails_is_the_tasks_fault(base_url: str, tmp_path: Path) -> None:
    row = steps_task(tmp_path / "t", files={**FILES, "steps/two/workdir/setup.sh": "exit 3"})
    assert shown(await play(base_url, row, ONE, "SUBMIT", submits=0)) == (422, None, "verifier_error")


SEPARATE = """\
artifacts = ["/app/out", { source = "made", exclude = ["*.log"] }, { source = "/logs/artifacts/", exclude = ["*.t"] }]
[verifier]
environment_mode = "separate"
collect = [{ command = "cp hooked /logs/artifacts" }]
"""

SEEN = """\
#!/bin/bash
cd /; (find app logs/artifacts -not -type d -o -empty; find -L app logs/artifacts -samefile /tests/test.sh) |
sort | tr '\\n' ' ' > /logs/verifier/seen
cat /logs/verifier/seen
if [ "$(cat /logs/verifier/seen)" = "$EXPECTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""

HANDED_IN = {
    "artifacts and nothing else": (
        "mkdir -p made/sub; touch out made/a.log made/sub/b /logs/artifacts/c other",
        "app/made/sub/b app/out logs/artifacts/c ",
    ),
    "links elsewhere": (
        "mkdir made; ln -s /etc/passwd made/a; ln -s / made/b; ln -s /usr/bin out",
        "app/made logs/artifacts ",
    ),
    "no tar": ("touch out; rm -f /bin/tar /usr/bin/tar", "app/out logs/artifacts "),
    "links that leave by another": (
        "mkdir -p made/a; ln -s /logs/artifacts made/a/b; ln -s b/../../tests/test.sh made/a/c; ln -s made/a/c out",
        "app/made/a/b app/made/a/c app/out logs/artifacts ",
    ),
    "a folder that leaves out files": ("touch /logs/artifacts/a.t /logs/artifacts/b", "app logs/artifacts/b "),
}


@pytest.mark.parametrize("name", tiered(HANDED_IN, ["artifacts and nothing else", "links elsewhere", "no tar"]))
async def test_a_separate_verifier_sees_artifacts_alone(base_url: str, tmp_path: Path, name: str) -> None:
    command, expected = HANDED_IN[name]
    toml = SEPARATE + f'env = {{ EXPECTED = "{expected}" }}\n{PLAIN}'
    reply = await play(base_url, row_of(make_task(tmp_path / "t", toml=toml, test=SEEN, solve=None)), command)
    assert shown(reply) == (200, 1.0, "passed"), reply
    assert reply[1]["grading_mode"] == "separate"


async def test_a_separate_verifier_has_its_own_set_up(base_url: str, tmp_path: Path) -> None:
    """Its image has the tests, without their mode: the health check, which runs first, stands for the build."""
    toml = (
        PLAIN
        + """[verifier.environment]
workdir = "/srv"
env = { OWN = "1" }
[verifier.environment.healthcheck]
command = "mkdir -p /tests; echo '[ $PWD$OWN = /srv1 ] && echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
"""
    )
    row = row_of(make_task(tmp_path / "t", toml=toml, test=None, solve=None, files={"tests/Dockerfile": "FROM a"}))
    assert shown(await play(base_url, row, "true")) == (200, 1.0, "passed")


async def test_strict_grading_keeps_the_working_folder_and_artifacts(tmp_path: Path) -> None:
    test = says(
        "[ -e /app/in ] && [ ! -e /app/old ] && [ -e /data/kept ] && [ ! -e /data/other ] && [ ! -e /elsewhere ]"
    )
    toml = f'artifacts = ["/data/kept"]\n{PLAIN}'
    folder = make_task(tmp_path / "t", toml=toml, test=test, solve=None, files={"environment/old": ""})
    command = "touch in /elsewhere; rm old; mkdir /data; touch /data/kept /data/other"
    async with serving("prorl_harbor", strict=True) as url:
        reply = await play(url, row_of(folder), command)
        assert shown(reply) == (200, 1.0, "passed"), reply
        status, body, _ = await play(
            url, row_of(make_task(tmp_path / "u", toml='[environment]\ndocker_image = "default"\n'))
        )
        assert (status, body["errors"][0]["field"]) == (422, "harbor.config.environment.workdir")
