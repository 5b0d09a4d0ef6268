# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Replacements for parts of NeMo RL's SingleController: rollout manager, trainer, data loader and others.

**Rollouts.** The controller requests a group for each prompt of its data loader and commits the group to its buffer.
:class:`ProrlRollouts` answers each request with the next group with variance, whatever its prompt. The dynamic sampler
handles variance, failures, retries and staleness. The controller therefore only receives complete groups, and its own
retries and drop budgets are never used.

**Advantages.** A rollout whose agent compacted its context has several rows in a batch. :class:`RolloutRows` passes
the rollout of each row to the estimator, and :class:`GroupAdvantages` computes one advantage per rollout.

**Optimizer steps.** The controller computes the loss's reference log-probabilities directly before its only optimizer
step, in which the ratio is 1 at every token and the clip has no effect. :class:`MiniBatches` makes one optimizer step
for each part of the batch, with the same reference log-probabilities. From the second step on the policy has changed,
and the clip bounds its change.

**Checkpoints.** The controller saves the states of its data loader and of its buffer. :class:`SavingDataLoader` adds
the state of the dynamic sampler, which draws the prompts. That state is taken when the last trained batch was
complete, and contains the groups of the buffer as scored. Therefore groups of a saved buffer are not restored.

No class here is derived from a class of NeMo RL.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.collector import CollectionPlan, Collector
from nemo_gym_prorl.nemo_rl.groups import TrainingGroup, record_of, rows_of


if TYPE_CHECKING:
    from nemo_rl.experience.rollout_manager import RolloutOutcome


LOG = logging.getLogger(__name__)


class RolloutStats:
    """Counters that the controller's watchdog reads and logs.

    Attributes:
        committed: number of groups committed to the buffer; the watchdog reports a stall if it stays constant.
    """

    def __init__(self) -> None:
        self.committed = 0
        self.collector: Collector | None = None

    def as_metrics(self) -> dict[str, float]:
        own = self.collector.metrics() if self.collector else {}
        return {"rollout/committed_total": float(self.committed), **own}


_GROUP_COLUMN = "prompt_ids_for_adv"
"""NeMo RL's column by which its advantage estimators distinguish groups."""


class _Wrapper:
    """Object that passes other attributes on to a part of NeMo RL."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name == "_part":  # not set yet while the object is unpickled
            raise AttributeError(name)
        return getattr(self._part, name)


class RolloutRows(_Wrapper):
    """NeMo RL's data plane client, with group and member of each row in place of the prompt ids for advantages.

    Args:
        client: NeMo RL's client, or a Ray actor with the client's methods.
        multiple: see :func:`.rows_of`.
    """

    def __init__(self, client: Any, multiple: int = 1) -> None:
        super().__init__(client)
        self.multiple = multiple
        self._members: dict[str, list[int]] = {}

    def add(self, slot: str, group: TrainingGroup) -> None:
        self._members[slot] = [index for index, _ in rows_of(group, self.multiple)]

    async def get_samples(self, *, sample_ids: Sequence[str], select_fields: Sequence[str], **more: Any) -> Any:
        """Return columns of rows. Prompt ids, which can be read once, are replaced by each row's group and member."""
        method = self._part.get_samples
        found = getattr(method, "remote", method)(sample_ids=sample_ids, select_fields=select_fields, **more)
        if inspect.isawaitable(found):
            found = await found
        if _GROUP_COLUMN in select_fields:
            import torch

            rows = [sample_id.rsplit("_g", 1) for sample_id in sample_ids]
            groups = {slot: (number, self._members.pop(slot)) for number, slot in enumerate(dict(rows))}
            owners = [[-1 - groups[slot][0], groups[slot][1][int(row)]] for slot, row in rows]
            found = found.clone(recurse=False)
            found[_GROUP_COLUMN] = torch.tensor(owners)  # group numbers are negative, which token ids never are
        return found


