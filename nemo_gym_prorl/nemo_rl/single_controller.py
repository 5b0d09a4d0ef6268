# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous DAPO on NeMo RL's SingleController, with rollouts from this package's services.

NeMo RL builds the arguments of its controller as one object, whose fields may be replaced before the controller
starts. :func:`replace_parts` replaces the rollout manager, and wraps advantage estimator, weight synchronizer, trainer
and data loader (:mod:`~nemo_gym_prorl.nemo_rl.controller_replacements`). NeMo RL loads the buffer sampler by its own
hook. No code of NeMo RL is patched.

With ``rollouts: service`` NeMo RL must not start Gym servers. The controller's configuration then has no block for
Gym, and its dataset names an environment that does nothing.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError, RolloutError
from nemo_gym_prorl.nemo_rl.collector import CollectionPlan, Validation, validation_of, with_sampling_params
from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings, RewardShaping, RolloutSource, settings_of
from nemo_gym_prorl.nemo_rl.controller_replacements import (
    ClosingSynchronizer,
    GroupAdvantages,
    MiniBatches,
    ProrlRollouts,
    RolloutRows,
    SavingDataLoader,
    saved_state,
)
from nemo_gym_prorl.nemo_rl.services import Servers, configured_servers, gym_servers, with_engines


LOG = logging.getLogger(__name__)

ENVIRONMENT = "prorl"
"""Environment that datasets name with ``rollouts: service``, because NeMo RL requires an environment."""
_NO_ENVIRONMENT = "nemo_gym_prorl.nemo_rl.plugins.NoEnvironment"
SHUTDOWN_S = 30.0  # limit for NeMo RL's Gym actor to end its servers


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train until ``grpo.max_num_steps`` and return the controller's result.

    Args:
        config: complete configuration, resolved and checked.
    """
    from nemo_rl.algorithms.single_controller_utils import MasterConfig, setup_single_controller
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.distributed.virtual_cluster import init_ray
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
    from nemo_rl.utils.logger import get_next_experiment_dir

    from nemo_gym_prorl.nemo_rl.plugins import sampler_block

    settings = settings_of(config)
    if settings.rollouts is RolloutSource.SERVICE:
        register_no_environment()
    own = copy.deepcopy(dict(config))
    own["logger"]["log_dir"] = get_next_experiment_dir(own["logger"]["log_dir"])
    own["async_rl"]["sampler"] = sampler_block(own["async_rl"].get("sampler"), settings)
    master = MasterConfig(**own)
    init_ray()
    tokenizer = get_tokenizer(master.policy["tokenizer"])
    configure_generation(master, tokenizer)
    # The HTTP server also runs without Gym, since external services call the engines.
    setup_nemo_gym_config(master, tokenizer)
    # NeMo RL's setup refuses validation settings, because its controller has none; the collector validates.
    master.grpo.val_period, master.grpo.val_at_start = 0, False
    arguments, timings = setup_single_controller(master, tokenizer)
    return train(master, arguments, timings, settings, validation_of(config))


def configure_generation(master: Any, tokenizer: Any) -> None:
    """Complete the block ``policy.generation`` as NeMo RL's launchers do."""
    from nemo_rl.models.generation import configure_generation_config

    master.policy["generation"] = configure_generation_config(
        master.policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(master.policy["draft"]["enabled"]),
        trains_mtp=bool((master.policy.get("megatron_cfg") or {}).get("mtp_num_layers")),
    )


