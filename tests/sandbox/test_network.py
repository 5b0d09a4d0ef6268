# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that see each other by name, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.compose import network, port_forward
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.joining import Place, ProcessFolder
from nemo_gym_prorl.sandbox.launcher.requests import Kind, Request
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxLost
from nemo_gym_prorl.sandbox.supervisor.rpc import own_supervisor
from nemo_gym_prorl.sandbox.supervisor.rpc.client import SandboxRefused
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.shared_networks import Networks


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
SECRET = "only for members"


@pytest_asyncio.fixture
async def three(image: Path, runtime: Runtime, way: str) -> AsyncIterator[list[Container]]:
    async with contextlib.AsyncExitStack() as stack:
        spec = ContainerSpec(image=image)
        containers = await asyncio.gather(*(Container.start(spec, runtime) for _ in range(3)))
        yield [await stack.enter_async_context(container) for container in containers]


async def serve(container: Container, host: str = "0.0.0.0", port: int = 8000) -> None:
    await container.run(
        f"mkdir -p /srv/www && cd /srv/www && echo '{SECRET}' > index.html && "
        f"(python3 -m http.server --bind {host} {port} >/tmp/log 2>&1 &) && "
        f"for _ in $(seq 100); do python3 -c \"import socket; socket.create_connection(('127.0.0.1', {port}))\" "
        "2>/dev/null && break; sleep 0.05; done"
    )


async def fetch(container: Container, url: str) -> str:
    done = await container.execute(["python3", "-c", FETCH, url])
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


async def test_a_client_reaches_a_server_in_another_sandbox_by_name(three: list[Container]) -> None:
    server, client, _stranger = three
    await network.connect({"web": server, "client": client})
    await serve(server)
    assert await fetch(client, "http://web:8000/") == SECRET
    assert await fetch(server, "http://web:8000/") == SECRET
    assert await fetch(server, "http://localhost:8000/") == SECRET


async def test_strangers_and_the_host_reach_nobody(three: list[Container]) -> None:
    server, client, stranger = three
    where = (await network.connect({"web": server, "client": client}))["web"]
    await network.connect({"alone": stranger})
    await serve(server)
    assert "unreachable" in await fetch(stranger, f"http://{where}:8000/")
    assert "not known" in (said := await fetch(stranger, "http://web:8000/")) or "resolution" in said
    with contextlib.suppress(OSError):
        # Some networks answer for every address; with what the server has to say they don't.
        answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{where}:8000/", timeout=2)
        assert SECRET not in answer.read().decode()


async def test_members_reach_neither_host_nor_internet(three: list[Container]) -> None:
    server, client, _stranger = three
    await network.connect({"web": server, "client": client})
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        for address in {"127.0.0.1", "1.1.1.1", "10.99.0.0", "169.254.169.254", socket.gethostname()}:
            said = await fetch(client, f"http://{address}:{port}/")
            assert any(word in said for word in ("unreachable", "refused", "not known", "resolution")), (address, said)


async def test_a_member_can_speak_for_no_other(three: list[Container]) -> None:
    """Its packets under another's address are thrown away on the way, whatever it does with its raw sockets."""
    one, two, three_ = three
    where = await network.connect({"one": one, "two": two, "three": three_})
    hear = (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('', 9))\ns.settimeout(5)\n"
        "open('/tmp/ready', 'w')\nprint(s.recvfrom(100)[0].decode())"
    )
    # UDP to port 9 with a source of choice, and then honestly.
    say = (
        "import socket, struct, sys\nsource, target = map(socket.inet_aton, sys.argv[1:])\n"
        "udp = struct.pack('!4H', 9, 9, 12, 0) + b'fake'\n"
        "ip = struct.pack('!BBHHHBBH4s4s', 69, 0, 32, 0, 0, 64, 17, 0, source, target)\n"
        "raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)\n"
        "raw.sendto(ip + udp, (sys.argv[2], 9))\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'real', (sys.argv[2], 9))"
    )
    heard = asyncio.create_task(two.execute(["python3", "-c", hear]))
    await two.run("until test -e /tmp/ready; do sleep 0.05; done")
    said = await one.execute(["python3", "-c", say, where["three"], where["two"]])
    assert said.exit_code == 0, said.stderr
    assert (await heard).stdout.strip() == "real"


