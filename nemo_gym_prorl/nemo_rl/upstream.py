# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Smoke check of NeMo RL: each name that this package imports, calls or replaces exists.

Without this check a renamed function fails only after the engines have started. Signatures are not checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.configuration import ROOT_VARIABLE


TRIED = "0.6.0 at commit 7ea279ab (August 2026)"
"""Version of NeMo RL with which the tests were run."""

RECIPES: Mapping[str, str] = {
    "nemo_rl.utils.config": "OverridesError load_config merge_with_override parse_hydra_overrides "
    "register_omegaconf_resolvers",
}
"""Names that recipes need, by module or by class."""
TRAINING: Mapping[str, str] = {
    "nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer": "commit remove_group reserve",
    "nemo_rl.algorithms.async_utils.staleness_sampler": "CustomSamplerConfig WindowedSampler",
    "nemo_rl.algorithms.advantage_estimator:GRPOAdvantageEstimator": "compute_advantage",
    "nemo_rl.algorithms.single_controller:SingleControllerActor": "ping run",
    "nemo_rl.algorithms.single_controller_utils": "MasterConfig setup_single_controller",
    "nemo_rl.algorithms.single_controller_utils:SingleControllerActorArgs": "advantage_estimator dataloader "
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
"""Names that training needs, by module or by class."""


def check(table: Mapping[str, str]) -> None:
    """Refuse a NeMo RL without these names.

    Raises:
        CallerError: names are missing; the message lists all of them.
    """
    if missing := [*missing_names(table)]:
        import nemo_rl

        raise CallerError(
            f"the NeMo RL in {nemo_rl.__path__[0]} ({nemo_rl.__version__}) lacks {', '.join(missing)}; use {TRIED}",
            field=ROOT_VARIABLE,
        )


def missing_names(table: Mapping[str, str]) -> Iterator[str]:
    """Return the names of a table that NeMo RL does not have."""
    for place, names in table.items():
        try:
            owner = resolve_name(place if ":" in place else f"{place}:")
        except (ImportError, AttributeError) as error:
            yield f"{place} ({error})"
            continue
        fields = {name for one in getattr(owner, "__mro__", ()) for name in inspect.get_annotations(one)}
        yield from (f"{place}.{name}" for name in names.split() if not hasattr(owner, name) and name not in fields)
