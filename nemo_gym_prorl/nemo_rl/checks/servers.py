# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's servers beside the trainer: whether they go together with it. What keeps one from starting, it says itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.gym.config_files import merged_files
from nemo_gym_prorl.handlers.service_config import ServiceConfig
from nemo_gym_prorl.nemo_rl.checks.finding import Finding, block_at, number_at
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings


DEADLINE = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"
_FROM_NEMO_RL = {"policy_base_url": "", "policy_api_key": "", "policy_model_name": "policy"}
"""What NeMo RL adds when its engines are up; files refer to it."""
_AGENT, _MODEL = "responses_api_agents.prorl_agent", "responses_api_models.prorl_model"


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
        merged = OmegaConf.to_container(OmegaConf.merge(_FROM_NEMO_RL, merged_files(paths), *over), resolve=True)
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


def check(config: Mapping[str, Any], settings: ProrlSettings, gym: Mapping[str, Any]) -> Iterator[Finding]:
    """All of it.

    Args:
        config: the resolved configuration.
        settings: its block ``prorl:``.
        gym: what Gym will make of ``env.nemo_gym``.
    """
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
