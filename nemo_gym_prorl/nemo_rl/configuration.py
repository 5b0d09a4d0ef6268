# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of a training run: the block ``prorl:``, recipes, and a smoke check of the NeMo RL checkout.

Sizes come from NeMo RL's own blocks: the prompts of a batch from ``grpo.num_prompts_per_step``, the rollouts of a
group from ``grpo.num_generations_per_prompt``, the groups in flight from ``async_rl.max_inflight_prompts``.

Invariant: rewards are shaped after the variance filter, which reads the environment's rewards. Otherwise a group of
wrong answers of different lengths would pass the filter, and training on such groups would only shorten answers.

The smoke check looks for each name that this package imports, calls or replaces. Without the check a renamed function
of NeMo RL would fail only after the engines have started. Signatures are not checked.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from yaml import YAMLError

from nemo_gym_prorl.dapo.contract import AgentFailures, SamplerConfig
from nemo_gym_prorl.failures import CallerError, suggest


class RolloutSource(StrEnum):
    """Origin of the servers that run the rollouts."""

    GYM = "gym"
    """NeMo RL's Gym actor starts the servers next to the trainer."""
    SERVICE = "service"
    """The servers run already; the trainer starts none."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Overlong(_Block):
    """DAPO's overlong penalty, which grows linearly inside the buffer and is constant beyond it.

    The length of a rollout is that of the whole sequence, including prompt and tool results. The agent's
    ``max_total_sequence_length`` and the engine's context limit count the same tokens.

    Attributes:
        max_sequence_length: length in tokens from which the whole penalty applies.
        buffer_length: number of tokens below ``max_sequence_length`` over which the penalty grows from 0.
        penalty: maximum deduction from the reward.
    """

    max_sequence_length: int = Field(ge=1)
    buffer_length: int = Field(ge=1)
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _buffer_inside(self) -> Self:
        if self.buffer_length > self.max_sequence_length:
            raise ValueError(
                f"buffer_length ({self.buffer_length}) is more than max_sequence_length ({self.max_sequence_length}); "
                "lower it"
            )
        return self


class RewardScaling(_Block):
    """Linear scaling of rewards from the source range to the target range; rewards outside the source are clamped."""

    source_min: float = Field(0.0, allow_inf_nan=False)
    source_max: float = Field(1.0, allow_inf_nan=False)
    target_min: float = Field(-1.0, allow_inf_nan=False)
    target_max: float = Field(1.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name in ("source", "target"):
            if getattr(self, f"{name}_min") >= getattr(self, f"{name}_max"):
                raise ValueError(f"{name}_min must be less than {name}_max; correct one")
        return self


class ProrlSettings(_Block):
    """The block ``prorl:``.

    Attributes:
        rollouts: ``gym`` starts the servers, ``service`` uses running servers.
        agent: name of the ``prorl_agent`` server in ``env.nemo_gym``, unless there is only one.
        services: URLs of ``prorl_agent`` servers, for ``rollouts: service``.
        models: URLs of the services' ``prorl_model`` servers.
        key_env: environment variable with the servers' control token.
        max_staleness: maximum weight versions between a rollout's first token and its training; 0 is on-policy.
        mini_batches: optimizer steps of a batch. From the second step on, the policy differs from the policy of the
            log-probabilities in the loss, so the clip takes effect.
        max_failures: retries after a member's infrastructure failures before its group is dropped.
        max_fruitless: consecutive groups without variance that end training.
        max_dropped: consecutive groups that could not run, which end training.
        filter_on: verdict field that is the accuracy, by which groups vary; ``null``: the reward.
        agent_failures: ``zero`` reward, or ``mask``.
        reference_share: share of prompts with uncancelled first tries, to measure bias.
        prefix_tries: maximum groups that begin at a prefix after a group without variance. The gradient differs from
            that of dynamic sampling (docs/train-your-own.md).
        overlong: penalty for long rollouts.
        reward_scaling: scaling of rewards, before the penalty.
        skip_solved: consecutive solved groups after which a prompt is skipped.
    """

    rollouts: RolloutSource = RolloutSource.GYM
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
                raise ValueError(f"{url!r} is no URL; it must begin with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError("a URL is listed twice; remove one")
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="after")
    def _urls_match_source(self) -> Self:
        for name in ("services", "models"):
            if bool(getattr(self, name)) is not (self.rollouts is RolloutSource.SERVICE):
                raise ValueError(f"{name} must be set for rollouts: service, and must not be set otherwise")
        return self

    def sampler(self, groups_per_batch: int, group_size: int, max_in_flight: int, first_version: int) -> SamplerConfig:
        """Return the sampler's settings, with the given sizes from NeMo RL's blocks."""
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
    """Return the block ``prorl:`` of a resolved configuration; the defaults without a block.

    Raises:
        ValidationError: the block is invalid.
    """
    block = config.get("prorl")
    return ProrlSettings.model_validate({} if block is None else block)


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """Function that scales a reward and subtracts the overlong penalty, for a sequence length in tokens."""

    scaling: RewardScaling | None = None
    overlong: Overlong | None = None

    @classmethod
    def of(cls, settings: ProrlSettings) -> Self:
        return cls(settings.reward_scaling, settings.overlong)

    def __call__(self, reward: float, length: int) -> float:
        if self.scaling is not None:
            reward = scaled(reward, self.scaling)
        return reward if self.overlong is None else reward - overlong_penalty(length, self.overlong)


def scaled(reward: float, scaling: RewardScaling) -> float:
    """Return the reward, clamped to the source range and scaled to the target range."""
    inside = min(max(reward, scaling.source_min), scaling.source_max)
    share = (inside - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def overlong_penalty(length: int, overlong: Overlong) -> float:
    """Return the penalty: 0 below the buffer, linear inside the buffer, and the whole penalty beyond it."""
    into = length - (overlong.max_sequence_length - overlong.buffer_length)
    return overlong.penalty * min(max(into / overlong.buffer_length, 0.0), 1.0)


RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes that ship with the package."""


