# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Validation of rows, and extraction of the program from a message."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code import code_rows as rows
from nemo_gym_prorl.tasks.code.code_rows import CodeTestCase
from nemo_gym_prorl.tasks.code.inside.checkers import LONG_INTEGER
from nemo_gym_prorl.tasks.code.task import program_in
from tests.tasks.code.tables import packed, read
from tests.tasks.rows_file import table


TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}
CALLS = {"inputs": ["[1]\n2"], "outputs": ["[1, 2]"], "fn_name": "push"}
FILE = json.dumps(TESTS).encode()
SHA = hashlib.sha256(FILE).hexdigest()


@pytest.mark.parametrize(
    ("given", "expected", "case"),
    [
        ("[1]\n\n2\n\n", "3", CodeTestCase([[1], 2], 3)),
        ("", "3", CodeTestCase([], 3)),
        ('"12"', '"21"', CodeTestCase(["12"], "21")),
        (["12"], "21", CodeTestCase(["12"], "21")),
        (["12"], '"21"', CodeTestCase(["12"], '"21"')),
        (["12"], "[2, 1]", CodeTestCase(["12"], [2, 1])),
        ("7", "9" * 5000, CodeTestCase([7], {LONG_INTEGER: "9" * 5000})),
        ("-" + "9" * 5000, "[1]", CodeTestCase([{LONG_INTEGER: "-" + "9" * 5000}], [1])),
    ],
)  # fmt: skip
def test_arguments_and_results(given: Any, expected: Any, case: CodeTestCase) -> None:
    assert read({"unit_tests": CALLS | {"inputs": [given], "outputs": [expected]}}).tests == [case]


def test_packed_tests() -> None:
    problem = read({"unit_tests": packed(TESTS)})
    assert (problem.tests, problem.function) == ([CodeTestCase("1\n", "2\n")], None)
    for tests in (packed(CALLS) | {"fn_name": None}, packed(CALLS | {"fn_name": None}) | {"fn_name": "push"}):
        problem = read({"unit_tests": tests})
        assert (problem.tests, problem.function) == ([CodeTestCase([[1], 2], [1, 2])], "push")


def test_packed_tests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_PACKED_BYTES", 100)
    with pytest.raises(CallerError, match="more than 100 bytes"):
        read({"unit_tests": packed({"inputs": ["x" * 10**6], "outputs": ["1"]})})


def test_limits_and_checkers() -> None:
    problem = read({"unit_tests": TESTS, "checker": "tokens", "time_limit_s": 2, "memory_limit_mib": 256})
    assert (problem.checker["kind"], problem.time_limit_s, problem.memory_limit_mib) == ("tokens", 2.0, 256)
    assert read({"unit_tests": TESTS, "checker": {"kind": "float", "absolute": 0.1}}).checker["absolute"] == 0.1
    program = {"kind": "program", "source": "def check(*a): return True"}
    assert read({"unit_tests": TESTS, "checker": program}).checker == program


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        (None, ""),
        ({}, ".unit_tests"),
        ({"unit_tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, ".unit_tests.outputs"),
        ({"unit_tests": {"inputs": ["1", 2], "outputs": ["1", "2"]}}, ".unit_tests.inputs.1"),
        ({"unit_tests": {"inputs": ["1", "2"], "outputs": ["", "\n"]}}, ".unit_tests.outputs"),
        ({"unit_tests": CALLS | {"outputs": ["not JSON"]}}, ".unit_tests.outputs.0"),
        ({"unit_tests": CALLS | {"fn_name": "import os; f"}}, ".unit_tests.fn_name"),
        ({"unit_tests": TESTS, "checker": "sloppy"}, ".checker"),
        ({"unit_tests": TESTS, "time_limit_s": 0}, ".time_limit_s"),
        ({"tests_file": "a.json"}, ".tests_sha256"),
        ({"tests_file": "../a.json", "tests_sha256": SHA}, ".tests_file"),
        ({"tests_file": "a.json", "tests_sha256": SHA}, ".tests_file"),  # this server has no folder
    ],
)
def test_invalid_metadata_is_refused_by_field(metadata: Any, field: str) -> None:
    with pytest.raises(CallerError) as caught:
        read(metadata)
    assert caught.value.field == f"verifier_metadata{field}"


