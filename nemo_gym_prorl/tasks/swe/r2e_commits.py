# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The fix out of R2E-Gym's ``parsed_commit_content``: a commit, taken apart into files, hunks and lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any


_TEST_FOLDERS = frozenset({"test", "tests", "Test", "Tests"})
_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def fix_of(commit: Mapping[str, Any]) -> str:
    """A commit's patch without tests; empty if there is nothing else in it.

    Raises:
        ValueError: it is no commit.
    """
    try:
        lines = [line for part in commit["file_diffs"] if _is_of_the_fix(part) for line in _lines(part)]
        return "".join(line + "\n" for line in lines)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no commit that was taken apart: {error!r}") from error


def _is_of_the_fix(part: Mapping[str, Any]) -> bool:
    """As the dataset counts: Python, and no test."""
    path = PurePosixPath(part["header"]["file"]["path"])
    is_test = path.name.startswith("test_") or path.name.endswith("_test.py") or _TEST_FOLDERS & {*path.parts}
    return path.suffix == ".py" and not is_test and not part.get("is_binary_file")


def _lines(part: Mapping[str, Any]) -> Iterator[str]:
    """A file's part of the patch."""
    path = part["header"]["file"]["path"]
    yield f"diff --git a/{path} b/{path}"
    if misc := part["header"].get("misc_line"):  # that it is new, or gone
        yield misc
    if index := part.get("index_line"):
        yield f"index {index['old_commit_hash']}..{index['new_commit_hash']} {index.get('mode', '')}".rstrip()
    if part.get("minus_file") and part.get("plus_file"):
        yield f"--- {part['minus_file']['path']}"
        yield f"+++ {part['plus_file']['path']}"
    for hunk in part.get("hunks", ()):
        head = hunk["descriptor"]
        yield f"@@ -{_range(head['old_range'])} +{_range(head['new_range'])} @@ {head.get('section', '')}".rstrip()
        for line in hunk["line_group"].get("all_lines", ()):
            yield _MARKS[line["type"]] + line["content"]


def _range(lines: Mapping[str, int | None]) -> str:
    length = lines.get("length")  # left out where it is 1
    return f"{lines['start']}" if length is None else f"{lines['start']},{length}"
