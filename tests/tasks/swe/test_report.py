# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of outcomes from log and records, and authentication of records."""

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.swe.instance import SweInstance, TestStatus
from nemo_gym_prorl.tasks.swe.report import PASSING, compare, parse_r2e, read_records
from tests.tasks.swe import records


SECRET = "5ec7e7"
FAIL, KEEP = ("a.py::test_one", "a.py::test_two[x]"), ("a.py::test_three",)
INSTANCE = SweInstance(
    dataset="made",
    repo="a/b",
    problem_statement="x",
    patch=records.PATCH,
    FAIL_TO_PASS=FAIL,
    PASS_TO_PASS=KEEP,
    test_command="pytest",
)
WITNESS = st.dictionaries(st.sampled_from([*FAIL, *KEEP, "a.py::other"]), st.sampled_from([*TestStatus, "XPASS"]))


@given(WITNESS, WITNESS)
def test_both_sources_must_agree(one: dict[str, str], other: dict[str, str]) -> None:
    report = compare(INSTANCE, [one, other])
    passes = all(source.get(test) in PASSING for source in (one, other) for test in FAIL)
    kept = all(source.get(test) in PASSING | {TestStatus.SKIPPED} for source in (one, other) for test in KEEP)
    assert report.resolved is (passes and kept)
    assert set(report.wrong["FAIL_TO_PASS"]) == {
        test for test in FAIL if not all(source.get(test) in PASSING for source in (one, other))
    }


def signed(*told: Any, secret: str = SECRET) -> bytes:
    """Return records as the plugin writes them."""
    lines = []
    for number, values in enumerate(told, start=1):
        body = json.dumps([number, *values]).encode()
        lines.append(hmac.new(secret.encode(), body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n")
    return b"".join(lines)


PHASES = st.tuples(
    st.just("report"),
    st.sampled_from(FAIL),
    st.sampled_from(["setup", "call", "teardown"]),
    st.sampled_from(["passed", "failed", "skipped", "xfailed", "unseen"]),
)


@given(st.lists(PHASES, max_size=12))
def test_only_a_passed_call_counts_as_passed(told: list[tuple[str, str, str, str]]) -> None:
    statuses = read_records(signed(["begin"], *told, ["end"]), SECRET).statuses
    for test in FAIL:
        rounds: list[list[tuple[str, str]]] = [[]]
        for _, name, when, outcome in told:
            if name == test:
                rounds += [[]] if when == "setup" else []
                rounds[-1].append((when, outcome))
        last = rounds[-1]
        if statuses.get(test) in PASSING:
            assert {("call", "passed"), ("call", "xfailed"), ("setup", "xfailed")} & set(last)
            assert "failed" not in {outcome for _, outcome in last}


@pytest.mark.parametrize(
    ("outcomes", "log"),
    [
        ([("b.py", "call", "failed"), ("a.py", "call", "passed")], "PASSED a.py::test_it\nFAILED b.py::test_it"),
        ([("b.py", "call", "failed"), ("a.py", "setup", "failed")], "ERROR a.py::test_it\nFAILED b.py::test_it"),
    ],
)
def test_records_and_log_agree_on_ambiguous_names(outcomes: list[tuple[str, str, str]], log: str) -> None:
    """R2E-Gym identifies tests without their file."""
    phases = [["report", f"{file}::test_it", when, outcome] for file, when, outcome in outcomes]
    told = read_records(signed(["begin"], *phases, ["end"]), SECRET)
    assert parse_r2e(told.as_log()) == parse_r2e(f"=== short test summary info ===\n{log}\n")


@given(st.data())
def test_modified_records_are_rejected(data: st.DataObject) -> None:
    told = [["begin"], *[["report", name, "call", "passed"] for name in FAIL], ["end"]]
    raw = signed(*told)
    lines = raw.splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines) - 1))
    kind = data.draw(st.sampled_from(["gone", "twice", "forged", "other secret", "after the end"]))
    touched = {
        "gone": [*lines[:at], *lines[at + 1 :]],
        "twice": [*lines[:at], lines[at], *lines[at:]],
        "forged": [*lines[:at], lines[at].replace(b'"', b"'"), *lines[at + 1 :]],
        "other secret": [*lines[:at], signed(*told, secret="another").splitlines(keepends=True)[at], *lines[at + 1 :]],
        "after the end": signed(*told, ["report", FAIL[0], "call", "passed"]).splitlines(keepends=True),
    }[kind]
    read = read_records(b"".join(touched), SECRET)
    if kind == "gone" and at == len(lines) - 1:
        assert not read.ended
    else:
        assert read.forged
        assert not read.statuses
