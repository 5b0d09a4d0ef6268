# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl_code`` server over HTTP with real sandboxes."""

import asyncio
import contextlib
import json
from pathlib import Path

import aiohttp
import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.tasks.code import convert
from scripts.scripted_turns.code import oracle
from tests.prorl_code.conftest import Client, build, row, saying, serving
from tests.sandbox.running import HANG_S, open_files, until
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
SOLVED = "def truncate_number(number):\n    return number % 1\n"


async def test_complete_session(client: Client) -> None:
    before = containers.instances()
    await client.seed()
    assert len(containers.instances() - before) == 1
    assert "[empty file]" in await client.tool("str_replace_editor", command="view", path="solution.py")
    assert await client.tool("bash", command="pwd") == "/sandbox/workspace\n[exit code: 0]"
    await client.tool("str_replace_editor", command="create", path="solution.py", file_text=SOLVED)
    check = "import solution\nprint(solution.truncate_number(3.5))"
    assert await client.tool("python", code=check) == "0.5\n[ok]"
    assert await client.tool("bash", command="cd /tmp; X=1") == "[exit code: 0]"
    assert await client.tool("bash", command="pwd; echo $X") == "/tmp\n1\n[exit code: 0]"
    assert await client.tool("python", code="solution.truncate_number(1.25)") == "0.25\n[ok]"
    assert (await client.tool("submit")).startswith("Submitted.")
    assert (
        await client.tool("bash", command="ls")
        == "Error: the solution was submitted already, the workspace is closed."
    )
    for _ in range(2):
        assert await client.post("/release_session") == (200, {"released": True}, None)
        assert containers.instances() == before
    status, verdict, _ = await client.verify()
    assert (status, verdict["reward"], verdict["passed"], verdict["verdict"]) == (200, 1.0, True, "passed")
    assert verdict["task_id"] == "HumanEval/2"
    assert containers.instances() == before
    assert (await client.verify())[1] == verdict
    for _ in range(2):
        assert await client.post("/close_session") == (200, {}, None)
    assert (await client.verify())[2] == "session_lost"


def shells() -> int:
    owners = [*state_dir.state_root().glob("s-*")]
    pids = [pid for owner in owners for space in state_dir.pid_namespaces_of(owner) for pid in space.members()]
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{pid}/comm").read_text() == "bash\n"
    return found


async def test_an_offered_shell_starts_before_the_first_call(client: Client) -> None:
    before = shells()
    await client.seed()
    await until(lambda: shells() > before)


async def test_deleted_solution_scores_zero(client: Client) -> None:
    await client.seed()
    await client.tool("bash", command="rm -rf /sandbox/workspace")
    await client.tool("str_replace_editor", command="view", path="gone.py")
    status, verdict, _ = await client.verify()
    assert (status, verdict["reward"], verdict["verdict"]) == (200, 0.0, "no_solution")
    fine = {"calls": 1, "errors": 0, "timeouts": 0, "cut": 0}
    assert verdict["tool_use"] == {"bash": fine, "str_replace_editor": fine | {"errors": 1}}
    assert (verdict["tool_calls"], verdict["tool_errors"]) == (2, 1)


FILL = "for i in 1 2 3 4; do head -c 50M /dev/zero > /tmp/f$i; done; sleep 60"


def limited(**limits: int) -> dict[str, dict[str, int]]:
    return {"singularity": {"memory_mib": 1024, "processes": 256, "disk_mib": 2048} | limits}


async def test_full_disk_scores_zero() -> None:
    async with serving(sandbox_provider=limited(disk_mib=64)) as url, Client(url) as client:
        await client.seed()
        for _ in range(2):
            said = await client.tool("bash", command=FILL)
            assert "disk" in said
            assert said.endswith("the task is over: answer without calling a tool.")
        assert (await client.post("/release_session"))[0] == 200
        status, verdict, kind = await client.verify()
        assert (status, kind, verdict["reward"], verdict["verdict"]) == (200, None, 0.0, "exhausted")
        assert "disk" in verdict["verdict_detail"]
        assert verdict["tool_use"]["bash"] == {"calls": 2, "errors": 2, "timeouts": 0, "cut": 0}


GREEDY = "for i in range(9):\n    open(f'f{i}', 'wb').write(bytes(50 << 20))\nimport time\ntime.sleep(30)\n"


async def test_solution_that_exhausts_its_sandbox_scores_zero() -> None:
    """Memory and processes: tests/tasks/test_grading.py."""
    async with serving(sandbox_provider=limited(disk_mib=64), test_time_limit_s=1) as url, Client(url) as client:
        await client.seed()
        await client.tool("str_replace_editor", command="create", path="solution.py", file_text=GREEDY + SOLVED)
        status, verdict, kind = await client.verify()
        assert (status, kind, verdict["reward"], verdict["verdict"]) == (200, None, 0.0, "exhausted"), verdict


