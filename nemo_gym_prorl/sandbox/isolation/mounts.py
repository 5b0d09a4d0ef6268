# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a sandbox besides its image: binds, file systems in memory, files of ``/etc``, and the network.

- *Files of /etc* about users, hosts and nameservers come from the image or are written for the sandbox into its
  overlay layer. Container runtimes mount the host's files over these paths; the launcher unmounts them.
- *Network*: a network namespace with a loopback device only. ``network: host`` shares the host's network and copies
  its ``resolv.conf``. Other values of ``network`` add a proxy (:mod:`..egress`), but no network device.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.network_access import HOST_NAME
from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.isolation.privilege import in_user_namespace
from nemo_gym_prorl.sandbox.isolation.syscalls import ATTRIBUTE_NODEV, ATTRIBUTE_NOSUID, ATTRIBUTE_RDONLY


KERNEL_FILESYSTEMS = ("/proc", "/sys", "/dev")
"""Mount points of kernel file systems in every sandbox."""

SMALL_TMPFS = "size=16m,nr_inodes=16k"
"""Mount options of a tmpfs without a configured size; the kernel's default is half of the machine's memory."""

_EMPTY = re.compile(r"/proc/(sys/fs/binfmt_misc|fs/nfsd)|/sys/(fs|kernel|firmware/efi)/.*")
"""Empty mount points that the kernel provides below ``/proc`` and ``/sys``; a mount there hides nothing."""

_TERMINAL_GROUP = 5
"""Group id of ``tty``, the group of terminals, in every distribution."""

MAX_TERMINALS = 128
"""Pseudo-terminals of one sandbox; all sandboxes of a machine share 3,072 (``kernel.pty.max`` minus ``reserve``)."""

INODES_PER_MIB = 1024
"""Inodes of ``/dev/shm`` per MiB of its size, since the kernel needs about 1 KiB of memory per inode."""


def shared_memory_options(mib: int) -> str:
    return f"size={mib}m,nr_inodes={mib * INODES_PER_MIB}"


def terminal_options(*, several_users: bool = False) -> str:
    return f"mode=620,ptmxmode=666,max={MAX_TERMINALS}" + (f",gid={_TERMINAL_GROUP}" if several_users else "")


def overmounts() -> list[str]:
    """Return the mount points below ``/proc`` and ``/sys`` by which a container around this process hides files. The
    last mount comes first. Empty outside of user namespaces. Tools for GPUs and InfiniBand make such mounts. In a user
    namespace the kernel refuses a new ``/proc`` or ``/sys`` that would show more files than the visible one."""
    if not in_user_namespace():
        return []
    paths = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [path for path in paths if path.startswith(("/proc/", "/sys/")) and not _EMPTY.match(path)][::-1]


@cache
def namespace_without_overmounts() -> list[int]:
    """Return a list with the descriptor of a mount namespace without :func:`overmounts`; empty if none is needed.

    Children of this process create sandboxes in that namespace. A child cannot create the namespace itself: unmounting
    would also unmount the path of its program. Also empty if the kernel refuses the namespace; then creating a sandbox
    reports the error.
    """
    found = overmounts()

    def make() -> int:
        syscalls.unshare_mounts()
        for path in found:
            syscalls.unmount(path)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    with contextlib.suppress(OSError), ThreadPoolExecutor(1) as thread:
        return [thread.submit(make).result()] if found else []
    return []


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind mount of a file or folder, at absolute paths: ``source`` on the host, ``target`` in the sandbox."""

    source: str
    target: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``HOST``, ``HOST:INSIDE`` or ``HOST:INSIDE:ro``, the notation of container runtimes.

        Raises:
            CallerError: the text has another form, or a path is relative; names the field ``binds``.
        """
        source, _, rest = text.partition(":")
        target, _, options = (rest or source).partition(":")
        if not source.startswith("/") or not target.startswith("/") or options not in ("", "ro", "rw"):
            raise CallerError(f"{text!r} is not HOST:INSIDE or HOST:INSIDE:ro with absolute paths", field="binds")
        return cls(source, target, options == "ro")

    @property
    def attributes(self) -> int:
        """Mount attributes (``ATTRIBUTE_*``) of the bind; device files and setuid bits never have an effect."""
        return ATTRIBUTE_NOSUID | ATTRIBUTE_NODEV | (ATTRIBUTE_RDONLY if self.read_only else 0)


SANDBOX_UID = 1000
"""User id of programs in a sandbox without root, if the image specifies no user."""

HOSTS = f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"

RUNTIME_MOUNTED_FILES = (
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/localtime",
)
"""Files of the host that container runtimes mount over the image's files."""

ACCOUNT_FILES = ("/etc/passwd", "/etc/group")
"""Files to which a line for the sandbox's user or group is added if they have no line with the id."""

RUNTIME_COPIED_FILES = ("/etc/localtime",)
"""Files of the host that container runtimes copy into a sandbox if the image lacks them."""


def account_lines(uid: int, gid: int) -> Iterator[tuple[str, str, int]]:
    """Yield, for each of :data:`ACCOUNT_FILES`, path, line for the sandbox's user or group, and the id in the line."""
    name, home = ("root", "/root") if uid == 0 else (HOST_NAME, "/tmp")
    yield "/etc/passwd", f"{name}:x:{uid}:{gid}::{home}:/bin/sh\n", uid
    yield "/etc/group", f"{name}:x:{gid}:\n", gid


def resolv_conf(host: bool) -> str:
    """Return the text of a sandbox's ``/etc/resolv.conf``: the host's if ``host`` is set, else empty."""
    with contextlib.suppress(OSError):
        if host:
            return Path("/etc/resolv.conf").read_text()
    return ""
