# SPDX-License-Identifier: Apache-2.0
r"""Right answers in other words are right, near misses are wrong.

``forms.txt`` has a line for each expected answer, with what was asked between ‹ and ›, and answers that mean the same
(✓) or only look like it (✗) between double semicolons; a line that begins with a space goes on. Families that are
made by rule are those of ``scripts/compare_math.py``.
"""

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.tasks.math.comparison import judge, try_out
from nemo_gym_prorl.tasks.math.verdicts import Verdict
from scripts.compare_math import FAMILIES, Family


Form = tuple[str, str, str, bool]
"""What is expected, what was asked, what is answered, whether that is right."""

MANY = ",".join(map(str, range(45)))


def forms(text: str) -> Iterator[Form]:
    """The answers of a table."""
    expected, question = "", ""
    for line in text.splitlines():
        head, *parts = re.split(r" (?=[✓✗] )", line)
        if head.strip():
            expected, _, question = head.partition(" ‹")
        for mark, answers in (part.split(" ", 1) for part in parts):
            yield from ((expected, question.rstrip("›"), answer, mark == "✓") for answer in answers.split(" ;; "))


TABLES = {
    kind: list(forms(table))
    for kind, _, table in (
        part.partition("\n") for part in (Path(__file__).parent / "forms.txt").read_text().split("# ")[1:]
    )
}


def mistakes(judged: list[Form]) -> list[tuple[Form, str, str]]:
    """Those that are paid though they are wrong, or the other way round, and what they are told."""
    told = [(form, *judge(form[0], form[2], form[1])) for form in judged]
    return [one for one in told if (one[1] is Verdict.RIGHT) != one[0][3]]


@pytest.mark.parametrize("kind", TABLES)
def test_forms_that_mean_the_same_and_forms_that_only_look_like_it(kind: str) -> None:
    assert mistakes(TABLES[kind]) == []
    for expected in {form[0] for form in TABLES[kind]}:
        try_out(expected)


@pytest.mark.longer("twenty draws of each family's values, else one")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_families_made_by_rule(family: Family) -> None:
    draw = random.Random(12)
    for _ in range(20 if os.environ.get("PRORL_TEST_LONG") else 1):
        question, expected, right, wrong = family(draw)
        made = [(expected, question, answer, True) for answer in (expected, *right)]
        assert mistakes(made + [(expected, question, answer, False) for answer in wrong]) == []


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("5", ",".join(["5"] * 400), False),
        ("1," * 44 + "2", "2," * 44 + "1", False),
        (f"({MANY})", rf"\{{{MANY}\}}", False),
        (MANY, f"{MANY},44", False),
        (MANY, ",".join(map(str, reversed(range(45)))), True),
    ],
    ids=["one value again", "other repetitions", "set for tuple", "one more", "another order"],
)
def test_many_values(expected: str, answer: str, right: bool) -> None:
    assert mistakes([(expected, "", answer, right)]) == []


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
        ("11", "5 6", Verdict.UNREADABLE),
        ("5", r"5 \quad 6", Verdict.UNREADABLE),
        ("5", r"\{", Verdict.UNREADABLE),
    ],
)
def test_what_is_wrong_is_told(expected: str, answer: str, verdict: Verdict) -> None:
    assert judge(expected, answer)[0] is verdict
