# SPDX-License-Identifier: Apache-2.0
"""How a forked child of the supervisor becomes the container runtime, and what the container's first process is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from pathlib import Path
from typing import NoReturn

from nemo_gym_prorl.sandbox import linux
from nemo_gym_prorl.sandbox.wire import Message


KEEPER = "exec 3<&0; echo; while :; do (read -r _) <&3 & wait $!; case $? in 1) exit;; esac; done"
"""The container's PID 1, in plain ``sh``: reaps whatever loses its parent, and exits when its input ends. A child does
the reading because ``wait`` reaps and ``read`` does not; that child may be killed from inside, and is replaced."""


FUSE_DEVICE = os.makedev(10, 229)
"""By the kernel's list of devices."""


def become_runtime(order: Message, folder: Path, channel: socket.socket, log: int) -> NoReturn:
    """Execute the runtime, as the only user of a new user namespace. What goes wrong is written to ``log``.

    Args:
        order: of :func:`.spec.order`.
        folder: the sandbox's, for what has to be shown elsewhere.
        channel: input and output of the container's first process.
        log: where the runtime's complaints go.
    """
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        image, inside = order["image"], order["uid"]
        host = order["host_uid"], order["host_gid"]
        owner = linux.user_namespace(inside, *host)
        if os.geteuid() == 0:
            image = _show_image(image, folder, *host)
        os.setns(owner)
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
        # Changed ids made the kernel forget it.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, descriptor in enumerate((channel.fileno(), channel.fileno(), log)):
            os.dup2(descriptor, number)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(order["argv"][0], [*order["argv"], image, "/bin/sh", "-c", KEEPER], order["env"])
    except OSError as error:
        os.write(log, str(error).encode())
    finally:
        os._exit(127)


def _show_image(image: str, folder: Path, uid: int, gid: int) -> str:
    """As root: show the image where the sandbox's user can get to it, and what its owner owns as that user's.

    Neither are root's folders open to that user, nor could it change in its overlay what is somebody else's.
    """
    found = os.stat(image)
    shown = folder / "image"
    linux.private_mounts()
    if stat.S_ISDIR(found.st_mode):
        shown.mkdir()
        owner = linux.user_namespace(found.st_uid, uid, gid, group=found.st_gid)
        linux.mount_for(image, str(shown), owner)
    else:
        shown.touch()
        linux.mount_for(image, str(shown), None)
        show_fuse(folder / "fuse", uid, gid)
    return str(shown)


def show_fuse(place: Path, uid: int, gid: int) -> None:
    """As root, in mounts of one's own: make ``/dev/fuse`` a user's, for the runtime to mount an image file with.

    Only the runtime sees it: a sandbox has a ``/dev`` of its own. ``place`` is where the device is made.
    """
    place.mkdir()
    linux.mount("tmpfs", str(place), "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "size=64k,mode=755")
    device = place / "fuse"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, FUSE_DEVICE)
    except PermissionError:
        # Root without the right to make devices: the machine's own may do.
        return
    os.chown(device, uid, gid)
    linux.bind(str(device), "/dev/fuse")
