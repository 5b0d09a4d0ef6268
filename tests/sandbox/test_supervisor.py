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
    PeerGone,
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
        *({**spawn, "tty": 5}, {**spawn, "more": 1}, {**whole, "sandbox": "../../etc"}, {**whole, "cpus": "1"}),
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


def test_who_may_open_no_more_files_still_hears_whose_message_it_was() -> None:
    here, there = socket_pair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with here, there:
        # Use up all descriptors below the limit.
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        while taken[-1] < max(map(int, os.listdir("/proc/self/fd"))) - 1:  # noqa: PTH208
            taken.append(os.open("/dev/null", os.O_RDONLY))
        send(here, pack({**LARGE, "id": 7}))
        send(here, pack({"id": 8}, taken[:1]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, before[1]))
        try:
            for number in (7, 8):
                message, files = receive(there)
                assert (message["id"], message["torn"], files) == (number, True, [])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            close_all(taken)


NOT_READ_AT = [b'{"size": 5}', b'{"size": -1}', b'{"size": -99999999999999999999}', b'{"size": "5"}']
"""Sent with a pipe in place of the memory file."""


@pytest.mark.parametrize(
    ("garbage", "with_pipe"),
    [(text, False) for text in (b"{", b"\xff\xfe", b'{"size": 5}', b"[" * 50_000)]
    + [(text, True) for text in (*NOT_READ_AT, b"[]", b'"size"')],
)
def test_what_is_no_message_ends_the_connection_and_leaves_no_file(garbage: bytes, with_pipe: bool) -> None:
    here, there = socket_pair()
    pipe = os.pipe() if with_pipe else ()
    with here, there:
        before = os.listdir("/proc/self/fd")  # noqa: PTH208
        socket.send_fds(here, [garbage], pipe)
        with pytest.raises(PeerGone):
            receive(there)
        assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    close_all([*pipe])


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


async def test_an_exception_of_one_connection_reaches_no_other_and_is_not_met_all_the_time() -> None:
    reads: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reads.append(type(context["exception"]).__name__))

    def fail(_end: socket.socket) -> tuple[()]:
        raise MemoryError

    pairs = [socket_pair() for _ in range(3)]
    handlers = [lambda *_: reads.append("heard"), lambda *_: reads[len(reads) + 1], lambda *_: None]
    takers = [receive, receive, fail]
    connections = [
        Connection(ours, heard, print, take)  # type: ignore[arg-type]
        for (ours, _theirs), heard, take in zip(pairs, handlers, takers, strict=True)
    ]
    for _ours, theirs in pairs:
        send(theirs, pack({"id": 1}))
        send(theirs, pack({"id": 2}))
    await asyncio.sleep(0.1)
    assert sorted(reads) == ["IndexError", "IndexError", "MemoryError", "heard", "heard"]
    for connection, (_ours, theirs) in zip(connections, pairs, strict=True):
        connection.close()
        theirs.close()


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


REUSE = """
import asyncio, os, sys
from pathlib import Path
from nemo_gym_prorl.sandbox.supervisor.children import Children

# The first process of a PID namespace adopts orphans and may set the next pid.
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWPID)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def starts(status, gate=None):
    def action():
        pid = os.fork()
        if pid == 0:
            if gate is not None:
                os.read(gate, 1)
            os._exit(status)
        return {"pid": pid}, []
    return action

async def main():
    children = Children()
    # An orphan without a Child.
    stranger = (await children.run(starts(7)))[0]["pid"]
    await asyncio.sleep(0.05)
    # The pid is reused by a process that is adopted.
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(stranger - 2))
    waiting, go = os.pipe()
    with children.starting() as adopt:
        pid = (await children.run(starts(3, waiting), [waiting]))[0]["pid"]
        assert pid == stranger
        adopted = adopt(pid)
    await asyncio.sleep(0.05)
    assert adopted.alive, "that was the end of the stranger"
    os.write(go, b"x")
    assert await adopted.wait() == 3
    # A process that ends before its pid is reported can be adopted.
    with children.starting() as adopt:
        pid = (await children.run(starts(5)))[0]["pid"]
        await asyncio.sleep(0.05)
        assert await adopt(pid).wait() == 5

asyncio.run(main())
"""


def test_an_end_is_never_taken_for_that_of_another_process_with_its_number() -> None:
    done = subprocess.run([sys.executable, "-c", REUSE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


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
