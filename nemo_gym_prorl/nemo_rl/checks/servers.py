# SPDX-License-Identifier: Apache-2.0
"""What the Gym servers' side of a configuration demands: agent, model server, budgets, or the services elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym import global_config
from pydantic import BaseModel, ValidationError

from nemo_gym_prorl.handlers.service_config import ServiceConfig
from nemo_gym_prorl.nemo_rl.checks.finding import Finding, at, block_at, number_at, of_validation
from nemo_gym_prorl.nemo_rl.checks.gym_files import GymBlocks
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.serving.known_keys import refuse_unknown
from nemo_gym_prorl.serving.server_config import ServerConfig


AGENT, MODEL = "responses_api_agents", "responses_api_models"
TYPES = (AGENT, MODEL, "resources_servers", "environment_servers")
NO_ENVIRONMENT = "prorl"
"""The name of an environment that does nothing, for data whose rollouts are made elsewhere."""

_GYM = "env.nemo_gym"
_DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"
_STALL = "async_rl.stall_watchdog.stall_timeout_s"
_SAMPLING = ("temperature", "top_p", "top_k")
_OF_NEMO_RL = ("should_use_nemo_gym", "should_log_nemo_gym_responses", "should_mask_flagged_samples", "nemo_gym")
_OF_AGENTS = ("model_server", "datasets", "skills")
"""Keys of an agent's block that Gym reads."""


def check(config: Mapping[str, Any], settings: ProrlSettings, blocks: GymBlocks) -> Iterator[Finding]:
    """Those of Gym servers that the trainer starts, or of services that run elsewhere."""
    yield from _switches(config)
    if settings.rollouts is Rollouts.SERVICE:
        yield from _elsewhere(config, settings)
    else:
        yield from _here(config, settings, blocks)


def servers_of(gym: Mapping[str, Any], kind: str, implementation: str) -> dict[str, Mapping[str, Any]]:
    """Blocks of one server folder by the names of its instances."""
    found = {}
    for name, block in gym.items():
        if settings := block_at(block, f"{kind}.{implementation}"):
            found[str(name)] = settings
    return found


def agent_of(settings: ProrlSettings, gym: Mapping[str, Any]) -> str | None:
    """Name of the agent that takes the rollouts, if it is clear which."""
    agents = servers_of(gym, AGENT, "prorl_agent")
    if settings.agent is not None:
        return settings.agent if settings.agent in agents else None
    return next(iter(agents)) if len(agents) == 1 else None


