# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous DAPO on NeMo RL's SingleController: its controller, buffer, loss and trainer, with our rollouts.

NeMo RL builds everything that its controller needs as one value, whose fields may be replaced before the controller
starts. The rollout manager is; the advantage estimator is told what a group is, the weight synchronizer gets a
farewell, the trainer several optimizer steps of a batch, the data loader another state for checkpoints. The sampler is
ours by NeMo RL's own hook. Nothing is patched.

With ``rollouts: service`` NeMo RL must not start Gym servers, so it is configured without Gym, and its data set names
an environment that does nothing.
"""

from __future__ import annotations

import copy
import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError, RolloutError
from nemo_gym_prorl.nemo_rl.collector import Plan
from nemo_gym_prorl.nemo_rl.rollouts import (
    ClosingSynchronizer,
    GroupAdvantages,
    MiniBatches,
    ProrlRollouts,
    SavingDataLoader,
    saved_state,
)
from nemo_gym_prorl.nemo_rl.services import Servers, already_running, started_by_gym, with_engines
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts, Shaping, settings_of
from nemo_gym_prorl.nemo_rl.validation import Validation, sampled_row, validation_of


LOG = logging.getLogger(__name__)

ENVIRONMENT = "prorl"
"""The name under which a data set of ``rollouts: service`` has an environment, since NeMo RL wants one."""
_NO_ENVIRONMENT = "nemo_gym_prorl.nemo_rl.sampler.NoEnvironment"
SHUTDOWN_S = 30.0
"""How long NeMo RL's Gym actor may take to end its servers."""


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train until ``grpo.max_num_steps``.

    Args:
        config: a whole configuration, resolved and checked.

    Returns:
        What the controller says at the end.
    """
    from nemo_rl.algorithms.single_controller_utils import MasterConfig, setup_single_controller
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.distributed.virtual_cluster import init_ray
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
    from nemo_rl.utils.logger import get_next_experiment_dir

    from nemo_gym_prorl.nemo_rl.sampler import configured

    settings = settings_of(config)
    if settings.rollouts is Rollouts.SERVICE:
        register_no_environment()
    own = copy.deepcopy(dict(config))
    own["logger"]["log_dir"] = get_next_experiment_dir(own["logger"]["log_dir"])
    own["async_rl"]["sampler"] = configured(own["async_rl"].get("sampler"), settings)
    master = MasterConfig(**own)
    init_ray()
    tokenizer = get_tokenizer(master.policy["tokenizer"])
    configure_generation(master, tokenizer)
    # Also without Gym: services elsewhere call the engines over HTTP as well.
    setup_nemo_gym_config(master, tokenizer)
    # Ours, which NeMo RL's setup would refuse.
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
    """Make NeMo RL know the environment that data sets of ``rollouts: service`` name."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments.utils import ENV_REGISTRY, register_env

    if ENVIRONMENT not in ENV_REGISTRY:
        ACTOR_ENVIRONMENT_REGISTRY[_NO_ENVIRONMENT] = PY_EXECUTABLES.SYSTEM
        register_env(ENVIRONMENT, _NO_ENVIRONMENT)


def train(
    master: Any, arguments: Any, timings: Any, settings: ProrlSettings, validation: Validation | None = None
) -> dict[str, Any]:
    """Put our rollouts in place, and have the controller train with them.

    Args:
        master: NeMo RL's ``MasterConfig``.
        arguments: what its controller is made of; changed here.
        timings: of the setup, for its logger.
        settings: the block ``prorl:``.
        validation: beside it.
    """
    try:
        client = f"nemo-rl-{uuid.uuid4().hex[:8]}"
        servers = _servers(arguments, settings, client)
        put_in_place(master, arguments, settings, servers, client, validation)
        try:
            return _controlled(master, arguments, timings, servers)
        except BaseException as error:
            # The controller may not have come to end them itself.
            servers.end_all(client)
            if (cause := cause_of(error)) in (None, error):
                raise
            raise cause from error
        finally:
            servers.withdraw()
    finally:
        shut_down(arguments.env_handles, (arguments.gen_handle, arguments.trainer_handle))


