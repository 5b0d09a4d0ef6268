# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Answers that are words, options' letters, or numbers with a base. Pure, and about text only.

``math-verify`` reads a word as the product of its letters, so that SEAT is EAST. Which is meant by ``ab`` is told by
the question: where each of its letters is a symbol there, it is a product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


_COMMAND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname)(?![a-zA-Z])")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s\-'.,!?]+[^\W\d_]+)*[\s.!?]*")
_DIFFERENCE = re.compile(r"(?<![^\W\d_])[^\W\d_]{1,2}\s*-|-\s*[^\W\d_]{1,2}(?![^\W\d_])")
_SYMBOLS = re.compile(r"\w*[a-z][A-Z]\w*|(?:(?![aeiouyAEIOUY])[^\W\d_]){2,4}")
"""Letters that are no word as they stand: of both cases, or without a vowel."""

_MATHEMATICAL = re.compile(
    r"(?i)(?<![a-z])(?:pi|infinity|inf|oo|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|real|reals|empty|"
    r"no\s+(?:real\s+)?solutions?)(?![a-z])"
)
_SMALL = frozenset(("the", "a", "an"))
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_LABELLED = re.compile(
    r"\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?\s*([A-H])\s*[).:]*\s*\}|\(([A-H])\)|([A-H])[).:])"
    r"(?:\s|\\[,;:! ]|~|\\q?quad)*(?P<rest>\S.*)?",
    re.DOTALL,
)
_OPTION = re.compile(r"(?i)(?<![a-z\\])(?:option|choice)\s+(?=\(?[A-H](?![a-zA-Z]))")
_BASED = re.compile(r"\(?\s*([0-9A-Fa-f]+)\s*\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d+|[a-z]+)\s*\}?\}?")
_GAP = r"(?:\s|\\[,;:! ])*"
_MODULO = r"(?:\\[pb]?mod|\\(?:text|mathrm)\s*\{\s*\(?\s*mod\s*\}|(?<![a-zA-Z])mod)(?![a-zA-Z])"
_CONGRUENCE = re.compile(
    rf"(?:(?P<name>[a-zA-Z])\s*\\equiv)?\s*(?P<residue>[^=,]+?){_GAP}\(?\s*{_MODULO}{_GAP}"
    r"\{?\s*(?P<modulus>[1-9]\d{0,8})\s*\}?\s*(?:\)|\\text\{\s*\)\s*\})?"
)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16,
}  # fmt: skip


def another_text(expected: str, said: str, question: str) -> str | None:
    """What is wrong with an answer where words are expected; empty if nothing is, ``None`` if no words are."""
    wanted = _plain(expected)
    if _WORDS.fullmatch(wanted) is None or len(re.sub(r"\W", "", wanted)) < 2 or _MATHEMATICAL.search(wanted):
        return None
    if _COMMAND.search(expected) is None:
        if _DIFFERENCE.search(wanted) or (wanted.isalpha() and _is_product(wanted, question)):
            return None
        if _SYMBOLS.fullmatch(wanted) and wanted.casefold() == _plain(said).casefold() and wanted != _plain(said):
            return "letters in another case"
    return "" if _listed(wanted) == _listed(_plain(said)) else "other words than expected"


def label_and_rest(expected: str, said: str) -> tuple[str, str]:
    r"""Both without the letter of an option before the option, as in ``\textbf{(A)} 5``; where only a letter is
    expected, the letters."""
    expected, said = (_OPTION.sub("", text) for text in (expected, said))
    wanted, given = _LABELLED.fullmatch(expected), _LABELLED.fullmatch(said)
    if given is None and wanted is None:
        return expected, said
    wanted_letter, given_letter = _letter(wanted) or _alone(expected), _letter(given) or _alone(said)
    if wanted_letter and given_letter and (wanted_letter != given_letter or not (wanted and wanted["rest"])):
        return wanted_letter, given_letter
    if wanted_letter and given_letter and not (given and given["rest"]):
        return wanted_letter, given_letter
    return (
        wanted["rest"] if wanted and wanted["rest"] else expected,
        given["rest"] if given and given["rest"] else said,
    )


@dataclass(frozen=True, slots=True)
class Congruence:
    """``x \\equiv 3 \\pmod 7``; the name may be empty."""

    name: str
    residue: str
    modulus: int


def congruence(text: str) -> Congruence | None:
    """The congruence that a text is; ``None`` if it is none."""
    found = _CONGRUENCE.fullmatch(text.strip())
    return found and Congruence(found["name"] or "", found["residue"], int(found["modulus"]))


def another_base(expected: str, said: str, question: str) -> str:
    """What is wrong with the base of a number, where one has one; empty if nothing is."""
    wanted, given = _BASED.fullmatch(expected), _BASED.fullmatch(said)
    bases = [_base_of(found) for found in (wanted, given)]
    if bases == [None, None]:
        return ""
    if None not in bases:
        return "" if bases[0] == bases[1] else "another base"
    base = bases[0] or bases[1]
    return "" if base == 10 or base in _bases_in(question) else f"only one of them is in base {base}"


def _base_of(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    return int(found[2]) if found[2].isdigit() else _BASES.get(found[2])


def _bases_in(question: str) -> set[int]:
    text = question.lower()
    named = {base for word, base in _BASES.items() if base > 10 or word in ("binary", "octal") if word in text}
    for found in re.finditer(r"base[\s$\-{]*(\d+|[a-z]+)", text):
        named.add(int(found[1]) if found[1].isdigit() else _BASES.get(found[1], 0))
    return named | {int(found[1]) for found in re.finditer(r"\d_\{?(\d+)\}?", text)}


def _letter(found: re.Match[str] | None) -> str:
    return next(filter(None, found.groups()[:3]), "") if found else ""


def _alone(text: str) -> str:
    found = re.fullmatch(
        r"\(?\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(?([A-H])\)?\s*\}?\s*\)?\.?", text.strip()
    )
    return found[1] if found else ""


def _plain(text: str) -> str:
    text = re.sub(r"\\[,;:! ]|~|\\q?quad", " ", _COMMAND.sub(" ", text))
    return re.sub(r"[{}$]", "", text).strip()


def _listed(text: str) -> list[str]:
    """Words of each of several answers, in any order. A minus stays; an article goes, if it stands at a word and is
    no option."""
    parts = (re.findall(r"[^\W_]+|(?<!\w)-(?=\w)", part) for part in re.split(r"[,;]|\band\b", text.casefold()))
    return sorted(filter(None, ("".join([word for word in words if word not in _SMALL] or words) for words in parts)))


def _is_product(letters: str, question: str) -> bool:
    formulas = " ".join(filter(None, (part for found in _FORMULA.finditer(question) for part in found.groups())))
    symbols = set(re.sub(r"\\[a-zA-Z]+", " ", formulas))
    return len(letters) <= 4 and set(letters) <= symbols