def test_tests_beyond_the_size_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_TEST_BYTES", 3)
    with pytest.raises(CallerError, match="the limit is 3"):
        read({"unit_tests": TESTS})


def test_tests_in_a_file_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.json").write_bytes(FILE)
    metadata = {"tests_file": "set/a.json", "tests_sha256": SHA}
    assert read(metadata, tmp_path).tests == [CodeTestCase("1\n", "2\n")]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.json").symlink_to(tmp_path / "set/a.json")
    with pytest.raises(CallerError, match="no file"):
        read({"tests_file": "a.json", "tests_sha256": SHA}, tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b'{"inputs": ["1"], "outputs": ["3"]}', "tests_sha256"),
        (None, "tests_file"),
        (b"[", "tests_file"),
        (b"{}", "tests_file.inputs"),
    ],
    ids=["another", "missing", "no JSON", "no tests"],
)  # fmt: skip
def test_invalid_tests_file_is_refused_by_field(tmp_path: Path, content: bytes | None, field: str) -> None:
    sha = SHA
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
        sha = SHA if field == "tests_sha256" else hashlib.sha256(content).hexdigest()
    with pytest.raises(CallerError) as caught:
        read({"tests_file": "a.json", "tests_sha256": sha}, tmp_path)
    assert caught.value.field == f"verifier_metadata.{field}"


PROGRAM = "n = int(input())\nprint(n + 1)\n"


@pytest.mark.parametrize("case", table(__file__, "messages.jsonl"), ids=lambda case: case[0])
def test_program_of_a_message(case: list[str]) -> None:
    _, message, *program = case
    assert program_in(message).rstrip("\n") == (program[0] if program else PROGRAM).rstrip("\n")


ADD = "def add(a, b):\n    return a + b"
READS = "def solve(text):\n    return text\nprint(solve(input()))"


@pytest.mark.parametrize(
    ("blocks", "function", "chosen"),
    [
        ([ADD, "print(add(2, 3))"], "add", 0),
        ([ADD, "def test_add():\n    assert add(2, 3) == 5"], "add", 0),
        (["def add(a, b): pass", ADD, "add(2, 3)"], "add", 1),
        (["class Solution:\n    def add(self, a, b):\n        return a + b", "Solution().add(2, 3)"], "add", 0),
        (["def plus(a, b): pass", "def minus(a, b): pass"], "add", 1),
        ([READS, "solve('1')"], None, 0),
        ([READS, "# Example\nprint(solve('1'))  # the input is 1"], None, 0),
        (["import sys\nprint(sys.stdin.read())", "print('usage')"], None, 0),
        ([READS, READS + "\n# better"], None, 1),
        (["print(1)", "print(2)"], None, 1),
    ],
)
def test_examples_of_use_are_no_program(blocks: list[str], function: str | None, chosen: int) -> None:
    message = "\nThen:\n".join(f"```python\n{block}\n```" for block in blocks)
    assert program_in(message, function) == blocks[chosen] + "\n"


@given(st.text(alphabet="`~ \npython:=1-", max_size=80))
def test_any_message_can_be_parsed(message: str) -> None:
    assert isinstance(program_in(message), str)


@pytest.mark.parametrize(
    "flood", ["`" * 10**6, "```\n" * 200_000, "~~~ ` " * 200_000, " " * 10**6 + "```", "a = " * 200_000]
)
def test_parsing_takes_linear_time(flood: str) -> None:
    begin = time.process_time()
    program_in(flood)
    program_in("```\n" + flood)
    assert time.process_time() - begin < 5
