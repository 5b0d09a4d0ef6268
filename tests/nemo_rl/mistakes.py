# SPDX-License-Identifier: Apache-2.0
"""A configuration that nothing stands against, and mistakes that one may make in it, with the field that each is in.

The same mistakes are made in the recipes that ship with the package, where NeMo RL is there to read them.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.nemo_rl.checks.gym_files import GymBlocks


AGENT = "env.nemo_gym.prorl_swe_agent.responses_api_agents.prorl_agent"
MODEL = "env.nemo_gym.policy_model.responses_api_models.prorl_model"
SERVER = "env.nemo_gym.prorl_swe.resources_servers.prorl_swe"
DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"


class Removed:
    """Its name is part of tests' names, which must be the same in every process."""

    def __repr__(self) -> str:
        return "removed"


REMOVED = Removed()
"""In place of a value: the key is taken out."""


@dataclass(frozen=True)
class Mistake:
    """Attributes:
    changes: value by path.
    field: that the finding must name; by default the only one that changes.
    says: a part of the finding.
    variant: in which this is a mistake.
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
    one("prorl.max_stalness", 1, "max_staleness"),
    one("prorl.runtime", "async", "single_controller"),
    one("prorl.overlong.buffer_length", 10**6, "more than max_sequence_length", field="prorl.overlong"),
    # Keys that nobody reads
    one("grpo.num_prompt_per_step", 8, "NeMo RL has no such"),
    one("grp", {"num_prompts_per_step": 8}, "NeMo RL has no such"),
    one("loss_fn.ratio_clip_maximum", 0.28, "loss_fn.ratio_clip_max"),
    one("async_rl.rollout_failure.max_skiped_prompts", 3, "NeMo RL has no such"),
    one("data.train.data_path", "???", "no value"),
    # Gym's servers
    one(f"{MODEL}.return_token_id_information", False, "nothing to train on"),
    one(f"{AGENT.removesuffix('prorl_agent')}prorl_agnt", {"max_steps": 3}, "no file in config_paths has"),
    # Groups and the baseline
    one("grpo.num_generations_per_prompt", 1, "no variance"),
    one("grpo.use_leave_one_out_baseline", True, "without itself"),
    one("grpo.adv_estimator.use_leave_one_out_baseline", True, "without itself"),
    one("grpo.use_dynamic_sampling", True, "before NeMo RL sees them"),
    one("grpo.batch_multiplier", 2, "rounds"),
    one("grpo.reward_scaling.enabled", True, "prorl.reward_scaling"),
    one("grpo.reward_shaping.enabled", True, "prorl.overlong"),
    # Batch arithmetic
    one("policy.train_global_batch_size", 48, "num_prompts_per_step times"),
    one("policy.train_global_batch_size", 48, "grpo.num_prompts_per_step times", variant="synchronous"),
    one("prorl.mini_batches", 3, "can't be divided by it"),
    # Checkpoints
    # Loss
    one("loss_fn.use_importance_sampling_correction", False, "weight versions old"),
    one("loss_fn.truncated_importance_sampling_ratio", None, "nothing is truncated without"),
    one("loss_fn.ratio_clip_max", 0.1, "below ratio_clip_min"),
    one("loss_fn.token_level_loss", False, "all tokens"),
    one("loss_fn.force_on_policy_ratio", True, "not 1"),
    one("prorl.mini_batches", 1, "the loss's ratio is 1"),
    one("prorl.mini_batches", 1, "the loss's ratio is 1", variant="synchronous"),
    one("loss_fn.disable_ppo_ratio", True, "no ratio to clip"),
    # Sampling
    one("policy.generation.temperature", 0.0, "the same"),
    one("policy.router_replay", {"enabled": True}, "experts", field="policy.router_replay.enabled"),
    # Lengths
    one("policy.generation.vllm_cfg.max_model_len", 10**6, "the trainer takes"),
    one("prorl.overlong.max_response_length", 3000, "is called max_sequence_length"),
    one("prorl.overlong.max_sequence_length", 10**6, "the trainer takes"),
    one(f"{AGENT}.max_total_sequence_length", REMOVED, "no such bound as the trainer's"),
    one(f"{AGENT}.max_total_sequence_length", 10**6, "no such bound as the trainer's"),
    # SingleController
    one("grpo.val_at_end", True, "nobody is told of what comes after the last"),
    one("grpo.val_period", 10, "no rows to validate on"),
    one("grpo.overlong_filtering", True, "it is ignored"),
    one("async_rl.sampler.max_lookahead_versions", 7, "it is not prorl.max_staleness"),
    one("async_rl.max_buffered_rollouts", 9, "steps that may be ahead"),
    one("async_rl.min_groups_for_streaming_train", 99, "mini-batches are made of all"),
    one("async_rl.min_groups_for_streaming_train", 4, "mini-batches are made of all"),
    one(DEADLINE, None, "that hangs"),
    one(DEADLINE, 600, "3 attempts of"),
    # grpo_train
    one("prorl.max_staleness", 2, "waits for all rollouts", variant="synchronous"),
    # Gym servers
    one("prorl.services", ["http://127.0.0.1:1"], "prorl.rollouts is gym"),
    one("prorl.agent", "prorl_sve_agent", "there is no such prorl_agent, or it is not"),
    one(f"{MODEL}.policy.engine", "vllm", "the trainer's engine is NeMo RL's"),
    one(f"{MODEL}.policy.engine", REMOVED, "the trainer's engine is NeMo RL's", field=f"{MODEL}.policy.engine"),
    one(
        "env.nemo_gym.policy_model.responses_api_models.vllm_model",
        {"uses_reasoning_parser": True},
        "no file in config_paths has",
    ),
    one(f"{AGENT}.scores_groups_of", 3, "scored 3 at a time", field="grpo.num_generations_per_prompt"),
    one(f"{SERVER}.num_rollouts_per_prompt", 16, "scored 16 at a time", field="grpo.num_generations_per_prompt"),
    one(
        f"{AGENT}.environments",
        {"other": {"resources_server": {"name": "prorl_swe"}, "scores_groups_of": 16}},
        "environments.other",
        field="grpo.num_generations_per_prompt",
    ),
    one(f"{SERVER}.reward", "fraction", "share of the tests", field="prorl.filter_on"),
    # Services that run elsewhere
    one("prorl.services", [], "prorl.rollouts is service, and addresses", variant="service"),
    one("prorl.models", [], "prorl.rollouts is service, and addresses", variant="service"),
]


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with values at paths."""
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
    """A configuration in which nothing is wrong, as small as it can be."""
    config = changed(_GOOD, {})
    if variant == "synchronous":
        config = changed(
            config,
            {
                "prorl.runtime": "synchronous",
                "prorl.max_staleness": 0,
                "data_plane.enabled": False,
                "grpo.async_grpo": {"enabled": False},
                "policy.generation.colocated.enabled": True,
                "policy.train_global_batch_size": 32,
            },
        )
    if variant == "service":
        config = changed(
            config,
            {
                "prorl.rollouts": "service",
                "prorl.services": ["http://127.0.0.1:1"],
                "prorl.models": ["http://127.0.0.1:2"],
                DEADLINE: None,
                "env": {"should_use_nemo_gym": False, "prorl": {}},
                "data.default.env_name": "prorl",
            },
        )
    return config


