# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``str_replace_editor`` with various line ends, byte order marks and encodings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from nemo_gym_prorl.tasks.workbench.editor import Editor
from nemo_gym_prorl.tasks.workbench.observations import EditorArguments


@dataclass
class OneFile:
    """File access to a single file under any name."""

    data: bytes

    async def read_file(self, _path: str, *, limit: int) -> bytes:
        return self.data[:limit]

    async def write_file(self, _path: str, data: bytes) -> bool:
        self.data = data
        return True

    async def list_folder(self, _path: str) -> str:
        raise NotADirectoryError


def editor(file: OneFile) -> Editor:
    return Editor(file, "/", 2000)  # type: ignore[arg-type]


async def call(tool: Editor, command: str, **arguments: Any) -> str:
    return await tool.call(EditorArguments(command=command, path="f", **arguments))  # type: ignore[arg-type]


EDITED = [
    ("line feeds", b"a\nb\nc\n", "a\nb", "x\ny", b"x\ny\nc\n"),
    ("over a CRLF", b"a\r\nb\r\nc\r\n", "a\nb", "x\ny", b"x\r\ny\r\nc\r\n"),
    ("mixed ends, mostly CRLF", b"a\r\nb\nc\r\nd\r\n", "b\nc", "x\ny", b"a\r\nx\r\ny\r\nd\r\n"),
    ("special to patterns", b"f(a.b)\r\n[c]*\r\n", "f(a.b)\n[c]*", "\\1\ng", b"\\1\r\ng\r\n"),
    ("first line behind a byte order mark", b"\xef\xbb\xbfa\nb\n", "a\nb", "x", b"\xef\xbb\xbfx\n"),
    ("line separators are no line ends", "a\u2028b\x0bc\x85\n".encode(), "b", "x", "a\u2028x\x0bc\x85\n".encode()),
    ("insert: line feeds", b"a\nb\n", 1, "x", b"a\nx\nb\n"),
    ("insert: CRLF", b"a\r\nb\r\n", 1, "x\ny", b"a\r\nx\r\ny\r\nb\r\n"),
    ("insert: LF without a last line end", b"a\nb", 2, "x", b"a\nb\nx"),
    ("insert: an empty file", b"", 0, "x", b"x\n"),
]
"""Name, content, old text or line of an insertion, new text, and new content."""


@pytest.mark.parametrize(("data", "old", "new", "wanted"), [row[1:] for row in EDITED], ids=[row[0] for row in EDITED])
async def test_edit_keeps_line_ends_and_can_be_undone(data: bytes, old: str | int, new: str, wanted: bytes) -> None:
    file = OneFile(data)
    tool = editor(file)
    if isinstance(old, str):
        assert await call(tool, "str_replace", old_str=old, new_str=new) == "Replaced one occurrence in f."
    else:
        assert (await call(tool, "insert", insert_line=old, new_str=new)).startswith("Inserted ")
    assert file.data == wanted
    await call(tool, "undo_edit")
    assert file.data == data


@pytest.mark.parametrize(
    ("data", "old", "times"),
    [
        (b"a\r\nb\r\na\r\nb\r\n", "a\nb", 2),
        (b"a\nb\n", "a\r\nb", 0),
        (b"a\nb\n", "", 0),
    ],
)
async def test_ambiguous_old_str_is_refused(data: bytes, old: str, times: int) -> None:
    file = OneFile(data)
    said = await call(editor(file), "str_replace", old_str=old, new_str="x")
    assert said == f"Error: f: old_str occurs {times} times, it must occur exactly once"
    assert file.data == data


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"a\r\nb\r\n", "     1\ta\n     2\tb"),
        (b"\xef\xbb\xbfa\n", "     1\ta"),
        (b"caf\xe9\n", "     1\tcaf\ufffd"),
        (b"", "[empty file]"),
        (b"\x7fELF\0\0", "Error: f: is not a text file"),
        ("a\n".encode("utf-16"), "Error: f: is not a text file"),
    ],
)
async def test_view(data: bytes, shown: str) -> None:
    assert await call(editor(OneFile(data)), "view") == shown
