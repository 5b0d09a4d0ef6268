# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The cache folder, and its entries, which several processes and machines create, use and remove concurrently.

The cache contains only what can be built again. Two folders of entries follow the same rules: images, on a file system
that may be shared, and their unpacked copies on each machine's own disk. Invariants:

- An entry becomes visible only when complete, by the rename of a staging folder. A folder can't be renamed over a
  non-empty folder, so the first entry stays. Both rules hold on any file system, even if locks fail or processes die.
- Each entry has two lock files. A process that creates the entry holds the first exclusively, so an entry is created
  once. Processes that use the entry share the second, and a process that removes the entry holds it exclusively. The
  modification time of the second file is the entry's last use. The kernel releases the locks of a dead process.
- Staging folders of killed processes are not visible as entries, and are removed once their lock is free.
- Staging folders are closed to other users, who must not run programs of an incomplete image.

Some file systems have no locks, and on a shared file system locks may be invisible to other machines. There the locks
only avoid duplicate work, and entries used within the last :data:`UNSEEN_USE_S` count as in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.filesystems import is_shared
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


Format = Literal["folder", "sif"]
"""Format of an image: an unpacked root folder, or one file."""

Progress = Callable[[str], None]
"""Receives one short line, without a full stop, at the start of each long step."""


def ignore_progress(_message: str) -> None:
    """:data:`Progress` that prints nothing."""


