# SPDX-License-Identifier: Apache-2.0
"""Deleting what sandboxes left, in small steps, however it was made: deep, long, closed to its owner.

What an agent can make with relative names may be deeper than any path is long, and than a recursion goes. Folders too
far down are moved up first. Files of users that exist only in a sandbox with several of them are removed by a child
that joins their user namespace.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import user_domain


LONG_PATH = 2048
"""Bytes of a path beyond which a folder is moved to the top; no path of the kernel's may have 4096."""

STEPS = 64
"""Files that are removed before others get their turn."""

ATTEMPTS = 3

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
    top = os.fsencode(folder)
    todo: list[tuple[bytes, int]] = [(top, 0)]
    moved = done = 0
    while todo:
        path, visits = todo.pop()
        if visits:
            try:
                _forced(os.rmdir, path)
                continue
            except OSError as error:
                # Some file systems skip entries while others are removed.
                if error.errno != errno.ENOTEMPTY or visits >= ATTEMPTS:
                    raise
        todo.append((path, visits + 1))
        for name, is_folder in _entries(path):
            entry = os.path.join(path, name)
            if not is_folder:
                _forced(os.unlink, entry)
            elif len(entry) > LONG_PATH:
                moved += 1
                higher = os.path.join(top, b".moved-%d" % moved)
                _forced(partial(os.rename, dst=higher), entry)
                todo.append((higher, 0))
            else:
                todo.append((entry, 0))
            done += 1
            if done % STEPS == 0:
                yield True
    yield True


def _entries(path: bytes) -> Iterator[tuple[bytes, bool]]:
    entries = _forced(os.scandir, path)
    if entries is None:
        return
    with entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _forced[T](function: Callable[[bytes], T], path: bytes) -> T | None:
    """Do something to a path, if it is there, also where a sandbox took away its own folders' permissions."""
    try:
        return function(path)
    except FileNotFoundError:
        return None
    except PermissionError:
        for blocked in (os.path.dirname(path), path):
            if not os.path.islink(blocked) and os.path.isdir(blocked):
                os.chmod(blocked, 0o700)
        return function(path)
