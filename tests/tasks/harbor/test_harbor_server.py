# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl_harbor`` server over HTTP: each behaviour of the format with a task of its own."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from nemo_gym_prorl.sandbox.supervisor.state_dir import SCRATCH, state_root
from nemo_gym_prorl.tasks.harbor import grading, verification
from nemo_gym_prorl.tasks.harbor.rewards import Outcome
from tests.conftest import LONG, tiered
from tests.prorl_code.conftest import RESPONSE, Client, serving
from tests.tasks.harbor.folders import ANSWER, PLAIN, SOLVE, TEST, make_task, play, row_of, says, shown, snapshots


pytestmark = pytest.mark.sandbox


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with serving("prorl_harbor") as url:
        yield url


@pytest.mark.parametrize(("command", "result"), [(ANSWER, (200, 1.0, "passed")), ("true", (200, 0.0, "failed"))])
async def test_the_tests_decide(base_url: str, tmp_path: Path, command: str, result: object) -> None:
    assert shown(await play(base_url, row_of(make_task(tmp_path / "t")), command)) == result


def writes(name: str, text: str) -> str:
    """Return a test script that writes a file of rewards if the answer is right, else the reward 0."""
    return (
        "#!/bin/bash\ncd /logs/verifier; echo output\n"
        f"if [ -e /app/answer ]; then printf '%s' '{text}' > {name}; else echo 0 > reward.txt; fi\n"
    )


NO_WORKDIR = '[environment]\ndocker_image = "default"\n'
HEALTHY = """
[environment.healthcheck]
command = "echo . >> /tmp/tries; [ $(wc -l < /tmp/tries) -ge 3 ]"
start_period_sec = 60
start_interval_sec = 0.1
"""
HOOK = '[[verifier.collect]]\ncommand = "cp answer /logs/artifacts/kept"\n[[verifier.collect]]\ncommand = "false"\n'
PASSED, FAILED, REFUSED = (200, 1.0, "passed"), (200, 0.0, "failed"), (422, None, "verifier_error")

BEHAVIOURS = {
    "the tests run in the working folder": ({"test": says("[ $PWD = /app ]")}, "true", PASSED),
    "without a working folder all runs in /": (
        {"toml": NO_WORKDIR, "test": says("[ $PWD = / ] && [ $(cat /where) = / ]")},
        "pwd > where",
        PASSED,
    ),
    "a script without an interpreter runs in bash": (
        {"test": "a=(0 1)\necho ${a[1]} > /logs/verifier/reward.txt"},
        "true",
        PASSED,
    ),
    "folders of logs are open to all": (
        {"test": says('[ "$(cat /app/modes)" = "777 777 777" ]')},
        "echo $(stat -c %a /logs/agent /logs/verifier /logs/artifacts) > modes",
        PASSED,
    ),
    "links of the agent to its own files, the image and the logs": (
        {"test": says("[ -L /app/own ] && [ -L /app/shell ] && [ -L /app/logs ]")},
        "touch file; ln -s file own; ln -s /bin/sh shell; ln -s /logs/verifier logs",
        PASSED,
    ),
    "files of the agent's logs reach the tests": (
        {"test": says("[ -e /logs/agent/log ]")},
        "touch /logs/agent/log",
        PASSED,
    ),
    "no tests and no solution with the agent": (
        {"test": says("[ ! -s /app/seen ]")},
        "ls -d /tests /solution > seen",
        PASSED,
    ),
    "a health check that succeeds in time": ({"toml": PLAIN + HEALTHY}, ANSWER, PASSED),
    "variables of the environment": (
        {
            "toml": PLAIN + 'env = { A = "x y", B = "${NO_SUCH:-z}" }\n',
            "test": says('[ "$A$B" = "x yz" ] && [ -e /app/ok ]'),
        },
        '[ "$A$B" = "x yz" ] && touch ok',
        PASSED,
    ),
    "the exit code means nothing": ({"test": TEST + "exit 3"}, ANSWER, PASSED),
    "tests can write beside themselves": (
        {"test": says("mkdir /tests/d/e && echo x >> /tests/d/a && touch /tests/.b"), "files": {"tests/d/a": "x\n"}},
        "true",
        PASSED,
    ),
    "files of environment are uploaded": (
        {"files": {"environment/in/data": "7"}, "test": says("[ $(cat /app/in/data) = 7 ]")},
        "true",
        PASSED,
    ),
    "a hook runs before the snapshot, and one that fails ends nothing": (
        {"toml": PLAIN + HOOK, "test": says("[ -e /logs/artifacts/kept ]")},
        ANSWER,
        PASSED,
    ),
    "a reward.json that only the agent's program writes": (
        {"test": 'cd /app; if [ "$(bash run)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'},
        "echo 'echo 1 > /logs/verifier/reward.json' > run",
        FAILED,
    ),
    "a reward that strict grading cannot check": (
        {"test": "[ -e /elsewhere ] && echo 1 > /logs/verifier/reward.txt", "solve": "touch /elsewhere"},
        "touch /elsewhere",
        PASSED,
    ),
    "a reward that strict grading refuses to the solution": (
        {"test": says("[ -e /elsewhere ]"), "solve": "touch /elsewhere"},
        "touch /elsewhere",
        PASSED,
    ),
    "a right answer where the solution earns nothing": ({"solve": "true"}, ANSWER, REFUSED),
    "a child that holds the output": ({"test": TEST + "sleep 600 &"}, ANSWER, PASSED),
    "a solution with variables, which fails in the end": (
        {
            "toml": PLAIN + "[solution.env]\nS = '42'\n",
            "solve": "echo $S > answer; [ $DEBIAN_FRONTEND ] || rm answer; exit 3",
        },
        ANSWER,
        PASSED,
    ),
}


