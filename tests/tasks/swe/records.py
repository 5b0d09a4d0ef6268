# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Invented records of the published datasets, made of the named records of ``conversions.jsonl``."""

from __future__ import annotations

from typing import Any

from tests.tasks import rows_file


BASES = {
    row["base"]: row["record"] for row in rows_file.table(rows_file.__file__, "conversions.jsonl") if "base" in row
}
PATCH: str = BASES["swe-bench"]["patch"]
TEST_PATCH: str = BASES["swe-bench"]["test_patch"]

SET_UP = "python -m pip install -e ."
COMMAND = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose lib/tests/test_sums.py"


def eval_script(command: str, *before: str) -> str:
    """Return a record's test script with another set-up and test command."""
    script: str = BASES["swe-bench"]["eval_script"]
    return script.replace(SET_UP, "\n".join(before)).replace(COMMAND, command)


def swe_bench(**changed: Any) -> dict[str, Any]:
    """Return a record of SWE-bench in the edition of swebench 5, where test lists are JSON text."""
    return BASES["swe-bench"] | changed


def swe_gym(**changed: Any) -> dict[str, Any]:
    """Return a record of SWE-Gym, where test lists are lists and repository names keep their case."""
    return BASES["swe-gym"] | changed


def r2e_gym(**changed: Any) -> dict[str, Any]:
    """Return a record of R2E-Gym, where commit and expected outcomes are JSON text."""
    return BASES["r2e-gym"] | changed
