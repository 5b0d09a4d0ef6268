# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""All of NeMo RL's insides that we lean on, in one table, looked through before anything starts.

NeMo RL's controller is beta, and what is in it is promised to nobody. What has been renamed there would be met when
the engines are up, in the middle of a training, or never. Nothing else in this package uses what does not stand here:
the tests read its code, and hold the table against it.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.checkout import ROOT_VARIABLE
from nemo_gym_prorl.nemo_rl.settings import Runtime


TRIED = ("0.6.0 at commit 7ea279ab (August 2026)",)
"""Versions of NeMo RL with which the tests were run."""


@dataclass(frozen=True, slots=True)
class Call:
    """What we call: NeMo RL's names of the arguments that we give by their places, and of those by name; how many
    things it gives, where those are told apart by their places."""

    what: str
    places: str = ""
    names: str = ""
    gives: tuple[int, ...] = ()

    def complaints(self) -> Iterator[str]:
        target, places = found(self.what), self.places.split()
        if (first := [*signature_of(target).parameters][: len(places)]) != places:
            yield f"its first arguments are {', '.join(first) or 'none'}, and not {', '.join(places)}"
        yield from misfit(target, places, self.names.split())
        yield from miscount(target, self.gives)


@dataclass(frozen=True, slots=True)
class StandIn:
    """What NeMo RL calls of ours in place of its own; arguments that are never given there; how many things its own
    may give, where those are told apart by their places."""

    what: str
    ours: str
    never: str = ""
    gives: tuple[int, ...] = ()

    def complaints(self) -> Iterator[str]:
        target, never = found(self.what), self.never.split()
        theirs = signature_of(target).parameters.values()
        names = [one.name for one in theirs if one.kind is not one.VAR_KEYWORD and one.name not in never]
        yield from (f"{self.ours}: {complaint}" for complaint in misfit(found(f"{_OURS}.{self.ours}"), (), names))
        yield from miscount(target, self.gives)


@dataclass(frozen=True, slots=True)
class Has:
    """What has to be there, with what we ask of it: members of a class or of its objects, words of a function."""

    what: str
    members: str = ""

    def complaints(self) -> Iterator[str]:
        target = found(self.what)
        owner = "self." if inspect.isclass(target) else ""
        known = {name for one in getattr(target, "__mro__", ()) for name in inspect.get_annotations(one)}
        for name in self.members.split():
            if not hasattr(target, name) and name not in known and not asked(owner + name, target):
                yield f"it has no {name}"


@dataclass(frozen=True, slots=True)
class Asks:
    """Who asks one of ours that is in the place of NeMo RL's own, how that is called there, and all that it has."""

    what: str
    whom: str
    members: str

    def complaints(self) -> Iterator[str]:
        for name in sorted(asked(f"{self.whom}.", found(self.what)) - {*self.members.split()}):
            yield f"it asks {self.whom} for {name}, which ours does not have"


@dataclass(frozen=True, slots=True)
class Settings:
    """NeMo RL's model of a configuration, and the paths of settings that we read or set."""

    what: str
    paths: str

    def complaints(self) -> Iterator[str]:
        for path in self.paths.split():
            kinds = [found(self.what)]
            for key in path.split("."):
                kinds = [kind for one in kinds for kind in kinds_of(one, key)]
            if not kinds:
                yield f"it has no setting {path}"


type Entry = Call | StandIn | Has | Asks | Settings


_OURS = "nemo_gym_prorl.nemo_rl"
_CONFIG = "nemo_rl.utils.config"
_CONTROLLER = "nemo_rl.algorithms.single_controller:SingleControllerActor"
_UTILITIES = "nemo_rl.algorithms.single_controller_utils"
_BUFFER = "nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer"
_SAMPLERS = "nemo_rl.algorithms.async_utils.staleness_sampler"
_MANAGER = "nemo_rl.experience.rollout_manager"
_TRAINER = "nemo_rl.models.policy.tq_policy:TQPolicy"
_SYNCHRONIZER = "nemo_rl.weight_sync.interfaces:WeightSynchronizer"
_GRPO = "nemo_rl.algorithms.grpo"
GYM_ROLLOUTS = "nemo_rl.environments.nemo_gym:NemoGym.run_rollouts"
"""What the synchronous loop has of NeMo RL's Gym actor; newer versions tell the agent, too."""