LATER = (
    *("a script without an interpreter runs in bash", "folders of logs are open to all"),
    *("files of the agent's logs reach the tests", "the exit code means nothing"),
    *("a child that holds the output", "without a working folder all runs in /"),
)


@pytest.mark.parametrize("name", tiered(BEHAVIOURS, BEHAVIOURS.keys() - {*LATER}))
async def test_behaviours_of_the_format(base_url: str, tmp_path: Path, name: str) -> None:
    task, command, result = BEHAVIOURS[name]
    # The default solution solves the default tests only.
    folder = make_task(tmp_path / "t", **({"solve": None} if "test" in task else {}) | task)
    reply = await play(base_url, row_of(folder), command)
    assert shown(reply) == result, reply


async def test_a_control_run_outlives_the_rollout_that_began_it(base_url: str, tmp_path: Path) -> None:
    row = row_of(make_task(tmp_path / "t", solve="sleep 4; echo 42 > /app/answer"))
    async with Client(base_url) as first, Client(base_url) as second:
        for client in (first, second):
            assert (await client.post("/seed_session", row))[0] == 200
            await client.tool("bash", command=ANSWER)
            assert (await client.post("/release_session"))[0] == 200
        verifying = asyncio.ensure_future(first.post("/verify", {**row, "response": RESPONSE}))
        await asyncio.sleep(2)
        assert (await first.post("/close_session"))[0] == 200
        assert (await verifying)[2] == "session_lost"
        assert shown(await second.post("/verify", {**row, "response": RESPONSE})) == PASSED
        assert (await second.post("/close_session"))[0] == 200
    assert snapshots() == []


async def test_a_control_run_that_fails_is_repeated_before_it_refuses(base_url: str, tmp_path: Path) -> None:
    solve = f"t={int(time.time()) + 5}\n[ $(date +%s) -gt $t ] && echo 42 > /app/answer\n" + (
        "while [ $(date +%s) -le $t ]; do sleep 0.1; done"
    )
    assert shown(await play(base_url, row_of(make_task(tmp_path / "t", solve=solve)), ANSWER)) == PASSED


@pytest.mark.parametrize("network", [None, "none"])
async def test_a_refusal_says_how_the_solution_ended(base_url: str, tmp_path: Path, network: str | None) -> None:
    row = row_of(make_task(tmp_path / "t", solve="echo no mirror; exit 100"), network=network)
    status, body, _ = await play(base_url, row, ANSWER)
    assert (status, "the solution ended with exit code 100: no mirror" in body["detail"]) == (422, True)
    assert ("Harbor's is public" in body["detail"]) is (network is None)


