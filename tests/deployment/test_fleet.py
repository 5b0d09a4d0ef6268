# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve --ray`` as a user runs it: nodes of a real Ray cluster, one of which dies."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.cli.scripted.demo import script_for
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.deployment.gym_cli import MARK_NAME
from nemo_gym_prorl.processes import ProcessMark, reaper_command
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.sandbox.images.entries import cache_dir
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.deployment.raylets import ENVIRONMENT, Raylets, raylets
from tests.policy.engines import free_port


pytestmark = [pytest.mark.gym, pytest.mark.long("starts nodes of a Ray cluster, with a deployment on each")]

KEY = "fleet-key"
"""Ray's nodes have the machine's own address."""
GONE_S = 5.0
"""Within which a node's death is known, by the health checks of :mod:`tests.deployment.raylets`."""


def row(number: int, variant: str) -> dict[str, Any]:
    problem = [*problems().values()][number]
    script = script_for(problem, variant)
    script["turns"] = [{**turn, "latency_s": 1.0} for turn in script["turns"]]
    return humaneval_row(problem, script)


@contextlib.asynccontextmanager
async def served(nodes: int, folder: Path, policy_url: str) -> AsyncIterator[tuple[Raylets, str, Path]]:
    """``prorl serve prorl_code --ray`` over so many nodes: the cluster, the front's address and its log. When it has
    ended in order nothing is left."""
    port = free_port()
    mark = ProcessMark("PRORL_TEST_FLEET", os.urandom(8).hex())
    options = {"policy-url": policy_url, "policy-model": MODEL_NAME, "head-port": port, "log-dir": folder / "gym"}
    log = folder / "serve.log"
    async with raylets(nodes) as cluster:
        words = [f"--{name}={value}" for name, value in {**options, "ray": cluster.address}.items()]
        with log.open("wb") as stream:
            front = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()"),
                *("serve", "prorl_code", *words),
                cwd=folder,
                env={**os.environ, **ENVIRONMENT, mark.name: mark.value, "PRORL_TOKEN": KEY},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        while f"{nodes} nodes" not in log.read_text():
            assert front.returncode is None, log.read_text()
            await asyncio.sleep(0.5)
        yield cluster, f"http://127.0.0.1:{port}", log
        front.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(front.wait(), 90) == 0, log.read_text()
        assert await mark.kill(settle_s=5) == {}
    everything = ProcessMark(MARK_NAME, "").processes()
    assert not [command for command in everything.values() if str(folder) in command]


async def test_nodes_without_a_key_are_refused_at_once(tmp_path: Path) -> None:
    async with raylets(0) as cluster:
        host = cluster.address.partition(":")[0]
        if host.startswith("127."):
            pytest.skip("this machine has the loopback device alone")
        await cluster.add(ADDRESS=host)
        front = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()", "serve", "prorl_code"),
            *("--policy-model=m", f"--head-port={free_port()}", f"--ray={cluster.address}"),
            cwd=tmp_path,
            env={name: value for name, value in (os.environ | ENVIRONMENT).items() if name != "PRORL_TOKEN"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said = (await asyncio.wait_for(front.communicate(), 60))[0].decode()
        finally:
            if front.returncode is None:
                front.kill()
    assert front.returncode == 1, said
    assert re.search(
        rf"^prorl: --token: the nodes' agents would listen on {host} without a key: set PRORL_TOKEN$", said, re.M
    )


def on_one_machine(policy_url: str, ray_port: int, head_port: int) -> str:
    """The page's commands for Ray as a script: two nodes, by two addresses of this machine, and what comes after."""
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    lines = re.findall(r"^    (.+)$", page.partition("## On Ray")[2].partition("## On Slurm")[0], re.MULTILINE)
    there = {"FIRST:6379": f"127.0.0.2:{ray_port}", "--port=6379": f"--port={ray_port}", "my-model": MODEL_NAME}
    there |= {"http://gpu-1:8000/v1": policy_url}
    script = ["set -e"]
    node = 1  # the machine's own address is not loopback for Ray
    for line in lines:
        for written, meant in there.items():
            line = line.replace(written, meant)
        if line.startswith("ray start"):
            node += 1
            line = line.partition("#")[0] + f" --node-ip-address=127.0.0.{node} --num-cpus=1"
            line += " --include-dashboard=false" * ("--head" in line)
        elif line.startswith("prorl serve"):
            line += f" --head-port={head_port} >serve.log 2>&1 & front=$!"
            line += "\nuntil grep -q '2 nodes' serve.log; do kill -0 $front; sleep 1; done"
        script.append(line)
    return "\n".join([*script, "prorl status", "kill $front", "wait $front"])


@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_the_page_works_as_it_is_written_with_rays_token(scripted_policy: str, tmp_path: Path) -> None:
    ports = free_port(), free_port()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(0, "reference")) + "\n")
    command = tmp_path / "bin" / "prorl"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom nemo_gym_prorl.cli.app import main; main()\n")
    command.chmod(0o755)
    folder = Path(tempfile.mkdtemp(prefix="prorl-ray-", dir="/tmp"))  # the path of a Unix socket must be short
    mark = ProcessMark("PRORL_TEST_FLEET", os.urandom(8).hex())
    told = {name: value for name, value in (os.environ | ENVIRONMENT).items() if not name.startswith("RAY_AUTH")}
    bash = await asyncio.create_subprocess_exec(
        *reaper_command(mark, ["bash", "-c", on_one_machine(scripted_policy, *ports)], sys.executable, folder),
        cwd=tmp_path,
        env={
            **told,
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(cache_dir().parent),
            "PRORL_HEAD": f"http://127.0.0.1:{ports[1]}",
            "PATH": f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RAY_TMPDIR": str(folder),
            mark.name: mark.value,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said = (await asyncio.wait_for(bash.communicate(), 600))[0].decode()
    finally:
        if bash.returncode is None:
            bash.terminate()
            await bash.wait()
        await mark.kill(settle_s=0)
    log = "".join(found.read_text() for found in tmp_path.glob("serve.log"))  # noqa: ASYNC240
    assert bash.returncode == 0, said + log
    assert (tmp_path / ".ray" / "auth_token").is_file()
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert rewards == [1.0] * 8, said + log
    assert "8 succeeded" in said


@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_a_node_dies_and_every_rollout_has_its_reward(scripted_policy: str, tmp_path: Path) -> None:
    async with asyncio.timeout(600), served(2, tmp_path, scripted_policy) as (cluster, url, log):
        for node, address in zip(cluster.nodes, ("127.0.0.2", "127.0.0.3"), strict=True):
            assert f"{node} up at http://{address}:" in log.read_text(), "it listens where Ray says that the node is"
        async with RolloutClient(url, KEY) as client:
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
