# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether this process may make user namespaces with rights in them, and what an administrator has to do if not.

Every sandbox begins with one, made by the supervisor before any container runtime is started: an Apptainer that is
installed with setuid needs none, but gives none to whoever joins later. So where there are none there are no
sandboxes, and nothing that a user could install changes that. Four things forbid them, each in its own way; which it
is can be told from what fails and from the machine's settings.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root


MOST = "user.max_user_namespaces"
BY_USERS = "kernel.unprivileged_userns_clone"
"""Debian's and its descendants' own."""
APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
"""Ubuntu's own, on since 23.10: namespaces can be made, but without rights in them."""

PROBE = """
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


class Ending(StrEnum):
    """How far the attempt got."""

    DONE = "done"
    MAKE = "make"
    """None can be made."""
    USE = "use"
    """One can be made, but gives no rights."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of making one, and what decides over it.

    Attributes:
        ending: how far it got.
        number: the ``errno`` of what failed, or 0.
        root: whether it was root who tried.
        filtered: whether system calls are filtered here, as in most containers.
        settings: those of the machine's settings that there are, by name.
    """

    ending: Ending
    number: int
    root: bool
    filtered: bool
    settings: Mapping[str, str]

    @classmethod
    def here(cls) -> Self:
        """Try it. Some 30 ms."""
        said = subprocess.run(
            [sys.executable, "-ISc", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        *number, step = said.stdout.split()
        filtered = re.search(r"^Seccomp:\s*2$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return cls(Ending(step), int(number[0]) if number else 0, is_machine_root(), filtered is not None, _settings())


def remedies(attempt: Attempt) -> list[str]:
    """What an administrator can do so that it works; empty if it does."""
    if attempt.ending is Ending.DONE:
        return []
    found = []
    if attempt.settings.get(MOST) == "0":
        found.append(f"sysctl {MOST}=15000")
    if not attempt.root and attempt.settings.get(BY_USERS) == "0":
        found.append(f"sysctl {BY_USERS}=1")
    if not attempt.root and attempt.settings.get(APPARMOR) == "1":
        found.append(
            f"sysctl {APPARMOR}=0, or an AppArmor profile with 'userns,' for {os.path.realpath(sys.executable)} "
            "(one for the container runtime does not do: the namespace is made before it starts)"
        )
    if attempt.number == errno.EINVAL:
        found.append("a kernel with CONFIG_USER_NS")
    if found:
        return found
    if attempt.number == errno.ENOSPC:
        return [f"raise {MOST}, here or in the container around this one"]
    return [
        "this process seems to be in a container that forbids it: start that one with --security-opt "
        "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined (Docker, "
        "Podman), or as privileged"
        if attempt.filtered or attempt.root
        else "let this user make user namespaces ('unshare --user --map-root-user --mount true' must work)"
    ]


def _settings() -> dict[str, str]:
    files = {name: Path("/proc/sys", *name.split(".")) for name in (MOST, BY_USERS, APPARMOR)}
    return {name: file.read_text().strip() for name, file in files.items() if file.exists()}
