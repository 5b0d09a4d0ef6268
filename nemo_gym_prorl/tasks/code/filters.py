# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which system calls a process that runs submitted source has: two filters, for :mod:`.inside.walls` to install. Pure.

No new processes (threads are fine), hence no fork bombs and nothing that outlives a test; no signals at all; no
limits, priorities or tracing of any process but its own; no IPC objects, which would outlive it, and no sockets but
pairs, since a closed connection is listed for a minute; no changes to what files *are* (mode, owner, times,
attributes), which Landlock does not know.
"""

from __future__ import annotations

from functools import cache

from nemo_gym_prorl.bpf import ALLOW, REFUSE, UNKNOWN, ByArgument, Verdict, program


CLONE_THREAD = 0x10000
AF_UNIX = 1
LAST = 466
"""``removexattrat``, of Linux 6.13; what came later has not been judged."""

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
        "socket": 41, "socketpair": 53,
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
        "socket": 198, "socketpair": 199,
    },
}  # fmt: skip
"""Numbers of the system calls that the filters have something to say about."""

_ONESELF = ByArgument(0, frozenset({0}), ALLOW, REFUSE)
"""For calls whose first argument is a process."""

_VERDICTS: dict[str, Verdict] = {
    **dict.fromkeys(
        ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), _ONESELF
    ),
    # Of a user or a group it would be the grader's, too.
    "setpriority": ByArgument(0, frozenset({0}), ByArgument(1, frozenset({0}), ALLOW, REFUSE), REFUSE),
    # F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel send a signal to somebody.
    "fcntl": ByArgument(1, frozenset({8, 10, 15}), REFUSE, ALLOW),
    # FIOSETOWN, SIOCSPGRP, TIOCSTI.
    "ioctl": ByArgument(1, frozenset({0x8901, 0x8902, 0x5412}), REFUSE, ALLOW),
    "socketpair": ByArgument(0, frozenset({AF_UNIX}), ALLOW, REFUSE),
    "clone3": UNKNOWN,  # then the C library uses clone
    "clone": ALLOW,  # the zygote's forks
}
"""Of calls that are not simply refused."""


@cache
def filters() -> dict[str, list[str]]:
    """By machine two filters in hexadecimal: a zygote's, and one more for a child, in which only threads are begun."""
    found = {}
    for machine, architecture in ARCHITECTURES.items():
        calls = COMMON | CALLS[machine]
        strict = {number: _VERDICTS.get(name, REFUSE) for name, number in calls.items()}
        lone = {calls["clone"]: ByArgument(0, frozenset({CLONE_THREAD}), ALLOW, REFUSE, mask=CLONE_THREAD)}
        found[machine] = [program(architecture, verdicts, LAST).hex() for verdicts in (strict, lone)]
    return found
