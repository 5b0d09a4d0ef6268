# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Privileges of this process on the machine, and capabilities of root in a sandbox.

*Machine root* is root in the initial user namespace. Only machine root may give files to ids without an account, map
ranges of ids without setuid helpers, and create idmapped mounts. Root of another user namespace, as in containers of
enroot, Pyxis and Apptainer, is treated as an ordinary user. Root of a container without a user namespace, Docker's
default, is machine root.

*User namespaces.* The supervisor creates a user namespace for every sandbox before it starts a container runtime: a
setuid Apptainer creates none, but the launcher needs one to join the sandbox later. If the machine forbids user
namespaces, a probe finds the setting that forbids them.

*Capabilities* of a sandbox's root are valid only in the sandbox's own user namespace. The kernel checks most
capabilities in the initial user namespace, where no sandboxed process has any, so granting these has no effect.
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
"""Inode number of the initial user namespace on every Linux. Other namespaces can also have a complete id map."""


def is_machine_root() -> bool:
    """Return whether this process is root in the initial user namespace."""
    return os.geteuid() == 0 and not in_user_namespace()


def is_machine_root_in_namespace() -> bool:
    """Return whether this process is in a user namespace that maps its user id to the machine's root user. The kernel
    exempts that user from process limits, and allows it to write visible devices and kernel settings."""
    return in_user_namespace() and os.stat("/proc/sys/kernel").st_uid == os.geteuid()


def in_user_namespace() -> bool:
    """Return whether this process is in a user namespace other than the initial one."""
    return os.stat("/proc/self/ns/user").st_ino != INITIAL_NAMESPACE


def uid_map() -> list[tuple[int, int, int]]:
    """Return the ranges of user ids in this user namespace: first id, first id in the parent namespace, count."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [(int(own), int(outside), int(count)) for own, outside, count in map(str.split, lines)]


def has_single_id() -> bool:
    """Return whether this user namespace has only one user id, so that not even a setuid helper can map others."""
    return sum(count for _own, _outside, count in uid_map()) == 1


def outer_uid() -> int:
    """Return this process's user id in the parent user namespace: several users may have id 0 in their containers."""
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
"""Number by name of the capabilities of root in every sandbox, as Docker's. Without SYS_ADMIN a sandbox can mount
nothing, without SYS_PTRACE trace no process with more privileges, and without SYS_RESOURCE raise no limits."""

GRANTABLE_CAPABILITIES = {"NET_ADMIN": 12, "SYS_PTRACE": 19}
"""Number by name of the capabilities that a task may request: administration of the sandbox's own network, and tracing
of all its processes. The supervisor's helpers cannot be traced: their memory belongs to the host's user namespace."""


def capability_numbers(names: Iterable[str], *, root: bool, host_network: bool) -> frozenset[int]:
    """Return the numbers of the requested capabilities; ``root`` is whether programs run as root.

    Raises:
        CallerError: a capability can't be granted; names the field ``capabilities``.
    """
    found = set()
    for name in names:
        if name not in GRANTABLE_CAPABILITIES:
            raise CallerError(
                f"{name} can't be granted to a sandbox; choose from {', '.join(GRANTABLE_CAPABILITIES)}",
                field="capabilities",
            )
        if not root:
            raise CallerError(f"{name} needs root inside, but the sandbox has root: false", field="capabilities")
        if name == "NET_ADMIN" and host_network:
            raise CallerError(f"{name} needs the sandbox's own network: leave network: host out", field="capabilities")
        found.add(GRANTABLE_CAPABILITIES[name])
    return frozenset(found)


MAX_USERNS_SYSCTL = "user.max_user_namespaces"
USERNS_CLONE_SYSCTL = "kernel.unprivileged_userns_clone"
"""Sysctl of Debian and its derivatives: 0 forbids user namespaces to ordinary users."""
APPARMOR_USERNS_SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
"""Sysctl of Ubuntu, 1 since 23.10: ordinary users can create user namespaces, but get no capabilities in them."""

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
"""Program that creates and uses a user namespace; prints the errno of a failure, and the :class:`ProbeStep`."""


class ProbeStep(StrEnum):
    """Result of the user namespace probe."""

    DONE = "done"
    MAKE = "make"
    """The kernel refused to create a user namespace."""
    USE = "use"
    """The process has no capabilities in the user namespace."""


@dataclass(frozen=True, slots=True)
class UserNamespaceProbe:
    """Result of creating a user namespace, and the settings that may forbid user namespaces.

    Attributes:
        step: step that failed, or ``DONE``.
        error_number: ``errno`` of the failure, or 0.
        root: whether machine root ran the probe.
        filtered: whether a seccomp filter applies to this process, as in most containers.
        settings: value by name, of the relevant sysctls that exist on this machine.
    """

    step: ProbeStep
    error_number: int
    root: bool
    filtered: bool
    settings: Mapping[str, str]

    @classmethod
    def run(cls) -> Self:
        """Create a user namespace in a child process. Blocks while a Python interpreter runs."""
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
    """Return what an administrator can do to allow user namespaces; empty if the probe succeeded."""
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
