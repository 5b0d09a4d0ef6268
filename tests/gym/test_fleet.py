# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve --ray`` as a user runs it: nodes of a real Ray cluster, one of which dies."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.raylets import ENVIRONMENT, raylets
from nemo_gym_prorl.demo_scripts import script_for
from nemo_gym_prorl.gym.command_line import MARK_NAME
from nemo_gym_prorl.processes import ProcessMark
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.code.humaneval import problems, row_for


KEY = "fleet-key"
"""Ray's nodes have the machine's own address."""
GONE_S = 5.0
"""Within which a node's death is known, by the health checks of :mod:`benchmarks.raylets`."""


def row(number: int, variant: str) -> dict[str, Any]:
    problem = [*problems().values()][number]
    script = script_for(problem, variant)
    script["turns"] = [{**turn, "latency_s": 1.0} for turn in script["turns"]]
    return row_for(problem, script)


@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_a_node_dies_and_every_rollout_has_its_reward(scripted_policy: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mark = ProcessMark("PRORL_TEST_FLEET", os.urandom(8).hex())
    options = {
        "policy-url": scripted_policy,
        "policy-model": MODEL_NAME,
        "head-port": port,
        "log-dir": tmp_path / "gym",
    }
    log = tmp_path / "serve.log"
    async with raylets(2) as cluster, asyncio.timeout(600):
        words = [f"--{name}={value}" for name, value in {**options, "ray": cluster.address}.items()]
        with log.open("wb") as stream:
            front = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from nemo_gym_prorl.cli import main; main()", "serve", "prorl_code", *words),
                cwd=tmp_path,
                env={**os.environ, **ENVIRONMENT, mark.name: mark.value, "PRORL_TOKEN": KEY},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        while "2 nodes" not in log.read_text():
            assert front.returncode is None, log.read_text()
            await asyncio.sleep(0.5)
        for node, address in zip(cluster.nodes, ("127.0.0.2", "127.0.0.3"), strict=True):
            assert f"{node} up at http://{address}:" in log.read_text(), "it listens where Ray says that the node is"
        async with RolloutClient(f"http://127.0.0.1:{port}", KEY) as client:
            jobs = [
                await client.submit(row(i, "reference" if i % 3 else "stub"), id=f"r{i}", group=f"g{i // 2}")
                for i in range(12)
            ]
            while (await client.status()).states[JobState.RUNNING] < 6:
                await asyncio.sleep(0.1)
            lost = cluster.nodes[0]
            await cluster.kill(lost)
            async with asyncio.timeout(GONE_S + 2):
                while f"{lost} is gone" not in log.read_text():
                    await asyncio.sleep(0.1)
            ended = [await client.wait(job.id) for job in jobs]
        assert [job.reward for job in ended] == [float(i % 3 > 0) for i in range(12)]
        assert any(failure.kind == "session_lost" for job in ended for failure in job.failed_attempts)
        front.send_signal(signal.SIGTERM)
        await asyncio.wait_for(front.wait(), 90)
        assert await mark.kill(settle_s=5) == {}
    everything = ProcessMark(MARK_NAME, "").processes()
    assert not [command for command in everything.values() if str(tmp_path) in command]