def read(recipe: str, variants: Sequence[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe and resolve its references.

    Args:
        recipe: name of a recipe, or path of a file.
        variants: names or paths of files that override the recipe, in ascending order of precedence.
        overrides: Hydra overrides, which take precedence over all files, e.g. ``grpo.max_num_steps=10``. A setting
            that is in no file must be added with ``++``; otherwise the override is refused as a misspelling.

    Raises:
        CallerError: a recipe or file cannot be found or read, an override cannot be applied, or a required value
            (``???``) is missing.
    """
    from nemo_rl.utils.config import (
        OverridesError,
        load_config,
        merge_with_override,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )

    register_omegaconf_resolvers()
    files = (file_of(recipe), *(file_of(variant, "variants") for variant in variants))
    try:
        config = load_config(files[0])
        for file in files[1:]:
            config = merge_with_override(config, load_config(file))
        config = parse_hydra_overrides(config, list(overrides))
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise CallerError("a value is required; give one on the command line", field=", ".join(missing))
        resolved = OmegaConf.to_container(config, resolve=True)
    except OverridesError as error:
        raise CallerError(str(error).removeprefix("Failed to parse Hydra overrides: "), field="overrides") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AssertionError, RecursionError) as error:
        raise CallerError(f"{type(error).__name__}: {error}", field=f"--config {recipe}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def file_of(name: str, folder: str = "") -> Path:
    """Return the path of a recipe, or of a variant in ``folder``, by the path or the name of a shipped file.

    Raises:
        CallerError: there is no such file.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise CallerError(f"there is no file {path}", field="--config" if not folder else "--with")
        return path.resolve()
    names = names_of(folder)
    if name not in names:
        raise CallerError(f"there is no {name}{suggest(name, names)}", field="--config" if not folder else "--with")
    return RECIPES / folder / f"{name}.yaml"


def names_of(folder: str = "") -> list[str]:
    """Return the names of the recipes, or of the variants in ``folder``, that ship with the package."""
    return sorted(file.stem for file in (RECIPES / folder).glob("*.yaml") if file.stem != "base")


ROOT_VARIABLE = "NRL_ROOT"
"""Environment variable with the folder of the NeMo RL checkout; the recipes inherit from its files."""


def checkout() -> Path | None:
    """Return the NeMo RL checkout that :data:`ROOT_VARIABLE` names; ``None`` if unset, or not a checkout."""
    root = os.environ.get(ROOT_VARIABLE)
    return Path(root) if root and Path(root, "nemo_rl", "__init__.py").is_file() else None


TESTED_VERSION = "0.6.0 at commit 7ea279ab (August 2026)"
"""Version of NeMo RL with which the tests were run."""

RECIPE_NAMES: Mapping[str, str] = {
    "nemo_rl.utils.config": "OverridesError load_config merge_with_override parse_hydra_overrides "
    "register_omegaconf_resolvers",
}
"""Names of NeMo RL that reading recipes needs, separated by spaces, by module or by class (``module:class``)."""
TRAINING_NAMES: Mapping[str, str] = {
    "nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer": "commit remove_group reserve",
    "nemo_rl.algorithms.async_utils.staleness_sampler": "CustomSamplerConfig WindowedSampler",
    "nemo_rl.algorithms.advantage_estimator:GRPOAdvantageEstimator": "compute_advantage",
    "nemo_rl.algorithms.single_controller:SingleControllerActor": "ping run",
    "nemo_rl.algorithms.single_controller_utils": "MasterConfig setup_single_controller",
    "nemo_rl.algorithms.single_controller_utils:SingleControllerActorArgs": "advantage_estimator dataloader dp_client "
    "env_handles gen_handle last_checkpoint_path rollout_manager tq_buffer trainer_handle weight_synchronizer",
    "nemo_rl.algorithms.single_controller_utils.config": "validate_single_controller_config",
    "nemo_rl.algorithms.single_controller_utils.utils": "aggregate_step_metrics",
    "nemo_rl.algorithms.utils": "get_tokenizer",
    "nemo_rl.data_plane:KVBatchMeta": "sample_ids slice",
    "nemo_rl.distributed.ray_actor_environment_registry": "ACTOR_ENVIRONMENT_REGISTRY",
    "nemo_rl.distributed.virtual_cluster": "init_ray",
    "nemo_rl.distributed.virtual_cluster:PY_EXECUTABLES": "SYSTEM",
    "nemo_rl.environments.nemo_gym": "setup_nemo_gym_config",
    "nemo_rl.environments.nemo_gym:NemoGym": "shutdown",
    "nemo_rl.environments.utils": "ENV_REGISTRY register_env",
    "nemo_rl.experience.interfaces": "Completion PromptGroupRecord",
    "nemo_rl.experience.rollout_manager:RolloutManager": "generate_and_push set_weight_version",
    "nemo_rl.experience.rollout_manager:RolloutOutcome": "COMMITTED",
    "nemo_rl.models.generation": "configure_generation_config",
    "nemo_rl.models.policy.tq_policy:TQPolicy": "begin_train_step finish_train_step train_microbatches_from_meta",
    "nemo_rl.utils.logger": "get_next_experiment_dir",
    "nemo_rl.weight_sync.interfaces:WeightSynchronizer": "shutdown sync_weights",
}
"""Names of NeMo RL that training needs, in the form of :data:`RECIPE_NAMES`."""


def check_nemo_rl(table: Mapping[str, str]) -> None:
    """Refuse a NeMo RL that lacks names of a table.

    Raises:
        CallerError: names are missing; the message lists all missing names.
    """
    if missing := [*missing_names(table)]:
        nemo_rl = resolve_name("nemo_rl")
        raise CallerError(
            f"the NeMo RL in {nemo_rl.__path__[0]} ({nemo_rl.__version__}) lacks {', '.join(missing)}; "
            f"use {TESTED_VERSION}, with the modules that it imports",
            field=ROOT_VARIABLE,
        )


def missing_names(table: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of a table that NeMo RL lacks, and the errors of modules that cannot be imported, each once."""
    errors = set[str]()
    for path, names in table.items():
        try:
            owner = resolve_name(path if ":" in path else f"{path}:")
        except Exception as error:  # a module may raise any error, such as NeMo RL's own checks of versions
            if (why := f"{type(error).__name__}: {error}") not in errors:
                errors.add(why)
                yield f"{path} ({why})"
            continue
        fields = {name for one in getattr(owner, "__mro__", ()) for name in inspect.get_annotations(one)}
        yield from (f"{path}.{name}" for name in names.split() if not hasattr(owner, name) and name not in fields)
