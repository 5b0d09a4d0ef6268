# SPDX-License-Identifier: Apache-2.0
"""Settings with which a training starts, goes on, and is not what one believes: each is wrong in silence.

What stops a start by itself, NeMo RL and Gym say: their own models and asserts are not said once more here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from nemo_gym_prorl.handlers.service_config import ServiceConfig
from nemo_gym_prorl.nemo_rl.checks.finding import Finding, at, block_at, count_at, number_at
from nemo_gym_prorl.nemo_rl.checks.gym_files import GymBlocks, servers_of
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts, Runtime


AGENT, MODEL = "responses_api_agents", "responses_api_models"
_DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"
_CORRECTION = "loss_fn.use_importance_sampling_correction"


def check(config: Mapping[str, Any], settings: ProrlSettings, gym: GymBlocks) -> Iterator[Finding]:
    """All of them.

    Args:
        config: the resolved configuration.
        settings: its block ``prorl:``.
        gym: what Gym will make of ``env.nemo_gym``.
    """
    elsewhere = settings.rollouts is Rollouts.SERVICE
    for name in ("services", "models"):
        if bool(getattr(settings, name)) is not elsewhere:
            yield Finding(
                f"prorl.{name}",
                f"prorl.rollouts is {settings.rollouts}, and addresses are of services that run elsewhere",
                "Give them for service, and none for gym",
            )
    yield from _groups(config)
    yield from _loss(config, settings)
    yield from _batch(config, settings)
    yield from _lengths(config, settings)
    if settings.runtime is Runtime.SINGLE_CONTROLLER:
        yield from _single_controller(config, settings)
    elif settings.max_staleness:
        yield Finding("prorl.max_staleness", "grpo_train waits for all rollouts before it trains", "Set it to 0")
    if not elsewhere:
        yield from _agents(config, settings, gym.merged)
        yield from _models(gym.merged)
        yield from _blocks(config, gym.files)


def agent_of(settings: ProrlSettings, gym: Mapping[str, Any]) -> str | None:
    """Name of the agent that takes the rollouts, if it is clear which."""
    agents = servers_of(gym, AGENT, "prorl_agent")
    if settings.agent is not None:
        return settings.agent if settings.agent in agents else None
    return next(iter(agents)) if len(agents) == 1 else None


def _groups(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Groups are chosen, scaled and shaped once, by us."""
    if count_at(config, "grpo.num_generations_per_prompt", 2) < 2:
        yield Finding("grpo.num_generations_per_prompt", "one rollout of a prompt has no variance", "At least 2")
    temperature = number_at(config, "policy.generation.temperature")
    if temperature is not None and temperature <= 0:
        yield Finding("policy.generation.temperature", "all rollouts of a prompt are the same", "1.0, say")
    for field in ("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline"):
        if at(config, field, True) is not False:
            yield Finding(
                field,
                "mean and deviation of a group are computed for each rollout without itself, so that the only success "
                "of a group has siblings without variance",
                "Set it to false (NeMo RL's default is true)",
            )
    if (number_at(config, "grpo.batch_multiplier") or 1) != 1:
        yield Finding("grpo.batch_multiplier", "it is for rounds that may be thrown away", "Set it to 1")
    for field, what, fix in (
        ("grpo.use_dynamic_sampling", "groups without variance are left out before NeMo RL sees them", "false"),
        ("grpo.reward_scaling.enabled", "it is ignored, or done twice", "false, and use prorl.reward_scaling"),
        ("grpo.reward_shaping.enabled", "it measures the first turn only, or is ignored", "false; prorl.overlong"),
        ("grpo.overlong_filtering", "it is ignored", "false, and use prorl.overlong"),
        ("policy.router_replay.enabled", "rollouts do not bring the experts that were chosen", "false"),
    ):
        if at(config, field):
            yield Finding(field, what, f"Set it to {fix}")


