# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the policy imitates before it learns by itself: somebody who knows the tools and is careless. Pure.

Demonstrations are written down, with what the sandbox would say (``tests/examples`` holds them against a real one). At
each decision the demonstrator may fall into the trap of the riddle's kind or mistake a name, so that about two of
five demonstrations end well. The policy learns all of that: what is right is among what it does, and which of it is
right it has to find out.

A token sequence that the tokenizer would not make is something that large models sample now and then. So here some of
the policy's turns are cut at a random place and tokenised in two parts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from examples.tiny_dapo.riddles import GAVE_UP, Riddle, draw_code, draw_name
from examples.tiny_dapo.vocabulary import ASSISTANT, END, TOOL, USER, call


@dataclass(frozen=True, slots=True)
class Carelessness:
    """Probabilities of the demonstrator's mistakes."""

    no_look: float = 0.35
    takes_name_for_code: float = 0.45
    gives_up: float = 0.5
    wrong_name: float = 0.05
    cuts: float = 0.15
    """Of a turn to be tokenised in two parts."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation: question, and turns with what each observed (nothing behind the last)."""

    question: str
    turns: list[tuple[str, str]]

    def text(self) -> str:
        """As the chat template writes it."""
        parts = [USER + self.question + END]
        for said, seen in self.turns:
            parts.append(ASSISTANT + said + END)
            if seen:
                parts.append(TOOL + seen + END)
        return "".join(parts)


def demonstrate(riddle: Riddle, rng: random.Random, careless: Carelessness) -> Demonstration:
    """One try at a riddle."""
    turns: list[tuple[str, str]] = []

    def end(answer: str) -> Demonstration:
        turns.append((answer, ""))
        return Demonstration(riddle.question, turns)

    def run(command: str, output: str, status: int = 0) -> None:
        turns.append((call(command), f"{output}\n[exit code: {status}]" if output else f"[exit code: {status}]"))

    def missing(program: str, name: str) -> None:
        if program == "sh":
            run(f"sh {name}", f"sh: 0: cannot open {name}: No such file", 2)
        else:
            run(f"cat {name}", f"cat: {name}: No such file or directory", 1)

    if rng.random() < careless.no_look:
        return end(draw_code(rng))
    program = "sh" if riddle.kind == "repair" else "cat"
    if rng.random() < careless.wrong_name:
        missing(program, draw_name(rng))
        return end(GAVE_UP)
    if riddle.kind == "read":
        run(f"cat {riddle.name}", riddle.code)
        return end(riddle.code)
    if riddle.kind == "follow":
        run(f"cat {riddle.name}", riddle.other)
        if rng.random() < careless.takes_name_for_code:
            return end(riddle.other)
        run(f"cat {riddle.other}", riddle.code)
        return end(riddle.code)
    run(f"sh {riddle.name}", f"cat: {riddle.other}: No such file or directory", 1)
    if rng.random() < careless.gives_up:
        return end(GAVE_UP)
    run(f"mv {riddle.other}.bak {riddle.other}", "")
    run(f"sh {riddle.name}", riddle.code)
    return end(riddle.code)


def lesson(demonstration: Demonstration, tokenizer: Tokenizer, rng: random.Random, cuts: float) -> list[int]:
    """The demonstration's tokens, some of the policy's turns tokenised in two parts."""
    ids: list[int] = []

    def add(text: str) -> None:
        ids.extend(tokenizer.encode(text, add_special_tokens=False).ids)

    add(USER + demonstration.question + END)
    for said, seen in demonstration.turns:
        add(ASSISTANT)
        cut = rng.randrange(1, len(said)) if rng.random() < cuts else len(said)
        add(said[:cut])
        add(said[cut:])
        add(END)
        if seen:
            add(TOOL + seen + END)
    return ids
