# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The check by rules, which comes first: it is quick, says why, and no answer can talk it round.

It may leave an answer undecided, which is then for a judge; a choice, a quantity or a formula of the same letters that
is plainly another one is wrong, and no judge is asked to be generous.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from nemo_gym_prorl.tasks.math.answers import canonical, tidy
from nemo_gym_prorl.tasks.math.checker import ANOTHER_VALUE, MathChecker, Verdict
from nemo_gym_prorl.tasks.stem import quantities
from nemo_gym_prorl.tasks.stem.answers import plain, words
from nemo_gym_prorl.tasks.stem.problems import Kind, Problem, chosen, letter_of
from nemo_gym_prorl.tasks.stem.quantities import Comparison


class Ruling(StrEnum):
    """What the rules say of an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Ruled:
    """A ruling and why, for a person."""

    ruling: Ruling
    why: str


_WRONG = frozenset({Verdict.UNFINISHED, Verdict.CONTRADICTORY, Verdict.TIMED_OUT})
"""What is wrong with these answers no judge should overlook."""


_COMMAND = re.compile(r"\\[A-Za-z]+")
_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega
Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega hbar
"""
_GREEK = frozenset(f"\\{name}" for name in _NAMES.split())


_CHEMICAL = re.compile(r"(?:(?:[A-Z][a-z]?|[)\]])[0-9]*|[(\[=-]|\\equiv){2,}(?:\^[0-9]?[+-])?")
_NAME = re.compile(r"(\\[A-Za-z]+|[^\W\d_])(?:_(?:\{[^{}]*\}|\w))?")
_OPERATORS = re.compile(r"\\nabla(?:\\(?:cdot|times)|\^2)?")


class Rules:
    """The check.

    Args:
        formulas: compares what is no plain quantity.
        tolerance: how far a measured value may be off, of the expected one.
    """

    def __init__(self, formulas: MathChecker, tolerance: float = quantities.RELATIVE_TOLERANCE) -> None:
        self._formulas = formulas
        self._tolerance = tolerance

    async def require_readable(self, expected: str) -> None:
        """See that an expected formula can be compared with something else than the same text.

        Raises:
            TaskError: it can't be read.
            InfrastructureError: ``verifier_error``, formulas can't be compared.
        """
        await self._formulas.require_gradeable(expected)

    async def check(self, problem: Problem, answer: str) -> Ruled:
        """Judge a final answer.

        Raises:
            TaskError: nobody could be graded, since the expected answer breaks what compares formulas.
            InfrastructureError: ``verifier_error``, formulas can't be compared.
        """
        if problem.kind is Kind.CHOICE:
            return self._choice(problem, answer)
        # Spaces are part of a unit: m s is not ms.
        same = plain if problem.kind is Kind.QUANTITY else _spaceless
        if same(answer) == same(problem.expected):
            return Ruled(Ruling.RIGHT, "the expected text")
        match problem.kind:
            case Kind.QUANTITY:
                return await self._quantity(problem, answer)
            case Kind.FORMULA:
                return await self._formula(problem, answer)
            case _:
                if words(answer) == words(problem.expected) and _marks(answer) == _marks(problem.expected):
                    return Ruled(Ruling.RIGHT, "the expected words")
                return Ruled(Ruling.UNDECIDED, "other words than expected")

    def _choice(self, problem: Problem, answer: str) -> Ruled:
        letter = chosen(problem.options, answer, self._same) if problem.options else letter_of(answer)
        if letter is None:
            return Ruled(Ruling.WRONG, "it does not choose exactly one option")
        right = letter == letter_of(problem.expected)
        return Ruled(Ruling.RIGHT if right else Ruling.WRONG, f"it chooses {letter}")

    async def _quantity(self, problem: Problem, answer: str) -> Ruled:
        expected, said = quantities.read(problem.expected), quantities.read(answer)
        assert expected is not None
        if another_name(problem.expected, answer):
            return Ruled(Ruling.UNDECIDED, "it has another name than the expected quantity")
        if said is None:
            # What compares formulas does not look at units.
            if expected.unit or _is_long(answer):
                return Ruled(Ruling.UNDECIDED, "it is no plain quantity")
            return await self._formula(problem, answer)
        match quantities.compare(expected, said, self._tolerance):
            case Comparison.SAME:
                return Ruled(Ruling.RIGHT, "the expected quantity")
            case Comparison.DIFFERENT:
                return Ruled(Ruling.WRONG, "another quantity")
            case Comparison.UNIT_MISSING:
                unit = expected.written or said.written
                if _names(problem.question, unit):
                    return Ruled(Ruling.RIGHT, f"the expected number, and the question names its unit, {unit}")
                return Ruled(Ruling.UNDECIDED, "the expected number; only one of the two has a unit")

    async def _formula(self, problem: Problem, answer: str) -> Ruled:
        if _is_chemical(bare := _bare(problem.expected)) and bare == _bare(answer):
            return Ruled(Ruling.RIGHT, "the expected formula of chemistry")
        checked = await self._formulas.check(problem.expected, f"\\boxed{{{answer}}}", problem.question)
        if checked.right and _apart(problem.expected, answer):
            return Ruled(Ruling.UNDECIDED, "formulae of chemistry, or of operators, that differ in their order")
        if checked.right:
            # A letter at the end may have been taken for a unit, and left out of the comparison.
            if _letters(answer) == _letters(problem.expected):
                return Ruled(Ruling.RIGHT, "an equal formula")
            return Ruled(Ruling.UNDECIDED, "an equal formula but for some letters")
        why = f"{checked.verdict}: {checked.detail}"
        wrong = checked.verdict in _WRONG or (checked.detail == ANOTHER_VALUE and _same_terms(problem, answer))
        return Ruled(Ruling.WRONG if wrong else Ruling.UNDECIDED, why)

    def _same(self, option: str, said: str) -> bool:
        if canonical(tidy(option)) == canonical(tidy(said)):
            return True
        one, other = quantities.read(option), quantities.read(said)
        return one is not None and other is not None and self._compare(one, other) is Comparison.SAME

    def _compare(self, one: quantities.Quantity, other: quantities.Quantity) -> Comparison:
        return quantities.compare(one, other, self._tolerance)


