# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The block ``prorl:`` of a NeMo RL configuration: where rollouts come from, which are trained on, with which rewards.

It stands beside NeMo RL's own blocks, whose models let unknown top-level keys pass. What those already say is not said
again here: prompts of a batch are ``grpo.num_prompts_per_step``, rollouts of a group
``grpo.num_generations_per_prompt``, groups in flight ``async_rl.max_inflight_prompts``.

Rewards are shaped after the filter, which looks at what the environment gave: else a group of wrong answers of
different lengths would be one that teaches brevity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nemo_gym_prorl.dapo.contract import AgentFailures, SamplerConfig


class Rollouts(StrEnum):
    """Whose the rollout services are."""

    GYM = "gym"
    """NeMo RL's Gym actor starts the servers beside the trainer."""
    SERVICE = "service"
    """They run elsewhere already; the trainer starts no server."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Overlong(_Block):
    """DAPO's overlong shaping: a rollout loses more and more inside the buffer, and ``penalty`` beyond it.

    Its length is that of the whole sequence, prompt and tools' answers included: what the agent's
    ``max_total_sequence_length`` and the engine's context count, by which a rollout is cut.

    Attributes:
        max_sequence_length: tokens from which on the whole penalty is due.
        buffer_length: so many tokens before that it begins.
        penalty: what is taken off the reward at most.
    """

    max_sequence_length: int = Field(ge=1)
    buffer_length: int = Field(ge=1)
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _buffer_inside(self) -> Self:
        if self.buffer_length > self.max_sequence_length:
            raise ValueError(f"buffer_length ({self.buffer_length}) is more than max_sequence_length")
        return self


class RewardScaling(_Block):
    """Rewards of the source's range become those of the target's, linearly; what is outside is its nearest end."""

    source_min: float = Field(0.0, allow_inf_nan=False)
    source_max: float = Field(1.0, allow_inf_nan=False)
    target_min: float = Field(-1.0, allow_inf_nan=False)
    target_max: float = Field(1.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name in ("source", "target"):
            if getattr(self, f"{name}_min") >= getattr(self, f"{name}_max"):
                raise ValueError(f"{name}_min must be less than {name}_max")
        return self


class ProrlSettings(_Block):
    """The block ``prorl:``.

    Attributes:
        rollouts: whose the rollout services are.
        agent: name of the ``prorl_agent`` server in ``env.nemo_gym``; ``None``: the only one there is.
        services: URLs of ``prorl_agent`` servers, for ``rollouts: service``.
        models: URLs of the ``prorl_model`` servers that those use; the trainer's engines are registered there.
        key_env: name of the environment variable with the control token of those servers.
        max_staleness: weight versions between a rollout's first token and the step that trains on it. 0: on-policy.
        mini_batches: optimizer steps of a batch, each of as many of its groups. From the second on the policy is not
            that any more whose log-probabilities the loss compares with, and its clip acts.
        max_failures: tries of a member that may end without a score; one more drops its group.
        max_fruitless: so many groups in a row without variance end the training.
        max_dropped: so many groups in a row that can't be run end it, too.
        filter_on: the field of a verdict that says how good a rollout was, by which groups vary; the reward, where it
            is 0 or 1.
        agent_failures: what a rollout counts as that the policy brought to a bad end.
        reference_share: of prompts whose first tries always run to their end, as what bias is measured against.
        prefix_tries: groups that are begun from a prefix in place of one without variance, at most. Not dynamic
            sampling's gradient (docs/train-your-own.md).
        overlong: shaping of rewards by length; after the filter, which looks at what the environment gave.
        reward_scaling: scaling of rewards; after the filter, and before the shaping.
        skip_solved: a prompt that all of a group solved this often is not sampled any more.
    """

    rollouts: Rollouts = Rollouts.GYM
    agent: str | None = None
    services: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    key_env: str | None = None
    max_staleness: int = Field(1, ge=0)
    mini_batches: int = Field(1, ge=1)
    max_failures: int = Field(3, ge=0)
    max_fruitless: int = Field(1000, ge=1)
    max_dropped: int = Field(32, ge=1)
    filter_on: str | None = None
    agent_failures: AgentFailures = AgentFailures.ZERO
    reference_share: float = Field(0.125, ge=0, le=1)
    prefix_tries: int = Field(0, ge=0)
    overlong: Overlong | None = None
    reward_scaling: RewardScaling | None = None
    skip_solved: int | None = Field(None, ge=1)

    @field_validator("services", "models")
    @classmethod
    def _urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no URL; it begins with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError("an address stands there twice")
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for name in ("services", "models"):
            if bool(getattr(self, name)) is not (self.rollouts is Rollouts.SERVICE):
                raise ValueError(f"{name} are for rollouts: service, which needs them, and for no other")
        return self

    def sampler(self, groups_per_batch: int, group_size: int, max_in_flight: int, first_version: int) -> SamplerConfig:
        """What is asked of the sampler; NeMo RL's blocks give the sizes."""
        return SamplerConfig(
            groups_per_batch=groups_per_batch,
            group_size=group_size,
            max_in_flight=max_in_flight,
            max_staleness=self.max_staleness,
            max_failures=self.max_failures,
            filter_on=self.filter_on,
            agent_failures=self.agent_failures,
            reference_share=self.reference_share,
            max_fruitless=self.max_fruitless,
            max_dropped=self.max_dropped,
            first_version=first_version,
            prefix_tries=self.prefix_tries,
        )


def settings_of(config: Mapping[str, Any]) -> ProrlSettings:
    """The block of a resolved configuration; without one, everything is as it is by default."""
    block = config.get("prorl")
    return ProrlSettings.model_validate({} if block is None else block)


__all__ = ["Overlong", "ProrlSettings", "RewardScaling", "Rollouts", "settings_of"]


@dataclass(frozen=True, slots=True)
class Shaping:
    """Scaling, then what is taken off for length. Called with a reward and the number of tokens of the sequence."""

    scaling: RewardScaling | None = None
    overlong: Overlong | None = None

    @classmethod
    def of(cls, settings: ProrlSettings) -> Self:
        """As the block ``prorl:`` says."""
        return cls(settings.reward_scaling, settings.overlong)

    def __call__(self, reward: float, length: int) -> float:
        if self.scaling is not None:
            reward = scaled(reward, self.scaling)
        return reward if self.overlong is None else reward - overlong_penalty(length, self.overlong)


def scaled(reward: float, scaling: RewardScaling) -> float:
    """The reward in the target's range; one outside of the source's is its nearest end."""
    inside = min(max(reward, scaling.source_min), scaling.source_max)
    share = (inside - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def overlong_penalty(length: int, overlong: Overlong) -> float:
    """What is taken off: nothing below the buffer, then more with each token, and the whole penalty behind it."""
    into = length - (overlong.max_sequence_length - overlong.buffer_length)
    return overlong.penalty * min(max(into / overlong.buffer_length, 0.0), 1.0)