async def test_all_rewards_are_kept_and_one_counts(base_url: str, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t", test=writes("reward.json", '{"reward": 0.5, "speed": 9, "ok": true}'))
    status, body, _ = await play(base_url, row_of(folder), ANSWER)
    assert (status, body["reward"], body["rewards"]) == (200, 0.5, {"reward": 0.5, "speed": 9.0, "ok": 1.0})
    assert (body["grading_mode"], body["verifier_output"]) == ("strict", "output\n")


NO_VERDICT = {
    "no reward file": "true",
    "a pipe": "mkfifo /logs/verifier/reward.txt",
    "a reward, and then no end": "echo 1 > /logs/verifier/reward.txt; sleep 600",
    "an interpreter that is missing": "#!/no/such/interpreter",
    "too many logs": "echo 1 > /logs/verifier/reward.txt; head -c 20M /dev/zero > /logs/verifier/log; sleep 60",
    "too much beside the tests": "echo 1 > /logs/verifier/reward.txt; head -c 20M /dev/zero > /tests/big; sleep 60",
    "a verifier that ends its sandbox": "kill -9 -1",
}


FIRST = ("no reward file", "a pipe", "a reward, and then no end", "an interpreter that is missing", "too many logs")


@pytest.mark.parametrize("has_solution", [True, False])
@pytest.mark.parametrize("name", tiered(NO_VERDICT, FIRST))
async def test_a_verifier_that_cannot_run_is_never_a_reward(tmp_path: Path, name: str, has_solution: bool) -> None:
    toml = PLAIN + "[verifier]\ntimeout_sec = 2\n"
    folder = make_task(tmp_path / "t", toml=toml, test=NO_VERDICT[name], solve=SOLVE if has_solution else None)
    async with serving("prorl_harbor", verifier_logs_mib=8) as base_url:
        for command in (ANSWER, "true") if LONG else (ANSWER,):
            reply = await play(base_url, row_of(folder), command)
            assert shown(reply) == (422, None, "verifier_error"), reply


SEPARATE = "[verifier.environment]\n"
CANNOT_START = {
    "no such user": PLAIN + "[verifier]\nuser = 'nobody-here'\n",
    "lines of another system": PLAIN,
    "a working folder that is gone": PLAIN + "[[verifier.collect]]\ncommand = 'cd /; rm -rf /app; touch /app'\n",
    "a separate verifier that is not healthy": PLAIN + f"{SEPARATE}healthcheck = {{command = 'false', retries = 1}}\n",
    "a separate image without tests": PLAIN + SEPARATE,
    "a separate image that is not there": PLAIN + SEPARATE,
}


@pytest.mark.parametrize("name", CANNOT_START)
async def test_a_verifier_that_cannot_start_is_never_a_reward(base_url: str, tmp_path: Path, name: str) -> None:
    test = TEST.replace("\n", "\r\n") if "lines" in name else TEST
    files = {"tests/Dockerfile": "FROM default\n"} if "image" in name else {}
    row = row_of(make_task(tmp_path / "t", toml=CANNOT_START[name], test=test, files=files))
    if "not there" in name:
        row["harbor"]["verifier_images"][""]["image"] = "no-such-image"
    status, body, kind = await play(base_url, row, ANSWER)
    refused = (422, None) if "not there" in name else (422, "verifier_error")
    assert (status, kind) == refused, body
    gc.collect()
    assert list((state_root() / SCRATCH).iterdir()) == [], "artifacts outlive the rollout"


async def test_logs_of_the_verifier_are_limited_and_removed(tmp_path: Path) -> None:
    hidden = "mkdir -p a/b; cd a/b; head -c 20M /dev/zero > big; chmod 000 .; cd ..; chmod 000 ."
    test = f"cd /logs/verifier; echo 1 > reward.txt; ({hidden}); sleep 100"
    async with serving("prorl_harbor", verifier_logs_mib=8) as base_url:
        reply = await play(base_url, row_of(make_task(tmp_path / "t", test=test, solve=None)), "true")
    assert shown(reply) == REFUSED
    assert "wrote more than 8 MiB" in reply[1]["detail"]
    assert list((state_root() / SCRATCH).iterdir()) == []


USERS = """
[agent]
user = "daemon"
[verifier]
user = "games"
"""
WHO = says('[ "$(cat /tmp/who)" = "daemon daemon" ] && [ $(id -un) = games ]')


several = pytest.mark.skipif(bool(multi_user_error()), reason="this user has no range of ids")


@pytest.mark.parametrize(("users", "result"), [pytest.param(True, PASSED, marks=several), (False, REFUSED)])
async def test_agent_and_tests_have_their_users(tmp_path: Path, users: bool, result: object) -> None:
    """A sandbox with one user runs all commands as that user, so that the solution earns nothing either."""
    folder = make_task(tmp_path / "t", toml=PLAIN + USERS, test=WHO, solve="echo daemon daemon > /tmp/who")
    row, provider = row_of(folder), {"singularity": {"users": users}}
    async with serving("prorl_harbor", sandbox_provider=provider) as base_url, Client(base_url) as client:
        assert (await client.post("/seed_session", row))[0] == 200
        await client.tool("str_replace_editor", command="create", path="/tmp/mine", file_text="")
        await client.tool("bash", command="echo $(id -un) $(stat -c %U /tmp/mine) > /tmp/who")
        reply = await client.post("/verify", {**row, "response": RESPONSE})
        assert shown(reply) == result, reply
        assert (await client.post("/close_session"))[0] == 200


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            {"toml": PLAIN + "[environment.healthcheck]\ncommand = 'false'\ninterval_sec = 0.1\n"},
            "failed 3 times: false",
        ),
        ({"toml": PLAIN + "[agent]\nuser = 'nobody-here'\n"}, "no user 'nobody-here'"),
    ],
)
async def test_a_sandbox_that_cannot_be_set_up_is_no_rollout(
    base_url: str, tmp_path: Path, task: dict[str, str], says: str
) -> None:
    status, body, kind = await play(base_url, row_of(make_task(tmp_path / "t", **task)))
    assert (status, kind) == (500, "provider_unavailable")
    assert says in body["detail"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"folder": "/no/such/folder"}, "harbor.folder"),
        ({"digest": "0" * 64}, "harbor.digest"),
        ({"config": {"environment": {"env": {"A": "${HOME}"}}}}, "harbor.config.environment.env.A"),
    ],
)
async def test_a_row_that_cannot_run_is_refused_by_field(
    base_url: str, tmp_path: Path, change: dict[str, object], field: str
) -> None:
    row = row_of(make_task(tmp_path / "t"))
    status, body, _ = await play(base_url, {**row, "harbor": row["harbor"] | change})
    assert (status, body["errors"][0]["field"]) == (422, field)


