# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel counts for a user: one sandbox that takes all it gets leaves the others and the server with enough.

Each program takes all of something, says how much that was, and keeps it. An ordinary user's sandboxes share it all;
of root's, those of one image do, in what is counted for user namespaces.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.capabilities import KEPT
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.limits import kernel_shares
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxExhausted
from tests.sandbox.without import Off, Without


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

BEGIN = """
import ctypes, os, resource, socket, sys, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
libc = ctypes.CDLL(None, use_errno=True)
taken, most = 0, float("inf")
def all_of(take):
    global taken
    try:
        while taken < most and take():
            taken += 1
    except OSError:
        pass
"""

KEEP = """
print(taken, flush=True)
time.sleep(1000)
"""

IN_FLIGHT = """
null, kept = os.open("/dev/null", os.O_RDONLY), []
def take():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    kept.append(ends)
    global taken
    while True:
        try:
            socket.send_fds(ends[0], [b"x"], [null] * 200)
            taken += 200
        except BlockingIOError:
            return True
all_of(take)
"""

INOTIFY = "all_of(lambda: libc.inotify_init1(0) >= 0)"

WATCHES = """
fd = libc.inotify_init1(0)
def take():
    name = f"/dev/shm/{taken}"  # where a folder takes a hundredth of the time
    os.mkdir(name)
    return libc.inotify_add_watch(fd, name.encode(), 2) >= 0
all_of(take)
"""

TIMERS = """
kept = ctypes.create_string_buffer(8)
all_of(lambda: taken < 150_000 and libc.timer_create(1, None, kept) == 0)
"""

QUEUES = """
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
all_of(lambda: libc.mq_open(f"/q{os.getpid()}-{taken}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None) >= 0)
"""

TERMINALS = 'all_of(lambda: os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY) >= 0)'

SHARES = {
    "inotify instances": (INOTIFY, 1),
    "inotify watches": (WATCHES, 200),
    "timers and signals": (TIMERS, 500),
    "message queues": (QUEUES, 1),
    "terminals": (TERMINALS, 8),
}
"""How all of something is taken, and how much of it must be left for a neighbour."""


@asynccontextmanager
async def two(image: Path, runtime: Runtime) -> AsyncIterator[tuple[Container, Container]]:
    spec = ContainerSpec(image=image, shared_memory_mib=512)
    async with await Container.start(spec, runtime) as one, await Container.start(spec, runtime) as other:
        yield one, other


async def take_all(container: Container, program: str, most: int | None = None) -> int:
    """Have it taken and kept, at most so much of it; returns how much it was."""
    name = f"/tmp/{uuid.uuid4().hex}"
    limit = f"most = {most}\n" if most else ""
    program = f"{BEGIN}{limit}{program}{KEEP}"
    await container.run(f"cat > {name}.py << 'END'\n{program}\nEND\n(setsid python3 {name}.py > {name} 2>&1 &)")
    async with asyncio.timeout(90):
        while not (said := (await container.run(f"cat {name}")).stdout.strip()):
            await asyncio.sleep(0.2)
    assert said.isdigit(), said
    return int(said)


@pytest.mark.parametrize("what", SHARES)
@pytest.mark.usefixtures("way")
async def test_who_takes_all_leaves_a_neighbour_enough(image: Path, runtime: Runtime, what: str) -> None:
    program, needed = SHARES[what]
    async with two(image, runtime) as (greedy, neighbour):
        taken = await take_all(greedy, program)
        assert taken >= needed, "not even one has its share"
        async with await Shell.start(neighbour) as shell:
            assert (await shell.run("echo fine")).output == "fine\n"
        assert await take_all(neighbour, program, needed) >= min(taken, needed)


@pytest.mark.usefixtures("way")
async def test_open_files_on_their_way_hold_up_nobody_else(image: Path, runtime: Runtime) -> None:
    async with two(image, runtime) as (greedy, neighbour):
        taken = await take_all(greedy, IN_FLIGHT)
        assert taken >= 400
        for _ in range(5):
            assert (await neighbour.run("echo fine")).stdout == "fine\n"
            assert (await greedy.run("echo fine")).stdout == "fine\n"
        async with await Shell.start(neighbour) as shell:
            assert (await shell.run("echo fine")).output == "fine\n"
        async with await Container.start(ContainerSpec(image=image), runtime) as third:
            assert (await third.run("echo fine")).stdout == "fine\n"


