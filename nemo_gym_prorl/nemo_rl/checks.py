# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a training starts: what would be wrong in silence, every finding at once.

A training that starts, goes on, and is not what one believes costs a cluster for days: its gradients are wrong, its
samples are of the short or of the lucky, no tool is ever called, it waits for ever. Nobody else says so. What stops a
start by itself is for those to say whom it stops: NeMo RL, Gym, Hydra, and the parts of ours that meet it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.deployment.config_files import load_merged
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts


DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"
_FROM_NEMO_RL = {"policy_base_url": "", "policy_api_key": "", "policy_model_name": "policy"}
"""What NeMo RL adds when its engines are up; files refer to it."""
_AGENT, _MODEL = "responses_api_agents.prorl_agent", "responses_api_models.prorl_model"
_DATA = "data.train.data_path"
_PARSERS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
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


@dataclass(frozen=True, slots=True)
class Finding:
    """Something for which a training is not to start.

    Attributes:
        field: its path, e.g. ``grpo.num_prompts_per_step``.
        what: what is wrong.
        fix: what to do.
    """

    field: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.what}. {self.fix}."


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a path with dots; ``default`` where there is none."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def block_at(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The block at a path; an empty one, if there is none. What is there instead is for others to refuse."""
    value = at(config, path)
    return value if isinstance(value, Mapping) else {}


