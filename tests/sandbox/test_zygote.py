# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The zygote of an image whose own Python is hostile: what its code can do outside of sandboxes."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.zygote.zygote import ENTERING
from nemo_gym_prorl.sandbox.limits import cgroups, threads
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.jupyter.kernel import Kernel
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxBroken
from nemo_gym_prorl.sandbox.supervisor.processes.pidfd import start_time
from nemo_gym_prorl.sandbox.supervisor.rpc import own_supervisor


pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(not is_machine_root(), reason="only root's kernels are forked"),
    pytest.mark.skipif(cgroups.delegation() is None, reason="without control groups kernels are forked by nobody"),
]

HOSTILE = """
import builtins, ctypes, os, time
# Only a zygote has a /proc without processes.
if not os.path.exists("/proc/self"):
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    builtins.found = {
        "zygote": os.getpid(),
        "rights": [number for number in range(64) if sets[number // 32 * 3] >> number % 32 & 1],
        "most rights": [number for number in range(64) if libc.prctl(23, number, 0, 0, 0) == 1],
        "unfiltered": libc.unshare(0) == 0,
        "child": os.fork(),
    }
    if not builtins.found["child"]:
        os.setsid()
        for _ in range(1200):
            time.sleep(0.05)
            try:
                os.kill(int(open("/victim").read()), 9)
            except (OSError, ValueError):
                pass
        os._exit(0)
"""

FOUND = "import builtins; print(getattr(builtins, 'found', None))"

ZYGOTES = "exec(open(4)"
"""Of the command line of a zygote, and of what it has forked."""

TRIES = 60


