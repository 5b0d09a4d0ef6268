# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Whether an answer is the expected one, by ``math-verify``, and where that is too generous.

It may run for ever or eat all memory: answers are other people's programs for sympy. So it runs in workers
(:mod:`nemo_gym_prorl.tasks.workers`), and what it raises ends the worker's child.

``math-verify`` compares values. That is not enough for a reward, so these are told from the right answer:

- what is of another kind, in another order, or has other members (:mod:`.shapes`);
- other units, words and bases (:mod:`.measures`), and words of the same letters;
- what is left to be worked out (:mod:`.values`), or is as it stands in the question;
- what contradicts itself: ``6 = 5`` or ``6 \approx 5`` for 5;
- what is only near, and relations without solutions (:mod:`.values`).

And it is too strict with sets of numbers (:mod:`.shapes`).
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
from nemo_gym_prorl.tasks.math.checker import ANOTHER_VALUE, Judged, Verdict
from nemo_gym_prorl.tasks.math.measures import (
    Measure,
    another_unit,
    in_cents,
    measure_of,
    nouns_of,
    stray_text,
)
from nemo_gym_prorl.tasks.math.shapes import CLOSED, LIST, MATRIX, SET, TUPLE, VECTOR, Shape
from nemo_gym_prorl.tasks.math.spelling import (
    another_order,
    canonical,
    combinations,
    restates,
    side_by_side,
    symbols,
    tidy,
)
from nemo_gym_prorl.tasks.math.values import (
    computing,
    in_final_form,
    leaves,
    near_numbers,
    other_sides,
    same,
    unfinished,
)
from nemo_gym_prorl.tasks.math.words import (
    another_base,
    another_text,
    another_time,
    congruence,
    label_and_rest,
    ratio_verdict,
)


# Its warnings repeat what policies say.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
# With the ANTLR that Gym's configuration library allows, its generated parser lacks this method, and no percentage
# can be read.
if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    PSParser.AtomContext.FUNC_GAMMA = lambda self: None


ABOUT = sympy.Float("1e-2")
"""Relative difference of a value from what an answer says that it is about."""

# Units are looked at here; math-verify would take the letters of `2ab` for one.
_NORMALIZED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
)
# Its `parse` has no way to say this: to it R and r are one letter.
_CONVERTED = ConversionConfig(lowercase_symbols=False)
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)")
_NAME = re.compile(r"\s*(?![ei]\s*$)[a-zA-Z]+(?:_\{?\w+\}?)?\s*")
_DECIMAL = re.compile(r"\s*-?\d+(?:\.(\d+))?\s*")
_PERCENT = re.compile(r"\s*\\?%\s*$")

_WORST_FIRST = (
    Verdict.WRONG,
    Verdict.UNREADABLE,
    Verdict.CONTRADICTORY,
    Verdict.UNFINISHED,
)


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
"""Sympy imports on first use; a child should find it done."""


def warm_up() -> None:
    """Have sympy import all that comparisons take."""
    for expected, said in _WARM_UP:
        judge(expected, said)


def answer(job: Mapping[str, Any]) -> Judged:
    """What a worker is asked: the verdict on an answer, and why."""
    if job["control"] and (unread_part := try_out(job["expected"])):
        return Verdict.UNREADABLE, f"can't read {unread_part}"
    return judge(job["expected"], job["said"], job["question"])


def judge(expected: str, said: str, question: str = "") -> Judged:
    """What an answer is worth.

    Args:
        expected: the right answer, in LaTeX, with or without delimiters or boxes.
        said: the answer, without its box.
        question: what was asked.

    Returns:
        The verdict, and why, for a person.
    """
    gold_text, text = (shapes.ascending(tidy(answer)) for answer in (expected, said))
    if r"\binom" in gold_text + text:
        gold_text, text = combinations(gold_text), combinations(text)
    if not text:
        return Verdict.NO_ANSWER, "the box is empty"
    if canonical(text) == canonical(gold_text):
        return Verdict.RIGHT, "the same text"
    if restates(text, question):
        return Verdict.UNFINISHED, "it stands in the question"
    judged = [
        _compared(gold, answer, question) for gold in shapes.readings(gold_text) for answer in shapes.readings(text)
    ]
    return next((one for one in judged if one[0] is Verdict.RIGHT), judged[-1])


def try_out(expected: str) -> str:
    """Compare an expected answer with itself, as far as it is mathematics: what this raises, no answer is to blame
    for.

    Returns:
        What of it can't be read, so that no answer but the same text could be right; empty if all can.
    """
    for gold in _readings(tidy(expected))[:1]:
        same(gold, gold)
    return unread(expected)


