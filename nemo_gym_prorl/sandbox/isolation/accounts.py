# SPDX-License-Identifier: Apache-2.0
"""What a sandbox reads in ``/etc`` about users, hosts and names: the image's own, and nothing of the host.

Run in the sandbox's mounts under its own user id, so that what is written lies in its own layer. Runtimes show the
host's account, nameservers, hosts and time zone there; a mould's sandbox never has them, and from another they are
taken away (:func:`.joining.prepare`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


HOST_NAME = "sandbox"

HOSTS = f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"

OF_THE_RUNTIME = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/localtime")
"""What runtimes mount over the image's, with the host's contents."""

OF_ACCOUNTS = ("/etc/passwd", "/etc/group")
"""What a sandbox's user may have to be added to."""

COPIED_BY_THE_RUNTIME = ("/etc/localtime",)
"""What they copy from the host besides, into images that have none."""

_ADDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""How a file of accounts is opened to add to it: one that is a pipe holds up nobody. Where that fails, the user has no
name, and the sandbox all else."""

_LARGEST = 1 << 24
"""Bytes that are read of a file of accounts."""


def resolver(host_network: bool) -> str:
    """Text of ``/etc/resolv.conf``: the host's for a sandbox on its network, else empty."""
    with contextlib.suppress(OSError):
        if host_network:
            return Path("/etc/resolv.conf").read_text()
    return ""


def write(uid: int, gid: int, resolver: str) -> None:
    """Write what is the sandbox's own, and make sure that its user has a name.

    Args:
        uid: the sandbox's user, as numbered inside.
        gid: his group.
        resolver: text of ``/etc/resolv.conf``.
    """
    os.makedirs("/etc", exist_ok=True)
    for path, text in own(resolver):
        with contextlib.suppress(FileNotFoundError):
            # A link in its place is none that anybody should follow.
            os.unlink(path)
        with open(path, "x") as file:
            file.write(text)
    for path, text in additions(uid, gid):
        with contextlib.suppress(OSError), open(os.open(path, _ADDING, 0o666), "a") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.write(text)


def own(resolver: str) -> Iterator[tuple[str, str]]:
    """The files that are a sandbox's own, and what is in them."""
    yield "/etc/hosts", HOSTS
    yield "/etc/hostname", f"{HOST_NAME}\n"
    yield "/etc/resolv.conf", resolver


def additions(uid: int, gid: int) -> Iterator[tuple[str, str]]:
    """What has to be added to files of the root that this process is in, so that a user and his group have names."""
    if uid in _numbers("/etc/passwd"):
        return
    name, home = ("root", "/root") if uid == 0 else (HOST_NAME, "/tmp")
    yield "/etc/passwd", _line_for("/etc/passwd", f"{name}:x:{uid}:{gid}::{home}:/bin/sh\n")
    if gid not in _numbers("/etc/group"):
        yield "/etc/group", _line_for("/etc/group", f"{name}:x:{gid}:\n")


def _numbers(path: str) -> set[int]:
    """The users or groups of a table, by the numbers in its third fields; none where there is no such file."""
    lines = (line.split(":") for line in _text(path).split("\n"))
    return {int(fields[2]) for fields in lines if len(fields) > 3 and fields[2].isdecimal()}


def _text(path: str) -> str:
    """What is in a file, if it is an ordinary one of a reasonable size; a pipe, say, would hold us for ever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        # Who put it there may have put a pipe in its place just now.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb", buffering=0) as file:
            return (file.read(_LARGEST) or b"").decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def _line_for(path: str, line: str) -> str:
    """A line to be added to a file, whose last one may be no whole one."""
    text = _text(path)
    return line if not text or text.endswith("\n") else f"\n{line}"
