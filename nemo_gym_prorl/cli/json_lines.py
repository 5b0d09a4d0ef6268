# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""JSONL files of rows and results."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError


_LONG_INTEGER = re.compile(rb"(?<![\d.eE])\d{19,}(?![\d.eE])")


def json_value(text: bytes) -> Any:
    """Parse UTF-8 JSON with exact integers; orjson alone parses integers beyond 64 bits as floats.

    Raises:
        orjson.JSONDecodeError: the text is not JSON.
    """
    value = orjson.loads(text)
    return json.loads(text) if _LONG_INTEGER.search(text) else value


def json_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield the line numbers (from 1) and values of a JSONL file. An invalid line yields a :class:`CallerError` as its
    value, and an empty line yields nothing.

    Args:
        path: the file; ``.gz`` files are decompressed.
        growing: whether the file may still be written, so that an incomplete last line is skipped.

    Raises:
        CallerError: the file cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield number, json_value(line)
                    except orjson.JSONDecodeError as error:
                        if growing and not line.endswith(b"\n"):
                            return
                        yield number, CallerError(f"is not JSON: {error}")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CallerError(f"cannot be read: {reason}", field=str(path)) from error


def read_rollouts(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rollouts of a results file by line number (from 1), without an incomplete last line.

    Raises:
        CallerError: the file cannot be read, or a line is not a rollout.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, row in json_lines(path, growing=True):
        if isinstance(row, CallerError):
            raise CallerError(row.reason, field=f"{path}:{number}")
        if not isinstance(row, dict) or not row.keys() & {"response", "rollout"}:
            raise CallerError("is not a rollout", field=f"{path}:{number}")
        found[number] = row
    return found