def register_no_environment() -> None:
    """Register at NeMo RL the environment that datasets name with ``rollouts: service``."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments.utils import ENV_REGISTRY, register_env

    if ENVIRONMENT not in ENV_REGISTRY:
        ACTOR_ENVIRONMENT_REGISTRY[_NO_ENVIRONMENT] = PY_EXECUTABLES.SYSTEM
        register_env(ENVIRONMENT, _NO_ENVIRONMENT)


def train(
    master: Any, arguments: Any, timings: Any, settings: ProrlSettings, validation: Validation | None = None
) -> dict[str, Any]:
    """Replace parts of the controller, train, and return the controller's result.

    Args:
        master: NeMo RL's ``MasterConfig``.
        arguments: arguments of NeMo RL's controller; modified.
        timings: timings of the setup, for the controller's logger.
        settings: the block ``prorl:``.
        validation: rows and schedule of validations; ``None`` for no validation.

    Raises:
        RolloutError: rollouts failed; the error of Ray or NeMo RL that contains this error is its cause.
    """
    try:
        client = f"nemo-rl-{uuid.uuid4().hex[:8]}"
        servers = _servers(arguments, settings, client)
        replace_parts(master, arguments, settings, servers, client, validation)
        try:
            return _run_controller(master, arguments, timings, servers)
        except BaseException as error:
            # A controller that was killed has not cancelled its rollouts.
            servers.cancel_all(client)
            if (cause := rollout_error_in(error)) in (None, error):
                raise
            raise cause from error
        finally:
            servers.withdraw()
    finally:
        shut_down(arguments.env_handles, (arguments.gen_handle, arguments.trainer_handle))


def _run_controller(master: Any, arguments: Any, timings: Any, servers: Servers) -> dict[str, Any]:
    import ray
    from nemo_rl.algorithms.single_controller import SingleControllerActor
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {}
    if servers.node is not None:
        # Servers without a key listen on the loopback address of their node only.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(servers.node, soft=False)
    controller = SingleControllerActor.options(**options).remote(
        master_config=master, actor_args=arguments, setup_timing_metrics=timings
    )
    try:
        return _result_of(controller, master.async_rl.stall_watchdog)
    except BaseException:
        ray.kill(controller)
        raise


def rollout_error_in(error: BaseException | None) -> RolloutError | None:
    """Return the rollout error that caused an error of Ray or of the controller's tasks, if there is one."""
    if error is None or isinstance(error, RolloutError):
        return error
    inner = [*error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return next(filter(None, map(rollout_error_in, [*inner, getattr(error, "cause", None), error.__cause__])), None)


def shut_down(environments: Mapping[str, Any], engines: Iterable[Any]) -> None:
    """Shut down environments, then the engines that they call, as NeMo RL's own launcher does."""
    import ray

    for name, actor in environments.items():
        # In newer versions of NeMo RL ``actor`` is an object for several Gym actors, whose shutdown() ends the actors.
        if not hasattr(actor.shutdown, "remote"):
            actor.shutdown()
            continue
        try:
            ray.get(actor.shutdown.remote(), timeout=SHUTDOWN_S)
        except Exception as error:
            LOG.warning("environment %s failed to shut down and is killed: %s", name, error)
            ray.kill(actor)
    for engine in engines:
        try:
            engine.shutdown()
        except Exception as error:
            LOG.warning("%s failed to shut down: %s", type(engine).__name__, error)


def row_multiple(policy: Mapping[str, Any], trainer: Any) -> int:
    """Return the number of which a batch's rows must be a multiple, so that ranks get equally many micro batches."""
    ranks = getattr(trainer, "sharding_annotations", None)
    size: int = ranks.get_axis_size("data_parallel") if ranks is not None else 1
    if any((policy.get(name) or {}).get("enabled") for name in ("sequence_packing", "dynamic_batching")):
        return size
    return size * math.lcm(policy["train_micro_batch_size"], policy["logprob_batch_size"])


def replace_parts(
    master: Any,
    arguments: Any,
    settings: ProrlSettings,
    servers: Servers,
    client: str,
    validation: Validation | None = None,
) -> None:
    grpo = master.grpo
    size = grpo.num_generations_per_prompt
    lines = [json.loads(line) for line in arguments.dataloader.dataset.dataset["extra_env_info"]]
    sampling = {name: master.policy["generation"][name] for name in ("temperature", "top_p", "max_new_tokens")}
    rows = [with_sampling_params(line, sampling) for line in lines]
    plan = CollectionPlan(
        rows=rows,
        sampler=settings.sampler(grpo.num_prompts_per_step, size, master.async_rl.max_inflight_prompts * size, 0),
        servers=servers,
        reward_of=RewardShaping.of(settings),
        client=client,
        seed=grpo.seed if master.data["shuffle"] else None,
        skip_solved=settings.skip_solved,
        validation=validation,
        state=saved_state(arguments.last_checkpoint_path, lines, sampling),
    )
    # The state contains the groups of a saved buffer, which must not be trained on twice.
    arguments.last_checkpoint_path = None
    multiple = row_multiple(master.policy, arguments.trainer_handle)
    arguments.dp_client = RolloutRows(arguments.dp_client, multiple)
    arguments.rollout_manager = ProrlRollouts(
        plan, arguments.tq_buffer, arguments.rollout_manager, arguments.dp_client
    )
    arguments.dataloader = SavingDataLoader(arguments.dataloader, arguments.rollout_manager, lines, sampling)
    arguments.advantage_estimator = GroupAdvantages(arguments.advantage_estimator)
    arguments.advantage_actors = []  # newer versions of NeMo RL may list actors that use NeMo RL's estimator
    if settings.mini_batches > 1:
        batch = grpo.num_prompts_per_step * size
        arguments.trainer_handle = MiniBatches(arguments.trainer_handle, settings.mini_batches, batch, multiple)
    arguments.weight_synchronizer = ClosingSynchronizer(arguments.weight_synchronizer, arguments.rollout_manager)


def _servers(arguments: Any, settings: ProrlSettings, run: str) -> Servers:
    if settings.rollouts is RolloutSource.GYM:
        if "nemo_gym" not in arguments.env_handles:
            raise CallerError("must be true for rollouts: gym", field="env.should_use_nemo_gym")
        return gym_servers(arguments.env_handles["nemo_gym"], settings)
    return with_engines(configured_servers(settings), arguments.gen_handle.dp_openai_server_base_urls or (), run)


def _result_of(controller: Any, watchdog: Any) -> dict[str, Any]:
    """Return the controller's result. Without an answer to pings for ``stall_timeout_s``, raise an error, because the
    controller's own watchdog hangs with its event loop.
    """
    import ray

    running = controller.run.remote()
    answered = time.monotonic()
    while True:
        ready, _ = ray.wait([running], timeout=watchdog.interval_s)
        if ready:
            result: dict[str, Any] = ray.get(running)
            return result
        try:
            ray.get(controller.ping.remote(), timeout=watchdog.interval_s)
            answered = time.monotonic()
        except ray.exceptions.GetTimeoutError as error:
            unanswered_s = time.monotonic() - answered
            if unanswered_s > watchdog.stall_timeout_s:
                raise InfrastructureError(f"NeMo RL's controller has not answered for {unanswered_s:.0f} s") from error
