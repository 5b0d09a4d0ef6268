# SPDX-License-Identifier: Apache-2.0
"""The variables that an image sets, as only its container runtime knows: scripts of the image's own decide.

The runtime is asked by starting the image once with nothing in it but the waiting shell, and reading that one's
variables. Run in a child that was forked for it; it ends within a bounded time and leaves nothing. If it is killed,
what it noted down in its folder says what else has to go (:func:`.state_dir.discard`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
from pathlib import Path

from nemo_gym_prorl.sandbox.runtime import log as logs
from nemo_gym_prorl.sandbox.runtime.command import OF_THE_RUNTIME, asking_command
from nemo_gym_prorl.sandbox.runtime.launch import become_runtime
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.sandbox.supervisor.storage.erase import remove_tree


MOST = 2 << 20
"""Bytes of variables that an image may set: as much as the kernel takes for a program, arguments included."""


class RuntimeFailed(OSError):
    """The runtime did not start the image.

    Attributes:
        log: what it said.
    """

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


def read(first: int) -> dict[str, str]:
    """The variables of an image's waiting shell, which may say of any part of its memory that they are there.

    Raises:
        OSError: they are more than :data:`MOST`.
    """
    with Path(f"/proc/{first}/environ").open("rb") as file:
        variables = file.read(MOST + 1)
    if len(variables) > MOST:
        raise OSError(errno.E2BIG, f"the image sets more than {MOST >> 20} MiB of variables")
    pairs = variables.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def ask(order: Message, folder: Path, timeout_s: float) -> dict[str, str]:
    """Ask the runtime.

    Args:
        order: of a sandbox of that image.
        folder: to be made, and removed, for what the runtime needs meanwhile.
        timeout_s: how long it may take.

    Raises:
        RuntimeFailed: it did not start it.
        OSError: the image sets too many.
    """
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.settimeout(timeout_s)
    for path in (folder, folder / "overlay", folder / "overlay" / "upper", folder / "overlay" / "work"):
        path.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(path, order["host_uid"], order["host_gid"])
    log = logs.create()
    starter = os.fork()
    if starter == 0:
        become_runtime(order, asking_command(order, folder), folder, theirs, log)
    theirs.close()
    try:
        state_dir.note_starter(folder, starter)
        data, ancillary, _flags, _address = ours.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
        if not data or not ancillary:
            raise RuntimeFailed("the runtime ended", logs.said(log))
        (first, _uid, _gid) = struct.unpack("3i", ancillary[0][2])
        state_dir.Space.of(first).note(folder)
        return {name: value for name, value in read(first).items() if not name.startswith(OF_THE_RUNTIME)}
    except TimeoutError:
        raise RuntimeFailed(f"the runtime did not start the image within {timeout_s:g} s", "") from None
    finally:
        # The waiting shell ends with its socket, and the runtime with that; both are not asked whether they would.
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(starter, signal.SIGKILL)
        os.waitpid(starter, 0)
        os.close(log)
        remove_tree(folder)