class ProrlRollouts(_Wrapper):
    """Rollout manager of the controller. It is pickled for the controller's actor, and starts in that actor."""

    def __init__(self, plan: CollectionPlan, buffer: Any, manager: Any, rows: RolloutRows) -> None:
        super().__init__(manager)
        self._rows = rows
        self._plan = plan
        self._tq_buffer = buffer  # the controller sets the attribute by name
        self._collector: Collector | None = None
        self._version = 0
        self.stats = RolloutStats()

    def set_weight_version(self, version: int) -> None:
        """Announce a weight version; the controller calls this after each refit. The first call starts rollouts."""
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
            input_sample: not used; the dynamic sampler draws the prompts.
            target_step: training step that the buffer records for the group. Groups are committed in request order.
            inflight_registry: not used; rollouts in flight belong to no request, and only the sampler judges
                staleness.
            lineage_group_id: not used; checkpoints contain the dynamic sampler's state instead.
        """
        from nemo_rl.experience.rollout_manager import RolloutOutcome

        if self._collector is None:
            raise RuntimeError("the engines have no weights yet: call set_weight_version() first")
        group = await asyncio.wrap_future(self._collector.take())
        record = record_of(group, self.stats.committed, self._rows.multiple)
        # A slot is reserved once its group exists, so that slots and groups have the same order.
        slot = self._tq_buffer.reserve(weight_version=group.version, target_step=target_step)
        self._rows.add(slot, group)
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
        """Block until the engines may get other weights; see :meth:`Collector.finish_validation`."""
        if self._collector is not None:
            self._collector.finish_validation()

    def state(self) -> dict[str, Any] | None:
        """Return the collector's state for a checkpoint of the current weights; ``None`` before the first batch."""
        return self._collector.state(self._version - 1) if self._collector else None

    def close(self) -> None:
        """Cancel the remaining rollouts and wait until their sandboxes are gone."""
        if self._collector is not None:
            self._collector.close()


class ClosingSynchronizer(_Wrapper):
    """NeMo RL's weight synchronizer, extended: ends rollouts at shutdown, and delays weights until validation ends.

    The controller shuts its weight synchronizer down in every case, so rollouts end in every case.
    """

    def __init__(self, synchronizer: Any, rollouts: ProrlRollouts) -> None:
        super().__init__(synchronizer)
        self._rollouts = rollouts

    def sync_weights(self, **more: Any) -> Any:
        """Synchronize weights after a running validation. The controller's thread for this call may block."""
        self._rollouts.finish_validation()
        return self._part.sync_weights(**more)

    def shutdown(self) -> None:
        """End rollouts, then shut down the synchronizer, which manages the engines that rollouts sample from."""
        try:
            self._rollouts.close()
        finally:
            self._part.shutdown()


class GroupAdvantages:
    """NeMo RL's advantage estimator over rollouts, with explicit groups; see :class:`RolloutRows`.

    NeMo RL treats rows as one group if their prompts have the same tokens. That rule merges two groups of one prompt,
    and splits a group whose prompts contain the time.

    Invariants:

    - each rollout enters the baseline of its group once, and all rows of the rollout get the same advantage;
    - a rollout without a trained token is a group of its own, so that its siblings' baseline does not shift.
    """

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def compute_advantage(self, *, prompt_ids: Any, rewards: Any, mask: Any, **more: Any) -> Any:
        """Return the estimator's advantages of shape ``[rows, tokens]``.

        Args:
            prompt_ids: negative group number and member index of each row ``[rows, 2]``, from :class:`RolloutRows`.
            rewards: reward of each row's rollout ``[rows]``.
            mask: 1 for each token that is trained on, else 0 ``[rows, tokens]``.
            more: further arguments of the estimator.

        Raises:
            CallerError: a rollout has several rows, and the estimator gives its tokens different advantages.
        """
        if (prompt_ids[:, 0] >= 0).any():
            raise RuntimeError("NeMo RL has read rows without RolloutRows: use the tested version")
        owners, rollouts = prompt_ids.unique(dim=0, return_inverse=True)
        numbers = rollouts.new_tensor(range(len(rollouts)))
        first = numbers.new_zeros(len(owners)).scatter_reduce(0, rollouts, numbers, "amin", include_self=False)
        tokens = mask.new_zeros(len(owners), mask.shape[1]).index_add(0, rollouts, mask).clamp(max=1)
        groups = owners[:, :1].where(tokens.any(dim=1, keepdim=True), numbers[: len(owners), None])
        more = {name: _rows(value, first) for name, value in more.items()}
        found = self._estimator.compute_advantage(prompt_ids=groups, rewards=rewards[first], mask=tokens, **more)
        if len(owners) < len(rollouts) and not (found == found[:, :1]).all():
            raise CallerError(
                "gives the tokens of a rollout different advantages, which a rollout with several training traces "
                "cannot have: use grpo",
                field="grpo.adv_estimator.name",
            )
        return found[rollouts]


def _rows(value: Any, chosen: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rows(column, chosen) for name, column in value.items()}
    return value[chosen] if hasattr(value, "new_tensor") else value


_SUMMED_METRICS = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "total_flops")
"""Metrics that are summed over the optimizer steps of a batch; other metrics are averaged, or take an extreme."""


