# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor and its socket: messages arrive whole or not at all, and no request or shortage ends it.

It replies to every request, and accepts only processes of its own user and namespaces.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl import filesystems
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox import spec as specs
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import client, watchdog_process
from nemo_gym_prorl.sandbox.supervisor.client import SupervisorConnection
from nemo_gym_prorl.sandbox.supervisor.connection import (
    MAX_FILES,
    MAX_INLINE_BYTES,
    Connection,
    close_all,
    pack,
    ready,
    receive,
    send,
    socket_pair,
)
from nemo_gym_prorl.sandbox.supervisor.protocol import DestroyRequest, SandboxLost, SandboxRefused, encode, failure
from tests.sandbox.running import HANG_S, supervisor_pid


pytestmark = pytest.mark.sandbox

as_root = pytest.mark.skipif(not is_machine_root(), reason="of root's sandboxes")
as_user = pytest.mark.skipif(is_machine_root(), reason="of an ordinary user's sandboxes")


async def test_no_request_ends_the_supervisor(
    image: Path, runtime: Runtime, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete create request leaves no sandbox behind."""
    link = await SupervisorConnection.get()
    whole = encode(specs.create_request("b-000000000002", ContainerSpec(image=image), runtime)[0])
    spawn = {"do": "spawn", "spawn": "x", "sandbox": container.name, "argv": ["true"], "env": {}, "cwd": "/"}
    bad: list[Any] = [
        *(
            {},
            {"do": None},
            {"do": "nonsense"},
            {"do": "attach", "sandbox": "none"},
            {"do": "spawn", "sandbox": ["b"]},
        ),
        *({"do": "put", "sandbox": "none"}, {"do": "signal", "spawn": "none"}, {**spawn, "argv": []}),
        *({**spawn, "tty": 5}, {**spawn, "more": 1}, {**whole, "sandbox": "../../etc"}),
        *({key: value for key, value in whole.items() if key != lacking} for lacking in whole),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(client, "encode", lambda request: request)
        for request in bad:
            with pytest.raises((SandboxRefused, SandboxLost, CallerError)):
                async with asyncio.timeout(HANG_S):
                    await link.ask(request)
    async with asyncio.timeout(HANG_S):
        await link.ask(DestroyRequest(whole["sandbox"]))
    assert not (link.folder / whole["sandbox"]).exists()
    assert (await container.run("echo alive")).stdout == "alive\n"


async def test_a_supervisor_without_descriptors_lives_on_and_says_so(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        before = resource.prlimit(supervisor_pid(), resource.RLIMIT_NOFILE)
        for free in (40, 0):
            resource.prlimit(supervisor_pid(), resource.RLIMIT_NOFILE, (limit_with_free(free), before[1]))
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
                resource.prlimit(supervisor_pid(), resource.RLIMIT_NOFILE, before)
            assert (await container.run("echo alive")).stdout == "alive\n"


def limit_with_free(free: int) -> int:
    """Return the limit that leaves ``free`` descriptors."""
    used = {int(entry.name) for entry in Path(f"/proc/{supervisor_pid()}/fd").iterdir()}
    unused = [number for number in range(len(used) + free + 1) if number not in used]
    return unused[free]


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
    """Simulates a sandboxed process that can reach the socket and has the same user id."""
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
    chain = await SupervisorConnection.get()
    own = (folder.parent.parent, folder.parent, folder, folder / container.name, link)
    for source in ("/", *own, "/proc", "/proc/1/root", "/run"):
        wanted = ContainerSpec(image=image, binds=[f"{source}:/outside"])
        with pytest.raises(CallerError, match="bind") as refused:
            await Container.start(wanted, runtime)
        assert refused.value.field == "binds"
        # The supervisor itself checks, too.
        with pytest.raises(CallerError, match="bind"):
            await chain.ask(specs.create_request("b-000000000001", wanted, runtime)[0])
    async with await Container.start(ContainerSpec(image=image, binds=[f"{harmless}:/outside"]), runtime) as live:
        assert (await live.run("ls -d /outside")).stdout == "/outside\n"


async def test_who_takes_no_answers_is_asked_for_no_more_questions_and_holds_up_nobody(container: Container) -> None:
    link = await SupervisorConnection.to(Path(container.describe()["supervisor"]))
    deaf = await SupervisorConnection._connect(link.folder)
    asked = stalls = 0
    with deaf:
        while asked < 20_000 and stalls < 100:
            try:
                deaf.send(b'{"do": "signal", "spawn": "none", "signal": 0, "id": 1}')
                asked, stalls = asked + 1, 0
            except BlockingIOError:
                stalls += 1  # a supervisor that reads takes some of them within a second
                await asyncio.sleep(0.01)
        assert asked < 20_000
        assert (await container.run("echo alive")).stdout == "alive\n"


def test_the_watchdog_hears_whatever_number_its_channel_has() -> None:
    """``select`` fails above 1023, and a supervisor of many sandboxes has thousands of descriptors."""
    ours, theirs = socket_pair()
    with theirs:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1500)
        with socket.socket(fileno=high) as channel:
            send(ours, pack({"forget": "none"}))
            ours.close()
            watchdog_process.serve(channel)


LARGE = {"id": 1, "text": "x" * (3 * MAX_INLINE_BYTES), "bytes": "\udcff"}


@pytest.mark.parametrize("message", [{"id": 1}, LARGE, {"id": 1, "text": "x" * (MAX_INLINE_BYTES - 30)}])
def test_a_message_of_any_size_comes_as_it_was_sent_with_its_files(message: dict[str, object]) -> None:
    here, there = socket_pair()
    with here, there:
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(MAX_FILES)]
        send(here, pack(message, given))
        got, files = receive(there)
        assert got == message
        assert len(files) == MAX_FILES
        close_all(files)
        close_all(given)


async def test_what_waits_for_room_comes_later_in_order_unless_its_sender_gives_up() -> None:
    here, there = socket_pair()
    with there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        connection = Connection(here, print, print)
        sending = [asyncio.create_task(connection.send({"id": number, "text": "x" * 2000})) for number in range(20)]
        await asyncio.sleep(0.01)
        assert sending[0].done()
        sending[-2].cancel()
        got = []
        while len(got) < 19:
            await ready(there)
            got.append(receive(there)[0]["id"])
        assert got == [*range(18), 19]
        connection.close()


@pytest.mark.sandbox
async def test_who_gives_up_while_sending_disturbs_nobody(image: Path, runtime: Runtime) -> None:
    """Large commands are cancelled while the supervisor does not read."""
    large = {f"V{number}": "x" * 100_000 for number in range(12)}
    spec = ContainerSpec(image=image)
    async with await Container.start(spec, runtime) as victim, await Container.start(spec, runtime) as other:
        for commands in ([victim.run("true", env=large)], [victim.run(f": {'x' * 90_000}") for _ in range(6)]):
            os.kill(supervisor_pid(), signal.SIGSTOP)
            tasks = [asyncio.create_task(command) for command in commands]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            os.kill(supervisor_pid(), signal.SIGCONT)
            async with asyncio.timeout(HANG_S):
                assert (await other.run("echo alive")).stdout == "alive\n"
                assert (await victim.run("echo alive")).stdout == "alive\n"
        shown = await victim.run('echo "${#V3}"', env=large)
        assert shown.stdout == "100000\n", shown


@pytest.mark.timeout(60)
def test_a_failure_is_told_without_reading_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A child that has joined a sandbox would read the sandbox's file at the path of the source."""
    source = tmp_path / "server.py"
    os.mkfifo(source)
    with pytest.raises(ValueError, match="wrong") as caught:
        exec(compile("raise ValueError('wrong')", source, "exec"))
    assert failure(caught.value) == {"error": "the supervisor failed: ValueError: wrong"}
    assert f"{source}:1 " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("{tmp}/" + "x" * 100, "107 at most"),
        ("{tmp}/file", ""),
        ("{tmp}/file/below", ""),
        ("{tmp}", "other machines may share"),
        pytest.param("{tmp}/wall/s", "can't enter", marks=as_root),
        pytest.param("/proc", "", marks=as_user),
        pytest.param("/usr", "", marks=as_user),
    ],
)
async def test_a_state_folder_that_cannot_be_used(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, reason: str
) -> None:
    monkeypatch.setattr(client, "own_supervisor", None)  # as if this process had not started one yet
    (tmp_path / "file").touch()
    (tmp_path / "wall").mkdir(mode=0o700)
    state = Path(folder.format(tmp=tmp_path))
    before = state.exists()  # noqa: ASYNC240
    if "share" in reason:
        monkeypatch.setattr(filesystems, "_SHARED_KINDS", re.compile(filesystems.filesystem_type(tmp_path)))
    monkeypatch.setenv("PRORL_STATE", str(state))
    with pytest.raises(InfrastructureError, match=f"set PRORL_STATE.*{reason}|{reason}.*set PRORL_STATE") as caught:
        await Container.start(ContainerSpec(image=image), runtime)
    assert str(state) in caught.value.reason
    assert state.exists() == before, "nor what was made to look at it"  # noqa: ASYNC240
