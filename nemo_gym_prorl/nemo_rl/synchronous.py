# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""DAPO on NeMo RL's synchronous loop, ``grpo_train``: its trainer, its loss, its Gym servers, our environment.

The loop asks an environment to run the rows of a batch. Ours gives it as many rollouts of groups that are worth
training on, whichever prompts those are of. A batch ends when the last rollout that was of no use is gone, since the
engines may sleep while the policy is trained. So the loop's own dynamic sampling, which would throw away whole rounds,
stays off. It tells groups apart by their prompts: two of one prompt in a batch have one baseline.

Validation is NeMo RL's, with its own Gym actor.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_gym_prorl.dapo.runner import Runner, TrainedRollout
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.checks.servers import agent_of, gym_blocks
from nemo_gym_prorl.nemo_rl.collector import JOIN_S, Plan, metrics_of
from nemo_gym_prorl.nemo_rl.groups import Group, Sampled, add_experts, group_of, with_loss
from nemo_gym_prorl.nemo_rl.services import started_by_gym
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, settings_of
from nemo_gym_prorl.nemo_rl.shaping import Shaping
from nemo_gym_prorl.nemo_rl.single_controller import cause_of, configure_generation, shut_down
from nemo_gym_prorl.nemo_rl.upstream import GYM_ROLLOUTS, found, length_of_result
from nemo_gym_prorl.nemo_rl.validation import sampled_row


class Environment:
    """What ``grpo_train`` calls in place of NeMo RL's Gym actor; an actor itself, on the node of the servers.

    Args:
        plan: what is to be collected.
        version: weights of the first batch.
        tells_agent: each rollout comes with the row's reference of its agent, as newer versions have it.
    """

    def __init__(self, plan: Plan, version: int, tells_agent: bool = False) -> None:
        self._plan = plan
        self._version = version
        self._tells_agent = tells_agent
        self._runner: Runner | None = None

    async def run_rollouts(
        self,
        nemo_gym_examples: Sequence[Mapping[str, Any]],
        timer_prefix: str,
        deduplicate_multimodal_data: bool = False,
    ) -> AsyncIterator[tuple[Any, ...]]:
        """As many rollouts as there are rows, group after group, each with the place of its row.

        Args:
            nemo_gym_examples: the rows that the data loader gave: so many are wanted.
            timer_prefix: of timings, of which there are none here.
            deduplicate_multimodal_data: of no use for text.
        """
        config = self._plan.sampler
        wanted = config.groups_per_batch * config.group_size
        if len(nemo_gym_examples) != wanted:
            raise CallerError(f"{len(nemo_gym_examples)} rows are asked for, and a batch has {wanted}", field="grpo")
        runner = await self._with_weights()
        batch = await runner.batch()
        if batch is None:
            raise CallerError("there are no prompts left", field="data.train")
        await runner.idle()
        last = wanted - 1
        groups = [group_of(group, self._plan.shape) for group in batch.groups]
        runner.rollout_metrics.train(with_loss(groups))
        pairs = zip(batch.groups, groups, strict=True)
        results = [result for rollouts, group in pairs for result in results_of(rollouts, group)]
        for place, result in enumerate(results):
            agent = (nemo_gym_examples[place]["agent_ref"],) if self._tells_agent else ()
            yield place, *agent, result, metrics_of(runner) if place == last else None

    async def shutdown(self) -> None:
        """Cancel what is left, and wait until its sandboxes are gone."""
        if self._runner is not None:
            await self._runner.__aexit__(None, None, None)
            self._runner = None

    async def _with_weights(self) -> Runner:
        """The runner, told of new weights: the loop trains between two batches."""
        announce = self._plan.servers.announce
        if self._runner is None:
            await asyncio.to_thread(announce, self._version, needed=True)
            self._runner = await self._plan.runner(self._version).__aenter__()
        else:
            self._version += 1
            await asyncio.to_thread(announce, self._version)
            self._runner.weights(self._version)
        return self._runner


def results_of(rollouts: Sequence[TrainedRollout], group: Group) -> list[dict[str, Any]]:
    """The rollouts of a group as NeMo RL's Gym actor would give them."""
    pairs = zip(rollouts, group.members, strict=True)
    return [_result(rollout.reward, member, group.prompt) for rollout, member in pairs]


def _result(raw: float, member: Sampled, prompt: Sequence[int]) -> dict[str, Any]:
    first = {"role": "user", "content": "", "token_ids": list(prompt)}
    # NeMo RL computes the baseline over equal prompts, so another prompt keeps a masked reward out of that of the
    # siblings. The two tokens differ, so no padding of the plain prompt equals them.
    apart = first if member.turns else {**first, "token_ids": [*prompt, 0, 1]}
    messages: list[dict[str, Any]] = [] if member.turns else [first]
    for turn in member.turns:
        messages.append({"role": "user", "content": "", "token_ids": list(turn.observed)})
        said = {"token_ids": list(turn.sampled), "generation_logprobs": list(turn.log_probs)}
        messages.append({"role": "assistant", "content": "", **said})
        if turn.routed_experts is not None:
            add_experts(messages, turn)
    return {
        # The prompt by which NeMo RL tells groups apart, so it is the same for all members with a loss.
        "input_message_log": [apart],
        "message_log": messages,
        "full_result": {
            "reward": member.reward,
            "raw_reward": raw,
            "instance_config": {"mask_sample": not member.turns},
        },
    }


