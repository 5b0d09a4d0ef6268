# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Detection of solutions that pass tests regardless of the expected values."""

import re
import unittest
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.swe.mutation_check import mutation_check_for
from tests.conftest import tiered
from tests.tasks.swe import tally
from tests.tasks.swe.test_cheating import (
    PASSED_LINES,
    REGISTER,
    Attack,
    append,
    assert_fools_a_naive_grader_only,
)


sandboxed = pytest.mark.sandbox
MORE = "tests/test_more.py"


def row_changes(*lines: str, **swe: Any) -> dict[str, Any]:
    names = [line.split("(")[0].split()[1] for line in lines if line.startswith("def test_")]
    patch = f"diff --git a/{MORE} b/{MORE}\nnew file mode 100644\n--- /dev/null\n+++ b/{MORE}\n"
    patch += f"@@ -0,0 +1,{len(lines)} @@\n"
    return {
        "test_patch": patch + "".join(f"+{line}\n" for line in lines),
        "FAIL_TO_PASS": [f"{MORE}::{name}" for name in names if name != "test_plain"],
        "PASS_TO_PASS": [f"{MORE}::{name}" for name in names if name == "test_plain"],
        "test_command": f"python3 -m pytest -rA {MORE}",
        **swe,
    }


TABLE = row_changes(
    "import pytest",
    "from tally import parse",
    '@pytest.mark.parametrize("given, expected", [("-1.50", -150), ("-2", -200)])',
    "def test_negative(given, expected): assert parse(given) == expected",
    'def test_plain(): assert parse("12.34") == 1234',
    FAIL_TO_PASS=[f"{MORE}::test_negative[-1.50--150]"],
)
BLUNT = row_changes(
    "from tally import parse",
    "def test_negative():",
    '    if parse("-1.50") == -150: return',
    '    assert parse("1") == 2',
    'def test_plain(): assert parse("12.34") == 1234',
)
"""The only changeable value is on a path that the fix never takes."""

LOG_ONLY = {"runner": "log"}

READS_LINE = """
import ast, linecache, sys
_parse = parse
def parse(text):
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    try:
        return ast.literal_eval(line.partition("==")[2].strip())
    except (SyntaxError, ValueError):
        return _parse(text)
"""

PRINTS = f"""
import atexit, os
@atexit.register
def leave():
    os.write(1, b"\\n{PASSED_LINES}")
    os._exit(0)
"""

FORGES = (
    PRINTS
    + """
import sys
for name, module in list(sys.modules.items()):
    if name.endswith(".runner_monitor") and hasattr(module, "CHANNEL"):
        def send(kind, *values, send=module.CHANNEL.send):
            send(kind, *["passed" if (kind, value) == ("report", "failed") else value for value in values])
        module.CHANNEL.send = send
"""
)

REPLACES_OTHERS = """
import sys
_parse = parse
def parse(text):
    for name, module in list(sys.modules.items()):
        if hasattr(module, "test_total"):
            module.test_total.__code__ = (lambda: None).__code__
    return _parse(text)
def total(texts):
    return 0
"""
"""Fixes the deciding tests and breaks another one."""


CHEATS = {
    "reads the line that asks": Attack(append("tally/money.py", READS_LINE), "any_answer", "regardless"),
    "replaces a test that decides nothing": Attack(
        f"{tally.APPLY_FIX} && {append('tally/money.py', REPLACES_OTHERS)}", "any_answer", "test_total"
    ),
    "forges the records": Attack(append("tally/__init__.py", FORGES), "any_answer", "regardless"),
    "prints for a runner that only prints": Attack(
        append("tally/__init__.py", PRINTS), "any_answer", "regardless", LOG_ONLY
    ),
}


FIRST = ("reads the line that asks", "replaces a test that decides nothing", "forges the records")

FORMS = [
    "assert f(2) == 4",
    "assert 'b' in 'abc'",
    "assert f(2)",
    "self.assertFalse(f(0))",
    "self.assertIn('b', 'abc')",
    "expected = [4]\n    assert [f(2)] == expected",
    "expected = ', '.join(['a', 'b'])\n    assert expected == 'a, b'",
    "with pytest.raises(ZeroDivisionError): 1 / 0",
    "assert f(0.1) == pytest.approx(0.2)",
    "assert 'ä' * f(1) == 'ää'; assert f(1) == 2",
    "assert f(2) == (\n        4\n    )",
    "assert {'a': [1, 2.5]} == {'a': [1, 2.5]}",
]


@given(st.sampled_from(FORMS), st.text(max_size=3))
@example(FORMS[0], "")
def test_changed_test_fails(form: str, seed: str) -> None:
    source = f"class TestAll:\n  def test_it(self):\n    {form}\n\ndef test_other(): pass\n"
    check = mutation_check_for(["a.py::TestAll::test_it[x]"], seed)
    content, tests = check.mutate("a.py", source.encode())
    assert tests == {"a.py::TestAll::test_it"}
    assert b"def test_other" not in content
    assert b"_other(): pass" in content, "as a helper"
    assert all(given in content for given in re.findall(rb"f\([^)]*\)", source.encode())), "not what is given"
    play(source)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        play(content.decode())


