# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ownership of sandboxes on disk, and removal of what a dead owner left.

Each supervisor has one folder with everything its sandboxes leave on disk. The folder's ``lock`` file is locked for as
long as the supervisor lives; the kernel releases it at its death, however it dies. So a folder whose lock can be taken
is a dead owner's, with no doubt about reused process numbers or reboots, and can be removed. The server removes it as
it notices its supervisor's end (:mod:`.own_supervisor`); where both died at once, the next supervisor of the same user
does (:func:`sweep`).

Processes are found by what was noted down (the runtime's parent), by a variable in their environment (its helpers, for
file systems), by their PID namespace (everything inside) and by their control group, where there are any. A number
alone is never trusted, since the kernel reuses them.

The launcher's program deletes files (``launcher/files.c``), however deep, long or closed they are. Files of users that
exist only in a sandbox with several of them an ordinary user removes as the root of them all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.filesystems import is_shared
from nemo_gym_prorl.processes import process_variables
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, outer_uid
from nemo_gym_prorl.sandbox.isolation.syscalls import first_untraversable_parent
from nemo_gym_prorl.sandbox.launcher import binary
from nemo_gym_prorl.sandbox.limits import cgroups, usage
from nemo_gym_prorl.sandbox.supervisor import signals
from nemo_gym_prorl.sandbox.supervisor.signals import start_time


OWNER_VARIABLE = "PRORL_SANDBOX_OWNER"
"""In the environment of every process of the runtime: the path of the folder of the supervisor that started it."""

STARTER_FILE = "starter"
"""In the folder of each sandbox: number and start time of the process that became the runtime."""

SPACE_FILE = "pid_namespace"
"""In the folder of each sandbox: its :class:`Space`, as soon as it has processes."""

GROUP_FILE = "cgroup"
"""In the folder of each sandbox that has a control group: the path of that, from before it is made."""

LOCK_FILE = "lock"
"""In the folder of an owner: locked for as long as it lives."""

LONGEST_SOCKET = "s-12345678/socket"
"""As long as the path of a supervisor's socket below :func:`state_root`."""

MAX_SOCKET_PATH = 107
"""Bytes of the kernel's field for it, less one."""

LOOK_S = 0.01
"""Between two looks whether the runtime has made its PID namespace yet, which is noted before the image runs."""


