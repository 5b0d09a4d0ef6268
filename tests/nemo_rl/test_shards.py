# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Two replicas of a Gym deployment on one machine, as NeMo RL's ``env.nemo_gym.shards`` starts them: one actor each,
from one configuration, with the same ports, caches and state folder to choose from."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from nemo_gym_prorl.rollout.job import JobState
from tests.nemo_rl.conftest import KEY
from tests.nemo_rl.test_single_controller import gone, jobs, solving
from tests.tasks import containers


if TYPE_CHECKING:
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.sandbox, pytest.mark.timeout(600)]


@dataclass
class Shards:
    """What a NeMo RL that has shards hands over in the place of its actor: its ``NemoGymShardSet``, as far as that is
    used. That ends its actors; ours go on to live, to be looked at.

    Attributes:
        handles: replicas by the name of the shard.
        ended: how long its actors were given to end.
    """

    handles: dict[str, list[Any]]
    ended: list[float | None] = field(default_factory=list)

    @property
    def all_handles(self) -> list[Any]:
        return [handle for replicas in self.handles.values() for handle in replicas]

    def shutdown(self, *, timeout: float | None = 120, force_kill: bool = True) -> None:
        self.ended.append(timeout)


@pytest.fixture
def shards(trainer: "Trainer") -> Iterator[Shards]:
    import ray

    second = trainer.replica()
    try:
        yield Shards({"code": [trainer.actor, second]})
    finally:
        ray.get(second.shutdown.remote())
        ray.kill(second)


def test_both_replicas_take_rollouts_and_neither_is_in_the_others_way(
    trainer: "Trainer", shards: Shards, engine_url: str, tmp_path: Path
) -> None:
    import ray

    from tests.nemo_rl.controller import STEPS, configuration, trained
    from tests.nemo_rl.trainer import head_url, server_urls

    containers.image()
    before = containers.instances()
    heads = [head_url(actor) for actor in shards.all_handles]
    deployments = [server_urls(head) for head in heads]
    places = [*heads, *(url for deployment in deployments for url in deployment.values())]
    assert len({urlsplit(url).port for url in places}) == len(places)
    agents = [deployment["prorl_code_agent"] for deployment in deployments]
    known = {job.id for url in agents for job in jobs(url, KEY)}

    rows = [solving(number) for number in range(8)]
    block = {"agent": "prorl_code_agent", "key_env": "PRORL_TEST_KEY"}
    got = trained(configuration(rows, tmp_path, prorl=block), tmp_path, [engine_url], {"nemo_gym": shards})
    assert got.result["train_steps"] == STEPS
    assert all(sorted(set(group.rewards)) == [0.0, 1.0] for groups in got.steps for group in groups)
    assert len(shards.ended) == 1

    taken = [[job for job in jobs(url, KEY) if job.id not in known] for url in agents]
    assert all(taken), "one replica had nothing to do"
    assert len({job.id for one in taken for job in one}) == sum(map(len, taken))
    assert all(job.state.terminal and job.state is not JobState.FAILED for one in taken for job in one)
    for groups in ({job.group for job in one} for one in taken):
        print(f"{len(groups)} groups at one")
    assert not {job.group for job in taken[0]} & {job.group for job in taken[1]}, "siblings have a prefix in common"
    for deployment in deployments:
        [backend] = _backends(deployment["policy_model"])
        assert backend["weight_version"] == str(STEPS)
    print(f"{[len(one) for one in taken]} rollouts; sandboxes gone {gone(before):.1f} s after the end")

    # One replica ends, the other does not notice.
    ray.get(shards.all_handles[1].shutdown.remote())
    assert containers.instances() == before
    for url in (heads[1], *deployments[1].values()):
        place = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, 1).close()
    again = trainer.run(solving(0))
    assert again.error is None
    assert containers.instances() == before


def _backends(model: str) -> Any:
    from tests.nemo_rl.controller import call

    return call("GET", f"{model}/v1/backends")["backends"]
