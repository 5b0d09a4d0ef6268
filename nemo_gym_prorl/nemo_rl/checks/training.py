# SPDX-License-Identifier: Apache-2.0
"""What either training loop demands: batches, baseline, loss, sampling, lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym_prorl.nemo_rl.checks.finding import MISSING, Finding, at, count_at, number_at
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Runtime


_COUNTS = (
    *(f"grpo.{name}" for name in ("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps")),
    *(f"policy.{name}" for name in ("train_global_batch_size", "train_micro_batch_size")),
    *("policy.max_total_sequence_length", "policy.generation.max_new_tokens"),
    *(f"policy.megatron_cfg.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")),
    *(f"policy.generation.vllm_cfg.{name}_parallel_size" for name in ("tensor", "pipeline")),
    *("cluster.num_nodes", "cluster.gpus_per_node"),
)
_DEADLINE = re.compile(r"\d+:\d+:\d+:\d+")


def check(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """All of the below."""
    yield from _counts(config)
    yield from _groups(config)
    yield from _baseline(config)
    yield from _sampled_twice(config)
    yield from _not_carried(config)
    yield from _loss(config, settings)
    yield from _sampling(config)
    yield from _lengths(config, settings)
    yield from _devices(config, settings)
    yield from _checkpoints(config)


def _counts(config: Mapping[str, Any]) -> Iterator[Finding]:
    for path in _COUNTS:
        if (value := number_at(config, path)) is not None and (value < 1 or value != int(value)):
            yield Finding(path, f"{value:g} is no number of things", "A whole number, at least 1")


def missing(config: Mapping[str, Any], path: str = "") -> Iterator[Finding]:
    """Values that somebody must give, and nobody gave."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if value == MISSING:
            yield Finding(here, "it has no value", f"Give one, e.g. ++{here}=… on the command line")
        elif isinstance(value, Mapping):
            yield from missing(value, here)


def _checkpoints(config: Mapping[str, Any]) -> Iterator[Finding]:
    if (period := number_at(config, "checkpointing.save_period")) is not None and period < 1:
        yield Finding(
            "checkpointing.save_period",
            f"both loops divide by it, {period:g}, whether or not there are checkpoints",
            "At least 1; for none, set checkpointing.enabled to false",
        )
    metric = at(config, "checkpointing.metric_name")
    if isinstance(metric, str) and not metric.startswith(("train:", "val:")):
        yield Finding(
            "checkpointing.metric_name",
            f"{metric!r} ends the run at its first checkpoint",
            "Begin it with train: or val:, or set it to null",
        )
    latest = at(config, "checkpointing.checkpoint_must_save_by")
    if isinstance(latest, str) and not _DEADLINE.fullmatch(latest):
        yield Finding(
            "checkpointing.checkpoint_must_save_by", f"{latest!r} is no DD:HH:MM:SS", "Four hours are 00:04:00:00"
        )


def _groups(config: Mapping[str, Any]) -> Iterator[Finding]:
    if (size := number_at(config, "grpo.num_generations_per_prompt")) is not None and size < 2:
        yield Finding(
            "grpo.num_generations_per_prompt",
            f"{size} rollouts of a prompt have no variance",
            "At least 2; DAPO's is 8",
        )
    if (prompts := number_at(config, "grpo.num_prompts_per_step")) is not None and prompts < 1:
        yield Finding("grpo.num_prompts_per_step", f"{prompts} prompts are no batch", "At least 1")


def _baseline(config: Mapping[str, Any]) -> Iterator[Finding]:
    for field in ("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline"):
        if at(config, field, True) is not False:
            yield Finding(
                field,
                "mean and deviation of a group are computed for each rollout without itself, so that the only success "
                "of a group has siblings without variance",
                "Set it to false (NeMo RL's default is true)",
            )


def _not_carried(config: Mapping[str, Any]) -> Iterator[Finding]:
    if at(config, "policy.router_replay.enabled"):
        yield Finding(
            "policy.router_replay.enabled", "rollouts do not bring the experts that were chosen", "Set it to false"
        )


