# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Processes whose first thread has ended are looked at like any other; so is what other threads have of their own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import threads, usage
from nemo_gym_prorl.sandbox.limits.walk import Found, walk
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxExhausted
from nemo_gym_prorl.sandbox.supervisor.processes import pidfd


MIB = 1 << 20

HEADLESS = """
import ctypes, os, signal, subprocess, sys, threading, time
def work():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
WORK
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""

MEMORY = """
    held = bytearray(b"x" * (300 << 20))
    time.sleep(60)
"""

FILES_OF_MEMORY = """
    file = os.memfd_create("file")
    os.truncate(file, 300 << 20)
    for _ in range(300):
        os.write(file, bytes(1 << 20))
    time.sleep(60)
"""

WITHOUT_A_NAME = """
    for number in range(4):
        file = os.open("/tmp/file", os.O_RDWR | os.O_CREAT)
        os.unlink("/tmp/file")
        os.write(file, b"x" * (8 << 20))
    time.sleep(60)
"""

LATER = """
    time.sleep(4)
    for number in range(4):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(b"x" * (8 << 20))
    end = time.monotonic() + 30
    while time.monotonic() < end:
        time.sleep(0.01)
"""

WRITES = """
    print("begun", flush=True)
    while True:
        with open("/tmp/written", "a") as file:
            file.write("x")
        time.sleep(0.01)
"""

OWN_TABLE = """
import ctypes, os, tempfile, threading, time
def work():
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x400) == 0  # CLONE_FILES
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * (3 << 20))
        file.flush()
        print("there", flush=True)
        time.sleep(60)
threading.Thread(target=work, daemon=True).start()
time.sleep(60)
"""

BY_ANOTHER = """
import os, threading, time
def work():
    if not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
threading.Thread(target=work, daemon=True).start()
time.sleep(60)
"""


def headless(work: str) -> str:
    return HEADLESS.replace("WORK", work)


def program(text: str) -> str:
    return f"python3 - <<'END'\n{text}\nEND"


@contextlib.contextmanager
def running(text: str) -> Iterator[tuple[int, str]]:
    """A process, and the first line that it has printed."""
    with subprocess.Popen([sys.executable, "-Wignore", "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.kill()


def test_who_has_lost_its_first_thread_is_there() -> None:
    work = """
    held = bytearray(b"x" * (40 << 20))
    begin = time.process_time()
    while time.process_time() < begin + 0.1:
        pass
    print("begun", flush=True)
    time.sleep(60)
"""
    with running(headless(work)) as (pid, line):
        assert line == "begun"
        assert Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
        found = usage.look(pid)
        assert found
        assert found.pid == pid
        assert found.resident > 40 * MIB
        assert found.ticks >= 5
        assert found.threads == 2
        assert usage.proportional(pid)[0] > 40 * MIB
        assert pidfd.start_time(pid) == found.started
        assert not pidfd.is_exiting(pid)
        assert pidfd.send(pid, 9, lambda: True)
        # It has a parent that has not asked: it is a zombie now, with all its threads.
        while usage.look(pid):
            pass
        assert pidfd.start_time(pid) is None
        assert usage.proportional(pid) == (0, 0)
        assert threads.children(pid) == []


def test_a_child_of_any_thread_is_a_child() -> None:
    with running(BY_ANOTHER) as (pid, line):
        try:
            assert threads.children(pid) == [int(line)]
        finally:
            pidfd.send(int(line), 9, lambda: True)


@pytest.mark.parametrize("known", [True, False])
def test_files_of_a_thread_that_has_a_table_of_its_own_count(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Also where the kernel does not say who shares one."""
    if not known:
        monkeypatch.setattr("nemo_gym_prorl.sandbox.isolation.syscalls._KCMP", {})
    with running(OWN_TABLE) as (pid, line):
        assert line == "there"
        found = Found()
        for _ in walk([], [pid], pid, found):
            pass
        assert found.disk == 3 * MIB


@pytest.mark.sandbox
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("work", [MEMORY, FILES_OF_MEMORY])
async def test_memory_of_who_has_lost_its_first_thread_counts(image: Path, runtime: Runtime, work: str) -> None:
    async with await Container.start(ContainerSpec(image=image, memory_mib=100), runtime) as container:
        done = await container.run(program(headless(work)), timeout_s=30)
        assert (done.exit_code, done.timed_out) == (137, False)
        assert any("memory" in note for note in container.notes), container.notes


@pytest.mark.sandbox
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("work", [WITHOUT_A_NAME, LATER])
async def test_disk_of_who_has_lost_its_first_thread_counts(image: Path, runtime: Runtime, work: str) -> None:
    async with await Container.start(ContainerSpec(image=image, disk_mib=20), runtime) as container:
        with pytest.raises(SandboxExhausted, match="disk"):
            await container.run(program(headless(work)), timeout_s=30)


@pytest.mark.sandbox
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("way")
async def test_who_has_lost_its_first_thread_is_paused(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        await container.run(f"({program(headless(WRITES))}\n) >/tmp/out 2>&1 &")
        async with asyncio.timeout(30):
            while not (await container.run("cat /tmp/out /tmp/written")).stdout.startswith("begun\nx"):
                await asyncio.sleep(0.05)
        await container.pause()
        written = container.folder / "overlay/upper/tmp/written"
        before = written.stat().st_size
        await asyncio.sleep(0.5)
        assert written.stat().st_size == before
        await container.resume()
        async with asyncio.timeout(30):
            while written.stat().st_size == before:
                await asyncio.sleep(0.05)
