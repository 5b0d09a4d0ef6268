# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Valid configuration, and a table of mistakes with the field that a finding must name."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


AGENT = "env.nemo_gym.prorl_swe_agent.responses_api_agents.prorl_agent"
MODEL = "env.nemo_gym.policy_model.responses_api_models.prorl_model"
DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"


class Removed:
    """Marker with a fixed name, since test ids must be equal in all processes."""

    def __repr__(self) -> str:
        return "removed"


_MODE = "policy.generation.vllm_cfg.logprobs_mode"
REMOVED = Removed()
"""Value that removes its key."""


@dataclass(frozen=True)
class Mistake:
    """Mistake in a configuration.

    Attributes:
        changes: values by path.
        field: field that the finding must name; by default the first changed one.
        says: part of the finding.
        variant: variant in which the change is a mistake.
    """

    changes: Mapping[str, Any]
    says: str
    field: str = ""
    variant: str | None = None

    @property
    def named(self) -> str:
        return self.field or next(iter(self.changes))

    def __str__(self) -> str:
        return "+".join(f"{path.rsplit('.', 1)[-1]}={value}"[:40] for path, value in self.changes.items())


def one(path: str, value: Any, says: str, **more: Any) -> Mistake:
    return Mistake({path: value}, says, **more)


MISTAKES = [
    # Our own block
    one("prorl.max_stalness", 1, "not permitted"),
    one("prorl.runtime", "synchronous", "not permitted"),
    one("prorl.overlong.buffer_length", 10**6, "more than max_sequence_length", field="prorl.overlong"),
    one("prorl.services", ["http://127.0.0.1:1"], "must be set for rollouts: service", field="prorl"),
    one("prorl.services", [], "must be set for rollouts: service", variant="service", field="prorl"),
    one("prorl.models", [], "must be set for rollouts: service", variant="service", field="prorl"),
    # Groups and the baseline
    one("policy.generation.temperature", 0.0, "the same"),
    one("grpo.use_leave_one_out_baseline", True, "without itself"),
    one("grpo.adv_estimator.use_leave_one_out_baseline", REMOVED, "without itself"),
    one("grpo.use_dynamic_sampling", True, "before NeMo RL sees them"),
    one("token_capture.enabled", True, "NeMo RL would sample by itself"),
    one("grpo.reward_scaling.enabled", True, "prorl.reward_scaling"),
    one("grpo.reward_shaping.enabled", True, "prorl.overlong"),
    one("grpo.overlong_filtering", True, "has no effect"),
    # Loss
    one("loss_fn.use_importance_sampling_correction", False, "weight versions old"),
    one("loss_fn.token_level_loss", False, "all tokens"),
    one("loss_fn.force_on_policy_ratio", True, "not 1"),
    one("loss_fn.disable_ppo_ratio", True, "nothing to clip"),
    one("prorl.mini_batches", 1, "the loss's ratio is 1"),
    # Log-probs of another distribution than the one that is sampled from
    *(
        Mistake(
            {f"policy.generation.{name}": value, _MODE: mode},
            f"is sampled from ({name})",
            field=_MODE,
        )
        for name, value in (("temperature", 0.7), ("top_p", 0.95), ("top_k", 20))
        for mode in ("raw_logprobs", REMOVED)
    ),
    # Lengths
    one("policy.generation.vllm_cfg.max_model_len", 10**6, "exceeds the trainer's"),
    one("prorl.overlong.max_sequence_length", 10**6, "exceeds the trainer's"),
    one(f"{AGENT}.max_total_sequence_length", REMOVED, "limit exceeds the trainer's"),
    one(f"{AGENT}.max_total_sequence_length", 10**6, "limit exceeds the trainer's"),
    # SingleController
    one("async_rl.recompute_kv_cache_after_weight_updates", False, "of any earlier version"),
    one("async_rl.recompute_kv_cache_after_weight_updates", REMOVED, "of any earlier version"),
    one("async_rl.min_groups_for_streaming_train", 4, "mini-batches need all"),
    one(DEADLINE, None, "that hangs"),
    one(DEADLINE, 600, "3 attempts of"),
    # Gym's servers
    one("prorl.agent", "prorl_sve_agent", "is missing or ambiguous"),
    one(f"{MODEL}.policy.engine", "vllm", "the trainer's engine is NeMo RL's"),
    one(f"{MODEL}.policy.engine", REMOVED, "the trainer's engine is NeMo RL's"),
    one("env.nemo_gym.config_paths", ["no/such.yaml"], "no file no/such.yaml", field="env.nemo_gym"),
    one("env.nemo_gym.other", {"key": "${oc.env:PRORL_NO_SUCH}"}, "PRORL_NO_SUCH", field="env.nemo_gym"),
]


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with values at paths."""
    copied: dict[str, Any] = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *above, last = path.split(".")
        block = copied
        for key in above:
            block = block.setdefault(key, {})
        if value is REMOVED:
            block.pop(last, None)
        else:
            block[last] = value
    return copied


def good(variant: str | None = None) -> dict[str, Any]:
    """Return a minimal valid configuration."""
    config = changed(_GOOD, {})
    if variant == "service":
        config = changed(
            config,
            {
                "prorl.rollouts": "service",
                "prorl.services": ["http://127.0.0.1:1"],
                "prorl.models": ["http://127.0.0.1:2"],
                DEADLINE: None,
                "env": {"prorl": {}},
            },
        )
    return config


_GOOD: dict[str, Any] = {
    "prorl": {"max_staleness": 1, "mini_batches": 2, "overlong": {"max_sequence_length": 3000, "buffer_length": 500}},
    "grpo": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 8,
        "max_num_epochs": 10,
        "max_num_steps": 5,
        "use_leave_one_out_baseline": False,
        "adv_estimator": {"use_leave_one_out_baseline": False},
        "reward_scaling": {"enabled": False},
        "reward_shaping": {"enabled": False},
    },
    "async_rl": {
        "sampler": {"name": "in_order", "max_lookahead_versions": 1},
        "min_groups_for_streaming_train": 8,
        "recompute_kv_cache_after_weight_updates": True,
        "rollout_failure": {"nemo_gym": {"rollout_timeout_s": 9000}},
    },
    "loss_fn": {
        "token_level_loss": True,
        "use_importance_sampling_correction": True,
        "force_on_policy_ratio": False,
    },
    "policy": {
        "max_total_sequence_length": 4096,
        "train_global_batch_size": 64,
        "generation": {"temperature": 1.0, "vllm_cfg": {"max_model_len": 4096}},
    },
    "data": {},
    "env": {
        "nemo_gym": {
            "config_paths": [
                "resources_servers/prorl_swe/configs/prorl_swe.yaml",
                "responses_api_models/prorl_model/configs/prorl_model.yaml",
            ],
            "policy_model": {"responses_api_models": {"prorl_model": {"policy": {"engine": "nemo_rl"}}}},
            "prorl_swe_agent": {
                "responses_api_agents": {
                    "prorl_agent": {
                        "budgets": {"init": 600, "run": 900, "eval": 600},
                        "max_attempts": 3,
                        "max_total_sequence_length": 4096,
                    }
                }
            },
        },
    },
}
