# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A solution as a patch that can stand in a row: text that ``git apply`` makes the same bytes of. Pure.

git writes lines of a text file as they are, in whatever encoding. A row is JSON, which has no such bytes; so the parts
of files that are no UTF-8 become what git writes of binary ones.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nemo_gym_prorl.tasks.swe.changes import Entry, Solution


_NO_FILE = "0" * 40
_LINE = 52
"""Bytes in a line of a binary patch; its first letter says how many."""

_LENGTHS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch: what each file's part is, by git's path."""

    parts: Mapping[str, str]

    def within(self, limit: int) -> tuple[str, list[str]]:
        """As much of it as whole files make that are no longer than ``limit`` characters together, and which are not
        in it."""
        text, left_out = "", []
        for path, part in self.parts.items():
            if len(text) + len(part) <= limit:
                text += part
            else:
                left_out.append(path)
        return text, left_out


def read(patch: bytes, solution: Solution, base: Mapping[str, Entry]) -> Patch:
    """Of what ``git diff --binary --no-renames`` printed of a solution."""
    paths = {_head(change.path): change for change in solution.changes}
    parts: dict[str, str] = {}
    for raw in re.split(rb"^(?=diff --git )", patch, flags=re.MULTILINE):
        change = paths.get(raw.partition(b"\n")[0])
        if change is None:
            continue
        try:
            parts[change.path] = raw.decode()
        except UnicodeDecodeError:
            after = solution.contents[change.entry.blob] if change.entry else b""
            blobs = [entry.blob if entry else _NO_FILE for entry in (base.get(change.path), change.entry)]
            lines = raw[: raw.index(b"\n--- ")].decode().split("\n")
            head = [line for line in lines if not line.startswith("index ")]
            index = next(line for line in lines if line.startswith("index ")).split(" ")
            parts[change.path] = "\n".join(
                [*head, " ".join(["index", "..".join(blobs), *index[2:]]), *_literal(after), "", ""]
            )
    return Patch(parts)


def _head(path: str) -> bytes:
    both = (f'"a/{path[1:-1]}"', f'"b/{path[1:-1]}"') if path.startswith('"') else (f"a/{path}", f"b/{path}")
    return f"diff --git {both[0]} {both[1]}".encode()


def _literal(content: bytes) -> Iterator[str]:
    packed = zlib.compress(content)
    yield "GIT binary patch"
    yield f"literal {len(content)}"
    for at in range(0, len(packed), _LINE):
        part = packed[at : at + _LINE]
        yield _LENGTHS[len(part) - 1] + base64.b85encode(part, pad=True).decode()
