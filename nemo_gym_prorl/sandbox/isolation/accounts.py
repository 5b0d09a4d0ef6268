# SPDX-License-Identifier: Apache-2.0
"""What a sandbox reads in ``/etc`` about users, hosts and names: the image's own, and nothing of the host.

Run in the sandbox's mounts under its own user id, so that what is written lies in its own layer. Runtimes show the
host's account, nameservers, hosts and time zone there; a mould's sandbox never has them, and from another they are
taken away (:func:`.inside.prepare`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_gym_prorl.sandbox.isolation.scripting.scripts import ANY, Script


HOST_NAME = "sandbox"

HOSTS = f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"

OF_THE_RUNTIME = ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/localtime")
"""What runtimes mount over the image's, with the host's contents."""

OF_ACCOUNTS = ("/etc/passwd", "/etc/group")
"""What a sandbox's user may have to be added to."""

COPIED_BY_THE_RUNTIME = ("/etc/localtime",)
"""What they copy from the host besides, into images that have none."""

_AT_FDCWD = -100

_ADDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""How a file of accounts is opened to add to it: one that is a pipe holds up nobody. Where that fails, the user has no
name, and the sandbox all else."""

_LARGEST = 1 << 24
"""Bytes that are read of a file of accounts."""


@dataclass(frozen=True, slots=True)
class Account:
    """One user, as the image's ``/etc/passwd`` has it."""

    name: str
    uid: int
    gid: int
    home: str

    @classmethod
    def parse(cls, line: str) -> Self | None:
        """Of one line; ``None`` if it is none."""
        fields = line.split(":")
        try:
            return cls(fields[0], int(fields[2]), int(fields[3]), fields[5] or "/")
        except (IndexError, ValueError):
            return None


class NoUser(OSError):
    """A program is to run as somebody whom the sandbox does not have."""


def accounts() -> Iterator[Account]:
    """Those of the root that this process is in; none where there is no such file."""
    for line in _text("/etc/passwd").split("\n"):
        if account := Account.parse(line):
            yield account


def find(user: str | int) -> Account:
    """The account of a name or number, in the root that this process is in.

    Raises:
        NoUser: there is none.
    """
    for account in accounts():
        if str(user) in (account.name, str(account.uid)):
            return account
    raise NoUser(errno.EINVAL, f"there is no user {user!r} in this sandbox")


def become(user: str | int, uid: int) -> dict[str, str]:
    """Have this process, which is ``uid`` and may, become somebody; returns the variables that tell so.

    Names are looked up here and not by the C library, which would load libraries of the image to do so.

    Raises:
        NoUser: there is no such account, or the sandbox does not have his id.
    """
    account = find(user)
    if account.uid == uid:
        return {}
    try:
        os.setgroups(sorted({account.gid, *_groups_of(account.name)}))
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    except (OSError, OverflowError) as error:
        raise NoUser(
            errno.EINVAL, f"this sandbox has one user, and that is not {user!r}; users: true gives it all of them"
        ) from error
    return {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}


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


def add_to(script: Script, resolver: str, added: Iterable[tuple[str, str]]) -> None:
    """As :func:`write`, as steps of a script; what is to be ``added`` was found out before."""
    script.step = "/etc"
    script.call("mkdirat", _AT_FDCWD, b"/etc", 0o755, tolerate=[errno.EEXIST])
    for path, text in own(resolver):
        script.step = path
        script.call("unlinkat", _AT_FDCWD, path.encode(), 0, tolerate=[errno.ENOENT])
        _write(script, path, text, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    for path, text in added:
        script.step = path
        _write(script, path, text, _ADDING, tolerate=[ANY])


def _write(script: Script, path: str, text: str, flags: int, tolerate: Sequence[int] = ()) -> None:
    file = script.call("openat", _AT_FDCWD, path.encode(), flags, 0o666, tolerate=tolerate, on_error=2)
    content = text.encode("utf-8", "surrogateescape")
    script.call("write", file, script.data(content), len(content))
    script.call("close", file)


def own(resolver: str) -> Iterator[tuple[str, str]]:
    """The files that are a sandbox's own, and what is in them."""
    yield "/etc/hosts", HOSTS
    yield "/etc/hostname", f"{HOST_NAME}\n"
    yield "/etc/resolv.conf", resolver


def additions(uid: int, gid: int) -> Iterator[tuple[str, str]]:
    """What has to be added to files of the root that this process is in, so that a user and his group have names."""
    if any(account.uid == uid for account in accounts()):
        return
    name, home = ("root", "/root") if uid == 0 else (HOST_NAME, "/tmp")
    yield "/etc/passwd", _line_for("/etc/passwd", f"{name}:x:{uid}:{gid}::{home}:/bin/sh\n")
    if not _has_group(gid):
        yield "/etc/group", _line_for("/etc/group", f"{name}:x:{gid}:\n")


def _groups() -> Iterator[list[str]]:
    """The fields of each line of ``/etc/group``: name, password, number, members."""
    for line in _text("/etc/group").split("\n"):
        fields = line.split(":")
        if len(fields) == 4 and fields[2].isdigit():
            yield fields


def _has_group(gid: int) -> bool:
    return any(int(fields[2]) == gid for fields in _groups())


def _groups_of(name: str) -> set[int]:
    return {int(fields[2]) for fields in _groups() if name in fields[3].split(",")}


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
