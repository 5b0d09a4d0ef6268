# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration before training starts; all findings are reported at once.

The checks look for settings under which training starts and silently does something else: wrong gradients, biased
samples, a policy that never calls a tool, or an endless wait. Errors that prevent a start are left to NeMo RL, Gym,
Hydra and the component that detects them.
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
from nemo_gym_prorl.deployment.gym_cli import load_merged
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings, RolloutSource


DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"
_FROM_NEMO_RL = {"policy_base_url": "", "policy_api_key": "", "policy_model_name": "policy"}
"""Stand-ins for values to which configuration files refer, and which NeMo RL adds once its engines run."""
_AGENT, _MODEL = "responses_api_agents.prorl_agent", "responses_api_models.prorl_model"
_DATA = "data.train.data_path"
_PARSERS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
_LEAVE_ONE_OUT = (
    "mean and deviation of a group are computed for each rollout without itself, so that the only success of a group "
    "has siblings without variance"
)
FORBIDDEN_SETTINGS: tuple[tuple[str, bool | float, str, str], ...] = (
    ("policy.generation.temperature", 0.0, "all rollouts of a prompt are the same", "1.0, say"),
    ("token_capture.enabled", True, "NeMo RL would sample by itself and bypass the filter", "false"),
    ("grpo.use_leave_one_out_baseline", True, _LEAVE_ONE_OUT, "false (NeMo RL's default is true)"),
    ("grpo.adv_estimator.use_leave_one_out_baseline", True, _LEAVE_ONE_OUT, "false (NeMo RL's default is true)"),
    ("grpo.use_dynamic_sampling", True, "zero-variance groups are dropped before NeMo RL sees them", "false"),
    (
        "grpo.reward_scaling.enabled",
        True,
        "scaling is ignored or applied twice",
        "false, and use prorl.reward_scaling",
    ),
    ("grpo.reward_shaping.enabled", True, "shaping measures the first turn only", "false, and use prorl.overlong"),
    ("grpo.overlong_filtering", True, "the setting has no effect here", "false, and use prorl.overlong"),
    ("loss_fn.token_level_loss", False, "DAPO's loss weighs all tokens of a batch alike", "true"),
    ("loss_fn.disable_ppo_ratio", True, "without the ratio there is nothing to clip", "false"),
)
"""Settings that would silently change training: path, forbidden value, reason, and the value to set."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A configuration error because of which training does not start.

    Attributes:
        field: path of the setting, e.g. ``grpo.num_prompts_per_step``.
        what: description of the error.
        fix: sentence that says how to correct the setting, without the full stop.
    """

    field: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.what}. {self.fix}."


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or ``default`` if there is none."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def block_at(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the block at a path; empty for no value, or for a value of another type (NeMo RL's models refuse it)."""
    value = value_at(config, path)
    return value if isinstance(value, Mapping) else {}


