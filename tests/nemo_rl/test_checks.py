# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration without NeMo RL: each mistake is reported by its field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym_prorl.nemo_rl.checks import Finding, check, check_rows, findings_of_validation
from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings, RewardShaping, settings_of
from tests.nemo_rl.mistakes import MISTAKES, Mistake, changed, good


def findings_of(config: dict[str, Any]) -> list[Finding]:
    try:
        return check(config, settings_of(config))
    except ValidationError as error:
        return [*findings_of_validation("prorl", error)]


@pytest.mark.parametrize("variant", [None, "service"])
def test_nothing_stands_against_a_good_configuration(variant: str | None) -> None:
    assert findings_of(good(variant)) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_named_by_its_field(mistake: Mistake) -> None:
    found = {finding.field: str(finding) for finding in findings_of(changed(good(mistake.variant), mistake.changes))}
    assert mistake.named in found, found
    assert mistake.says in found[mistake.named]


def test_all_mistakes_are_told_at_once() -> None:
    several = ["grpo.overlong_filtering", "loss_fn.token_level_loss", "prorl.agent"]
    config = good()
    for mistake in MISTAKES:
        config = changed(config, mistake.changes) if mistake.named in several else config
    assert {finding.field for finding in findings_of(config)} == {*several}


def test_shards_of_gym_are_looked_at_with_what_they_add() -> None:
    """Newer versions of NeMo RL have shards."""
    block = good()["env"]["nemo_gym"]
    shard = {"name": "swe", "config_paths": block.pop("config_paths"), "overrides": block, "replicas": 2}
    assert findings_of(changed(good(), {"env.nemo_gym": {"shards": [shard]}})) == []
    shard["overrides"]["policy_model"]["responses_api_models"]["prorl_model"]["policy"]["engine"] = "vllm"
    [finding] = findings_of(changed(good(), {"env.nemo_gym": {"shards": [shard]}}))
    assert finding.field == "env.nemo_gym.policy_model.responses_api_models.prorl_model.policy.engine"


def test_rows_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    config = changed(good(), {"data.train.data_path": str(path)})

    def found() -> dict[str, str]:
        return {finding.field: str(finding) for finding in check_rows(config)}

    assert "No such file" in found()["data.train.data_path"]
    path.write_text("")
    assert "no rows" in found()["data.train.data_path"]
    good_row = '{"responses_create_params": {"input": []}}\n'
    for bad in ("\n", "\ufeff", "{", "[1]", "1", '{"input": 1}', '{"responses_create_params": null}'):
        path.write_text(3 * good_row + bad)
        assert f"line 4 of {path}" in found()["data.train.data_path"], bad
    # 10 epochs of 3 rows are 3 steps of 8 prompts, and 5 are wanted.
    path.write_text(3 * good_row)
    assert "after 3 of 5 steps" in found()["grpo.max_num_epochs"]
    assert "at least 14" in found()["grpo.max_num_epochs"]
    path.write_text(4 * good_row)
    assert found() == {}


@pytest.mark.parametrize(
    ("said", "lacking"),
    [
        (None, ["tool_parser", "reasoning_parser"]),
        ({}, ["tool_parser", "reasoning_parser"]),
        ({"tool_parser": None, "reasoning_parser": "qwen3"}, ["tool_parser"]),
        ({"tool_parser": "hermes"}, ["reasoning_parser"]),
        ({"tool_parser": "hermes", "reasoning_parser": None}, []),
    ],
)
def test_rows_with_tools_need_parsers(tmp_path: Path, said: Any, lacking: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    field = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
    config = changed(good(), {"data.train.data_path": str(path), field: said})

    def found() -> list[str]:
        return [finding.field for finding in check_rows(config)]

    path.write_text('{"responses_create_params": {"tools": []}}\n' * 4)
    assert found() == []
    with path.open("a") as file:
        file.write('{"responses_create_params": {"tools": [{"type": "function", "name": "f"}]}}\n')
    assert found() == [f"{field}.{name}" for name in lacking]


# Shaping of rewards


@pytest.mark.parametrize(
    ("reward", "length", "trained"),
    [(1.0, 0, 1.0), (0.0, 0, -1.0), (0.5, 900, -0.25), (1.0, 2000, 0.5), (3.0, 0, 1.0)],
)
def test_shaping_by_hand(reward: float, length: int, trained: float) -> None:
    block = {"overlong": {"max_sequence_length": 1000, "buffer_length": 200, "penalty": 0.5}, "reward_scaling": {}}
    assert RewardShaping.of(ProrlSettings.model_validate(block))(reward, length) == trained


def places(config: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every block and value."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        yield here
        if isinstance(value, dict):
            yield from places(value, here)


@pytest.mark.parametrize("garbage", ["x", None, {"x": {"y": 1}}], ids=repr)
@pytest.mark.parametrize("variant", [None, "service"])
def test_anything_anywhere_gives_findings_and_no_traceback(variant: str | None, garbage: Any) -> None:
    config = good(variant)
    if variant != "service":
        config = changed(config, {"env.nemo_gym.config_paths": []})  # reading files dominates the run time
    for path in places(config):
        found = findings_of(changed(config, {path: garbage}))
        assert all(finding.field and finding.what and finding.fix for finding in found)
