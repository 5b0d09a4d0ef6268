# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rights: what this process may do on the machine, and what root may do in a sandbox.

*Machine root.* Only root outside of any user namespace may give files to ids that no user has, map ranges of ids
without help, and show a folder under other owners. Root of a namespace, as in containers of enroot, Pyxis and
Apptainer, is an ordinary user in all that sandboxes need. Root of a container without a user namespace of its own, as
Docker's by default, is machine root here.

*User namespaces.* Every sandbox begins with one, made by the supervisor before any container runtime is started: an
Apptainer that is installed with setuid needs none, but gives none to whoever joins later. So a machine without user
namespaces can have no sandboxes. Which of four settings forbids them is told from what fails.

*Capabilities* of a sandbox hold in its own user namespace only. Most are asked of the machine's own namespace, where
no process of a sandbox ever has any, so granting them would be an empty promise.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from nemo_gym_prorl.failures import CallerError


INITIAL_NAMESPACE = 0xEFFFFFFD
"""The number of the first user namespace, on every Linux. That of ids in the map says less: a namespace with all of
them can't do these things either."""


def is_machine_root() -> bool:
    """Whether this process is root in the user namespace that no other is around."""
    return os.geteuid() == 0 and not in_user_namespace()


def is_machine_root_in_namespace() -> bool:
    """Whether this process, in a user namespace, is still the machine's root to the kernel: whom it lets have any
    number of processes, and whose its devices and settings are, as far as they can be seen."""
    return in_user_namespace() and os.stat("/proc/sys/kernel").st_uid == os.geteuid()


def in_user_namespace() -> bool:
    """Whether a user namespace is around this process that is not the machine's own."""
    return os.stat("/proc/self/ns/user").st_ino != INITIAL_NAMESPACE


def id_map(kind: str = "uid") -> list[tuple[int, int, int]]:
    """The ids that there are here: first one, the same id around this namespace, and how many follow on.

    Args:
        kind: ``uid`` or ``gid``.
    """
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    return [(int(own), int(outside), int(count)) for own, outside, count in map(str.split, lines)]


def has_single_id() -> bool:
    """Whether there is nobody here but this user, so that no program, setuid or not, can map another."""
    return sum(count for _own, _outside, count in id_map()) == 1


def outer_uid() -> int:
    """This process's user as he is known around its namespace, by which users of one machine are told apart: each of
    them may be number 0 in a container of his own."""
    user = os.geteuid()
    return next((outside + user - own for own, outside, count in id_map() if own <= user < own + count), user)


DEFAULT_CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "MKNOD": 27,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
"""Those that root has in every sandbox, as is customary for containers. Without SYS_ADMIN nothing can be mounted,
without SYS_PTRACE nothing that has more rights can be looked into, and without SYS_RESOURCE limits can't be lifted."""

GRANTABLE_CAPABILITIES = {"NET_ADMIN": 12, "SYS_PTRACE": 19}
"""Those that are added when asked for: all of one's own network devices, and looking into all processes of one's own.
The supervisor's helpers stay closed even to that: their memory belongs to the namespace that they came from."""


def capability_numbers(names: Iterable[str], *, root: bool, host_network: bool) -> frozenset[int]:
    """The numbers of capabilities that are to be added, by names as in Compose files, with or without ``CAP_``.

    Raises:
        CallerError: one can't be had; says why.
    """
    found = set()
    for given in names:
        name = given.upper().removeprefix("CAP_")
        if name in DEFAULT_CAPABILITIES:
            continue
        if name not in GRANTABLE_CAPABILITIES:
            raise CallerError(
                f"{given} is not given to sandboxes; {', '.join(GRANTABLE_CAPABILITIES)} can be", field="capabilities"
            )
        if not root:
            raise CallerError(f"{given} is for root inside; the sandbox has root: false", field="capabilities")
        if name == "NET_ADMIN" and host_network:
            raise CallerError(f"{given} is for a network of one's own, not for network: true", field="capabilities")
        found.add(GRANTABLE_CAPABILITIES[name])
    return frozenset(found)


MAX_USERNS_SYSCTL = "user.max_user_namespaces"
USERNS_CLONE_SYSCTL = "kernel.unprivileged_userns_clone"
"""Debian's and its descendants' own."""
APPARMOR_USERNS_SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
"""Ubuntu's own, on since 23.10: namespaces can be made, but without rights in them."""

PROBE_SCRIPT = """
import os
uid, step = os.getuid(), "make"
try:
    os.unshare(os.CLONE_NEWUSER)
    step = "use"
    open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
    os.unshare(os.CLONE_NEWNS)
    step = "done"
except OSError as error:
    print(error.errno, end=" ")
print(step)
"""
"""In a process of its own, which stays in what it makes."""


class ProbeStep(StrEnum):
    """How far the attempt got."""

    DONE = "done"
    MAKE = "make"
    """None can be made."""
    USE = "use"
    """One can be made, but gives no rights."""


@dataclass(frozen=True, slots=True)
class UserNamespaceProbe:
    """What came of making one, and what decides over it.

    Attributes:
        step: how far it got.
        error_number: the ``errno`` of what failed, or 0.
        root: whether it was root who tried.
        filtered: whether system calls are filtered here, as in most containers.
        settings: those of the machine's settings that there are, by name.
    """

    step: ProbeStep
    error_number: int
    root: bool
    filtered: bool
    settings: Mapping[str, str]

    @classmethod
    def run(cls) -> Self:
        """Try it. Some 30 ms."""
        said = subprocess.run(
            [sys.executable, "-ISc", PROBE_SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        *number, step = said.stdout.split()
        filtered = re.search(r"^Seccomp:\s*2$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return cls(
            ProbeStep(step), int(number[0]) if number else 0, is_machine_root(), filtered is not None, _settings()
        )


def remedies(attempt: UserNamespaceProbe) -> list[str]:
    """What an administrator can do so that it works; empty if it does."""
    if attempt.step is ProbeStep.DONE:
        return []
    found = []
    if attempt.settings.get(MAX_USERNS_SYSCTL) == "0":
        found.append(f"sysctl {MAX_USERNS_SYSCTL}=15000")
    if not attempt.root and attempt.settings.get(USERNS_CLONE_SYSCTL) == "0":
        found.append(f"sysctl {USERNS_CLONE_SYSCTL}=1")
    if not attempt.root and attempt.settings.get(APPARMOR_USERNS_SYSCTL) == "1":
        found.append(
            f"sysctl {APPARMOR_USERNS_SYSCTL}=0, or an AppArmor profile with 'userns,' for {os.path.realpath(sys.executable)} "
            "(one for the container runtime does not do: the namespace is made before it starts)"
        )
    if attempt.error_number == errno.EINVAL:
        found.append("a kernel with CONFIG_USER_NS")
    if found:
        return found
    if attempt.error_number == errno.ENOSPC:
        return [f"raise {MAX_USERNS_SYSCTL}, here or in the container around this one"]
    return [
        "this process seems to be in a container that forbids it: start that one with --security-opt "
        "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined (Docker, "
        "Podman), or as privileged"
        if attempt.filtered or attempt.root
        else "let this user make user namespaces ('unshare --user --map-root-user --mount true' must work)"
    ]


def _settings() -> dict[str, str]:
    files = {
        name: Path("/proc/sys", *name.split("."))
        for name in (MAX_USERNS_SYSCTL, USERNS_CLONE_SYSCTL, APPARMOR_USERNS_SYSCTL)
    }
    return {name: file.read_text().strip() for name, file in files.items() if file.exists()}
