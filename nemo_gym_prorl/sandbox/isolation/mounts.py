# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sandbox sees beside its image: files of the host, file systems in memory, files of ``/etc``, the network.

- *Files of /etc* about users, hosts and names are the image's own or written for the sandbox, never the host's. The
  launcher writes them into the sandbox's own layer. The container runtime shows the host's account, nameservers, hosts
  and time zone; the launcher takes these away.
- *Network*: a loopback device in a network namespace of its own, unless ``network: true`` shares the host's network
  and nameservers.
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
from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.isolation.privilege import in_user_namespace
from nemo_gym_prorl.sandbox.isolation.syscalls import ATTRIBUTE_NODEV, ATTRIBUTE_NOSUID, ATTRIBUTE_RDONLY


KERNEL_FILESYSTEMS = ("/proc", "/sys", "/dev")
"""Where each sandbox has file systems of the kernel's."""

SMALL_TMPFS = "size=16m,nr_inodes=16k"
"""Bound of each memory file system without a size of its own, which would otherwise hold half the machine's memory."""

_EMPTY = re.compile(r"/proc/(sys/fs/binfmt_misc|fs/nfsd)|/sys/(fs|kernel|firmware/efi)/.*")
"""Folders that were made to be mounted on: there is nothing that could be covered."""

_TERMINAL_GROUP = 5
"""``tty`` of every distribution: owner of terminals, where it exists."""


MAX_TERMINALS = 128
"""Most terminals of a sandbox; Linux has 3,072 for all namespaces but the first."""

INODES_PER_MIB = 1024
"""Files, links and folders in ``/dev/shm`` for each MiB: each takes the kernel a KiB, empty or not."""


def shared_memory_options(mib: int) -> str:
    """Return the options of the mount at ``/dev/shm``."""
    return f"size={mib}m,nr_inodes={mib * INODES_PER_MIB}"


def terminal_options(*, several_users: bool = False) -> str:
    """Of the mount at ``/dev/pts``."""
    return f"mode=620,ptmxmode=666,max={MAX_TERMINALS}" + (f",gid={_TERMINAL_GROUP}" if several_users else "")


def overmounts() -> list[str]:
    """What is mounted over parts of /proc and /sys in the container around us, as drivers of graphics cards and of
    InfiniBand have it; the last first. In a user namespace the kernel gives nobody a fresh one of either that shows
    more than the one he has."""
    if not in_user_namespace():
        return []
    places = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [place for place in places if place.startswith(("/proc/", "/sys/")) and not _EMPTY.match(place)][::-1]


@cache
def namespace_without_overmounts() -> list[int]:
    """A mount namespace without them, as a descriptor, for children of this process to make sandboxes in. It is not a
    child's own since mounts that go with one take the path of its program with them. None if it is not needed, or
    this process may not; then whoever makes a sandbox says so."""
    found = overmounts()

    def make() -> int:
        syscalls.unshare_mounts()
        for place in found:
            syscalls.unmount(place)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    with contextlib.suppress(OSError), ThreadPoolExecutor(1) as thread:
        return [thread.submit(make).result()] if found else []
    return []


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of the host that is to be seen inside.

    Attributes:
        source: where it lies.
        target: where it is to be seen.
        read_only: whether it can't be changed there.
    """

    source: str
    target: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """``HOST``, ``HOST:INSIDE`` or ``HOST:INSIDE:ro``, as the runtime has it.

        Raises:
            CallerError: it is none of these.
        """
        source, _, rest = text.partition(":")
        target, _, options = (rest or source).partition(":")
        if not source.startswith("/") or not target.startswith("/") or options not in ("", "ro", "rw"):
            raise CallerError(f"{text!r} is not HOST:INSIDE or HOST:INSIDE:ro with absolute paths", field="binds")
        return cls(source, target, options == "ro")

    def clone_mount(self) -> int:
        """A descriptor of it as a mount that is nowhere yet."""
        tree = syscalls.open_tree(self.source, recursive=True)
        syscalls.set_mount_attributes(tree, self.attributes, recursive=True)
        return tree

    @property
    def attributes(self) -> int:
        """``ATTRIBUTE_*`` of its mount: devices and changes of user mean nothing in it."""
        return ATTRIBUTE_NOSUID | ATTRIBUTE_NODEV | (ATTRIBUTE_RDONLY if self.read_only else 0)


HOST_NAME = "sandbox"

SANDBOX_UID = 1000
"""User id of commands that are not root's, where the image names no user of its own."""

HOSTS = f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"

RUNTIME_MOUNTED_FILES = (
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/localtime",
)
"""What runtimes mount over the image's, with the host's contents."""

ACCOUNT_FILES = ("/etc/passwd", "/etc/group")
"""What a sandbox's user may have to be added to."""

RUNTIME_COPIED_FILES = ("/etc/localtime",)
"""What they copy from the host besides, into images that have none."""


def etc_files(resolver: str) -> Iterator[tuple[str, str]]:
    """The files that are a sandbox's own, and what is in them."""
    yield "/etc/hosts", HOSTS
    yield "/etc/hostname", f"{HOST_NAME}\n"
    yield "/etc/resolv.conf", resolver


def account_lines(uid: int, gid: int) -> Iterator[tuple[str, str, int]]:
    """Tables, lines that give a sandbox's user and his group a name there, and the numbers that may have one."""
    name, home = ("root", "/root") if uid == 0 else (HOST_NAME, "/tmp")
    yield "/etc/passwd", f"{name}:x:{uid}:{gid}::{home}:/bin/sh\n", uid
    yield "/etc/group", f"{name}:x:{gid}:\n", gid


RUNTIME_NO_NETWORK_OPTIONS = ("--net", "--network", "none")
"""What the container runtime is told for a sandbox without."""


def network_namespace_flag(host: bool) -> int:
    """The ``CLONE_NEW*`` flag of its own network, or none."""
    return 0 if host else os.CLONE_NEWNET


def resolv_conf(host: bool) -> str:
    """Text of ``/etc/resolv.conf``: the host's for a sandbox on its network, else empty."""
    with contextlib.suppress(OSError):
        if host:
            return Path("/etc/resolv.conf").read_text()
    return ""
