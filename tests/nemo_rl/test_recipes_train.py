# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A recipe as it ships trains under each variant, but for what a CPU and three steps want otherwise."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nemo_gym_prorl.dapo.contract import NothingToLearn
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Shaping, settings_of
from tests.nemo_rl.test_single_controller import NUMBER, counting, jobs


if TYPE_CHECKING:
    from tests.nemo_rl.controller import TrainedGroup
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420)]

STEPS = 3
SMALLER = [
    "++grpo.num_prompts_per_step=2",
    "++grpo.num_generations_per_prompt=4",
    f"++grpo.max_num_steps={STEPS}",
    "++prorl.mini_batches=2",
    "++prorl.filter_on=reward",  # a tenth of a number
    "++async_rl.max_inflight_prompts=4",
    "++policy.max_total_sequence_length=65536",
    "++policy.generation.max_new_tokens=4096",
    "++policy.generation.vllm_cfg.enable_vllm_metrics_logger=false",
    "++data.num_workers=0",
    "++checkpointing.enabled=false",
    "++logger.tensorboard_enabled=false",
    "++logger.monitor_gpus=false",
    # So that it bites: a rollout here has some 70 tokens.
    "++prorl.overlong={max_sequence_length:90,buffer_length:60,penalty:0.5}",
]


def recipe(folder: Path, variant: str | None, *overrides: str) -> dict[str, Any]:
    from nemo_gym_prorl.nemo_rl.configuration import read

    rows = [counting(10, 0) if number % 3 else counting(4) for number in range(12)]
    for number, row in enumerate(rows):
        row["responses_create_params"]["input"] = [{"role": "user", "content": f"Count to ten. Attempt {number}."}]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = [f"++data.train.data_path={data}", f"++logger.log_dir={folder / 'logs'}"]
    variants = [variant] if variant else []
    return read("dapo-code-qwen3-4b", variants, [*SMALLER, *places, *overrides])


@pytest.mark.parametrize("variant", [None, "on-policy"])
def test_on_the_single_controller(trainer: "Trainer", engine_url: str, tmp_path: Path, variant: str | None) -> None:
    from tests.nemo_rl.controller import Lent, trained

    config = recipe(tmp_path, variant, "++prorl.agent=counting_agent")
    got = trained(config, tmp_path, [engine_url], {"nemo_gym": Lent(trainer.actor)})
    settings = settings_of(config)
    assert settings.max_staleness == (0 if variant else 1)
    assert got.result["train_steps"] == STEPS
    for step, groups in enumerate(got.steps):
        assert len(groups) == 2
        for group in groups:
            check(group, settings)
            assert 0 <= step - group.version <= settings.max_staleness


def test_without_its_parser_nothing_is_scored(trainer: "Trainer", engine_url: str, tmp_path: Path) -> None:
    """Else every rollout would end with its first turn, and be trained on."""
    from tests.nemo_rl.controller import Lent, swap_engines, trained
    from tests.nemo_rl.engine import Engine, serving

    servers = trainer.server_urls()
    before = {job.id for job in jobs(servers["counting_agent"])}
    config = recipe(tmp_path, None, "++prorl.agent=counting_agent", "++prorl.max_failures=0", "++prorl.max_dropped=1")
    with serving(Engine(None)) as url:
        swap_engines(servers["policy_model"], [url])
        try:
            with pytest.raises(NothingToLearn, match=r"gave a call of add .*chat_kwargs\.tool_parser"):
                trained(config, tmp_path, [url], {"nemo_gym": Lent(trainer.actor)})
        finally:
            swap_engines(servers["policy_model"], [engine_url])
    ours = [job for job in jobs(servers["counting_agent"]) if job.id not in before]
    assert ours
    assert {job.reward for job in ours} == {None}


def test_validation_on_the_single_controller(trainer: "Trainer", engine_url: str, tmp_path: Path) -> None:
    """By NeMo RL's own settings; its log has what the environment gave, and no step has such a row."""
    from tests.nemo_rl.controller import Lent, logged, trained

    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(counting(number, name=" Held out.")) + "\n" for number in (2, 4, 9)))
    config = recipe(
        tmp_path,
        None,
        "++prorl.agent=counting_agent",
        f"++data.validation={{data_path:'{held}'}}",
        "++grpo.val_period=1",
        "++logger.tensorboard_enabled=true",
        "++async_rl.stall_watchdog.interval_s=0.2",
    )
    got = trained(config, tmp_path, [engine_url], {"nemo_gym": Lent(trainer.actor)})
    assert got.result["train_steps"] == STEPS
    tokens = [tokens for groups in got.steps for group in groups for tokens in group.tokens]
    assert tokens
    assert not any(b"Held out." in sequence for sequence in tokens)
    told = logged(tmp_path / "logs")
    assert told["validation/reward"] == pytest.approx([0.5] * (STEPS - 1))
    assert told["validation/weight_version"] == [1, 2]


def expected(group: "TrainedGroup", member: int, settings: ProrlSettings) -> float:
    """The reward to train on, of what was said."""
    sampled = group.sampled(member)
    return Shaping.of(settings)(int(NUMBER.findall(sampled)[0]) / 10, len(group.tokens[member]))


def check(group: "TrainedGroup", settings: ProrlSettings) -> None:
    """Its raw rewards differ; scaled and shaped they are what is trained on, and advantages are in their order."""
    assert len({NUMBER.findall(group.sampled(member))[0] for member in range(4)}) > 1
    assert group.rewards == pytest.approx([expected(group, member, settings) for member in range(4)])
    assert min(group.rewards) < -1, "nothing was taken off for length"
    pairs = zip(group.advantages, group.masks, strict=True)
    advantages = [next(advantage for advantage, on in zip(*pair, strict=True) if on) for pair in pairs]
    mean = sum(group.rewards) / 4
    assert all((advantage > 0) == (reward > mean) for advantage, reward in zip(advantages, group.rewards, strict=True))