def run(config: Mapping[str, Any]) -> None:
    """Train until ``grpo.max_num_steps``.

    Args:
        config: a whole configuration, resolved and checked.
    """
    from nemo_rl.algorithms.grpo import MasterConfig, setup
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.utils import setup_response_data
    from nemo_rl.distributed.virtual_cluster import init_ray
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
    from nemo_rl.utils.logger import get_next_experiment_dir

    settings = settings_of(config)
    own = copy.deepcopy(dict(config))
    own["logger"]["log_dir"] = get_next_experiment_dir(own["logger"]["log_dir"])
    master = MasterConfig(**own)
    tokenizer = get_tokenizer(master.policy["tokenizer"])
    configure_generation(master, tokenizer)
    setup_nemo_gym_config(master, tokenizer)
    rows, validation = setup_response_data(tokenizer, master.data, env_configs=None)
    agent = agent_of(settings, gym_blocks(config))
    rows.dataset = with_agent(rows.dataset, agent)
    if validation is None:
        master.grpo.val_period = 0
    else:
        validation.dataset = with_agent(validation.dataset, agent)
        # What NeMo RL's own launcher does: Gym's rows are validated on as they are.
        master.grpo.max_val_samples = master.grpo.val_batch_size = len(validation)
    init_ray()
    policy, generation, gym, _, loader, val_loader, loss, logger, checkpointer, state, master, _, _ = setup(
        master, tokenizer, rows, validation
    )
    train(
        master, settings, gym, (policy, generation, loader, val_loader, tokenizer, loss, logger, checkpointer, state)
    )


def train(master: Any, settings: ProrlSettings, gym: Any, parts: Sequence[Any]) -> None:
    """Train with our environment.

    Args:
        master: NeMo RL's ``MasterConfig``.
        settings: the block ``prorl:``.
        gym: NeMo RL's Gym actor, whose servers take the rollouts.
        parts: policy, generation, both data loaders, tokenizer, loss, logger, checkpoints and state, as NeMo RL's
            ``setup`` makes them.
    """
    import ray
    from nemo_rl.algorithms.grpo import grpo_train
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    policy, generation, loader, val_loader, tokenizer, loss, logger, checkpointer, state = parts
    servers = started_by_gym(gym, settings)
    client = f"nemo-rl-{uuid.uuid4().hex[:8]}"
    grpo, size = master.grpo, master.grpo.num_generations_per_prompt
    prompts = grpo.num_prompts_per_step
    ahead = (getattr(master, "async_rl", None) or {}).get("max_inflight_prompts", 2 * prompts)
    plan = Plan(
        rows=[
            sampled_row(json.loads(line), master.policy["generation"])
            for line in loader.dataset.dataset["extra_env_info"]
        ],
        # A reference would have to run on while the engines' devices train.
        sampler=replace(settings.sampler(prompts, size, ahead * size, state.total_steps), reference_share=0.0),
        servers=servers,
        shape=Shaping.of(settings),
        client=client,
        # Another order for a run that is resumed, whose sampler begins anew.
        seed=grpo.seed + state.total_steps if master.data["shuffle"] else None,
        skip_solved=settings.skip_solved,
    )
    # Our servers listen on loopback only, unless they have keys.
    here = NodeAffinitySchedulingStrategy(servers.node, soft=False)
    tells_agent = length_of_result(found(GYM_ROLLOUTS)) == 4
    environment = ray.remote(Environment).options(num_cpus=0, scheduling_strategy=here)
    environment = environment.remote(plan, state.total_steps, tells_agent)
    try:
        grpo_train(
            policy,
            generation,
            loader,
            val_loader,
            tokenizer,
            loss,
            {"nemo_gym": environment},
            {"nemo_gym": gym},
            logger,
            checkpointer,
            state,
            master,
        )
    except BaseException as error:
        # The environment may not come to end them itself.
        servers.end_all(client)
        if (ours := cause_of(error)) is not None:
            raise ours from error
        raise
    finally:
        shut_down({"prorl": environment, "nemo_gym": gym}, (generation,), JOIN_S)


def with_agent(dataset: Any, agent: str | None) -> Any:
    """Rows with the agent that NeMo RL's metrics name them by; the rollouts go there anyway."""
    reference = {"type": "responses_api_agents", "name": agent}

    def named(row: dict[str, Any]) -> dict[str, Any]:
        return {"extra_env_info": json.dumps({"agent_ref": reference, **json.loads(row["extra_env_info"])})}

    return dataset.map(named)