async def test_names_go_with_the_sandbox_and_come_with_it(three: list[Container]) -> None:
    one, two, late = three
    await one.run("echo '192.0.2.1 mine' >> /etc/hosts")
    await network.connect({"one": one, "two": two})
    await network.connect({"one": one, "two": two, "late": late})
    assert "late" in (await one.run("cat /etc/hosts")).stdout
    await late.close()
    gone = await one.run("for _ in $(seq 100); do grep -q late /etc/hosts || break; sleep 0.05; done; cat /etc/hosts")
    assert "late" not in gone.stdout
    assert all(name in gone.stdout for name in ("mine", "localhost", "two"))


async def test_names_of_many_that_end_at_once_go(image: Path, runtime: Runtime, three: list[Container]) -> None:
    others = await asyncio.gather(*(Container.start(ContainerSpec(image=image), runtime) for _ in range(8)))
    named = {f"other-{number}": box for number, box in enumerate(others)}
    await network.set_hosts(three[0], {name: await network.address(box) for name, box in named.items()})
    assert "other-7" in (await three[0].run("cat /etc/hosts")).stdout
    await asyncio.gather(*(box.close() for box in others))
    async with asyncio.timeout(20):
        while "sandbox network" in (await three[0].run("cat /etc/hosts")).stdout:
            await asyncio.sleep(0.05)


async def test_networks_become_one_when_their_members_are_introduced(three: list[Container]) -> None:
    one, two, other = three
    await network.connect({"one": one, "two": two})
    await network.connect({"other": other})
    await serve(one)
    await network.set_hosts(other, {"web": await network.address(one)})
    assert await fetch(other, "http://web:8000/") == SECRET
    assert await fetch(two, "http://one:8000/") == SECRET


async def test_who_introduces_another_needs_no_address_of_its_own(three: list[Container]) -> None:
    one, two, _ = three
    await network.set_hosts(one, {"other": await network.address(two)})
    assert (await one.run("getent hosts other")).exit_code == 0


async def test_ports_of_who_is_in_no_common_network_are_refused(three: list[Container]) -> None:
    one, two, _ = three
    with pytest.raises(SandboxRefused, match="nobody in the network"):
        await port_forward.forward(one, await network.address(two), [8000], "/tmp/ready")
    assert (await one.run("test -e /tmp/ready")).exit_code == 1
    with pytest.raises(CallerError, match="65535"):
        port_forward.expose(one, 70_000)


async def test_what_can_not_be_is_refused(three: list[Container]) -> None:
    one, two, _three = three
    with pytest.raises(CallerError, match="name of a host"):
        await network.set_hosts(one, {"no\tname": await network.address(two)})
    with pytest.raises(CallerError, match="IPv4"):
        await network.set_hosts(one, {"name": "127.0.0.1\n10.0.0.1 evil"})
    with pytest.raises(SandboxRefused, match="no sandbox here"):
        await network.set_hosts(one, {"name": "10.1.2.3"})


async def test_ports_of_one_appear_on_the_loopback_device_of_another(three: list[Container]) -> None:
    server, client, stranger = three
    where = (await network.connect({"web": server, "client": client}))["web"]
    await serve(server, host="127.0.0.1")
    assert "refused" in await fetch(client, "http://localhost:8000/")
    forwarding = asyncio.create_task(port_forward.forward(client, where, [8000], "/tmp/forwarded"))
    await client.run("until test -e /tmp/forwarded; do sleep 0.05; done")
    assert await fetch(client, "http://localhost:8000/") == SECRET
    forwarding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await forwarding
    assert "refused" in await fetch(client, "http://localhost:8000/")
    with pytest.raises(SandboxRefused, match="nobody in the network"):
        await stranger.ask("reach", address=where, port=8000)


