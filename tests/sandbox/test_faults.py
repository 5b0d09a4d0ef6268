# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the supervisor and the machine at chosen moments: nothing is left, and clients get an error."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
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
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage, make_request
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.children import Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.protocol import PutRequest, SandboxLost, SandboxRefused
from tests.sandbox import elf
from tests.sandbox.requests import request_for
from tests.sandbox.running import HANG_S, child_pids, gone_within_s, kill_supervisor, supervisor_pid, until


REPOSITORY = Path(__file__).parents[2]


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]


SET_FLAGS, IMMUTABLE = 0x40086602, 0x10
"""``FS_IOC_SETFLAGS`` and ``FS_IMMUTABLE_FL``."""


@pytest.mark.skipif(not is_machine_root(), reason="only root can make a file that nobody can remove")
def test_a_supervisor_ends_though_a_file_cannot_be_removed(image: Path, runtime: Runtime, state: Path) -> None:
    """A supervisor without a server must not retry for ever."""
    serve = """
import asyncio, json, sys
from pathlib import Path
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.supervisor import client

async def main():
    box = await Container.start(ContainerSpec(image=Path(sys.argv[1])), require_runtime())
    await box.run("touch /root/kept")
    print(json.dumps([client.own_supervisor.popen.pid, str(client.own_supervisor.folder)]), flush=True)
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
    ranges = [user_ids.parent_ids(kind, own) for kind, own in (("uid", os.geteuid()), ("gid", os.getegid()))]
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
                assert (await launcher.run(make_request(prepared, given, str(tmp_path)), files))[0]["pid"]
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
    assert select.select([alive], [], [], gone_within_s())[0], "it waited for a word that nobody could send"
    assert os.read(alive, 1) == b""
    os.close(alive)


@pytest.fixture
def silent_image(tiny_root: Path, open_folder: Path) -> Path:
    """An image whose shell never reports and never ends by itself."""
    root = open_folder / "image"
    shutil.copytree(tiny_root, root, symlinks=True, copy_function=os.link)
    shell = root / "usr/bin/dash"
    shell.unlink()
    shell.write_bytes(elf.waiting())
    shell.chmod(0o755)
    return root


@pytest.mark.skipif(not is_machine_root(), reason="only root sees for whom the shell of a container that starts runs")
async def test_an_image_that_is_asked_for_its_variables_ends_with_its_asker(
    silent_image: Path, runtime: Runtime, container: Container
) -> None:
    folder = Path(container.describe()["supervisor"])
    asking = asyncio.create_task(
        Container.start(ContainerSpec(image=silent_image, start="direct", start_timeout_s=60), runtime)
    )
    async with asyncio.timeout(HANG_S):
        while not (noted := list(folder.glob(f"m-*/{state_dir.PID_NAMESPACE_FILE}"))):  # noqa: ASYNC240
            assert not asking.done()
            await asyncio.sleep(0.02)
    [space] = state_dir.pid_namespaces_of(noted[0].parent.parent)[-1:]
    kill_supervisor()
    await until(lambda: not space.alive and not folder.exists(), gone_within_s())
    with pytest.raises(InfrastructureError):
        await asking


async def test_a_helper_inside_ends_with_the_supervisor(container: Container) -> None:
    """It has another user's rights by then, for which the kernel forgets what it was told; it would hold the lock, and
    the connection by whose end the server learns of all this."""
    folder = Path(container.describe()["supervisor"])
    source, nothing_comes = os.pipe()
    try:
        copying = asyncio.create_task(container.ask(PutRequest(container.name, "/x", 0o644), [source]))
        while (await container.run("ls -A / | grep -cE '^[.][0-9a-f]{32}$'")).stdout != "1\n":
            await asyncio.sleep(0.01)
        kill_supervisor()
        async with asyncio.timeout(gone_within_s()):
            with pytest.raises(SandboxLost):
                await copying
            await until(lambda: not folder.exists())
    finally:
        os.close(source)
        os.close(nothing_comes)


FOLDERS = "/tmp" if is_machine_root() else None


def alone(program: str, image: Path) -> None:
    """Run one of the programs, to its end."""
    with tempfile.TemporaryDirectory(prefix="prorl-a-", dir=FOLDERS) as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("alone.py")), program, folder, str(image)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout.endswith("passed\n"), done.stdout[-2000:] + done.stderr[-4000:]


def test_a_full_disk_ends_no_sandbox_but_fails_new_ones(image: Path, runtime: Runtime) -> None:
    alone("full_disk", image)


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not ours to use")
@pytest.mark.skipif(not is_machine_root(), reason="only root may mount for others")
def test_a_process_that_does_not_die_is_reported_and_harms_nobody(image: Path, runtime: Runtime) -> None:
    alone("deaf_disk", image)


@pytest.mark.skipif(is_machine_root(), reason="root may always start processes")
async def test_a_supervisor_that_can_start_no_process_lives_on(image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=image), runtime)
    supervisor = supervisor_pid()
    children = child_pids(supervisor)
    before = resource.prlimit(supervisor, resource.RLIMIT_NPROC)
    # Also the launcher, which forks in place of the supervisor.
    for pid in (supervisor, *children):
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NPROC, (1, before[1]))
    try:
        with pytest.raises(SandboxRefused, match="no process can be started"):
            await container.run("true")
        with pytest.raises(InfrastructureError, match="no further process can be started"):
            await Container.start(ContainerSpec(image=image), runtime)
        closing = asyncio.create_task(container.close())
        # Closing waits for a process that removes the files.
        await asyncio.sleep(1)
        assert not closing.done()
    finally:
        for pid in (supervisor, *children):
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NPROC, before)
    await closing
    async with await Container.start(ContainerSpec(image=image), runtime) as another:
        assert (await another.run("echo alive")).stdout == "alive\n"
    while list(Path(another.describe()["supervisor"]).glob("b-*")):  # noqa: ASYNC240
        await asyncio.sleep(0.01)
