# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: one letter, or one option in its own words. Pure.

Whoever names several has chosen none, and so has whoever names a letter and the words of another option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import takewhile

from nemo_gym_prorl.tasks.stem.answers import plain, words


_OPTION = re.compile(r"^\s*(?:[\(\[]([A-J])[\)\]]|([A-J])[.):])\s+(\S.*?)\s*$", re.MULTILINE)
_LABEL = re.compile(r"(?<![A-Za-z])(?:[\(\[]([A-J])[\)\]]|([A-J])[.):])(?=\s*\S)")
_LETTER = re.compile(r"(?:(?:option|choice|answer)\s*:?\s*)?[\(\[{]?\s*([A-Za-z])\s*[\)\]}]?[.:]?", re.IGNORECASE)
_LETTER_AND_WORDS = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:[\(\[]\s*([A-Za-z])\s*[\)\]]|([A-Za-z])\s*[\).:])[\s:.-]*(\S.*)",
    re.IGNORECASE,
)


def options_in(question: str) -> tuple[str, dict[str, str]] | None:
    """The question without its options, and these by letter; ``None`` if it has none, from A on, at its end."""
    found = list(_OPTION.finditer(question))
    options = {match[1] or match[2]: match[3] for match in found}
    if len(found) < 2 or list(options) != list("ABCDEFGHIJ")[: len(found)]:
        return None
    return question[: found[0].start()].strip(), options


def letters_in(question: str) -> str:
    """The letters of the options that a question shows, from A on, at least two; empty if it shows none."""
    shown = {found[1] or found[2] for found in _LABEL.finditer(question)}
    letters = "".join(takewhile(shown.__contains__, "ABCDEFGHIJ"))
    return letters if len(letters) > 1 else ""


def letter_of(answer: str) -> str | None:
    """The letter, if the answer is one and nothing else."""
    found = _LETTER.fullmatch(plain(answer))
    return found[1].upper() if found else None


def chosen(
    options: Mapping[str, str], answer: str, same: Callable[[str, str], bool] = lambda one, other: False
) -> str | None:
    """The letter of the option that an answer chooses; ``None`` if it does not choose exactly one.

    Args:
        options: text by letter.
        answer: the final answer.
        same: whether an option's text and what was said mean the same, where they differ as text (quantities).
    """
    if (letter := letter_of(answer)) is not None and letter in options:
        return letter
    said = plain(answer)
    if found := _LETTER_AND_WORDS.fullmatch(said):
        letter = (found[1] or found[2]).upper()
        if letter in options:
            return letter if _meant(options, found[3], same) == letter else None
    return _meant(options, said, same)


def _meant(options: Mapping[str, str], said: str, same: Callable[[str, str], bool]) -> str | None:
    ways: tuple[Callable[[str], bool], ...] = (
        lambda option: words(option) == words(said),
        lambda option: words(option).casefold() == words(said).casefold(),
        lambda option: same(option, said),
    )
    for means in ways:
        found = [letter for letter, option in options.items() if means(option)]
        if found:
            return found[0] if len(found) == 1 else None
    return None