@pytest.mark.usefixtures("way")
async def test_who_has_all_terminals_is_told_so_as_the_agents_doing(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        taken = await take_all(container, TERMINALS)
        assert taken <= kernel_shares.TERMINALS
        with pytest.raises(SandboxExhausted) as refused:
            await Shell.start(container)
        assert refused.value.resource == "terminals"
        assert any("terminals" in note for note in container.notes), container.notes


async def test_that_the_machine_has_no_terminal_left_is_no_agents_doing(
    image: Path, runtime: Runtime, without: Without, tmp_path: Path
) -> None:
    """24 sandboxes that take all of theirs leave the others none, who took none."""
    for name, number in {"nr": 3072, "max": 4096, "reserve": 1024}.items():
        (tmp_path / name).write_text(f"{number}\n")
    found = "from nemo_gym_prorl.sandbox.limits import kernel_shares\n"
    without(Off(f"{found}kernel_shares.TERMINALS_OF_ALL = Path({str(tmp_path)!r})"))
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        await take_all(container, TERMINALS)
        with pytest.raises(InfrastructureError, match=r"no terminal left .*kernel\.pty\.max"):
            await Shell.start(container)


@pytest.mark.usefixtures("way")
async def test_what_the_kernel_keeps_for_processes_of_one_namespace_is_bounded(image: Path, runtime: Runtime) -> None:
    """System V, which nobody has mapped, and files of no size."""
    segments = "all_of(lambda: libc.shmget(0, 1 << 23, 0o1600) >= 0)"
    semaphores = "all_of(lambda: libc.semget(0, 1000, 0o1600) >= 0)"
    messages = "all_of(lambda: libc.msgget(0, 0o1600) >= 0)"
    empty = 'all_of(lambda: taken < 200_000 and os.close(os.open(f"/dev/shm/{taken}", os.O_CREAT)) is None)'
    spec = ContainerSpec(image=image, shared_memory_mib=64)
    async with await Container.start(spec, runtime) as container:
        assert 1 <= await take_all(container, segments) <= 8
        assert 1 <= await take_all(container, semaphores) <= 32
        assert 1 <= await take_all(container, messages) <= kernel_shares.MESSAGE_QUEUES
        assert 1000 <= await take_all(container, empty) <= 64 * kernel_shares.INODES_A_MIB


@pytest.mark.skipif(not is_machine_root(), reason="an ordinary user's sandboxes are his")
@pytest.mark.usefixtures("way")
async def test_nothing_that_a_sandbox_of_root_takes_is_counted_as_roots(image: Path, runtime: Runtime) -> None:
    count = f"{BEGIN}{INOTIFY}\nprint(taken)"

    async def left() -> int:
        process = await asyncio.create_subprocess_exec("python3", "-c", count, stdout=asyncio.subprocess.PIPE)
        return int((await process.communicate())[0])

    before = await left()
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        assert await take_all(container, INOTIFY) >= 1
        assert await left() >= before


@pytest.mark.usefixtures("way")
async def test_a_download_has_no_more_rights_than_a_command(container: Container, tmp_path: Path) -> None:
    assert "SYS_PTRACE" not in KEPT
    await container.run("ln -s /proc/1/environ /tmp/link; echo secret > /tmp/own; chmod 0 /tmp/own")
    for path in ("/proc/1/environ", "/tmp/link"):
        assert (await container.run(f"cat {path}")).stdout == ""
        with pytest.raises(Exception, match=r"Permission denied|No such file"):
            await container.download(path, tmp_path / "environ")
    await container.download("/tmp/own", tmp_path / "own")
    assert (tmp_path / "own").read_text() == "secret\n"
    await container.download("/proc/cpuinfo", tmp_path / "cpuinfo")
    assert (tmp_path / "cpuinfo").read_text()
