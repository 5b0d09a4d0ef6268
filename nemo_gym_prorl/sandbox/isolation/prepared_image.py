# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that are made directly, not by the runtime: what is known of an image, and what the launcher is asked.

A *prepared image* is what all sandboxes of one image share: the variables that it sets, as the container runtime was
asked once, and the parent namespace of their user ids. A sandbox then takes a handful of system calls, and no program:

1. a helper that the launcher forks joins the parent namespace and starts the first process in namespaces of its own,
   as the *supervisor's* child, so that its end is told there; maps its user ids, and ends;
2. the supervisor sends the first process the image as a mount. Where root shows an image under the sandbox's own ids,
   only root can make that mount, and by now there is the user namespace whose ids they are;
3. the first process does the rest (``launcher/launcher.c``), and then only waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.sandbox.isolation import mounts, syscalls, user_ids
from nemo_gym_prorl.sandbox.isolation.mounts import (
    SMALL_TMPFS,
    Bind,
    namespace_without_overmounts,
    shared_memory_options,
    terminal_options,
)
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.isolation.user_ids import IdSpan
from nemo_gym_prorl.sandbox.launcher.requests import Request, RequestKind


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest


NEW_NAMESPACE_FLAGS = (
    os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWCGROUP
)


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """What the sandboxes of one image share.

    Attributes:
        image: its root folder, as an open descriptor.
        owner: user and group that it belongs to on the host.
        parent_namespace: the user namespace that theirs descend from, as an open descriptor.
        single_user_reason: why there can be only one user inside; empty if there can be several.
        environment: the variables that the image sets, by the runtime's word.
        parent_ids: the ids of the parent namespace, users and groups.
    """

    image: int
    owner: tuple[int, int]
    parent_namespace: int
    single_user_reason: str
    environment: dict[str, str]
    parent_ids: list[list[IdSpan]]


def prerequisites(
    prepared: PreparedImage, order: CreateRequest
) -> Callable[[], tuple[dict[str, Any], list[int]]] | None:
    """What has to be there before a sandbox can be made, in a child forked for that; mostly nothing.

    Answers with whether there is, first, the user namespace whose ids the image's owners are to have, where that is
    not the sandbox's own. What follows is, for one with several users, a parent namespace of its own, and by
    root its binds, as mounts.
    """
    root, several = is_machine_root(), order.users
    host = order.host_uid, order.host_gid
    owned = root and not several and prepared.owner != (order.uid, order.uid)
    shown = root and order.binds
    if not owned and not several and not shown:
        return None

    def make() -> tuple[dict[str, Any], list[int]]:
        files = clone_binds(order) if shown else []
        if owned:
            files.insert(0, user_ids.create_single_user_namespace(prepared.owner[0], *host, group=prepared.owner[1]))
        if several:
            files.insert(0, user_ids.parent_namespace_below(prepared.parent_namespace, prepared.parent_ids))
        return {"owners": owned}, files

    return make