RECIPES: tuple[Entry, ...] = (
    Call(f"{_CONFIG}:load_config", "config_path"),
    Call(f"{_CONFIG}:merge_with_override", "base_config override_config"),
    Call(f"{_CONFIG}:parse_hydra_overrides", "cfg overrides"),
    Call(f"{_CONFIG}:register_omegaconf_resolvers"),
    Has(f"{_CONFIG}:OverridesError"),
)
"""What reads recipes."""

BOTH: tuple[Entry, ...] = (
    Call("nemo_rl.algorithms.utils:get_tokenizer", "tokenizer_config"),
    Call("nemo_rl.distributed.virtual_cluster:init_ray"),
    Call("nemo_rl.environments.nemo_gym:setup_nemo_gym_config", "config tokenizer"),
    Call("nemo_rl.utils.logger:get_next_experiment_dir", "base_log_dir"),
    Call(
        "nemo_rl.models.generation:configure_generation_config",
        "config tokenizer",
        "has_refit_draft_weights trains_mtp",
    ),
    Has("nemo_rl.environments.nemo_gym:NemoGym", "node_ip head_server_port shutdown"),
    Settings(
        f"{_GRPO}:MasterConfig",
        """
        data.shuffle data.train data.validation env grpo.adv_estimator.use_leave_one_out_baseline grpo.max_num_epochs
        grpo.max_num_steps grpo.num_generations_per_prompt grpo.num_prompts_per_step grpo.overlong_filtering
        grpo.reward_scaling.enabled grpo.reward_shaping.enabled grpo.seed grpo.use_dynamic_sampling
        grpo.use_leave_one_out_baseline grpo.val_at_start grpo.val_period logger.log_dir loss_fn.disable_ppo_ratio
        loss_fn.force_on_policy_ratio loss_fn.token_level_loss loss_fn.use_importance_sampling_correction
        policy.draft.enabled policy.generation.max_new_tokens policy.generation.temperature policy.generation.top_p
        policy.max_total_sequence_length policy.megatron_cfg.mtp_num_layers
        policy.tokenizer policy.train_global_batch_size
        """,
    ),
    Settings(
        "nemo_rl.models.generation.vllm.config:VllmConfig",
        "vllm_cfg.max_model_len vllm_cfg.http_server_serving_chat_kwargs",
    ),
)
"""What either training loop needs."""

