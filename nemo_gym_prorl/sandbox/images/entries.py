# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The cache folder, and the entries that several processes and machines create, use and remove there concurrently.

The cache holds the results of set-up, which can be built again. Two folders of entries follow the same rules:
images, on a file system that may be shared, and their unpacked copies on each machine's own disk. Invariants:

- An entry becomes visible only after it is complete: it is made in a folder beside its place, which is then renamed. A
  folder can't be renamed over a non-empty one, so the first entry stays. Both rules hold on any file system, even
  if locks fail or makers die.
- Each entry has two lock files, which the kernel releases when their holder dies. The maker holds a lock, so that an
  entry is made once. Users share the other, and removal needs it exclusively; its modification time is the last use of
  the entry.
- Folders that a killed maker or remover left are not visible, and are swept once their lock is free.
- Folders that are not visible are closed to other users, who must not run programs of an incomplete image.

Some file systems have no locks, and on shared ones locks may not reach other machines. There the locks only avoid
duplicate work, and entries touched within :data:`UNSEEN_USE_S` count as used.
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
    """Return the cache folder: ``$PRORL_CACHE``, else ``$XDG_CACHE_HOME/nemo-gym-prorl``, else
    ``~/.cache/nemo-gym-prorl``.

    A relative ``XDG_CACHE_HOME`` is ignored, as its specification demands. The folder need not exist.
    """
    if own := os.environ.get("PRORL_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if Path(xdg).is_absolute() else Path("~/.cache").expanduser()
    return base / "nemo-gym-prorl"


def machine() -> str:
    """Return the processor architecture, e.g. ``x86_64``; part of entry names, since different nodes may share a home
    folder."""
    return platform.machine()


UNSEEN_USE_S = 24 * 3600.0
"""Longest assumed use or build on a machine whose locks are invisible here."""

_LOCKS = ".locks"

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Entry:
    """One complete entry.

    Attributes:
        last_use: time of the last use, or else of the creation; seconds since 1970.
        used: whether the entry is or may be in use.
    """

    name: str
    path: Path
    last_use: float
    used: bool


@dataclass(slots=True)
class Lock:
    """A lock that is held. ``certain`` is false on file systems without locks, where others may hold it as well."""

    descriptor: int
    certain: bool

    def release(self) -> None:
        """Release the lock; a copy of its descriptor in another process keeps it."""
        os.close(self.descriptor)


class Entries:
    """The entries of one folder, which is created on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return the folder of an entry, whether or not it exists."""
        return self.folder / name

    @contextmanager
    def making(
        self, name: str, progress: Progress = ignore_progress, is_valid: Callable[[], bool] = lambda: True
    ) -> Iterator[Path | None]:
        """Lock an entry for creation; yields an empty folder to build in, or ``None`` if the entry exists by then.

        :meth:`publish` makes the entry visible; all other files in the folder are removed at the end.

        Args:
            progress: receives a line if another maker is waited for.
            is_valid: whether an existing entry is usable; an unusable one is removed first.

        Raises:
            InfrastructureError: the folder can't be written.
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
        """Make an entry visible by renaming ``made``; an existing entry stays."""
        os.utime(made)  # an archive may set an old modification time
        try:
            made.rename(self.path(name))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return self.path(name)

    def use(self, name: str) -> Lock | None:
        """Keep an entry from removal until the returned lock is released; ``None`` if the entry does not exist.

        May block while the entry is made or removed.
        """
        if not self.path(name).is_dir():
            return None
        hold = self._lock(self._use_lock(name), fcntl.LOCK_SH)
        assert hold is not None
        if not self.path(name).is_dir():
            hold.release()
            return None
        # Another user's folder can be used, but not written.
        with contextlib.suppress(PermissionError):
            os.utime(hold.descriptor)
        return hold

    def all(self) -> list[Entry]:
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
        hold = self._lock(self._use_lock(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hold is None:
            return False
        try:
            # Hide the entry in one step, so that no process sees a part of it.
            with _staging(self.path(name)) as work, contextlib.suppress(FileNotFoundError):
                self.path(name).rename(work / "removed")
            return True
        finally:
            hold.release()

    def sweep(self, *, dry_run: bool = False) -> list[Path]:
        """Remove folders that killed makers and removers left, and return their paths."""
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
            # Locking would create the lock file, whose modification time would look like a use.
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
        """Lock a file; ``None`` if ``how`` does not wait and another process holds the lock."""
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
        """Share a lock in another user's folder, if it can be read; exclusive locks are refused there."""
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
    """Yield an empty private folder beside ``target``, which is removed with its contents at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        remove_tree(folder)


def flush(folder: Path) -> None:
    """Write the data of the folder's file system to its disk.

    Does nothing on a shared file system: it writes closed files by itself, and a sync would delay all its users.
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
    """Return free bytes on the file system where ``folder`` is or would be created."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
