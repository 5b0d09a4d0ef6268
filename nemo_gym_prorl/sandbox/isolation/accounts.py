# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sandbox reads in ``/etc`` about users, hosts and names: the image's own, and nothing of the host.

The launcher writes it, in the sandbox's mounts under its own user id, so that it lies in its own layer. Runtimes show
the host's account, nameservers, hosts and time zone there; what we make directly never has them, and from others they
are taken away.
"""

from __future__ import annotations

from collections.abc import Iterator


HOST_NAME = "sandbox"

SANDBOX_UID = 1000
"""User id of commands that are not root's, where the image names no user of its own."""

HOSTS = f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"

OF_THE_RUNTIME = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/localtime")
"""What runtimes mount over the image's, with the host's contents."""

OF_ACCOUNTS = ("/etc/passwd", "/etc/group")
"""What a sandbox's user may have to be added to."""

COPIED_BY_THE_RUNTIME = ("/etc/localtime",)
"""What they copy from the host besides, into images that have none."""


def own(resolver: str) -> Iterator[tuple[str, str]]:
    """The files that are a sandbox's own, and what is in them."""
    yield "/etc/hosts", HOSTS
    yield "/etc/hostname", f"{HOST_NAME}\n"
    yield "/etc/resolv.conf", resolver


def names(uid: int, gid: int) -> Iterator[tuple[str, str, int]]:
    """Tables, lines that give a sandbox's user and his group a name there, and the numbers that may have one."""
    name, home = ("root", "/root") if uid == 0 else (HOST_NAME, "/tmp")
    yield "/etc/passwd", f"{name}:x:{uid}:{gid}::{home}:/bin/sh\n", uid
    yield "/etc/group", f"{name}:x:{gid}:\n", gid
