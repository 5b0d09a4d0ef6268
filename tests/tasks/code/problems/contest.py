# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A programming problem: makes its inputs, answers them by brute force, and has a solution of another kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from nemo_gym_prorl.tasks.code.rows import Case, Problem


TESTS = 24


@dataclass(frozen=True)
class Contest:
    """A problem.

    Attributes:
        name: its name.
        make: an input, small enough for brute force.
        answer: the output by brute force.
        solution: a right program, which reads as policies write.
        mistakes: pieces of the solution and what to put in their place: each makes a wrong program.
        checker: how outputs are compared.
    """

    name: str
    make: Callable[[Random], str]
    answer: Callable[[str], object]
    solution: str
    mistakes: Sequence[tuple[str, str]]
    checker: str = "tokens"

    @property
    def problem(self) -> Problem:
        """With tests."""
        random = Random(self.name)
        inputs = [self.make(random) for _ in range(TESTS)]
        tests = [Case(given, f"{self.answer(given)}\n") for given in inputs]
        return Problem(tests, None, {"kind": self.checker, "absolute": 1e-6, "relative": 1e-6})

    @property
    def mutants(self) -> list[str]:
        """Wrong programs."""
        for old, _ in self.mistakes:
            assert self.solution.count(old) == 1, (self.name, old)
        return [self.solution.replace(old, new) for old, new in self.mistakes]


def ints(text: str) -> list[int]:
    """All numbers of a text."""
    return [int(word) for word in text.split()]


def joined(values: object) -> str:
    """Values on a line."""
    return " ".join(map(str, values))  # type: ignore[call-overload]


def listing(random: Random, most: int = 9, low: int = -9, high: int = 9, least: int = 1) -> str:
    """A line with a length, and one with so many numbers."""
    size = random.randint(least, most)
    return f"{size}\n{joined(random.randint(low, high) for _ in range(size))}\n"


def word(random: Random, most: int = 8, letters: str = "abc", least: int = 1) -> str:
    """A word of few different letters."""
    return "".join(random.choice(letters) for _ in range(random.randint(least, most)))
