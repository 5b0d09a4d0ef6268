# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The warm start: cross-entropy on what the policy would write in demonstrations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from examples.tiny_dapo.model import TinyModel, log_probs_of


TYPICAL_TOKENS = 12
"""What the policy writes in a lesson. A batch's loss is divided by this, not by what its own lessons have: they are of
about one length, and tokens of short lessons would count for more."""


def imitate(
    model: TinyModel,
    lessons: Iterator[tuple[list[int], list[bool]]],
    steps: int,
    *,
    batch: int = 32,
    peak: float = 3e-3,
    told: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Teach the model what the policy writes in lessons; returns seconds.

    Args:
        model: to be trained in place.
        lessons: tokens, and which of them the policy wrote.
        steps: of the optimiser.
        batch: lessons of a step.
        peak: the highest learning rate.
        told: of each step's loss.
    """
    began = time.monotonic()
    optimiser = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=peak, total_steps=steps, pct_start=0.1)
    for step, (ids, mask) in enumerate(itertools.islice(_batches(lessons, batch), steps)):
        loss = -(log_probs_of(model, ids) * mask[:, 1:]).sum() / (batch * TYPICAL_TOKENS)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        told(step, loss.item())
    return time.monotonic() - began


def _batches(lessons: Iterator[tuple[list[int], list[bool]]], batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Lessons of about one length together, so that little is filled up."""
    while True:
        drawn = sorted(itertools.islice(lessons, 8 * batch), key=lambda drawn: len(drawn[0]))
        starts = torch.randperm(8) * batch
        yield from (padded(drawn[start : start + batch]) for start in starts.tolist())


def padded(sequences: list[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[batch, longest]``, filled up with zeros."""
    longest = max(len(ids) for ids, _ in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros(len(sequences), longest)
    for row, (tokens, wrote) in enumerate(sequences):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(wrote)] = torch.tensor(wrote, dtype=torch.float32)
    return ids, mask
