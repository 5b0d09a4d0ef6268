# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The contents that are too large for a table, one a file, named by their place in the log of outcomes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


_PER_FOLDER = 1000


class ContentFiles:
    """A folder of them.

    Args:
        root: it; made with the first file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._changed: set[Path] = set()

    def write(self, position: int, content: bytes) -> None:
        """Write one, over what a process that died before its commit has left there."""
        path = self._path(position)
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._changed |= {self._root, self._root.parent}
        written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(written, left) :]
            os.fsync(written)
        finally:
            os.close(written)
        self._changed.add(path.parent)

    def sync(self) -> None:
        """Return when the names of those written are on the disk."""
        for folder in self._changed:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        self._changed.clear()

    def read(self, position: int) -> bytes:
        """One of them.

        Raises:
            FileNotFoundError: it was forgotten.
        """
        return self._path(position).read_bytes()

    def remove(self, position: int) -> None:
        """Forget one, which may be gone."""
        path = self._path(position)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            if position % _PER_FOLDER == _PER_FOLDER - 1:
                path.parent.rmdir()

    def _path(self, position: int) -> Path:
        return self._root / f"{position // _PER_FOLDER:09d}" / f"{position:012d}.zst"
