# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State of sandboxes on disk: ownership by a lock, and removal of a dead supervisor's remains.

Each supervisor owns one folder with all files of its sandboxes. The folder's ``lock`` file is locked
while the supervisor lives; the kernel releases the lock on any death. So a folder whose lock can be taken belongs to
a dead supervisor, regardless of reused pids and reboots. The server removes the folder when
it notices its supervisor's death (:mod:`.client`). If both died, the user's next supervisor removes the files
(:func:`sweep`).

Processes of a dead supervisor are found by four marks: recorded pids (the runtime's process), an environment variable
(the runtime's file system helpers), PID namespaces (processes inside) and control groups. A pid is never trusted
without its start time, since the kernel reuses pids.

The launcher's program deletes the files (``launcher/files.c``), at any depth, path length or permission. In a sandbox
with several user ids, an ordinary user deletes files of those ids as root of a user namespace that maps them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.filesystems import is_shared
from nemo_gym_prorl.processes import process_variables
from nemo_gym_prorl.sandbox import launcher, signals
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, outer_uid
from nemo_gym_prorl.sandbox.isolation.syscalls import first_untraversable_parent
from nemo_gym_prorl.sandbox.limits import cgroups, usage
from nemo_gym_prorl.sandbox.signals import start_time


logger = logging.getLogger(__name__)

OWNER_VARIABLE = "PRORL_SANDBOX_OWNER"
"""Environment variable of every process of the runtime: the state folder of the supervisor that started it."""

STARTER_FILE = "starter"
"""File in a sandbox's folder: pid and start time of the process that executed the runtime."""

PID_NAMESPACE_FILE = "pid_namespace"
"""File in a sandbox's folder: its :class:`PidNamespace`, once its first process exists."""

GROUP_FILE = "cgroup"
"""File in a sandbox's folder: path of the control group, written before the group is made."""

LOCK_FILE = "lock"
"""File in a supervisor's folder: locked while the supervisor lives."""

LONGEST_SOCKET_NAME = "s-12345678/socket"
"""A placeholder with the length of a supervisor's socket path below :func:`state_root`."""

MAX_SOCKET_PATH = 107
"""Bytes of ``sockaddr_un.sun_path`` without the final NUL."""

SCRATCH = "scratch"
"""Folder below :func:`state_root` of folders that binds may show."""

POLL_S = 0.01
"""Interval of looking for the runtime's PID namespace, which must be recorded before the image runs."""


def state_root() -> Path:
    """Return the folder of all supervisors' folders: ``$PRORL_STATE``, else ``$TMPDIR/prorl-UID``. Node-local.

    Root's sandboxes run under unprivileged ids, which cannot enter a private TMPDIR; root then falls back to ``/tmp``.
    All checks but ownership run before the folder is made.

    Raises:
        PermissionError: the folder belongs to another user.
        OSError: the folder is on a shared disk, its path is too long, or root's sandboxes cannot enter it.
    """
    temporary = Path(tempfile.gettempdir()).absolute()
    if is_machine_root() and not all(
        folder.stat().st_mode & stat.S_IXOTH for folder in (temporary, *temporary.parents)
    ):
        temporary = Path("/tmp")
    root = Path(os.environ.get("PRORL_STATE") or temporary / f"prorl-{outer_uid()}").absolute()
    if (excess := len(os.fsencode(root / LONGEST_SOCKET_NAME)) - MAX_SOCKET_PATH) > 0:
        raise OSError(f"the path is {excess} bytes too long for a Unix socket in it ({MAX_SOCKET_PATH} at most)")
    present = next(path for path in (root, *root.parents) if path.exists())
    if is_shared(present):
        raise OSError(f"{root} is on a file system that other machines may share")
    if is_machine_root() and (wall := first_untraversable_parent(root if present == root else present / "new")):
        raise OSError(f"sandboxes of root run under unprivileged user ids, which can't enter {wall}")
    root.mkdir(parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to another user; set PRORL_STATE to a folder of your own")
    # Unprivileged ids of root's sandboxes may traverse the folder but not list it.
    root.chmod(0o700 if os.geteuid() else 0o711)
    return root


def take(root: Path) -> tuple[Path, int]:
    """Make a supervisor's folder; return it with the descriptor of its lock, held until all copies are closed."""
    folder = Path(tempfile.mkdtemp(prefix="s-", dir=root))
    folder.chmod(0o700 if os.geteuid() else 0o711)
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        folder.rmdir()
        raise
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


class ScratchFolder:
    """A folder that binds may show; removed with this object, or by a sweep after the death of this process."""

    def __init__(self) -> None:
        root = state_root() / SCRATCH
        root.mkdir(exist_ok=True)
        root.chmod(0o700 if os.geteuid() else 0o711)
        folder, lock = take(root)
        self.close = weakref.finalize(self, _discard, folder, lock)
        # Only processes that know the random name can enter the folder.
        self.path = folder / secrets.token_hex(16)
        self.path.mkdir()
        self.path.chmod(0o755)


def _discard(folder: Path, lock: int) -> None:
    try:
        remove_tree(folder)
    except OSError as error:
        logger.warning("%s stays until the next sweep: %s", folder, error.strerror)
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class PidNamespace:
    """Identity of a sandbox's PID namespace.

    The kernel reuses pids and namespace numbers, but pid and start time together are unique. The namespace exists as
    long as its first process, which the kernel ends after all others.

    Attributes:
        init: pid of the first process on the host.
        started: start time of the first process, in ticks since boot.
        number: inode number of the namespace.
    """

    init: int
    started: int
    number: int

    @classmethod
    def of(cls, init: int) -> PidNamespace:
        """Return the namespace whose first process has the host pid ``init``."""
        return cls(init, start_time(init) or 0, os.stat(f"/proc/{init}/ns/pid").st_ino)

    @classmethod
    def below(cls, starter: int) -> PidNamespace | None:
        """Return the namespace that the runtime's process ``starter`` has made; ``None`` if it does not exist yet.

        Read from ``/proc``, since a process inside that reports need not be the first one.
        """
        own = os.stat("/proc/self/ns/pid").st_ino
        todo = [starter]
        while todo:
            for child in usage.child_pids(todo.pop()):
                # A process may end at any time.
                with contextlib.suppress(OSError):
                    if (namespace := cls.of(child)).number != own:
                        return namespace
                todo.append(child)
        return None

    def record(self, folder: Path) -> None:
        _record(folder / PID_NAMESPACE_FILE, self.init, self.started, self.number)

    @property
    def alive(self) -> bool:
        """Return whether the first process, and so the namespace, exists."""
        return start_time(self.init) == self.started

    @property
    def ending(self) -> bool:
        """Return whether the first process is exiting or has ended; the kernel has then ended all others."""
        return not self.alive or signals.is_exiting(self.init)

    def kill(self) -> None:
        """Kill the first process; the kernel then kills all others."""
        signals.kill(self.init, self.started)

    def members(self) -> list[int]:
        """Return the host pids of the live processes in the namespace; read every process of the machine."""
        if not self.alive:
            return []
        found = _processes(lambda pid: os.stat(f"/proc/{pid}/ns/pid").st_ino == self.number)
        # If the namespace ended meanwhile, its number may belong to another one.
        return found if self.alive else []


def pid_namespaces_of(folder: Path) -> list[PidNamespace]:
    """Return the recorded PID namespaces of a supervisor's sandboxes."""
    return [PidNamespace(*numbers) for numbers in _records(folder, PID_NAMESPACE_FILE)]


def record_group(folder: Path, path: Path) -> None:
    """Record the path of a control group in a sandbox's folder, before the group is made."""
    (folder / GROUP_FILE).write_text(str(path))


def groups_of(folder: Path) -> list[cgroups.Group]:
    """Return the recorded control groups of a supervisor's sandboxes; missing groups count as empty."""
    found = []
    for record in folder.glob(f"*/{GROUP_FILE}"):
        with contextlib.suppress(FileNotFoundError):
            path = Path(record.read_text())
            # A partial record belongs to a group that was not made.
            if path.name == cgroups.group_name(record.parent):
                found.append(cgroups.Group(path, frozenset()))
    return found


def record_starter(folder: Path, pid: int) -> None:
    """Record the process that will execute the runtime in a sandbox's folder."""
    _record(folder / STARTER_FILE, pid, start_time(pid) or 0)


def helpers_of(folder: Path) -> list[int]:
    """Return the live processes of the runtime, outside of sandboxes, that a supervisor has started."""
    starters = [(pid, started) for pid, started in _records(folder, STARTER_FILE)]
    # The runtime's parent overwrites its environment; its file system helpers do not.
    mark = f"{OWNER_VARIABLE}={folder}".encode()
    marked = _processes(lambda pid: mark in process_variables(pid))
    return sorted({pid for pid, started in starters if start_time(pid) == started} | set(marked))


def _record(path: Path, *numbers: int) -> None:
    """Write a record atomically: a partial one, left by a killed writer, would fail every sweep."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(" ".join(map(str, numbers)))
    fresh.rename(path)


def _records(folder: Path, name: str) -> list[list[int]]:
    """Return the numbers in the records of that name of all sandboxes; a record may vanish meanwhile."""
    found = []
    for record in folder.glob(f"*/{name}"):
        with contextlib.suppress(FileNotFoundError):
            found.append([int(number) for number in record.read_text().split()])
    return found


def _processes(test: Callable[[int], bool]) -> list[int]:
    return [pid for pid in process_ids() if _holds(test, pid)]


def _holds(test: Callable[[int], bool], pid: int) -> bool:
    # The process has ended meanwhile, or belongs to another user.
    try:
        return test(pid)
    except OSError:
        return False


def process_ids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


_UNLOCKED_FOLDER_S = 60.0
"""Age below which a folder without a lock may belong to a supervisor that is starting, which takes milliseconds."""


def sweep(root: Path) -> list[Path]:
    """Remove remains of dead supervisors: processes, then files.

    Returns:
        The folders removed. A folder that cannot be removed stays for the next sweep and does not delay the others.
    """
    folders = sorted([*root.glob("s-*"), *root.glob(f"{SCRATCH}/s-*")])
    return [folder for folder in folders if folder.exists() and remove_if_dead(folder)]


def remove_if_dead(folder: Path, patience_s: float = 5.0) -> bool:
    """Remove the processes and the folder of a supervisor that is dead; return whether nothing is left."""
    try:
        lock = _lock_of_dead_owner(folder)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        clear(folder, patience_s)
    except OSError:
        # Processes that survive SIGKILL, or a file that was made while its folder was emptied.
        return False
    finally:
        os.close(lock)
    return True


def _lock_of_dead_owner(folder: Path) -> int | None:
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - folder.stat().st_mtime < _UNLOCKED_FOLDER_S:
            return None
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def clear(folder: Path, patience_s: float = 5.0) -> None:
    """Kill every process of a supervisor's sandboxes, then remove its folder.

    Raises:
        TimeoutError: processes survive SIGKILL, such as in uninterruptible I/O; the folder stays.
    """
    deadline = time.monotonic() + patience_s
    groups = groups_of(folder)
    while remains := _kill_all(folder, groups):
        while living := [pid for pid, started in remains.items() if start_time(pid) == started]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {living} of {folder} survive SIGKILL")
            time.sleep(0.005)
    for group in groups:
        group.remove()
    if not folder.is_dir():
        # A cleaner of temporary files may have removed it.
        return
    # The lock is removed last: after a kill midway the folder is still recognised as a dead supervisor's.
    for entry in folder.iterdir():
        if entry.name != LOCK_FILE:
            remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
    remove_tree(folder)


def _kill_all(folder: Path, groups: Sequence[cgroups.Group]) -> dict[int, int]:
    """Kill all processes of a supervisor's sandboxes; return pid and start time of each process killed.

    The kernel ends all processes of a sandbox with its first one. One scan of the machine's processes finds the
    runtime's helpers of all sandboxes.
    """
    for group in groups:
        group.kill()
    known = {namespace.init: namespace.started for namespace in pid_namespaces_of(folder) if namespace.alive}
    known |= {pid: started for pid in helpers_of(folder) if (started := start_time(pid)) is not None}
    grouped = [pid for group in groups for pid in group.processes()]
    known |= {pid: started for pid in grouped if (started := start_time(pid)) is not None}
    for pid, started in known.items():
        signals.kill(pid, started)
    return known


OTHER_USERS_ERRORS = frozenset({errno.EPERM, errno.EACCES})
"""Errors that an ordinary user gets for files of the other user ids of a sandbox."""


def remove_tree(folder: Path) -> None:
    """Remove a folder, as ``rm -rf``. Blocks.

    Raises:
        OSError: a file cannot be removed.
    """
    number = _erase(folder)
    if number in OTHER_USERS_ERRORS and not is_machine_root():
        parent, one_user = user_ids.make_parent_namespace()
        try:
            number = number if one_user else _erase(folder, parent)
        finally:
            os.close(parent)
    if number:
        raise OSError(number, os.strerror(number), str(folder))


def _erase(folder: Path, *parent: int) -> int:
    """Return the errno of the failure, or 0."""
    arguments = [launcher.ERASER, os.fspath(folder), *map(str, parent)]
    ended = subprocess.run(
        arguments, executable=launcher.launcher_path(), pass_fds=parent, env={}, check=False
    ).returncode
    return ended if ended >= 0 else errno.EINTR
