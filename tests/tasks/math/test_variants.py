# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Right answers in other words are right, near misses are wrong."""

import os

import pytest

from nemo_gym_prorl.tasks.math.checker import Verdict
from nemo_gym_prorl.tasks.math.comparison import judge, try_out
from tests.tasks.math.forms import FORMS
from tests.tasks.math.near_forms import NEAR_FORMS
from tests.tasks.math.spellings import SPELLINGS
from tests.tasks.math.tex_forms import TEX_FORMS
from tests.tasks.math.variants import FAMILIES, variants


ALL_FORMS = FORMS | NEAR_FORMS | SPELLINGS | TEX_FORMS


@pytest.mark.longer("thirty draws of each family's values, else two")
@pytest.mark.parametrize("family", FAMILIES)
def test_right_answers_in_other_words_and_near_misses(family: str) -> None:
    drawn = variants(family, 30 if os.environ.get("PRORL_TEST_LONG") else 2)
    judged = [(expected, answer, right, *judge(expected, answer)) for expected, answer, right in drawn]
    assert [one for one in judged if (one[3] is Verdict.RIGHT) != one[2]] == []


def test_they_are_many() -> None:
    every = [variant for family in FAMILIES for variant in variants(family)]
    assert len(every) >= 300
    assert 150 <= sum(right for _expected, _answer, right in every) <= len(every) - 150


@pytest.mark.parametrize(
    ("expected", "answer", "verdict"),
    [
        ("5050", r"\sum_{k=1}^{100} k", Verdict.UNFINISHED),
        ("5", r"\lim_{x \to 5} x", Verdict.UNFINISHED),
        ("5", "2 + 3", Verdict.UNFINISHED),
        ("12", "5 + 9 - 2", Verdict.UNFINISHED),
        ("(1, 5)", "(1, 2 + 3)", Verdict.UNFINISHED),
        ("5", "6 = 5", Verdict.CONTRADICTORY),
        ("5", "1 = 2 = 3 = 5", Verdict.CONTRADICTORY),
        ("5", r"5 \approx 6", Verdict.CONTRADICTORY),
        ("33", "m + n = 30 + 3 = 33", Verdict.RIGHT),
        (r"\pi", r"\pi \approx 3.14", Verdict.RIGHT),
        ("11", "5 6", Verdict.UNREADABLE),
        ("5", r"5 \quad 6", Verdict.UNREADABLE),
        ("5", r"\{", Verdict.UNREADABLE),
        ("101_2", "101_3", Verdict.WRONG),
        ("101_2", "101_{2}", Verdict.RIGHT),
        ("12:30", "12:30", Verdict.RIGHT),
        ("12:00", "1:00", Verdict.WRONG),
        ("x + y = 1", "2x + 2y = 2", Verdict.RIGHT),
        ("x = 3", "x = x", Verdict.WRONG),
        ("x > 3", "x^2 < 0", Verdict.WRONG),
        (r"0.\overline{3}", r"\frac{1}{3}", Verdict.RIGHT),
        (r"\boxed{2}, \boxed{3}", "3, 2", Verdict.RIGHT),
    ],
)
def test_what_is_more_or_less_than_the_value(expected: str, answer: str, verdict: Verdict) -> None:
    assert judge(expected, answer)[0] is verdict


@pytest.mark.parametrize(
    ("question", "expected", "answer", "verdict"),
    [
        ("Expand $(x-1)(x+1)(x+2)$.", "x^3+2x^2-x-2", "(x - 1)(x + 1)(x + 2)", Verdict.UNFINISHED),
        ("Expand it.", "x^3+2x^2-x-2", "(x - 1)(x + 1)(x + 2)", Verdict.RIGHT),
        ("Which is larger, 3 or 5?", "5", "5.0", Verdict.RIGHT),
        ("Which is larger, 3 or 5?", "5", "5", Verdict.RIGHT),
        ("What percent of 50 is 20?", "40", r"40\%", Verdict.RIGHT),
        ("What is 20 + 20?", "40", r"40\%", Verdict.WRONG),
        ("What is the probability?", r"\frac{2}{5}", r"40\%", Verdict.RIGHT),
    ],
)
def test_what_the_question_decides(question: str, expected: str, answer: str, verdict: Verdict) -> None:
    assert judge(expected, answer, question)[0] is verdict


@pytest.mark.parametrize("kind", ALL_FORMS)
def test_forms_that_mean_the_same_and_forms_that_only_look_like_it(kind: str) -> None:
    judged = [(*form, *judge(form[0], form[1], form[3])) for form in ALL_FORMS[kind]]
    assert [one for one in judged if (one[4] is Verdict.RIGHT) != one[2]] == []


@pytest.mark.parametrize("kind", SPELLINGS)
def test_golds_as_data_sets_spell_them_are_taken(kind: str) -> None:
    for expected, *_form in SPELLINGS[kind]:
        try_out(expected)
