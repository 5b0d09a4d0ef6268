# SPDX-License-Identifier: Apache-2.0
"""What one of NeMo RL's training loops demands, and the other does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym_prorl.nemo_rl.checks.finding import Finding, at, block_at, count_at, number_at
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts, Runtime


_DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"


def check(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """Those of the loop that is chosen."""
    if settings.runtime is Runtime.SYNCHRONOUS:
        yield from _synchronous(config, settings)
    else:
        yield from _single_controller(config, settings)
    yield from _mini_batches(config, settings)
    yield from _validation(config)


def _validation(config: Mapping[str, Any]) -> Iterator[Finding]:
    if number_at(config, "grpo.val_period") and at(config, "data.validation") is None:
        yield Finding(
            "grpo.val_period", "there are no rows to validate on", "Give data.validation.data_path", fatal=False
        )


def _mini_batches(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """A clip that cannot act is one that somebody believes in."""
    steps, forced = settings.mini_batches, bool(at(config, "loss_fn.force_on_policy_ratio"))
    prompts = count_at(config, "grpo.num_prompts_per_step")
    if prompts % steps:
        yield Finding(
            "prorl.mini_batches",
            f"{prompts} groups of a step (grpo.num_prompts_per_step) can't be divided into {steps}",
            "Choose a divisor",
        )
    if steps == 1 and not forced:
        yield Finding(
            "prorl.mini_batches",
            "in the only optimizer step of a batch the loss's ratio is 1, so loss_fn.ratio_clip_max does nothing",
            "2 or more, e.g. 4; or set loss_fn.force_on_policy_ratio to true, to train without a clip",
        )
    if steps > 1 and forced:
        yield Finding(
            "loss_fn.force_on_policy_ratio",
            f"from the second of {steps} optimizer steps of a batch (prorl.mini_batches) the ratio is not 1",
            "Set it to false",
        )
    if at(config, "loss_fn.disable_ppo_ratio"):
        yield Finding("loss_fn.disable_ppo_ratio", "there is no ratio to clip then", "Set it to false")


def _rollouts_per_step(config: Mapping[str, Any]) -> int | None:
    prompts = number_at(config, "grpo.num_prompts_per_step")
    size = number_at(config, "grpo.num_generations_per_prompt")
    return None if prompts is None or size is None else int(prompts * size)


def _single_controller(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    yield from _switches(
        config,
        {
            "data_plane.enabled": (True, "SingleController hands rollouts over by the data plane"),
            "policy.megatron_cfg.enabled": (True, "SingleController trains with Megatron only"),
            "policy.generation.colocated.enabled": (False, "its engines need devices of their own"),
        },
    )
    if at(config, "policy.generation.backend", "vllm") != "vllm":
        yield Finding("policy.generation.backend", "SingleController generates with vLLM only", "Set it to vllm")
    if at(config, "grpo.async_grpo") is not None:
        yield Finding(
            "grpo.async_grpo", "it is of another loop, and SingleController refuses it", "Set it to null; see async_rl"
        )
    if at(config, "grpo.val_at_end"):
        yield Finding(
            "grpo.val_at_end", "SingleController tells nobody of what comes after its last step", "Set it to false"
        )
    if at(config, "grpo.overlong_filtering"):
        yield Finding("grpo.overlong_filtering", "SingleController ignores it", "Set it to false; see prorl.overlong")
    rollouts, batch = _rollouts_per_step(config), number_at(config, "policy.train_global_batch_size")
    if rollouts is not None and batch is not None and rollouts != batch:
        yield Finding(
            "policy.train_global_batch_size",
            f"it is {batch}, but grpo.num_prompts_per_step times grpo.num_generations_per_prompt is {rollouts}; "
            "SingleController makes one step of all, and prorl.mini_batches divides it",
            f"Set it to {rollouts}, or change the others",
        )
    yield from _run_ahead(config, settings)
    yield from _given_up(config, settings)


def _run_ahead(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    sampler = block_at(config, "async_rl.sampler")
    name = sampler.get("name")
    ahead = sampler.get("max_lookahead_versions" if name == "in_order" else "max_staleness_versions", 1)
    if name != "custom" and ahead != settings.max_staleness:
        field = "max_lookahead_versions" if name == "in_order" else "max_staleness_versions"
        yield Finding(
            f"async_rl.sampler.{field}",
            f"it is {ahead}, and prorl.max_staleness is {settings.max_staleness}: one would wait for the other",
            "Set it to ${prorl.max_staleness}",
        )
    prompts = count_at(config, "grpo.num_prompts_per_step")
    inflight = number_at(config, "async_rl.max_inflight_prompts")
    if inflight is not None and inflight < prompts:
        yield Finding(
            "async_rl.max_inflight_prompts",
            f"{inflight} prompts under way never make a step of {prompts} at once, and engines idle while it fills",
            f"At least {prompts} (grpo.num_prompts_per_step), better several times that",
        )
    least = prompts * (settings.max_staleness + 1)
    buffered = number_at(config, "async_rl.max_buffered_rollouts")
    if buffered is not None and buffered < least:
        yield Finding(
            "async_rl.max_buffered_rollouts",
            f"{buffered} groups are fewer than the {least} of steps that may be ahead",
            f"At least {least}: grpo.num_prompts_per_step times (prorl.max_staleness + 1)",
        )
    streaming = number_at(config, "async_rl.min_groups_for_streaming_train")
    if streaming is not None and (streaming > prompts or (streaming < prompts and settings.mini_batches > 1)):
        what = "more than a step has" if streaming > prompts else "a part of a step, whose mini-batches need all of it"
        yield Finding(
            "async_rl.min_groups_for_streaming_train",
            f"{streaming} groups are {what} ({prompts})",
            "Set it to ${grpo.num_prompts_per_step}",
        )


def _given_up(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    if not number_at(config, "async_rl.rollout_failure.max_skipped_prompts"):
        yield Finding(
            "async_rl.rollout_failure.max_skipped_prompts",
            "the first row that can't be run would end the training",
            "More than 0, e.g. 32",
        )
    deadline = number_at(config, _DEADLINE)
    if deadline is None and settings.rollouts is Rollouts.GYM:
        yield Finding(
            _DEADLINE, "without it a rollout that hangs is waited for until the job ends", "Set it in seconds"
        )
    stall = number_at(config, "async_rl.stall_watchdog.stall_timeout_s")
    if deadline is not None and stall is not None and stall <= deadline:
        yield Finding(
            "async_rl.stall_watchdog.stall_timeout_s",
            f"{stall:g} s is not above {_DEADLINE} ({deadline:g} s), so a slow rollout counts as a stall",
            "Raise it",
        )


def _synchronous(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    yield from _switches(
        config,
        {
            "data_plane.enabled": (False, "grpo_train has none"),
            "grpo.async_grpo.enabled": (False, "that is NeMo RL's older asynchronous loop"),
        },
    )
    if at(config, "grpo.async_grpo") is None:
        yield Finding("grpo.async_grpo", "grpo_train looks into it", "Set it to {enabled: false}")
    if settings.max_staleness:
        yield Finding(
            "prorl.max_staleness",
            f"it is {settings.max_staleness}, but grpo_train waits for all rollouts before it trains",
            "Set it to 0",
        )
    if settings.rollouts is Rollouts.SERVICE:
        yield Finding("prorl.rollouts", "service mode is SingleController's", "Set prorl.runtime to single_controller")
    rollouts, batch = _rollouts_per_step(config), number_at(config, "policy.train_global_batch_size")
    if rollouts is not None and batch and rollouts != batch * settings.mini_batches:
        yield Finding(
            "policy.train_global_batch_size",
            f"{rollouts} rollouts of a step (grpo.num_prompts_per_step times grpo.num_generations_per_prompt) are not "
            f"{settings.mini_batches} mini-batches (prorl.mini_batches) of {batch}",
            "Set it to their quotient",
        )


def _switches(config: Mapping[str, Any], wanted: Mapping[str, tuple[bool, str]]) -> Iterator[Finding]:
    for field, (value, why) in wanted.items():
        if bool(at(config, field)) is not value:
            yield Finding(field, why, f"Set it to {str(value).lower()}")
