# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve`` as a user runs it: servers that die come back at their address, and its end leaves nothing."""

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.cli.scripted.demo import script_for
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.nemo_rl.services import Servers, with_engines
from nemo_gym_prorl.processes import ProcessMark
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.rollout.settings import PoolSizes
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.deployment.gym_command import server_process
from tests.policy.engines import free_port


pytestmark = [
    pytest.mark.gym,
    pytest.mark.sandbox,
    pytest.mark.long("starts whole deployments; test_init.py serves one environment from its beginning to its end"),
]

AGENT = "prorl_code_agent"
SERVERS = ("prorl_code", "policy_model", AGENT)
AWAY = (InfrastructureError, aiohttp.ClientError)
"""What a client sees of a server that is being started again."""


class Service:
    """A running ``prorl serve`` whose whole process tree is marked."""

    key: str | None = None
    model = MODEL_NAME

    def __init__(self, folder: Path, environment: str = "prorl_code") -> None:
        self.environment = environment
        self.log = folder / "serve.log"
        self.mark = ProcessMark("PRORL_TEST_SERVE", os.urandom(8).hex())
        self.state = Path(tempfile.mkdtemp(prefix="prorl-serve-", dir="/tmp"))
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.keeps_log = True
        self.urls: dict[str, str] = {}
        self.head_port = free_port()
        self.process: asyncio.subprocess.Process | None = None
        self._folder = folder

    async def launch(self, policy: str | None, *overrides: str) -> None:
        command = "from nemo_gym_prorl.cli.app import main; main()"
        own = ("--policy-url", policy) if policy else ()
        options = (*own, "--policy-model", self.model, "--head-port", str(self.head_port))
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", command, "serve", self.environment, *overrides, *options),
                *(("--log-dir", str(self._folder / "gym")) if self.keeps_log else ()),
                cwd=self._folder,
                env={
                    **os.environ,
                    self.mark.name: self.mark.value,
                    "COLUMNS": "200",
                    "PRORL_STATE": str(self.state),
                    "TMPDIR": str(self.tmp),
                    **({"PRORL_TOKEN": self.key} if self.key else {}),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def start(self, policy: str | None, *overrides: str) -> None:
        await self.launch(policy, *overrides)
        assert self.process is not None
        while "press Ctrl-C" not in self.log.read_text():
            assert self.process.returncode is None, self.log.read_text()
            await asyncio.sleep(0.2)
        self.urls = dict(re.findall(r"^(\w+) .*(http://\S+)", self.log.read_text(), re.MULTILINE))

    async def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 90)

    def strike(self, name: str) -> int:
        """Kill a server; gives its process id."""
        pid = server_process(self.mark, name)
        assert pid is not None, self.mark.processes()
        os.kill(pid, signal.SIGKILL)
        return pid

    async def kill(self, *names: str) -> None:
        """Kill servers, and wait until others answer in their places."""
        pids = {name: self.strike(name) for name in names}
        async with asyncio.timeout(180), aiohttp.ClientSession() as session:
            for name, pid in pids.items():
                while server_process(self.mark, name) in (None, pid) or not await _answers(session, self.urls[name]):
                    await asyncio.sleep(0.2)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url):
            return True
    except aiohttp.ClientError:
        return False


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(tmp_path)
    yield made
    if made.process is not None and made.process.returncode is None:
        await made.stop()
    assert await made.mark.kill(settle_s=5) == {}
    shutil.rmtree(made.state, ignore_errors=True)


def _rows(count: int, latency_s: float = 0.0) -> list[dict[str, Any]]:
    every = list(problems().values())[:count]
    scripts = [script_for(problem, "reference") for problem in every]
    for script in scripts:
        script["turns"] = [{**turn, "latency_s": latency_s} for turn in script["turns"]]
    return [humaneval_row(every[i % len(every)], scripts[i % len(every)]) for i in range(count)]


async def _to_its_end(client: RolloutClient, number: int, row: dict[str, Any]) -> JobView:
    """A rollout as a careful client has it: submitted again under its id if the agent has forgotten it."""
    while True:
        try:
            await client.submit(row, id=f"kept-{number}")
            return await client.wait(f"kept-{number}")
        except AWAY:
            await asyncio.sleep(0.5)
        except ApiError as error:
            if error.problem.status not in (404, 410, 503):
                raise