def _loss(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    stale, corrected = settings.max_staleness > 0, at(config, _CORRECTION)
    if stale and not corrected:
        yield Finding(
            _CORRECTION,
            f"rollouts may be {settings.max_staleness} weight versions old (prorl.max_staleness), and the loss takes "
            "them for new ones",
            "Set it to true",
        )
    kind = at(config, "loss_fn.truncated_importance_sampling_type")
    ratio = at(config, "loss_fn.truncated_importance_sampling_ratio")
    if (kind is None) != (ratio is None):
        lacks = "type" if kind is None else "ratio"
        yield Finding(f"loss_fn.truncated_importance_sampling_{lacks}", "nothing is truncated without it", "Give both")
    elif kind is not None and not corrected:
        yield Finding("loss_fn.truncated_importance_sampling_type", f"it is read only with {_CORRECTION}", "Set that")
    low, high = number_at(config, "loss_fn.ratio_clip_min"), number_at(config, "loss_fn.ratio_clip_max")
    if low is not None and high is not None and high < low:
        yield Finding("loss_fn.ratio_clip_max", f"{high:g} is below ratio_clip_min ({low:g})", "0.28 with 0.2, say")
    if at(config, "loss_fn.token_level_loss", True) is not True:
        yield Finding("loss_fn.token_level_loss", "DAPO's loss weighs all tokens of a batch alike", "Set it to true")
    if at(config, "loss_fn.disable_ppo_ratio"):
        yield Finding("loss_fn.disable_ppo_ratio", "there is no ratio to clip then", "Set it to false")
    forced, steps = at(config, "loss_fn.force_on_policy_ratio"), settings.mini_batches
    if forced and (stale or steps > 1):
        yield Finding(
            "loss_fn.force_on_policy_ratio",
            "the ratio is not 1 with prorl.max_staleness above 0, nor from the second of prorl.mini_batches on",
            "Set it to false",
        )
    if steps == 1 and not forced:
        yield Finding(
            "prorl.mini_batches",
            "in the only optimizer step of a batch the loss's ratio is 1, so loss_fn.ratio_clip_max does nothing",
            "2 or more, e.g. 4; or set loss_fn.force_on_policy_ratio to true, to train without a clip",
        )


def _batch(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """NeMo RL takes what it is handed, be it more or fewer optimizer steps than are meant."""
    prompts, steps = number_at(config, "grpo.num_prompts_per_step"), settings.mini_batches
    size, batch = (
        number_at(config, "grpo.num_generations_per_prompt"),
        number_at(config, "policy.train_global_batch_size"),
    )
    if prompts is None or size is None or batch is None:
        return
    if prompts % steps:
        yield Finding("prorl.mini_batches", f"{prompts:g} groups of a step can't be divided by it", "Choose a divisor")
    whole = settings.runtime is Runtime.SINGLE_CONTROLLER
    if prompts * size != batch * (1 if whole else steps):
        yield Finding(
            "policy.train_global_batch_size",
            f"grpo.num_prompts_per_step times grpo.num_generations_per_prompt are {prompts * size:g} rollouts",
            f"Set it to {'that: prorl.mini_batches divides it' if whole else 'that over prorl.mini_batches'}",
        )


def _lengths(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    longest = number_at(config, "policy.max_total_sequence_length")
    engine = number_at(config, "policy.generation.vllm_cfg.max_model_len")
    lengths = [("policy.generation.vllm_cfg.max_model_len", engine)]
    if settings.overlong is not None:
        lengths.append(("prorl.overlong.max_sequence_length", settings.overlong.max_sequence_length))
    for field, length in lengths:
        if longest is not None and length is not None and length > longest:
            yield Finding(
                field,
                f"it is {length:g}, and the trainer takes {longest:g} tokens (policy.max_total_sequence_length)",
                "Set it to ${policy.max_total_sequence_length}",
            )


def _single_controller(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    if number_at(config, "grpo.val_period") and at(config, "data.validation") is None:
        yield Finding("grpo.val_period", "there are no rows to validate on", "Give data.validation.data_path", False)
    if at(config, "grpo.val_at_end"):
        yield Finding("grpo.val_at_end", "nobody is told of what comes after the last step", "Set it to false")
    sampler = block_at(config, "async_rl.sampler")
    field = "max_lookahead_versions" if sampler.get("name") == "in_order" else "max_staleness_versions"
    if sampler.get("name") != "custom" and sampler.get(field, 1) != settings.max_staleness:
        yield Finding(
            f"async_rl.sampler.{field}",
            f"it is not prorl.max_staleness ({settings.max_staleness}): one would wait for the other for ever",
            "Set it to ${prorl.max_staleness}",
        )
    prompts = count_at(config, "grpo.num_prompts_per_step")
    least = prompts * (settings.max_staleness + 1)
    buffered = number_at(config, "async_rl.max_buffered_rollouts")
    if buffered is not None and buffered < least:
        yield Finding(
            "async_rl.max_buffered_rollouts", f"steps that may be ahead have {least} groups", f"At least {least}"
        )
    streaming = number_at(config, "async_rl.min_groups_for_streaming_train")
    if streaming is not None and (streaming > prompts or (streaming < prompts and settings.mini_batches > 1)):
        yield Finding(
            "async_rl.min_groups_for_streaming_train",
            f"mini-batches are made of all {prompts} groups of a step, and a step has no more",
            "Set it to ${grpo.num_prompts_per_step}",
        )
    if settings.rollouts is Rollouts.GYM and number_at(config, _DEADLINE) is None:
        yield Finding(_DEADLINE, "a rollout that hangs is waited for until the job ends", "Set it in seconds")


def _agents(config: Mapping[str, Any], settings: ProrlSettings, gym: Mapping[str, Any]) -> Iterator[Finding]:
    agents = servers_of(gym, AGENT, "prorl_agent")
    if (name := agent_of(settings, gym)) is None:
        there = ", ".join(sorted(agents)) or "none"
        yield Finding("prorl.agent", f"there is no such prorl_agent, or it is not clear which: {there}", "Name one")
        return
    path, block = f"env.nemo_gym.{name}.{AGENT}.prorl_agent", agents[name]
    longest, own = number_at(config, "policy.max_total_sequence_length"), number_at(block, "max_total_sequence_length")
    if longest is not None and (own is None or own > longest):
        yield Finding(
            f"{path}.max_total_sequence_length",
            f"it has no such bound as the trainer's {longest:g} tokens (policy.max_total_sequence_length)",
            "Set it to ${policy.max_total_sequence_length}",
        )
    yield from _verdicts(config, settings, gym, path, block)
    deadline = number_at(config, _DEADLINE)
    try:
        known = {key: block[key] for key in ("budgets", "max_attempts") if key in block}
        service = ServiceConfig.model_validate(known).pipeline_settings()
    except ValidationError:
        return  # the agent will say so itself
    budgets = service.budgets
    needed = service.max_attempts * (budgets.init + budgets.run + budgets.eval)
    if deadline is not None and deadline <= needed:
        yield Finding(
            _DEADLINE,
            f"{deadline:g} s cut off rollouts that have {needed:g}: {service.max_attempts} attempts of "
            f"{budgets.init:g} + {budgets.run:g} + {budgets.eval:g} s ({path}.max_attempts and budgets)",
            f"Above {needed:g}, with room for queues, or lower the budgets",
        )


def _verdicts(
    config: Mapping[str, Any], settings: ProrlSettings, gym: Mapping[str, Any], path: str, block: Mapping[str, Any]
) -> Iterator[Finding]:
    """Whether each of an agent's environments scores what groups are of, by what they may vary by."""
    further = block_at(block, "environments")
    environments = {
        path: block,
        **{f"{path}.environments.{name}": {**block, **block_at(further, str(name))} for name in further},
    }
    size = count_at(config, "grpo.num_generations_per_prompt")
    for where, environment in environments.items():
        name = at(environment, "resources_server.name")
        server = next(iter(block_at(gym, f"{name}.resources_servers").values()), None) or {}
        together = count_at(environment, "scores_groups_of", count_at(server, "num_rollouts_per_prompt"))
        if size % together:
            yield Finding(
                "grpo.num_generations_per_prompt",
                f"rollouts of a prompt are scored {together} at a time ({where}: scores_groups_of, or {name}: "
                f"num_rollouts_per_prompt), and of {size} some would wait for others that never come",
                f"A multiple of {together}, or correct the other",
            )
        if settings.filter_on is None and at(server, "reward") == "fraction":
            yield Finding(
                "prorl.filter_on",
                f"{name} gives the share of the tests that pass (reward: fraction), which does not say whether a "
                "rollout was right",
                f"Set it to reward, so that groups vary by that share, or {name}'s reward to all",
            )


def _models(gym: Mapping[str, Any]) -> Iterator[Finding]:
    models = servers_of(gym, MODEL, "prorl_model")
    if not models:
        yield Finding(
            "env.nemo_gym.config_paths",
            "none of the files has a prorl_model",
            "Name responses_api_models/prorl_model/configs/prorl_model.yaml in place of vllm_model's",
        )
    for name, block in models.items():
        path = f"env.nemo_gym.{name}.{MODEL}.prorl_model"
        if block_at(block, "policy").get("engine") != "nemo_rl":
            yield Finding(f"{path}.policy.engine", "the trainer's engine is NeMo RL's", "Set it to nemo_rl")
        if block.get("return_token_id_information", True) is not True:
            yield Finding(f"{path}.return_token_id_information", "there is nothing to train on", "Set it to true")


def _blocks(config: Mapping[str, Any], files: Mapping[str, Any]) -> Iterator[Finding]:
    """Gym lets a block pass that goes over none of the files' and starts no server itself: nobody reads it."""
    for name, block in block_at(config, "env.nemo_gym").items():
        for kind in (AGENT, MODEL, "resources_servers"):
            for server, settings in block_at(block, kind).items():
                started = isinstance(settings, Mapping) and "entrypoint" in settings
                if settings is not None and not started and at(files, f"{name}.{kind}.{server}") is None:
                    field = f"env.nemo_gym.{name}.{kind}.{server}"
                    yield Finding(field, "no file in config_paths has that", "Correct the name, or set it to null")
