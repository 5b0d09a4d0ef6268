# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own settings with which a training goes on and is not what one believes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym_prorl.nemo_rl.checks.finding import Finding, at, number_at
from nemo_gym_prorl.nemo_rl.checks.servers import DEADLINE
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts


_LEFT_OUT = (
    "mean and deviation of a group are computed for each rollout without itself, so that the only success of a group "
    "has siblings without variance"
)
_MUST_NOT_BE: tuple[tuple[str, bool | float, str, str], ...] = (
    ("policy.generation.temperature", 0.0, "all rollouts of a prompt are the same", "1.0, say"),
    ("token_capture.enabled", True, "NeMo RL would sample by itself, past the filter", "false"),
    ("grpo.use_leave_one_out_baseline", True, _LEFT_OUT, "false (NeMo RL's default is true)"),
    ("grpo.adv_estimator.use_leave_one_out_baseline", True, _LEFT_OUT, "false (NeMo RL's default is true)"),
    ("grpo.use_dynamic_sampling", True, "groups without variance are left out before NeMo RL sees them", "false"),
    ("grpo.reward_scaling.enabled", True, "it is ignored, or done twice", "false, and use prorl.reward_scaling"),
    ("grpo.reward_shaping.enabled", True, "it measures the first turn only, or is ignored", "false; prorl.overlong"),
    ("grpo.overlong_filtering", True, "it is ignored", "false, and use prorl.overlong"),
    ("loss_fn.token_level_loss", False, "DAPO's loss weighs all tokens of a batch alike", "true"),
    ("loss_fn.disable_ppo_ratio", True, "there is no ratio to clip then", "false"),
)
"""A setting, the value with which it would be wrong, why, and what to set it to."""


def check(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """All of them.

    Args:
        config: the resolved configuration.
        settings: its block ``prorl:``.
    """
    for field, wrong, what, fix in _MUST_NOT_BE:
        default = wrong if field.endswith("leave_one_out_baseline") else None
        if at(config, field, default) == wrong:
            yield Finding(field, what, f"Set it to {fix}")
    yield from _loss(config, settings)
    yield from _lengths(config, settings)
    yield from _log_probs(config)
    yield from _single_controller(config, settings)


def _loss(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    stale, steps = settings.max_staleness > 0, settings.mini_batches
    if stale and not at(config, "loss_fn.use_importance_sampling_correction"):
        yield Finding(
            "loss_fn.use_importance_sampling_correction",
            f"rollouts may be {settings.max_staleness} weight versions old (prorl.max_staleness), and the loss takes "
            "them for new ones",
            "Set it to true",
        )
    forced = at(config, "loss_fn.force_on_policy_ratio")
    if forced and steps > 1:
        yield Finding(
            "loss_fn.force_on_policy_ratio",
            "the ratio is not 1 from the second of prorl.mini_batches on",
            "Set it to false",
        )
    if steps == 1 and not forced:
        yield Finding(
            "prorl.mini_batches",
            "in the only optimizer step of a batch the loss's ratio is 1, so loss_fn.ratio_clip_max does nothing",
            "2 or more, e.g. 4; or set loss_fn.force_on_policy_ratio to true, to train without a clip",
        )


def _log_probs(config: Mapping[str, Any]) -> Iterator[Finding]:
    """vLLM's log-probabilities are those of the unmodified logits, unless it is told otherwise."""
    where = "policy.generation"
    neutral = {"temperature": (1.0,), "top_p": (None, 1.0), "top_k": (None, 0, -1)}
    changed = [name for name, values in neutral.items() if at(config, f"{where}.{name}", values[0]) not in values]
    field = f"{where}.vllm_cfg.logprobs_mode"
    if changed and at(config, f"{where}.backend", "vllm") == "vllm" and at(config, field) != "processed_logprobs":
        yield Finding(
            field,
            f"log-probabilities would not be of the distribution that is sampled from ({', '.join(changed)})",
            "Set it to processed_logprobs",
        )


def _lengths(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    longest, engine = "policy.max_total_sequence_length", "policy.generation.vllm_cfg.max_model_len"
    lengths = {engine: number_at(config, engine)}
    if settings.overlong is not None:
        lengths["prorl.overlong.max_sequence_length"] = settings.overlong.max_sequence_length
    bound = number_at(config, longest)
    for field, length in lengths.items():
        if bound is not None and length is not None and length > bound:
            what = f"it is {length:g}, and the trainer takes {bound:g} tokens ({longest})"
            yield Finding(field, what, f"Set it to ${{{longest}}}")


def _single_controller(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    streaming = number_at(config, "async_rl.min_groups_for_streaming_train")
    prompts = number_at(config, "grpo.num_prompts_per_step")
    if settings.mini_batches > 1 and streaming is not None and prompts is not None and streaming < prompts:
        yield Finding(
            "async_rl.min_groups_for_streaming_train",
            f"mini-batches are made of all {prompts:g} groups of a step at once",
            "Set it to ${grpo.num_prompts_per_step}",
        )
    field = "async_rl.recompute_kv_cache_after_weight_updates"
    if not at(config, field):
        yield Finding(
            field,
            "a new rollout would read cached keys and values of a shared prefix from weights of any earlier version",
            "Set it to true",
        )
    if settings.rollouts is Rollouts.GYM and number_at(config, DEADLINE) is None:
        yield Finding(DEADLINE, "a rollout that hangs is waited for until the job ends", "Set it in seconds")
