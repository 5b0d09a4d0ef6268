# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor outlives whatever it is asked and whatever goes wrong, answers it, and listens to nobody else."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox import spec as specs
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import limit_watch, own_supervisor
from nemo_gym_prorl.sandbox.supervisor.client import Link
from nemo_gym_prorl.sandbox.supervisor.connection import pack, send, socket_pair
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxLost, SandboxRefused
from nemo_gym_prorl.sandbox.supervisor.messages import DestroyRequest, encode


pytestmark = pytest.mark.sandbox

BAD: list[dict[str, Any]] = [
    {"do": "nonsense"},
    {"do": None},
    {},
    {"do": "spawn"},
    {"do": "spawn", "sandbox": ["b"]},
    {"do": "create", "sandbox": "../../etc", "binds": []},
    {"do": "create", "sandbox": "b-000000000000"},
    {"do": "create", "sandbox": "b-000000000000", "binds": []},
    {"do": "create", "sandbox": "b-000000000000", "binds": 5, "start_timeout_s": "x"},
    {"do": "signal", "spawn": "none"},
    {"do": "attach", "sandbox": "none", "session": 5},
    {"do": "put", "sandbox": "none"},
]


async def test_no_request_ends_the_supervisor(container: Container) -> None:
    link = await Link.get()
    for request in BAD:
        with pytest.raises((SandboxRefused, SandboxLost, CallerError)):
            async with asyncio.timeout(20):
                await link._ask(request, [])
    for order in ({"argv": ["true"]}, {"argv": [], "env": {}, "cwd": "/", "tty": None}, {"tty": 5}):
        with pytest.raises((SandboxRefused, SandboxLost)):
            async with asyncio.timeout(20):
                await link._ask({"do": "spawn", "spawn": "x", "sandbox": container.name, **order}, [])
    assert (await container.run("echo alive")).stdout == "alive\n"


async def test_an_order_that_lacks_a_part_leaves_no_sandbox(
    image: Path, runtime: Runtime, container: Container
) -> None:
    """One that could never be ended would keep its supervisor from ending."""
    link, wanted = await Link.get(), ContainerSpec(image=image)
    whole = encode(specs.create_request("b-000000000002", wanted, runtime)[0])
    # In the order in which they are read, the last last.
    for lacking in ("image", "binds", "start_timeout_s", "memory_mib"):
        with pytest.raises(SandboxRefused):
            await link._ask({key: value for key, value in whole.items() if key != lacking}, [])
        async with asyncio.timeout(20):
            await link.ask(DestroyRequest(whole["sandbox"]))
        assert not (link.folder / whole["sandbox"]).exists()


async def test_a_sandbox_that_had_long_to_live_is_forgotten_when_it_is_closed(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime):
        before = len(open_files())
        for _ in range(3):
            await (await Container.start(ContainerSpec(image=image, ttl_s=3600.0), runtime)).close()
        async with asyncio.timeout(10):
            while len(open_files()) > before:
                await asyncio.sleep(0.01)


def supervisor() -> int:
    """Its process."""
    assert own_supervisor._current
    return own_supervisor._current.popen.pid