class MiniBatches(_Wrapper):
    """NeMo RL's trainer, with one optimizer step for each part of a batch.

    Args:
        trainer: NeMo RL's trainer, whose split interface is called once for each part.
        count: number of parts, all of about the same number of rows.
        rollouts: number of rollouts of a batch; the schedule of the learning rate counts rollouts, not rows.
        multiple: number of which the rows of a part must be a multiple.
    """

    def __init__(self, trainer: Any, count: int, rollouts: int, multiple: int = 1) -> None:
        super().__init__(trainer)
        self._count = count
        self._rollouts = rollouts
        self._multiple = multiple
        self._loss: Any = None
        self._done: list[Mapping[str, Any]] = []

    def begin_train_step(self, loss_fn: Any) -> None:
        """Store the loss function; :meth:`train_microbatches_from_meta` begins the trainer's steps, one per part."""
        self._loss, self._done = loss_fn, []

    def train_microbatches_from_meta(self, meta: Any, **more: Any) -> None:
        rows, multiple, count = len(meta.sample_ids), self._multiple, self._count
        bounds = [*(rows * part // count // multiple * multiple for part in range(count)), rows]
        shares = [self._rollouts * part // count for part in range(count + 1)]
        for (first, last), (before, after) in zip(pairwise(bounds), pairwise(shares), strict=True):
            self._part.begin_train_step(self._loss, gbs=after - before)
            self._part.train_microbatches_from_meta(meta.slice(first, last), **more)
            self._done.append(self._part.finish_train_step())

    def finish_train_step(self) -> dict[str, Any]:
        """Return the combined results of the optimizer steps, in the form of a single step's result."""
        from nemo_rl.algorithms.single_controller_utils.utils import aggregate_step_metrics

        metrics = combine_step_metrics([aggregate_step_metrics(result) for result in self._done])
        loss, norm = metrics.pop("loss", 0.0), metrics.pop("grad_norm", 0.0)
        return {"loss": loss, "grad_norm": norm, "all_mb_metrics": {name: [value] for name, value in metrics.items()}}


def combine_step_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch from those of its optimizer steps."""
    combined = {}
    for name in steps[0]:
        values = [step[name] for step in steps if name in step]
        if name in _SUMMED_METRICS:
            combined[name] = sum(values)
        elif name.endswith(("_min", "_max")):
            combined[name] = min(values) if name.endswith("_min") else max(values)
        else:
            combined[name] = sum(values) / len(values)
    return combined


DATALOADER_FILE = "train_dataloader.pt"
"""NeMo RL's file name for the state of its data loader, in the folder of a checkpoint."""
_STATE_KEY = "prorl"


class SavingDataLoader:
    """NeMo RL's data loader, whose saved state includes the dynamic sampler's.

    Args:
        loader: NeMo RL's data loader, already restored if a training run is resumed.
        rollouts: rollout manager of the same controller.
        rows: dataset rows as read, whose checksum identifies the data set.
        sampling: sampling parameters of rollouts.
    """

    def __init__(
        self, loader: Any, rollouts: ProrlRollouts, rows: Iterable[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> None:
        self._loader = loader
        self._rollouts = rollouts
        self._identity = {"dataset": fingerprint(rows), "sampling": dict(sampling)}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's and the sampler's state; called after a step, once the step's weights are announced."""
        return {**self._loader.state_dict(), _STATE_KEY: {**self._identity, "runner": self._rollouts.state()}}


def saved_state(
    checkpoint: str | None, rows: Iterable[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the dynamic sampler's state in a checkpoint; ``None`` without a state, or if the dataset has changed.

    Changed sampling parameters only cause a warning: scored rollouts are trained on as they were sampled.

    Args:
        checkpoint: folder of the checkpoint; ``None`` for a new training run.
        rows: dataset rows as read.
        sampling: sampling parameters of rollouts.
    """
    if checkpoint is None or not (file := Path(checkpoint, DATALOADER_FILE)).is_file():
        return None
    import torch

    saved = torch.load(file).get(_STATE_KEY)
    if saved is None or saved["runner"] is None:
        LOG.warning("%s has no state of the dynamic sampler, which starts from the first prompt", file)
        return None
    if saved["dataset"] != fingerprint(rows):
        LOG.warning("%s is of another data set; the dynamic sampler starts from the first prompt", file)
        return None
    if saved["sampling"] != dict(sampling):
        LOG.warning(
            "sampling parameters have changed since %s was saved: scored rollouts (%s) are trained on, and all others "
            "are sampled with %s",
            file,
            saved["sampling"],
            dict(sampling),
        )
    state: dict[str, Any] = saved["runner"]
    return state


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return a checksum of the rows and their order."""
    checksum = 0
    for row in rows:
        checksum = zlib.crc32(json.dumps(row, sort_keys=True).encode(), checksum)
    return checksum
