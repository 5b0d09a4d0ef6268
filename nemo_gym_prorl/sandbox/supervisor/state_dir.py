# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State of sandboxes on disk: ownership by a file lock, and cleanup after a dead supervisor.

Each supervisor owns one folder with all files of its sandboxes. The folder's ``lock`` file is locked while the
supervisor lives; the kernel releases the lock however the supervisor dies. So a folder whose lock can be taken belongs
to a dead supervisor, regardless of reused pids and reboots. The server removes the folder after its supervisor's death
(:mod:`.client`). If the server died too, the user's next supervisor removes the folder (:func:`sweep`).

Processes that a dead supervisor left are found in four ways: recorded pids (the runtime's process), an environment
variable (the runtime's file system helpers), recorded PID namespaces (sandboxed processes) and control groups. A pid
is compared together with the process's start time, since the kernel reuses pids.

The launcher's program deletes the files (``launcher/files.c``), at any depth, path length or permission. Files of a
sandbox with several user ids are deleted as root of a user namespace that maps these ids.
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
from collections.abc import Iterator, Sequence
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
"""Environment variable of each process of the container runtime; the value is the supervisor's state folder."""

STARTER_FILE = "starter"
"""File in a sandbox's folder: pid and start time of the process that executes the runtime (:func:`helpers_of`)."""

PID_NAMESPACE_FILE = "pid_namespace"
"""File in a sandbox's folder: the sandbox's :class:`PidNamespace`, written once the first process exists."""

GROUP_FILE = "cgroup"
"""File in a sandbox's folder: path of the control group, written before the group is created."""

LOCK_FILE = "lock"
"""File in a supervisor's folder: locked while the supervisor lives."""

LONGEST_SOCKET_NAME = "s-12345678/socket"
"""A placeholder with the length of a supervisor's socket path below :func:`state_root`."""

MAX_SOCKET_PATH = 107
"""Bytes of ``sockaddr_un.sun_path`` without the final NUL."""

SCRATCH = "scratch"
"""Folder below :func:`state_root` that contains each :class:`ScratchFolder`."""

POLL_S = 0.01
"""Seconds between looks into ``/proc`` for a PID namespace that the runtime creates or that ends."""


def state_root() -> Path:
    """Return the parent of all supervisors' folders, created if missing: ``$PRORL_STATE``, else ``$TMPDIR/prorl-UID``.

    Machine root uses ``/tmp`` instead of a private TMPDIR, which the unprivileged user ids of root's sandboxes cannot
    enter. All checks except the owner's run before the folder is created.

    Raises:
        PermissionError: the folder belongs to another user.
        OSError: the folder is on a shared file system, its path is too long for a Unix socket, or the user ids of
            root's sandboxes cannot enter it.
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


def create_locked_folder(root: Path) -> tuple[Path, int]:
    """Create a supervisor's folder with a held lock; return the folder and the lock's descriptor. The lock is
    released once all copies of the descriptor, also in forked processes, are closed."""
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
    """Temporary folder that sandboxes may bind; removed by ``close()``, with this object, or by a later :func:`sweep`
    if this process is killed."""

    def __init__(self) -> None:
        root = state_root() / SCRATCH
        root.mkdir(exist_ok=True)
        root.chmod(0o700 if os.geteuid() else 0o711)
        folder, lock = create_locked_folder(root)
        self.close = weakref.finalize(self, _discard, folder, lock)
        # The parent folder cannot be listed by other users, so they would have to guess the random name.
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

    The kernel reuses pids and inode numbers, but a pid and its start time together are unique. A PID namespace ends
    with its first process, before which the kernel ends all others.

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
        """Return the PID namespace of the first process ``init``, a host pid; ``OSError`` if the process has ended."""
        return cls(init, start_time(init) or 0, os.stat(f"/proc/{init}/ns/pid").st_ino)

    @classmethod
    def below(cls, starter: int) -> PidNamespace | None:
        """Return the PID namespace that a descendant of ``starter``, the runtime's process, has created. ``None`` if
        there is none yet. Read from ``/proc``: a sandboxed process that reports to the supervisor may be another than
        the first process."""
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
        """Return whether the first process, and so the PID namespace, exists."""
        return start_time(self.init) == self.started

    @property
    def ending(self) -> bool:
        """Return whether the first process is exiting or has ended, so that all other processes are ending, too."""
        return not self.alive or signals.is_exiting(self.init)

    def kill(self) -> None:
        """Kill the first process; the kernel then kills all other processes of the PID namespace."""
        signals.kill(self.init, self.started)

    def members(self) -> list[int]:
        """Return the host pids of the processes in the PID namespace; scans all processes of the machine."""
        if not self.alive:
            return []
        found = usage.processes_by_namespace([self.number])[self.number]
        # If the PID namespace has ended since, its inode number may belong to another namespace.
        return sorted(found) if self.alive else []


def pid_namespaces_of(folder: Path) -> list[PidNamespace]:
    """Return the PID namespaces that are recorded in a supervisor's folder, ended ones included."""
    return [PidNamespace(*numbers) for numbers in _records(folder, PID_NAMESPACE_FILE)]


def groups_of(folder: Path) -> list[cgroups.Group]:
    """Return the control groups that are recorded in a supervisor's folder; some may not exist any more."""
    found = []
    for record in folder.glob(f"*/{GROUP_FILE}"):
        with contextlib.suppress(FileNotFoundError):
            path = Path(record.read_text())
            # The record is written before the group is created, so the group of a partial record does not exist.
            if path.name == cgroups.group_name(record.parent):
                found.append(cgroups.Group(path, frozenset()))
    return found


def record_starter(folder: Path, pid: int) -> None:
    _record(folder / STARTER_FILE, pid, start_time(pid) or 0)


def helpers_of(folder: Path) -> list[int]:
    """Return the pids of live processes of the runtime that a supervisor has started, by record or environment."""
    starters = _records(folder, STARTER_FILE)
    # The runtime's parent process overwrites its environment, so only its record identifies it.
    mark = f"{OWNER_VARIABLE}={folder}".encode()
    marked = {pid for pid in process_ids() if mark in _variables(pid)}
    return sorted({pid for pid, started in starters if start_time(pid) == started} | marked)


def _record(path: Path, *numbers: int) -> None:
    """Write numbers to a record file atomically: a partial record of a killed writer would fail every sweep."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(" ".join(map(str, numbers)))
    fresh.rename(path)


def _records(folder: Path, name: str) -> list[list[int]]:
    """Return the numbers in each sandbox's record file ``name``; sandboxes without the file are skipped."""
    found = []
    for record in folder.glob(f"*/{name}"):
        with contextlib.suppress(FileNotFoundError):
            found.append([int(number) for number in record.read_text().split()])
    return found


def _variables(pid: int) -> Sequence[bytes]:
    try:
        return process_variables(pid)
    except OSError:  # the process has ended, or belongs to another user
        return ()


def process_ids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


_UNLOCKED_FOLDER_S = 60.0
"""Age in seconds from which a folder without a lock file belongs to a dead supervisor: a start takes milliseconds."""


def sweep(root: Path) -> list[Path]:
    """Kill the processes and remove the folders of all dead supervisors, and remove scratch folders of dead processes.
    Return the removed folders; a folder that cannot be removed is left for the next sweep."""
    folders = sorted([*root.glob("s-*"), *root.glob(f"{SCRATCH}/s-*")])
    return [folder for folder in folders if folder.exists() and remove_if_dead(folder)]


def remove_if_dead(folder: Path, patience_s: float = 5.0) -> bool:
    """Clear a supervisor's folder, as :func:`clear`, if the supervisor is dead; return whether the folder is gone."""
    try:
        lock = _lock_of_dead_owner(folder)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        clear(folder, patience_s)
    except OSError:
        # Processes survive SIGKILL, or a process created a file while the folder was being emptied.
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
    """Kill all processes of a supervisor's sandboxes, then remove their control groups and the supervisor's folder.

    Raises:
        TimeoutError: processes survive SIGKILL for ``patience_s``, such as in uninterruptible I/O; the folder is kept.
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
        # A cleaner of temporary files may have removed the folder.
        return
    # The lock file is removed last: if this process is killed before, the next sweep still removes the folder.
    for entry in folder.iterdir():
        if entry.name != LOCK_FILE:
            remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
    remove_tree(folder)


def _kill_all(folder: Path, groups: Sequence[cgroups.Group]) -> dict[int, int]:
    """Send SIGKILL to the processes of a supervisor's sandboxes; return start time by pid of these processes. In each
    PID namespace only the first process is killed, since the kernel then kills all others."""
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
"""Errors of deleting files of a sandbox's other user ids as an ordinary user."""


def remove_tree(folder: Path) -> None:
    """Remove a folder, as ``rm -rf``, with files of all user ids that this user's sandboxes can have. Blocks.

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
    """Remove a folder, in the user namespace with the descriptor ``parent`` if given; return 0 or an errno."""
    arguments = [launcher.ERASER, os.fspath(folder), *map(str, parent)]
    ended = subprocess.run(
        arguments, executable=launcher.launcher_path(), pass_fds=parent, env={}, check=False
    ).returncode
    return ended if ended >= 0 else errno.EINTR
