# SPDX-License-Identifier: Apache-2.0
"""What a forked child of the supervisor does inside a container to copy a file in or out.

Paths are looked up in there, so that links lead where they lead for the sandbox's own programs, and nowhere else.

Who is inside can have an error of a file look like one of the machine, after which a rollout is tried again. What
such a file can be told by is said here, as an error that is the file's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator
from typing import Any

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.isolation.joining import Place, by_names_inside, join


COPY_CHUNK = 1 << 20

LEASED_S = 1.0
"""How long somebody inside who has a lease on a file may take to give it up, which the kernel has him told."""

LEASED_PAUSE_S = 0.02

LOOKS = 20
"""At a file that can't be opened, before that is the disk's fault."""

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE})
"""What a file system says that takes no more; that of message queues says the last."""


def put(place: Place, path: str, mode: int | None, source: int) -> tuple[dict[str, Any], list[int]]:
    """Make ``path`` a file with the contents of ``source``; missing folders are made. Never half a file. Without a
    ``mode`` it keeps the one it has, if there is one."""
    join(place)
    with by_names_inside(), _named(path):
        return _put(path, mode, source), []


def _put(path: str, mode: int | None, source: int) -> dict[str, Any]:
    folder, name = os.path.split(path)
    there = _made(folder)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"{path} is a folder; name the file")
    if os.path.islink(path):
        path = os.path.realpath(path)
        os.close(there)
        there = os.open(os.path.dirname(path), _FOLDER)
    existed = os.path.exists(path)
    if mode is None:
        mode = stat.S_IMODE(os.stat(path).st_mode) if existed else 0o644
    fresh = f".{uuid.uuid4().hex}"
    with _in_file_system_of(there, folder):
        target = _open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, there)
        try:
            copied = _copy(source, target, None)
            os.fchmod(target, mode)
            os.rename(fresh, os.path.basename(path), src_dir_fd=there, dst_dir_fd=there)
        except OSError:
            os.unlink(fresh, dir_fd=there)
            raise
    return {"bytes": copied, "name": name, "existed": existed}


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors are of the path that was asked for, not of what is on the way there or beside it for a moment."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


@by_names_inside()
def get(place: Place, path: str, limit: int, target: int) -> tuple[dict[str, Any], list[int]]:
    """Copy the ordinary file ``path`` into ``target``; at most ``limit`` bytes, however it grows meanwhile.

    With the rights of the sandbox's commands, which ``/proc`` tells nothing of the first process.
    """
    join(place)
    syscalls.keep_capabilities(place.capabilities)
    source = _open_to_read(path)
    found = os.fstat(source)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, f"{path} is a folder; name a file")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path} is not an ordinary file")
    if found.st_size > limit:
        # Said before a gigabyte of it, or of its holes, was copied.
        raise OSError(errno.EFBIG, f"{path} has {found.st_size} bytes, more than the limit of {limit}")
    try:
        copied = _copy(source, target, limit)
    except OSError as error:
        if error.errno == errno.EIO and not _on_disk(found):
            raise OSError(errno.EINVAL, f"{path} can't be read through") from error
        raise
    return {"bytes": copied, "mode": stat.S_IMODE(found.st_mode)}, []


def _made(folder: str) -> int:
    """A folder, made if it is missing, with those above it. Step by step, so that no link that changes is followed
    to another one when it is asked whose error there was."""
    there = os.open("/", _FOLDER)
    for name in filter(None, folder.split("/")):
        above = there
        try:
            there = os.open(name, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            with _in_file_system_of(above, folder), contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            there = os.open(name, _FOLDER, dir_fd=above)
        os.close(above)
    return there


@contextlib.contextmanager
def _in_file_system_of(there: int, folder: str) -> Iterator[None]:
    """That there is no room is the machine's, unless it is in a file system of the sandbox's own in memory."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and os.fstat(there).st_dev != os.stat("/").st_dev:
            raise OSError(errno.EFBIG, f"there is no room for it in the file system of {folder}") from error
        raise


def _open_to_read(path: str) -> int:
    """Open what may be a file. That it can't be read is the disk's only if it is an ordinary one every time: who is
    inside can have a name lead to a terminal that fails, and quickly to something else."""
    for _ in range(LOOKS):
        try:
            # Without O_NONBLOCK a named pipe would hold us for ever.
            return _open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if not _on_disk(os.stat(path)):
                raise OSError(errno.EINVAL, f"{path} is not an ordinary file") from error
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _on_disk(found: os.stat_result) -> bool:
    """Whether a file can have an error of a disk: none of the kernel's own can."""
    kernels = {os.stat(folder).st_dev for folder in ("/proc", "/sys")}
    return stat.S_ISREG(found.st_mode) and bool(found.st_size) and found.st_dev not in kernels


def _open(path: str, flags: int, folder: int | None = None) -> int:
    """Open a file; what somebody inside has a lease on he has to give up soon."""
    deadline = time.monotonic() + LEASED_S
    while True:
        try:
            return os.open(path, flags, 0o600, dir_fd=folder)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, f"{path} is held by a program that does not let go of it") from error
            time.sleep(LEASED_PAUSE_S)


def _copy(source: int, target: int, limit: int | None) -> int:
    copied = 0
    while chunk := os.read(source, COPY_CHUNK):
        copied += len(chunk)
        if limit is not None and copied > limit:
            raise OSError(errno.EFBIG, f"larger than the limit of {limit} bytes")
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
    return copied
