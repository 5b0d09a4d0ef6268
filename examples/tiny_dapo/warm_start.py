# SPDX-License-Identifier: Apache-2.0
"""Makes what a training begins with: the tokenizer's folder, and weights that imitate for each seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer

from examples.tiny_dapo.demonstrations import Carelessness, demonstrate, lesson
from examples.tiny_dapo.imitation import imitate
from examples.tiny_dapo.model import Shape, TinyModel
from examples.tiny_dapo.riddles import Riddle
from examples.tiny_dapo.vocabulary import make_tokenizer, policy_mask


TEXTS = 2000
STEPS = 3000
CARELESS = Carelessness()


def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer; the same for all seeds."""
    rng = random.Random("tokenizer")
    texts = []
    for _ in range(TEXTS):
        shown = demonstrate(Riddle.draw(rng), rng, CARELESS)
        texts += [shown.question, *filter(None, chain.from_iterable(shown.turns))]
    return make_tokenizer(texts, folder)


def warm_start(tokenizer: Tokenizer, seed: int, file: Path, steps: int = STEPS) -> float:
    """Weights that imitate the demonstrator, written to the file; returns seconds."""
    torch.set_num_threads(1)  # two that wait for each other on a busy machine are slower by far
    torch.manual_seed(seed)
    rng = random.Random(f"demonstrations {seed}")
    model = TinyModel(Shape(tokenizer.get_vocab_size()))

    def lessons() -> Iterator[tuple[list[int], list[bool]]]:
        while True:
            ids = lesson(demonstrate(Riddle.draw(rng), rng, CARELESS), tokenizer, rng, CARELESS.cuts)
            yield ids, policy_mask(ids, tokenizer)

    ticks = iter(track(range(steps), description=f"seed {seed}, imitation"))
    seconds = imitate(model, lessons(), steps, told=lambda step, loss: next(ticks, None))  # type: ignore[arg-type,return-value]
    torch.save({"weights": model.state_dict(), "seconds": seconds}, file)
    return seconds
