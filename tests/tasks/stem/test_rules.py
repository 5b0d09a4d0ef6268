# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The check by rules, on answers written in every way that people write them."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.stem.problems import Kind, problem_of
from nemo_gym_prorl.tasks.stem.rules import Rules, Ruling
from tests.tasks.stem.variants import all_variants, problem


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rules() -> AsyncIterator[Rules]:
    """Its tests share the checker's workers, of which each takes seconds to start."""
    checker = MathChecker()
    yield Rules(checker)
    await checker.aclose()


async def test_every_variant_is_judged_as_it_should_be(rules: Rules) -> None:
    variants = all_variants()
    assert len({variant.id for variant in variants}) == len(variants) > 150
    mistakes = []
    for variant in variants:
        ruled = await rules.check(variant.problem, variant.answer)
        if (ruled.ruling is Ruling.RIGHT) is not variant.right:
            mistakes.append(f"{variant.id}: {ruled}")
    assert mistakes == [], Counter(variant.right for variant in variants)


# What is asked for, what is plainly wrong, and what a judge is to look at.
FORMULAS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("R/r", ("1", "r/R", "R/r^2"), ("R/a",)),
    ("R+r", ("2R", "R-r"), ("R+s",)),
    ("Q/q", ("1", "q/Q"), ()),
    (r"2\pi R", (r"2\pi r", r"\pi R", r"2\pi R^2"), (r"2\pi a",)),
    ("V=IR", ("V=ir", "V=I/R", "V=2IR"), ("V=IX",)),
    ("PV=nRT", ("PV=2nRT", "PV=nRt"), ("PV=NkT",)),
    ("E=mc^2", ("E=mc^3", "E=mc", "MC^2"), ("E=Mv^2",)),
    (r"\frac{1}{2}mv^2", (r"\frac12 MV^2", "mv^2", r"\frac12 mv"), (r"\frac12 mu^2",)),
    (r"\frac{GMm}{r^2}", (r"\frac{GMm}{r}", r"-\frac{GMm}{r^2}", r"\frac{Gmm}{r^2}"), ("mg",)),
    (r"\sqrt{\frac{2E}{m}}", (r"\sqrt{\frac{E}{m}}", r"\frac{2E}{m}"), (r"\sqrt{\frac{2K}{m}}",)),
    (r"\frac{3}{2}k_B T", (r"\frac{1}{2}k_B T", r"3k_BT"), (r"\frac{3}{2}kT",)),
    (r"kT\ln 2", (r"2kT\ln 2", r"kT\ln 3"), (r"kT\log 2",)),
    ("e^{-kt}", ("e^{-KT}", "e^{kt}", "e^{-2kt}"), (r"e^{-\lambda t}",)),
    (r"\hbar\omega", (r"\hbar\omega/2", r"2\hbar\omega"), (r"h\nu",)),
    ("x=2, y=3", ("x=3, y=2", "x=2, y=4"), ()),
    ("C_2H_5OH", (), ("CH_3CH_2OH",)),
    ("102", ("10^2+1", r"\sqrt{102}"), ("N",)),
    ("1.41", (), (r"\sqrt{2.1}",)),
)


SPELLED = [
    ("yes", "Yes", Ruling.RIGHT),
    ("NO", "No", Ruling.UNDECIDED),
    ("H2O", "H_{2}O", Ruling.RIGHT),
    ("H2O", "H_2O_2", Ruling.UNDECIDED),
    ("n!", "n", Ruling.WRONG),
    ("n", "n!", Ruling.UNDECIDED),
    ("5", "[5]", Ruling.UNDECIDED),
    ("1 T", "10^4 G", Ruling.RIGHT),
    ("1 T", "10^3 G", Ruling.WRONG),
    ("sin(x)", r"\sin x", Ruling.RIGHT),
    ("1/2 mv^2", r"\frac{1}{2}mv^2", Ruling.RIGHT),
    ("1/2 mv^2", r"\frac{1}{2mv^2}", Ruling.WRONG),
    ("1/2mv^2", "1/(2mv^2)", Ruling.WRONG),
    ("1/2mv^2", r"\frac{1}{2}mv^2", Ruling.RIGHT),
    ("3", "3:1", Ruling.UNDECIDED),
    ("3", "3:01 a.m.", Ruling.UNDECIDED),
]


@pytest.mark.parametrize(("expected", "answer", "ruling"), SPELLED)
async def test_ways_to_spell_it(rules: Rules, expected: str, answer: str, ruling: Ruling) -> None:
    assert (await rules.check(problem(expected), answer)).ruling is ruling


async def test_no_judge_is_asked_about_a_formula_that_is_plainly_another(rules: Rules) -> None:
    mistakes = []
    for expected, wrong, open_to_doubt in FORMULAS:
        for answer in (*wrong, *open_to_doubt):
            ruled = await rules.check(problem(expected), answer)
            if ruled.ruling is not (Ruling.WRONG if answer in wrong else Ruling.UNDECIDED):
                mistakes.append((expected, answer, ruled))
    assert mistakes == []


def test_rows_of_gyms_own_servers_are_taken_as_they_are() -> None:
    mcqa = {"options": [{"A": "Karyotyping"}, {"B": "PCR"}], "expected_answer": "B", "uuid": "1"}
    assert problem_of(mcqa).kind is Kind.CHOICE
    assert problem_of({"question": "?", "expected_answer": "\\(\\sqrt{2}\\)"}).kind is Kind.FORMULA
    assert problem_of({"question": "?", "expected_answer": 32}).kind is Kind.QUANTITY
