# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A command at its time limit leaves no foreground process, whatever process tree it has made."""

from __future__ import annotations

import contextlib
import os
from itertools import product
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox import signals
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.bash_channel import ContainerTerminal
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor import state_dir
from tests.conftest import tiered
from tests.sandbox.running import until


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]

BEGIN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
def stay():
    open("/tmp/begun", "w").close()
    time.sleep(1000)
"""

ORPHAN = """
if os.fork() == 0:
    if os.fork() == 0:
        stay()
    os._exit(0)
time.sleep(1000)
"""

TREE = """
open("/tmp/begun", "w").close()
while True:
    try:
        os.fork()
    except OSError:
        pass
    time.sleep(0.005)
"""

HOPPING = """
open("/tmp/begun", "w").close()
if os.fork():
    time.sleep(1000)
while True:
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        pass
    time.sleep(0.005)
"""

PROGRAMS = {
    "an orphan": ORPHAN,
    "a tree that grows": TREE,
    "one after the other": HOPPING,
}


def of_session(session: int) -> list[int]:
    """Return the other processes of a session."""
    found = []
    for pid in state_dir.process_ids():
        with contextlib.suppress(OSError):
            state, _parent, _group, of, *_ = usage.read_stat(pid)
            found += [pid] if state not in usage.ENDED_STATES and int(of) == session != pid else []
    return found


@pytest.mark.parametrize(
    "case",
    tiered(
        [*product(PROGRAMS, ("this", "old"))],
        [("an orphan", "this"), ("one after the other", "this"), ("a tree that grows", "old")],
    ),
    ids="-".join,
)
async def test_nothing_of_a_command_whose_time_is_up_is_left(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str]
) -> None:
    """Also without pidfd group signals."""
    what, kernel = case
    if kernel == "old":
        monkeypatch.setattr(signals, "_PIDFD_SIGNAL_PROCESS_GROUP", 1 << 30)
    spec = ContainerSpec(image=image, processes=64, memory_mib=1024)
    async with await Container.start(spec, runtime) as container, await Shell.start(container) as shell:
        await shell.run(f"cat > /tmp/p.py <<'X'\n{BEGIN}{PROGRAMS[what]}\nX")
        assert shell._bash
        session = shell._bash.pid
        going = await shell.run("python3 /tmp/p.py", silence_s=0.5)
        assert going.waiting
        # Seen from outside, where a full table of processes does not matter.
        await until((container.folder / "overlay/upper/tmp/begun").exists)
        stopped = await shell.wait(timeout_s=0.1, silence_s=None)
        assert stopped.timed_out
        assert not stopped.exited
        # A killed process may take a moment to end.
        await until(lambda: not of_session(session))
        assert (await shell.run("echo usable")).output.endswith("usable\n")


def test_a_terminal_without_a_session_has_no_foreground() -> None:
    ours, theirs = os.openpty()
    terminal = ContainerTerminal(os.getpid(), ours)
    try:
        assert terminal.foreground() is None
    finally:
        terminal.close()
        os.close(theirs)
    assert terminal.foreground() is None