async def test_envelope_of_gyms_environment_servers() -> None:
    """Gym 0.7's environment servers choose the session id; a closed id stays closed."""
    envelope = {"resources_session_id": "s1", "episode_id": "e1", "task_id": "t1", "task_data": row("HumanEval/2")}
    closing = {"resources_session_id": "s1", "episode_id": "e1"}
    async with serving() as url, Client(url) as client:
        before = containers.instances()
        for _ in range(2):
            assert await client.post("/seed_session", envelope) == (200, {"resources_session_id": "s1"}, None)
            assert len(containers.instances() - before) == 1
        assert await client.tool("bash", command="echo on") == "on\n[exit code: 0]"
        for _ in range(2):
            assert await client.post("/close_session", closing) == (200, {"resources_session_id": "s1"}, None)
            assert containers.instances() == before
        status, problem, _ = await client.post("/seed_session", envelope)
        assert (status, problem["errors"][0]["field"]) == (422, "resources_session_id")


def test_invalid_configuration_is_explained() -> None:
    with pytest.raises(ValueError, match="num_workers must be 1"):
        build(num_workers=2)
    with pytest.raises(CallerError, match="sandbox_provider: must be singularity, not opensandbox"):
        build(sandbox_provider={"opensandbox": {}}, image=None)
    with pytest.raises(ValueError, match="'nowhere' is not defined"):
        build(sandbox_provider="nowhere")


SUMS = {"inputs": ["1 2\n", "-5 5\n", "10 20\n"], "outputs": ["3\n", "0\n", "30\n"]}
ADDS = "a, b = map(int, input().split())\nprint(a + b)\n"


async def test_row_without_tools_is_answered_in_text(client: Client) -> None:
    row = {"responses_create_params": {"input": "Add."}, "verifier_metadata": {"unit_tests": SUMS}}
    for text, verdict in ((f"So:\n```python\nwrong\n```\nNo:\n```python\n{ADDS}```\n", "passed"), ("", "no_solution")):
        assert (await client.post("/seed_session", row))[0] == 200
        status, graded, _ = await client.post("/verify", row | {"response": saying(text)})
        assert (status, graded["verdict"]) == (200, verdict), graded
        await client.post("/close_session")


async def test_tests_file_and_fractional_reward(tmp_path: Path) -> None:
    row = convert.row_of({"question": "Add.", "input_output": json.dumps(SUMS)}, tmp_path)
    half = oracle("a, b = map(int, input().split())\nprint(max(a + b, 1))\n")
    async with serving(tests_folder=str(tmp_path), reward="fraction") as url, Client(url) as client:
        graded = await client.play(row, half["turns"])
    assert (graded["verdict"], graded["reward"]) == ("wrong_answer", 2 / 3)
    assert [failure["test"] for failure in graded["tests"]["failures"]] == [1]
    assert graded["solution"].startswith("a, b = ")


async def test_release_ends_running_calls(client: Client) -> None:
    before = containers.instances()
    await client.seed()
    calls = [
        asyncio.create_task(client.post("/bash", {"command": "sleep 60"})),
        asyncio.create_task(client.post("/python", {"code": "import time; time.sleep(60)"})),
    ]
    await asyncio.sleep(0.3)
    assert await client.post("/release_session") == (200, {"released": True}, None)
    assert containers.instances() == before
    for call in calls:
        assert (await asyncio.wait_for(call, HANG_S))[2] == "session_lost"
    assert (await client.verify())[1]["verdict"] == "no_solution"


async def test_sessions_leak_no_descriptors(base_url: str) -> None:
    async def life() -> None:
        async with Client(base_url) as client:
            await client.seed()
            await client.tool("bash", command="sleep 100 & echo")
            await client.tool("python", code="1")
            await client.post("/close_session")

    await life()
    before = open_files()
    for _ in range(3):
        await life()
    await until(lambda: open_files() <= before)  # the server closes connections later than the client


async def test_disconnect_while_seeding_leaves_no_sandbox(base_url: str) -> None:
    """Disconnects at three moments before a sandbox can be ready."""
    before = containers.instances()
    for delay_s in (0.002, 0.004, 0.008):
        async with aiohttp.ClientSession() as http:
            seeding = asyncio.create_task(http.post(f"{base_url}/seed_session", json=row("HumanEval/2")))
            await asyncio.sleep(delay_s)
            seeding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await seeding
    await asyncio.sleep(1)
    await until(lambda: containers.instances() == before)  # serving() asserts that it stays so