async def test_a_supervisor_without_descriptors_lives_on_and_says_so(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        before = resource.prlimit(supervisor(), resource.RLIMIT_NOFILE)
        for free in (40, 0):
            resource.prlimit(supervisor(), resource.RLIMIT_NOFILE, (limit_with_free(free), before[1]))
            try:
                with pytest.raises(InfrastructureError, match="limit of open files") as refused:
                    await Container.start(ContainerSpec(image=image), runtime)
                assert refused.value.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED
                many = [container.run("sleep 0.2") for _ in range(60)]
                async with asyncio.timeout(60):
                    outcomes = await asyncio.gather(*many, return_exceptions=True)
                failed = [one for one in outcomes if isinstance(one, CallerError | InfrastructureError)]
                assert failed or free, outcomes
            finally:
                resource.prlimit(supervisor(), resource.RLIMIT_NOFILE, before)
            assert (await container.run("echo alive")).stdout == "alive\n"


def open_files() -> list[int]:
    return sorted(int(entry.name) for entry in Path(f"/proc/{supervisor()}/fd").iterdir())


def limit_with_free(free: int) -> int:
    """The limit below which so many numbers are free."""
    used = open_files()
    unused = [number for number in range(len(used) + free + 1) if number not in used]
    return unused[free]


async def test_descriptors_are_the_supervisors_and_not_the_sandboxs(container: Container) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert resource.prlimit(supervisor(), resource.RLIMIT_NOFILE) == (hard, hard)
    assert (await container.run("ulimit -Sn; ulimit -Hn")).stdout.split() == [str(soft), str(hard)]


STRANGER = """
import os, socket, sys
os.unshare(int(sys.argv[1]))
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(20)
connection.connect(sys.argv[2])
try:
    connection.send(b'{"do": "nonsense", "id": 1}')
    heard = connection.recv(1000)
except ConnectionError:
    heard = b""
print("heard" if heard else "refused")
"""


@pytest.mark.parametrize("spaces", [0, os.CLONE_NEWUSER, os.CLONE_NEWUSER | os.CLONE_NEWPID])
async def test_only_processes_in_its_own_namespaces_are_heard(container: Container, spaces: int) -> None:
    """As would be one inside a sandbox that was shown the socket, and that the kernel takes for the same user."""
    address = str(Path(container.describe()["supervisor"]) / "socket")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", STRANGER, str(spaces), address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ("refused\n" if spaces else "heard\n"), done.stderr


@pytest.mark.parametrize("image", ["/", "/proc/self/root", "/proc/1/root"])
async def test_the_hosts_own_root_is_no_image(image: str, runtime: Runtime) -> None:
    with pytest.raises(CallerError) as refused:
        await Container.start(ContainerSpec(image=Path(image)), runtime)
    assert refused.value.field == "image"


async def test_no_bind_shows_the_way_to_the_host(
    image: Path, runtime: Runtime, container: Container, tmp_path: Path
) -> None:
    folder = Path(container.describe()["supervisor"])
    link = tmp_path / "link"
    link.symlink_to(folder)
    harmless = tmp_path / "harmless"
    harmless.mkdir()
    for above in [harmless, tmp_path, *tmp_path.parents[:-2]]:
        if above.stat().st_uid == os.geteuid():
            above.chmod(0o755)
    chain = await Link.get()
    own = (folder.parent.parent, folder.parent, folder, folder / container.name, link)
    for source in ("/", *own, "/proc", "/proc/1/root", "/run"):
        wanted = ContainerSpec(image=image, binds=[f"{source}:/outside"])
        with pytest.raises(CallerError, match="bind") as refused:
            await Container.start(wanted, runtime)
        assert refused.value.field == "binds"
        # The supervisor relies on nobody's having looked.
        with pytest.raises(CallerError, match="bind"):
            await chain.ask(specs.create_request("b-000000000001", wanted, runtime)[0])
    async with await Container.start(ContainerSpec(image=image, binds=[f"{harmless}:/outside"]), runtime) as live:
        assert (await live.run("ls -d /outside")).stdout == "/outside\n"


async def test_who_takes_no_answers_is_asked_for_no_more_questions_and_holds_up_nobody(container: Container) -> None:
    link = await Link.to(Path(container.describe()["supervisor"]))
    deaf = await Link._connect(link.folder)
    asked = 0
    with deaf:
        try:
            while asked < 20_000:
                deaf.send(b'{"do": "signal", "spawn": "none", "signal": 0, "id": 1}')
                asked += 1
        except BlockingIOError:
            pass
        assert asked < 20_000
        assert (await container.run("echo alive")).stdout == "alive\n"


def test_the_watchdog_hears_whatever_number_its_channel_has() -> None:
    """``select`` knows none beyond 1023, and a supervisor of many sandboxes has thousands."""
    ours, theirs = socket_pair()
    with theirs:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1500)
        with socket.socket(fileno=high) as channel:
            send(ours, pack({"forget": "none"}))
            ours.close()
            limit_watch.serve(channel)
