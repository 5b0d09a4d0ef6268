# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted turns for science questions, for machines without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_gym_prorl.cli.scripted.text import Turn, call, script_of, turn
from nemo_gym_prorl.tasks.stem.problems import StemProblem


def script_for(problem: StemProblem, variant: str) -> dict[str, list[Turn]]:
    """Return the script of a variant.

    Raises:
        CallerError: the variant is unknown.
    """
    return script_of(VARIANTS, problem, variant)


def _oracle(problem: StemProblem) -> list[Turn]:
    return [
        turn("I look it up.", call("search", query=problem.question[:100])),
        turn("And note the answer.", call("python", code=f"answer = {problem.expected!r}")),
        turn("Is it still there?", call("python", code="print(answer)")),
        turn(f"The answer is \\boxed{{{problem.expected}}}."),
    ]


def _null(problem: StemProblem) -> list[Turn]:
    return [turn("I do not know.")]


def _guess(problem: StemProblem) -> list[Turn]:
    return [turn("Without looking anything up: \\boxed{0.123}")]


VARIANTS: Mapping[str, Callable[[StemProblem], list[Turn]]] = {"oracle": _oracle, "null": _null, "guess": _guess}
"""Turns by variant; only ``oracle`` may earn a reward."""
