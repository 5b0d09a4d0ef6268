# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Each guarantee in ``GUARANTEES.md`` names a test that exists."""

import ast
import re
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
ROWS = re.findall(r"^\| (?P<guarantee>[^|]+) \| `(?P<test>[^`]+)` \|$", (TESTS / "GUARANTEES.md").read_text(), re.M)


def test_the_table_has_rows_and_no_guarantee_twice() -> None:
    guarantees = [guarantee for guarantee, _ in ROWS]
    assert len(guarantees) > 20
    assert len(set(guarantees)) == len(guarantees)


@pytest.mark.parametrize("test", sorted({test for _, test in ROWS}))
def test_the_test_of_a_guarantee_exists(test: str) -> None:
    path, *names = test.split("::")
    scope: ast.AST = ast.parse((TESTS.parent / path).read_text())
    for name in names:
        found = [
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        # A state machine's test is an assignment: TestLife = LifeMachine.TestCase.
        assigned = [
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == name for at in node.targets)
        ]
        assert found or assigned, f"GUARANTEES.md names {test}, which does not exist"
        scope = (found or assigned)[0]
