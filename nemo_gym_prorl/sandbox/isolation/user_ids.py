# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The user ids that sandboxes of one image get, by the *parent namespace* that all their user namespaces descend from.

Root has a range of ids that nobody else has, of which each sandbox gets one, or a block of 65,536 if there are to be
several users in it. An ordinary user has his own id, and with ``/etc/subuid`` and ``/etc/subgid`` a range beside it,
which the setuid programs ``newuidmap`` and ``newgidmap`` map for him. They also let him drop his supplementary groups,
which the kernel refuses without them: so they are used where they are, also for sandboxes with one user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.isolation.privilege import has_single_id, is_machine_root


FIRST_HOST_ID = 1_879_048_192
IDS_PER_BLOCK = 65_536
BLOCK_COUNT = 4094
"""Where the server is root: ids that systemd leaves unused. The first is the parent namespace's own, the first half of
the blocks is for sandboxes with one user, the second for those with several, which get a block each."""

SINGLE_USER_IDS = IDS_PER_BLOCK * (BLOCK_COUNT // 2 - 1)
"""How many there are for sandboxes with one user."""

MIN_SUBORDINATE_IDS = 65_535
"""Ids that an ordinary user's range must have, so that with his own every id of a distribution exists inside."""

IdSpan = tuple[int, int, int]
"""First id inside, the same id outside, and how many follow on."""

MAP_HELPERS = ("newuidmap", "newgidmap")

_HELPER_TIMEOUT_S = 10.0


def draw_host_id(*, several: bool) -> int:
    """The user id on the host of a new sandbox, the first one if it has several users."""
    if not is_machine_root():
        return os.geteuid()
    if several:
        return FIRST_HOST_ID + IDS_PER_BLOCK * (BLOCK_COUNT // 2 + secrets.randbelow(BLOCK_COUNT // 2))
    return FIRST_HOST_ID + IDS_PER_BLOCK + secrets.randbelow(SINGLE_USER_IDS)


def multi_user_error() -> str:
    """Why this process's user can't have sandboxes with several users, and what to do; empty if he can."""
    if is_machine_root():
        return ""
    counts = [sum(count for _own, _first, count in parent_ids(kind, 1)[1:]) for kind in ("uid", "gid")]
    if min(counts) >= MIN_SUBORDINATE_IDS:
        return ""
    if has_single_id():
        return (
            "several users need a range of ids, and the user namespace around this server, as in containers of enroot "
            "and Pyxis, has one id: leave users: true out, or start the server outside of it"
        )
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = str(os.geteuid())
    line = f"{name}:100000:65536"
    return (
        f"several users need a range of {MIN_SUBORDINATE_IDS} ids or more: have an administrator put a line like {line!r}, "
        "with a range that nobody else has, into /etc/subuid and /etc/subgid, and install newuidmap and newgidmap "
        "(package uidmap or shadow-utils)"
    )


def sandbox_ids(uid: int, inside: int, *, several: bool, ranges: Sequence[IdSpan]) -> list[IdSpan]:
    """Which ids a sandbox has, by their numbers in its parent namespace.

    Args:
        uid: its own id on the host.
        inside: its number inside, if there is only one.
        several: whether all are to be there.
        ranges: of the parent namespace.
    """
    first = next(own + uid - outside for own, outside, count in ranges if outside <= uid < outside + count)
    if not several:
        return [(inside, first, 1)]
    if is_machine_root():
        return [(0, first, IDS_PER_BLOCK)]
    return [(own, own, count) for own, _outside, count in ranges]


def parent_ids(kind: str, own: int) -> list[IdSpan]:
    """What a parent namespace of this process's user maps.

    Args:
        kind: ``uid`` or ``gid``.
        own: the user's, or his group's, id.
    """
    if is_machine_root():
        return [(0, FIRST_HOST_ID, IDS_PER_BLOCK * BLOCK_COUNT)]
    found = [(0, own, 1)]
    if not has_single_id() and all(map(shutil.which, MAP_HELPERS)):
        for first, count in subordinate_ids(Path(f"/etc/sub{kind}")):
            found.append((sum(found[-1][::2]), first, count))
    return found


def subordinate_ids(table: Path) -> Iterator[tuple[int, int]]:
    """The ranges that ``table`` gives this process's user: first id and how many."""
    try:
        lines = table.read_text().splitlines()
        names = {str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name}
    except (OSError, KeyError):
        return
    for line in lines:
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if name in names and first.isdigit() and count.strip().isdigit():
            yield int(first), int(count)


def make_parent_namespace() -> tuple[int, str]:
    """A new parent namespace of this process's user, as a descriptor, and why it has his own id only; or empty.

    Blocks for some milliseconds.
    """
    uids, gids = parent_ids("uid", os.geteuid()), parent_ids("gid", os.getegid())
    trouble = multi_user_error()
    if len(uids) > 1 and len(gids) > 1:
        try:
            return create_user_namespace(lambda pid: _ask_helpers(pid, uids, gids)), trouble
        except (OSError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
    own = uids[0][1]
    return create_user_namespace(
        lambda pid: write_id_maps(pid, uids[:1], gids[:1], deny_groups=not is_machine_root()), own
    ), trouble


def join_parent_namespace(parent: int) -> None:
    """Become the first user of a parent namespace, who may make user namespaces in it and map them."""
    os.setns(parent, os.CLONE_NEWUSER)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # A changed id closes what lies in /proc of us and our children, from where they are mapped.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def parent_namespace_below(parent: int, ranges: Sequence[Sequence[IdSpan]]) -> int:
    """A user namespace with all ids of a parent namespace, as a descriptor; this process joins the parent namespace.

    Namespaces of sandboxes that are made in it have a count of processes in common that is nobody else's: that of all
    their users together.
    """
    join_parent_namespace(parent)
    maps = [[(own, own, count) for own, _outside, count in spans] for spans in ranges]
    return create_user_namespace(lambda pid: write_id_maps(pid, *maps))


def become_root_of_sandbox(uid: int, gid: int, *, several: bool) -> None:
    """Make this process root of a new user namespace that has a sandbox's ids and no others.

    Args:
        uid: the sandbox's user id on the host, the first one if ``several``; ``gid`` its group.
        gid: see ``uid``.
        several: whether the sandbox has several users.

    Raises:
        PermissionError: this process's user can have no sandboxes with several users.
    """
    if several:
        parent, trouble = make_parent_namespace()
        if trouble:
            raise PermissionError(errno.EPERM, trouble)
        own = ((uid, parent_ids("uid", os.geteuid())), (gid, parent_ids("gid", os.getegid())))
        maps = [sandbox_ids(first, 0, several=True, ranges=there) for first, there in own]
        join_parent_namespace(parent)
        os.setns(create_user_namespace(lambda pid: write_id_maps(pid, *maps)), os.CLONE_NEWUSER)
    else:
        os.setns(create_single_user_namespace(0, uid, gid), os.CLONE_NEWUSER)
    with contextlib.suppress(PermissionError):
        # Refused in namespaces of ordinary users, whose groups mean nothing inside.
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def fork_as_all_users(action: Callable[[], object]) -> int:
    """As an ordinary user: do something to what belongs to users of his range, as the root of them all, who is
    himself. Returns the child that does it, whose end :func:`raise_for` understands."""
    child = os.fork()
    if child == 0:
        number = errno.EPERM
        try:
            parent, one_user = make_parent_namespace()
            if not one_user:
                join_parent_namespace(parent)
                action()
                number = 0
        except OSError as error:
            number = error.errno or errno.EPERM
        finally:
            os._exit(number)
    return child


def raise_child_error(status: int, folder: Path) -> None:
    """Raise what went wrong in a child of :func:`fork_as_all_users` that acted on ``folder``."""
    if number := os.waitstatus_to_exitcode(status):
        raise OSError(abs(number), os.strerror(abs(number)), str(folder))


def create_single_user_namespace(inside: int, uid: int, gid: int, *, group: int | None = None) -> int:
    """A new user namespace in which only one user and one group exist: ``uid`` and ``gid`` here, ``inside`` there.

    The group's number inside is ``group``, or the user's if not given.
    Returns a descriptor of it. The caller may join it, as it is the owner.
    """
    gids = [(inside if group is None else group, gid, 1)]
    return create_user_namespace(
        lambda pid: write_id_maps(pid, [(inside, uid, 1)], gids, deny_groups=not is_machine_root()), uid
    )


def create_user_namespace(fill: Callable[[int], None], owner: int | None = None) -> int:
    """A new user namespace, as a descriptor; ``fill`` maps it, by the number of a process that is in it.

    By root, it is that of the user ``owner``: what the kernel counts for who made it is not taken from root's own, and
    what root may have is no bound of it.
    """
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if owner is not None and is_machine_root():
                _for_another(owner)
            os.unshare(os.CLONE_NEWUSER)
            os.write(ready[1], b"\n")
            # Until it is mapped and opened.
            os.close(done[1])
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        if not os.read(ready[0], 1):
            raise PermissionError("this machine lets users make no user namespaces")
        fill(pid)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (ready[0], *done):
            os.close(descriptor)
        os.waitpid(pid, 0)


def _for_another(uid: int) -> None:
    """As root: be that user, with every right."""
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.NO_SETUID_FIXUP)
    os.seteuid(uid)


def write_id_maps(pid: int, uids: Sequence[IdSpan], gids: Sequence[IdSpan], *, deny_groups: bool = False) -> None:
    """Map the user namespace of a process, by one who may."""
    if deny_groups:
        _write(f"/proc/{pid}/setgroups", "deny")
    for name, entries in (("uid_map", uids), ("gid_map", gids)):
        _write(f"/proc/{pid}/{name}", format_id_map(entries).decode())


def format_id_map(entries: Sequence[IdSpan]) -> bytes:
    """A map as the kernel takes it."""
    return "\n".join(" ".join(map(str, entry)) for entry in entries).encode()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # All at once, as the kernel wants it.
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _ask_helpers(pid: int, uids: Sequence[IdSpan], gids: Sequence[IdSpan]) -> None:
    for helper, entries in zip(MAP_HELPERS, (uids, gids), strict=True):
        numbers = [str(number) for entry in entries for number in entry]
        done = subprocess.run(
            [helper, str(pid), *numbers], capture_output=True, text=True, timeout=_HELPER_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise PermissionError(f"{helper}: {done.stderr.strip()}")
