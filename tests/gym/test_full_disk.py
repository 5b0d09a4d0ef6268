# SPDX-License-Identifier: Apache-2.0
"""A machine whose disk is full, while agents work and while their work is graded: no reward, and none of 0 either."""

import asyncio
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.mixed_rows import ORACLE, rows_of
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView
from nemo_gym_prorl.scripted.text import MODEL_NAME


pytestmark = [pytest.mark.gym, pytest.mark.sandbox, pytest.mark.timeout(600)]

Change = Callable[[str], str]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of its own with little room, where sandboxes are kept."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-disk-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=1777", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no small file system can be made: {error}")
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"no small file system can be made: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


def fill(disk: Path) -> None:
    """Until nothing more fits."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def empty(disk: Path) -> None:
    (disk / "filler").unlink()


def row(change: Change = str, first_s: float = 0.0, tool: str | None = None) -> dict[str, Any]:
    """A problem that is solved, by a program that is changed first, after ``first_s`` seconds of thought; ``tool`` is
    ``bash`` if it is written by a shell."""
    found = next(row for row in rows_of("code", ORACLE, 2) if "unit_tests" in row["verifier_metadata"])
    script = orjson.loads(found["responses_create_params"]["metadata"]["script"])
    [write] = script["turns"][0]["tool_calls"]
    write["arguments"]["file_text"] = change(write["arguments"]["file_text"])
    if tool == "bash":
        text = write["arguments"]["file_text"]
        write |= {"name": "bash", "arguments": {"command": f"cat > solution.py <<'END'\n{text}\nEND"}}
    script["turns"][0]["latency_s"] = first_s
    found["responses_create_params"]["metadata"]["script"] = orjson.dumps(script).decode()
    return found


def sleeping(source: str) -> str:
    return f"import time\ntime.sleep(1)\n{source}"


def writing(source: str) -> str:
    """Right, but needs room for a file."""
    return f"import time\ntime.sleep(1)\nopen('notes', 'wb').write(bytes(2 << 20))\n{source}"


def masked(job: JobView) -> str:
    """The kind of a failure that nobody trains on."""
    assert job.reward is None, job
    assert job.failure is not None
    assert job.result is not None
    assert job.result["mask_sample"] is True
    return job.failure.kind.value


async def when(client: RolloutClient, job: JobView, state: JobState) -> None:
    async with asyncio.timeout(60):
        while (await client.get(job.id)).state is not state:
            await asyncio.sleep(0.02)


async def test_a_full_disk_is_no_reward(
    scripted_policy: str, shared_ray: str, small_disk: Path, tmp_path: Path
) -> None:
    agent = "++prorl_code_agent.responses_api_agents.prorl_agent"
    async with (
        GymDeployment(
            config_paths=["environments/prorl_code/config.yaml"],
            model_type="vllm_model/vllm_model_for_training",
            policy_base_url=scripted_policy,
            policy_model_name=MODEL_NAME,
            overrides=[shared_ray, f"{agent}.stages.eval=1", f"{agent}.max_attempts=2"],
            env={"PRORL_STATE": str(small_disk)},
            work_dir=tmp_path / "gym",
            start_timeout_s=300,
        ) as gym,
        RolloutClient(gym.url("prorl_code_agent")) as client,
    ):

        async def all_is_well() -> None:
            job = await client.submit(row(writing))
            assert (await client.wait(job.id)).reward == 1.0

        async def when_full(job: JobView) -> JobView:
            await asyncio.to_thread(fill, small_disk)
            try:
                return await client.wait(job.id)
            finally:
                empty(small_disk)

        await all_is_well()

        # While the policy thinks about its first turn: what it then writes by a shell is not there in the end.
        job = await client.submit(row(first_s=3, tool="bash"))
        await when(client, job, JobState.RUNNING)
        await asyncio.sleep(1)
        assert masked(await when_full(job)) == "session_lost"
        await all_is_well()

        # While the program is tested, which needs room: not its fault.
        job = await client.submit(row(writing))
        await when(client, job, JobState.EVALUATING)
        assert masked(await when_full(job)) in ("verifier_error", "provider_unavailable")
        await all_is_well()

        # Before the sandbox of its grading is started: the one slot has another one's.
        first, second = [await client.submit(row(sleeping)) for _ in range(2)]
        await when(client, first, JobState.EVALUATING)
        await when(client, second, JobState.EVALUATING)
        last = await when_full(second)
        assert 0.0 not in (last.reward, (await client.wait(first.id)).reward)
        await all_is_well()
        assert (await client.status()).sessions == 0