SERVER = """
import asyncio, sys
from pathlib import Path
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.compose import network
from nemo_gym_prorl.sandbox.supervisor.rpc import client, own_supervisor

async def main():
    spec = ContainerSpec(image=Path(sys.argv[1]), volumes=["shared:/data"])
    one, two = [await Container.start(spec) for _ in range(2)]
    await network.connect({"one": one, "two": two})
    await one.run("echo kept > /data/file")
    print(own_supervisor._current.popen.pid, own_supervisor._current.folder, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_nothing_is_left_when_the_owner_is_killed(image: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(image)), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert owner.stdout
    supervisor, folder = (await owner.stdout.readline()).decode().split()
    assert (Path(folder) / "volumes").is_dir()
    owner.kill()
    await owner.wait()
    while remains(folder, f"/proc/{supervisor}"):
        await asyncio.sleep(0.05)


def remains(*paths: str) -> bool:
    return any(Path(path).exists() for path in paths)


async def test_networks_do_not_add_up(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image)

    def open_files() -> int:
        supervisor = own_supervisor._current
        assert supervisor
        return len(list(Path(f"/proc/{supervisor.popen.pid}/fd").iterdir()))

    async def once() -> None:
        async with await Container.start(spec, runtime) as one, await Container.start(spec, runtime) as two:
            await network.connect({"one": one, "two": two})

    await once()
    before = open_files()
    for _ in range(5):
        await once()
    # Helpers that are just ending may have some.
    while open_files() > before:
        await asyncio.sleep(0.05)


async def test_a_network_that_all_leave_while_one_comes_is_closed_once() -> None:
    """Closed twice, it would be somebody else's file by then."""
    children, launcher, sandboxes = Mock(), Mock(), Mock(on_gone=[])
    sandboxes.up.return_value.order = {"network": False}
    sandboxes.up.return_value.place_to_join.return_value = Place(ProcessFolder(os.getpid()), 0, {}, 0)
    networks = Networks(children, launcher, sandboxes)
    a, b, _c = (networks.address(name)[0]["address"] for name in ("a", "b", "c"))
    held = os.open("/dev/null", os.O_RDONLY)

    async def carry_out(request: Request, _files: object = ()) -> tuple[Message, list[int]]:
        kind = request._kind
        return {}, [held] if kind is Kind.NETWORK else [os.open("/dev/null", os.O_RDONLY)] * (kind is Kind.SOCKET)

    launcher.run = carry_out
    children.run = AsyncMock(return_value=({}, []))
    await networks.introduce({"sandbox": "a", "hosts": {"b": b}})
    comes: asyncio.Future[tuple[Message, list[int]]] = asyncio.get_running_loop().create_future()
    children.run = Mock(return_value=comes)
    coming = asyncio.create_task(networks.introduce({"sandbox": "c", "hosts": {"a": a}}))
    await asyncio.sleep(0)
    (gone,) = sandboxes.on_gone
    gone("a")
    gone("b")
    assert os.fstat(held)
    comes.set_result(({}, []))
    await coming
    gone("c")
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(held)


async def test_one_may_come_while_all_others_end(three: list[Container]) -> None:
    """Nobody's end waits for ever for that, and the supervisor lives on."""
    one, two, late = three
    await network.connect({"one": one, "two": two})
    comes = asyncio.create_task(network.connect({"one": one, "late": late}))
    await asyncio.sleep(0)
    await asyncio.gather(one.close(), two.close(), return_exceptions=True)
    with contextlib.suppress(SandboxLost, SandboxRefused, CallerError):
        await comes
    async with asyncio.timeout(20):
        await late.close()


async def test_a_relay_outlives_a_moment_without_open_files() -> None:
    """Whoever connected meanwhile is served when there are some again."""
    listener, client = socket.create_server((port_forward.HOST, 0)), socket.socket()
    client.setblocking(False)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()

    async def dial() -> socket.socket:
        return theirs

    relay = port_forward.Relay(listener, dial)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with ours, client:
            await asyncio.sleep(0)
            # No number below is free.
            filled = [os.open("/dev/null", os.O_RDONLY)]
            while filled[-1] < 256:
                filled.append(os.dup(filled[0]))
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            try:
                await loop.sock_connect(client, listener.getsockname())
                await asyncio.sleep(0.2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in filled:
                    os.close(descriptor)
            await loop.sock_sendall(client, b"here")
            async with asyncio.timeout(10):
                ours.setblocking(False)
                assert await loop.sock_recv(ours, 4) == b"here"
    finally:
        relay.close()