def number_at(config: Mapping[str, Any], path: str) -> float | None:
    """The number at a path, if there is one; what is there instead is for NeMo RL's models to refuse."""
    value = at(config, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def of_validation(block: str, error: ValidationError) -> Iterator[Finding]:
    """What a model refused, by field."""
    for one in error.errors(include_url=False):
        key = one["loc"][-1] if one["loc"] else ""
        # The name of a union's member is no part of the path in a file; pydantic writes it as a tag between keys.
        path = ".".join(str(key) for key in one["loc"] if str(key).isidentifier() or isinstance(key, int))
        what = one["msg"].removeprefix("Value error, ").removeprefix(f"{key}: ").rstrip(".")
        field = ".".join(part for part in (block, path) if part)
        yield Finding(field or "(the configuration)", what, "Correct it there or on the command line")


def check(config: Mapping[str, Any], settings: ProrlSettings) -> list[Finding]:
    """All findings.

    Args:
        config: the resolved configuration.
        settings: its block ``prorl:``.
    """
    findings = [*_silent(config, settings), *check_rows(config)]
    if settings.rollouts is Rollouts.SERVICE:
        return findings
    try:
        gym = gym_blocks(config)
    except CallerError as error:
        return [*findings, Finding(error.field or "env.nemo_gym", error.complaint, "Correct it")]
    return [*findings, *_servers(config, settings, gym)]


def _silent(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """Settings of NeMo RL's own with which a training goes on and is not what one believes."""
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


def check_rows(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the rows suffice for the steps, and what they need is there; NeMo RL looks only later."""
    path = at(config, _DATA)
    if not isinstance(path, str):
        return
    try:
        count, with_tools = _read(Path(path))
    except (OSError, ValueError) as error:
        yield Finding(_DATA, str(error), "A file of rows, one JSON object in each line, as `prorl data` writes it")
        return
    if with_tools:
        yield from _parsers(config)
    paths = ("grpo.max_num_epochs", "grpo.max_num_steps", "grpo.num_prompts_per_step")
    epochs, steps, prompts = (int(number_at(config, path) or 0) for path in paths)
    if epochs and prompts and count * epochs // prompts < steps:
        yield Finding(
            "grpo.max_num_epochs",
            f"NeMo RL ends the training after {count * epochs // prompts} of {steps} steps: {count} rows {epochs} "
            f"times are all that its {prompts} prompts for each step are taken from",
            f"At least {-(-steps * prompts // count)}, or lower grpo.max_num_steps",
        )


def _parsers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether NeMo RL's server takes apart what a model with tools writes: by itself it hands it all out as text, and
    each rollout would end with its first turn."""
    said = block_at(config, _PARSERS)
    if not said.get("tool_parser"):
        yield Finding(
            f"{_PARSERS}.tool_parser",
            "the rows offer tools, and NeMo RL's server would hand calls out as text: no tool would ever be called",
            "vLLM's name for how the model writes calls, e.g. hermes for Qwen3",
        )
    if "reasoning_parser" not in said:
        yield Finding(
            f"{_PARSERS}.reasoning_parser",
            "nobody says whether the model thinks: calls that it only considers would be carried out",
            "vLLM's name for how it writes thoughts, e.g. qwen3, or null for a model that does not think",
        )


def _read(path: Path) -> tuple[int, bool]:
    """How many rows there are, and whether one has tools. NeMo RL takes each line for a row, blank ones, too.

    Raises:
        OSError: it can't be read.
        ValueError: a line is no row, or there is none.
    """
    count, with_tools = 0, False
    with path.open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, 1):
            try:
                with_tools = bool(json.loads(line)["responses_create_params"].get("tools")) or with_tools
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"line {count} of {path} is no row with responses_create_params: {error}") from error
    if not count:
        raise ValueError(f"{path} has no rows")
    return count, with_tools


def gym_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gym will make of ``env.nemo_gym``: the files that it names, and what the block says over them.

    Raises:
        CallerError: a file is not there or can't be read, or a reference leads nowhere.
    """
    own = block_at(config, "env.nemo_gym")
    named = own.get("shards")  # of newer versions: each adds files, and says something over them
    shards = [one for one in named if isinstance(one, Mapping)] if isinstance(named, list) else []
    paths = [
        path for one in (own, *shards) if isinstance(one.get("config_paths"), list) for path in one["config_paths"]
    ]
    over = [dict(own), *(dict(block_at(shard, "overrides")) for shard in shards)]
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(_FROM_NEMO_RL, load_merged(paths), *over), resolve=True)
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise CallerError(str(error).splitlines()[0], field="env.nemo_gym") from error
    assert isinstance(merged, dict)
    return {str(name): block for name, block in merged.items()}


def agent_of(settings: ProrlSettings, gym: Mapping[str, Any]) -> str | None:
    """Name of the agent that takes the rollouts, if it is clear which."""
    agents = [name for name, block in gym.items() if isinstance(block, Mapping) and block_at(block, _AGENT)]
    if settings.agent is None and len(agents) == 1:
        return agents[0]
    return settings.agent if settings.agent in agents else None


def _servers(config: Mapping[str, Any], settings: ProrlSettings, gym: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether Gym's servers beside the trainer go together with it; what keeps one from starting, it says itself."""
    for name in gym:
        model = block_at(gym, f"{name}.{_MODEL}")
        if model and block_at(model, "policy").get("engine") != "nemo_rl":
            path = f"env.nemo_gym.{name}.{_MODEL}.policy.engine"
            yield Finding(path, "the trainer's engine is NeMo RL's", "Set it to nemo_rl")
    if (agent := agent_of(settings, gym)) is None:
        yield Finding("prorl.agent", "there is no such prorl_agent, or it is not clear which", "Name one")
        return
    path = f"env.nemo_gym.{agent}.{_AGENT}"
    yield from _agent(config, path, block_at(gym, f"{agent}.{_AGENT}"))


def _agent(config: Mapping[str, Any], path: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    longest, own = number_at(config, "policy.max_total_sequence_length"), number_at(block, "max_total_sequence_length")
    if longest is not None and (own is None or own > longest):
        yield Finding(
            f"{path}.max_total_sequence_length",
            f"it has no such bound as the trainer's {longest:g} tokens (policy.max_total_sequence_length)",
            "Set it to ${policy.max_total_sequence_length}",
        )
    try:
        known = {key: block[key] for key in ("budgets", "max_attempts") if key in block}
        service = ServiceConfig.model_validate(known).pipeline_settings()
    except ValidationError:
        return  # the agent will say so itself
    deadline, budgets = number_at(config, DEADLINE), service.budgets
    needed = service.max_attempts * (budgets.init + budgets.run + budgets.eval)
    if deadline is not None and deadline <= needed:
        yield Finding(
            DEADLINE,
            f"{deadline:g} s cut off rollouts that have {needed:g}: {service.max_attempts} attempts of "
            f"{budgets.init:g} + {budgets.run:g} + {budgets.eval:g} s ({path}.max_attempts and budgets)",
            f"Above {needed:g}, with room for queues, or lower the budgets",
        )
