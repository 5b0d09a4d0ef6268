# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Read and write JSON lines: rows and tables of test cases."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, creating parent folders, and return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, sort_keys=True) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def table(test_file: str, name: str) -> list[Any]:
    """Return the rows of the JSON lines file ``name`` beside a test's file."""
    return [json.loads(line) for line in Path(test_file).with_name(name).read_text(encoding="utf-8").splitlines()]
