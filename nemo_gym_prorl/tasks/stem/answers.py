# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The plain form of an answer, and of its words. Pure."""

from __future__ import annotations

import re
import unicodedata

from nemo_gym_prorl.tasks.final_answer import OPENED_BOX, closed_from


LONGEST_SYMBOL = 3
"""A word of so few letters may be a symbol."""

_SYMBOLS = re.compile(r"[0-9=<>^\\]|(?<![^\W_])[^\W\d_]!")
_INDEX = re.compile(r"_(?:\{([0-9]+)\}|(?=[0-9]))")
_SHORT_WORDS = frozenset(
    ("yes", "no", "not", "and", "or", "the", "of", "is", "it", "all", "one", "two", "six", "ten", "odd")
)
"""Such that nobody takes for symbols, but for ``NO`` or ``OR``."""
_WORD = re.compile(r"[^\W_]+|[^\w\s.,;:!?'\"()\[\]-]|(?<![^\W_])-|-(?![^\W_])")
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Fillers and variation selectors, which Unicode counts among letters and marks."""

_MINUS = str.maketrans(dict.fromkeys("−‒–—﹣-", "-"))
_TEXT = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|rm|mbox|operatorname|ce)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def without_box(answer: str) -> str:
    """An answer without the box that it wholly is; empty if the box is."""
    text = _undelimited(answer.strip())
    box = OPENED_BOX.match(text)
    content = None if box is None else closed_from(text, box.end())
    return content.strip() if box and content is not None and box.end() + len(content) + 1 == len(text) else answer


def plain(answer: str) -> str:
    """An answer as the checks read it: one line, ordinary characters, no delimiters of mathematics around it.

    Characters that look alike are the same here only if Unicode says so (full-width digits, ligatures): a Cyrillic A
    stays what it is, and matches nothing. Raised digits become a power, since ``10²`` is not 102.
    """
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^" + "".join(_SUPERSCRIPTS[char] for char in run[0]), answer)
    text = unicodedata.normalize("NFKC", text.translate(_MINUS)).translate(_MINUS)
    text = "".join(
        char
        for char in text
        if char.isspace() or (unicodedata.category(char)[0] != "C" and _UNSEEN.match(char) is None)
    )
    text = " ".join(text.split())
    before = None
    while before != text:
        before = text
        text = _undelimited(_TEXT.sub(r"\1", text).strip())
    return text


def words(text: str) -> str:
    """Text in the form in which it is compared: without punctuation, and in lower case where that means nothing.

    Signs stay, and so does the case of short words: ``Cl-`` is not ``Cl``, nor ``CO`` cobalt. With digits in it text
    is compared as it stands, but for spaces and how an index is set: 5 mW are not 5 MW, but H_2O is H2O.
    """
    text = plain(text)
    if _SYMBOLS.search(text):
        return _INDEX.sub(r"\1", "".join(text.split()))
    return " ".join(word.casefold() if _is_plain(word) else word for word in _WORD.findall(text))


def _is_plain(word: str) -> bool:
    """Whether its case means nothing."""
    return len(word) > LONGEST_SYMBOL or (word.casefold() in _SHORT_WORDS and not word.isupper())


def _undelimited(text: str) -> str:
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    for left, right in _DELIMITERS:
        inner = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right) and left not in inner:
            return inner.strip()
    return text
