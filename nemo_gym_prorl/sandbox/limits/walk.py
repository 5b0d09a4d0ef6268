# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How much a sandbox has written, in steps: what lies in its folders, and what it holds open without a name.

Those inside want to be counted for less than they take. So a folder may lie deeper than any path is long, a file may
be one that nobody finds by a name any more, a file of memory may be mapped by no process, a folder may be closed even
to its owner, a million empty files take no block but use up the disk's inodes, and a million folders use up memory and
time of whoever walks them. So a walk goes depth first and knows few names at a time, and tells how long it took. And
any folder may become a link to one of the host's meanwhile: no link is followed, on the way to a folder either.

Not seen: a file without a name that is only on its way over a socket, or, by an ordinary user's server, only mapped.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from nemo_gym_prorl.sandbox.isolation.syscalls import have_same_files, open_folder_beneath
from nemo_gym_prorl.sandbox.limits import threads


STEP = 64
"""Files that are looked at before others have their turn."""

LEAST_SIZE = 4096
"""Bytes that each file, link and folder counts at least: it takes an inode and a name."""

LONG_PATH = 2048
"""Bytes of a path beyond which it goes on from an open folder; the kernel takes no path of 4,096."""

WIDE = 64
"""Folders in one folder beyond which it stays open while those are walked, and then is read further."""

MOST_STAGES = 64
"""Such open folders at a time. What lies deeper, below 131,072 bytes of names, nobody made but to hide it."""

MOST_NAMES = 2048
"""Folders that a walk knows of and has not come to. No more than :data:`WIDE` are of one folder."""

BLOCK = 512

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE = " (deleted)"
_PART = struct.Struct("qq?d")


@dataclass(slots=True)
class Found:
    """What there is.

    Attributes:
        disk: bytes on disk.
        largest: size of the largest file.
        hidden: some folder lies deeper than anybody looks, or below too many others.
        seconds: processor time that it took.
        held: bytes in files of memory, by the number of a process that holds them; each counts once.
    """

    disk: int = 0
    largest: int = 0
    hidden: bool = False
    seconds: float = 0.0
    held: dict[int, int] = field(default_factory=dict)


class _Folder:
    """An open folder, closed when nobody needs it any more."""

    def __init__(self, path: str, at: _Folder | None) -> None:
        self.depth: int = at.depth + 1 if at else 0
        self.number: int = open_folder_beneath(path, at.number) if at else os.open(path, FOLDER)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@dataclass(slots=True)
class _Level:
    """A folder of which something is left to walk.

    Attributes:
        stage: an open folder.
        path: the folder's, from there; empty if it is that one itself.
        names: folders in it that are to be walked.
        rest: its entries that have not been read.
    """

    stage: _Folder
    path: str = ""
    names: list[str] = field(default_factory=list)
    rest: Iterator[os.DirEntry[str]] | None = None

    @property
    def left(self) -> bool:
        return bool(self.names) or self.rest is not None


def walk(folders: Iterable[str], processes: Iterable[int], first: int, found: Found) -> Iterator[None]:
    """Add up in ``found`` what there is; pauses every so many files. What vanishes meanwhile does not count.

    Args:
        folders: whose contents count.
        processes: whose open files count.
        first: the first process of the sandbox.
        found: is added to.
    """
    return _paced(chain(_of_processes(processes, found), _of_folders(tuple(folders), first, found)), found)


def _paced(parts: Iterator[None], found: Found) -> Iterator[None]:
    """Pause every so often only, and add up the time between."""
    begin = time.thread_time()
    for number, _ in enumerate(parts):
        if number % STEP == 0:
            found.seconds += time.thread_time() - begin
            yield
            begin = time.thread_time()
    found.seconds += time.thread_time() - begin


def _of_folders(folders: tuple[str, ...], first: int, found: Found) -> Iterator[None]:
    before = found.disk
    try:
        for folder in folders:
            yield from _below(folder, found, closed=False)
    except PermissionError:
        yield from _from_inside(folders, first, before, found)


def _below(top: str, found: Found, *, closed: bool) -> Iterator[None]:
    """What lies in a folder, depth first.

    Raises:
        PermissionError: some of it is closed to us, and that was not to be left out (``closed``).
    """
    try:
        levels = [_Level(_Folder(top, None), "", ["."])]
    except OSError:
        return
    known = 1
    while levels:
        yield
        level = levels.pop()
        above, path = level.stage, level.path
        try:
            if level.names:
                known -= 1
                name = level.names.pop()
                path = f"{path}/{name}" if path else name
                if level.left:
                    levels.append(level)
                folder = _Folder(path, above)
                level = _Level(folder, rest=os.scandir(folder.number))
            yield from _read(level, found, closed=closed)
        except OSError as error:
            if isinstance(error, PermissionError) and not closed:
                raise
            continue
        known += len(level.names)
        if level.rest is None and len(path) <= LONG_PATH:
            level.stage, level.path = above, path
        if known > MOST_NAMES or level.stage.depth > MOST_STAGES:
            found.hidden = True
            known -= len(level.names)
        elif level.left:
            levels.append(level)


