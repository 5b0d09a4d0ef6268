# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From finished rollouts to an optimiser's step: DAPO's loss (arXiv 2503.14476) on the tokens that were sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from tokenizers import Tokenizer

from examples.tiny_dapo.imitation import padded
from examples.tiny_dapo.model import CONTEXT, TinyModel, log_probs_of
from examples.tiny_dapo.vocabulary import policy_mask
from nemo_gym_prorl.dapo.runner import TrainingBatch
from nemo_gym_prorl.rollout.tokens import Turn


CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MINI_BATCHES = 4


class Arm(StrEnum):
    """What is trained on."""

    FULL = "full"
    """The tokens that were sampled, with their own rewards."""
    SHUFFLED = "shuffled"
    """The same with the rewards of each group given to its rollouts at random."""
    RETOKENISED = "retokenised"
    """The same text, tokenised anew, as where a service hands out text."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout to learn from.

    Attributes:
        ids: the whole conversation.
        mask: which of them the policy sampled.
        log_probs: under what it was sampled from, of each of those in order; ``None`` if they are not known.
        advantage: of the rollout in its group.
    """

    ids: list[int]
    mask: list[bool]
    log_probs: list[float] | None
    advantage: float


def sample_of(turns: Sequence[Turn], advantage: float) -> Sample:
    """A rollout's tokens as the service hands them out.

    Raises:
        ValueError: a turn's prompt is not the continuation of what was before it.
    """
    ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    for turn in turns:
        if not turn.sampled:
            continue
        if turn.kept != len(ids):
            raise ValueError("the tokens of a turn do not continue those before it")
        mask += [False] * len(turn.observed) + [True] * len(turn.sampled)
        ids += [*turn.observed, *turn.sampled]
        log_probs += turn.log_probs
    return Sample(ids, mask, log_probs, advantage)


def retokenised(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """The same conversation as its text alone gives it."""
    text = tokenizer.decode(sample.ids, skip_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:CONTEXT]
    return replace(sample, ids=ids, mask=policy_mask(ids, tokenizer), log_probs=None)


def samples_of(batch: TrainingBatch, arm: Arm, tokenizer: Tokenizer, rng: random.Random) -> list[Sample]:
    """All rollouts of a batch, with advantages relative to their groups."""
    samples = []
    for group in batch.groups:
        rewards = [rollout.reward for rollout in group]
        if arm is Arm.SHUFFLED:
            rng.shuffle(rewards)
        for rollout, advantage in zip(group, _advantages(rewards), strict=True):
            sample = sample_of(rollout.tokens, advantage)
            samples.append(retokenised(sample, tokenizer) if arm is Arm.RETOKENISED else sample)
    rng.shuffle(samples)
    return samples


def _advantages(rewards: Sequence[float]) -> list[float]:
    values = torch.tensor(rewards)
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist()


def learn(model: TinyModel, optimiser: torch.optim.Optimizer, samples: list[Sample]) -> dict[str, float]:
    """One pass over the samples; returns what is worth knowing of it."""
    told = {"loss": 0.0, "clipped": 0.0, "tokens": 0.0}
    known = [sample if sample.log_probs is not None else _scored(model, sample) for sample in samples]
    size = -(-len(known) // MINI_BATCHES)
    for start in range(0, len(known), size):
        part = known[start : start + size]
        ids, mask = padded([(sample.ids, sample.mask) for sample in part])
        mask = mask[:, 1:]
        old = torch.zeros_like(mask)
        old[mask.bool()] = torch.tensor([value for sample in part for value in sample.log_probs or ()])
        advantage = torch.tensor([sample.advantage for sample in part])[:, None]
        ratio = (log_probs_of(model, ids) - old).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        # Each token counts the same, in however long a rollout it stands.
        loss = -(torch.minimum(ratio * advantage, clipped * advantage) * mask).sum() / mask.sum().clamp(min=1)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        told["loss"] += loss.item() * len(part) / len(known)
        told["clipped"] += float(((ratio != clipped) * mask).sum())
        told["tokens"] += float(mask.sum())
    told["clipped"] /= max(told["tokens"], 1)
    return told


@torch.no_grad()
def _scored(model: TinyModel, sample: Sample) -> Sample:
    """With log-probs of the policy as it is now, which is all that who has only text can tell."""
    values = log_probs_of(model, torch.tensor([sample.ids]))[0]
    wrote = torch.tensor(sample.mask[1:])
    return replace(sample, log_probs=values[wrote].tolist())
