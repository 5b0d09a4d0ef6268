# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of a supervisor, of many sandboxes and at inconvenient times: nothing is left of any, all end as lost.

``make test-long`` runs the whole thing: 24 times under 500 sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import syscalls, user_ids
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage, make
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.limits import cgroups, usage
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import own_supervisor, state_dir
from nemo_gym_prorl.sandbox.supervisor.client import SandboxLost
from nemo_gym_prorl.sandbox.supervisor.messages import PutRequest
from nemo_gym_prorl.sandbox.supervisor.processes import Children, Launcher
from tests.sandbox import elf
from tests.sandbox.requests import request_for


REPOSITORY = Path(__file__).parents[2]

LONG = bool(os.environ.get("PRORL_TEST_LONG"))
KILLS, SANDBOXES = (24, 500) if LONG else (1, 10)

WITH_ITS_SERVER = 4
"""Each so manieth time the server dies with it, and the next sweep has to take the files."""

GONE_WITHIN_S = 5.0
"""Invariant 4 of the architecture."""

FILES_GONE_WITHIN_S = 120.0
"""Of hundreds they take a busy disk its time; no memory, no process and no rights are left with them."""

GROUPS = granted.base if (granted := cgroups.delegation()) else None
"""Where sandboxes get control groups, if they can have any."""

SET_FLAGS, IMMUTABLE = 0x40086602, 0x10
"""``FS_IOC_SETFLAGS`` and ``FS_IMMUTABLE_FL``."""

Processes = dict[int, int | None]
"""Numbers and start times."""

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(7200 if LONG else 300)]


