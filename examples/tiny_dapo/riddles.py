# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tasks: find out, with a shell, a code of four characters that is somewhere in a folder. Pure.

Three kinds, each with a trap for a policy that does not look at what the shell says:

- **read**: a file holds the code. Trap: to answer without having looked.
- **follow**: a file names another one, which holds the code. Trap: to answer with that name.
- **repair**: a script fails, since a file that it prints is missing; the file is there under another name. Trap: to
  give up at the error.

Codes and names are drawn, so nothing but the shell can tell a code, and a held-out task is one that was never seen.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas


KINDS = ("read", "follow", "repair")
QUESTIONS = {"read": "What does %s say?", "follow": "Where does %s lead?", "repair": "What does running %s print?"}
GAVE_UP = "none"
MAX_TURN_TOKENS = 64
"""Longest turn; a right one takes a third of it."""


def draw_name(rng: random.Random) -> str:
    """A file's name: a letter and a digit, between which no tokenizer of ours has a merge."""
    return rng.choice(string.ascii_lowercase) + rng.choice(string.digits)


def draw_code(rng: random.Random) -> str:
    """A code, of two such pairs."""
    return draw_name(rng) + draw_name(rng)


@dataclass(frozen=True, slots=True)
class Riddle:
    """One task.

    Attributes:
        kind: one of :data:`KINDS`.
        name: the file that the question names.
        other: the file that it leads to; not there if it is to be repaired.
        code: the answer.
    """

    kind: str
    name: str
    other: str
    code: str

    @classmethod
    def draw(cls, rng: random.Random) -> Riddle:
        """Any riddle."""
        name = other = draw_name(rng)
        while other == name:
            other = draw_name(rng)
        return cls(rng.choice(KINDS), name, other, draw_code(rng))

    @property
    def question(self) -> str:
        """What the policy is asked."""
        return QUESTIONS[self.kind] % self.name

    @property
    def files(self) -> dict[str, str]:
        """What is in the folder: text by path."""
        code = self.code + "\n"
        return {
            "read": {self.name: code},
            "follow": {self.name: self.other + "\n", self.other: code},
            "repair": {self.name: f"cat {self.other}\n", f"{self.other}.bak": code},
        }[self.kind]

    def row(self) -> dict[str, Any]:
        """As a Gym dataset row."""
        params = {
            "input": [{"role": "user", "content": self.question}],
            "max_output_tokens": MAX_TURN_TOKENS,
            "tools": workbench_schemas(("bash",)),
        }
        riddle = {"kind": self.kind, "name": self.name, "other": self.other, "code": self.code}
        return {"responses_create_params": params, "riddle": riddle}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Riddle:
        """The riddle of a row.

        Raises:
            KeyError, TypeError: it has none.
        """
        riddle = cls(**row["riddle"])
        if riddle.kind not in KINDS:
            raise KeyError(riddle.kind)
        return riddle


def draw_riddles(count: int, seed: str, apart_from: frozenset[Riddle] = frozenset()) -> list[Riddle]:
    """So many different riddles, none of which, nor its code, is among others."""
    rng = random.Random(seed)
    codes = {riddle.code for riddle in apart_from}
    riddles: dict[str, Riddle] = {}
    while len(riddles) < count:
        riddle = Riddle.draw(rng)
        if riddle.code not in codes:
            riddles.setdefault(riddle.code, riddle)
    return [*riddles.values()]
