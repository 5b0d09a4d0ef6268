# SPDX-License-Identifier: Apache-2.0
"""Deleting what sandboxes left, in small steps, however it was made: deep, long, closed to its owner.

What an agent can make with relative names may be deeper than any path is long, and than a recursion goes. Folders too
far down are moved up first. Files of users that exist only in a sandbox with several of them are removed by a child
that joins their user namespace.

What is removed somebody may still hold open and change meanwhile: another sandbox that was handed a folder. So no
path is looked up twice. Each name is one in a folder that is held open, to which no link led. And as root each folder
is taken from its owner first, or he could fill it faster than it is emptied, with what is counted as nobody's. An
ordinary user's sandboxes are all the same owner's: there, who was handed a folder can do so for as long as he lives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import user_domain
from nemo_gym_prorl.sandbox.isolation.syscalls import change_mode, open_folder_beneath
from nemo_gym_prorl.sandbox.limits.walk import FOLDER


LONG_PATH = 2048
"""Bytes of a path beyond which a folder is moved to the top; no path of the kernel's may have 4096."""

STEPS = 64
"""Files that are removed before others get their turn."""

ATTEMPTS = 3

_CHANGED = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What is something else by now than when its folder was read, which can't be removed before that is seen again."""

WAIT_S = 0.002


def remove_tree(folder: Path) -> None:
    """As ``rm -rf``.

    Raises:
        OSError: something can't be removed.
    """
    for done in erase(folder):
        if not done:
            time.sleep(WAIT_S)


def erase(folder: Path) -> Iterator[bool]:
    """Remove a folder with all that is in it, as far as it is there; pauses every so often, with ``False`` to wait.

    Raises:
        OSError: something can't be removed.
    """
    try:
        yield from _erase(folder)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        yield from _erase_as_all_users(folder)


def _erase_as_all_users(folder: Path) -> Iterator[bool]:
    """As an ordinary user, what belongs to users of his range: as the root of them all."""
    child = user_domain.fork_as_all_users(lambda: deque(_erase(folder), maxlen=0))
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        yield False
    user_domain.raise_for(ended[1], folder)


def _erase(folder: Path) -> Iterator[bool]:
    try:
        top = _open(os.fsencode(folder), None)
    except FileNotFoundError:
        return
    try:
        yield from _empty(top, folder)
    finally:
        os.close(top)


def _empty(top: int, folder: Path) -> Iterator[bool]:
    todo: list[tuple[bytes, int]] = [(b".", 0)]
    moved = done = 0
    while todo:
        path, visits = todo.pop()
        if visits:
            try:
                _remove(path, top, folder)
                continue
            except OSError as error:
                # Some file systems skip entries while others are removed.
                if error.errno != errno.ENOTEMPTY or visits >= ATTEMPTS:
                    raise
        with contextlib.suppress(*_CHANGED), _below(path, top) as here:
            todo.append((path, visits + 1))
            with os.scandir(here) as entries:
                for entry in entries:
                    name = os.fsencode(entry.name)
                    entry_path = os.path.join(path, name)
                    with contextlib.suppress(*_CHANGED):
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(name, dir_fd=here)
                        elif len(entry_path) > LONG_PATH:
                            moved += 1
                            higher = b".moved-%d" % moved
                            # Who moves a folder must be allowed to change it.
                            os.close(_open(name, here))
                            os.rename(name, higher, src_dir_fd=here, dst_dir_fd=top)
                            todo.append((higher, 0))
                        else:
                            todo.append((entry_path, 0))
                    done += 1
                    if done % STEPS == 0:
                        yield True
    yield True


def _remove(path: bytes, top: int, folder: Path) -> None:
    """Remove an empty folder."""
    with contextlib.suppress(*_CHANGED):
        if path == b".":
            os.rmdir(folder)
        else:
            with _below(os.path.dirname(path), top) as above:
                os.rmdir(os.path.basename(path), dir_fd=above)


@contextlib.contextmanager
def _below(path: bytes, top: int) -> Iterator[int]:
    """The folder at a path below an open one, on the way to which there is no link."""
    above = open_folder_beneath(os.path.dirname(path) or b".", top)
    try:
        found = _open(os.path.basename(path), above)
    finally:
        os.close(above)
    try:
        yield found
    finally:
        os.close(found)


def _open(name: bytes, above: int | None) -> int:
    """Open a folder, also where a sandbox took away its own folders' permissions, for its owner to do all in it."""
    try:
        found = os.open(name, FOLDER, dir_fd=above)
    except PermissionError:
        change_mode(name, above, 0o700, os.O_DIRECTORY)
        found = os.open(name, FOLDER, dir_fd=above)
    try:
        status = os.fstat(found)
        if os.geteuid() == 0 and (status.st_uid or status.st_mode & 0o022):
            os.fchown(found, 0, 0)
            os.fchmod(found, 0o700)
        elif os.geteuid() and ~status.st_mode & 0o700:
            os.fchmod(found, 0o700)
    except OSError:
        os.close(found)
        raise
    return found