def state_root() -> Path:
    """Where the folders of supervisors lie: ``$PRORL_STATE``, else ``$TMPDIR/prorl-UID``. Must be node-local.

    Root's sandboxes run under ids that must be able to get there: from a private TMPDIR root falls back to ``/tmp``.

    What can be known before it is made is checked before: who is refused finds nothing left of it.

    Raises:
        PermissionError: the folder belongs to somebody else.
        OSError: machines share it, its path is too long, or root's sandboxes can't get there.
    """
    temporary = Path(tempfile.gettempdir()).absolute()
    if is_machine_root() and not all(
        folder.stat().st_mode & stat.S_IXOTH for folder in (temporary, *temporary.parents)
    ):
        temporary = Path("/tmp")
    root = Path(os.environ.get("PRORL_STATE") or temporary / f"prorl-{outer_uid()}").absolute()
    if (excess := len(os.fsencode(root / LONGEST_SOCKET)) - MAX_SOCKET_PATH) > 0:
        raise OSError(f"its path is {excess} bytes too long for a Unix socket in it ({MAX_SOCKET_PATH} at most)")
    present = next(path for path in (root, *root.parents) if path.exists())
    if is_shared(present):
        raise OSError(f"{root} is on a file system that other machines may share")
    if is_machine_root() and (wall := first_untraversable_parent(root if present == root else present / "new")):
        raise OSError(f"sandboxes of root run under unprivileged user ids, which can't enter {wall}")
    root.mkdir(parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to somebody else; set PRORL_STATE to a folder of your own")
    # Root's sandboxes run under unprivileged ids that must be able to pass, though not to look around.
    root.chmod(0o700 if os.geteuid() else 0o711)
    return root


def take(root: Path) -> tuple[Path, int]:
    """A new owner's folder, and the descriptor of its lock, which is held until all copies of it are closed."""
    folder = Path(tempfile.mkdtemp(prefix="s-", dir=root))
    folder.chmod(0o700 if os.geteuid() else 0o711)
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        folder.rmdir()
        raise
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


@dataclass(frozen=True, slots=True)
class Space:
    """A container's PID namespace.

    The kernel gives the numbers of namespaces and processes away again. But a process's number *and* start time are
    unique, and while its first process is there, so is the namespace; when that one ends, the kernel has ended all
    others before.
    """

    init: int
    started: int
    number: int

    @classmethod
    def of(cls, init: int) -> Space:
        """The namespace whose first process is ``init``, as the host numbers it."""
        return cls(init, start_time(init) or 0, os.stat(f"/proc/{init}/ns/pid").st_ino)

    @classmethod
    def below(cls, starter: int) -> Space | None:
        """The namespace that the runtime made, whose process outside is ``starter``; ``None`` if there is none yet.

        By the kernel's word: whoever speaks from inside need not be the first process.
        """
        own = os.stat("/proc/self/ns/pid").st_ino
        todo = [starter]
        while todo:
            for child in usage.child_pids(todo.pop()):
                # It may have ended just now.
                with contextlib.suppress(OSError):
                    if (space := cls.of(child)).number != own:
                        return space
                todo.append(child)
        return None

    def note(self, folder: Path) -> None:
        """Note it down in a sandbox's folder."""
        _note(folder / SPACE_FILE, self.init, self.started, self.number)

    @property
    def alive(self) -> bool:
        """Whether its first process lives. The kernel lets it end only after all others inside."""
        return start_time(self.init) == self.started

    @property
    def ending(self) -> bool:
        """Whether its first process is about to end, or has: no other is left in it, or will be."""
        return not self.alive or signals.is_exiting(self.init)

    def kill(self) -> None:
        """Have the kernel end all that is inside."""
        signals.kill(self.init, self.started)

    def members(self) -> list[int]:
        """The live processes in it, as the host numbers them; looks at every process of the machine."""
        if not self.alive:
            return []
        found = _processes(lambda pid: os.stat(f"/proc/{pid}/ns/pid").st_ino == self.number)
        # Had it ended meanwhile, the number may be another's by now, and so may be those that bear it.
        return found if self.alive else []


def spaces_of(folder: Path) -> list[Space]:
    """The PID namespaces that an owner noted down and has not seen empty."""
    return [Space(*numbers) for numbers in _notes(folder, SPACE_FILE)]


def note_group(folder: Path, path: Path) -> None:
    """Note down, in a sandbox's folder, the control group that is about to be made for it."""
    (folder / GROUP_FILE).write_text(str(path))


def groups_of(folder: Path) -> list[cgroups.Group]:
    """The control groups that an owner noted down; those that are gone count as empty."""
    found = []
    for note in folder.glob(f"*/{GROUP_FILE}"):
        with contextlib.suppress(FileNotFoundError):
            path = Path(note.read_text())
            # Half a note is of a group that was not made.
            if path.name == cgroups.group_name(note.parent):
                found.append(cgroups.Group(path, frozenset()))
    return found


def note_starter(folder: Path, pid: int) -> None:
    """Note down, in a sandbox's folder, the process that was forked to become the runtime."""
    _note(folder / STARTER_FILE, pid, start_time(pid) or 0)


def helpers_of(folder: Path) -> list[int]:
    """The live processes of the runtime, outside of containers, that were started for an owner's ``folder``."""
    starters = [(pid, started) for pid, started in _notes(folder, STARTER_FILE)]
    # The runtime's parent overwrites its environment; its file system helpers do not.
    mark = f"{OWNER_VARIABLE}={folder}".encode()
    marked = _processes(lambda pid: mark in process_variables(pid))
    return sorted({pid for pid, started in starters if start_time(pid) == started} | set(marked))


def _note(path: Path, *numbers: int) -> None:
    """Write a note at once: its writer may be killed at any time, and half a note would stop every sweep."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(" ".join(map(str, numbers)))
    fresh.rename(path)


def _notes(folder: Path, name: str) -> list[list[int]]:
    """The numbers in the files of that name of all sandboxes; one that goes away while we look is none any more."""
    found = []
    for note in folder.glob(f"*/{name}"):
        with contextlib.suppress(FileNotFoundError):
            found.append([int(number) for number in note.read_text().split()])
    return found


def _processes(test: Callable[[int], bool]) -> list[int]:
    return [pid for pid in process_ids() if _holds(test, pid)]


def _holds(test: Callable[[int], bool], pid: int) -> bool:
    # A process that ended just now, or somebody else's, is none of ours.
    try:
        return test(pid)
    except OSError:
        return False


def process_ids() -> Iterator[int]:
    """The numbers of all processes that can be seen."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


_UNFINISHED_S = 60.0
"""A folder without a lock that is younger than this may be one whose owner is just starting."""


def sweep(root: Path) -> list[Path]:
    """Remove what dead owners left: processes, then files. Returns their folders; live ones are not touched."""
    # What can't be removed is the next sweep's; the others need not wait for it.
    return [folder for folder in sorted(root.glob("s-*")) if folder.exists() and bury(folder)]


def bury(folder: Path, patience_s: float = 5.0) -> bool:
    """Remove what the owner of ``folder`` left, if it is dead; returns whether nothing of it is left."""
    try:
        lock = _lock_of_the_dead(folder)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        clear(folder, patience_s)
    except OSError:
        # Processes that do not die, or a file that came while its folder was emptied.
        return False
    finally:
        os.close(lock)
    return True


def _lock_of_the_dead(folder: Path) -> int | None:
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - folder.stat().st_mtime < _UNFINISHED_S:
            return None
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def clear(folder: Path, patience_s: float = 5.0) -> None:
    """Kill every process that belongs to the owner's ``folder``, then remove it.

    Raises:
        TimeoutError: processes are left that even SIGKILL does not end, waiting for a device, say; the folder stays.
    """
    deadline = time.monotonic() + patience_s
    groups = groups_of(folder)
    while remains := _kill_all(folder, groups):
        while living := [pid for pid, started in remains.items() if start_time(pid) == started]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {living} of {folder} do not die")
            time.sleep(0.005)
    for group in groups:
        group.remove()
    if not folder.is_dir():
        # Somebody clears old folders away.
        return
    # The lock goes last: whoever is killed on the way leaves a folder that can be told to be a dead one's.
    for entry in folder.iterdir():
        if entry.name != LOCK_FILE:
            remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
    remove_tree(folder)


def _kill_all(folder: Path, groups: Sequence[cgroups.Group]) -> dict[int, int]:
    """Kill what there is; returns the numbers and start times of those that had to be killed.

    The first process of each sandbox ends all others inside, and only after them. One look at all processes of the
    machine finds the runtime's helpers, however many sandboxes there were.
    """
    for group in groups:
        group.kill()
    known = {space.init: space.started for space in spaces_of(folder) if space.alive}
    known |= {pid: started for pid in helpers_of(folder) if (started := start_time(pid)) is not None}
    grouped = [pid for group in groups for pid in group.processes()]
    known |= {pid: started for pid in grouped if (started := start_time(pid)) is not None}
    for pid, started in known.items():
        signals.kill(pid, started)
    return known


OTHERS = frozenset({errno.EPERM, errno.EACCES})
"""What an ordinary user is told of files of users that are not he."""


def remove_tree(folder: Path) -> None:
    """As ``rm -rf``. Blocks.

    Raises:
        OSError: something can't be removed.
    """
    number = _erase(folder)
    if number in OTHERS and not is_machine_root():
        parent, one_user = user_ids.make_parent_namespace()
        try:
            number = number if one_user else _erase(folder, parent)
        finally:
            os.close(parent)
    if number:
        raise OSError(number, os.strerror(number), str(folder))


def _erase(folder: Path, *parent: int) -> int:
    """The number of the error, or 0."""
    arguments = [binary.ERASER, os.fspath(folder), *map(str, parent)]
    ended = subprocess.run(
        arguments, executable=binary.launcher_path(), pass_fds=parent, env={}, check=False
    ).returncode
    return ended if ended >= 0 else errno.EINTR
