# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Comparison of two mathematical answers with ``math-verify`` and stricter rules; runs in a worker process.

The comparison may run forever or use all memory, because an answer is in effect a program for sympy. Therefore
comparisons run in workers (:mod:`nemo_gym_prorl.tasks.forked_workers`), and an exception ends the worker's child
process.

``math-verify`` only compares values, which is too lenient for a reward. These answers are wrong as well:

- answers of another structure, in another order, or with other members (:mod:`.shapes`);
- other units, words or bases (:mod:`.measures`, :mod:`.words`);
- unfinished computations (:mod:`.values`), and copies of the question;
- contradictions: ``6 = 5`` or ``6 \approx 5`` for 5;
- values that are only near, and relations without solutions (:mod:`.values`).

``math-verify`` is too strict with sets of numbers, which :mod:`.shapes` compares.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.antlr_parser import PSParser
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify.parser import get_last_eq, should_treat_as_complex

from nemo_gym_prorl.tasks.math import shapes
from nemo_gym_prorl.tasks.math.checker import ANOTHER_VALUE, Judgement, MathVerdict
from nemo_gym_prorl.tasks.math.measures import (
    Measure,
    in_cents,
    measure_of,
    nouns_of,
    stray_text,
    units_differ,
)
from nemo_gym_prorl.tasks.math.shapes import CLOSED, LIST, MATRIX, SET, TUPLE, VECTOR, Shape
from nemo_gym_prorl.tasks.math.spelling import (
    OPERATOR,
    canonical,
    has_adjacent_numbers,
    normalized,
    order_differs,
    with_binomials,
    with_named_symbols,
)
from nemo_gym_prorl.tasks.math.values import (
    contradicting_sides,
    extra_operations,
    in_final_form,
    leaves,
    numbers_equal,
    unfinished_part,
    values_equal,
)
from nemo_gym_prorl.tasks.math.words import (
    base_difference,
    congruence,
    label_and_rest,
    ratio_verdict,
    text_difference,
    time_difference,
)


# At a lower level, math-verify would log the answers of policies.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
# Gym's OmegaConf pins an old ANTLR. The LaTeX parser generated for this version lacks a method that percentages need.
if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    PSParser.AtomContext.FUNC_GAMMA = lambda self: None


APPROXIMATION_TOLERANCE = sympy.Float("1e-2")
"""Maximum relative difference between the value of an answer and an approximation in the same answer."""

# units=False: math-verify would read the letters of `2ab` as a unit; measures.py handles units.
_NORMALIZED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
)
# math-verify's own `parse` always sets lowercase_symbols, which makes R and r one symbol.
_CONVERTED = ConversionConfig(lowercase_symbols=False)
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)")
_NAME = re.compile(r"\s*(?![ei]\s*$)[a-zA-Z]+(?:_\{?\w+\}?)?\s*")
_DECIMAL = re.compile(r"\s*-?\d+(?:\.(\d+))?\s*")
_PERCENT = re.compile(r"\s*\\?%\s*$")

_WORST_FIRST = (MathVerdict.WRONG, MathVerdict.UNREADABLE, MathVerdict.CONTRADICTORY, MathVerdict.UNFINISHED)

