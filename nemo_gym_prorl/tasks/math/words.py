# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Answers that are words, letters of options, numbers with a base, congruences, ratios or times of day. Pure.

``math-verify`` reads a word as the product of its letters, so SEAT would equal EAST. The question decides what ``ab``
means: a product, if each letter is a symbol in the question.

``math-verify`` reads a colon as a division, so ``10:30`` would equal a third. Here ``10:30`` is a time of day if any
of these holds, and the question asks for no ratio:

- the answer has "a.m." or "p.m.", or the question asks for a time;
- the numbers have a common factor, or the second begins with 0, which is unusual for a ratio.

Ratios are equal if all their terms are proportional, as in ``2:4:6`` and ``1:2:3``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import gcd
from typing import Any

import sympy

from nemo_gym_prorl.tasks.math.checker import Judgement, MathVerdict
from nemo_gym_prorl.tasks.math.measures import Measure
from nemo_gym_prorl.tasks.math.shapes import split
from nemo_gym_prorl.tasks.math.spelling import canonical
from nemo_gym_prorl.tasks.math.values import extra_operations, in_final_form, numbers_equal, unfinished_part


_COMMAND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname)(?![a-zA-Z])")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s\-'.,!?]+[^\W\d_]+)*[\s.!?]*")
_DIFFERENCE = re.compile(r"(?<![^\W\d_])[^\W\d_]{1,2}\s*-|-\s*[^\W\d_]{1,2}(?![^\W\d_])")
_SYMBOLS = re.compile(r"\w*[a-z][A-Z]\w*|(?:(?![aeiouyAEIOUY])[^\W\d_]){2,4}")
"""Letters that form no word, because they mix cases or have no vowel."""

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


def text_difference(expected: str, said: str, question: str) -> str | None:
    """Return how an answer differs from expected words; empty if equal, ``None`` if no words are expected."""
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
    r"""Return both answers without the letter before an option's text, as in ``\textbf{(A)} 5``.

    Both letters are returned instead if the letters differ, or if one of the answers is only a letter.
    """
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


def congruence(text: str) -> tuple[str, str, int] | None:
    """Return name (may be empty), residue and modulus of ``x \\equiv 3 \\pmod 7``; ``None`` for any other text."""
    found = _CONGRUENCE.fullmatch(text.strip())
    return found and (found["name"] or "", found["residue"], int(found["modulus"]))


def base_difference(expected: str, said: str, question: str) -> str:
    """Return how the bases of two numbers differ; empty without a difference.

    A base that only one number has must be 10 or occur in the question.
    """
    wanted, given = _BASED.fullmatch(expected), _BASED.fullmatch(said)
    bases = [_base_of(found) for found in (wanted, given)]
    if bases == [None, None]:
        return ""
    if None not in bases:
        return "" if bases[0] == bases[1] else "another base"
    base = bases[0] or bases[1]
    return "" if base == 10 or base in _bases_in(question) else f"only one of the two is in base {base}"


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
    """Return the sorted items of a list, each as joined words. A minus is kept; articles before words are dropped."""
    parts = (re.findall(r"[^\W_]+|(?<!\w)-(?=\w)", part) for part in re.split(r"[,;]|\band\b", text.casefold()))
    return sorted(filter(None, ("".join([word for word in words if word not in _SMALL] or words) for words in parts)))


def _is_product(letters: str, question: str) -> bool:
    formulas = " ".join(filter(None, (part for found in _FORMULA.finditer(question) for part in found.groups())))
    symbols = set(re.sub(r"\\[a-zA-Z]+", " ", formulas))
    return len(letters) <= 4 and set(letters) <= symbols