def unread(expected: str) -> str:
    """What of an expected answer can't be read; empty if all can."""
    parts = [_unread(reading) for reading in shapes.readings(tidy(expected))]
    return "" if "" in parts else parts[0]


def _unread(text: str) -> str:
    """The first part of an expected answer that can't be read; empty if there is none."""
    cases = shapes.cases_of(text)
    shape = None if cases else shapes.shape_of(text) or shapes.chained(text)
    parts = [value for value, _ in cases] if cases else list(shape.members) if shape else []
    if parts and parts != [text]:
        return next(filter(None, map(_unread, parts)), "")
    if (
        shapes.goes_on(text)
        or another_order(text, "")
        or another_text(text, text, "") is not None
        or congruence(text)
        or (shapes.speaks_of_sets(text) and shapes.real_set(text, _number) is not None)
        or another_time(text, text, "") is not None
    ):
        return ""
    value = measure_of(label_and_rest(text, text)[0], nouns_of(text)).value
    if stray := stray_text(value):
        return f"the words {stray!r} beside its value"
    return "" if _readings(value) or _readings(value.rpartition("=")[2]) else f"{value!r}"


def _compared(gold: str, text: str, question: str) -> Judged:
    """Compare two texts with plain brackets, whatever they consist of."""
    if canonical(text) == canonical(gold):
        return Verdict.RIGHT, "the same text"
    if shapes.speaks_of_sets(gold) or shapes.speaks_of_sets(text):
        wanted, given = shapes.real_set(gold, _number), shapes.real_set(text, _number)
        if wanted is not None and given is not None:
            if not shapes.same_set(wanted, given, near_numbers):
                return Verdict.WRONG, "another set of numbers"
            if shapes.left_to_work_out(wanted, given):
                return Verdict.UNFINISHED, "its sets are to be put together"
            return Verdict.RIGHT, "the same set of numbers"
    wanted_cases, given_cases = shapes.cases_of(gold), shapes.cases_of(text)
    if wanted_cases and given_cases and any(condition for _, condition in (*wanted_cases, *given_cases)):
        return _piecewise(wanted_cases, given_cases, question)
    if (one := congruence(gold)) and (other := congruence(text)):
        if one.modulus != other.modulus or (one.name and other.name and one.name != other.name):
            return Verdict.WRONG, "another congruence"
        numbers = [_number(one.residue), _number(other.residue)]
        if all(isinstance(number, sympy.Integer) for number in numbers):
            same_class = (numbers[0] - numbers[1]) % one.modulus == 0
            return (Verdict.RIGHT if same_class else Verdict.WRONG), "numbers modulo another"
        return _compared(one.residue, other.residue, question)
    if (trouble := another_text(gold, text, question)) is not None:
        return (Verdict.WRONG, trouble) if trouble else (Verdict.RIGHT, "the same words")
    if shapes.goes_on(gold) != shapes.goes_on(text):
        return Verdict.WRONG, "only one of them goes on and on"
    wanted_shape, given_shape = shapes.shape_of(gold), shapes.shape_of(text)
    if wanted_shape is None and (given_shape or shapes.chained(text)):
        wanted_shape = shapes.chained(gold)
    if given_shape is None and wanted_shape is not None:
        given_shape = shapes.chained(text)
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


def _piecewise(gold: list[tuple[str, str]], said: list[tuple[str, str]], question: str) -> Judged:
    """Compare values under conditions, in any order; "otherwise" is what the other conditions leave."""
    if len(gold) != len(said):
        return Verdict.WRONG, f"{len(said)} cases for {len(gold)}"
    wanted, left, judged = _domains(gold), list(zip(said, _domains(said), strict=True)), list[Judged]()
    for (value, condition), domain in zip(gold, wanted, strict=True):
        for one in left:
            (other, stated), other_domain = one
            if domain is not None and other_domain is not None:
                alike = shapes.same_set(domain, other_domain, near_numbers)
            else:
                alike = _compared(condition, stated, question)[0] is Verdict.RIGHT
            if alike:
                left.remove(one)
                judged.append(_compared(value, other, question))
                break
        else:
            return Verdict.WRONG, "another condition"
    return _worst(judged)


def _domains(cases: list[tuple[str, str]]) -> list[shapes.RealSet | None]:
    found = [shapes.real_set(condition, _number) for _, condition in cases]
    for place, (_, condition) in enumerate(cases):
        others = [one for at, one in enumerate(found) if at != place]
        if condition.strip() in ("", "otherwise", "else", "elsewhere") and all(others):
            united = sympy.Union(*(one.value for one in others if one is not None))
            found[place] = shapes.RealSet(sympy.Complement(sympy.S.Reals, united), 1)
    return found


