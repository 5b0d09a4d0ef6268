# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The system call filter (seccomp) of sandboxes, stricter than Docker's default profile for the same capabilities.

All sandboxes share the host's kernel, and most known container escapes begin with a system call that ordinary programs
never make. So every program in a sandbox runs under a filter from its first instruction. The launcher installs the
filter last, before ``exec``, and no program can remove it. Refused calls fail with ``EPERM``. Calls newer than the
tables fail with ``ENOSYS``. So does ``clone3``, whose flags a filter cannot read; the C library then calls ``clone``.

The tables follow the profile that Moby maintains (https://github.com/moby/profiles, as of Linux 6.13). The filter is
stricter in these points:

- only sockets of :data:`SOCKET_FAMILIES` can be created;
- no program can insert input into a terminal (``TIOCSTI``, ``TIOCLINUX``), where a shell would run the input;
- no program can trace the sandbox's first process, or set rlimits of another process;
- ``io_setup`` is refused: its quota (``fs.aio-max-nr``) is the machine's, and one sandbox could use it up;
- system calls of another architecture (32-bit programs) kill the process.

No grantable capability needs another filter: ``ptrace`` is allowed in every sandbox.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from nemo_gym_prorl.syscall_filter import ALLOW, MASK_32, REFUSE, UNKNOWN, ArgumentRule, FilterAction, compile_filter


MAX_SYSCALL = 466
"""Highest number of a known system call (``removexattrat`` of Linux 6.13); later calls are not reviewed yet."""

CLONE_NAMESPACE_FLAGS = 0x7E020000
"""All ``clone`` flags that create namespaces: mount, cgroup, UTS, IPC, user, PID, network."""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

SOCKET_FAMILIES = frozenset({AF_UNIX, AF_INET, AF_INET6, AF_NETLINK})
"""Socket families that programs need. Ring buffers of ``AF_PACKET`` and ``AF_XDP`` use memory that no sandbox limit
counts, ``AF_VSOCK`` reaches the host of a virtual machine, and rarely used families have more unfixed bugs."""

_NO_PACKET_TYPE = ArgumentRule(1, frozenset({10}), REFUSE, ALLOW, mask=0xF)
"""Refuses ``SOCK_PACKET``, by which ``AF_INET`` creates sockets of ``AF_PACKET``; the mask leaves flags out."""

PERSONALITIES = frozenset({0, 8, 0x20000, 0x20008, 0xFFFFFFFF})
"""Allowed personalities: Linux, ``PER_LINUX32`` (8), ``UNAME26`` (0x20000), both, and -1, which queries the current
one. None of these disables address randomisation."""

TERMINAL_INPUT_IOCTLS = frozenset({0x5412, 0x541C})
"""``TIOCSTI`` inserts characters into a terminal's input; ``TIOCLINUX`` pastes a selection into it."""

FIRST_PROCESS = frozenset({1})
"""Refused pid of ``ptrace``. A tracer's option can make the kernel kill the sandbox's first process, which would be
attributed to the machine instead of the agent."""

OWN_PROCESS = frozenset({0})
"""Only allowed pid of ``prlimit64``: the caller. A program could otherwise limit the memory of a process that the
supervisor is starting, so that the failure looks like a shortage of memory on the machine."""

CONDITIONAL_RULES: dict[str, ArgumentRule] = {
    "clone": ArgumentRule(0, frozenset({0}), ALLOW, REFUSE, mask=CLONE_NAMESPACE_FLAGS),
    "socket": ArgumentRule(0, SOCKET_FAMILIES, _NO_PACKET_TYPE, REFUSE),
    "socketpair": ArgumentRule(0, frozenset({AF_UNIX}), ALLOW, REFUSE),
    "personality": ArgumentRule(0, PERSONALITIES, ALLOW, REFUSE),
    "ioctl": ArgumentRule(1, TERMINAL_INPUT_IOCTLS, REFUSE, ALLOW),
    "prlimit64": ArgumentRule(0, OWN_PROCESS, ALLOW, REFUSE),
    "ptrace": ArgumentRule(1, FIRST_PROCESS, REFUSE, ALLOW),
}

CLONE3 = 435

_REFUSED_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
}
"""Number by name; system calls from 424 on have the same number on all architectures."""

_REFUSED_ON_BOTH = {
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "pivot_root": (155, 41),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "io_setup": (206, 0),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}
"""Numbers by name: on x86_64, and on aarch64."""