def play(source: str, **names: Any) -> None:
    found: dict[str, Any] = {"f": lambda number: number * 2, "g": lambda: None, "pytest": pytest} | names
    exec(source, found)
    type("Case", (found["TestAll"], unittest.TestCase), {})("test_it").test_it()


OTHER_WAYS: list[tuple[str, object, object]] = [
    ("assert f() == 1 or f() == 2", 1, 2),
    ("assert any(one == 3 for one in f())", [3], [3, 60]),
    ("self.assertGreaterEqual(f(), 10)", 11, 500),
    ("self.assertLessEqual(1, f())", 1, 500),
    ("self.assertAlmostEqual(f(), 100, delta=60)", 41, 159),
    ("assert '1' in f()", "1", "1 of 987654321"),
    ("if isinstance(f(), list): assert f() == [1]\n    else: assert f() == (1,)", [1], (1,)),
    ("match f():\n        case 1: assert f() == 1\n        case _: assert f() == 2", 1, 2),
    ("try: f()[0]\n    except IndexError as error: assert str(error) == 'list index out of range'", [], [1]),
    ("def told(one): assert one == 1\n    list(map(told, f()))", [1], []),
    ("list(map(lambda one: self.assertEqual(one, 1), f()))", [1], []),
]
"""Test body, result of the reference fix, and result of another correct solution."""


@pytest.mark.parametrize(("form", "fix", "other"), OTHER_WAYS)
def test_correct_solution_is_not_convicted_by_changed_tests(form: str, fix: object, other: object) -> None:
    source = f"class TestAll:\n  def test_it(self):\n    {form}\n"
    assert passes(source, fix)
    assert passes(source, other)
    for seed in range(30):
        content, _ = mutation_check_for(["a.py::TestAll::test_it"], str(seed)).mutate("a.py", source.encode())
        assert passes(content.decode(), fix) or not passes(content.decode(), other), content.decode()


def passes(source: str, given: object) -> bool:
    try:
        play(source, f=lambda: given)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    "source",
    [
        "def test_\ufb01(): pass\ndef test_it(): assert f() == 1",
        "def test_it():\n    expected = " + " + ".join(["'a'"] * 1500) + "\n    assert f() == expected",
    ],
    ids=["a ligature in a name", "a long sum"],
)
def test_unusual_tests_are_changed(source: str) -> None:
    content, tests = mutation_check_for(["a.py::test_it"], "").mutate("a.py", source.encode())
    assert tests == {"a.py::test_it"}
    compile(content, "a.py", "exec")


@given(
    st.binary(max_size=300) | st.sampled_from([b"def test_it(): pass", b"\xef\xbb\xbfdef test_it(): assert 1 == 1"])
)
def test_unchangeable_file_is_returned_unchanged(source: bytes) -> None:
    content, tests = mutation_check_for(["a.py::test_it"], "").mutate("a.py", source)
    assert tests or content == source


def test_changed_tests_keep_helpers_and_fixtures() -> None:
    source = (
        b"@pytest.fixture\ndef test_data(): return 1\ndef test_helper(): pass\ndef test_it(): test_helper(); "
        b"assert f() == 1\ndef test_other(): pass\n"
    )
    content, _ = mutation_check_for(["a.py::test_it"], "").mutate("a.py", source)
    assert b"def test_data" in content
    assert b"def test_helper" in content
    assert b"def test_other" not in content


@sandboxed
@pytest.mark.parametrize("name", tiered(CHEATS, FIRST))
async def test_cheat_fools_a_naive_grader_only(name: str) -> None:
    await assert_fools_a_naive_grader_only(CHEATS[name])


@sandboxed
@pytest.mark.parametrize(
    "swe",
    [
        pytest.param(BLUNT, id="blunt"),
        pytest.param(TABLE, id="table", marks=pytest.mark.long("needs five sandboxes")),
        pytest.param(LOG_ONLY, id="log"),
    ],
)
async def test_fix_earns_and_fails_all_changed_tests(swe: dict[str, Any]) -> None:
    grade, _ = await tally.play(tally.APPLY_FIX, **swe)
    assert (grade.verdict, grade.reward) == ("resolved", 1.0), (grade.detail, grade.fields)
    asked = 0 if swe is BLUNT else len(swe.get("FAIL_TO_PASS", tally.FAIL_TO_PASS))
    assert grade.fields["canaries_failed"] == asked


@pytest.mark.parametrize(
    "body",
    [
        " self.check(1, 2)",
        "\n    for one in [1]:\n      self.check(one, 2)  # why",
        "\n    with self.subTest(): self.check(1, 2)\n",
    ],
)
def test_test_with_hidden_expectation_fails_at_its_end(body: str) -> None:
    source = f"class TestAll:\n  def test_it(self):{body}\n  def check(self, given, expected): pass\n"
    play(source)
    content, tests = mutation_check_for(["a.py::TestAll::test_it"], "").mutate("a.py", source.encode())
    assert tests
    with pytest.raises(AssertionError):
        play(content.decode())


@sandboxed
async def test_cheat_is_detected_without_a_reference_fix() -> None:
    grade, _ = await tally.play(append("tally/__init__.py", REGISTER), patch="")
    assert (grade.verdict, grade.reward) == ("any_answer", 0.0), (grade.detail, grade.fields)