_AROUND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf)|mbox)\s*\{|[{}\s~]|\\[,;:! ]")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:([ap])\.?m\.?)?", re.IGNORECASE)
_RATIO_ASKED = re.compile(r"\b(?:ratios?|proportions?|odds|scale)\b", re.IGNORECASE)
_RATIO_SHOWN = re.compile(r"\b(?:[A-Z]{2}\s*:\s*[A-Z]{2}|[a-zA-Z]\s*:\s*[a-zA-Z])\b")
_TIME_ASKED = re.compile(r"\b(?:what|which) time\b|\bclock\b|\d\s*[ap]\.?m\b", re.IGNORECASE)
_BRACKETS = re.compile(r"^\s*\((.*)\)\s*$")
_LOWEST_ASKED = re.compile(r"simplif|simplest|lowest|reduce", re.IGNORECASE)


def time_difference(expected: str, said: str, question: str) -> str | None:
    """Return how times of day differ; empty if equal, ``None`` if the answers are not to be compared as times."""
    wanted, given = (_CLOCK.fullmatch(_AROUND.sub("", text)) for text in (expected, said))
    half_days = [found[3].lower() for found in (wanted, given) if found and found[3]]
    if wanted is None or (_asks_for_ratio(question) and not wanted[3]):
        return "a time of day" if half_days else None
    lowest = gcd(int(wanted[1]), int(wanted[2])) == 1 and not wanted[2].startswith("0")
    if lowest and not half_days and not _TIME_ASKED.search(question):
        return None
    same = given is not None and all(int(wanted[part]) == int(given[part]) for part in (1, 2))
    return "" if same and len(set(half_days)) < 2 else "another time"


def ratio_verdict(wanted: Measure, said: Measure, question: str, number: Callable[[str], Any]) -> Judgement | None:
    """Return the judgement on a ratio; ``None`` if the answers are to be compared as values, for example as fractions.

    Args:
        wanted, said: expected answer and the policy's answer.
        number: parser of a real number, which returns ``None`` for other texts.
    """
    golds, givens = _terms(wanted.value), _terms(said.value)
    gold, given = ([number(term) for term in terms] for terms in (golds, givens))
    if len(given) > 1 and len(gold) == 1 and gold[0] is not None and not _asks_for_ratio(question):
        return MathVerdict.WRONG, "a ratio is no number"
    if len(gold) != len(given):
        return (MathVerdict.WRONG, "another ratio") if max(len(gold), len(given)) > 2 else None
    if len(gold) == 1 or None in gold or None in given:
        return None
    # Terms are compared one by one, since 0:0 would be proportional to every ratio.
    if not all(one.is_finite and not one.is_zero for one in (*gold, *given)):
        alike = all(numbers_equal(one, other) for one, other in zip(gold, given, strict=True))
        return (MathVerdict.RIGHT, "the same ratio") if alike else (MathVerdict.WRONG, "another ratio")
    in_lowest_terms = all(one.is_Integer for one in given) and sympy.igcd(*given) == 1
    if not in_lowest_terms and (_LOWEST_ASKED.search(question) or canonical(said.value) in canonical(question)):
        return MathVerdict.UNFINISHED, "it is not in lowest terms"
    if len(gold) == 2:
        return None
    if wanted.scale != said.scale or not all(
        numbers_equal(one / gold[0], other / given[0]) for one, other in zip(gold[1:], given[1:], strict=True)
    ):
        return MathVerdict.WRONG, "another ratio"
    worked_out = (
        in_final_form(canonical(text)) if one.is_rational else not extra_operations(":".join(golds), text, number=True)
        for one, text in zip(given, givens, strict=True)
    )
    if unfinished_part(sympy.Tuple(*gold), sympy.Tuple(*given)) or not all(worked_out):
        return MathVerdict.UNFINISHED, "its terms are not worked out"
    return MathVerdict.RIGHT, "the same ratio"


def _terms(value: str) -> list[str]:
    """Return the terms of a ratio; any other value, including an equation, as its only term."""
    if "=" in value:
        return [value]
    for text in (value, *_BRACKETS.findall(value)):
        if len(terms := split(text, (":",))) > 1 and all(terms):
            return terms
    return [value]


def _asks_for_ratio(question: str) -> bool:
    return (_RATIO_ASKED.search(question) or _RATIO_SHOWN.search(question)) is not None
