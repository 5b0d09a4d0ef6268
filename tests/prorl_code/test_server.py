# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl_code`` server over HTTP with real sandboxes."""

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from tests.prorl_code.conftest import Client, build, row, serving
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


@pytest.mark.parametrize(("offered", "started"), [("bash", True), ("python", False)])
async def test_an_offered_shell_starts_before_the_first_call(client: Client, offered: str, started: bool) -> None:
    """bash counts the seconds since its start."""
    task = row("HumanEval/2")
    tools = [tool for tool in task["responses_create_params"]["tools"] if tool["name"] == offered]
    await client.post("/seed_session", task | {"responses_create_params": {"input": "x", "tools": tools}})
    await asyncio.sleep(1.5)
    observation = await client.tool("bash", command="echo $SECONDS")
    assert (int(observation.split()[0]) > 0) is started


async def test_closing_a_session_cancels_its_grading(client: Client) -> None:
    """Cancelling a rollout frees its grading sandbox at once."""
    before = containers.instances()
    await client.seed("HumanEval/0")
    slow = "import time\ndef has_close_elements(numbers, threshold):\n    time.sleep(60)\n"
    await client.tool("str_replace_editor", command="create", path="solution.py", file_text=slow)
    assert (await client.post("/release_session"))[0] == 200
    verifying = asyncio.ensure_future(client.verify("HumanEval/0"))
    while not containers.instances() - before:
        await asyncio.sleep(0.02)
    assert (await client.post("/close_session"))[0] == 200
    assert containers.instances() == before
    assert (await verifying)[2] == "session_lost"


async def test_deleted_solution_scores_zero(client: Client) -> None:
    await client.seed()
    await client.tool("bash", command="rm -rf /sandbox/workspace")
    await client.tool("str_replace_editor", command="view", path="gone.py")
    status, verdict, _ = await client.verify()
    assert (status, verdict["reward"], verdict["verdict"]) == (200, 0.0, "no_solution")
    fine = {"calls": 1, "errors": 0, "timeouts": 0, "cut": 0}
    assert verdict["tool_use"] == {"bash": fine, "str_replace_editor": fine | {"errors": 1}}
    assert (verdict["tool_calls"], verdict["tool_errors"]) == (2, 1)


async def test_bad_tool_calls_are_observations(client: Client, base_url: str) -> None:
    await client.seed()
    assert (await client.tool("bash", cmd="ls")).startswith("Error in the arguments of bash: cmd: Extra inputs")
    status, observation, _ = await client.post("/bash", ["ls"])
    assert (status, observation.split(".")[0]) == (200, "Error: the arguments of bash must be a JSON object")
    async with aiohttp.ClientSession() as http, http.post(f"{base_url}/bash", data=b"{") as response:
        assert response.status == 500  # no session
    status, _, kind = await client.post("/no_such_tool")
    assert (status, kind) == (404, None)


async def test_sessions_are_isolated(base_url: str) -> None:
    async with Client(base_url) as one, Client(base_url) as other:
        await asyncio.gather(one.seed(), other.seed())
        await one.tool("bash", command="echo mine > mine")
        assert "mine" not in await other.tool("bash", command="ls -R / 2>/dev/null | grep -x mine; ls")
        await one.post("/close_session")
        assert await other.tool("bash", command="echo on") == "on\n[exit code: 0]"


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
        assert (await asyncio.wait_for(call, 20))[2] == "session_lost"
    assert (await client.verify())[1]["verdict"] == "no_solution"


async def test_broken_sandbox_scores_zero(client: Client) -> None:
    """A broken sandbox is not a failure, which would be masked or retried."""
    await client.seed()
    await client.tool("bash", command="rm -rf /usr/bin/* /usr/lib/python3* /sandbox")
    await client.tool("python", code="import os; os._exit(0)")
    await client.tool("bash", command="exit")
    status, verdict, _ = await client.verify()
    assert (status, verdict["reward"], verdict["verdict"]) == (200, 0.0, "no_solution")


FILL = "for i in 1 2 3 4; do head -c 50M /dev/zero > /tmp/f$i; done; sleep 60"


def limited(**limits: int) -> dict[str, dict[str, int]]:
    """Return provider settings with sandbox limits."""
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


