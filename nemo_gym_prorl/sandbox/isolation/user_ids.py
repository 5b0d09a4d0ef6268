# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""User ids of sandboxes, and the *parent namespace*: the user namespace below which those of sandboxes are created.

As machine root, the service has a reserved range of host ids. Each sandbox gets one id of the range, or a block of
65,536 ids if it has several users.

An ordinary user has one id, and with entries in ``/etc/subuid`` and ``/etc/subgid`` a range of subordinate ids, which
the setuid helpers ``newuidmap`` and ``newgidmap`` map. In namespaces mapped by these helpers the kernel also allows
dropping supplementary groups. So existing helpers are used even for sandboxes with one user.
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
"""Host ids of machine root's sandboxes: a range that systemd leaves unused. The parent namespace's root has the first
id. Sandboxes with one user get ids of the first half of the blocks; sandboxes with several users get a block each of
the second half."""

SINGLE_USER_IDS = IDS_PER_BLOCK * (BLOCK_COUNT // 2 - 1)
"""Number of host ids for sandboxes with one user: the first half of the blocks, without the first block."""

MIN_SUBORDINATE_IDS = 65_535
"""Subordinate ids that a user needs: with the user's own id, a sandbox then has the 65,536 ids of a distribution."""

IdSpan = tuple[int, int, int]
"""Range in an id map: first id in the user namespace, first id in its parent namespace, count of ids."""

MAP_HELPERS = ("newuidmap", "newgidmap")
"""Setuid programs that map subordinate ids."""

_HELPER_TIMEOUT_S = 10.0  # of one helper, which may query a directory service for the user's ids


def draw_host_id(*, several: bool) -> int:
    """Return a host user id for a sandbox: as machine root a random id, the first of a block if ``several``; otherwise
    this process's user id."""
    if not is_machine_root():
        return os.geteuid()
    if several:
        return FIRST_HOST_ID + IDS_PER_BLOCK * (BLOCK_COUNT // 2 + secrets.randbelow(BLOCK_COUNT // 2))
    return FIRST_HOST_ID + IDS_PER_BLOCK + secrets.randbelow(SINGLE_USER_IDS)


def multi_user_error() -> str:
    """Return why this user can't have sandboxes with several users, and what to do; empty if the user can."""
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
    """Return the id map of a sandbox's user namespace, relative to the parent namespace; for users or for groups.

    Args:
        uid: the sandbox's host id, the first one if ``several``.
        inside: the user's id in the sandbox, if there is only one user.
        several: whether the sandbox has several users.
        ranges: id map of the parent namespace.
    """
    first = next(own + uid - outside for own, outside, count in ranges if outside <= uid < outside + count)
    if not several:
        return [(inside, first, 1)]
    if is_machine_root():
        return [(0, first, IDS_PER_BLOCK)]
    return [(own, own, count) for own, _outside, count in ranges]


def parent_ids(kind: str, own: int) -> list[IdSpan]:
    """Return the id map of a parent namespace that this process's user creates.

    Args:
        kind: ``uid`` or ``gid``, for the map of users or groups.
        own: this process's user or group id.
    """
    if is_machine_root():
        return [(0, FIRST_HOST_ID, IDS_PER_BLOCK * BLOCK_COUNT)]
    found = [(0, own, 1)]
    if not has_single_id() and all(map(shutil.which, MAP_HELPERS)):
        for first, count in subordinate_ids(Path(f"/etc/sub{kind}")):
            found.append((sum(found[-1][::2]), first, count))
    return found


def subordinate_ids(table: Path) -> Iterator[tuple[int, int]]:
    """Yield first id and count of each range of this process's user in ``/etc/subuid`` or ``/etc/subgid``."""
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
    """Create a parent namespace; return its descriptor, and why its sandboxes can't have several users (else empty).

    Blocks for some milliseconds while ``newuidmap`` and ``newgidmap`` run."""
    uids, gids = parent_ids("uid", os.geteuid()), parent_ids("gid", os.getegid())
    trouble = multi_user_error()
    if len(uids) > 1 and len(gids) > 1:
        try:
            return create_user_namespace(lambda pid: _run_map_helpers(pid, uids, gids)), trouble
        except (OSError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
    own = uids[0][1]
    return create_user_namespace(
        lambda pid: write_id_maps(pid, uids[:1], gids[:1], deny_groups=not is_machine_root()), own
    ), trouble


def join_parent_namespace(parent: int) -> None:
    """Join the parent namespace with the descriptor ``parent`` as its root, who may create user namespaces below."""
    os.setns(parent, os.CLONE_NEWUSER)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # Changing ids clears the dumpable flag; the host's root would then own this process's id map files in /proc.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def parent_namespace_below(parent: int, ranges: Sequence[Sequence[IdSpan]]) -> int:
    """Join a parent namespace; return a descriptor of a new parent namespace below, which maps the same ids.

    The kernel counts processes per user namespace, so the new namespace bounds the processes of one sandbox."""
    join_parent_namespace(parent)
    maps = [[(own, own, count) for own, _outside, count in spans] for spans in ranges]
    return create_user_namespace(lambda pid: write_id_maps(pid, *maps))


def become_root_of_sandbox(uid: int, gid: int, *, several: bool) -> None:
    """Make this process root of a new user namespace that maps only the sandbox's ids.

    Args:
        uid: the sandbox's host user id, the first one if ``several``.
        gid: the sandbox's host group id, likewise.
        several: whether the sandbox has several users.

    Raises:
        PermissionError: ``several`` is set, but this user can't have sandboxes with several users.
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
        # The kernel refuses setgroups if an ordinary user has written the id maps (/proc/PID/setgroups is "deny").
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def run_as_all_users(action: Callable[[], object], folder: Path) -> None:
    """Run ``action`` in a forked child, as root of a user namespace with all ids of an ordinary user.

    Raises:
        OSError: the action failed; the error's file name is ``folder``.
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
    if number := abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])):
        raise OSError(number, os.strerror(number), str(folder))


