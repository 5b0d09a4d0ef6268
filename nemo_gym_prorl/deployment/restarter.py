# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps one server of a Gym deployment running: starts it again when it dies, as it was.

``gym env start`` looks at its servers once a minute and ends the whole deployment if one is gone. A supervised
deployment (:class:`~nemo_gym_prorl.deployment.deployment.GymDeployment`) therefore lets Gym start this program in the
interpreter's place. Gym gives a server its configuration, host and port in environment variables, so the server that
is started again is the same one at the same address.

Until the deployment is up, a server that ends takes this program with it, so that a wrong configuration is reported as
ever. Afterwards it is started again after a pause that doubles with every early death. Standard library only: this
runs once more for every server.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STABLE_S = 60.0
"""A server that lived as long has not died early: the pause begins anew."""

END_S = 20.0
"""How long a server may take to end after it was told to."""

_PR_SET_PDEATHSIG = 1


def restarter_program(python: Path, up: Path, events: Path) -> str:
    """Text of the program that stands for ``python`` in a supervised deployment.

    Args:
        python: the interpreter.
        up: a file that is there as soon as the deployment is up.
        events: a file that gets one JSON line for every death.
    """
    words = [str(python), "-P", str(Path(__file__).resolve()), str(up), str(events), str(python)]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def keep(up: Path, events: Path, command: list[str]) -> int:
    """Run a server until we are told to end, or until it ends before the deployment is up; gives its status."""
    _die_with_parent(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    environ = dict(os.environ)
    # What the server starts by the name "python" is not to be kept.
    here = os.environ.get("PATH", "").split(os.pathsep)
    environ["PATH"] = os.pathsep.join(entry for entry in here if not _is_stand_in(Path(entry)))
    early = 0
    while True:
        started = time.monotonic()
        child = None
        try:
            child = subprocess.Popen(command, env=environ, preexec_fn=lambda: _die_with_parent(signal.SIGTERM))
            status = child.wait()
            if not up.exists():
                return _exit_status(status)
            lived_s = time.monotonic() - started
            early = 0 if lived_s >= STABLE_S else early + 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(early - 1, 0))
            _tell(events, status, lived_s, pause_s)
            time.sleep(pause_s)
        except _Stop:
            return _end(child) if child else 0


def _end(child: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
    try:
        return _exit_status(child.wait(END_S))
    except subprocess.TimeoutExpired:
        child.kill()
        return _exit_status(child.wait())


def _tell(events: Path, status: int, lived_s: float, pause_s: float) -> None:
    name = os.environ.get("NEMO_GYM_CONFIG_PATH", "")
    how = f"killed by signal {-status}" if status < 0 else f"status {status}"
    line = json.dumps({"name": name, "how": how, "lived_s": lived_s, "pause_s": pause_s})
    # The deployment removes its folder when it ends, and a disk may be full: no reason to end, and the server with us.
    with contextlib.suppress(OSError):
        print(f"prorl: {name} ended ({how}) after {lived_s:.0f} s; starting it again in {pause_s:g} s", flush=True)
    with contextlib.suppress(OSError), events.open("a") as stream:
        stream.write(line + "\n")


def _is_stand_in(folder: Path) -> bool:
    try:
        return __file__ in (folder / "python").read_text()
    except (OSError, ValueError):
        return False


def _exit_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def _die_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


class _Stop(Exception):
    pass


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: the child is waited for in peace.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