async def test_variables_of_the_machine_must_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTED", "yes")
    toml = PLAIN + "[verifier.env]\nA = '${LISTED}'\n"
    async with serving("prorl_harbor", host_variables=["LISTED"]) as base_url:
        reply = await play(base_url, row_of(make_task(tmp_path / "t", toml=toml, test=says("[ $A = yes ]"))))
        assert shown(reply) == PASSED


async def test_a_missing_verdict_is_put_down_to_the_agent_if_the_solution_gets_one(
    base_url: str, tmp_path: Path
) -> None:
    test = "[ -e /app/ruin ] || echo $(wc -c < /app/answer 2> /dev/null || echo 0) > /logs/verifier/reward.txt"
    row = row_of(make_task(tmp_path / "t", test=test))
    for _ in range(2):
        reply = await play(base_url, row, "touch ruin")
        assert shown(reply) == (200, 0.0, "tampered")
    assert reply[1]["verdict_detail"] == "the tests wrote no reward.txt"
    row = row_of(make_task(tmp_path / "u", test=test, solve=None))
    assert shown(await play(base_url, row, "touch ruin")) == (422, None, "verifier_error")


async def test_tests_that_hang_are_not_repeated(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an agent could exceed EVAL's budget, which is a failure rather than the reward 0."""
    problems = []

    async def counted(*arguments: Any) -> Outcome:
        problems.append((outcome := await verification.verify(*arguments)).problem)
        return outcome

    monkeypatch.setattr(grading, "verify", counted)
    folder = make_task(tmp_path / "t", toml=PLAIN + "[verifier]\ntimeout_sec = 10\n")
    assert shown(await play(base_url, row_of(folder), "mkfifo answer")) == (200, 0.0, "tampered")
    assert [one for one in problems if one] == ["the tests did not end within 10 s"]