def _sampled_twice(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What NeMo RL would do once more, or not at all, with groups that were chosen and shaped by us."""
    switches = (
        ("grpo.use_dynamic_sampling", "groups without variance are left out before NeMo RL sees them", "false"),
        ("grpo.reward_scaling.enabled", "SingleController ignores it, and grpo_train does it twice", "false"),
        ("grpo.reward_shaping.enabled", "it measures the first turn only, or is ignored", "false"),
    )
    instead = {"grpo.reward_scaling.enabled": "prorl.reward_scaling", "grpo.reward_shaping.enabled": "prorl.overlong"}
    for field, what, value in switches:
        if at(config, field):
            use = f", and use {instead[field]}" if field in instead else ""
            yield Finding(field, what, f"Set it to {value}{use}")
    if (number_at(config, "grpo.batch_multiplier") or 1) != 1:
        yield Finding(
            "grpo.batch_multiplier",
            "it is for rounds of rollouts that may be thrown away; here as many are under way as "
            "async_rl.max_inflight_prompts says",
            "Set it to 1",
        )


def _loss(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    corrected = at(config, "loss_fn.use_importance_sampling_correction")
    if settings.max_staleness > 0 and not corrected:
        yield Finding(
            "loss_fn.use_importance_sampling_correction",
            f"rollouts may be {settings.max_staleness} weight versions old (prorl.max_staleness), and the loss takes "
            "them for new ones",
            "Set it to true",
        )
    kind = at(config, "loss_fn.truncated_importance_sampling_type")
    ratio = at(config, "loss_fn.truncated_importance_sampling_ratio")
    if (kind is None) != (ratio is None):
        lacks = "type" if kind is None else "ratio"
        yield Finding(
            f"loss_fn.truncated_importance_sampling_{lacks}",
            "truncated importance sampling has a type (tis) and a ratio (2.0), and one of them is missing",
            "Give both, or neither",
        )
    elif kind is not None and not corrected:
        yield Finding(
            "loss_fn.truncated_importance_sampling_type",
            "it is read only with use_importance_sampling_correction",
            "Set loss_fn.use_importance_sampling_correction to true, or this one to null",
        )
    low, high = number_at(config, "loss_fn.ratio_clip_min"), number_at(config, "loss_fn.ratio_clip_max")
    if low is not None and high is not None and high < low:
        yield Finding(
            "loss_fn.ratio_clip_max",
            f"{high:g} is below ratio_clip_min ({low:g}); DAPO clips higher above than below",
            "0.28 with 0.2",
        )
    if at(config, "loss_fn.token_level_loss", True) is not True:
        yield Finding(
            "loss_fn.token_level_loss", "DAPO's loss weighs all tokens of a batch the same", "Set it to true"
        )
    if at(config, "loss_fn.force_on_policy_ratio") and settings.max_staleness > 0:
        yield Finding(
            "loss_fn.force_on_policy_ratio",
            "with prorl.max_staleness above 0 the ratio is not 1",
            "Set it to false",
        )


def _sampling(config: Mapping[str, Any]) -> Iterator[Finding]:
    """NeMo RL's engines answer 500 to a request that is not sampled exactly as the configuration says."""
    generation = "policy.generation"
    temperature = number_at(config, f"{generation}.temperature")
    if temperature is not None and temperature <= 0:
        yield Finding(
            f"{generation}.temperature", f"at {temperature:g} all rollouts of a prompt are the same", "1.0, say"
        )
    top_p = number_at(config, f"{generation}.top_p")
    if top_p is not None and not 0 < top_p <= 1:
        yield Finding(f"{generation}.top_p", f"{top_p:g} is no share", "Above 0, at most 1")
    if at(config, f"{generation}.top_k") not in (None, -1):
        yield Finding(f"{generation}.top_k", "NeMo RL's server for Gym refuses top_k", "Set it to null")
    for field in ("stop_strings", "stop_token_ids"):
        if at(config, f"{generation}.{field}"):
            yield Finding(f"{generation}.{field}", "NeMo RL takes none under Gym", "Set it to null")


def _lengths(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    longest = number_at(config, "policy.max_total_sequence_length")
    if longest is None:
        return
    engine = number_at(config, "policy.generation.vllm_cfg.max_model_len")
    if engine is not None and engine > longest:
        yield Finding(
            "policy.generation.vllm_cfg.max_model_len",
            f"the engine writes sequences of {engine} tokens, and the trainer takes {longest}",
            "Set it to ${policy.max_total_sequence_length}",
        )
    if settings.overlong is not None and settings.overlong.max_sequence_length > longest:
        yield Finding(
            "prorl.overlong.max_sequence_length",
            f"{settings.overlong.max_sequence_length} tokens are never reached: a sequence has at most {longest} "
            "(policy.max_total_sequence_length)",
            "Set it to ${policy.max_total_sequence_length}",
        )


def _devices(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    nodes, per_node = number_at(config, "cluster.num_nodes"), number_at(config, "cluster.gpus_per_node")
    if nodes is None or per_node is None:
        return
    training = int(nodes * per_node)
    if training < 1:
        yield Finding("cluster.num_nodes", f"{nodes} nodes of {per_node} devices are none", "At least one of each")
        return
    if not at(config, "policy.generation.colocated.enabled", True):
        generating = _generating(config, int(nodes), int(per_node))
        training -= generating
        if training <= 0 or generating <= 0:
            yield Finding(
                "policy.generation.colocated.resources.num_nodes",
                f"of {nodes * per_node} devices, {generating} are for generation and {training} for training",
                "Leave some for each, or raise cluster.num_nodes",
            )
            return
        share = count_at(config, "policy.generation.vllm_cfg.tensor_parallel_size") * count_at(
            config, "policy.generation.vllm_cfg.pipeline_parallel_size"
        )
        if generating % share:
            yield Finding(
                "policy.generation.vllm_cfg.tensor_parallel_size",
                f"{generating} devices for generation can't be divided by {share} for an engine",
                "Choose a divisor",
            )
    if not at(config, "policy.megatron_cfg.enabled"):
        return
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    replica = 1
    for size in sizes:
        replica *= count_at(config, f"policy.megatron_cfg.{size}")
    if training % replica:
        yield Finding(
            "policy.megatron_cfg.tensor_model_parallel_size",
            f"{training} devices for training can't be divided by {replica}, the product of {', '.join(sizes)}",
            "Choose sizes whose product divides it",
        )
        return
    batch = number_at(config, "policy.train_global_batch_size")
    if batch is not None and settings.runtime is Runtime.SINGLE_CONTROLLER:
        batch //= settings.mini_batches
    micro = count_at(config, "policy.train_micro_batch_size")
    if batch is not None and batch % (micro * (training // replica)):
        yield Finding(
            "policy.train_global_batch_size",
            f"{batch} rollouts of an optimizer step can't be divided by {micro} (train_micro_batch_size) times "
            f"{training // replica} replicas of the model",
            "Change the batch, the parallel sizes or cluster.num_nodes",
        )


def _generating(config: Mapping[str, Any], nodes: int, per_node: int) -> int:
    """Devices for generation where it has its own: whole nodes, or on a single node some of its devices."""
    resources = "policy.generation.colocated.resources"
    own = int(number_at(config, f"{resources}.gpus_per_node") or 0)
    if nodes == 1:
        return own
    return int(number_at(config, f"{resources}.num_nodes") or 0) * (own or per_node)