_REFUSED_ON_X86 = {
    "uselib": 134,
    "ustat": 136,
    "sysfs": 139,
    "_sysctl": 156,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "get_kernel_syms": 177,
    "query_module": 178,
    "getpmsg": 181,
    "putpmsg": 182,
    "afs_syscall": 183,
    "tuxcall": 184,
    "security": 185,
    "vserver": 236,
}


@dataclass(frozen=True, slots=True)
class SyscallTable:
    """Filter rules for one architecture.

    Attributes:
        audit: the kernel's audit number of the architecture (``AUDIT_ARCH_*``).
        refused: number by name of the refused system calls.
        conditional: number by name of the system calls in :data:`CONDITIONAL_RULES`.
        unused: numbers up to :data:`MAX_SYSCALL` that no system call has.
    """

    audit: int
    refused: dict[str, int]
    conditional: dict[str, int]
    unused: tuple[range, ...]

    def actions(self) -> dict[int, FilterAction]:
        """Return the action by number of each system call that is not allowed unconditionally."""
        found: dict[int, FilterAction] = {number: UNKNOWN for gap in self.unused for number in gap}
        found |= dict.fromkeys(self.refused.values(), REFUSE)
        found |= {number: CONDITIONAL_RULES[name] for name, number in self.conditional.items()}
        return {**found, CLONE3: UNKNOWN}


TABLES = {
    "x86_64": SyscallTable(
        audit=0xC000003E,
        refused=_REFUSED_EVERYWHERE | _REFUSED_ON_X86 | {name: both[0] for name, both in _REFUSED_ON_BOTH.items()},
        conditional={
            **{"ioctl": 16, "socket": 41, "socketpair": 53, "clone": 56},
            **{"ptrace": 101, "personality": 135, "prlimit64": 302},
        },
        # 335 (uretprobe) is called by code that the kernel inserts where a tracer on the host has set a probe.
        unused=(range(336, 424),),
    ),
    "aarch64": SyscallTable(
        audit=0xC00000B7,
        refused=_REFUSED_EVERYWHERE | {name: both[1] for name, both in _REFUSED_ON_BOTH.items()},
        conditional={
            **{"ioctl": 29, "personality": 92, "ptrace": 117},
            **{"socket": 198, "socketpair": 199, "clone": 220, "prlimit64": 261},
        },
        unused=(range(244, 260), range(295, 424)),
    ),
}

_MACHINE = os.uname().machine

FILTER = compile_filter(TABLES[_MACHINE].audit, TABLES[_MACHINE].actions(), MAX_SYSCALL) if _MACHINE in TABLES else b""
"""BPF program of the filter on this machine, compiled once for all requests; empty without a table."""


def oci_profile() -> str:
    """Return the refused system calls as a JSON seccomp profile for container runtimes. The runtime applies the
    profile to a container's first process. Commands with the same privileges can take over that process, so it needs a
    filter, too. Unlike :data:`FILTER`, the profile allows ``clone3``, which the runtime needs."""
    table = TABLES.get(_MACHINE)
    rules: list[dict[str, Any]] = [{"names": sorted(table.refused)}] if table else []
    for name in table.conditional if table else ():
        rules += [{"names": [name], "args": conditions} for conditions in _refused_by(CONDITIONAL_RULES[name])]
    refused = [{**rule, "action": "SCMP_ACT_ERRNO"} for rule in rules]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": refused})


def _refused_by(rule: ArgumentRule) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of conditions; a system call is refused if all conditions of a list are true.

    Profiles can't express "none of these values". So the lists refuse each bit that no allowed value has, and each
    combination of the bits of allowed values that is not allowed. The personality query (:data:`MASK_32`) is refused,
    too: the shell that a runtime starts makes no such query.
    """
    if rule.then == REFUSE:
        yield from ([_condition(rule, rule.mask, value)] for value in sorted(rule.values))
        return
    usual = reduce(or_, rule.values - {MASK_32})
    for bit in (1 << shift for shift in range(32)):
        if bit & rule.mask & ~usual:
            yield [_condition(rule, bit, bit)]
    for value in range(usual + 1):
        if value & ~usual == 0 and value not in rule.values:
            yield [_condition(rule, rule.mask, value)]
    if isinstance(rule.then, ArgumentRule):
        for value in sorted(rule.values):
            yield from ([_condition(rule, rule.mask, value), *more] for more in _refused_by(rule.then))


def _condition(rule: ArgumentRule, mask: int, value: int) -> dict[str, Any]:
    return {"index": rule.index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
