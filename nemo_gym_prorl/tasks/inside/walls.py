# SPDX-License-Identifier: Apache-2.0
"""What a process that runs submitted source may not do, though it has its grader's user id.

Without user ids to tell grader and candidate apart, the kernel would let the candidate kill the grader, lower its
limits, or leave notes for the next test. So three walls go up, and none can be taken down again:

- It has no capabilities (:mod:`~nemo_gym_prorl.tasks.inside.privileges`).
- A filter of system calls: no new processes (threads are fine), hence no fork bombs and nothing that outlives a test;
  no signals at all; no limits, priorities or tracing of any process but its own; no IPC objects, which would outlive
  it, and no sockets but pairs, since a closed connection is listed for a minute; no changes to what files *are* (mode,
  owner, times, attributes), which Landlock does not know.
- Landlock: it writes in one folder only. On a kernel without it (before Linux 5.13) files elsewhere stay writable.

All of this but the last step, :func:`lone`, is paid for once for all tests.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

from nemo_gym_prorl.tasks.inside.privileges import LIBC


PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
CLONE_THREAD = 0x10000
MAX_FILES = 4096
"""None of ours has a higher number."""

EPERM, ENOSYS = 1, 38

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""By ``os.uname().machine``, as the filter is told."""

COMMON = {
    "clone3": 435, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "process_madvise": 440,
    "process_mrelease": 448, "io_uring_setup": 425, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip

CALLS = {
    "x86_64": {
        "fork": 57, "vfork": 58, "clone": 56, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "prlimit64": 302, "setpriority": 141, "ioprio_set": 251, "sched_setaffinity": 203, "sched_setscheduler": 144,
        "sched_setparam": 142, "sched_setattr": 314, "fcntl": 72, "ioctl": 16, "shmget": 29, "semget": 64,
        "msgget": 68, "mq_open": 240, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93,
        "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235, "utimensat": 280, "futimesat": 261,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199, "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323, "bpf": 321,
        "perf_event_open": 298, "unshare": 272, "setns": 308, "truncate": 76, "migrate_pages": 256, "move_pages": 279,
        "socket": 41,
    },
    "aarch64": {
        "clone": 220, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "prlimit64": 261,
        "setpriority": 140, "ioprio_set": 30, "sched_setaffinity": 122, "sched_setscheduler": 119,
        "sched_setparam": 118, "sched_setattr": 274, "fcntl": 25, "ioctl": 29, "shmget": 194, "semget": 190,
        "msgget": 186, "mq_open": 180, "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88,
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282, "bpf": 280, "perf_event_open": 241,
        "unshare": 97, "setns": 268, "truncate": 45, "migrate_pages": 238, "move_pages": 239,
        "socket": 198,
    },
}  # fmt: skip
"""Numbers of the system calls that the filter has something to say about."""

BY_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Calls whose first argument is a process: 0, oneself, is fine."""

REFUSED_COMMANDS = {
    "fcntl": (8, 10, 15),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel send a signal to somebody
    "ioctl": (0x8901, 0x8902, 0x5412),  # FIOSETOWN, SIOCSPGRP, TIOCSTI
}
"""Values of a call's second argument."""

# Of Landlock.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
WRITE_FILE, TRUNCATE, REFER = 1 << 1, 1 << 14, 1 << 13
MAKE_AND_REMOVE = 0b1_1111_1111 << 4
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


def end_with_parent() -> None:
    """Be killed when the process that forked this one ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit(what: int, value: int, *, for_good: bool = True) -> None:
    """Bound a resource of this process and its descendants, for good or not, as far as it is not bounded already."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value if for_good else hard))


def limit_thread_stacks(size: int) -> None:
    """Have threads take so many bytes of address space each, whatever the bound of the first thread's stack."""
    attributes = (ctypes.c_char * 256)()
    if hasattr(LIBC, "pthread_setattr_default_np") and LIBC.pthread_attr_init(attributes) == 0:
        LIBC.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size))
        LIBC.pthread_setattr_default_np(attributes)