def number_at(config: Mapping[str, Any], path: str) -> float | None:
    """Return the finite number at a path; ``None`` for any other value, which NeMo RL's models refuse."""
    value = value_at(config, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def findings_of_validation(block: str, error: ValidationError) -> Iterator[Finding]:
    """Yield one finding for each field that a pydantic model of the block at the path ``block`` refused."""
    for one in error.errors(include_url=False):
        key = one["loc"][-1] if one["loc"] else ""
        # Pydantic inserts the type of a union's member into the path. That name is not a key of the file.
        path = ".".join(str(key) for key in one["loc"] if str(key).isidentifier() or isinstance(key, int))
        what = one["msg"].removeprefix("Value error, ").removeprefix(f"{key}: ").rstrip(".")
        field = ".".join(part for part in (block, path) if part)
        yield Finding(field or "(the configuration)", what, "Correct the field in the file or on the command line")


def check(config: Mapping[str, Any], settings: ProrlSettings) -> list[Finding]:
    findings = [*_check_settings(config, settings), *check_rows(config)]
    if settings.rollouts is RolloutSource.SERVICE:
        return findings
    try:
        gym = gym_blocks(config)
    except CallerError as error:
        return [*findings, Finding(error.field or "env.nemo_gym", error.complaint, "Correct the block")]
    return [*findings, *_check_servers(config, settings, gym)]


def _check_settings(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    for field, wrong, what, fix in FORBIDDEN_SETTINGS:
        default = wrong if field.endswith("leave_one_out_baseline") else None
        if value_at(config, field, default) == wrong:
            yield Finding(field, what, f"Set it to {fix}")
    yield from _check_loss(config, settings)
    yield from _check_lengths(config, settings)
    yield from _check_log_probs(config)
    yield from _check_single_controller(config, settings)


def _check_loss(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    stale, steps = settings.max_staleness > 0, settings.mini_batches
    if stale and not value_at(config, "loss_fn.use_importance_sampling_correction"):
        yield Finding(
            "loss_fn.use_importance_sampling_correction",
            f"rollouts may be {settings.max_staleness} weight versions old (prorl.max_staleness), and the loss treats "
            "them as on-policy",
            "Set it to true",
        )
    forced = value_at(config, "loss_fn.force_on_policy_ratio")
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
            "Set it to 2 or more, e.g. 4; or set loss_fn.force_on_policy_ratio to true, to train without a clip",
        )


def _check_log_probs(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that vLLM's log-probabilities include sampling settings, which vLLM's default mode excludes."""
    where = "policy.generation"
    neutral = {"temperature": (1.0,), "top_p": (None, 1.0), "top_k": (None, 0, -1)}
    changed = [
        name for name, values in neutral.items() if value_at(config, f"{where}.{name}", values[0]) not in values
    ]
    field = f"{where}.vllm_cfg.logprobs_mode"
    vllm = value_at(config, f"{where}.backend", "vllm") == "vllm"
    if changed and vllm and value_at(config, field) != "processed_logprobs":
        yield Finding(
            field,
            f"log-probabilities would not be of the distribution that is sampled from ({', '.join(changed)})",
            "Set it to processed_logprobs",
        )


def _check_lengths(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    longest, engine = "policy.max_total_sequence_length", "policy.generation.vllm_cfg.max_model_len"
    lengths = {engine: number_at(config, engine)}
    if settings.overlong is not None:
        lengths["prorl.overlong.max_sequence_length"] = settings.overlong.max_sequence_length
    bound = number_at(config, longest)
    for field, length in lengths.items():
        if bound is not None and length is not None and length > bound:
            what = f"the length {length:g} exceeds the trainer's {bound:g} tokens ({longest})"
            yield Finding(field, what, f"Set it to ${{{longest}}}")


def _check_single_controller(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    streaming = number_at(config, "async_rl.min_groups_for_streaming_train")
    prompts = number_at(config, "grpo.num_prompts_per_step")
    if settings.mini_batches > 1 and streaming is not None and prompts is not None and streaming < prompts:
        yield Finding(
            "async_rl.min_groups_for_streaming_train",
            f"mini-batches need all {prompts:g} groups of a step at once",
            "Set it to ${grpo.num_prompts_per_step}",
        )
    field = "async_rl.recompute_kv_cache_after_weight_updates"
    if not value_at(config, field):
        yield Finding(
            field,
            "a new rollout would read cached keys and values of a shared prefix from weights of any earlier version",
            "Set it to true",
        )
    if settings.rollouts is RolloutSource.GYM and number_at(config, DEADLINE) is None:
        yield Finding(
            DEADLINE, "without a deadline a rollout that hangs blocks the job to its end", "Set it in seconds"
        )


def check_rows(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the rows' format, their number against the steps, and the parsers that rows with tools need."""
    path = value_at(config, _DATA)
    if not isinstance(path, str):
        return
    try:
        count, with_tools = _read(Path(path))
    except (OSError, ValueError) as error:
        yield Finding(_DATA, str(error), "Name a file with one JSON object in each line, as `prorl data` writes it")
        return
    if with_tools:
        yield from _check_parsers(config)
    paths = ("grpo.max_num_epochs", "grpo.max_num_steps", "grpo.num_prompts_per_step")
    epochs, steps, prompts = (int(number_at(config, path) or 0) for path in paths)
    if epochs and prompts and count * epochs // prompts < steps:
        yield Finding(
            "grpo.max_num_epochs",
            f"NeMo RL ends the training after {count * epochs // prompts} of {steps} steps: {count} rows in {epochs} "
            f"epochs do not suffice for {prompts} prompts in each step",
            f"Set it to at least {-(-steps * prompts // count)}, or lower grpo.max_num_steps",
        )


def _check_parsers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that NeMo RL's server parses tool calls; otherwise each rollout ends after one turn."""
    parsers = block_at(config, _PARSERS)
    if not parsers.get("tool_parser"):
        yield Finding(
            f"{_PARSERS}.tool_parser",
            "the rows offer tools, and NeMo RL's server would return calls as text: no tool would ever be called",
            "Set it to vLLM's parser for the model's calls, e.g. hermes for Qwen3",
        )
    if "reasoning_parser" not in parsers:
        yield Finding(
            f"{_PARSERS}.reasoning_parser",
            "it is not configured whether the model reasons: calls inside its reasoning would be executed",
            "Set it to vLLM's parser for the model's reasoning, e.g. qwen3, or to null if the model does not reason",
        )


def _read(path: Path) -> tuple[int, bool]:
    """Return the number of rows, and whether any row has tools. A blank line is an error, as it is for NeMo RL."""
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
    """Return Gym's view of ``env.nemo_gym``: the files that the block names, overridden by the block itself.

    Raises:
        CallerError: a file cannot be read, or a reference cannot be resolved.
    """
    own = block_at(config, "env.nemo_gym")
    named = own.get("shards")  # newer versions of NeMo RL: each shard adds files and overrides
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
    """Return the name of the agent that runs the rollouts; ``None`` if the agent is missing or ambiguous."""
    agents = [name for name, block in gym.items() if isinstance(block, Mapping) and block_at(block, _AGENT)]
    if settings.agent is None and len(agents) == 1:
        return agents[0]
    return settings.agent if settings.agent in agents else None


def _check_servers(config: Mapping[str, Any], settings: ProrlSettings, gym: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that Gym's model servers and agent fit the trainer. A server that cannot start reports its own errors."""
    for name in gym:
        model = block_at(gym, f"{name}.{_MODEL}")
        if model and block_at(model, "policy").get("engine") != "nemo_rl":
            path = f"env.nemo_gym.{name}.{_MODEL}.policy.engine"
            yield Finding(path, "the trainer's engine is NeMo RL's", "Set it to nemo_rl")
    if (agent := agent_of(settings, gym)) is None:
        what = "the prorl_agent server of the rollouts is missing or ambiguous"
        yield Finding("prorl.agent", what, "Name a prorl_agent server of env.nemo_gym")
        return
    path = f"env.nemo_gym.{agent}.{_AGENT}"
    yield from _check_agent(config, path, block_at(gym, f"{agent}.{_AGENT}"))


def _check_agent(config: Mapping[str, Any], path: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    longest, own = number_at(config, "policy.max_total_sequence_length"), number_at(block, "max_total_sequence_length")
    if longest is not None and (own is None or own > longest):
        yield Finding(
            f"{path}.max_total_sequence_length",
            f"the agent's limit exceeds the trainer's {longest:g} tokens (policy.max_total_sequence_length)",
            "Set it to ${policy.max_total_sequence_length}",
        )
    try:
        known = {key: block[key] for key in ("budgets", "max_attempts") if key in block}
        service = ServiceConfig.model_validate(known)
    except ValidationError:
        return  # the agent reports the error when it starts
    deadline, budgets = number_at(config, DEADLINE), service.budgets
    needed = service.max_attempts * (budgets.init + budgets.run + budgets.eval)
    if deadline is not None and deadline <= needed:
        yield Finding(
            DEADLINE,
            f"{deadline:g} s cut off rollouts that may take {needed:g} s: {service.max_attempts} attempts of "
            f"{budgets.init:g} + {budgets.run:g} + {budgets.eval:g} s ({path}.max_attempts and budgets)",
            f"Set it above {needed:g}, with room for queues, or lower the budgets",
        )
