# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whose end was that? Real processes whose numbers are given away again, as on a machine that has run thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.supervisor.errors import failure


pytestmark = pytest.mark.sandbox

REUSE = """
import asyncio, os, sys
from pathlib import Path
from nemo_gym_prorl.sandbox.supervisor.processes import Children

# As the first process of its own process numbers it adopts every orphan, and may say which number is next.
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWPID)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def starts(status, gate=None):
    def action():
        pid = os.fork()
        if pid == 0:
            if gate is not None:
                os.read(gate, 1)
            os._exit(status)
        return {"pid": pid}, []
    return action

async def main():
    children = Children()
    # A stranger, of whose end nobody asks.
    stranger = (await children.run(starts(7)))[0]["pid"]
    await asyncio.sleep(0.05)
    # Its number is given to one that is asked about.
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(stranger - 2))
    waiting, go = os.pipe()
    with children.starting() as adopt:
        pid = (await children.run(starts(3, waiting), [waiting]))[0]["pid"]
        assert pid == stranger
        adopted = adopt(pid)
    await asyncio.sleep(0.05)
    assert adopted.alive, "that was the end of the stranger"
    os.write(go, b"x")
    assert await adopted.wait() == 3
    # One that ends before its starter has answered is known all the same.
    with children.starting() as adopt:
        pid = (await children.run(starts(5)))[0]["pid"]
        await asyncio.sleep(0.05)
        assert await adopt(pid).wait() == 5

asyncio.run(main())
"""


def test_an_end_is_never_taken_for_that_of_another_process_with_its_number() -> None:
    done = subprocess.run([sys.executable, "-c", REUSE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(20)
def test_a_failure_is_told_without_reading_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a child that has joined a sandbox, what has the name of our source file is the sandbox's: a pipe, say."""
    source = tmp_path / "server.py"
    os.mkfifo(source)
    with pytest.raises(ValueError, match="wrong") as caught:
        exec(compile("raise ValueError('wrong')", source, "exec"))
    assert failure(caught.value) == {"error": "the supervisor failed: ValueError: wrong"}
    assert f"{source}:1 " in capfd.readouterr().err