def create_single_user_namespace(inside: int, uid: int, gid: int, *, group: int | None = None) -> int:
    """Return a descriptor of a new user namespace with one user and one group, which the caller may join.

    Args:
        inside: user id in the new namespace.
        uid: user id in this process's namespace to which ``inside`` is mapped.
        gid: group id in this process's namespace.
        group: group id in the new namespace; ``None`` for the same as ``inside``.
    """
    gids = [(inside if group is None else group, gid, 1)]
    return create_user_namespace(
        lambda pid: write_id_maps(pid, [(inside, uid, 1)], gids, deny_groups=not is_machine_root()), uid
    )


def create_user_namespace(fill: Callable[[int], None], owner: int | None = None) -> int:
    """Return a descriptor of a new user namespace.

    Args:
        fill: writes the id maps, given the pid of a process in the namespace.
        owner: as machine root, the user id for which the kernel counts the namespace's resources, without root's
            exemptions from limits; ``None`` for this process's user.
    """
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if owner is not None and is_machine_root():
                _become_owner(owner)
            os.unshare(os.CLONE_NEWUSER)
            os.write(ready[1], b"\n")
            # Keep the namespace alive until the parent has opened the namespace and closes the pipe.
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


def _become_owner(uid: int) -> None:
    """Set the effective user id of this process, which is machine root, and keep all capabilities."""
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


def _run_map_helpers(pid: int, uids: Sequence[IdSpan], gids: Sequence[IdSpan]) -> None:
    for helper, entries in zip(MAP_HELPERS, (uids, gids), strict=True):
        numbers = [str(number) for entry in entries for number in entry]
        done = subprocess.run(
            [helper, str(pid), *numbers], capture_output=True, text=True, timeout=_HELPER_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise PermissionError(f"{helper}: {done.stderr.strip()}")