def _is_set_of_one(shape: Shape | None) -> bool:
    return shape is not None and shape.brackets == SET and len(shape.members) == 1


def _shaped(gold: Shape, said: Shape, question: str) -> Judged:
    """Compare two answers that consist of several values; of one value is the set of it."""
    if not gold.members or not said.members:
        return _other_kind() if gold.members or said.members else (Verdict.RIGHT, "both are empty")
    if len(gold.members) == 1 and len(said.members) == 1:
        return _compared(gold.members[0], said.members[0], question)
    names, given_names = _named(gold), _named(said)
    if names and given_names and not (_only_indices(names) and _only_indices(given_names)):
        if set(names) != set(given_names):
            return Verdict.WRONG, "other names"
        return _each(list(names.values()), [given_names[name] for name in names], question)
    if names and given_names and set(names) == set(given_names):
        return _each(list(names.values()), [given_names[name] for name in names], question)
    if given_names and not _only_indices(given_names) and gold.brackets in (LIST, TUPLE, CLOSED, VECTOR):
        # The question says which comes first, or else the alphabet.
        order = shapes.names_in(question, set(given_names)) or sorted(given_names)
        return _each(gold.members, [given_names[name] for name in order], question)
    if names and not _only_indices(names):
        pairs = [shapes.name_and_value(one) for one in said.members]
        if any(pair and canonical(pair[0]) != name for pair, name in zip(pairs, names, strict=False)):
            return Verdict.WRONG, "other names"
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


def _other_kind() -> Judged:
    return Verdict.WRONG, "another kind of answer: a list, a set, a tuple and an interval are not the same"


def _each(gold: Sequence[str], said: Sequence[str], question: str) -> Judged:
    """One by one."""
    if len(gold) != len(said):
        return Verdict.WRONG, f"{len(said)} values for {len(gold)}"
    return _worst([_compared(one, other, question) for one, other in zip(gold, said, strict=True)])


def _matched(gold: Sequence[str], said: Sequence[str], question: str) -> Judged:
    """In any order, each once."""
    if len(gold) != len(said):
        return Verdict.WRONG, f"{len(said)} values for {len(gold)}"
    left, found = list(gold), list[Judged]()
    for one in said:
        place, judged = _best(left, one, question)
        if judged[0] is Verdict.WRONG:
            return Verdict.WRONG, "another value among them"
        left.pop(place)
        found.append(judged)
    return _worst(found)


def _among(gold: Sequence[str], said: Sequence[str], question: str) -> Judged:
    return _worst([_best(gold, one, question)[1] for one in said])


def _best(gold: Sequence[str], one: str, question: str) -> tuple[int, Judged]:
    """Which of some expected values a value is, and how well."""
    judged: list[Judged] = []
    for place, other in enumerate(gold):
        if canonical(other) == canonical(one):
            return place, (Verdict.RIGHT, "the same text")
    for place, other in enumerate(gold):
        judged.append(_compared(other, one, question))
        if judged[-1][0] is Verdict.RIGHT:
            return place, judged[-1]
    place = max(range(len(judged)), key=lambda at: _WORST_FIRST.index(judged[at][0]))
    return place, judged[place]


def _worst(judged: Sequence[Judged]) -> Judged:
    for verdict in _WORST_FIRST:
        for one in judged:
            if one[0] is verdict:
                return one
    return Verdict.RIGHT, "the same values"


def _named(shape: Shape) -> dict[str, str]:
    """The values of ``x = 2, y = 3`` or ``(x, y) = (2, 3)`` by their names, in that order; else empty."""
    if shape.names:
        return dict(zip(shape.names, shape.members, strict=True))
    pairs = [shapes.name_and_value(member) for member in shape.members]
    named = {canonical(pair[0]): pair[1] for pair in pairs if pair is not None}
    return named if len(named) == len(shape.members) > 1 else {}


def _only_indices(names: dict[str, str]) -> bool:
    """Roots that are counted: ``x_1 = 2, x_2 = 3``."""
    return len({re.sub(r"_.*", "", name) for name in names}) == 1


