# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a forked child of the supervisor becomes the container runtime, and what the container's first process is."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.prepared_image import held_mounts, shown_mounts
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.user_ids import user_namespace
from nemo_gym_prorl.sandbox.limits import descriptors
from nemo_gym_prorl.sandbox.runtime.command import runtime_environment


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest


IDLE = "exec 3<&0 2>/dev/null; echo; while :; do (read -r _) <&3 & wait $!; case $? in 1) exit;; esac; done"
"""The container's PID 1, in plain ``sh``: reaps whatever loses its parent, and exits when its input ends. A child does
the reading because ``wait`` reaps and ``read`` does not; that child may be killed from inside, and is replaced. What
it has open of the host's are sockets, which can't be opened again by a name in ``/proc`` as a file of it could be."""


DROPPED = ("CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_DAC_READ_SEARCH", "CAP_SYS_CHROOT")
"""Capabilities that the container's PID 1 loses; the runtime knows them by name however old it is. It needs SYS_ADMIN
itself, to begin the filter with."""

FUSE_DEVICE = os.makedev(10, 229)
"""By the kernel's list of devices."""


def become_runtime(
    order: CreateRequest,
    command: Sequence[str],
    folder: Path,
    channel: socket.socket,
    log: int,
    uncovered: Sequence[int],
) -> NoReturn:
    """Execute the runtime, as the only user of a new user namespace. What goes wrong is written to ``log``.

    Args:
        order: what it is to be.
        command: of :func:`.command.runtime_command`.
        folder: the sandbox's, for what has to be shown elsewhere.
        channel: input and output of the container's first process.
        log: where the runtime's complaints go.
        uncovered: of :func:`.mounts.uncovered`.
    """
    try:
        parent = os.getppid()
        syscalls.end_with(parent)
        os.setsid()
        image, inside, binds = order.image, order.uid, list[str]()
        host = order.host_uid, order.host_gid
        owner = user_namespace(inside, *host)
        if is_machine_root():
            image = _show_image(image, folder, *host)
            binds = _show_mounts(order, folder)
        bounds = _bounds(folder, root=inside == 0)
        for descriptor in uncovered:
            os.setns(descriptor, os.CLONE_NEWNS)
        os.setns(owner)
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
        # Changed ids made the kernel forget it.
        syscalls.end_with(parent)
        for number, descriptor in enumerate((channel.fileno(), channel.fileno(), log)):
            os.dup2(descriptor, number)
        # The runtime hands on what it has: with a folder of the host's that is open, the image could leave its root.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        log = 2
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        descriptors.usual_limit()
        words = [*command, *(f"--bind={bind}" for bind in binds), *bounds, image, "/bin/sh", "-c", IDLE]
        os.execve(command[0], words, runtime_environment(folder.parent))
    except OSError as error:
        os.write(log, str(error).encode())
    finally:
        os._exit(127)


def _bounds(folder: Path, *, root: bool) -> list[str]:
    """The runtime's options that bound the first process, the image's own ``sh``: it may be anything by its maker.

    It gets a filter of system calls, which takes most of what its capabilities give, and as root loses others. Having
    more than commands have it can't be taken over by them. Where commands are not root it has no more than they, and
    they can; then it is the filter that counts.
    """
    path = folder / "calls.json"
    path.write_text(seccomp.profile())
    path.chmod(0o644)
    return ["--security", f"seccomp:{path}", *(("--drop-caps", ",".join(DROPPED)) if root else ())]


def _show_image(image: str, folder: Path, uid: int, gid: int) -> str:
    """As root: show the image where the sandbox's user can get to it, and what its owner owns as that user's.

    Neither are root's folders open to that user, nor could it change in its overlay what is somebody else's.
    """
    found = os.stat(image)
    shown = folder / "image"
    syscalls.private_mounts()
    if stat.S_ISDIR(found.st_mode):
        shown.mkdir()
        owner = user_namespace(found.st_uid, uid, gid, group=found.st_gid)
        syscalls.mount_for(image, str(shown), owner)
    else:
        shown.touch()
        syscalls.mount_for(image, str(shown), None)
        show_fuse(folder / "fuse", uid, gid)
    return str(shown)


def _show_mounts(order: CreateRequest, folder: Path) -> list[str]:
    """As root: the same for binds; returns where they are then."""
    shown = []
    for number, (bind, tree) in enumerate(zip(shown_mounts(order), held_mounts(order), strict=True)):
        host, _, rest = bind.partition(":")
        place = folder / f"mount-{number}"
        if Path(host).is_dir():
            place.mkdir()
        else:
            place.touch()
        syscalls.attach(tree, str(place))
        shown.append(f"{place}:{rest}")
    return shown


def show_fuse(place: Path, uid: int, gid: int) -> None:
    """As root, in mounts of one's own: make ``/dev/fuse`` a user's, for the runtime to mount an image file with.

    Only the runtime sees it: a sandbox has a ``/dev`` of its own. ``place`` is where the device is made.
    """
    place.mkdir()
    syscalls.mount("tmpfs", str(place), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "size=64k,mode=755")
    device = place / "fuse"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, FUSE_DEVICE)
    except PermissionError:
        # Root without the right to make devices: the machine's own may do.
        return
    os.chown(device, uid, gid)
    syscalls.bind(str(device), "/dev/fuse")