def _controlled(master: Any, arguments: Any, timings: Any, servers: Servers) -> dict[str, Any]:
    import ray
    from nemo_rl.algorithms.single_controller import SingleControllerActor
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {}
    if servers.node is not None:
        # Our servers listen on loopback only, unless they have keys.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(servers.node, soft=False)
    controller = SingleControllerActor.options(**options).remote(
        master_config=master, actor_args=arguments, setup_timing_metrics=timings
    )
    try:
        return _watched(controller, master.async_rl.stall_watchdog)
    except BaseException:
        ray.kill(controller)
        raise


def cause_of(error: BaseException | None) -> RolloutError | None:
    """What of ours it was, behind Ray's errors and those of the controller's tasks."""
    if error is None or isinstance(error, RolloutError):
        return error
    inner = [*error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return next(filter(None, map(cause_of, [*inner, getattr(error, "cause", None), error.__cause__])), None)


def shut_down(environments: Mapping[str, Any], engines: Iterable[Any]) -> None:
    """As NeMo RL's own launcher: environments before the engines that they ask.

    Args:
        environments: handles of actors by name.
        engines: what samples, and what trains.
    """
    import ray

    for name, actor in environments.items():
        if not hasattr(actor.shutdown, "remote"):  # the actors of Gym's shards, which NeMo RL ends by itself
            actor.shutdown()
            continue
        try:
            ray.get(actor.shutdown.remote(), timeout=SHUTDOWN_S)
        except Exception as error:
            LOG.warning("environment %s did not shut down, and is killed: %s", name, error)
            ray.kill(actor)
    for what in engines:
        try:
            what.shutdown()
        except Exception as error:
            LOG.warning("%s did not shut down: %s", type(what).__name__, error)


def put_in_place(
    master: Any,
    arguments: Any,
    settings: ProrlSettings,
    servers: Servers,
    client: str,
    validation: Validation | None = None,
) -> None:
    """Replace what is ours among the controller's arguments."""
    grpo = master.grpo
    size = grpo.num_generations_per_prompt
    lines = [json.loads(line) for line in arguments.dataloader.dataset.dataset["extra_env_info"]]
    sampling = {name: master.policy["generation"][name] for name in ("temperature", "top_p", "max_new_tokens")}
    rows = [sampled_row(line, sampling) for line in lines]
    plan = Plan(
        rows=rows,
        sampler=settings.sampler(grpo.num_prompts_per_step, size, master.async_rl.max_inflight_prompts * size, 0),
        servers=servers,
        shape=Shaping.of(settings),
        client=client,
        seed=grpo.seed if master.data["shuffle"] else None,
        skip_solved=settings.skip_solved,
        validation=validation,
        state=saved_state(arguments.last_checkpoint_path, lines, sampling),
    )
    # Groups that a checkpoint has beside are in that state, too, and must not be trained on twice.
    arguments.last_checkpoint_path = None
    arguments.rollout_manager = ProrlRollouts(plan, arguments.tq_buffer, arguments.rollout_manager)
    arguments.dataloader = SavingDataLoader(arguments.dataloader, arguments.rollout_manager, lines, sampling)
    arguments.advantage_estimator = GroupAdvantages(arguments.advantage_estimator, size)
    arguments.advantage_actors = []  # newer versions may have copies of NeMo RL's estimator there
    if settings.mini_batches > 1:
        arguments.trainer_handle = MiniBatches(arguments.trainer_handle, settings.mini_batches)
    arguments.weight_synchronizer = ClosingSynchronizer(arguments.weight_synchronizer, arguments.rollout_manager)


def _servers(arguments: Any, settings: ProrlSettings, run: str) -> Servers:
    if settings.rollouts is Rollouts.GYM:
        if "nemo_gym" not in arguments.env_handles:
            raise CallerError("rollouts: gym needs env.should_use_nemo_gym: true", field="env.should_use_nemo_gym")
        return started_by_gym(arguments.env_handles["nemo_gym"], settings)
    return with_engines(already_running(settings), arguments.gen_handle.dp_openai_server_base_urls or (), run)


def _watched(controller: Any, watchdog: Any) -> dict[str, Any]:
    """The controller's result. Its own watchdog runs on the event loop that may hang, so it is pinged from here."""
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
            silent = time.monotonic() - answered
            if silent > watchdog.stall_timeout_s:
                raise InfrastructureError(f"NeMo RL's controller has not answered for {silent:.0f} s") from error
