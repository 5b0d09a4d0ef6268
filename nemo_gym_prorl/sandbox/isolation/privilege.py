# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rights of this process on the machine, and capabilities of root in a sandbox.

*Machine root* is root outside of any user namespace. Only machine root may give files to ids without a user, map
ranges of ids without help, and show a folder under other owners. Root of a user namespace, as in containers of enroot,
Pyxis and Apptainer, is an ordinary user for all needs of sandboxes. Root of a container without a user
namespace, Docker's default, is machine root.

*User namespaces.* The supervisor makes a user namespace for every sandbox before it starts a container runtime: a
setuid Apptainer needs none, but would give none to processes that join later. So sandboxes need user namespaces on the
machine. A probe identifies which of four settings forbids user namespaces.

*Capabilities* of a sandbox hold in its own user namespace only. The kernel checks most capabilities against the
initial namespace, where no process of a sandbox has any. Granting such capabilities would have no effect.
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
"""Inode number of the initial user namespace on every Linux. A full id map is no proof: other namespaces can have one.
"""


def is_machine_root() -> bool:
    """Return whether this process is root in the initial user namespace."""
    return os.geteuid() == 0 and not in_user_namespace()


def is_machine_root_in_namespace() -> bool:
    """Return whether this process, in a user namespace, runs as the machine's root user on the host.

    The kernel exempts that user from process limits, and lets it write devices and kernel settings that it can see.
    """
    return in_user_namespace() and os.stat("/proc/sys/kernel").st_uid == os.geteuid()


def in_user_namespace() -> bool:
    """Return whether this process is in a user namespace other than the initial one."""
    return os.stat("/proc/self/ns/user").st_ino != INITIAL_NAMESPACE


def uid_map() -> list[tuple[int, int, int]]:
    """Return the user ids of this namespace: first id, its id in the parent namespace, and the count of ids."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [(int(own), int(outside), int(count)) for own, outside, count in map(str.split, lines)]


def has_single_id() -> bool:
    """Return whether this namespace has one user id only, so that not even a setuid program can map another."""
    return sum(count for _own, _outside, count in uid_map()) == 1


def outer_uid() -> int:
    """Return this process's user id in the parent namespace, which distinguishes users who are all 0 in their
    containers."""
    user = os.geteuid()
    return next((outside + user - own for own, outside, count in uid_map() if own <= user < own + count), user)


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
"""Capabilities of root in every sandbox, as usual for containers. Without SYS_ADMIN a sandbox can mount nothing,
without SYS_PTRACE it can't trace processes with more rights, and without SYS_RESOURCE it can't raise limits."""

GRANTABLE_CAPABILITIES = {"NET_ADMIN": 12, "SYS_PTRACE": 19}
"""Capabilities that a task may ask for: administration of the sandbox's own network, and tracing of all its processes.
The supervisor's helpers stay protected from tracing, since their memory belongs to the host's user namespace."""


def capability_numbers(names: Iterable[str], *, root: bool, host_network: bool) -> frozenset[int]:
    """Return the numbers of capabilities to add, given names as in Compose files, with or without ``CAP_``.

    Raises:
        CallerError: a capability can't be granted; for the field ``capabilities``.
    """
    found = set()
    for given in names:
        name = given.upper().removeprefix("CAP_")
        if name in DEFAULT_CAPABILITIES:
            continue
        if name not in GRANTABLE_CAPABILITIES:
            raise CallerError(
                f"{given} can't be granted to a sandbox; choose from {', '.join(GRANTABLE_CAPABILITIES)}",
                field="capabilities",
            )
        if not root:
            raise CallerError(f"{given} needs root inside, but the sandbox has root: false", field="capabilities")
        if name == "NET_ADMIN" and host_network:
            raise CallerError(
                f"{given} needs the sandbox's own network: leave network: host out", field="capabilities"
            )
        found.add(GRANTABLE_CAPABILITIES[name])
    return frozenset(found)


MAX_USERNS_SYSCTL = "user.max_user_namespaces"
USERNS_CLONE_SYSCTL = "kernel.unprivileged_userns_clone"
"""Sysctl of Debian and its derivatives."""
APPARMOR_USERNS_SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
"""Sysctl of Ubuntu, on since 23.10: processes can make user namespaces, but get no rights in them."""

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
"""Runs in a process of its own, which ends in the namespaces that it makes."""


class ProbeStep(StrEnum):
    """The last step that the probe reached."""

    DONE = "done"
    MAKE = "make"
    """Making a user namespace failed."""
    USE = "use"
    """The namespace gives no rights."""


@dataclass(frozen=True, slots=True)
class UserNamespaceProbe:
    """Result of making a user namespace, and the settings that explain it.

    Attributes:
        step: last step that the probe reached.
        error_number: ``errno`` of the failure, or 0.
        root: whether machine root made the attempt.
        filtered: whether a seccomp filter applies to this process, as in most containers.
        settings: the relevant sysctls that exist on the machine, by name.
    """

    step: ProbeStep
    error_number: int
    root: bool
    filtered: bool
    settings: Mapping[str, str]

    @classmethod
    def run(cls) -> Self:
        """Make a user namespace in a child process, which takes about 30 ms."""
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
    """Return how an administrator can allow user namespaces; empty if they work."""
    if attempt.step is ProbeStep.DONE:
        return []
    found = []
    if attempt.settings.get(MAX_USERNS_SYSCTL) == "0":
        found.append(f"sysctl {MAX_USERNS_SYSCTL}=15000")
    if not attempt.root and attempt.settings.get(USERNS_CLONE_SYSCTL) == "0":
        found.append(f"sysctl {USERNS_CLONE_SYSCTL}=1")
    if not attempt.root and attempt.settings.get(APPARMOR_USERNS_SYSCTL) == "1":
        found.append(
            f"sysctl {APPARMOR_USERNS_SYSCTL}=0, or an AppArmor profile with 'userns,' for "
            f"{os.path.realpath(sys.executable)} (a profile for the container runtime is not enough: the "
            "namespace is made before the runtime starts)"
        )
    if attempt.error_number == errno.EINVAL:
        found.append("a kernel with CONFIG_USER_NS")
    if found:
        return found
    if attempt.error_number == errno.ENOSPC:
        return [f"raise {MAX_USERNS_SYSCTL}, here or in the container around this one"]
    return [
        "this process seems to be in a container that forbids user namespaces: start it with --security-opt "
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