@pytest.fixture(scope="module")
def changed_image(kernel_image: Path) -> Iterator[Path]:
    """The usual image, but for a file that its Python executes as it starts."""
    with tempfile.TemporaryDirectory(prefix="prorl-h-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        image = Path(name, "root")
        same_disk = Path(name).stat().st_dev == kernel_image.stat().st_dev
        subprocess.run(["cp", "-al" if same_disk else "-a", str(kernel_image), str(image)], check=True)
        packages = next(image.glob("usr/**/ipykernel/__init__.py")).parents[1]
        (packages / "hostile.pth").write_text("import os; exec(open('/hostile.py').read(), {})\n")
        yield image


@pytest.fixture
def hostile_image(changed_image: Path, request: pytest.FixtureRequest) -> Path:
    """That, and in its file :data:`HOSTILE`, or the test's parameter."""
    (changed_image / "hostile.py").write_text(getattr(request, "param", HOSTILE))
    return changed_image


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[own_supervisor.Supervisor]:
    """One of this test's own."""
    monkeypatch.setattr(own_supervisor, "_current", None)
    own_supervisor.running_supervisor()
    assert own_supervisor._current
    started = own_supervisor._current
    yield started
    started.owner.close()
    assert started.popen.wait(20) in (0, -signal.SIGKILL)


@contextlib.asynccontextmanager
async def forked(image: Path, runtime: Runtime) -> AsyncIterator[tuple[Kernel, dict[str, Any]]]:
    """A kernel that was forked by the zygote of an image, and what the image's code has found out there."""
    container = await Container.start(ContainerSpec(image=image, start="direct"), runtime)
    async with container, await Kernel.start(container) as kernel:
        for _ in range(TRIES):
            if ZYGOTES in (await kernel.run("print(open('/proc/self/cmdline').read())")).output:
                break
            await asyncio.sleep(0.2)
            await kernel.restart()
        yield kernel, ast.literal_eval((await kernel.run(FOUND)).output) or {}


def zygotes(supervisor: own_supervisor.Supervisor) -> set[int]:
    running = (pid for pid in threads.children(supervisor.popen.pid) if start_time(pid) is not None)
    outside = filter(same_numbers, running)
    return {pid for pid in outside if ZYGOTES.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()}


def same_numbers(pid: int) -> bool:
    """Whether a process is in no sandbox."""
    return Path(f"/proc/{pid}/ns/pid").samefile("/proc/self/ns/pid")


def user_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


async def test_an_images_code_outside_of_sandboxes_has_their_walls(
    hostile_image: Path, kernel_image: Path, runtime: Runtime, supervisor: own_supervisor.Supervisor
) -> None:
    async with forked(kernel_image, runtime) as (other, _nothing):
        (victim,) = zygotes(supervisor)
        async with forked(hostile_image, runtime) as (_kernel, found):
            child = found["child"]
            try:
                assert found["rights"] == found["most rights"] == [ENTERING]
                assert not found["unfiltered"]
                assert zygotes(supervisor) == {victim, found["zygote"]}
                owners = {user_of(pid) for pid in (victim, child)}
                assert len(owners) == 2
                assert min(owners) > user_ids.FIRST_ID
                (hostile_image / "victim").write_text(str(victim))
                await asyncio.sleep(1)
                assert zygotes(supervisor) == {victim, found["zygote"]}
                os.kill(found["zygote"], signal.SIGKILL)
                await gone(child)
            finally:
                if start_time(child) is not None:
                    os.kill(child, signal.SIGKILL)
        await other.restart()
        assert (await other.run("1")).data == [{"text/plain": "1"}]


@pytest.mark.parametrize("killed", [False, True], ids=["the server ends", "the supervisor is killed"])
async def test_what_an_image_forks_outside_of_sandboxes_ends_with_the_server(
    hostile_image: Path, runtime: Runtime, supervisor: own_supervisor.Supervisor, killed: bool
) -> None:
    async with forked(hostile_image, runtime) as (_kernel, found):
        child = found["child"]
        assert start_time(child) is not None
    try:
        if killed:
            supervisor.popen.kill()
            supervisor.popen.wait()
            # As the server does, or the next one's sweep.
            await asyncio.to_thread(own_supervisor.bury, supervisor.folder)
        else:
            supervisor.owner.close()
        await gone(child, found["zygote"])
    finally:
        if start_time(child) is not None:
            os.kill(child, signal.SIGKILL)


async def gone(*processes: int) -> None:
    begin = time.monotonic()
    while any(start_time(pid) is not None for pid in processes):
        assert time.monotonic() - begin < 5, "it lives on"
        await asyncio.sleep(0.02)


async def ready(supervisor: own_supervisor.Supervisor) -> None:
    """Wait until the next kernel is asked of a zygote: it has imported what one needs."""
    async with asyncio.timeout(20):
        while not zygotes(supervisor):
            await asyncio.sleep(0.05)
    await asyncio.sleep(2)


LIAR = """
import os
if not os.path.exists("/proc/self"):
    import array, signal, socket, time
    requests = socket.socket(fileno=3)
    requests.setblocking(True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests.send(b"ready")
    while True:
        data, ancillary, *_ = requests.recvmsg(1 << 18, socket.CMSG_SPACE(4 * 32))
        if not data:
            os._exit(0)
        files = array.array("i", ancillary[0][2])
        if not os.fork():
            requests.close()
            answer = socket.socket(fileno=files[0])
            answer.send(b"here")
            answer.recv(16)
            answer.send(b"here")
            time.sleep(0.3)
            os._exit(0)
        for number in files:
            os.close(number)
"""
"""A zygote whose joiner says that it is the kernel, too: it is no child of the supervisor's, and in no sandbox."""


@pytest.mark.parametrize("hostile_image", [LIAR], indirect=True, ids=["a liar"])
async def test_a_process_that_is_not_in_the_sandbox_is_taken_for_no_kernel(
    hostile_image: Path, runtime: Runtime, supervisor: own_supervisor.Supervisor
) -> None:
    """The supervisor would signal its number when it is another's: of anybody on the host."""
    async with (
        await Container.start(ContainerSpec(image=hostile_image, start="direct"), runtime) as container,
        await Kernel.start(container) as kernel,
    ):
        await ready(supervisor)
        await kernel.restart(timeout_s=15)
        assert kernel._process
        assert not same_numbers(kernel._process.pid)
        assert (await kernel.run("1")).data == [{"text/plain": "1"}]


DIES_ON_ITS_WAY = """
import os, socket, time
fork, depth = os.fork, 0
def deeper():
    global depth
    pid = fork()
    if pid == 0:
        depth += 1
        if depth == 2:
            socket.socket.recv = lambda *_: time.sleep(0.2) or os._exit(9)
    return pid
if not os.path.exists("/proc/self"):
    os.fork = deeper
"""
"""When it is known, and has not begun, as by a ``kill -9 -1`` inside."""


@pytest.mark.parametrize("hostile_image", [DIES_ON_ITS_WAY], indirect=True, ids=["killed"])
async def test_a_kernel_that_is_killed_on_its_way_is_no_failure_of_the_supervisors(
    hostile_image: Path, runtime: Runtime, supervisor: own_supervisor.Supervisor
) -> None:
    async with (
        await Container.start(ContainerSpec(image=hostile_image, start="direct"), runtime) as container,
        await Kernel.start(container) as kernel,
    ):
        await ready(supervisor)
        with pytest.raises(SandboxBroken, match="the kernel has ended"):
            await kernel.restart(timeout_s=15)
