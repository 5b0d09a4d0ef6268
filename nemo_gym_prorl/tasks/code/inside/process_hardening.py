# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Privilege reduction for processes that run submitted source under the grader's user id.

Grader and candidate share a user id, so without restrictions the candidate could kill the grader, change its limits,
or leave data for the next test. Three irreversible restrictions prevent this:

- No capabilities.
- A seccomp filter, passed with the job (``tasks/code/grading.py``): no new processes, no signals.
- Landlock: writes are limited to one folder. Without Landlock (before Linux 5.13) other files stay writable.

The zygote applies all three once for all tests. Children add the filter that forbids forks.
Functions that install a restriction raise :class:`OSError` if the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct


PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
SECCOMP_MODE_FILTER = 2
MAX_FILES = 4096
"""Number above all file descriptors that this program opens."""

# Landlock: system call numbers, and bits of access rights (linux/landlock.h).
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
WRITE_FILE, TRUNCATE, REFER = 1 << 1, 1 << 14, 1 << 13
MAKE_AND_REMOVE = 0b1_1111_1111 << 4
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")

LIBC = ctypes.CDLL(None, use_errno=True)


def hide() -> None:
    """Make this process and its forks uninspectable (not dumpable) for unprivileged processes of the same user."""
    if LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def drop_privileges() -> None:
    """Drop all capabilities irreversibly, since a sandbox may run as root of its own user namespace."""
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)(*[0] * 6)
    if LIBC.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit(what: int, value: int, *, for_good: bool = True) -> None:
    """Set the soft limit of an ``RLIMIT_*`` resource, at most the hard limit; with ``for_good`` the hard limit too."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value if for_good else hard))


def limit_thread_stacks(size: int) -> None:
    """Set the stack bytes of new threads, independent of the main thread's; no-op without support in the C library."""
    attributes = (ctypes.c_char * 256)()
    if hasattr(LIBC, "pthread_setattr_default_np") and LIBC.pthread_attr_init(attributes) == 0:
        LIBC.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size))
        LIBC.pthread_setattr_default_np(attributes)


class FilterProgram(ctypes.Structure):
    """The kernel's ``struct sock_fprog``: a BPF program and the number of its instructions."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter, given as BPF instructions of 8 bytes each."""
    given = FilterProgram(len(program) // 8, program)
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version; 0 without Landlock."""
    return max(0, int(LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def write_only_in(folder: str, version: int) -> None:
    """Restrict writing, creating and removing files to ``folder`` and :data:`DEVICES`, by Landlock ``version``."""
    rights = WRITE_FILE | MAKE_AND_REMOVE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = ctypes.c_uint64(rights)
    ruleset = LIBC.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path, allowed in ((folder, rights), *((device, rights & (WRITE_FILE | TRUNCATE)) for device in DEVICES)):
        try:
            parent = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        rule = struct.pack("=Qi", allowed, parent)
        failed = LIBC.syscall(ADD_RULE, ruleset, 1, rule, 0) != 0
        os.close(parent)
        if failed:
            raise OSError(ctypes.get_errno(), "landlock_add_rule")
    if LIBC.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)