# --- the filter of system calls ---


def instruction(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    """One instruction of a filter."""
    return struct.pack("=HBBI", code, jt, jf, k & 0xFFFFFFFF)


LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32 = 0x40000000
ALLOW = instruction(RETURN, 0x7FFF0000)


def refuse(number: int) -> bytes:
    """Answer a call with an error."""
    return instruction(RETURN, 0x00050000 | number)


def argument(index: int) -> bytes:
    """Load an argument's lower half, which is all that the kernel reads of these; both machines store it first."""
    return instruction(LOAD, 16 + 8 * index)


def case(number: int, body: bytes) -> bytes:
    """What is done at one system call; the body returns."""
    return instruction(JUMP_EQUAL, number, 0, len(body) // 8) + body


def lone(machine: str) -> bytes:
    """The filter that leaves a process without children: only threads are begun. It stands behind :func:`strict`.

    Raises:
        KeyError: there is no table for this machine.
    """
    thread = argument(0) + instruction(JUMP_SET, CLONE_THREAD, 0, 1) + ALLOW + refuse(EPERM)
    return instruction(LOAD, 0) + case(CALLS[machine]["clone"], thread) + ALLOW


def strict(machine: str) -> bytes:
    """The filter of everything else.

    Raises:
        KeyError: there is no table for this machine.
    """
    calls = {name: number for name, number in {**COMMON, **CALLS[machine]}.items() if name != "clone"}
    # A call of another architecture ends the process.
    program = [
        instruction(LOAD, 4),
        instruction(JUMP_EQUAL, ARCHITECTURES[machine], 1, 0),
        instruction(RETURN, 0x80000000),
        instruction(LOAD, 0),
    ]
    if machine == "x86_64":
        program += [instruction(JUMP_AT_LEAST, X32, 0, 1), refuse(ENOSYS)]
    for name, number in calls.items():
        if name in BY_PROCESS:
            body = argument(0) + instruction(JUMP_EQUAL, 0, 0, 1) + ALLOW + refuse(EPERM)
        elif name in REFUSED_COMMANDS:
            wrong = b"".join(instruction(JUMP_EQUAL, value, 0, 1) + refuse(EPERM) for value in REFUSED_COMMANDS[name])
            body = argument(1) + wrong + ALLOW
        elif name == "setpriority":  # of a user or a group: also the grader's
            own = instruction(JUMP_EQUAL, 0, 0, 3) + argument(1) + instruction(JUMP_EQUAL, 0, 0, 1) + ALLOW
            body = argument(0) + own + refuse(EPERM)
        else:
            body = refuse(ENOSYS if name == "clone3" else EPERM)  # then the C library uses clone
        program.append(case(number, body))
    return b"".join(program) + ALLOW


class FilterProgram(ctypes.Structure):
    """As the kernel is given one."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(program: bytes) -> None:
    """Be under a filter from now on.

    Raises:
        OSError: the kernel refuses.
    """
    given = FilterProgram(len(program) // 8, program)
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


# --- Landlock ---


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 if it has none."""
    return max(0, int(LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def write_only_in(folder: str, version: int) -> None:
    """Have no file written, made or removed outside ``folder`` from now on, but for devices that keep nothing.

    Raises:
        OSError: the kernel refuses.
    """
    rights = WRITE_FILE | MAKE_AND_REMOVE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = ctypes.c_uint64(rights)
    ruleset = LIBC.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path, allowed in ((folder, rights), *((device, rights & (WRITE_FILE | TRUNCATE)) for device in DEVICES)):
        try:
            place = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        rule = struct.pack("=Qi", allowed, place)
        failed = LIBC.syscall(ADD_RULE, ruleset, 1, rule, 0) != 0
        os.close(place)
        if failed:
            raise OSError(ctypes.get_errno(), "landlock_add_rule")
    if LIBC.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)
