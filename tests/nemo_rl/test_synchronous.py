# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""DAPO on NeMo RL's synchronous loop: its own ``grpo_train``, loss and Gym actor, with our servers."""

import re
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from nemo_gym_prorl.dapo.runner import TrainedRollout
from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.nemo_rl import synchronous
from nemo_gym_prorl.nemo_rl.groups import Group, Sampled
from nemo_gym_prorl.nemo_rl.synchronous import results_of
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.tokens import Turn
from tests.nemo_rl.conftest import KEY
from tests.nemo_rl.test_single_controller import NUMBER, counting, jobs, solving, thinking
from tests.tasks import containers


if TYPE_CHECKING:
    from tests.nemo_rl.controller import TrainedGroup
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

PROMPTS, STEPS = 2, 3
HALVES = {"runtime": "synchronous", "max_staleness": 0}


def _configuration(rows: list[dict[str, Any]], folder: Path, **prorl: Any) -> dict[str, Any]:
    from tests.nemo_rl.controller import configuration

    return configuration(
        rows,
        folder,
        prorl={**HALVES, **prorl},
        grpo__async_grpo={"enabled": False},
        grpo__num_prompts_per_step=PROMPTS,
        data_plane__enabled=False,
        policy__train_global_batch_size=4,
        policy__generation__colocated__enabled=True,
        policy__generation__vllm_cfg__enable_vllm_metrics_logger=False,
        checkpointing__enabled=False,
        cluster={"num_nodes": 1, "gpus_per_node": 1},
    )


@pytest.mark.gym
@pytest.mark.usefixtures("own_ray")
@pytest.mark.timeout(420)
def test_three_batches_in_six_optimizer_steps(trainer: "Trainer", engine: "Engine", tmp_path: Path) -> None:
    """Prompts without variance are left out, one failure of the infrastructure is tried again, and every token and
    log-probability arrives as it was sampled."""
    from tests.nemo_rl.synchronous import trained

    rows = []
    for number in range(3):
        trouble = {"verify": 503, "times": 1, "name": f"{tmp_path}-{number}"}
        rows += [counting(10, 0, trouble=trouble), counting(10, number=number), counting(7, 3, 0, number=number)]
    for number, row in enumerate(rows):
        # NeMo RL tells groups apart by their prompts.
        row["responses_create_params"]["input"] = [{"role": "user", "content": f"Count to ten. Attempt {number}."}]
    url = trainer.server_urls()["counting_agent"]
    before = {job.id for job in jobs(url)}
    got = trained(_configuration(rows, tmp_path, agent="counting_agent"), engine, _lent(trainer), 4)
    assert len(got.batches) == STEPS
    # Two optimizer steps of four rollouts for each batch of eight; the first weights are there already.
    assert (got.policy.optimizer_steps, got.generation.synchronised) == (2 * STEPS, STEPS)
    for groups in got.batches:
        assert len(groups) == PROMPTS
        for group in groups:
            check(group)
    assert all(mask == 1.0 for masks in got.masks for mask in masks)
    assert [asleep.requests for asleep in got.generation.asleep] == [0] * STEPS
    ours = [job for job in jobs(url) if job.id not in before]
    assert all(job.state.terminal for job in ours)
    failed = [job for job in ours if job.state is JobState.FAILED]
    assert failed, "no failure was met"
    print(f"{STEPS} batches in {got.wall_s:.1f} s: {len(ours)} rollouts, {len(failed)} failed, {8 * STEPS} trained on")


@pytest.mark.gym
@pytest.mark.usefixtures("own_ray")
@pytest.mark.sandbox
@pytest.mark.timeout(420)
def test_engines_sleep_only_when_every_sandbox_is_gone(trainer: "Trainer", engine: "Engine", tmp_path: Path) -> None:
    """A prompt that never ends is cancelled when the batch is complete, and grpo_train goes on when it is gone."""
    from tests.nemo_rl.synchronous import trained

    containers.image()
    url = trainer.server_urls()["prorl_code_agent"]
    before, aborted, known = containers.instances(), engine.aborted, {job.id for job in jobs(url, KEY)}
    rows = [solving(number) for number in range(8)]
    rows.insert(2, thinking())
    # In order, a batch would wait for that prompt until its budget is used up.
    config = _configuration(rows, tmp_path, agent="prorl_code_agent", key_env="PRORL_TEST_KEY", in_order=False)
    got = trained(config, engine, _lent(trainer), 4)
    assert len(got.batches) == STEPS
    assert [asleep.sandboxes - before for asleep in got.generation.asleep] == [set()] * STEPS
    assert [asleep.requests for asleep in got.generation.asleep] == [0] * STEPS
    ours = [job for job in jobs(url, KEY) if job.id not in known]
    assert all(job.state.terminal for job in ours)
    cancelled = [job for job in ours if job.state is JobState.CANCELLED]
    assert cancelled
    print(f"{len(ours)} rollouts in sandboxes, {len(cancelled)} cancelled, {engine.aborted - aborted} in mid-turn")


