# SPDX-License-Identifier: Apache-2.0
"""How a forked child of the supervisor becomes the container runtime, and what the container's first process is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import NoReturn

from nemo_gym_prorl.sandbox import linux
from nemo_gym_prorl.sandbox.wire import Message


KEEPER = "exec 3<&0; echo; while :; do (read -r _) <&3 & wait $!; case $? in 1) exit;; esac; done"
"""The container's PID 1, in plain ``sh``: reaps whatever loses its parent, and exits when its input ends. A child does
the reading because ``wait`` reaps and ``read`` does not; that child may be killed from inside, and is replaced."""


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
            # Neither are root's folders open to the sandbox's user, nor could it change in its overlay what is root's.
            unpacked = os.path.isdir(image)
            image = str(folder / "image")
            os.close(os.open(image, os.O_CREAT)) if not unpacked else os.mkdir(image)
            linux.private_mounts()
            linux.mount_for(order["image"], image, linux.user_namespace(0, *host) if unpacked else None)
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