class Crowd:
    """A server process with many sandboxes."""

    def __init__(self, image: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("crowd.py")), str(image), str(SANDBOXES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    def begin(self) -> None:
        """Have it make its sandboxes; returns when all live."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.facts = self.answer()
        self.folder = Path(self.facts["folder"])

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            assert end
            end.close()


def processes_of(folder: Path) -> Processes:
    """Whatever was started for an owner's ``folder``, inside or outside, by what the kernel says of each process.

    Not by what the supervisor noted down, which is what is tried here: processes that bear the folder's path, and all
    that descend from them.
    """
    found: Processes = {}
    parents: dict[int, int] = {}
    for pid in state_dir.process_ids():
        started = state_dir.start_time(pid)
        texts = []
        for name in ("cmdline", "mountinfo", "environ"):
            try:
                texts.append(Path(f"/proc/{pid}/{name}").read_bytes())
            except OSError:
                continue
        if started and any(str(folder).encode() in text for text in texts):
            found[pid] = started
        with contextlib.suppress(OSError):
            parents[pid] = int(usage.status(pid)[usage.PARENT])
    found.pop(os.getpid(), None)
    while below := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= {pid: started for pid in below if (started := state_dir.start_time(pid))}
        parents = {pid: parent for pid, parent in parents.items() if pid not in below}
    return found


def alive(known: Processes) -> list[int]:
    """Those of them that live."""
    return [pid for pid, started in known.items() if state_dir.start_time(pid) == started]


def groups_of(folder: Path) -> list[str]:
    """The control groups that are left; where nobody was left to remove them they are empty."""
    return [str(path) for path in GROUPS.glob(f"prorl-{folder.name}-*")] if GROUPS else []


def remains(folder: Path) -> dict[str, object]:
    """What is still there of processes and what they see. Looks at every process of the machine."""
    return {
        "processes": list(processes_of(folder)),
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line],
    }


def seconds_until_gone(folder: Path, known: Processes, begin: float) -> float:
    """How long it takes until nothing but files and empty groups is left, and what is if that is too long."""
    while any((left := {"known": still} if (still := alive(known)) else remains(folder)).values()):
        assert time.monotonic() - begin < GONE_WITHIN_S, left
        time.sleep(0.02)
    return time.monotonic() - begin


@pytest.mark.longer("24 times under 500 sandboxes")
def test_a_supervisor_of_many_that_is_killed_leaves_nothing(image: Path, runtime: Runtime, state: Path) -> None:
    rng = random.Random(0)
    crowd = Crowd(image)
    processes, files = [], []
    try:
        for number in range(KILLS):
            crowd.begin()
            known = processes_of(crowd.folder)
            # First process and daemon of each, and the commands.
            assert len(known) > 3 * SANDBOXES
            time.sleep(rng.uniform(0, 0.3))
            with_server = number % WITH_ITS_SERVER == WITH_ITS_SERVER - 1
            if with_server:
                crowd.process.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            os.kill(crowd.facts["supervisor"], signal.SIGKILL)
            if with_server:
                crowd.end()
            processes.append(seconds_until_gone(crowd.folder, known, begin))
            while not with_server and groups_of(crowd.folder):
                assert time.monotonic() - begin < GONE_WITHIN_S, groups_of(crowd.folder)
                time.sleep(0.01)
            while crowd.folder.exists():
                assert time.monotonic() - begin < FILES_GONE_WITHIN_S, list(crowd.folder.iterdir())
                if with_server:
                    state_dir.sweep(state)
                time.sleep(0.01)
            files.append(time.monotonic() - begin)
            assert not groups_of(crowd.folder)
            print(f"{number}: {processes[-1]:.2f} s, files {files[-1]:.2f} s", flush=True)
            if with_server:
                crowd = Crowd(image)
            else:
                ends = crowd.answer()
                assert sum(ends.values()) > SANDBOXES
                assert set(ends) == {"SandboxLost"}, ends
    finally:
        crowd.end()
    print(f"{KILLS} kills under {SANDBOXES}: processes gone in {max(processes):.2f} s, all in {max(files):.2f} s")


@pytest.mark.skipif(not is_machine_root(), reason="only root can make a file that nobody can remove")
def test_a_supervisor_ends_though_a_file_cannot_be_removed(image: Path, runtime: Runtime, state: Path) -> None:
    """Without its server it would try for ever, and take the processor's time for it."""
    serve = """
import asyncio, json, sys
from pathlib import Path
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.supervisor import own_supervisor

async def main():
    box = await Container.start(ContainerSpec(image=Path(sys.argv[1])), require_runtime())
    await box.run("touch /root/kept")
    print(json.dumps([own_supervisor._current.popen.pid, str(own_supervisor._current.folder)]), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    command = [sys.executable, "-c", serve, str(image)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout
        supervisor, folder = json.loads(server.stdout.readline())
        [kept] = Path(folder).glob("*/overlay/upper/root/kept")
        with kept.open() as file:
            fcntl.ioctl(file, SET_FLAGS, struct.pack("l", IMMUTABLE))
            try:
                server.kill()
                deadline = time.monotonic() + 30
                while state_dir.start_time(supervisor) is not None:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                assert kept.exists(), "or it was none"
            finally:
                fcntl.ioctl(file, SET_FLAGS, struct.pack("l", 0))
    state_dir.sweep(Path(folder).parent)
    assert not Path(folder).exists()


def test_a_first_process_whose_supervisor_died_before_it_could_tell_ends(runtime: Runtime, tmp_path: Path) -> None:
    parent, _trouble = user_ids.make_parent_namespace()
    ranges = [user_ids.ranges(kind, own) for kind, own in (("uid", os.geteuid()), ("gid", os.getegid()))]
    prepared = PreparedImage(parent, (0, 0), parent, "", {}, ranges)
    given = request_for(tmp_path)
    alive, lives = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        try:
            _channel, theirs = socket.socketpair()

            async def begin() -> None:
                launcher = Launcher(Children(), tmp_path)
                files = [parent, theirs.fileno(), launcher.program(), lives]
                assert (await launcher.run(make(prepared, given, str(tmp_path)), files))[0]["pid"]
                os.write(lives, b"!")
                time.sleep(100)  # noqa: ASYNC251

            asyncio.run(begin())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(lives)
    os.close(parent)
    assert os.read(alive, 1) == b"!"
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    assert select.select([alive], [], [], GONE_WITHIN_S)[0], "it waited for a word that nobody could send"
    assert os.read(alive, 1) == b""
    os.close(alive)


def runs_its_shell(folder: Path) -> bool:
    """Whether an image that was started for an owner's folder has come as far."""
    for pid in processes_of(folder):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(errors="replace") == "sh\n":
                return True
    return False


@pytest.fixture
def silent_image(tiny_root: Path) -> Iterator[Path]:
    """An image whose shell says nothing and does not end, whatever ends around it."""
    with tempfile.TemporaryDirectory(prefix="prorl-h-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        root = Path(name, "image")
        shutil.copytree(tiny_root, root, symlinks=True, copy_function=os.link)
        shell = root / "usr/bin/dash"
        shell.unlink()
        shell.write_bytes(elf.waiting())
        shell.chmod(0o755)
        yield root


@pytest.mark.skipif(not is_machine_root(), reason="only root sees for whom the shell of a container that starts runs")
async def test_an_image_that_is_asked_for_its_variables_ends_with_its_asker(
    silent_image: Path, runtime: Runtime, container: Container
) -> None:
    folder = Path(container.describe()["supervisor"])
    spec = ContainerSpec(image=silent_image, start="direct", start_timeout_s=60)
    asking = asyncio.create_task(Container.start(spec, runtime))
    async with asyncio.timeout(60):
        while not runs_its_shell(folder):
            assert not asking.done()
            await asyncio.sleep(0.02)
    known = processes_of(folder)
    assert own_supervisor._current
    os.kill(own_supervisor._current.popen.pid, signal.SIGKILL)
    # Its server removes what is left.
    await asyncio.to_thread(seconds_until_gone, folder, known, time.monotonic())
    with pytest.raises(InfrastructureError):
        await asking


@pytest.mark.parametrize("alive", [True, False])
def test_who_is_to_end_with_a_parent_does_so_too_when_that_has_ended_already(alive: bool) -> None:
    parent = os.getpid() if alive else os.getppid()
    child = os.fork()
    if child == 0:
        try:
            syscalls.end_with(parent)
            os._exit(42)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (42 if alive else 1)


async def test_a_helper_inside_ends_with_the_supervisor(container: Container) -> None:
    """It has another user's rights by then, for which the kernel forgets what it was told; it would hold the lock, and
    the connection by whose end the server learns of all this."""
    folder = Path(container.describe()["supervisor"])
    assert own_supervisor._current
    source, nothing_comes = os.pipe()
    try:
        copying = asyncio.create_task(container.ask(PutRequest(container.name, "/x", 0o644), [source]))
        while (await container.run("ls -A / | grep -cE '^[.][0-9a-f]{32}$'")).stdout != "1\n":
            await asyncio.sleep(0.01)
        os.kill(own_supervisor._current.popen.pid, signal.SIGKILL)
        async with asyncio.timeout(GONE_WITHIN_S):
            with pytest.raises(SandboxLost):
                await copying
            while await asyncio.to_thread(folder.exists):
                await asyncio.sleep(0.01)
    finally:
        os.close(source)
        os.close(nothing_comes)


async def test_a_command_that_had_not_begun_is_lost_with_the_supervisor(container: Container) -> None:
    assert own_supervisor._current
    os.kill(own_supervisor._current.popen.pid, signal.SIGSTOP)
    running = asyncio.create_task(container.run("true"))
    await asyncio.sleep(0.1)
    os.kill(own_supervisor._current.popen.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await running