def _read(level: _Level, found: Found, *, closed: bool) -> Iterator[None]:
    """Count entries of a folder, until there are many folders among them."""
    for entry in level.rest or ():
        yield
        try:
            status = entry.stat(follow_symlinks=False)
        except PermissionError:
            if not closed:
                raise
            continue
        except OSError:
            # It is gone.
            continue
        found.disk += max(status.st_blocks * BLOCK, LEAST_SIZE)
        if not stat.S_ISDIR(status.st_mode):
            found.largest = max(found.largest, status.st_size)
            continue
        level.names.append(entry.name)
        if len(level.names) == WIDE:
            return
    level.rest = None


def _from_inside(folders: tuple[str, ...], first: int, before: int, found: Found) -> Iterator[None]:
    """What lies in folders of which some are closed to us, by a child that joins the user namespace of ``first``.

    There it has every right. One does it all, a step whenever it is told, so that many such folders are no more work
    than others, and what it does is done in our time.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            _serve(its, folders, first)
        finally:
            os._exit(0)
    its.close()
    try:
        while ours.send(b"+") and (record := ours.recv(_PART.size)):
            disk, largest, hidden, seconds = _PART.unpack(record)
            found.disk = max(found.disk, before + disk)
            found.largest = max(found.largest, largest)
            found.hidden |= hidden
            found.seconds += seconds
            for _ in range(STEP):
                yield
    except ConnectionError:
        # It has ended.
        pass
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(channel: socket.socket, folders: tuple[str, ...], first: int) -> None:
    """Walk folders from a user namespace, a step for each message, until there are no more of either."""
    # Among the others are the ends of other walks', which would then never see that the watchdog has ended.
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    # Where it can't be joined, the sandbox has ended, or is root's own.
    with contextlib.suppress(OSError):
        os.setns(os.open(f"/proc/{first}/ns/user", os.O_RDONLY | os.O_CLOEXEC), os.CLONE_NEWUSER)
    part, told = Found(), 0.0
    for _ in _paced(chain.from_iterable(_below(folder, part, closed=True) for folder in folders), part):
        if not channel.recv(1):
            return
        channel.send(_PART.pack(part.disk, part.largest, part.hidden, part.seconds - told))
        told = part.seconds
    if channel.recv(1):
        channel.send(_PART.pack(part.disk, part.largest, part.hidden, part.seconds - told))


def _of_processes(processes: Iterable[int], found: Found) -> Iterator[None]:
    seen: set[tuple[int, int]] = set()
    # More may be told of while we are at it.
    for pid in tuple(processes):
        yield
        known: int | None = None
        for folder in threads.threads(pid):
            yield
            thread = int(folder.rpartition("/")[2])
            if known is not None and have_same_files(known, thread):
                continue
            try:
                paths = [f"{folder}/fd/{number}" for number in os.listdir(f"{folder}/fd")]
            except OSError:
                continue
            # A thread that has ended has none, and one may have a table of its own.
            if paths and known is None:
                known = thread
            for path in paths:
                yield
                _of_file(path, pid, seen, found)
        for path in _mapped(pid):
            yield
            _of_file(path, pid, seen, found)


def _mapped(pid: int) -> list[str]:
    """Where a process's mappings of files without a name lead; the kernel follows these links for root only."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            spans = [line.split(maxsplit=1)[0].split(b"-") for line in file if line.endswith(_GONE.encode() + b"\n")]
    except OSError:
        return []
    return [f"/proc/{pid}/map_files/{int(begin, 16):x}-{int(end, 16):x}" for begin, end in spans]


def _of_file(path: str, pid: int, seen: set[tuple[int, int]], found: Found) -> None:
    # It may have been closed meanwhile.
    with contextlib.suppress(OSError):
        if not os.readlink(path).endswith(_GONE):
            return
        status = os.stat(path)
        file = status.st_dev, status.st_ino
        if file in seen:
            return
        seen.add(file)
        if status.st_dev == _files_of_memory():
            found.held[pid] = found.held.get(pid, 0) + status.st_blocks * BLOCK
        elif not status.st_nlink:
            found.disk += status.st_blocks * BLOCK


@cache
def _files_of_memory() -> int:
    """The device that the kernel says files of memory are on."""
    file = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)
