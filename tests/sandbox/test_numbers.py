# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""No signal reaches a process that got the number of an ended process.

Each test is the first process of a PID namespace, so that it can choose the next number. The target ends after it was
looked up and before the signal is sent, and a bystander gets its number.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.sandbox

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox import signals
from nemo_gym_prorl.sandbox.supervisor import state_dir

os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWPID | os.CLONE_NEWNS)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.mount("proc", "/proc", "proc", 0)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def sleeper(session=False):
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        os.execvp("sleep", ["sleep", "1000"])
    while Path(f"/proc/{pid}/comm").read_text(errors="replace") != "sleep\\n" or state(pid) != "S":
        time.sleep(0.001)
    return pid


def given_away(pid):
    # In another tick of the clock by which the kernel says when a process was started.
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    assert sleeper(session=True) == pid


def unharmed(pid):
    time.sleep(0.05)
    assert state(pid) == "S", state(pid)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)


meant = sleeper()
"""

CASES = {
    "compared and given away": """
assert not signals.send(meant, signal.SIGKILL, lambda: given_away(meant) or True)
""",
    "a sandbox's first process": """
space = state_dir.PidNamespace.of(meant)
given_away(meant)
assert not space.alive
space.kill()
""",
    "what a dead owner left": """
folder = Path(sys.argv[1])
state_dir.record_starter(folder, meant)
real = signals.kill
def late(pid, started):
    given_away(meant)
    real(pid, started)
signals.kill = late
(folder / "b-1").mkdir()
state_dir.record_starter(folder / "b-1", meant)
state_dir.clear(folder)
""",
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_number_that_was_given_away_again_costs_no_bystander(case: str, tmp_path: Path) -> None:
    program = f"{BEGIN}\n{case}\nunharmed(meant)\nprint('unharmed')"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "unharmed\n", done.stderr
