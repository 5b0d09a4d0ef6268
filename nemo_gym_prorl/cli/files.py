# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""JSONL files of rows and of results, read line by line, also while they are being written."""

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
    """Return the value of JSON with its integers as they stand. orjson reads those beyond 64 bits as floats.

    Raises:
        JSONDecodeError: it is no JSON.
    """
    value = orjson.loads(text)
    return json.loads(text) if _LONG_INTEGER.search(text) else value


def json_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[int, Any]]:
    """The values of a JSONL file with their lines, counted from 1, without the empty ones. In place of a line that is
    no JSON stands the error that says so.

    Args:
        path: the file.
        growing: leave a last line out that is not written to its end.

    Raises:
        CallerError: it cannot be read.
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
    """Return the rollouts of a file of results by line, also while the file is being written.

    Raises:
        CallerError: a line is no rollout.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, row in json_lines(path, growing=True):
        if isinstance(row, CallerError):
            raise CallerError(row.reason, field=f"{path}:{number}")
        if not isinstance(row, dict) or not row.keys() & {"response", "rollout"}:
            raise CallerError("is no rollout", field=f"{path}:{number}")
        found[number] = row
    return found
