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
import time
from pathlib import Path

from nemo_gym_prorl.sandbox.launcher.requests import MOST_VARIABLES
from nemo_gym_prorl.sandbox.runtime import log as logs
from nemo_gym_prorl.sandbox.runtime.command import OF_THE_RUNTIME, asking_command
from nemo_gym_prorl.sandbox.runtime.launch import become_runtime
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.sandbox.supervisor.storage.erase import remove_tree


class RuntimeFailed(OSError):
    """The runtime did not start the image.

    Attributes:
        log: what it said.
    """

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


def read(path: str) -> dict[str, str]:
    """The variables in a file, as the kernel has a process's.

    Raises:
        OSError: they are more than :data:`MOST_VARIABLES`.
    """
    with Path(path).open("rb") as file:
        variables = file.read(MOST_VARIABLES + 1)
    if len(variables) > MOST_VARIABLES:
        raise OSError(errno.E2BIG, f"the image sets more than {MOST_VARIABLES >> 20} MiB of variables")
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
    ours.settimeout(state_dir.LOOK_S)
    for path in (folder, folder / "overlay", folder / "overlay" / "upper", folder / "overlay" / "work"):
        path.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(path, order["host_uid"], order["host_gid"])
    log = logs.create()
    starter = os.fork()
    if starter == 0:
        become_runtime(order, asking_command(order, folder), folder, theirs, log)
    theirs.close()
    space: state_dir.Space | None = None
    try:
        state_dir.note_starter(folder, starter)
        deadline = time.monotonic() + timeout_s
        said: bytes | None = None
        while said is None:
            if time.monotonic() > deadline:
                raise RuntimeFailed(f"the runtime did not start the image within {timeout_s:g} s", "")
            with contextlib.suppress(TimeoutError):
                said = ours.recv(64)
            if space is None and (space := state_dir.Space.below(starter)):
                space.note(folder)
        if not said or space is None:
            raise RuntimeFailed("the runtime ended", logs.said(log))
        return {
            name: value
            for name, value in read(f"/proc/{space.init}/environ").items()
            if not name.startswith(OF_THE_RUNTIME)
        }
    finally:
        # An honest shell ends with its socket, and the runtime with that; neither is asked whether it would.
        ours.close()
        os.close(log)
        try:
            if space := space or state_dir.Space.below(starter):
                space.end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(starter, signal.SIGKILL)
            os.waitpid(starter, 0)
        remove_tree(folder)