async def test_disk_filled_after_submission_scores_zero() -> None:
    """The disk limit is exceeded after the agent's last call."""
    async with serving(sandbox_provider=limited(disk_mib=64)) as url, Client(url) as client:
        await client.seed()
        await client.tool("bash", command=f"({FILL}) > /dev/null 2>&1 &")
        await client.tool("submit")
        before = containers.instances()
        async with asyncio.timeout(60):
            while containers.instances() == before:
                await asyncio.sleep(0.1)
        status, verdict, kind = await client.verify()
        assert (status, kind, verdict["reward"], verdict["verdict"]) == (200, None, 0.0, "exhausted")


async def test_exhausted_processes_are_an_observation() -> None:
    async with serving(sandbox_provider=limited(processes=40)) as url, Client(url) as client:
        await client.seed()
        await client.tool("bash", command="for i in $(seq 200); do sleep 1000 & done", timeout_s=2)
        assert (await client.tool("python", code="1")).startswith("Error: ")
        await client.tool("str_replace_editor", command="create", path="solution.py", file_text=SOLVED)
        status, verdict, kind = await client.verify()
        assert (status, kind, verdict["reward"], verdict["verdict"]) == (200, None, 1.0, "passed")


GREEDY = {
    "disk": "for i in range(9):\n    open(f'f{i}', 'wb').write(bytes(50 << 20))\nimport time\ntime.sleep(30)\n",
    "memory": "kept = [bytearray(1 << 20) for _ in range(900)]\nimport time\ntime.sleep(30)\n",
    "processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
}


@pytest.mark.parametrize("resource", GREEDY)
async def test_solution_that_exhausts_its_sandbox_scores_zero(resource: str) -> None:
    provider = limited(memory_mib=256, disk_mib=64, processes=40)
    async with serving(sandbox_provider=provider, test_time_limit_s=1) as url, Client(url) as client:
        await client.seed()
        source = GREEDY[resource] + SOLVED
        await client.tool("str_replace_editor", command="create", path="solution.py", file_text=source)
        status, verdict, kind = await client.verify()
        assert (status, kind, verdict["reward"]) == (200, None, 0.0), verdict
        assert verdict["verdict"] == ("exhausted" if resource == "disk" else verdict["verdict"])
        assert verdict["verdict"] in ("exhausted", "crashed", "timed_out"), verdict


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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
    async with asyncio.timeout(60):
        while open_files() > before:  # the server closes connections later than the client
            await asyncio.sleep(0.05)


async def test_gyms_own_provider_works_without_sessions() -> None:
    provider = {"apptainer": {"create": {"extra_start_args": ["--containall", "--cleanenv", "--writable-tmpfs"]}}}
    async with serving(sandbox_provider=provider) as url, Client(url) as client:
        await client.seed()
        kept = "only files are kept for the next call"
        assert await client.tool("bash", command="X=1; pwd") == f"/sandbox/workspace\n[exit code: 0; {kept}]"
        assert await client.tool("bash", command="echo $X") == f"\n[exit code: 0; {kept}]"
        assert await client.tool("python", code="print(1)") == f"1\n[ok; {kept}]"
        assert await client.tool("bash", command="sleep 9", timeout_s=0.5) == f"[timed out after 0.5 s; {kept}]"
        await client.tool("str_replace_editor", command="create", path="solution.py", file_text=SOLVED)
        status, verdict, _ = await client.verify()
        assert (status, verdict["reward"]) == (200, 1.0)


async def test_missing_image_is_an_infrastructure_failure() -> None:
    async with serving(image="/nowhere/no.sif") as url, Client(url) as client:
        status, problem, kind = await client.post("/seed_session", row("HumanEval/2"))
        assert (status, kind) == (500, "provider_unavailable")
        assert "/nowhere/no.sif" in problem["detail"]
        [wrong] = problem["errors"]
        assert wrong["field"] == "image"


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
    deadline = time.monotonic() + 30
    await asyncio.sleep(1)
    while containers.instances() != before and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    assert containers.instances() == before

    # serving() itself asserts that no container is left


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
    with pytest.raises(ValueError, match="image: missing; the sandbox provider 'opensandbox' has no default"):
        build(sandbox_provider={"opensandbox": {}}, image=None)
    with pytest.raises(ValueError, match="'nowhere' is not defined"):
        build(sandbox_provider="nowhere")
