# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Where in a message the answer is, and its spelling."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.final_answer import final_answer
from nemo_gym_prorl.tasks.math.answers import canonical, restates, tidy, unwrapped
from nemo_gym_prorl.tasks.math.task import expected_answer
from nemo_gym_prorl.tasks.stem.problems import problem_of


TEXT = st.text(alphabet="ab5{}\\ $.=boxed", max_size=60)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (r"It is \boxed{5}.", "5"),
        (r"\boxed{1}, no, \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{2}, \boxed{3} \text{ and } \boxed{5}", "2, 3, 5"),
        (r"$\boxed{2}$ or $\boxed{3}$", "2, 3"),
        (r"\boxed{5}, \boxed{5}", "5"),
        (r"\boxed{}, \boxed{5}", "5"),
        (r"\boxed{1}, so $x$ is 2, and \boxed{2}", "2"),
        (r"\boxed {8}", "8"),
        (r"\boxed{a \text{ if } \boxed{b}}", "b"),
        (r"\boxed{5", None),
        (r"\boxed{1} and then \boxed{2", None),
        (r"\boxed{}", ""),
        ("I computed.\n\nThe answer is 42.", "42."),
        ("**Answer:** 7", "7"),
        ("Final Answer: The final answer is $3$. I hope it is correct.", "$3$"),
        ("Final answer: $x = 3$\n", "$x = 3$"),
        ("The answer is 42.\n\n1\n2\n3", None),
        ("42", None),
        ("", None),
        (r"The answer is 6. \boxed{5}", "5"),
        ("The answer is 5 ... no wait, 6", "6"),
        ("The answer is 5. Wait, no, it is 6.", "6."),
        ("The answer is 5.\nHmm, actually it's 6.", "6."),
        ("The answer is 5. Sorry, I mean 6. Sorry, I mean 7.", "7."),
        ("The answer is 5. That was wrong.", None),
        ("The answer is no.", "no."),
        ("So the answer is\n5", "5"),
        ("So the answer is:\n\n$$5$$", "$$5$$"),
        ("The final answer is $\\boxed 5$", "5"),
        (r"$\boxed 73$", "73"),
        (r"$\boxed -7.5$.", "-7.5"),
        (r"$\boxed73$", "73"),
        (r"$\boxed\frac12$", r"\frac{1}{2}"),
        (r"$\boxed\pi$", r"\pi"),
        (r"$\boxed x$", "x"),
        (r"\boxed{1}, or rather \boxed 2", "2"),
        (r"\boxed{5} is how a \boxed is written", "5"),
        (r"\boxed{\text{The answer is }5}", "5"),
        (r"\boxed{The final answer is: 5}", "5"),
        (r"\boxed{Answer: 5}", "5"),
        (r"\boxed{5 \text{ is the answer}}", "5"),
        ("The answer is 5.", "5."),
        ("The answers are 2 and 3.", "2 and 3."),
        ("So the answer to part (b) is 7.", "7."),
        ("The correct answer is 7. It follows.", "7"),
        ("The answer is 2**10", "2**10"),
        ("The answer is **12**.", "12."),
        ("**Answer**: 12", "12"),
        ("### Answer: 12", "12"),
        ("Answer: 12\n\nCheck:\n1\n2\n3", "12"),
        ("Answer: 11\n\nAnswer: 12\n\nCheck:\n1\n2\n3", "12"),
        ("Answer: E. coli", "E. coli"),
        ("Answer: J. J. Thomson", "J. J. Thomson"),
        ("The answer is 3 . 5", "3 . 5"),
        ("The answer is 3.5. Good.", "3.5"),
        ("Answer: the mitochondrion. It actually makes ATP.", "the mitochondrion"),
        ("The answer is 5, actually 6.", "6."),
        (r"\boxed{5}, so the answer is 5 metres of rope.", "5"),
    ],
)
def test_where_the_answer_is(message: str, answer: str | None) -> None:
    assert final_answer(message) == answer


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (r"By \boxed{E = mc^2} it is so.\n\nAnswer: D", "D"),
        (r"\boxed{12}, so the correct option is (D).", "(D)."),
        (r"\boxed{12}. **The answer is D.**", "D."),
        (r"\boxed{12}. The answer is D. Indeed.", "D"),
        (r"\boxed{D}. The answer is correct.", "D"),
        (r"\boxed{D}. The answer is Z.", "D"),
        (r"Answer: D. \boxed{B}", "B"),
        ("The best choice is C.", "C."),
        ("Answer: C. neon", "C. neon"),
        ("Answer: A. B. C. D.", "A. B. C. D."),
        ("The correct answer is photosynthesis.", "photosynthesis."),
    ],
)
def test_where_the_letter_of_a_choice_is(message: str, answer: str | None) -> None:
    assert final_answer(message.replace(r"\n", "\n"), letters="ABCD") == answer


@given(TEXT, st.recursive(st.just("5"), lambda inner: inner.map("a{{{}}}".format), max_leaves=5))
def test_the_last_closed_box_is_the_answer(before: str, content: str) -> None:
    assert final_answer(f"{before} so \\boxed{{{content}}} that is it") == content


@given(TEXT)
def test_tidying_ends_and_nothing_is_left_to_unwrap(text: str) -> None:
    assert unwrapped(unwrapped(text)) == unwrapped(text)
    tidy(text)
    canonical(text)


@pytest.mark.parametrize(
    ("answer", "tidied"),
    [
        ("$5$.", "5"),
        (r"\( 5 \)", "5"),
        (r"\[\boxed{5}\]", "5"),
        ("10 000", "10000"),
        (r"10{,}000", "10000"),
        ("1, 234", "1, 234"),
        ("3.5e-7", r"3.5 \times 10^{-7}"),
        ("0.\\overline{3}", r"\frac{1}{3}"),
        ("1.2\\overline{34}", r"\frac{611}{495}"),
        ("2 1/2", r"2\frac{1}{2}"),
        ("$1$ or $2$", "$1$ or $2$"),
        (r"\boxed{}", ""),
        ("$$", ""),
    ],
)
def test_spelling(answer: str, tidied: str) -> None:
    assert tidy(answer) == tidied


@given(st.integers(1, 9999), st.integers(0, 99), st.integers(1, 999))
def test_repeating_decimals_are_their_fractions(whole: int, fixed: int, period: int) -> None:
    found = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", tidy(rf"{whole}.{fixed:02}\overline{{{period:03}}}"))
    assert found
    value = int(found[1]) / int(found[2])
    assert value == pytest.approx(float(f"{whole}.{fixed:02}" + f"{period:03}" * 5))


def test_an_answer_from_the_question_is_seen_in_other_spacing() -> None:
    question = r"What is $\dfrac{1}{2} + \left( 3 - x \right)$?"
    assert restates(r"\frac{1}{2}+(3-x)", question)
    assert not restates(r"\frac{1}{2}+(4-x)", question)
    assert not restates("3", question)


@pytest.mark.parametrize("needed", [expected_answer, problem_of], ids=["math", "stem"])
@pytest.mark.parametrize("long", [r"\boxed{" + "{" * 10**6, r"\boxed{" + "{}" * 500_000], ids=["open", "pairs"])
def test_a_flood_of_braces_costs_no_time(needed: Callable[[dict[str, Any]], Any], long: str) -> None:
    """Answers and expected ones are looked through on the event loop."""
    begin = time.process_time()
    with pytest.raises(CallerError, match="longer than"):
        needed({"question": "What?", "expected_answer": long})
    assert not final_answer(long)
    assert time.process_time() - begin < 0.5
