# SPDX-License-Identifier: Apache-2.0
"""The few kernel calls that sandboxes need and Python's ``os`` lacks: mounts, process controls, capabilities.

Used only by the supervisor and the short-lived children it forks, which are single-threaded: the kernel lets no other
process change its user namespace.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from pathlib import Path


MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
"""Numbers of the capabilities that root keeps inside a sandbox: chown, dac_override, fowner, fsetid, kill, setgid,
setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod, audit_write and setfcap, as is customary for containers.
Without sys_admin nothing can be mounted, without sys_ptrace nothing that has more rights can be looked into, and
without sys_resource the limits below can't be lifted."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """``mount(2)``."""
    done = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(done, f"mount on {target}")


def prctl(option: int, value: int) -> None:
    """``prctl(2)`` with one argument."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Make sure that nothing this process executes ever has more than :data:`KEPT_CAPABILITIES`."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1):
        if number not in KEPT_CAPABILITIES:
            prctl(PR_CAPBSET_DROP, number)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def walled_in(path: Path) -> Path | None:
    """The outermost folder above ``path`` that strangers may not enter, or ``None`` if the way is free."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def expose(paths: Sequence[Path]) -> None:
    """Let an unprivileged user id reach ``paths``, though they lie below folders that are closed to it.

    In this process's own mount namespace each closed folder is covered by an empty one in which only ``paths`` appear.
    The rest of the machine sees no change. Needs root.
    """
    walls = {path: wall for path in paths if (wall := walled_in(path))}
    if not walls:
        return
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in walls}
    for wall in set(walls.values()):
        mount("tmpfs", str(wall), "tmpfs", 0, "mode=755,size=64k")
    for path, descriptor in held.items():
        path.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", str(path), "", MS_BIND | MS_REC)
        os.close(descriptor)