def _valued(gold_text: str, text: str, question: str) -> Judged:
    """Compare two texts that are one value each."""
    gold_text, text = label_and_rest(gold_text, text)
    if canonical(text) == canonical(gold_text):
        return Verdict.RIGHT, "the same text"
    if (trouble := another_time(gold_text, text, question)) is not None:
        return (Verdict.WRONG, trouble) if trouble else (Verdict.RIGHT, "the same time")
    nouns = nouns_of(f"{question} {gold_text}")
    wanted, said = in_cents(measure_of(gold_text, nouns), measure_of(text, nouns))
    if another_unit(wanted, said):
        return Verdict.WRONG, "another unit"
    for value in (said.value, wanted.value):
        if stray := stray_text(value):
            return Verdict.UNREADABLE, f"{stray!r} stands beside the value"
    if (judged := ratio_verdict(wanted, said, question, _number)) is not None:
        return judged
    if (inner := shapes.in_square(text)) and not shapes.in_square(gold_text) and _number(inner) is not None:
        return _other_kind()
    if another_order(wanted.value, said.value):
        return Verdict.WRONG, "another product: of vectors and operators the order matters"
    if trouble := another_base(wanted.value, said.value, question):
        return Verdict.WRONG, trouble
    # What a value is called is not worked out: \tan\theta = 1/3.
    value = said.value if "=" in wanted.value else said.value.rpartition("=")[2]
    golds, answers = _readings(wanted.value), _readings(said.value) or _readings(value)
    is_number = bool(golds) and isinstance(golds[0], sympy.Basic) and not golds[0].free_symbols
    if left := computing(wanted.value, value, number=is_number):
        return Verdict.UNFINISHED, f"it leaves {left} to be worked out"
    if not answers:
        return Verdict.UNREADABLE, "it is no mathematics that can be read"
    if not golds:
        return Verdict.WRONG, "not the expected text"
    if others := [*other_sides(golds[0], answers[0]), *_approximations(said.value, answers[0])]:
        return Verdict.CONTRADICTORY, f"it also says {others[0]}"
    golds, answers = _meant(golds, answers, wanted, said, question)
    if not any(same(gold, answer) for gold in golds for answer in answers):
        return Verdict.WRONG, ANOTHER_VALUE
    if left := unfinished(golds[0], answers[0]):
        return Verdict.UNFINISHED, left
    plain = canonical(said.value)
    if is_number and _is_rational(golds[0]) and plain in canonical(question) and not in_final_form(plain):
        return Verdict.UNFINISHED, "it stands in the question"
    return Verdict.RIGHT, "the same value"


def _meant(
    golds: list[Any], answers: list[Any], wanted: Measure, said: Measure, question: str
) -> tuple[list[Any], list[Any]]:
    """What percent signs and words like million may mean: a hundredth and a million, and one where the question asks
    for so many percent or million."""
    asked = "percent" in question.lower() or "%" in question
    if len(golds) == len(answers):
        golds, answers = golds[:1], answers[:1]
    elif not asked:
        # An expected percentage says by itself that percents are asked for, unless the question is known.
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
    """The expression that a text is; of a percentage, the number before the sign and its hundredth. Maybe nothing."""
    head, *about = _APPROXIMATELY.split(text)
    head = (about[0] if about and (not head.strip() or _NAME.fullmatch(head)) else head).strip()
    bare = symbols(_PERCENT.sub("", head)).strip()
    if not bare or side_by_side(bare):
        return []
    found = _parsed(bare)
    if not _PERCENT.search(head) or not found or not isinstance(found[0], sympy.Expr):
        return list(found)
    return [*found, found[0] / 100]


@lru_cache(maxsize=1000)
def _parsed(text: str) -> tuple[Any, ...]:
    latex = normalize_latex(f"\\boxed{{{text}}}", config=_NORMALIZED)
    for one in dict.fromkeys((latex, get_last_eq(latex))):
        with contextlib.suppress(Exception):  # whatever its parser raises of a text: it can't be read
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
    """The real number that a text is; ``None`` if it is none."""
    found = _readings(text)
    return found[0] if len(found) == 1 and isinstance(found[0], sympy.Expr) and found[0].is_number else None


def _is_rational(expression: Any) -> bool:
    return all(isinstance(leaf, sympy.Rational | sympy.Float) for leaf in leaves(expression))


def _approximations(text: str, answer: Any) -> list[Any]:
    """What an answer says to be about its value, and is not."""
    value, wrong = next(leaves(answer)), []
    for said in _APPROXIMATELY.split(text)[1:]:
        tolerance = ABOUT
        if (decimal := _DECIMAL.fullmatch(said)) and isinstance(value, sympy.Expr) and value.is_number and value != 0:
            # Rounded or cut off, it is less than one unit of its last place away.
            tolerance = sympy.Rational(999_999, 10 ** (6 + len(decimal[1] or ""))) / abs(value)
        wrong += [part for part in _parsed(said) if not near_numbers(value, part, tolerance)]
    return wrong
