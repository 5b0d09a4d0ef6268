# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What NeMo RL's SingleController calls in place of its own rollout manager, and what ends with it.

The controller asks for a rollout of each prompt that its data loader gives, and commits what comes to its buffer.
Here a request is a ticket: it gets the next group that the sampler has found worth training on, whichever prompt that
is of. So groups without variance, failures, retries and staleness are the sampler's, and the controller only ever sees
groups that are complete; its own retries and drop budgets find nothing to do.

No class here is derived from a class of NeMo RL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.nemo_rl.collector import Collector, Plan
from nemo_gym_prorl.nemo_rl.groups import record_of


if TYPE_CHECKING:
    from nemo_rl.experience.rollout_manager import RolloutOutcome

LOG = logging.getLogger(__name__)


class Stats:
    """Counters as the controller's watchdog reads and logs them.

    Attributes:
        committed: groups in the buffer, by which it tells a stall from work.
    """

    def __init__(self) -> None:
        self.committed = 0
        self.collector: Collector | None = None

    def as_metrics(self) -> dict[str, float]:
        """For the controller's logger."""
        own = self.collector.metrics() if self.collector else {}
        return {"rollout/committed_total": float(self.committed), **own}


class ProrlRollouts:
    """Groups for the controller; travels to its actor as a pickle and begins there.

    Args:
        plan: what is to be collected.
        buffer: the controller's.
        manager: NeMo RL's own, which answers for what has nothing to do with rollouts.
    """

    def __init__(self, plan: Plan, buffer: Any, manager: Any) -> None:
        self._manager = manager
        self._plan = plan
        self._tq_buffer = buffer  # the controller sets it, under this name
        self._collector: Collector | None = None
        self._version = 0
        self.stats = Stats()

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._manager, name)

    def set_weight_version(self, version: int) -> None:
        """Called after each refit, with rollouts in flight; the first call begins."""
        self._version = int(version)
        if self._collector is None:
            self._collector = self.stats.collector = Collector(self._plan)
        self._collector.weights(self._version)

    async def generate_and_push(
        self,
        input_sample: Mapping[str, Any],
        *,
        target_step: int | None = None,
        inflight_registry: dict[str, Any] | None = None,
        lineage_group_id: str | None = None,
    ) -> RolloutOutcome:
        """Commit the next group to the buffer.

        Args:
            input_sample: a ticket; prompts are drawn by the sampler.
            target_step: for which the group is stamped. Groups come in the order in which they are asked for.
            inflight_registry: not used: what is in flight belongs to no ticket, and becomes stale only by the sampler.
            lineage_group_id: not used: checkpoints hold our sampler's state, and not NeMo RL's of rollouts in flight.
        """
        from nemo_rl.experience.rollout_manager import RolloutOutcome

        if self._collector is None:
            raise RuntimeError("the engines have no weights yet: set_weight_version comes first")
        group = await asyncio.wrap_future(self._collector.take())
        record = record_of(group, self.stats.committed)
        # Reserved only now: a slot stands for a group that exists, and slots are in the order of groups.
        slot = self._tq_buffer.reserve(weight_version=group.version, target_step=target_step)
        try:
            await self._tq_buffer.commit(
                slot, record, start_weight_version=group.version, end_weight_version=self._version
            )
        except BaseException:
            await self._tq_buffer.remove_group(slot)
            raise
        self.stats.committed += 1
        return RolloutOutcome.COMMITTED

    def finish_validation(self) -> None:
        """Wait until the engines may have other weights."""
        if self._collector is not None:
            self._collector.finish_validation()

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint that is written after a refit: of when the batch before it was complete."""
        return self._collector.state(self._version - 1) if self._collector else None

    def close(self) -> None:
        """Cancel what is left and wait until its sandboxes are gone."""
        if self._collector is not None:
            self._collector.close()


class ClosingSynchronizer:
    """NeMo RL's weight synchronizer, which the controller shuts down however it ends: so rollouts end with it. New
    weights wait until a validation of those before is over.

    Args:
        synchronizer: the trainer's own.
        rollouts: those of the same controller.
    """

    def __init__(self, synchronizer: Any, rollouts: ProrlRollouts) -> None:
        self._synchronizer = synchronizer
        self._rollouts = rollouts

    def __getattr__(self, name: str) -> Any:
        if name == "_synchronizer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._synchronizer, name)

    def sync_weights(self, **more: Any) -> Any:
        """Called in a thread of its own."""
        self._rollouts.finish_validation()
        return self._synchronizer.sync_weights(**more)

    def shutdown(self) -> None:
        """Rollouts first: they sample from the engines that the rest belongs to."""
        try:
            self._rollouts.close()
        finally:
            self._synchronizer.shutdown()


class GroupAdvantages:
    """NeMo RL's advantage estimator, told which rollouts are a group.

    NeMo RL takes rollouts for one group if their prompts have the same tokens. That rule merges two groups of one
    prompt, and splits a group whose prompts contain the time. Invariant: a rollout without a trained token does not
    shift the baseline of its siblings, so it is a group of its own.

    Args:
        estimator: NeMo RL's own.
        size: rollouts of a group; the controller keeps them together and in order.
    """

    def __init__(self, estimator: Any, size: int) -> None:
        self._estimator = estimator
        self._size = size

    def compute_advantage(self, *, prompt_ids: Any, rewards: Any, mask: Any, **more: Any) -> Any:
        """Return the estimator's advantages, with a group's number in place of its prompt.

        Args:
            prompt_ids: one row for each rollout; only the device and type are used.
            rewards: of shape ``[rollouts]``.
            mask: of shape ``[rollouts, tokens]``, 1 for each token that is trained on.
            more: what else the estimator takes.
        """
        trained = mask.bool().any(dim=1).tolist()
        numbers = [[place // self._size if has_loss else -1 - place] for place, has_loss in enumerate(trained)]
        groups = prompt_ids.new_tensor(numbers)
        return self._estimator.compute_advantage(prompt_ids=groups, rewards=rewards, mask=mask, **more)