def gym_of(config: Mapping[str, Any]) -> GymBlocks:
    """What the files would be that the configuration does not name: each server starts."""
    own = config["env"].get("nemo_gym", {})
    merged = copy.deepcopy(own)
    for name, kind, server in _SERVERS:
        block = merged.setdefault(name, {}).setdefault(kind, {}).setdefault(server, {})
        block.setdefault("entrypoint", "app.py")
    files = {
        name: {kind: {server: {"entrypoint": "app.py", "max_sandbox_starts": 4, "return_token_id_information": True}}}
        for name, kind, server in _SERVERS
    }
    return GymBlocks(files, merged if own else {})


_SERVERS = [
    ("policy_model", "responses_api_models", "prorl_model"),
    ("prorl_swe", "resources_servers", "prorl_swe"),
    ("prorl_swe_agent", "responses_api_agents", "prorl_agent"),
]

_GOOD: dict[str, Any] = {
    "prorl": {"max_staleness": 1, "mini_batches": 2, "overlong": {"max_sequence_length": 3000, "buffer_length": 500}},
    "grpo": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 8,
        "max_num_epochs": 10,
        "max_num_steps": 5,
        "use_leave_one_out_baseline": False,
        "adv_estimator": {"use_leave_one_out_baseline": False},
        "use_dynamic_sampling": False,
        "batch_multiplier": 1,
        "reward_scaling": {"enabled": False},
        "reward_shaping": {"enabled": False},
        "overlong_filtering": False,
        "async_grpo": None,
        "val_period": 0,
    },
    "async_rl": {
        "sampler": {"name": "in_order", "max_lookahead_versions": 1},
        "max_inflight_prompts": 16,
        "max_buffered_rollouts": 16,
        "min_groups_for_streaming_train": 8,
        "rollout_failure": {"max_skipped_prompts": 8, "nemo_gym": {"rollout_timeout_s": 9000}},
        "stall_watchdog": {"stall_timeout_s": 9900},
    },
    "loss_fn": {
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "token_level_loss": True,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
        "force_on_policy_ratio": False,
    },
    "policy": {
        "model_name": "m",
        "max_total_sequence_length": 4096,
        "train_global_batch_size": 64,
        "train_micro_batch_size": 1,
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
        },
        "generation": {
            "backend": "vllm",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "stop_strings": None,
            "vllm_cfg": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_model_len": 4096},
            "colocated": {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 2}},
        },
    },
    "data_plane": {"enabled": True},
    "data": {"train": {"data_path": "rows.jsonl"}, "default": {"env_name": "nemo_gym"}},
    "cluster": {"num_nodes": 4, "gpus_per_node": 8},
    "env": {
        "should_use_nemo_gym": True,
        "nemo_gym": {
            "config_paths": [],
            "policy_model": {"responses_api_models": {"prorl_model": {"policy": {"engine": "nemo_rl"}}}},
            "prorl_swe_agent": {
                "responses_api_agents": {
                    "prorl_agent": {
                        "resources_server": {"type": "resources_servers", "name": "prorl_swe"},
                        "budgets": {"init": 600, "run": 900, "eval": 600},
                        "max_attempts": 3,
                        "max_total_sequence_length": 4096,
                    }
                }
            },
        },
    },
}
