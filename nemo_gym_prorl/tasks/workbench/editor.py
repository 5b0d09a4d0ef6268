# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tool ``str_replace_editor``. The server edits the text; only reads and writes of files happen in the sandbox."""

from __future__ import annotations

import errno
import posixpath
import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_gym_prorl.failures import MACHINE_ERRNOS
from nemo_gym_prorl.tasks.workbench.observations import EditorArguments


if TYPE_CHECKING:
    from nemo_gym_prorl.tasks.workbench.workspace import Workspace


UNDO = "undo_edit"

MAX_UNDOS = 30
"""Maximum edits of a session that can be undone, to bound memory."""

MAX_FILE_CHARS = 1 << 20  # larger files are neither shown nor edited, to bound memory
MAX_CHAR_BYTES = 4
"""Bytes of the longest character in UTF-8."""

BYTE_ORDER_MARK = "\ufeff"

NOT_REGULAR_FILE = "is not a regular file"


class Editor:
    """Editor of one session; ``limit`` is the maximum characters of a view."""

    def __init__(self, files: Workspace, folder: str, limit: int) -> None:
        self._files = files
        self._folder = folder
        self._limit = limit
        self._undo_stack: deque[tuple[str, bytes | None]] = deque(maxlen=MAX_UNDOS)

    async def call(self, arguments: EditorArguments) -> str:
        """Execute a call, and return the text for the policy; an OSError is one of the machine, not of the file."""
        path = posixpath.join(self._folder, arguments.path)
        try:
            return await self._edit(arguments, path)
        except IsADirectoryError:
            if arguments.command == "view":
                return await self._files.list_folder(path)
            reason = NOT_REGULAR_FILE
        except ValueError as error:
            reason = str(error)
        except OSError as error:
            if error.errno in MACHINE_ERRNOS:
                raise
            reason = _ERRNO_REASONS.get(error.errno or 0) or error.strerror or str(error)
        return f"Error: {arguments.path}: {reason}"

    async def _edit(self, arguments: EditorArguments, path: str) -> str:
        if "\0" in path:
            raise ValueError("a path cannot contain a NUL character")
        if arguments.command == UNDO:
            return await self._undo(path, arguments.path)
        if arguments.command == "create":
            before = await self._read_existing(path)
            existed = await self._write(path, arguments.file_text or "")
            self._undo_stack.append((path, before if existed else None))
            return f"{'Overwrote' if existed else 'Created'} {arguments.path}."
        data = await self._files.read_file(path, limit=MAX_CHAR_BYTES * MAX_FILE_CHARS)
        if b"\0" in data:
            raise ValueError("is not a text file")
        text = data.decode("utf-8", "surrogateescape")  # keeps bytes that are not UTF-8
        if len(text) > MAX_FILE_CHARS:
            raise ValueError(_ERRNO_REASONS[errno.EFBIG])
        text, mark = text.removeprefix(BYTE_ORDER_MARK), text.startswith(BYTE_ORDER_MARK) * BYTE_ORDER_MARK
        if arguments.command == "view":
            return _numbered_lines(text, arguments.view_range, self._limit)
        text, said = _apply_edit(text, arguments)
        await self._write(path, mark + text)
        self._undo_stack.append((path, data))
        return said

    async def _read_existing(self, path: str) -> bytes | None:
        """Return the content of the file that ``create`` overwrites; ``None`` if there is no readable file."""
        try:
            return await self._files.read_file(path, limit=MAX_CHAR_BYTES * MAX_FILE_CHARS)
        except OSError as error:
            if error.errno in MACHINE_ERRNOS:
                raise
            return None

    async def _undo(self, path: str, named: str) -> str:
        for edit in reversed(self._undo_stack):
            if edit[0] == path:
                break
        else:
            raise ValueError("there is no edit of this file to undo")
        if edit[1] is None:
            raise ValueError("the last edit created it; remove it with bash")
        await self._files.write_file(path, edit[1])
        self._undo_stack.remove(edit)
        return f"Took back the last edit of {named}."

    async def _write(self, path: str, text: str) -> bool:
        return await self._files.write_file(path, text.encode("utf-8", "surrogateescape"))


_ERRNO_REASONS = {
    errno.EINVAL: NOT_REGULAR_FILE,
    errno.EFBIG: f"is longer than {MAX_FILE_CHARS} characters; use bash",
}


def _numbered_lines(text: str, view_range: Sequence[int] | None, limit: int) -> str:
    """Return the lines of a view with numbers, without carriage returns; invalid UTF-8 becomes U+FFFD."""
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    lines = [line.removesuffix("\r") for line in readable.split("\n")]
    count = len(lines) - (lines[-1] == "")
    first, last = view_range or (1, -1)
    last = count if last == -1 else min(last, count)
    if count == 0:
        return "[empty file]"
    if not 1 <= first <= last:
        raise ValueError(f"view_range must lie within the file's {count} lines")
    numbered = "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(lines[first - 1 : last], start=first))
    half = limit // 2
    if len(numbered) > 2 * half:
        return f"{numbered[:half]}\n[... {len(numbered) - 2 * half} characters left out ...]\n{numbered[-half:]}"
    return numbered


def _apply_edit(text: str, arguments: EditorArguments) -> tuple[str, str]:
    """Apply ``str_replace`` or ``insert``; return the new text and the observation.

    New lines get the file's most frequent line ending.
    """
    returns = text.count("\r\n")
    end = "\r\n" if 2 * returns > text.count("\n") else "\n"
    new = (arguments.new_str or "").replace("\r\n", "\n")
    if arguments.command == "str_replace":
        old = arguments.old_str or ""
        found = text.count(old) if old else 0
        if found == 0 and returns and old:  # the policy does not see carriage returns
            any_end = re.compile(r"\r?\n".join(map(re.escape, old.replace("\r\n", "\n").split("\n"))))
            matches = any_end.findall(text)
            old, found = "".join(matches[:1]), len(matches)
        if found != 1:
            raise ValueError(f"old_str occurs {found} times, it must occur exactly once")
        return text.replace(old, new.replace("\n", end)), f"Replaced one occurrence in {arguments.path}."
    lines = text.split("\n")
    at, count = arguments.insert_line or 0, len(lines) - (lines[-1] == "")
    if at > count:
        raise ValueError(f"insert_line is {at}, but the file has {count} lines")
    added = new.split("\n")
    if len(added) > 1 and added[-1] == "":
        added.pop()
    said = f"Inserted {len(added)} lines into {arguments.path} after line {at}."
    if end == "\r\n":
        added = [f"{line}\r" for line in added]
        if at == len(lines):  # the text follows a last line without a line ending
            lines[-1], added[-1] = f"{lines[-1]}\r", added[-1].removesuffix("\r")
    return "\n".join(lines[:at] + added + lines[at:]), said