def cache_dir() -> Path:
    """Return the cache folder, which need not exist: ``$PRORL_CACHE``, else ``$XDG_CACHE_HOME/nemo-gym-prorl``, else
    ``~/.cache/nemo-gym-prorl``."""
    if own := os.environ.get("PRORL_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nemo-gym-prorl"


def machine() -> str:
    """Return the processor architecture, e.g. ``x86_64``; part of entry names, since machines may share a cache."""
    return platform.machine()


UNSEEN_USE_S = 24 * 3600.0
"""Seconds for which an entry counts as in use after its last use, if another machine's locks may be invisible."""

_LOCKS = ".locks"

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # errors of flock on file systems without locks


@dataclass(frozen=True, slots=True)
class Entry:
    """One complete image or unpacked copy in a folder of :class:`Entries`.

    Attributes:
        last_use: time of the last use, or of the creation if never used; seconds since 1970.
        used: whether the entry is or may be in use.
    """

    name: str
    path: Path
    last_use: float
    used: bool


@dataclass(slots=True)
class Lock:
    """A lock that this process holds.

    Attributes:
        descriptor: descriptor of the lock file.
        certain: ``False`` if other processes may hold the lock too, for example because the file system has no locks.
    """

    descriptor: int
    certain: bool

    def release(self) -> None:
        """Close the descriptor. The lock remains while another process has a copy of the descriptor open."""
        os.close(self.descriptor)


class Entries:
    """The entries in one folder, which is created on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return the path of an entry's folder, whether or not the entry exists."""
        return self.folder / name

    @contextmanager
    def making(
        self, name: str, progress: Progress = ignore_progress, is_valid: Callable[[], bool] = lambda: True
    ) -> Iterator[Path | None]:
        """Lock an entry for creation; yield an empty staging folder, or ``None`` if the entry exists once locked.

        The caller makes a folder in the staging folder visible by :meth:`publish`. At the end of the block the staging
        folder is removed with its contents.

        Args:
            progress: receives a line before a wait for another process that creates the entry.
            is_valid: whether an existing entry is usable; an unusable entry is removed first.

        Raises:
            InfrastructureError: the folder of entries can't be written.
        """
        try:
            (self.folder / _LOCKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InfrastructureError(
                f"{self.folder} can't be written ({error.strerror}): set PRORL_CACHE to a folder of your own"
            ) from error
        lock = self._make_lock(name)
        hold = self._lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hold is None:
            progress(f"waiting for another process that makes {name}")
            hold = self._lock(lock, fcntl.LOCK_EX)
        assert hold is not None
        try:
            if self.path(name).is_dir() and not is_valid():
                self.remove(name)
            if self.path(name).is_dir():
                yield None
            else:
                with _staging(self.path(name)) as work:
                    yield work
        finally:
            hold.release()

    def publish(self, made: Path, name: str) -> Path:
        """Make an entry visible by renaming the folder ``made``; an existing entry stays. Return the entry's path."""
        os.utime(made)  # an old modification time, set by an archive, would count as the time of the last use
        try:
            made.rename(self.path(name))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return self.path(name)

    def use(self, name: str) -> Lock | None:
        """Lock an entry against removal, and record the use; return ``None`` if the entry does not exist. May block
        while another process removes the entry."""
        if not self.path(name).is_dir():
            return None
        hold = self._lock(self._use_lock(name), fcntl.LOCK_SH)
        assert hold is not None
        if not self.path(name).is_dir():
            hold.release()
            return None
        # In another user's folder the last use cannot be recorded.
        with contextlib.suppress(PermissionError):
            os.utime(hold.descriptor)
        return hold

    def all(self) -> list[Entry]:
        """Return all entries, sorted by name."""
        if not self.folder.is_dir():
            return []
        now, unseen = time.time(), is_shared(self.folder)
        found = []
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".") or not path.is_dir():
                continue
            lock = self._use_lock(path.name)
            last_use = (lock if lock.exists() else path).stat().st_mtime
            found.append(Entry(path.name, path, last_use, self._in_use(path.name, last_use, now, unseen)))
        return found

    def remove(self, name: str) -> bool:
        """Remove an entry unless a process uses the entry; return whether the entry is gone."""
        hold = self._lock(self._use_lock(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hold is None:
            return False
        try:
            # Rename the entry first: other processes must not see an entry with a part of its files removed.
            with _staging(self.path(name)) as work, contextlib.suppress(FileNotFoundError):
                self.path(name).rename(work / "removed")
            return True
        finally:
            hold.release()

    def sweep(self, *, dry_run: bool = False) -> list[Path]:
        """Remove staging folders of killed processes, and return their paths; with ``dry_run`` only return them."""
        if not self.folder.is_dir():
            return []
        unseen = is_shared(self.folder)
        left = []
        for path in sorted(self.folder.glob(".*-*")):
            hold = self._lock(self._make_lock(path.name[1:].rpartition("-")[0]), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if hold is None:
                continue
            try:
                old = time.time() - path.stat().st_mtime > UNSEEN_USE_S
                if old or (hold.certain and not unseen):
                    left.append(path)
                    if not dry_run:
                        remove_tree(path)
            except FileNotFoundError:
                continue
            finally:
                hold.release()
        return left

    def _in_use(self, name: str, last_use: float, now: float, unseen: bool) -> bool:
        if not self._use_lock(name).exists():
            # A lock would create the file, whose modification time would count as a use.
            return unseen and now - last_use < UNSEEN_USE_S
        hold = self._lock(self._use_lock(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hold is None:
            return True
        hold.release()
        return (unseen or not hold.certain) and now - last_use < UNSEEN_USE_S

    def _use_lock(self, name: str) -> Path:
        return self.folder / _LOCKS / f"{name}.use"

    def _make_lock(self, name: str) -> Path:
        return self.folder / _LOCKS / f"{name}.make"

    def _lock(self, path: Path, how: int) -> Lock | None:
        """Lock a file; return ``None`` if another process holds the lock and ``how`` includes ``LOCK_NB``."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return self._lock_of_others(path, how)
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return Lock(descriptor, certain=False)
            os.close(descriptor)
            raise
        return Lock(descriptor, certain=True)

    def _lock_of_others(self, path: Path, how: int) -> Lock | None:
        """Lock a file in a folder that this user cannot write; return ``None`` for exclusive locks."""
        if not how & fcntl.LOCK_SH:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return Lock(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), certain=False)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, how)
        return Lock(descriptor, certain=False)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        remove_tree(folder)


def flush(folder: Path) -> None:
    """Write unwritten data of the folder's whole file system to disk (``syncfs``); raise ``OSError`` if that fails.

    Does nothing on a shared file system, which writes files when they are closed; a sync would delay all its users.
    """
    if is_shared(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), f"{folder} can't be synced to its disk")
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the file system of ``folder``; the folder need not exist."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
