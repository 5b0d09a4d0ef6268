# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Find and end every process of a tree, including daemons and orphans.

Daemons leave their parents, init adopts orphans, and Ray starts its own sessions, so parents, process groups and names
do not find every process. All descendants inherit the environment. So a unique variable marks the tree at its root,
and marked processes are found in ``/proc``. Linux only.

:class:`ProcessMark` finds and ends such a tree from any process. As a program, this module is the tree's *reaper*. The
reaper starts a command, and ends all marked processes when the command ends, on SIGTERM or SIGINT, and when its own
parent dies. The reaper then removes the tree's scratch folder, and the owner's folder if the owner has died. The
reaper runs in a child of the process that the owner started, since an owner such as a Ray worker may kill its own
children first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn


INTERRUPT_GRACE_S = 15.0
"""Time between SIGINT and SIGKILL for the command; Gym's servers shut down within this time."""

SETTLE_S = 5.0
"""Time for the rest of a tree to end by itself after its root; supervisors remove their sandboxes within this time."""

KILL_S = 5.0
"""Time for killed processes to disappear, before the reaper reports them as alive."""

_POLL_S = 0.1
_LISTENING = "0A"
"""State of a listening TCP socket in ``/proc/net/tcp``."""

_PR_SET_PDEATHSIG = 1

_MAX_ENVIRON = 6 << 20
"""Maximum bytes of variables and arguments that Linux passes to a program (``execve(2)``). A process can make the
kernel report gigabytes (``PR_SET_MM_MAP``), so reads are bounded by this number."""


def interpreter_environ() -> dict[str, str]:
    """Return the environment variables with which this process's Python can be started, and no others."""
    return {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}


def process_variables(pid: int) -> list[bytes]:
    """Return the initial environment variables of a process, each as ``NAME=value``.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    return _read_bounded(f"/proc/{pid}/environ").split(b"\0")


def process_command_line(pid: int) -> bytes:
    """Return the arguments of a process, each followed by a zero byte; the process can change them.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    return _read_bounded(f"/proc/{pid}/cmdline")


def _read_bounded(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = bytearray()
        while len(found) < _MAX_ENVIRON and (chunk := os.read(descriptor, min(1 << 16, _MAX_ENVIRON - len(found)))):
            found += chunk
        return bytes(found)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """An environment variable that marks a process tree.

    Attributes:
        name: name of the variable.
        value: unique value of the variable.
    """

    name: str
    value: str

    def processes(self, spared: Container[int] = ()) -> dict[int, str]:
        """Return the command line of each marked process by pid, except zombies, this process and ``spared`` pids."""
        needle = f"{self.name}={self.value}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid() or int(entry.name) in spared:
                continue
            # A process may have ended, or belong to another user, at any of these reads.
            with contextlib.suppress(OSError):
                if needle in process_variables(int(entry.name)):  # a zombie has no variables
                    words = process_command_line(int(entry.name)).replace(b"\0", b" ")
                    found[int(entry.name)] = words.decode(errors="replace").strip()
        return found

    async def wait_gone(self, timeout_s: float, spared: Container[int] = ()) -> dict[int, str]:
        """Wait up to ``timeout_s`` seconds until no marked process lives; return the remaining processes by pid."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = await asyncio.to_thread(self.processes, spared)
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(_POLL_S)

    async def kill(
        self, *, settle_s: float = SETTLE_S, kill_s: float = KILL_S, spared: Container[int] = ()
    ) -> dict[int, str]:
        """Wait up to ``settle_s`` seconds for marked processes to end, then send SIGKILL for up to ``kill_s`` seconds.

        Returns:
            Command lines by pid of the processes that still live; empty on success.
        """
        left = await self.wait_gone(settle_s, spared)
        deadline = time.monotonic() + kill_s
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            left = await self.wait_gone(_POLL_S, spared)
        return left


def is_port_taken_by_others(port: int, pids: Iterable[int]) -> bool:
    """Return whether a TCP port of this machine has listeners, and none of them is one of ``pids``."""
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening |= {
                f"socket:[{row[9]}]"
                for row in rows
                if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port
            }
    return bool(listening) and not any(listening & _open_files(pid) for pid in pids)


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()))
    return found


def reaper_command(
    mark: ProcessMark, command: list[str], python: str, scratch: Path, owners: Path | None = None
) -> list[str]:
    """Return the command line that runs ``command`` under a reaper. The caller must start the command line
    with ``mark`` in the environment.

    Args:
        mark: mark of the whole tree.
        command: the command to run.
        python: path of a Python interpreter; the reaper needs no packages.
        scratch: folder that the reaper removes when the tree has ended.
        owners: folder of this process, the owner; the reaper also removes it if the owner has ended.
    """
    # -P keeps modules of this folder from shadowing the standard library.
    return [python, "-P", __file__, str(os.getpid()), mark.name, mark.value, str(scratch), str(owners or ""), *command]


class _Stop(Exception):
    pass


def _ignore_stop_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    _ignore_stop_signals()  # PDEATHSIG may follow as a second signal, and must not shorten the command's grace
    raise _Stop


def _reap(mark: ProcessMark, command: list[str]) -> int:
    status = 128 + signal.SIGTERM
    try:
        child = subprocess.Popen(command)
        try:
            status = child.wait()
        except _Stop:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(INTERRUPT_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    finally:
        _ignore_stop_signals()  # nothing but SIGKILL may interrupt the end of the tree
        asyncio.run(mark.kill(spared={os.getppid()}))
    return status if status >= 0 else 128 - status


def _die_with_parent(parent: int) -> bool:
    """Make the kernel send SIGTERM when the parent ends; return ``False`` if the parent has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    return os.getppid() == parent


def _run_reaper(owner: int, mark: ProcessMark, scratch: str, owners: str, command: list[str]) -> int:
    """Fork the reaper, forward SIGTERM and SIGINT to the reaper, and return its exit code. The reaper also ends the
    tree if this process dies."""
    reaper = 0
    pending: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if reaper:
            with contextlib.suppress(ProcessLookupError):
                os.kill(reaper, signum)
        else:
            pending.append(signum)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    owner_fd: int | None = None
    with contextlib.suppress(ProcessLookupError):
        owner_fd = os.pidfd_open(owner)
    parents_live, ours = _die_with_parent(owner), os.getpid()
    reaper = os.fork()
    if not reaper:
        parents_live = _die_with_parent(ours) and parents_live
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        try:
            return _reap(mark, command) if parents_live else 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            owner_ended = owner_fd is None or select.select([owner_fd], [], [], 0)[0]
            if owners and owner_ended:
                shutil.rmtree(owners, ignore_errors=True)
    for signum in pending:
        os.kill(reaper, signum)
    return os.waitstatus_to_exitcode(os.waitpid(reaper, 0)[1])


if __name__ == "__main__":
    pid, name, value, scratch, owners, *command = sys.argv[1:]
    sys.exit(_run_reaper(int(pid), ProcessMark(name, value), scratch, owners, command))
