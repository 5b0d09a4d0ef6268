# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of outputs and values with expected ones."""

import math
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.code.inside import checkers


FLOAT = {"kind": "float", "absolute": 1e-6, "relative": 1e-6}


@pytest.mark.parametrize(
    ("output", "expected", "right_by"),
    [
        ("1 2\n", "1 2\n", {"exact", "lines", "tokens", "float"}),
        ("1\n2\n", "1 2\n", {"tokens", "float"}),
        ("a\r\nb\r\n", "a\nb\n", {"lines", "tokens", "float"}),
        ("1e0\n", "1\n", {"lines", "tokens", "float"}),
        ("0.3333333\n", "0.33333331\n", {"lines", "float"}),
        ("3.0000000001\n", "3\n", {"lines"}),
        ("1.2345678901234568e17\n", "123456789012345678\n", set()),
        ("yes\nNO\n", "Yes\nNo\n", {"lines", "float"}),
        ("yes no\n", "Yes\nNo\n", {"float"}),
        ("1000001\n", "1000000\n", set()),  # a count is exact, whatever the tolerance
        ("10000001\n", "1e7\n", {"lines", "float"}),
        ("nan\n", "1.0\n", set()),
        ("nan\n", "nan\n", {"exact", "lines", "tokens", "float"}),
        ("٣\n", "3\n", set()),
        ("", "\n", {"lines", "tokens", "float"}),
        ("a\n\nb\n", "a\nb\n", {"tokens", "float"}),
        ("0110\n", "110\n", set()),
    ],
)
def test_outputs(output: str, expected: str, right_by: set[str]) -> None:
    kinds = ("exact", "lines", "tokens", "float")
    assert {kind for kind in kinds if checkers.outputs_match(output, expected, FLOAT | {"kind": kind})} == right_by


@given(st.text(), st.text(), st.sampled_from(["exact", "lines", "tokens", "float"]))
@example("1e9999", "1e-9999", "float")
@example("9" * 100_000, "9" * 100_000 + ".0", "float")
@example("1e99999999999999999999", "1", "lines")
@example("\ud800", "\udcff", "tokens")
def test_any_output_can_be_compared(output: str, expected: str, kind: str) -> None:
    said = checkers.outputs_match(output, expected, FLOAT | {"kind": kind})
    assert said in (True, False)
    if output == expected:
        assert said


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_number_equals_itself_in_every_notation(value: float) -> None:
    spellings = [repr(value), f"{value:.60f}", f"{value:+.40e}"]
    for spelling in spellings:
        assert checkers.outputs_match(spelling, repr(value), FLOAT)


@pytest.mark.parametrize(
    ("value", "expected", "checker", "right"),
    [
        ([1, 2.0000001], [1, 2.0], FLOAT, True),
        (1000001, 1000000, FLOAT, False),
        (1000000000.5, 1000000007, FLOAT, False),
        (2, 2.0000001, FLOAT, True),
        (1.2345678901234568e17, 123456789012345678, FLOAT, False),
        (True, 1, FLOAT, False),
        ([0.0], [False], FLOAT, False),
        (10**400, 1e308, FLOAT, False),
        (math.inf, 10**400, FLOAT, False),
        ("1", 1, FLOAT, False),
        ({"a": 1}, {"a": 1, "b": 2}, FLOAT, False),
        (5, [5], FLOAT, False),
        (5, [5], FLOAT | {"wrapped": True}, True),
        ([5], [5], FLOAT | {"wrapped": True}, True),
        (1, [1, 2, 3], FLOAT | {"wrapped": True}, False),
    ],
)
def test_values(value: Any, expected: Any, checker: dict[str, Any], right: bool) -> None:
    assert checkers.values_match(value, expected, checker) is right


def test_deep_nesting_raises_recursion_error() -> None:
    deep: Any = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(RecursionError):
        checkers.values_match(deep, deep, FLOAT)
