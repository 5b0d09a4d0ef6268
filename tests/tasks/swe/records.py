# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Invented records with the fields and types of the published datasets."""

from __future__ import annotations

import json
from typing import Any


PATCH = """\
diff --git a/lib/sums.py b/lib/sums.py
--- a/lib/sums.py
+++ b/lib/sums.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""

TEST_PATCH = """\
diff --git a/lib/tests/test_sums.py b/lib/tests/test_sums.py
--- a/lib/tests/test_sums.py
+++ b/lib/tests/test_sums.py
@@ -1,1 +1,4 @@
 from lib.sums import add
+
+def test_add():
+    assert add(1, 2) == 3
diff --git a/lib/tests/data/sums.txt b/lib/tests/data/sums.txt
--- a/lib/tests/data/sums.txt
+++ b/lib/tests/data/sums.txt
@@ -1,1 +1,1 @@
-3
+4
"""


SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose lib/tests/test_sums.py"


def eval_script(command: str, *before: str) -> str:
    """Return a record's test script."""
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "cd /testbed",
            "git config --global --add safe.directory /testbed",
            "git status",
            *before,
            "git checkout 0123456 lib/tests/test_sums.py",
            ": '>>>>> Start Test Output'",
            command,
            ": '>>>>> End Test Output'",
            "git checkout 0123456 lib/tests/test_sums.py",
        ]
    )


def swe_bench(**changed: Any) -> dict[str, Any]:
    """Return a record of SWE-bench in the edition of swebench 5, where test lists are JSON text."""
    return {
        "repo": "sympy/sympy",
        "instance_id": "sympy__sympy-1",
        "base_commit": "0123456789abcdef0123456789abcdef01234567",
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": "Sums are differences.",
        "hints_text": "",
        "created_at": "2020-01-01T00:00:00Z",
        "version": "1.5",
        "FAIL_TO_PASS": '["test_add"]',
        "PASS_TO_PASS": '["test_nothing", "test_zero"]',
        "environment_setup_commit": "fedcba9876543210fedcba9876543210fedcba98",
        "difficulty": "<15 min fix",
        "eval_script": eval_script(SYMPY, "python -m pip install -e ."),
        "log_parser": "parse_log_sympy",
        "eval_type": "pass_and_fail",
        **changed,
    }


def swe_gym(**changed: Any) -> dict[str, Any]:
    """Return a record of SWE-Gym, where test lists are lists and repository names keep their case."""
    return {
        "instance_id": "Project-MONAI__MONAI-1",
        "hints_text": "",
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "created_at": "2021-01-01 00:00:00",
        "problem_statement": "Sums are differences.",
        "repo": "Project-MONAI/MONAI",
        "base_commit": "0123456789abcdef0123456789abcdef01234567",
        "version": "0.1",
        "PASS_TO_PASS": ["lib/tests/test_sums.py::test_zero"],
        "FAIL_TO_PASS": ["lib/tests/test_sums.py::test_add"],
        **changed,
    }


def r2e_gym(**changed: Any) -> dict[str, Any]:
    """Return a record of R2E-Gym, where commit and expected outcomes are JSON text."""
    return {
        "repo_name": "aiohttp",
        "docker_image": "namanjain12/aiohttp_final:0123456789abcdef0123456789abcdef01234567",
        "commit_hash": "0123456789abcdef0123456789abcdef01234567",
        "parsed_commit_content": json.dumps(
            {
                "file_diffs": [file_diff("lib/sums.py"), file_diff("tests/test_sums.py"), file_diff("CHANGES.rst")],
                "old_commit_hash": "0123456789abcdef0123456789abcdef01234567^",
                "new_commit_hash": "0123456789abcdef0123456789abcdef01234567",
                "commit_message": "Sums are sums",
                "commit_date": "2020-01-01T00:00:00",
                "metadata": {},
            }
        ),
        "execution_result_content": "{}",
        "modified_files": ["lib/sums.py"],
        "modified_entity_summaries": [{"ast_type_str": "function", "name": "add"}],
        "relevant_files": ["lib/sums.py"],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 2,
        "prompt": "Write an issue.",
        "problem_statement": "[ISSUE]\nSums are differences.\n[/ISSUE]",
        "expected_output_json": json.dumps(
            {"\x1b[1mtest_add\x1b[0m": "PASSED", "TestAll.test_zero - AssertionError": "FAILED", "": "PASSED"}
        ),
        **changed,
    }


def file_diff(path: str) -> dict[str, Any]:
    """Return a file's part of an R2E-Gym commit that changes line 2."""
    lines = [("def add(a, b):", "context"), ("    return a - b", "deleted"), ("    return a + b", "added")]
    both = {"start": 1, "length": 2}
    return {
        "old_file_content": "def add(a, b):\n    return a - b\n",
        "new_file_content": "def add(a, b):\n    return a + b\n",
        "header": {"file": {"path": path}, "misc_line": None},
        "index_line": {"old_commit_hash": "aaaaaaa", "new_commit_hash": "bbbbbbb", "mode": "100644"},
        "is_binary_file": False,
        "binary_line": None,
        "minus_file": {"path": f"a/{path}"},
        "plus_file": {"path": f"b/{path}"},
        "hunks": [
            {
                "descriptor": {"old_range": both, "new_range": both, "section": ""},
                "line_group": {"all_lines": [{"content": text, "type": kind} for text, kind in lines]},
                "modified_entities": [],
                "added_entities": [],
                "deleted_entities": [],
            }
        ],
    }
