# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of task generation: mutations, hidden tests, outcomes, statements."""

from __future__ import annotations

import ast
import textwrap

import pytest

from scripts.swe_tasks import hiding
from scripts.swe_tasks.making import statement
from scripts.swe_tasks.mutations import apply, mutations
from scripts.swe_tasks.outcomes import Outcomes, effect, read


def variants(body: str) -> set[tuple[str, str]]:
    """Return the kinds of mutations of a function with the mutated body."""
    source = f"def f(a, b):  # é\n    {body}\n"
    return {(one.kind, apply(source, [one]).splitlines()[1].strip()) for one in mutations(source)}


@pytest.mark.parametrize(
    ("body", "kind", "wrong"),
    [
        ("return a < b", "comparison", "return a <= b"),
        ("return a + b", "operator", "return (a - b)"),
        ("return a and b", "boolean", "return (a or b)"),
        ("return a[1:]", "off by one", "return a[2:]"),
        ("return g(a, key=True)", "constant", "return g(a, key=False)"),
        ("if a: return b", "branch", "if not (a): return b"),
        ("return a", "return", "return None"),
        ("a.append(b)", "removed statement", "pass"),
        ("return g(a, b)", "swapped arguments", "return g(b, a)"),
    ],
)
def test_each_kind_of_mutation(body: str, kind: str, wrong: str) -> None:
    assert (kind, wrong) in variants(body)


TESTS = textwrap.dedent("""\
    import pytest

    @pytest.mark.parametrize(
        "one", [1, 2]
    )
    def test_a(one):
        assert one

    def test_b():
        pass

    class TestC:
        def test_d(self):
            pass

    class TestE(TestC):
        def test_f(self):
            pass

        def test_g(self):
            pass
""")


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ({"test_a"}, {"test_b", "TestC::test_d", "TestE::test_f", "TestE::test_g"}),
        ({"TestE::test_f"}, {"test_a", "test_b", "TestC::test_d", "TestE::test_g"}),
        ({"TestE::test_f", "TestE::test_g", "test_b"}, {"test_a", "TestC::test_d"}),
    ],
)
def test_hidden_tests_are_removed_completely(gone: set[str], left: set[str]) -> None:
    text = hiding.without(TESTS, gone)
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    assert names == left
    assert ("parametrize" in text) == ("test_a" in left)


LOG = """\
.F.
=========================== short test summary info ============================
PASSED a.py::test_one[x]
PASSED a.py::test_two[two words]
PASSED b.py::TestB::test_three
FAILED a.py::test_four - AssertionError: assert 1 == 2
SKIPPED [1] a.py:7: no reason
1 failed, 3 passed
"""


def test_log_is_parsed() -> None:
    run = read(LOG, 1)
    assert run.complete
    assert run.having("PASSED") == {"a.py::test_one[x]", "b.py::TestB::test_three"}  # a name in two words is no name
    assert run.messages == {"a.py::test_four": "AssertionError: assert 1 == 2"}
    assert not read(LOG, 2).complete
    assert not read("killed", 1).complete


def _run(*, complete: bool = True, **status: str) -> Outcomes:
    return Outcomes({f"t.py::{test}": word for test, word in status.items()}, {}, complete)


STABLE = frozenset(f"t.py::{test}" for test in "abcde")
FINE = dict.fromkeys("bcde", "PASSED")


@pytest.mark.parametrize(
    "after",
    [
        _run(a="PASSED", **FINE),
        _run(a="FAILED", b="FAILED", c="PASSED", d="PASSED", e="PASSED"),
        _run(a="FAILED", **{**FINE, "e": "ERROR"}),
        _run(a="FAILED", b="PASSED", c="PASSED", d="PASSED"),
        _run(a="FAILED", complete=False, **FINE),
        _run(f="FAILED", a="PASSED", **FINE),
    ],
    ids=["nothing-broken", "too-much-broken", "error", "test-gone", "not-complete", "unstable-test"],
)
def test_unusable_bugs_are_rejected(after: Outcomes) -> None:
    assert effect(STABLE, after) is None


def test_statement_lists_failures_within_bounds() -> None:
    few = statement("sums", "1.0", {"a.py::TestA::test_b[1]": "assert 1 == 2"})
    assert "sums 1.0" in few
    assert "TestA, test_b[1]" in few
    assert "assert 1 == 2" in few
    many = statement("sums", "1.0", {f"a.py::test_{number:02}": "x" * 9000 for number in range(50)})
    assert ("and 42 more" in many, len(many) < 4000) == (True, True)
