# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Files with holes in a tar archive, as GNU tar writes them (format PAX 1.0): a map of their data, and the data.

Written out, the holes of a database or a disk image would be most of an archive, and of the next sandbox's disk.
``tarfile`` reads that format and does not write it.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable
from typing import IO, BinaryIO, cast


MOST_PIECES = 4096
"""Of one file; what would be more is taken for data from there on."""

LARGEST = 1 << 32
"""Bytes of data; files with more are written out whole, since readers disagree over the size of such."""

_CHUNK = 1 << 20

Pieces = list[tuple[int, int]]
"""Offset and size of each piece of data, in order."""


def reader(path: str, entry: tarfile.TarInfo, found: os.stat_result) -> IO[bytes]:
    """The contents of a file as they stand in the archive; ``entry`` gets the size, and what tells that it has holes.

    Raises:
        OSError: it can't be read.
    """
    entry.size = found.st_size
    # Somebody who was handed its folder may have put a pipe in its place, which would hold us for ever.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EBUSY, f"{path} is changed while it is read")
    if found.st_blocks * 512 >= found.st_size:
        return file
    try:
        data = pieces(file.fileno(), found.st_size)
    except OSError:
        # A file system that does not know.
        return file
    stored = sum(size for _offset, size in data)
    if stored >= LARGEST or stored == found.st_size:
        return file
    # Readers take the end of the file from the last piece.
    data.append((found.st_size, 0))
    table = "".join(f"{number}\n" for number in (len(data), *(number for piece in data for number in piece)))
    head = table.encode().ljust(-(-len(table) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, b"\0")
    entry.pax_headers = {
        **entry.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": entry.name,
        "GNU.sparse.realsize": str(found.st_size),
    }
    entry.size = len(head) + stored
    return io.BufferedReader(_Condensed(file, head, data), _CHUNK)


def pieces(descriptor: int, size: int) -> Pieces:
    """Where a file has data.

    Raises:
        OSError: the file system does not know.
    """
    found: Pieces = []
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                # Nothing but a hole is left.
                break
            raise
        end = size if len(found) == MOST_PIECES - 1 else min(size, os.lseek(descriptor, begin, os.SEEK_HOLE))
        found.append((begin, end - begin))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return found


class _Condensed(io.RawIOBase):
    """A map and the pieces of a file, one after the other."""

    def __init__(self, file: BinaryIO, head: bytes, data: Iterable[tuple[int, int]]) -> None:
        self._file = file
        self._head = memoryview(head)
        self._pieces = iter(data)
        self._offset = self._left = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._head:
            count = min(len(buffer), len(self._head))
            buffer[:count] = self._head[:count]
            self._head = self._head[count:]
            return count
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._offset, self._left = piece
        count = os.preadv(self._file.fileno(), [buffer[: self._left]], self._offset)
        self._offset += count
        self._left -= count
        return count


def _pieces_of(entry: tarfile.TarInfo) -> Pieces | None:
    """Its map, if it has one; typeshed takes that for a number."""
    return cast(Pieces | None, entry.sparse)


def size_on_disk(entry: tarfile.TarInfo) -> int:
    """Bytes of data that a file in an archive has."""
    data = _pieces_of(entry)
    return entry.size if data is None else sum(size for _offset, size in data)


def write(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: IO[bytes]) -> None:
    """Write the contents of a file of an archive, with its holes.

    Raises:
        ValueError: its map is wrong.
        OSError: they can't be written.
    """
    data = _pieces_of(entry)
    content = archive.extractfile(entry) if data is None else cast(IO[bytes], archive.fileobj)
    if content is None:
        raise ValueError(f"{entry.name!r} has no contents")
    if data is None:
        shutil.copyfileobj(content, target, _CHUNK)
        return
    # One after the other, without the zeros that tarfile would put between.
    content.seek(entry.offset_data)
    end = 0
    for offset, size in data:
        if offset < end or size < 0 or offset + size > entry.size:
            raise ValueError(f"{entry.name!r} has a wrong map of its holes")
        end = offset + size
        target.seek(offset)
        left = size
        while left:
            chunk = content.read(min(_CHUNK, left))
            if not chunk:
                raise ValueError(f"{entry.name!r} was cut off")
            target.write(chunk)
            left -= len(chunk)
    target.truncate(entry.size)