SINGLE_CONTROLLER: tuple[Entry, ...] = (
    Has(f"{_UTILITIES}:MasterConfig"),
    Call(f"{_UTILITIES}:setup_single_controller", "master_config tokenizer", gives=(2,)),
    Call(f"{_UTILITIES}.config:validate_single_controller_config", "master_config"),
    Call(f"{_UTILITIES}.utils:aggregate_step_metrics", "train_result"),
    Has(
        f"{_UTILITIES}:SingleControllerActorArgs",
        "advantage_estimator dataloader env_handles gen_handle last_checkpoint_path rollout_manager tq_buffer "
        "trainer_handle weight_synchronizer",
    ),
    Call(_CONTROLLER, names="master_config actor_args setup_timing_metrics"),
    Call(f"{_CONTROLLER}.run"),
    Call(f"{_CONTROLLER}.ping"),
    Asks(
        _CONTROLLER,
        "self._rollout_manager",
        "_tq_buffer generate_and_push set_weight_version stats "
        # Newer versions, and answered by NeMo RL's own,
        "pop_mask_rule_metrics recovery_ledger resume_request_deadlines set_data_plane_checkpoint_barrier "
        "suspend_request_deadlines telemetry_snapshot "
        # with rollouts in checkpoints, where our sampler wants none,
        "discard_prompt_group discard_recovery_group mark_prompt_group_admitted record_recovery_siblings "
        "reserve_prompt_group "
        # and with token_capture, which is refused.
        "generate_for_finalization record_canonical_publication record_finalizer_dropped_prompt",
    ),
    Asks(_CONTROLLER, "stats", "as_metrics committed"),
    Asks(_CONTROLLER, "self._dataloader", "state_dict"),
    StandIn(f"{_MANAGER}:RolloutManager.generate_and_push", "rollouts:ProrlRollouts.generate_and_push"),
    StandIn(f"{_MANAGER}:RolloutManager.set_weight_version", "rollouts:ProrlRollouts.set_weight_version"),
    Has(f"{_MANAGER}:RolloutOutcome", "COMMITTED"),
    Call("nemo_rl.experience.interfaces:Completion", names="message_log env_extras truncated reward"),
    Call(
        "nemo_rl.experience.interfaces:PromptGroupRecord",
        names="prompt_idx prompt extra_env_info metadata completions rollout_metrics",
    ),
    Call(f"{_BUFFER}.reserve", names="weight_version target_step"),
    Call(f"{_BUFFER}.commit", "group_id record", "start_weight_version end_weight_version"),
    Call(f"{_BUFFER}.remove_group", "group_id"),
    Call(f"{_SAMPLERS}:WindowedSampler", "buffer", "max_staleness_versions"),
    Has(f"{_SAMPLERS}:CustomSamplerConfig", "target"),
    Has("nemo_rl.data.utils:load_dataloader_state", "train_dataloader"),
    Call(f"{_TRAINER}.begin_train_step", "loss_fn", "gbs"),
    Call(f"{_TRAINER}.train_microbatches_from_meta", "meta"),
    Call(f"{_TRAINER}.finish_train_step"),
    StandIn(f"{_TRAINER}.begin_train_step", "mini_batches:MiniBatches.begin_train_step", never="gbs mbs"),
    StandIn(f"{_TRAINER}.train_microbatches_from_meta", "mini_batches:MiniBatches.train_microbatches_from_meta"),
    StandIn(f"{_TRAINER}.finish_train_step", "mini_batches:MiniBatches.finish_train_step"),
    Has("nemo_rl.data_plane:KVBatchMeta", "sample_ids"),
    Call("nemo_rl.data_plane:KVBatchMeta.slice", "start stop"),
    StandIn(f"{_SYNCHRONIZER}.sync_weights", "rollouts:ClosingSynchronizer.sync_weights"),
    StandIn(f"{_SYNCHRONIZER}.shutdown", "rollouts:ClosingSynchronizer.shutdown"),
    StandIn(
        "nemo_rl.algorithms.advantage_estimator:GRPOAdvantageEstimator.compute_advantage",
        "rollouts:GroupAdvantages.compute_advantage",
    ),
    Has("nemo_rl.models.generation.vllm:VllmGeneration", "dp_openai_server_base_urls"),
    Has("nemo_rl.distributed.ray_actor_environment_registry:ACTOR_ENVIRONMENT_REGISTRY"),
    Has("nemo_rl.distributed.virtual_cluster:PY_EXECUTABLES", "SYSTEM"),
    Has("nemo_rl.environments.utils:ENV_REGISTRY"),
    Call("nemo_rl.environments.utils:register_env", "env_name actor_class_fqn"),
    Settings(
        f"{_UTILITIES}:MasterConfig",
        """
        async_rl.max_inflight_prompts async_rl.min_groups_for_streaming_train async_rl.sampler
        async_rl.rollout_failure.nemo_gym.rollout_timeout_s async_rl.stall_watchdog.interval_s
        async_rl.stall_watchdog.stall_timeout_s
        """,
    ),
)
"""What training on the SingleController needs."""

SYNCHRONOUS: tuple[Entry, ...] = (
    Call(f"{_GRPO}:setup", "master_config tokenizer dataset val_dataset", gives=(13,)),
    Call(
        f"{_GRPO}:grpo_train",
        "policy policy_generation wrapped_dataloader val_dataloader tokenizer loss_fn task_to_env val_task_to_env "
        "logger checkpointer grpo_save_state master_config",
    ),
    Call("nemo_rl.data.utils:setup_response_data", "tokenizer data_config", "env_configs"),
    StandIn(GYM_ROLLOUTS, "synchronous:Environment.run_rollouts", gives=(3, 4)),
    Has(f"{_GRPO}:GRPOSaveState", "total_steps"),
    Settings(f"{_GRPO}:MasterConfig", "grpo.max_val_samples grpo.val_batch_size"),
)
"""What training on the synchronous loop needs."""

