# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The one supervisor of this process: started when the first sandbox is asked for, and buried when it is dead.

However many event loops and provider objects a process has, it has one supervisor, which lives exactly as long as the
process: it ends when the one socket that this module keeps closes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import nemo_gym_prorl
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import interpreter_environ
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import socket_pair
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


BURY_S = 5.0
"""For so long a dead supervisor's remains are tried to remove; what is left then is the next supervisor's to sweep."""


@dataclass(slots=True)
class Supervisor:
    """The supervisor process of this process, with the socket whose end is its end."""

    popen: subprocess.Popen[bytes]
    folder: Path
    owner: socket.socket


_lock = threading.Lock()
_current: Supervisor | None = None


def _forget_after_fork() -> None:
    """A forked copy of the server must not keep the supervisor of the original alive."""
    global _current, _lock
    _lock = threading.Lock()
    if _current:
        _current.owner.close()
        _current = None


os.register_at_fork(after_in_child=_forget_after_fork)


def running_supervisor() -> Path:
    """The folder of this process's supervisor, started if need be. Blocks, some 100 ms when it has to start one."""
    global _current
    with _lock:
        if _current and _current.popen.poll() is None:
            return _current.folder
        if _current:
            _current.owner.close()
            bury(_current.folder)
        folder, lock, listener = _take_folder()
        owner, theirs = socket_pair()
        package = str(Path(nemo_gym_prorl.__file__).parents[1])
        program = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from nemo_gym_prorl.sandbox.supervisor import server; "
        )
        popen = subprocess.Popen(
            [
                *(sys.executable, "-ISc", program + "server.main()", package),
                *(str(folder), str(theirs.fileno()), str(listener.fileno())),
            ],
            pass_fds=[theirs.fileno(), listener.fileno(), lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # In a session of its own, so that Ctrl-C at a terminal does not reach it before the server has ended.
            start_new_session=True,
            cwd="/",
            env=interpreter_environ(),
        )
        theirs.close()
        listener.close()
        os.close(lock)
        _current = Supervisor(popen, folder, owner)
        return folder


def _take_folder() -> tuple[Path, int, socket.socket]:
    """A folder for a new supervisor, its lock, and the socket in it that listens.

    Made here and not by the supervisor, so that what is wrong with it is this process's error.

    Raises:
        InfrastructureError: it can't be made; names the setting.
    """
    folder: Path | None = None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        root = state_dir.state_root()
        folder, lock = state_dir.take(root)
        listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o600)
        listener.listen(128)
        return folder, lock, listener
    except OSError as error:
        listener.close()
        if folder:
            os.close(lock)
            remove_tree(folder)
        raise InfrastructureError(
            f"sandboxes can't be kept in {os.environ.get('PRORL_STATE') or 'the folder for temporary files'}: "
            f"{error.strerror or error}; set PRORL_STATE to a folder of yours with a short path, on a local disk "
            "that has room"
        ) from error


def bury(folder: Path) -> None:
    """Remove what a dead supervisor left. It may take a moment until the last child it forked lets go of the lock."""
    deadline = time.monotonic() + BURY_S
    while not state_dir.bury(folder, patience_s=1.0) and time.monotonic() < deadline:
        time.sleep(0.1)
