# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""User ids of sandboxes, by the *parent namespace* from which the user namespaces of one image's sandboxes descend.

Machine root has a reserved range of ids. Each sandbox gets one id of the range, or a block of 65,536 if it has several
users.

An ordinary user has one id, and with ``/etc/subuid`` and ``/etc/subgid`` a range of subordinate ids, which the setuid
programs ``newuidmap`` and ``newgidmap`` map. These programs also allow dropping supplementary groups, which the kernel
otherwise refuses. So the programs are used wherever they exist, also for sandboxes with one user.
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
"""Host ids of machine root's sandboxes, which systemd leaves unused. The first id belongs to the parent namespace. The
first half of the blocks is for sandboxes with one user, the second half for sandboxes with several, one block each."""

SINGLE_USER_IDS = IDS_PER_BLOCK * (BLOCK_COUNT // 2 - 1)
"""Number of host ids for sandboxes with one user."""

MIN_SUBORDINATE_IDS = 65_535
"""Ids that an ordinary user's range needs, so that with the user's own id every id of a distribution exists inside."""

IdSpan = tuple[int, int, int]
"""First id inside, the same id outside, and the count of consecutive ids."""

MAP_HELPERS = ("newuidmap", "newgidmap")

_HELPER_TIMEOUT_S = 10.0


def draw_host_id(*, several: bool) -> int:
    """Return a random host user id for a new sandbox, the first of a block if it has several users."""
    if not is_machine_root():
        return os.geteuid()
    if several:
        return FIRST_HOST_ID + IDS_PER_BLOCK * (BLOCK_COUNT // 2 + secrets.randbelow(BLOCK_COUNT // 2))
    return FIRST_HOST_ID + IDS_PER_BLOCK + secrets.randbelow(SINGLE_USER_IDS)


def multi_user_error() -> str:
    """Return why this process's user can't have sandboxes with several users, and the fix; empty if it works."""
    if is_machine_root():
        return ""
    counts = [sum(count for _own, _first, count in parent_ids(kind, 1)[1:]) for kind in ("uid", "gid")]
    if min(counts) >= MIN_SUBORDINATE_IDS:
        return ""
    if has_single_id():
        return (
            "users: true needs a range of ids, and the user namespace around this server, as in containers of enroot "
            "and Pyxis, has one id: leave users: true out, or start the server outside of that container"
        )
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = str(os.geteuid())
    line = f"{name}:100000:65536"
    return (
        f"users: true needs {MIN_SUBORDINATE_IDS} subordinate ids: have an administrator add a line like {line!r}, "
        "with an unused range, to /etc/subuid and /etc/subgid, and install newuidmap and newgidmap "
        "(package uidmap or shadow-utils)"
    )


def sandbox_ids(uid: int, inside: int, *, several: bool, ranges: Sequence[IdSpan]) -> list[IdSpan]:
    """Return the ids of a sandbox, numbered as in its parent namespace.

    Args:
        uid: the sandbox's id on the host.
        inside: the user's number inside, if there is only one user.
        several: whether the sandbox has several users.
        ranges: ids of the parent namespace.
    """
    first = next(own + uid - outside for own, outside, count in ranges if outside <= uid < outside + count)
    if not several:
        return [(inside, first, 1)]
    if is_machine_root():
        return [(0, first, IDS_PER_BLOCK)]
    return [(own, own, count) for own, _outside, count in ranges]


def parent_ids(kind: str, own: int) -> list[IdSpan]:
    """Return the ids that a parent namespace of this process's user maps.

    Args:
        kind: ``uid`` or ``gid``.
        own: id of the user or group.
    """
    if is_machine_root():
        return [(0, FIRST_HOST_ID, IDS_PER_BLOCK * BLOCK_COUNT)]
    found = [(0, own, 1)]
    if not has_single_id() and all(map(shutil.which, MAP_HELPERS)):
        for first, count in subordinate_ids(Path(f"/etc/sub{kind}")):
            found.append((sum(found[-1][::2]), first, count))
    return found


def subordinate_ids(table: Path) -> Iterator[tuple[int, int]]:
    """Yield the ranges that ``table`` gives this process's user: first id and count."""
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
    """Return a descriptor of a new parent namespace, and why it has only one id (empty if it has a range).

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
    """Join a parent namespace as its first user, who may make and map user namespaces in it."""
    os.setns(parent, os.CLONE_NEWUSER)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # Changing ids clears the dumpable flag, and /proc files of this process, needed to map ids, become root's.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def parent_namespace_below(parent: int, ranges: Sequence[Sequence[IdSpan]]) -> int:
    """Join a parent namespace, and return a descriptor of a new user namespace below it with all of its ids.

    The kernel counts processes per user namespace, so namespaces of sandboxes made below share one process count.
    """
    join_parent_namespace(parent)
    maps = [[(own, own, count) for own, _outside, count in spans] for spans in ranges]
    return create_user_namespace(lambda pid: write_id_maps(pid, *maps))


def become_root_of_sandbox(uid: int, gid: int, *, several: bool) -> None:
    """Make this process root of a new user namespace that has the sandbox's ids only.

    Args:
        uid: the sandbox's host user id, the first one if ``several``.
        gid: the sandbox's host group id, likewise.
        several: whether the sandbox has several users.

    Raises:
        PermissionError: this process's user can't have sandboxes with several users.
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
        # The kernel refuses setgroups in namespaces of ordinary users, whose groups mean nothing inside.
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def fork_as_all_users(action: Callable[[], object]) -> int:
    """Fork a child that runs ``action`` as root of all ids in the user's range; for ordinary users.

    Returns:
        The child's pid. :func:`raise_child_error` reads its exit status.
    """
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
    """Raise the error of a child of :func:`fork_as_all_users` that worked on ``folder``."""
    if number := os.waitstatus_to_exitcode(status):
        raise OSError(abs(number), os.strerror(abs(number)), str(folder))


def create_single_user_namespace(inside: int, uid: int, gid: int, *, group: int | None = None) -> int:
    """Return a descriptor of a new user namespace with one user and one group: ``uid`` and ``gid`` here, ``inside``
    there.

    The caller owns the namespace and may join it.

    Args:
        group: group id inside, if not the same as ``inside``.
    """
    gids = [(inside if group is None else group, gid, 1)]
    return create_user_namespace(
        lambda pid: write_id_maps(pid, [(inside, uid, 1)], gids, deny_groups=not is_machine_root()), uid
    )


def create_user_namespace(fill: Callable[[int], None], owner: int | None = None) -> int:
    """Return a descriptor of a new user namespace.

    Args:
        fill: writes the id maps, given the number of a process in the namespace.
        owner: for machine root, the user that owns the namespace. The kernel then counts resources for that user, and
            root's exemptions do not apply.
    """
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if owner is not None and is_machine_root():
                _for_another(owner)
            os.unshare(os.CLONE_NEWUSER)
            os.write(ready[1], b"\n")
            # Keep the namespace alive until it is mapped and opened.
            os.close(done[1])
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        if not os.read(ready[0], 1):
            raise PermissionError("this machine allows no user namespaces: run 'prorl doctor' for the fix")
        fill(pid)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (ready[0], *done):
            os.close(descriptor)
        os.waitpid(pid, 0)


def _for_another(uid: int) -> None:
    """As machine root, become another user and keep every capability."""
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.NO_SETUID_FIXUP)
    os.seteuid(uid)


def write_id_maps(pid: int, uids: Sequence[IdSpan], gids: Sequence[IdSpan], *, deny_groups: bool = False) -> None:
    if deny_groups:
        _write(f"/proc/{pid}/setgroups", "deny")
    for name, entries in (("uid_map", uids), ("gid_map", gids)):
        _write(f"/proc/{pid}/{name}", format_id_map(entries).decode())


def format_id_map(entries: Sequence[IdSpan]) -> bytes:
    return "\n".join(" ".join(map(str, entry)) for entry in entries).encode()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # The kernel accepts an id map in a single write only.
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