def make_request(prepared: PreparedImage, order: CreateRequest, folder: str) -> Request:
    """Start the first process of a sandbox, as a child of the supervisor's. Answers with its number on the host.

    Goes with where to answer, its parent namespace, the channel of the first process, the launcher, and
    :func:`held_mounts`, or :func:`.mounts.uncovered`. On that channel the first process waits for word, by root with
    the image as a mount; it is closed when that is ready.

    Args:
        prepared: of the sandbox.
        order: what it is to be.
        folder: the sandbox's own, with ``overlay`` for its layer.
    """
    uid = order.uid
    several, root, host_network = order.users, is_machine_root(), order.network
    if several and prepared.single_user_reason:
        raise PermissionError(errno.EPERM, prepared.single_user_reason)
    binds = [] if root else [Bind.parse(text) for text in order.binds]
    shown = [Bind.parse(text).target for text in order.binds] if root else []
    request = Request(RequestKind.MAKE)
    request.words(len(namespace_without_overmounts()))
    request.limits(_of_all_users(order) if several else [])
    for host_id, ranges in zip((order.host_uid, order.host_gid), prepared.parent_ids, strict=True):
        request.text(user_ids.format_id_map(user_ids.sandbox_ids(host_id, uid, several=several, ranges=ranges)))
    request.words(NEW_NAMESPACE_FLAGS | mounts.network_namespace_flag(host_network))
    request.words(uid, uid, host_network, several, is_machine_root_in_namespace())
    # Root's is given it, and must not find it by itself, with owners that are nobody there.
    request.text(folder, "" if root else order.image)
    request.words(len(binds))
    for bind in binds:
        request.words(bind.attributes)
        request.text(bind.source, bind.target)
    request.text(f"{SMALL_TMPFS},mode=755", terminal_options(several_users=several))
    request.text(f"{shared_memory_options(order.shared_memory_mib)},mode=1777")
    request.texts(shown)
    request.text(mounts.HOST_NAME)
    request.settings(order)
    request.rules()
    return request


def _of_all_users(order: CreateRequest) -> list[tuple[int, int, int]]:
    """Limits with which the user namespace of several users is made: all of them together can have no more."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = order.limits[resource.RLIMIT_NPROC]
    processes = most if hard == resource.RLIM_INFINITY else min(most, hard)
    return [(resource.RLIMIT_NPROC, processes, processes)]


def clone_binds(order: CreateRequest) -> list[int]:
    """By root: :func:`shown_mounts` as mounts that are nowhere yet, in which the owner's files are the sandbox's own.

    The owner of a bind is who has its uppermost folder on the host. One that can be written to stays nobody's if that
    is root, or root's group: a sandbox could leave programs there that run as root on the host. Files that belong to
    another sandbox stay that sandbox's.
    """
    host, trees = (order.host_uid, order.host_gid), []
    for bind in map(Bind.parse, order.binds):
        tree = bind.clone_mount()
        trees.append(tree)
        found = os.stat(bind.source)
        owners = (found.st_uid, found.st_gid)
        if (bind.read_only or 0 not in owners) and max(owners) < user_ids.FIRST_HOST_ID:
            # On a file system that can't show other owners it stays nobody's.
            with contextlib.suppress(OSError):
                syscalls.idmap_mount(
                    tree, user_ids.create_single_user_namespace(found.st_uid, *host, group=found.st_gid)
                )
    return trees


def idmapped_image(prepared: PreparedImage, pid: int, owners: int | None) -> int | None:
    """By root: the image as a mount for the sandbox whose first process is ``pid``; others make their own.

    Args:
        prepared: of the sandbox.
        pid: its first process.
        owners: the user namespace whose ids the image's owners are to have, if not that of ``pid``.
    """
    if not is_machine_root():
        return None
    tree = syscalls.open_tree(prepared.image)
    space = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC) if owners is None else owners
    try:
        syscalls.idmap_mount(tree, space)
    except OSError:
        os.close(tree)
        raise
    finally:
        if owners is None:
            os.close(space)
    return tree


def prepare_image(image: str) -> tuple[dict[str, Any], list[int]]:
    """In a child forked for it: what is prepared of an image but its variables, as an answer for :func:`received`."""
    found = os.stat(image)
    descriptor = os.open(image, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    parent, one_user = user_ids.make_parent_namespace()
    ranges = [user_ids.parent_ids(kind, own) for kind, own in (("uid", os.geteuid()), ("gid", os.getegid()))]
    owner = [found.st_uid, found.st_gid]
    return {"owner": owner, "one_user": one_user, "ranges": ranges}, [descriptor, parent]


def from_reply(environment: dict[str, str], answer: dict[str, Any], files: list[int]) -> PreparedImage:
    """The image that :func:`open_image` prepared in a child."""
    image, parent = files
    owner = answer["owner"][0], answer["owner"][1]
    return PreparedImage(image, owner, parent, answer["one_user"], environment, answer["ranges"])
