# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Finding and ending every process of a tree that does not stay a tree.

Servers daemonise, orphans are adopted by init, Ray starts sessions of its own: neither parents, process groups nor
names find them all again. What every descendant does inherit is the environment, so a tree is marked with one unique
variable at its root and found by reading ``/proc``. Linux only, like the sandboxes.

:class:`ProcessMark` finds and ends such a tree from outside. Run as a program, this module is its *reaper*: it starts
a command and ends everything that carries the mark when the command ends, when it is told to (SIGTERM, SIGINT), and
when its own parent dies, however it dies. The tree's scratch folder goes with it, and so does what only a parent that
has died could have removed. The reaper proper is a child of the process that its parent knows: what ends there, as a
worker of Ray does, may kill its children first.
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
"""How long a kept command may take to end after SIGINT before it is killed."""

SETTLE_S = 5.0
"""How long the rest of a tree may take to notice that its root is gone: sandbox reapers finish their work then."""

KILL_S = 5.0
"""How long a killed process may take to vanish before that counts as a failure."""

_POLL_S = 0.1
_LISTENING = "0A"
"""A TCP socket's state in ``/proc/net/tcp``."""

_PR_SET_PDEATHSIG = 1

_MAX_ENVIRON = 6 << 20
"""Bytes of variables and arguments that Linux passes to a program at most (``execve(2)``). A process can make the
kernel report gigabytes for either (``PR_SET_MM_MAP``), so no reader takes more."""


def interpreter_environ() -> dict[str, str]:
    """What this process's Python needs of the environment to be started again, and nothing else: where programs are,
    and where its own library is, for Pythons that a cluster's modules bring."""
    return {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}


def process_variables(pid: int) -> list[bytes]:
    """The variables that a process was given, each as ``NAME=value``.

    Raises:
        OSError: it has ended, or is somebody else's.
    """
    return _beginning(f"/proc/{pid}/environ").split(b"\0")


def process_command_line(pid: int) -> bytes:
    """What a process says that it was started as: its arguments, each with a zero byte behind it.

    Raises:
        OSError: it has ended, or is somebody else's.
    """
    return _beginning(f"/proc/{pid}/cmdline")


def _beginning(path: str) -> bytes:
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
        name: the variable.
        value: what makes it unique.
    """

    name: str
    value: str

    def processes(self, spared: Container[int] = ()) -> dict[int, str]:
        """Living processes that carry the mark, as pid → command line; zombies, ourselves and those that are to be
        ``spared`` do not count."""
        needle = f"{self.name}={self.value}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid() or int(entry.name) in spared:
                continue
            # A process may end, or belong to somebody else, at any of these reads.
            with contextlib.suppress(OSError):
                if needle in process_variables(int(entry.name)):  # a zombie has none
                    words = process_command_line(int(entry.name)).replace(b"\0", b" ")
                    found[int(entry.name)] = words.decode(errors="replace").strip()
        return found

    async def wait_gone(self, timeout_s: float, spared: Container[int] = ()) -> dict[int, str]:
        """Wait until no marked process lives, at most ``timeout_s``; gives those that still do."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = await asyncio.to_thread(self.processes, spared)
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(_POLL_S)

    async def kill(
        self, *, settle_s: float = SETTLE_S, kill_s: float = KILL_S, spared: Container[int] = ()
    ) -> dict[int, str]:
        """Let marked processes end by themselves for ``settle_s``, then kill them for up to ``kill_s``.

        Returns:
            Those that live on in spite of it; empty on success.
        """
        left = await self.wait_gone(settle_s, spared)
        deadline = time.monotonic() + kill_s
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            left = await self.wait_gone(_POLL_S, spared)
        return left


def somebody_else_listens(port: int, pids: Iterable[int]) -> bool:
    """Whether a TCP port of this machine is listened at, but by none of these processes."""
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
    """The command line by which this process runs ``command`` under a reaper; the environment has to carry the mark.

    Args:
        mark: what the whole tree carries.
        command: the command to keep.
        python: an interpreter; it needs no package.
        scratch: a folder that is removed when the tree has ended.
        owners: one that is removed then if the process that started this has ended, too.
    """
    # -P: this folder's modules must not stand in for the standard library's.
    return [python, "-P", __file__, str(os.getpid()), mark.name, mark.value, str(scratch), str(owners or ""), *command]


class _Stop(Exception):
    pass


def _go_on_whatever_is_said() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    _go_on_whatever_is_said()  # a parent that dies says it again, and the command has its grace all the same
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
        _go_on_whatever_is_said()  # the owner may still kill us, and then looks for itself
        asyncio.run(mark.kill(spared={os.getppid()}))
    return status if status >= 0 else 128 - status


def _die_with_parent(parent: int) -> bool:
    """Be told to end when that ends; false if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    return os.getppid() == parent


def _stand_before(owner: int, mark: ProcessMark, scratch: str, owners: str, command: list[str]) -> int:
    """Fork the reaper, pass on what we are told, and end as it does; if we are killed, it is told to end."""
    reaper = 0
    told: list[int] = []

    def tell(signum: int, frame: FrameType | None) -> None:
        if reaper:
            with contextlib.suppress(ProcessLookupError):
                os.kill(reaper, signum)
        else:
            told.append(signum)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    life: int | None = None
    with contextlib.suppress(ProcessLookupError):
        life = os.pidfd_open(owner)
    wanted, ours = _die_with_parent(owner), os.getpid()
    reaper = os.fork()
    if not reaper:
        wanted = _die_with_parent(ours) and wanted
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        try:
            return _reap(mark, command) if wanted else 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if owners and (life is None or select.select([life], [], [], 0)[0]):  # whose it was has ended
                shutil.rmtree(owners, ignore_errors=True)
    for signum in told:
        os.kill(reaper, signum)
    return os.waitstatus_to_exitcode(os.waitpid(reaper, 0)[1])


if __name__ == "__main__":
    pid, name, value, scratch, owners, *command = sys.argv[1:]
    sys.exit(_stand_before(int(pid), ProcessMark(name, value), scratch, owners, command))
