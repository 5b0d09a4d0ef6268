# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Policy, imitation learning, and DAPO's loss (arXiv 2503.14476).

The policy is a decoder of 370,000 parameters without a key-value cache, so each token needs a pass over the whole
sequence. Imitation of demonstrations is the warm start; then DAPO's loss trains on sampled tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_gym_prorl.dapo.runner import TrainingBatch
from nemo_gym_prorl.rollout.gym_rows import TurnTokens


CONTEXT = 256
BATCH, PEAK_RATE = 32, 3e-3  # batch size and maximum learning rate of imitation
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MINI_BATCHES = 4


class Block(nn.Module):
    """Transformer block: attention with rotary positions, and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_rotated(q, angles), _rotated(k, angles), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class TinyModel(nn.Module):
    """Transformer decoder whose input and output share the embedding matrix."""

    angles: Tensor

    def __init__(self, vocabulary: int, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        half = width // heads // 2
        frequencies = 1.0 / 1000 ** (torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(CONTEXT)[:, None] * frequencies, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits of the next tokens.

        Args:
            ids: token ids ``[batch, tokens]``, int64.
            positions: one position in each sequence ``[batch]``; ``None``: all positions.

        Returns:
            Logits ``[batch, tokens, vocabulary]``, or ``[batch, vocabulary]`` with ``positions``.
        """
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.angles[: ids.shape[1]])
        if positions is not None:
            x = x[torch.arange(len(ids)), positions]
        return F.linear(self.norm(x), self.embedding.weight)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions; ``angles`` is ``[tokens, half the width of a head]``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def log_probs_of(model: TinyModel, ids: Tensor) -> Tensor:
    """Return log-probabilities ``[batch, tokens - 1]`` of all tokens but the first."""
    logits = model(ids[:, :-1])
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


@dataclass(frozen=True, slots=True)
class Sample:
    """Rollout to train on.

    Attributes:
        ids: token ids of the whole conversation.
        mask: whether the policy sampled each token.
        log_probs: log-probability of each sampled token under the weights that sampled the token.
        advantage: advantage of the rollout in its group.
    """

    ids: list[int]
    mask: list[bool]
    log_probs: list[float]
    advantage: float


def imitate(model: TinyModel, lessons: Iterator[tuple[list[int], list[bool]]], steps: int, name: str) -> None:
    """Train the model in place on the masked tokens of an endless stream of lessons (token ids and masks)."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=PEAK_RATE, total_steps=steps, pct_start=0.1)
    for _ in track(range(steps), description=name):
        ids, mask = padded([*itertools.islice(lessons, BATCH)])
        _descend(model, optimiser, -(log_probs_of(model, ids) * mask[:, 1:]).sum() / mask.sum())
        schedule.step()


def padded(sequences: Sequence[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    """Return ids and masks ``[batch, longest]``, padded with zeros."""
    longest = max(len(ids) for ids, _ in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros(len(sequences), longest)
    for row, (tokens, wrote) in enumerate(sequences):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(wrote)] = torch.tensor(wrote, dtype=torch.float32)
    return ids, mask


def sample_of(turns: Sequence[TurnTokens], advantage: float) -> Sample:
    """Return the training sample of a rollout's turns.

    Raises:
        ValueError: the prompt of a turn does not begin with the tokens before the turn.
    """
    ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    for turn in turns:
        if not turn.sampled:
            continue
        if turn.kept != len(ids):
            raise ValueError("the tokens of a turn do not continue the turn before")
        mask += [False] * len(turn.observed) + [True] * len(turn.sampled)
        ids += [*turn.observed, *turn.sampled]
        log_probs += turn.log_probs
    return Sample(ids, mask, log_probs, advantage)


def samples_of(batch: TrainingBatch, rng: random.Random) -> list[Sample]:
    """Return the rollouts of a batch that are not masked in random order, with advantages relative to their groups."""
    samples = []
    for members in batch.groups:
        group = [rollout for rollout in members if not rollout.masked]
        rewards = torch.tensor([rollout.reward for rollout in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        samples += [
            sample_of(one.tokens, advantage) for one, advantage in zip(group, advantages.tolist(), strict=True)
        ]
    rng.shuffle(samples)
    return samples


def learn(model: TinyModel, optimiser: torch.optim.Optimizer, samples: list[Sample]) -> float:
    """Take one pass over the samples, in mini-batches; return the mean loss."""
    losses = []
    for part in (samples[start::MINI_BATCHES] for start in range(MINI_BATCHES)):
        if not part:
            continue
        ids, mask = padded([(sample.ids, sample.mask) for sample in part])
        mask = mask[:, 1:]
        old = torch.zeros_like(mask)
        old[mask.bool()] = torch.tensor([value for sample in part for value in sample.log_probs])
        advantage = torch.tensor([sample.advantage for sample in part])[:, None]
        ratio = (log_probs_of(model, ids) - old).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        # As in DAPO, all tokens have equal weight, regardless of the length of their rollout.
        loss = -(torch.minimum(ratio * advantage, clipped * advantage) * mask).sum() / mask.sum().clamp(min=1)
        _descend(model, optimiser, loss)
        losses.append(loss.item())
    return sum(losses) / len(losses)


def _descend(model: TinyModel, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
