# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Restarter of one server of a Gym deployment: restarts the server when it dies.

``gym env start`` ends the whole deployment when a server has ended. In a supervised deployment
(:class:`~nemo_gym_prorl.deployment.deployment.GymDeployment`) Gym therefore starts this program instead of the
interpreter, and this program runs the server. Gym passes configuration, host and port in environment variables, so a
restarted server has the same address.

Until the deployment is up, the end of the server ends this program too, so Gym reports a wrong configuration as usual.
Afterwards the server is restarted after a backoff that doubles with every early death. This module imports only the
standard library, because each server has a process of this program.
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
LONGEST_PAUSE_S = 30.0  # bounds of the doubling backoff, in seconds, so that a broken server causes little load
STABLE_S = 60.0  # a server that ran this long did not fail at startup, so its backoff starts over
END_S = 20.0  # seconds from SIGINT to SIGKILL; shorter than Gym's limit for the end of this program

_PR_SET_PDEATHSIG = 1


def restarter_program(python: Path, up: Path, events: Path) -> str:
    """Return the text of the program that replaces ``python`` in a supervised deployment.

    Args:
        python: the interpreter.
        up: file that exists once the deployment is up.
        events: file to which one JSON line is appended for every death of the server.
    """
    words = [str(python), "-P", str(Path(__file__).resolve()), str(up), str(events), str(python)]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def supervise(up: Path, events: Path, command: list[str]) -> int:
    """Run a server until a signal arrives, or the server ends before the deployment is up; return its exit status."""
    _die_with_parent(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    environ = dict(os.environ)
    # A "python" that the server starts by name must be the interpreter, not another restarter.
    folders = os.environ.get("PATH", "").split(os.pathsep)
    environ["PATH"] = os.pathsep.join(entry for entry in folders if not _has_restarter(Path(entry)))
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
            _report(events, status, lived_s, pause_s)
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


def _report(events: Path, status: int, lived_s: float, pause_s: float) -> None:
    name = os.environ.get("NEMO_GYM_CONFIG_PATH", "")
    how = f"killed by signal {-status}" if status < 0 else f"status {status}"
    line = json.dumps({"name": name, "how": how, "lived_s": lived_s, "pause_s": pause_s})
    # The disk may be full, or the deployment may have removed its folder; neither is a reason to end the server.
    with contextlib.suppress(OSError):
        print(f"prorl: {name} ended ({how}) after {lived_s:.0f} s; restarting it in {pause_s:g} s", flush=True)
    with contextlib.suppress(OSError), events.open("a") as stream:
        stream.write(line + "\n")


def _has_restarter(folder: Path) -> bool:
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
    # Further signals must not interrupt the wait for the server's end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
