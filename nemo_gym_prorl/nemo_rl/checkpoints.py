# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of NeMo RL's controller holds of our sampler, so that a run that is resumed goes on with it.

The controller saves the state of its data loader and of its buffer. Prompts are drawn by our sampler, so its state
goes with the data loader's. The buffer's groups are not restored: the state is that of when the batch that was trained
on last was complete, and what the buffer holds since then is in it, scored and not handed over.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.nemo_rl.rollouts import ProrlRollouts


LOG = logging.getLogger(__name__)

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
