# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Makes what a training begins with: the tokenizer's folder, and weights that imitate for each seed.

    python -m examples.tiny_dapo.warm_start --model FOLDER --seed 0 --file FILE

The folder is of a tokenizer that is there.
"""

from __future__ import annotations

import argparse
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
from nemo_gym_prorl.sandbox.isolation.syscalls import end_with


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
    torch.manual_seed(seed)
    rng = random.Random(f"demonstrations {seed}")
    model = TinyModel(Shape(tokenizer.get_vocab_size()))

    def lessons() -> Iterator[tuple[list[int], list[bool]]]:
        while True:
            ids = lesson(demonstrate(Riddle.draw(rng), rng, CARELESS), tokenizer, rng, CARELESS.cuts)
            yield ids, policy_mask(ids, tokenizer)

    ticks = iter(track(range(steps), description=f"seed {seed}, imitation"))
    seconds = imitate(model, lessons(), steps, told=lambda step, loss: next(ticks, None))  # type: ignore[arg-type,return-value]
    part = file.with_suffix(".part")
    torch.save({"weights": model.state_dict(), "seconds": seconds}, part)
    part.replace(file)
    return seconds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="imitate the demonstrator")
    parser.add_argument("--model", required=True, type=Path, help="folder of the tokenizer")
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--file", required=True, type=Path, help="where the weights go")
    parser.add_argument("--parent", type=int, help="number of the process to end with")
    options = parser.parse_args()
    if options.parent is not None:
        end_with(options.parent)
    torch.set_num_threads(1)  # two that wait for each other on a busy machine are slower by far
    seconds = warm_start(Tokenizer.from_file(str(options.model / "tokenizer.json")), options.seed, options.file)
    print(f"seed {options.seed}: imitated for {seconds:.0f} s")


if __name__ == "__main__":
    main()