NEWER = "env.nemo_gym.shards token_capture.enabled"
"""Settings that newer versions have and others let pass; we look at them where they are."""


def check(table: Iterable[Entry]) -> None:
    """Look whether NeMo RL has everything that we lean on, as we know it.

    Raises:
        CallerError: it has not; all of it is named.
    """
    if complaints := [*complaints_of(table)]:
        import nemo_rl

        listed = "".join(f"\n  {complaint}" for complaint in complaints)
        raise CallerError(
            f"the NeMo RL in {nemo_rl.__path__[0]} ({nemo_rl.__version__}) is other than this package knows it:"
            f"{listed}\nThis package was tried with {'; '.join(TRIED)}",
            field=ROOT_VARIABLE,
        )


def needed(runtime: Runtime) -> tuple[Entry, ...]:
    """What a training loop needs."""
    return (*BOTH, *(SINGLE_CONTROLLER if runtime is Runtime.SINGLE_CONTROLLER else SYNCHRONOUS))


def complaints_of(table: Iterable[Entry]) -> Iterator[str]:
    """All that is other, one to a line."""
    for entry in table:
        try:
            yield from (f"{entry.what}: {complaint}" for complaint in entry.complaints())
        except (ImportError, AttributeError, OSError, TypeError) as error:  # not there, or no text of it
            yield f"{entry.what}: {error}"


def found(what: str) -> Any:
    """What stands at a module and name; of an actor's class, that which it was made of."""
    module, _, names = what.partition(":")
    target = resolve_name(f"{module}:")
    for name in names.split("."):
        target = getattr(target, name)
        if (actor := getattr(target, "__ray_metadata__", None)) is not None:
            target = actor.modified_class.__bases__[0]
    return target


def asked(words: str, target: Any) -> set[str]:
    """Words that stand in something's text; of words with a dot at the end, what follows them."""
    follows = r"(\w+)" if words.endswith(".") else r"(?!\w)"
    return {*re.findall(rf"(?<![\w.]){re.escape(words)}{follows}", inspect.getsource(target))}


def signature_of(target: Any) -> inspect.Signature:
    """As it is called, be it of an object."""
    said = inspect.signature(target)
    return said.replace(parameters=[one for one in said.parameters.values() if one.name != "self"])


def misfit(target: Any, places: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    """Why something can't be called like this."""
    try:
        signature_of(target).bind(*places, **dict.fromkeys(names))
    except TypeError as error:
        yield str(error)


def miscount(target: Any, gives: tuple[int, ...]) -> Iterator[str]:
    """Whether something says to give another number of things."""
    if gives and (length := length_of_result(target)) not in gives:
        yield f"it gives {length} things, and not {' or '.join(map(str, gives))}"


def length_of_result(function: Any) -> int | None:
    """How many things a function says to give, or to yield each time; ``None`` if it does not say."""
    said = inspect.signature(function).return_annotation
    text = said if isinstance(said, str) else inspect.formatannotation(said)
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).lower().endswith("tuple"):
            return len(node.slice.elts) if isinstance(node.slice, ast.Tuple) else 1
    return None


def kinds_of(model: Any, key: str) -> list[Any]:
    """Types that a setting may have, by a model that may be one of several; what a mapping has is not known."""
    origin, inner = typing.get_origin(model), typing.get_args(model)
    if origin is dict or model is Any:
        return [Any]
    if origin is not None:  # a union, or Annotated, NotRequired and their like
        several = inner if origin in (typing.Union, types.UnionType) else inner[:1]
        return [kind for one in several for kind in kinds_of(one, key)]
    hints = typing.get_type_hints(model) if inspect.isclass(model) else {}
    return [hints[key]] if key in hints else []