def _tells_of_its_dead(service: Service) -> None:
    said = service.log.read_text()
    for name in SERVERS:
        lines = re.findall(rf"^{name} ended \(killed by signal 9\).*", said, re.MULTILINE)
        assert lines, said
        warned = {"the trainer must add and pause its engines" in line for line in lines}
        assert warned == {name == "policy_model"}, said


@pytest.mark.timeout(900)
async def test_servers_that_are_killed_come_back_and_told_to_end_while_rollouts_run_it_leaves_nothing(
    scripted_policy: str, service: Service
):
    """One deployment for both, since it takes most of the time; its end finds a server that is being started again. It
    has no policy of its own: engines come with a run, as a trainer's do, here after the model server has died."""
    service.keeps_log = False
    service.key = "open-sesame"
    await service.start(None)
    assert service.urls.keys() >= {*SERVERS}, service.log.read_text()
    servers = with_engines(Servers((), (service.urls["policy_model"],)), [scripted_policy], "x")
    async with RolloutClient(service.urls[AGENT]) as nobody:
        with pytest.raises(ApiError) as refused:
            await nobody.status()
        assert refused.value.problem.status == 401
    async with RolloutClient(service.urls[AGENT], service.key) as client:
        await service.kill(*SERVERS)
        await asyncio.to_thread(servers.announce, 1, needed=True)
        job = await _to_its_end(client, 0, _rows(1)[0] | {"rollout": {"run": "x"}})
        assert job.reward == 1.0, job.failure
        assert (job.run, job.weight_versions) == ("x", ["1"])
        _tells_of_its_dead(service)
        await asyncio.gather(*(client.submit(row, run="x") for row in _rows(20, latency_s=30.0)))
        async with asyncio.timeout(300):
            while (await client.status()).sessions < 6:
                await asyncio.sleep(0.2)
        service.strike("policy_model")
        assert await service.stop(signal.SIGINT) == 0
    await _nothing_left(service)


@pytest.mark.timeout(5400)
async def test_500_rollouts_survive_that_each_server_is_killed(scripted_policy: str, service: Service, tmp_path: Path):
    jobs = 500
    await service.start(scripted_policy, "++uvicorn_logging_show_200_ok=true")
    async with RolloutClient(service.urls[AGENT]) as client:
        rolling = [asyncio.create_task(_to_its_end(client, number, row)) for number, row in enumerate(_rows(jobs))]
        for number, name in enumerate(SERVERS, 1):
            while sum(task.done() for task in rolling) < number * jobs // 5:
                await asyncio.sleep(0.5)
            await service.kill(name)
        done = await asyncio.gather(*rolling)
    assert [job.reward for job in done] == [1.0] * jobs, [job.failure for job in done if job.failure]
    assert await service.stop() == 0
    await _nothing_left(service)
    # What its server was making when it was killed has no line in the log: at most as many as INIT has slots.
    log = (tmp_path / "gym" / "gym.log").read_bytes()
    slots = PoolSizes()
    made = log.count(b'"POST /seed_session HTTP/1.1" 200') + slots.init
    graded = log.count(b'"POST /verify HTTP/1.1" 200')
    print(f"{jobs} rollouts, {made} sandboxes: {made / jobs:.3f} per rollout; {graded} more to grade them in")
    # A kill costs what was in flight, and no queue is burnt while its server is away.
    in_flight = slots.init + slots.ready + slots.run + slots.eval
    assert jobs < made <= jobs + len(SERVERS) * in_flight


async def _nothing_left(service: Service) -> None:
    """Neither processes nor sandboxes nor folders of ours; what Gym's killed servers forget is not ours."""
    assert await service.mark.wait_gone(30) == {}
    assert [folder.name for folder in service.tmp.glob("prorl-*")] == []
    assert [owner.name for owner in service.state.iterdir() if owner.name != "gates"] == []
    assert "Traceback" not in service.log.read_text()


@pytest.mark.timeout(600)
async def test_told_to_end_while_it_starts_it_leaves_nothing(scripted_policy: str, service: Service):
    """By the other of the two signals that have one handler."""
    service.keeps_log = False
    await service.launch(scripted_policy)
    async with asyncio.timeout(300):
        while not any("gcs_server" in command for command in service.mark.processes().values()):
            await asyncio.sleep(0.2)  # Gym starts Ray first
    assert [folder.name for folder in service.tmp.glob("prorl-*")] != []
    assert await service.stop(signal.SIGTERM) == 0
    await _nothing_left(service)
