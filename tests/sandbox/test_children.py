# SPDX-License-Identifier: Apache-2.0
"""Whose end was that? Real processes whose numbers are given away again, as on a machine that has run thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.supervisor.processes.children import failure


pytestmark = pytest.mark.sandbox

REUSE = """
import os, sys, time
from pathlib import Path
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children

# As the first process of its own process numbers it adopts every orphan, and may say which number is next.
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWPID)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

children, ends, answers = Children(), [], []

def starts(status, gate=None):
    def action():
        pid = os.fork()
        if pid == 0:
            if gate is not None:
                os.read(gate, 1)
            os._exit(status)
        return {"pid": pid}, []
    return action

def until(test):
    while not test():
        children.reap()
        time.sleep(0.001)

# A stranger, of whose end nobody asks.
children.fork(starts(7), lambda answer, _files: answers.append(answer["pid"]))
until(lambda: answers)
time.sleep(0.05)
children.reap()

def adopted(answer, _files):
    answers.append(answer["pid"])
    children.adopt(answer["pid"], ends.append)

# Its number is given to one that is asked about.
Path("/proc/sys/kernel/ns_last_pid").write_text(str(answers[0] - 2))
waiting, go = os.pipe()
children.fork(starts(3, waiting), adopted)
until(lambda: len(answers) == 2)
assert answers[0] == answers[1], answers
for _ in range(20):
    children.reap()
    time.sleep(0.001)
assert ends == [], "it lives; that was the end of the stranger"
os.write(go, b"x")
until(lambda: ends)
assert [os.waitstatus_to_exitcode(end) for end in ends] == [3]

# One that ends before its starter has answered is known all the same.
quick = []

def late(answer, _files):
    time.sleep(0.05)
    children.reap()
    children.adopt(answer["pid"], quick.append)

children.fork(starts(5), late)
until(lambda: quick)
assert [os.waitstatus_to_exitcode(end) for end in quick] == [5]
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