def _spaceless(text: str) -> str:
    return "".join(plain(text).split())


def another_name(expected: str, answer: str) -> bool:
    """Whether both name a quantity, and not the same; of a longer formula on the left nothing is known."""
    names = [_spaceless(text).partition("=")[0] if "=" in text else "" for text in (expected, answer)]
    return all(names) and names[0] != names[1]


def _marks(text: str) -> list[str]:
    return re.findall(r"'|\\prime(?![a-z])", text)


def _apart(expected: str, answer: str) -> bool:
    """Whether one is a formula whose parts do not commute, and the other is not the same text."""
    texts = [_bare(text) for text in (expected, answer)]
    operators = [_OPERATORS.findall(text) for text in texts]
    return (any(map(_is_chemical, texts)) and texts[0] != texts[1]) or operators[0] != operators[1]


def _bare(formula: str) -> str:
    return re.sub(r"[\s{}_]", "", plain(formula).rpartition("=")[2])


def _is_chemical(bare: str) -> bool:
    return _CHEMICAL.fullmatch(bare) is not None and re.search(r"[2-9]", bare) is not None


def _letters(formula: str) -> set[str]:
    """Names of variables on the right side."""
    right = plain(tidy(formula)).rpartition("=")[2]
    letters = set(re.findall(r"[^\W\d_]", _COMMAND.sub(" ", right))) - {"e"}  # which stands for exp as well
    return letters | (set(_COMMAND.findall(right)) & _GREEK)


def _same_terms(problem: Problem, answer: str) -> bool:
    """Whether nothing but mathematics is between an answer and the expected one: it uses no other names (but for
    their case), so it is no other way to call something, and no measured value is expected, which may be rounded."""
    if problem.kind is Kind.QUANTITY:
        expected = quantities.read(problem.expected)
        return expected is not None and expected.digits is None and not _names_in(answer)
    if any(_is_chemical(_bare(text)) for text in (problem.expected, answer)):
        return False
    names, said = _names_in(problem.expected), _names_in(answer)
    return said <= names or {name.casefold() for name in said} == {name.casefold() for name in names}


def _names_in(formula: str) -> set[str]:
    """Names of variables on the right side, with their indices, and of logarithms, whose base not everybody says."""
    found = _NAME.finditer(plain(formula).rpartition("=")[2])
    kept = _GREEK | {r"\ln", r"\log", r"\lg"}
    return {re.sub(r"[{}]", "", name[0]) for name in found if name[1] in kept or name[1][0] != "\\"}


def _is_long(answer: str) -> bool:
    """Prose rather than a formula."""
    return len(re.findall(r"[A-Za-z]{4,}", re.sub(r"\\[A-Za-z]+", " ", answer))) > 2


def _names(question: str, unit: str) -> bool:
    """The question asks for the number in this unit."""
    spaceless, asked = _spaceless(unit), _spaceless(question)
    if len(spaceless) > 2:
        return spaceless in asked
    return bool(spaceless) and re.search(rf"(?:in|\(|\[){re.escape(spaceless)}(?![A-Za-z])", asked) is not None
