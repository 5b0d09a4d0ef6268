# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sentences of ``docs/security.md`` that no other file tries: its numbers, and what it says does not hold.

What is said not to hold is tried too: who mends it is told by these tests that the page is to be changed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import shlex
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.test_kernel_shares import INOTIFY, QUEUES, take_all


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

GRANTED = cgroups.delegation()
CONTROLLERS = GRANTED.controllers if GRANTED else frozenset()

NUMBERS = """
import json, os, resource
def read(name):
    return open(name).read().split()
print(json.dumps({
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    "signals": resource.getrlimit(resource.RLIMIT_SIGPENDING)[1],
    "queues": resource.getrlimit(resource.RLIMIT_MSGQUEUE)[1],
    "instances": int(read("/proc/sys/user/max_inotify_instances")[0]),
    "watches": int(read("/proc/sys/user/max_inotify_watches")[0]),
    "segments": int(read("/proc/sys/kernel/shmall")[0]) * os.sysconf("SC_PAGE_SIZE"),
    "semaphores": int(read("/proc/sys/kernel/sem")[1]),
    "System V's queues": int(read("/proc/sys/kernel/msgmni")[0]),
    "in /dev/shm": os.statvfs("/dev/shm").f_files,
    "terminals": [line.split()[3] for line in open("/proc/mounts") if line.split()[2] == "devpts"],
    "settings": os.listdir("/proc/sys/user"),
}))
"""


@pytest.mark.usefixtures("way")
async def test_numbers_of_what_the_kernel_counts_are_as_the_page_says(image: Path, runtime: Runtime) -> None:
    def hard(limit: int) -> int:
        found = resource.getrlimit(limit)[1]
        return found if found != resource.RLIM_INFINITY else 1 << 40

    def machine(name: str) -> int:
        return int(Path("/proc/sys/fs/inotify", name).read_text())

    async with await Container.start(ContainerSpec(image=image, shared_memory_mib=32), runtime) as container:
        said = json.loads((await container.run(f"python3 -c {shlex.quote(NUMBERS)}")).stdout)
    assert all("max=128" in options for options in said.pop("terminals"))
    assert not any("epoll" in name for name in said.pop("settings")), "epoll has no bound for each sandbox"
    assert said == {
        "files": hard(resource.RLIMIT_NOFILE) // 2,
        "signals": min(hard(resource.RLIMIT_SIGPENDING) // 16, 4096),
        "queues": min(hard(resource.RLIMIT_MSGQUEUE) // 4, 1 << 20),
        "instances": machine("max_user_instances") // 16,
        "watches": machine("max_user_watches") // 16,
        "segments": 32 << 20,
        "semaphores": 32_000,
        "System V's queues": 256,
        "in /dev/shm": 32 * 1024,
    }


PIPES = """
import fcntl
kept = []
def take():
    kept.append(os.pipe())
    return fcntl.fcntl(kept[-1][0], 1032) >= 65_536
all_of(take)
os.write(kept[-1][1], b"x" * 4096)
"""

PIPES_MIB = 64

EPOLL = """
import select
fds = [os.eventfd(0) for _ in range(4000)]
def take():
    kept.append(select.epoll())
    for fd in fds:
        kept[-1].register(fd)
    return len(kept) < 100
kept = []
all_of(take)
taken = len(kept) * len(fds)
"""


async def test_pipes_of_a_user_hold_64_mib_and_those_beyond_are_small(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image)
    async with await Container.start(spec, runtime) as one, await Container.start(spec, runtime) as other:
        assert 64 <= await take_all(one, PIPES) <= PIPES_MIB << 4
        # As small as they are, they hold what is written to them, here and next door.
        shared = not is_machine_root()  # of root, each sandbox has a user of its own
        assert (await take_all(other, PIPES) == 0) is shared
        assert (await other.run("seq 100000 | tail -1")).stdout == "100000\n"


async def test_epoll_has_no_bound_for_each_sandbox(container: Container) -> None:
    assert await take_all(container, EPOLL) == 400_000


SMALL_QUEUES = "shape = (ctypes.c_long * 8)(0, 1, 8192)\n" + QUEUES.replace("None)", "shape)")


async def test_many_sandboxes_that_take_all_they_get_leave_the_others_none(image: Path, runtime: Runtime) -> None:
    async with AsyncExitStack() as stack:
        spec = ContainerSpec(image=image)
        starts = [Container.start(spec, runtime) for _ in range(17)]
        *greedy, last = [await stack.enter_async_context(live) for live in await asyncio.gather(*starts)]
        assert await take_all(last, INOTIFY, 1) == 1
        await asyncio.gather(*(take_all(one, SMALL_QUEUES) for one in greedy[:4]))
        assert await take_all(last, QUEUES) == 0
        await asyncio.gather(*(take_all(one, INOTIFY) for one in greedy))
        assert await take_all(last, INOTIFY) == 0


USERS = f"""
for user in range(1, 17):
    if os.fork() == 0:
        os.setuid(user)
        {INOTIFY}
        time.sleep(1000)
time.sleep(2)
"""


async def test_16_users_of_one_take_all_of_inotify(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, users=True, start="direct")
    try:
        live = await Container.start(spec, runtime)
    except CallerError as error:
        pytest.skip(str(error))
    async with live, await Container.start(spec, runtime) as other:
        await take_all(live, USERS)
        assert await take_all(other, INOTIFY) == 0


SOCKETS = """
kept, held = [], 0
for _ in range(1000):
    kept.append(socket.socketpair())
    for end in kept[-1]:
        end.setblocking(False)
        try:
            while True:
                held += end.send(b"x" * 65_536)
        except BlockingIOError:
            pass
taken = held >> 20
"""


@pytest.mark.skipif("memory" in CONTROLLERS, reason="where the kernel bounds memory, it counts")
async def test_what_sockets_hold_is_not_counted_without_a_controller(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, memory_mib=64), runtime) as container:
        assert await take_all(container, SOCKETS) > 128
        await asyncio.sleep(1.5)
        assert (await container.run("echo fine")).stdout == "fine\n"
        assert container.notes == []


NAMESPACES = {
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
"""By the names of the kernel's flags, ``CLONE_NEW...``."""

MAKE = """
import ctypes, errno, os, sys
libc, user = ctypes.CDLL(None, use_errno=True), 0x10000000
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
def tell(answer):
    os.write(1, (errno.errorcode[ctypes.get_errno()] if answer < 0 else "made").encode() + b" ")
for flag in map(int, sys.argv[1:]):
    # With a user namespace beside it, everybody has the right.
    made = libc.syscall(ctypes.c_long(clone), ctypes.c_long(flag | user | 17), *[ctypes.c_long(0)] * 4)
    if made == 0:
        os._exit(0)
    tell(made)
    if os.fork() == 0:
        tell(libc.unshare(flag | user))
        os._exit(0)
    os.wait()
"""


@pytest.mark.usefixtures("way")
async def test_no_kind_of_namespace_is_made_by_clone_or_unshare(container: Container) -> None:
    flags = " ".join(map(str, NAMESPACES.values()))
    said = (await container.run(f"python3 -c '{MAKE}' {flags}")).stdout.split()
    assert said == ["EPERM"] * 2 * len(NAMESPACES)


def test_outside_everybody_makes_them() -> None:
    """So it is the filter that refuses them inside."""
    flags = " ".join(map(str, NAMESPACES.values()))
    outside = subprocess.run([sys.executable, "-c", MAKE, *flags.split()], capture_output=True, text=True, check=False)
    assert outside.stdout.split().count("made") == 2 * len(NAMESPACES)