def _elsewhere(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    for field, what in (("services", "prorl_agent"), ("models", "prorl_model")):
        if not getattr(settings, field):
            yield Finding(
                f"prorl.{field}", "prorl.rollouts is service, and there is no address", f"Give URLs of {what} servers"
            )
    if at(config, "async_rl.generation_router.enabled"):
        yield Finding(
            "async_rl.generation_router.enabled",
            "NeMo RL starts its router together with Gym servers, and prorl.rollouts is service",
            "Set it to false",
        )
    if at(config, "env.should_use_nemo_gym"):
        yield Finding(
            "env.should_use_nemo_gym",
            "NeMo RL would start Gym servers, and prorl.rollouts is service",
            "Set it to false",
        )
    if at(config, "data.default.env_name") != NO_ENVIRONMENT or at(config, f"env.{NO_ENVIRONMENT}") is None:
        yield Finding(
            "data.default.env_name",
            "NeMo RL wants an environment for each data set, and here there is none",
            f"Set it to {NO_ENVIRONMENT}, and env.{NO_ENVIRONMENT} to {{}}",
        )


def _here(config: Mapping[str, Any], settings: ProrlSettings, blocks: GymBlocks) -> Iterator[Finding]:
    if at(config, "env.should_use_nemo_gym") is not True:
        yield Finding("env.should_use_nemo_gym", "rollouts come from Gym servers", "Set it to true")
    for field in ("services", "models"):
        if getattr(settings, field):
            yield Finding(
                f"prorl.{field}",
                "it is for services that run elsewhere, and prorl.rollouts is gym",
                "Take it out, or set prorl.rollouts to service",
            )
    yield from _agents(config, settings, blocks.merged)
    yield from _models(blocks.merged)
    if settings.key_env is None:
        yield from _keys(blocks.merged)
    yield from _blocks(config, blocks.files)


def _keys(gym: Mapping[str, Any]) -> Iterator[Finding]:
    for name, block in servers_of(gym, AGENT, "prorl_agent").items():
        if block.get("control_token"):
            yield Finding(
                "prorl.key_env",
                f"{name} has a control_token, and would answer 401",
                "Name the environment variable that has the key",
            )


def _agents(config: Mapping[str, Any], settings: ProrlSettings, gym: Mapping[str, Any]) -> Iterator[Finding]:
    agents = servers_of(gym, AGENT, "prorl_agent")
    if not agents:
        yield Finding(
            f"{_GYM}.config_paths",
            "none of the files has a prorl_agent",
            "Name an environment's file, e.g. resources_servers/prorl_swe/configs/prorl_swe.yaml",
        )
    elif settings.agent is not None and settings.agent not in agents:
        yield Finding("prorl.agent", f"there is no {settings.agent}", f"One of {', '.join(sorted(agents))}")
    elif settings.agent is None and len(agents) > 1:
        yield Finding("prorl.agent", f"there are {', '.join(sorted(agents))}", "Say which")
    for name, block in agents.items():
        path = f"{_GYM}.{name}.{AGENT}.prorl_agent"
        yield from _settings_of(path, ServiceConfig, block)
        yield from _agent_lengths(config, path, block)
        if name == agent_of(settings, gym):
            yield from _deadline(config, path, block)


def _settings_of(path: str, model: type[BaseModel], block: Mapping[str, Any]) -> Iterator[Finding]:
    """Our servers would say the same, but later."""
    own = {key: value for key, value in block.items() if key in model.model_fields}
    try:
        refuse_unknown(model, block, {*ServerConfig.other_keys(), *_OF_AGENTS})
        model.model_validate(own)
    except ValidationError as error:
        yield from of_validation(path, error)


def _agent_lengths(config: Mapping[str, Any], path: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    longest = number_at(config, "policy.max_total_sequence_length")
    own = number_at(block, "max_total_sequence_length")
    if longest is not None and (own is None or own > longest):
        what = "it has no bound" if own is None else f"it is {own}"
        yield Finding(
            f"{path}.max_total_sequence_length",
            f"{what}, and the trainer takes sequences of {longest} tokens (policy.max_total_sequence_length)",
            "Set it to ${policy.max_total_sequence_length}",
        )


def _deadline(config: Mapping[str, Any], path: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        settings = ServiceConfig.model_validate(
            {key: block[key] for key in ("budgets", "max_attempts") if key in block}
        ).pipeline_settings()
    except ValidationError:
        return
    budgets, attempts = settings.budgets, settings.max_attempts
    longest = attempts * (budgets.init + budgets.run + budgets.eval)
    for field in (_DEADLINE, _STALL):
        deadline = number_at(config, field)
        if deadline is None or deadline > longest:
            continue
        yield Finding(
            field,
            f"{deadline:g} s is not above the {longest:g} s that a rollout may take: {attempts} attempts of "
            f"{budgets.init:g} + {budgets.run:g} + {budgets.eval:g} s ({path}.max_attempts and budgets)",
            f"Above {longest:g}, with room for queues, or lower the budgets",
        )


def _models(gym: Mapping[str, Any]) -> Iterator[Finding]:
    models = servers_of(gym, MODEL, "prorl_model")
    for name, block in gym.items():
        inherited = at(block, f"{MODEL}.vllm_model") if isinstance(block, Mapping) else None
        if inherited is not None:
            path = f"{_GYM}.{name}.{MODEL}.vllm_model"
            yield Finding(
                path, "it is inherited, and a second server of that name beside prorl_model", "Set it to null"
            )
    if not models:
        yield Finding(
            f"{_GYM}.config_paths",
            "none of the files has a prorl_model",
            "Name responses_api_models/prorl_model/configs/prorl_model.yaml in place of vllm_model's",
        )
    for name, block in models.items():
        path = f"{_GYM}.{name}.{MODEL}.prorl_model"
        policy = block_at(block, "policy")
        if policy.get("engine") != "nemo_rl":
            said = policy.get("engine")
            yield Finding(
                f"{path}.policy.engine",
                f"it is {said or 'not given'}, and the trainer's engine is NeMo RL's",
                "Set it to nemo_rl",
            )
        if block.get("return_token_id_information", True) is not True:
            yield Finding(
                f"{path}.return_token_id_information", "without tokens there is nothing to train on", "Set it to true"
            )
        yield from _settings_of(f"{path}.policy", PolicyConfig, {"base_url": [], "model": ""} | dict(policy))
        for key in _SAMPLING:
            if key in block_at(block, "extra_body"):
                yield Finding(
                    f"{path}.extra_body.{key}",
                    "NeMo RL's engine answers 500 to what is not sampled as policy.generation says",
                    f"Take it out, and set policy.generation.{key}",
                )


def _switches(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Values beside the environments' blocks, which may have any name, and beside Gym's servers', likewise."""
    for path, known in (("env", _OF_NEMO_RL), (_GYM, _of_gym())):
        for key, value in block_at(config, path).items():
            near = difflib.get_close_matches(str(key), known, 1, 0.8)
            if key not in known and near and not isinstance(value, Mapping):
                yield Finding(f"{path}.{key}", "it is read by nobody", f"The nearest that there is: {path}.{near[0]}")


def _of_gym() -> set[str]:
    """Settings of Gym's own, and those for it that NeMo RL takes out before."""
    return {
        *(
            value
            for name, value in vars(global_config).items()
            if name.endswith("_KEY_NAME") and isinstance(value, str)
        ),
        *("invalid_tool_call_patterns", "thinking_tags", "tokenizer_config", "pad_dynamic_image_shapes"),
        *("effort_levels", "is_trajectory_collection", "num_gpu_nodes"),
        *("global_aiohttp_connector_limit", "global_aiohttp_connector_limit_per_host"),
    }


def _blocks(config: Mapping[str, Any], files: Mapping[str, Any]) -> Iterator[Finding]:
    """A block that goes over none of the files', and starts no server itself, is read by nobody."""
    for name, block in block_at(config, _GYM).items():
        if not isinstance(block, Mapping) or not any(kind in block for kind in TYPES) or _is_server(block):
            continue
        if name not in files:
            near = difflib.get_close_matches(str(name), [key for key in files if _is_server(files[key])], 1, 0.6)
            fix = f"The nearest that there is: {_GYM}.{near[0]}" if near else "Name its file in config_paths"
            yield Finding(f"{_GYM}.{name}", "no file in config_paths has a server of that name", fix)
            continue
        for kind in block:
            if kind not in TYPES and (near := difflib.get_close_matches(str(kind), TYPES, 1, 0.8)):
                fix = f"The nearest that there is: {near[0]}"
                yield Finding(f"{_GYM}.{name}.{kind}", "it is read by nobody", fix)
        for kind, server, settings in _servers_in(block):
            path, there = f"{_GYM}.{name}.{kind}.{server}", block_at(files[name], kind)
            shipped = there.get(server)
            if shipped is None and (near := difflib.get_close_matches(server, map(str, there), 1, 0.8)):
                yield Finding(path, "no file in config_paths has that there", f"The nearest that there is: {near[0]}")
            elif isinstance(shipped, Mapping) and server.startswith("prorl_") and kind == "resources_servers":
                yield from _settings_as_shipped(path, settings, shipped)
            elif isinstance(shipped, Mapping) and server == "prorl_model":
                yield from _misspelt(path, settings, shipped)


def _settings_as_shipped(path: str, own: Mapping[str, Any], shipped: Mapping[str, Any]) -> Iterator[Finding]:
    """The files of our environments' servers have every setting."""
    for key in own:
        if key not in shipped and key not in ServerConfig.other_keys():
            near = difflib.get_close_matches(str(key), shipped, 1, 0.6)
            fix = f"The nearest that there is: {near[0]}" if near else "Take it out"
            yield Finding(f"{path}.{key}", "there is no such setting", fix)


def _misspelt(path: str, own: Mapping[str, Any], shipped: Mapping[str, Any]) -> Iterator[Finding]:
    """Other keys may be of Gym's own model server, whose blocks can be taken over."""
    for key in own:
        if key not in shipped and (near := difflib.get_close_matches(str(key), shipped, 1, 0.9)):
            yield Finding(f"{path}.{key}", "there is no such setting", f"The nearest that there is: {near[0]}")


def _servers_in(block: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for kind in TYPES:
        for server, settings in block_at(block, kind).items():
            if isinstance(settings, Mapping):
                yield kind, str(server), settings


def _is_server(block: Any) -> bool:
    """It says how a server is started, besides what is set of it."""
    return isinstance(block, Mapping) and any("entrypoint" in settings for _, _, settings in _servers_in(block))
