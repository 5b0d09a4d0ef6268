# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps of one batch on NeMo RL's SingleController, as PPO and DAPO have them.

The controller computes the log-probabilities that the loss compares with right before it trains, and makes one
optimizer step. There the ratio of the loss is 1 at every token, and no clip of it ever acts: the gradient is the same
with any. Here those are computed once, and the batch is trained on in parts, each with an optimizer step. From the
second on, the policy is another than that of the log-probabilities, and the clip bounds how far it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


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
