# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Direct starts, in which the launcher creates a sandbox without the container runtime: per-image state and request.

A *prepared image* is the state that all sandboxes of one image share: the image's root folder, the variables that the
image sets, and the parent namespace of the sandboxes' user namespaces. Starting a sandbox of a prepared image then
takes only system calls:

1. A child forked by the launcher joins the parent namespace, and starts the first process in new namespaces as a child
   of the *supervisor*, which can then wait for the first process. The launcher's child maps the user ids and exits.
2. For machine root, the supervisor sends the image to the first process as an idmapped mount, whose files have the
   sandbox's user ids. Only root can create such a mount, and only after the sandbox's user namespace exists.
3. The first process mounts the root file system, sets up the sandbox (``launcher/launcher.c``), and then only waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.network_access import HOST, HOST_NAME
from nemo_gym_prorl.sandbox.isolation import syscalls, user_ids
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
    from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest


NEW_NAMESPACE_FLAGS = (
    os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWCGROUP
)


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """State shared by all sandboxes of one image; its descriptors are closed with the last reference.

    Attributes:
        image: descriptor of the image's root folder.
        owner: user id and group id that own the root folder on the host.
        parent_namespace: descriptor of the user namespace below which the sandboxes' user namespaces are created.
        single_user_reason: why sandboxes can have only one user id; empty if they can have several.
        environment: variables that the image's scripts set, as the container runtime reported them.
        parent_ids: id maps of the parent namespace: user ids, then group ids.
    """

    image: int
    owner: tuple[int, int]
    parent_namespace: int
    single_user_reason: str
    environment: dict[str, str]
    parent_ids: list[list[IdSpan]]

    def __del__(self) -> None:
        os.close(self.image)
        os.close(self.parent_namespace)


def prerequisites(
    prepared: PreparedImage, order: CreateRequest
) -> Callable[[], tuple[dict[str, Any], list[int]]] | None:
    """Return the work of a forked child before a sandbox can be created; ``None`` if there is no such work.

    The child replies with descriptors in this order:

    - a user namespace for the image's idmapped mount, if the sandbox's own does not map the image's owner; then
      ``owners`` in the reply is set;
    - the parent namespace of a sandbox with several users;
    - for machine root, the binds as detached mounts.
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
    """Return the request that starts the first process of a sandbox; the reply contains the process's host pid.

    The caller sends these descriptors with the request: the reply socket, the parent namespace, the channel of the
    first process, the launcher's executable, and those of :func:`clone_binds` or
    :func:`.mounts.namespace_without_overmounts`. The first process waits on its channel for a message, which for
    machine root carries the image as a mount, and closes the channel when the sandbox is ready. ``folder`` is the
    sandbox's folder on the host.

    Raises:
        PermissionError: the sandbox needs several user ids, which this user does not have.
    """
    uid = order.uid
    several, root, host_network = order.users, is_machine_root(), order.network == HOST
    if several and prepared.single_user_reason:
        raise PermissionError(errno.EPERM, prepared.single_user_reason)
    binds = [] if root else [Bind.parse(text) for text in order.binds]
    shown = [Bind.parse(text).target for text in order.binds] if root else []
    request = Request(RequestKind.MAKE)
    request.words(len(namespace_without_overmounts()))
    request.limits(_limits_of_all_users(order) if several else [])
    for host_id, ranges in zip((order.host_uid, order.host_gid), prepared.parent_ids, strict=True):
        request.text(user_ids.format_id_map(user_ids.sandbox_ids(host_id, uid, several=several, ranges=ranges)))
    request.words(NEW_NAMESPACE_FLAGS | (0 if host_network else os.CLONE_NEWNET))
    request.words(uid, uid, host_network, several, is_machine_root_in_namespace())
    # Machine root sends the image as an idmapped mount; a mount of the path would show the owners on the host.
    request.text(folder, "" if root else order.image)
    request.words(len(binds))
    for bind in binds:
        request.words(bind.attributes)
        request.text(bind.source, bind.target)
    request.text(f"{SMALL_TMPFS},mode=755", terminal_options(several_users=several))
    request.text(f"{shared_memory_options(order.shared_memory_mib)},mode=1777")
    request.texts(shown)
    request.text(HOST_NAME)
    request.settings(order)
    request.rules()
    return request


def _limits_of_all_users(order: CreateRequest) -> list[tuple[int, int, int]]:
    """Return RLIMIT_NPROC (constant, soft, hard) for the parent namespace, which bounds all of a sandbox's users."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = order.limits[resource.RLIMIT_NPROC]
    processes = most if hard == resource.RLIM_INFINITY else min(most, hard)
    return [(resource.RLIMIT_NPROC, processes, processes)]


def clone_binds(order: CreateRequest) -> list[int]:
    """Return descriptors of the binds as idmapped mounts, in which the owner's files belong to the sandbox's user.

    Only for machine root. The owner is the owner of the bind's source. Binds are not idmapped if they are writable and
    owned by root or root's group, since a sandbox could leave programs there that run as root on the host. Binds that
    another sandbox's id owns, or whose file system lacks idmapped mounts, are not idmapped, either.
    """
    host, trees = (order.host_uid, order.host_gid), []
    for bind in map(Bind.parse, order.binds):
        tree = syscalls.open_tree(bind.source, recursive=True)
        syscalls.set_mount_attributes(tree, bind.attributes)
        trees.append(tree)
        found = os.stat(bind.source)
        owners = (found.st_uid, found.st_gid)
        if (bind.read_only or 0 not in owners) and max(owners) < user_ids.FIRST_HOST_ID:
            with contextlib.suppress(OSError):
                syscalls.idmap_mount(
                    tree, user_ids.create_single_user_namespace(found.st_uid, *host, group=found.st_gid)
                )
    return trees


def idmapped_image(prepared: PreparedImage, pid: int, owners: int | None) -> int | None:
    """Return a descriptor of the image as an idmapped mount; ``None`` unless this process is machine root.

    Args:
        prepared: image of the sandbox.
        pid: host pid of the sandbox's first process.
        owners: descriptor of the user namespace that maps the image's owner; ``None`` for the one of ``pid``.
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
    """Open an image and create a parent namespace; runs in a forked child, whose reply :func:`from_reply` decodes."""
    found = os.stat(image)
    descriptor = os.open(image, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    parent, one_user = user_ids.make_parent_namespace()
    ranges = [user_ids.parent_ids(kind, own) for kind, own in (("uid", os.geteuid()), ("gid", os.getegid()))]
    owner = [found.st_uid, found.st_gid]
    return {"owner": owner, "one_user": one_user, "ranges": ranges}, [descriptor, parent]


def from_reply(environment: dict[str, str], answer: dict[str, Any], files: list[int]) -> PreparedImage:
    """Return the prepared image, given the image's variables, and reply and descriptors of :func:`prepare_image`."""
    image, parent = files
    owner = answer["owner"][0], answer["owner"][1]
    return PreparedImage(image, owner, parent, answer["one_user"], environment, answer["ranges"])