@pytest.mark.gym
@pytest.mark.usefixtures("own_ray")
@pytest.mark.timeout(420)
def test_an_environment_without_variance_ends_the_training_with_a_reason(
    trainer: "Trainer", engine: "Engine", tmp_path: Path
) -> None:
    from tests.nemo_rl.synchronous import trained

    rows = [counting(10, number=number) for number in range(6)]
    config = _configuration(rows, tmp_path, agent="counting_agent", max_fruitless=8)
    with pytest.raises(RolloutError, match="without variance") as failed:
        trained(config, engine, _lent(trainer), 4)
    # As the command tells it, without the trace that Ray puts around it.
    assert re.match(r"max_fruitless: \d+ groups in a row had rewards without variance: ", failed.value.reason)
    assert all(job.state.terminal for job in jobs(trainer.server_urls()["counting_agent"]))


def check(group: "TrainedGroup") -> None:
    """A group has variance, and everything in it is what was sampled and scored."""
    rewards, advantages = [], []
    for member, tokens in enumerate(group.tokens):
        sampled, mask = group.sampled(member), group.masks[member]
        assert sampled.count(b" \xfe") == 2, sampled
        assert sampled.endswith(b"Done. \xfe")
        assert b"Count to ten." in tokens
        assert b"Count to ten." not in sampled
        expected = [-(token % 7) / 8 - 0.125 if on else 0.0 for token, on in zip(tokens, mask, strict=True)]
        assert group.log_probs[member] == expected
        rewards.append(int(NUMBER.findall(sampled)[0]) / 10)
        [advantage] = {a for a, on in zip(group.advantages[member], mask, strict=True) if on}
        advantages.append(advantage)
    assert len(set(rewards)) > 1
    mean = sum(rewards) / len(rewards)
    assert all((advantage > 0) == (reward > mean) for advantage, reward in zip(advantages, rewards, strict=True))


def test_a_rollout_without_tokens_has_no_loss_and_keeps_its_reward() -> None:
    turn = Turn(0, 0, array("i", [1, 2]), array("i", [3, 4]), array("d", [-0.5, -0.25]))
    group = Group([1, 2], (Sampled("a", (turn,), 0.5, 0), Sampled("b", (), -1.0, 0)), {})
    rollouts = [TrainedRollout(name, {}, reward, 0, masked=False) for name, reward in (("a", 1.0), ("b", 0.0))]
    good, masked = results_of(rollouts, group)
    assert [message["role"] for message in good["message_log"]] == ["user", "assistant"]
    assert good["message_log"][1]["generation_logprobs"] == [-0.5, -0.25]
    assert good["full_result"] == {"reward": 0.5, "raw_reward": 1.0, "instance_config": {"mask_sample": False}}
    assert [message["role"] for message in masked["message_log"]] == ["user"]
    assert masked["full_result"] == {"reward": -1.0, "raw_reward": 0.0, "instance_config": {"mask_sample": True}}
    # NeMo RL finds groups by their prompts.
    assert good["input_message_log"][0]["token_ids"] == masked["input_message_log"][0]["token_ids"] == [1, 2]


@pytest.mark.parametrize("tells_agent", [False, True], ids=["tried", "newer"])
async def test_each_rollout_comes_as_nemo_rls_own_actor_gives_it(
    monkeypatch: pytest.MonkeyPatch, tells_agent: bool
) -> None:
    """Newer versions tell the agent of the row, too."""
    monkeypatch.setattr(synchronous, "metrics_of", lambda runner: {"told": 1.0})
    tokens = (Turn(0, 0, array("i", [1]), array("i", [2]), array("d", [-0.5])),)
    group = [TrainedRollout(name, {}, reward, 0, False, tokens) for name, reward in (("a", 1.0), ("b", 0.0))]

    class Ours(synchronous.Environment):
        async def _with_weights(self) -> Any:
            return SimpleNamespace(
                batch=AsyncMock(return_value=SimpleNamespace(groups=[group])),
                idle=AsyncMock(),
                rollout_metrics=SimpleNamespace(train=lambda trained: None),
            )

    plan: Any = SimpleNamespace(
        sampler=SimpleNamespace(groups_per_batch=1, group_size=2), shape=lambda reward, length: reward
    )
    rows = [{"agent_ref": {"name": "first"}}, {"agent_ref": {"name": "second"}}]
    given = [one async for one in Ours(plan, 0, tells_agent).run_rollouts(rows, "")]
    assert [(one[0], one[-2]["full_result"]["reward"], one[-1]) for one in given] == [
        (0, 1.0, None),
        (1, 0.0, {"told": 1.0}),
    ]
    assert [one[1:-2] for one in given] == [((row["agent_ref"],) if tells_agent else ()) for row in rows]


def _lent(trainer: "Trainer") -> Any:
    from tests.nemo_rl.controller import Lent

    return Lent(trainer.actor)
