# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer can do beside its streams: find the servers, cancel a group, say which weights are loaded."""

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems
from tests.nemo_rl.conftest import KEY, NODE_ADDRESS, documented
from tests.tasks import containers


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420)]


def test_the_head_server_tells_where_the_servers_are(trainer: "Trainer") -> None:
    urls = trainer.server_urls()
    hosts = {name: urlsplit(url).hostname for name, url in urls.items()}
    ours = dict.fromkeys(("policy_model", "counting_agent", "prorl_code", "prorl_code_agent"), "127.0.0.1")
    # NeMo RL has servers listen on the node's address, for everybody; ours only where their block says so.
    assert hosts == {**ours, "counting": NODE_ADDRESS}
    with urlopen(f"{urls['counting_agent']}/healthz") as response:
        assert json.load(response) == {"status": "ok"}


def test_a_key_of_the_environment_is_asked_for_and_told_to_nobody(trainer: "Trainer") -> None:
    """NeMo RL's head server hands the configuration out, and Gym puts it on the command lines of its servers."""
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{trainer.server_urls()['prorl_code_agent']}/status")
    assert refused.value.code == 401
    with urlopen(f"{trainer.head_url}/global_config_dict_yaml") as response:
        assert KEY not in response.read().decode()
    assert not [process for process in Path("/proc").glob("[0-9]*/cmdline") if KEY.encode() in _read(process)]


@pytest.mark.sandbox
def test_sandboxes_of_a_cancelled_group_are_gone_at_once(trainer: "Trainer", engine: "Engine") -> None:
    """Four rollouts of one group are cancelled in mid-turn; four of another go on to their reward."""
    containers.image()
    aborted, before = engine.aborted, containers.instances()
    doomed = trainer.start([code_row("prompt-1", latency_s=600) for _ in range(4)])
    spared = trainer.start([code_row("prompt-2", latency_s=20) for _ in range(4)])
    deadline = time.monotonic() + 120
    while engine.in_flight < 8:
        assert time.monotonic() < deadline, f"{engine.in_flight} of 8 came to their second turn"
        time.sleep(0.1)
    assert len(containers.instances() - before) == 8

    async def cancel() -> int:
        async with RolloutClient(trainer.server_urls()["prorl_code_agent"], KEY) as client:
            return len((await client.cancel(group="prompt-1")).rollouts)

    started = time.monotonic()
    assert asyncio.run(cancel()) == 4
    seconds = time.monotonic() - started
    assert len(containers.instances() - before) == 4
    assert seconds < 15, seconds  # 2 s where nothing else runs
    print(f"4 sandboxes gone after {seconds:.2f} s")
    assert engine.aborted - aborted == 4

    got = trainer.drain(doomed)
    assert type(got.error).__name__ == "RayTaskError(GymTransportError)", got.error
    got = trainer.drain(spared)
    assert got.error is None
    assert [got.results[index]["full_result"]["reward"] for index in range(4)] == [0.0] * 4
    assert containers.instances() == before


def test_a_row_tells_which_weights_sampled_its_turns(trainer: "Trainer") -> None:
    """Labels change without draining: turns in flight go on, and say that two versions sampled them."""
    from tests.nemo_rl.trainer import counting_row, turn

    label(trainer, "step-7")
    stream = trainer.start([counting_row(turn("Seven.", 7), turn("Ten.", 3, latency_s=3.0), turn("Done."))])
    time.sleep(2.0)
    started = time.monotonic()
    label(trainer, "step-8")
    assert time.monotonic() - started < 1.0, "a label waits for nothing"
    got = trainer.drain(stream)
    assert got.error is None
    assert got.results[0]["full_result"]["rollout"]["weight_versions"] == [
        {"turn": 0, "first": "step-7", "last": "step-7"},
        {"turn": 1, "first": "step-7", "last": "step-8"},
        {"turn": 2, "first": "step-8", "last": "step-8"},
    ]


def test_what_the_documentation_does_beside_a_run(trainer: "Trainer") -> None:
    names = {"actor": trainer.actor}
    # This agent has no key.
    exec("\n".join(documented("python")[1:]).replace("prorl_code_agent", "counting_agent"), names)
    assert names["servers"] == trainer.server_urls()


def code_row(group: str, latency_s: float) -> dict[str, Any]:
    """A row that opens a sandbox, and then thinks."""
    row = humaneval_row(problems()["HumanEval/2"])
    call = {"name": "bash", "arguments": {"command": "echo $PWD"}}
    script = {"turns": [{"tool_calls": [call]}, {"content": "I give up.", "latency_s": latency_s}]}
    params = {**row["responses_create_params"], "metadata": {"script": json.dumps(script)}}
    agent = {"type": "responses_api_agents", "name": "prorl_code_agent"}
    return {**row, "responses_create_params": params, "agent_ref": agent, "rollout": {"group": group}}


def label(trainer: "Trainer", version: str) -> None:
    """Say which weights the engines have."""
    request = Request(
        f"{trainer.server_urls()['policy_model']}/v1/backends/weight_version",
        json.dumps({"weight_version": version}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as response:
        assert response.status == 200


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""