_WARM_UP = (
    (r"\frac{1}{2}", "0.25"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\{1,2\}", r"(1,3]\cup\{5\}"),
    ("x=1,y=2", "2,1"),
    ("x>3", r"(3,\infty)"),
    ("y=2x+1", "2y=x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\sqrt{2}\pi", r"\ln 3 + \sin 2"),
)
"""Comparisons that make sympy import its modules before a worker forks its children."""


def warm_up() -> None:
    """Import all modules that comparisons need."""
    for expected, said in _WARM_UP:
        judge(expected, said)


def answer(job: Mapping[str, Any]) -> Judgement:
    """Return verdict and reason for an answer; called in a worker's child with the arguments of :func:`judge`."""
    if job["control"] and (unread_part := compare_with_itself(job["expected"])):
        return MathVerdict.UNREADABLE, f"can't read {unread_part}"
    return judge(job["expected"], job["said"], job["question"])


def judge(expected: str, said: str, question: str = "") -> Judgement:
    """Compare an answer with the expected answer.

    Args:
        expected: expected answer in LaTeX, with or without delimiters or boxes.
        said: the policy's answer without its box.
        question: text of the question; empty if unknown.

    Returns:
        Verdict and human-readable reason.
    """
    gold_text, text = (shapes.as_ascending_chain(normalized(answer)) for answer in (expected, said))
    if r"\binom" in gold_text + text:
        gold_text, text = with_binomials(gold_text), with_binomials(text)
    if not text:
        return MathVerdict.NO_ANSWER, "the box is empty"
    if canonical(text) == canonical(gold_text):
        return MathVerdict.RIGHT, "the same text"
    if len(OPERATOR.findall(canonical(text))) >= 2 and canonical(text) in canonical(question):
        return MathVerdict.UNFINISHED, "it repeats the question"
    judged = [
        _compared(gold, answer, question) for gold in shapes.readings(gold_text) for answer in shapes.readings(text)
    ]
    return next((one for one in judged if one[0] is MathVerdict.RIGHT), judged[-1])


def compare_with_itself(expected: str) -> str:
    """Compare an expected answer with itself; an exception is then the row's fault, not an answer's.

    Returns:
        Part of the expected answer that cannot be parsed; only the same text could be right. Empty if there is none.
    """
    for gold in _readings(normalized(expected))[:1]:
        values_equal(gold, gold)
    return unreadable_part(expected)


def unreadable_part(expected: str) -> str:
    """Return a part of an expected answer that cannot be parsed; empty if one reading of the answer can be parsed."""
    parts = [_unread(reading) for reading in shapes.readings(normalized(expected))]
    return "" if "" in parts else parts[0]


def _unread(text: str) -> str:
    """Return the first unparseable part of one reading (:func:`.shapes.readings`); empty if there is none."""
    cases = shapes.cases_of(text)
    shape = None if cases else shapes.shape_of(text) or shapes.split_chained_equation(text)
    parts = [value for value, _ in cases] if cases else list(shape.members) if shape else []
    if parts and parts != [text]:
        return next(filter(None, map(_unread, parts)), "")
    if (
        shapes.has_ellipsis(text)
        or order_differs(text, "")
        or text_difference(text, text, "") is not None
        or congruence(text)
        or (shapes.mentions_sets(text) and shapes.real_set(text, _number) is not None)
        or time_difference(text, text, "") is not None
    ):
        return ""
    value = measure_of(label_and_rest(text, text)[0], nouns_of(text)).value
    if stray := stray_text(value):
        return f"the words {stray!r} beside its value"
    return "" if _readings(value) or _readings(value.rpartition("=")[2]) else f"{value!r}"


def _compared(gold: str, text: str, question: str) -> Judgement:
    """Compare two answers of any structure, given with plain brackets (:func:`.shapes.plain_brackets`)."""
    if canonical(text) == canonical(gold):
        return MathVerdict.RIGHT, "the same text"
    if shapes.mentions_sets(gold) or shapes.mentions_sets(text):
        wanted, given = shapes.real_set(gold, _number), shapes.real_set(text, _number)
        if wanted is not None and given is not None:
            if not shapes.same_set(wanted, given, numbers_equal):
                return MathVerdict.WRONG, "another set of numbers"
            if shapes.has_unmerged_parts(wanted, given):
                return MathVerdict.UNFINISHED, "its sets are not united"
            return MathVerdict.RIGHT, "the same set of numbers"
    wanted_cases, given_cases = shapes.cases_of(gold), shapes.cases_of(text)
    if wanted_cases and given_cases and any(condition for _, condition in (*wanted_cases, *given_cases)):
        return _piecewise(wanted_cases, given_cases, question)
    if (one := congruence(gold)) and (other := congruence(text)):
        (name, residue, modulus), (other_name, other_residue, other_modulus) = one, other
        if modulus != other_modulus or (name and other_name and name != other_name):
            return MathVerdict.WRONG, "another congruence"
        numbers = [_number(residue), _number(other_residue)]
        if all(isinstance(number, sympy.Integer) for number in numbers):
            same_class = (numbers[0] - numbers[1]) % modulus == 0
            return (MathVerdict.RIGHT if same_class else MathVerdict.WRONG), "numbers modulo another"
        return _compared(residue, other_residue, question)
    if (trouble := text_difference(gold, text, question)) is not None:
        return (MathVerdict.WRONG, trouble) if trouble else (MathVerdict.RIGHT, "the same words")
    if shapes.has_ellipsis(gold) != shapes.has_ellipsis(text):
        return MathVerdict.WRONG, "only one of the two has an ellipsis"
    wanted_shape, given_shape = shapes.shape_of(gold), shapes.shape_of(text)
    if wanted_shape is None and (given_shape or shapes.split_chained_equation(text)):
        wanted_shape = shapes.split_chained_equation(gold)
    if given_shape is None and wanted_shape is not None:
        given_shape = shapes.split_chained_equation(text)
    if (wanted_shape is None) != (given_shape is None) and shapes.is_empty_set(gold):
        return _other_kind()
    if _is_set_of_one(wanted_shape) != _is_set_of_one(given_shape):
        if wanted_shape is not None and _is_set_of_one(wanted_shape) and (given_shape is None or given_shape.ordered):
            return _compared(wanted_shape.members[0], text, question)
        if given_shape is not None and _is_set_of_one(given_shape) and (wanted_shape is None or wanted_shape.ordered):
            return _compared(gold, given_shape.members[0], question)
    if wanted_shape is not None or given_shape is not None:
        return _shaped(wanted_shape or Shape(SET, (gold,)), given_shape or Shape(SET, (text,)), question)
    return _valued(gold, text, question)


def _piecewise(gold: list[tuple[str, str]], said: list[tuple[str, str]], question: str) -> Judgement:
    """Compare piecewise values in any order; "otherwise" is the complement of the other conditions."""
    if len(gold) != len(said):
        return MathVerdict.WRONG, f"{len(said)} cases for {len(gold)}"
    wanted, left, judged = _domains(gold), list(zip(said, _domains(said), strict=True)), list[Judgement]()
    for (value, condition), domain in zip(gold, wanted, strict=True):
        for one in left:
            (other, stated), other_domain = one
            if domain is not None and other_domain is not None:
                alike = shapes.same_set(domain, other_domain, numbers_equal)
            else:
                alike = _compared(condition, stated, question)[0] is MathVerdict.RIGHT
            if alike:
                left.remove(one)
                judged.append(_compared(value, other, question))
                break
        else:
            return MathVerdict.WRONG, "another condition"
    return _worst(judged)


def _domains(cases: list[tuple[str, str]]) -> list[shapes.RealSet | None]:
    found = [shapes.real_set(condition, _number) for _, condition in cases]
    for index, (_, condition) in enumerate(cases):
        others = [one for at, one in enumerate(found) if at != index]
        if condition.strip() in ("", "otherwise", "else", "elsewhere") and all(others):
            united = sympy.Union(*(one.value for one in others if one is not None))
            found[index] = shapes.RealSet(sympy.Complement(sympy.S.Reals, united), 1)
    return found


def _is_set_of_one(shape: Shape | None) -> bool:
    return shape is not None and shape.brackets == SET and len(shape.members) == 1


def _shaped(gold: Shape, said: Shape, question: str) -> Judgement:
    """Compare two answers with members; a single value counts as a set with one member."""
    if not gold.members or not said.members:
        return _other_kind() if gold.members or said.members else (MathVerdict.RIGHT, "both are empty")
    if len(gold.members) == 1 and len(said.members) == 1:
        return _compared(gold.members[0], said.members[0], question)
    names, given_names = _named(gold), _named(said)
    if names and given_names and not (_only_indices(names) and _only_indices(given_names)):
        if set(names) != set(given_names):
            return MathVerdict.WRONG, "other names"
        return _each(list(names.values()), [given_names[name] for name in names], question)
    if names and given_names and set(names) == set(given_names):
        return _each(list(names.values()), [given_names[name] for name in names], question)
    if given_names and not _only_indices(given_names) and gold.brackets in (LIST, TUPLE, CLOSED, VECTOR):
        # An expected list without names is in the order of the question's tuple of names, else alphabetical.
        order = shapes.names_in(question, set(given_names)) or sorted(given_names)
        return _each(gold.members, [given_names[name] for name in order], question)
    if names and not _only_indices(names):
        pairs = [shapes.name_and_value(one) for one in said.members]
        if any(pair and canonical(pair[0]) != name for pair, name in zip(pairs, names, strict=False)):
            return MathVerdict.WRONG, "other names"
        values = [pair[1] if pair else one for pair, one in zip(pairs, said.members, strict=True)]
        return _each(list(names.values()), values, question) if said.brackets != SET else _other_kind()
    if MATRIX in (gold.brackets, said.brackets) or (gold.columns and said.columns):
        alike = (gold.brackets, gold.columns) == (said.brackets, said.columns)
        return _each(gold.members, said.members, question) if alike else _other_kind()
    if gold.brackets == SET and said.brackets == SET:
        return _worst([_among(gold.members, said.members, question), _among(said.members, gold.members, question)])
    if gold.brackets in (LIST, SET) and said.brackets in (LIST, SET):
        return _matched(gold.members, said.members, question)
    if gold.brackets == LIST and said.ordered:
        return _each(gold.members, said.members, question)
    if gold.ordered and (said.ordered or given_names):
        return _each(gold.members, said.members, question)
    if gold.brackets == said.brackets or (gold.brackets == VECTOR and said.brackets == CLOSED):
        return _each(gold.members, said.members, question)
    return _other_kind()


def _other_kind() -> Judgement:
    return MathVerdict.WRONG, "another kind of answer: a list, a set, a tuple and an interval are not the same"


def _each(gold: Sequence[str], said: Sequence[str], question: str) -> Judgement:
    if len(gold) != len(said):
        return MathVerdict.WRONG, f"{len(said)} values for {len(gold)}"
    return _worst([_compared(one, other, question) for one, other in zip(gold, said, strict=True)])


def _matched(gold: Sequence[str], said: Sequence[str], question: str) -> Judgement:
    """Compare members in any order; each expected member matches one member of the answer."""
    if len(gold) != len(said):
        return MathVerdict.WRONG, f"{len(said)} values for {len(gold)}"
    left, found = list(gold), list[Judgement]()
    for one in said:
        index, judged = _best(left, one, question)
        if judged[0] is MathVerdict.WRONG:
            return MathVerdict.WRONG, "another value among them"
        left.pop(index)
        found.append(judged)
    return _worst(found)


def _among(gold: Sequence[str], said: Sequence[str], question: str) -> Judgement:
    return _worst([_best(gold, one, question)[1] for one in said])


def _best(gold: Sequence[str], one: str, question: str) -> tuple[int, Judgement]:
    """Return the index of the expected value that a value matches best, and the judgement."""
    judged: list[Judgement] = []
    for index, other in enumerate(gold):
        if canonical(other) == canonical(one):
            return index, (MathVerdict.RIGHT, "the same text")
    for index, other in enumerate(gold):
        judged.append(_compared(other, one, question))
        if judged[-1][0] is MathVerdict.RIGHT:
            return index, judged[-1]
    index = max(range(len(judged)), key=lambda at: _WORST_FIRST.index(judged[at][0]))
    return index, judged[index]


def _worst(judged: Sequence[Judgement]) -> Judgement:
    for verdict in _WORST_FIRST:
        for one in judged:
            if one[0] is verdict:
                return one
    return MathVerdict.RIGHT, "the same values"


def _named(shape: Shape) -> dict[str, str]:
    """Return the values of ``x = 2, y = 3`` or ``(x, y) = (2, 3)`` by name, in order; otherwise empty."""
    if shape.names:
        return dict(zip(shape.names, shape.members, strict=True))
    pairs = [shapes.name_and_value(member) for member in shape.members]
    named = {canonical(pair[0]): pair[1] for pair in pairs if pair is not None}
    return named if len(named) == len(shape.members) > 1 else {}


def _only_indices(names: dict[str, str]) -> bool:
    """Return whether names differ in their index only, as in ``x_1 = 2, x_2 = 3``."""
    return len({re.sub(r"_.*", "", name) for name in names}) == 1


def _valued(gold_text: str, text: str, question: str) -> Judgement:
    gold_text, text = label_and_rest(gold_text, text)
    if canonical(text) == canonical(gold_text):
        return MathVerdict.RIGHT, "the same text"
    if (trouble := time_difference(gold_text, text, question)) is not None:
        return (MathVerdict.WRONG, trouble) if trouble else (MathVerdict.RIGHT, "the same time")
    nouns = nouns_of(f"{question} {gold_text}")
    wanted, said = in_cents(measure_of(gold_text, nouns), measure_of(text, nouns))
    if units_differ(wanted, said):
        return MathVerdict.WRONG, "another unit"
    for value in (said.value, wanted.value):
        if stray := stray_text(value):
            return MathVerdict.UNREADABLE, f"the words {stray!r} beside the value are neither a unit nor a noun"
    if (judged := ratio_verdict(wanted, said, question, _number)) is not None:
        return judged
    if (
        (inner := shapes.inside_square_brackets(text))
        and not shapes.inside_square_brackets(gold_text)
        and _number(inner) is not None
    ):
        return _other_kind()
    if order_differs(wanted.value, said.value):
        return MathVerdict.WRONG, "another product: of vectors and operators the order matters"
    if trouble := base_difference(wanted.value, said.value, question):
        return MathVerdict.WRONG, trouble
    # Left of the equals sign a function may stay unevaluated, as in \tan\theta = 1/3.
    value = said.value if "=" in wanted.value else said.value.rpartition("=")[2]
    golds, answers = _readings(wanted.value), _readings(said.value) or _readings(value)
    is_number = bool(golds) and isinstance(golds[0], sympy.Basic) and not golds[0].free_symbols
    if left := extra_operations(wanted.value, value, number=is_number):
        return MathVerdict.UNFINISHED, f"it leaves {left} to be worked out"
    if not answers:
        return MathVerdict.UNREADABLE, "it cannot be parsed as mathematics"
    if not golds:
        return MathVerdict.WRONG, "not the expected text"
    if others := [*contradicting_sides(golds[0], answers[0]), *_approximations(said.value, answers[0])]:
        return MathVerdict.CONTRADICTORY, f"it also says {others[0]}"
    golds, answers = _meant(golds, answers, wanted, said, question)
    if not any(values_equal(gold, answer) for gold in golds for answer in answers):
        return MathVerdict.WRONG, ANOTHER_VALUE
    if left := unfinished_part(golds[0], answers[0]):
        return MathVerdict.UNFINISHED, left
    plain = canonical(said.value)
    if is_number and _is_rational(golds[0]) and plain in canonical(question) and not in_final_form(plain):
        return MathVerdict.UNFINISHED, "it repeats the question"
    return MathVerdict.RIGHT, "the same value"


def _meant(
    golds: list[Any], answers: list[Any], wanted: Measure, said: Measure, question: str
) -> tuple[list[Any], list[Any]]:
    """Return the values that both answers may have, given their percent signs and words like "million".

    A percent sign is a factor of 1/100, and "million" one of 10^6. A factor may also be 1 if the question asks for a
    number of percent or of millions.
    """
    asked = "percent" in question.lower() or "%" in question
    if len(golds) == len(answers):
        golds, answers = golds[:1], answers[:1]
    elif not asked:
        # Without a question, percents may be asked for, so an expected percentage keeps both values.
        golds, answers = golds[-1:] if question else golds, answers[-1:]
    if wanted.scale == said.scale:
        return golds, answers
    word = wanted.scale_word or said.scale_word
    kept = bool(word) and word in question.lower() and "cent" not in said.unit
    return _scaled(golds, wanted.scale, kept=kept), _scaled(answers, said.scale, kept=kept)


def _scaled(values: list[Any], scale: int, *, kept: bool) -> list[Any]:
    if scale == 1:
        return values
    scaled = [value * scale for value in values if isinstance(value, sympy.Expr)]
    return [*scaled, *values] if kept else scaled


def _readings(text: str) -> list[Any]:
    """Return the sympy expression of a text, and for a percentage also its hundredth; empty if unreadable."""
    head, *about = _APPROXIMATELY.split(text)
    head = (about[0] if about and (not head.strip() or _NAME.fullmatch(head)) else head).strip()
    bare = with_named_symbols(_PERCENT.sub("", head)).strip()
    if not bare or has_adjacent_numbers(bare):
        return []
    found = _parsed(bare)
    if not _PERCENT.search(head) or not found or not isinstance(found[0], sympy.Expr):
        return list(found)
    return [*found, found[0] / 100]


@lru_cache(maxsize=1000)
def _parsed(text: str) -> tuple[Any, ...]:
    latex = normalize_latex(f"\\boxed{{{text}}}", config=_NORMALIZED)
    for one in dict.fromkeys((latex, get_last_eq(latex))):
        with contextlib.suppress(Exception):  # the parser raises many types of errors
            return (
                latex2sympy(
                    one,
                    is_real=not should_treat_as_complex(one),
                    convert_degrees=False,
                    normalization_config=None,
                    conversion_config=_CONVERTED,
                ),
            )
    return ()


def _number(text: str) -> Any:
    found = _readings(text)
    return found[0] if len(found) == 1 and isinstance(found[0], sympy.Expr) and found[0].is_number else None


def _is_rational(expression: Any) -> bool:
    return all(isinstance(leaf, sympy.Rational | sympy.Float) for leaf in leaves(expression))


def _approximations(text: str, answer: Any) -> list[Any]:
    """Return the values after an answer's approximation signs that contradict the value before the signs."""
    value, wrong = next(leaves(answer)), []
    for said in _APPROXIMATELY.split(text)[1:]:
        tolerance = APPROXIMATION_TOLERANCE
        if (decimal := _DECIMAL.fullmatch(said)) and isinstance(value, sympy.Expr) and value.is_number and value != 0:
            # A rounded or truncated decimal is less than one unit of its last place away.
            tolerance = sympy.Rational(999_999, 10 ** (6 + len(decimal[1] or ""))) / abs(value)
        wrong += [part for part in _parsed(said) if not numbers_equal(value, part, tolerance)]
    return wrong
