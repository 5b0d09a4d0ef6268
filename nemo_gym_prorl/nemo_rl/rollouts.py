# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What replaces parts of NeMo RL's SingleController: its rollout manager, and what has to end, train and save with it.

The controller asks for a rollout of each prompt that its data loader gives, and commits what comes to its buffer.
Here a request is a ticket: it gets the next group that the sampler has found worth training on, whichever prompt that
is of. So groups without variance, failures, retries and staleness are the sampler's, and the controller only ever sees
groups that are complete; its own retries and drop budgets find nothing to do.

**Optimizer steps.** The controller computes the log-probabilities that the loss compares with right before it trains,
and makes one optimizer step. There the ratio of the loss is 1 at every token, and its clip never acts.
:class:`MiniBatches` computes them once, and trains on the batch in parts, each with an optimizer step. From the second
on, the policy is another than that of the log-probabilities, and the clip bounds how far it goes.

**Checkpoints.** The controller saves the state of its data loader and of its buffer. Prompts are drawn by our sampler,
so its state goes with the data loader's. The buffer's groups are not restored: the state is that of when the batch
that was trained on last was complete, and what the buffer holds since then is in it, scored and not handed over.

No class here is derived from a class of NeMo RL.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
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


_TOTALS = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "total_flops")
"""What the optimizer steps of a batch have together. Of all else a step's metrics have the mean, or the extreme."""


class MiniBatches:
    """NeMo RL's trainer, which makes an optimizer step of each part of a batch.

    Args:
        trainer: its own, whose split interface is called once for each part.
        count: of the parts, each of as many rollouts.
    """

    def __init__(self, trainer: Any, count: int) -> None:
        self._trainer = trainer
        self._count = count
        self._loss: Any = None
        self._done: list[Mapping[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def begin_train_step(self, loss_fn: Any) -> None:
        """The optimizer steps themselves begin with their data."""
        self._loss, self._done = loss_fn, []

    def train_microbatches_from_meta(self, meta: Any, **more: Any) -> None:
        """Train on a whole batch, which the controller gives in one piece."""
        bounds = [len(meta.sample_ids) * part // self._count for part in range(self._count + 1)]
        for first, last in pairwise(bounds):
            self._trainer.begin_train_step(self._loss, gbs=last - first)
            self._trainer.train_microbatches_from_meta(meta.slice(first, last), **more)
            self._done.append(self._trainer.finish_train_step())

    def finish_train_step(self) -> dict[str, Any]:
        """What the optimizer steps gave, in the form that the trainer gives of one."""
        from nemo_rl.algorithms.single_controller_utils.utils import aggregate_step_metrics

        found = together([aggregate_step_metrics(result) for result in self._done])
        loss, norm = found.pop("loss", 0.0), found.pop("grad_norm", 0.0)
        return {"loss": loss, "grad_norm": norm, "all_mb_metrics": {name: [value] for name, value in found.items()}}


def together(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a batch, of those of its optimizer steps."""
    found = {}
    for name in steps[0]:
        values = [step[name] for step in steps if name in step]
        if name in _TOTALS:
            found[name] = sum(values)
        elif name.endswith(("_min", "_max")):
            found[name] = min(values) if name.endswith("_min") else max(values)
        else:
            found[name] = sum(values) / len(values)
    return found


FILE = "train_dataloader.pt"
"""NeMo RL's name for its data loader's state, in the folder of a checkpoint."""
_OURS = "prorl"


class SavingDataLoader:
    """NeMo RL's data loader, whose state has our sampler's in it.

    Args:
        loader: restored already, where a run is resumed.
        rollouts: those of the same controller.
        rows: of the data set, as they are there.
        sampling: how they are sampled.
    """

    def __init__(
        self, loader: Any, rollouts: ProrlRollouts, rows: Iterable[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> None:
        self._loader = loader
        self._rollouts = rollouts
        self._ours = {"dataset": fingerprint(rows), "sampling": dict(sampling)}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Called by the controller when a step is done and its weights are announced."""
        return {**self._loader.state_dict(), _OURS: {**self._ours, "runner": self._rollouts.state()}}


def saved_state(
    checkpoint: str | None, rows: Iterable[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The sampler's state in a checkpoint; ``None`` where there is none, or it is of another data set.

    It is gone on from with another temperature, too: what was scored before is trained on as it was sampled.

    Args:
        checkpoint: its folder.
        rows: of the data set of now, as they are there.
        sampling: how they are sampled now.
    """
    if checkpoint is None or not (file := Path(checkpoint, FILE)).is_file():
        return None
    import torch

    ours = torch.load(file).get(_OURS)
    if ours is None or ours["runner"] is None:
        LOG.warning("%s has no state of the sampler; it begins anew", file)
        return None
    if ours["dataset"] != fingerprint(rows):
        LOG.warning("%s is of another data set; the sampler begins anew", file)
        return None
    if ours["sampling"] != dict(sampling):
        LOG.warning(
            "the sampler goes on from %s, whose rollouts were sampled with %s: those that have a reward are trained "
            "on, all others are sampled with %s",
            file,
            ours["sampling"],
            dict(sampling),
        )
    state: dict[str, Any] = ours["runner"]
    return state


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> int:
    """Differs, if the rows or their order do."""
    found = 0
    for row in rows:
        found = zlib.crc32(json.dumps(row, sort_keys=True).encode(), found)
    return found
