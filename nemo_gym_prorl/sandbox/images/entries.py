# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder, and folders in it that several processes and machines fill, use and clear at the same time.

The cache holds everything that set-up builds and can build again. Images, on a file system that may be shared, and
their unpacked copies, on each machine's own disk, follow one set of rules. Invariants:

- An entry becomes visible only after it is complete: it is made in a folder beside its place, which is then renamed.
  A folder can't be renamed over another that has something in it, so the entry that was made first stays. This holds
  on any file system, whatever becomes of the locks and of the makers.
- Each entry has two lock files, which the kernel releases when their holder dies. The maker holds one, so an entry is
  made once. Users share the other, and removal needs it exclusively; its time stamp is the last use of the entry.
- What a killed maker or remover left has no name, and is swept when its lock can be had.
- What has no name yet, or none any more, is closed to other users, who must not run a half-made image's programs.

Where a file system has no locks (Lustre mounted without ``flock``, say), or is shared and may not show them to other
machines, they only save double work: there, whatever was touched within :data:`UNSEEN_S` counts as used.
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

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.filesystems import is_shared
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


Progress = Callable[[str], None]
"""Told one short line, without a full stop, whenever a longer step begins."""


def ignore_progress(_message: str) -> None:
    """The :data:`Progress` of those who do not want to know."""


def cache_dir() -> Path:
    """The cache folder: ``$PRORL_CACHE``, else ``$XDG_CACHE_HOME/nemo-gym-prorl``, else ``~/.cache/nemo-gym-prorl``.

    A relative ``XDG_CACHE_HOME`` is ignored, as its specification asks. The folder need not exist yet.
    """
    if own := os.environ.get("PRORL_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if Path(xdg).is_absolute() else Path("~/.cache").expanduser()
    return base / "nemo-gym-prorl"


def machine() -> str:
    """The processor architecture, e.g. ``x86_64``: part of every name, since unlike nodes may share a home folder."""
    return platform.machine()


UNSEEN_USE_S = 24 * 3600.0
"""How long something may be in use, or in the making, on a machine whose locks can't be seen here."""

_LOCKS = ".locks"

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that is there.

    Attributes:
        name: its name.
        path: its folder.
        last_use: when it was last used, made or, failing that, changed; seconds since 1970.
        used: somebody uses it now, or may.
    """

    name: str
    path: Path
    last_use: float
    used: bool


@dataclass(slots=True)
class Lock:
    """A lock that is held. ``certain`` is false where the file system has none: others may hold it as well."""

    descriptor: int
    certain: bool

    def release(self) -> None:
        """Let go; a copy that another process was given goes on holding it."""
        os.close(self.descriptor)


class Entries:
    """See the module. The folder is made when something is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Where the thing of that name is, or would be."""
        return self.folder / name

    @contextmanager
    def making(
        self, name: str, progress: Progress = ignore_progress, sound: Callable[[], bool] = lambda: True
    ) -> Iterator[Path | None]:
        """Wait until nobody makes the thing; an empty folder to make it in, or ``None`` if it is there by now.

        What is made is kept with :meth:`publish`; everything else in that folder goes.

        Args:
            name: of the thing.
            progress: told if somebody else is waited for.
            sound: whether what is there is good for anything; if not, it is removed first, by its one maker.

        Raises:
            InfrastructureError: the folder can't be written.
        """
        try:
            (self.folder / _LOCKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InfrastructureError(
                f"{self.folder} can't be written ({error.strerror}): set PRORL_CACHE to a folder of yours"
            ) from error
        lock = self._make_lock(name)
        hold = self._lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hold is None:
            progress(f"waiting for somebody else who makes {name}")
            hold = self._lock(lock, fcntl.LOCK_EX)
        assert hold is not None
        try:
            if self.path(name).is_dir() and not sound():
                self.remove(name)
            if self.path(name).is_dir():
                yield None
            else:
                with _staging(self.path(name)) as work:
                    yield work
        finally:
            hold.release()

    def publish(self, made: Path, name: str) -> Path:
        """Give what was made in the folder of :meth:`making` its name; if that is taken, the other one stays."""
        os.utime(made)  # an archive gives its top folder the date that it had elsewhere
        try:
            made.rename(self.path(name))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return self.path(name)

    def use(self, name: str) -> Lock | None:
        """Keep a thing from being removed until the lock is let go of; ``None`` if it is not there. May block while
        it is being made or removed."""
        if not self.path(name).is_dir():
            return None
        hold = self._lock(self._use_lock(name), fcntl.LOCK_SH)
        assert hold is not None
        if not self.path(name).is_dir():
            hold.release()
            return None
        # Somebody else's folder can be used, but not written.
        with contextlib.suppress(PermissionError):
            os.utime(hold.descriptor)
        return hold

    def all(self) -> list[Entry]:
        """Everything that is there, by name."""
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
        """Remove a thing unless it is used; whether it is gone."""
        hold = self._lock(self._use_lock(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hold is None:
            return False
        try:
            # Out of sight in one step, so that nobody meets half of it.
            with _staging(self.path(name)) as work, contextlib.suppress(FileNotFoundError):
                self.path(name).rename(work / "removed")
            return True
        finally:
            hold.release()

    def sweep(self, *, dry_run: bool = False) -> list[Path]:
        """Remove what killed makers and removers left; gives its folders."""
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
            # Not made here: its time stamp would be taken for that of a use.
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
        """Lock a file; ``None`` if that is not to be waited for and somebody else holds it."""
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
        """In somebody else's folder, share the lock where it can be read; what needs it alone is not for us to do."""
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
    """An empty folder of one's own beside ``target``; gone, with all that is in it, at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        remove_tree(folder)


def flush(folder: Path) -> None:
    """Have the file system of ``folder`` write down what it holds in memory.

    A shared one is left alone: it writes what is closed, and hurrying it would hold up everybody who uses it.
    """
    if is_shared(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), f"{folder} can't be written to its disk")
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where ``folder`` is, or would be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
