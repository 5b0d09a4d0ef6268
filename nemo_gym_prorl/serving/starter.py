# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The process that started a server, and the server's end when that is gone.

``gym env start`` ends its servers when it is interrupted. Where it fails instead, because another deployment has its
port, or is killed, it leaves them: they hold memory and ports for minutes, or for ever. Gym's process is named to them
by our Hydra plugin (``hydra_plugins/prorl_gym``).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time


STARTER_VARIABLE = "PRORL_GYM_STARTER"
"""Environment variable with the process id of Gym's command line."""

END_S = 40.0
"""How long a server may take to give back what it holds."""


def end_with_starter() -> None:
    """From now on this server ends, in its own way, when the process that started it has ended; if that has already,
    it ends at once."""
    starter = int(os.environ.get(STARTER_VARIABLE, "0"))
    if starter in (0, os.getpid()):
        return
    try:
        watched = os.pidfd_open(starter)
    except ProcessLookupError:
        sys.exit("the Gym that started this server has ended")
    threading.Thread(target=_end_after, args=(watched,), name="starter", daemon=True).start()


def _end_after(watched: int) -> None:
    ended = select.poll()
    ended.register(watched, select.POLLIN)
    ended.poll()
    print("prorl: the Gym that started this server has ended, and so does the server", file=sys.stderr, flush=True)
    if threading.main_thread().is_alive():  # else the process is at its end already, and starts no thread for a timer
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)
