# SPDX-License-Identifier: Apache-2.0
"""The launcher, which forks in the supervisor's place, and what it is asked."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.launcher import program
from nemo_gym_prorl.sandbox.launcher.requests import Kind, Request, receive
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.processes import launcher
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, socket_pair
from tests.sandbox.without import Off, Without


class Turns:
    """As much of the supervisor's loop as a launcher needs, without its signals."""

    def __init__(self) -> None:
        self._watched: dict[socket.socket, Callable[[], None]] = {}
        self._times: list[tuple[float, Callable[[], None]]] = []

    def watch(self, connection: socket.socket, readable: Callable[[], None]) -> None:
        self._watched[connection] = readable

    def expect(self, connection: socket.socket, *, write: bool) -> None:
        assert connection in self._watched

    def drop(self, connection: socket.socket) -> None:
        del self._watched[connection]
        connection.close()

    def call_in(self, seconds: float, callback: Callable[[], None]) -> None:
        self._times.append((time.monotonic() + seconds, callback))

    def until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline
            poll = select.poll()
            for connection in self._watched:
                poll.register(connection, select.POLLIN)
            ready = {number for number, _events in poll.poll(10)}
            due = [callback for at, callback in self._times if at <= time.monotonic()]
            self._times = [(at, callback) for at, callback in self._times if callback not in due]
            for callback in [self._watched[each] for each in [*self._watched] if each.fileno() in ready] + due:
                callback()


class Bench:
    """A launcher of this process's own, and what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.loop = Turns()
        self.launcher = Launcher(self.loop, Children(), folder)  # type: ignore[arg-type]

    def ask(self, request: Request, files: Sequence[int]) -> int | str:
        """The number of the process, or what became of the request."""
        told: list[int | str] = []
        self.launcher.start(
            request,
            files,
            None,
            begun=told.append,
            ended=lambda _status: None,
            failed=lambda error: told.append(str(error)),
            lost=lambda _files: told.append("lost"),
        )
        self.loop.until(lambda: told)
        return told[0]

    def answer(self, request: Request) -> tuple[int, Message]:
        """How its process ended, and what it said."""
        ours, theirs = socket_pair()
        with ours:
            with theirs:
                pid = self.ask(request, [theirs.fileno()])
            assert isinstance(pid, int)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            try:
                return code, receive(ours)[0]
            except PeerGone:
                return code, {}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    pid = made.launcher._pid
    if made.launcher._channel:
        made.launcher._channel.close()
    if pid:
        # Its end is its parent's.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def made_of(kind: Kind, body: bytes) -> Request:
    request = Request(kind)
    request._body += body
    return request


NOTHING = {"error": f"start: {os.strerror(errno.EBADMSG)}", "errno": errno.EBADMSG}


@pytest.mark.parametrize("kind", Kind)
def test_a_request_that_is_cut_off_is_refused_and_the_next_is_served(bench: Bench, kind: Kind) -> None:
    for size in (0, 7, 8, 15):
        assert bench.answer(made_of(kind, bytes(size))) == (127, NOTHING)
    if os.geteuid() == 0:
        # What came with one is closed once it is forked. Nobody else may look.
        assert {file.name for file in Path(f"/proc/{bench.launcher._pid}/fd").iterdir()} == {"0", "1", "2", "3"}


def test_a_kind_that_there_is_not_is_refused(bench: Bench) -> None:
    assert bench.answer(made_of(77, b"")) == (127, NOTHING)  # type: ignore[arg-type]


def test_any_bytes_are_survived(bench: Bench) -> None:
    rng = random.Random(1)
    started = bench.ask(made_of(Kind.CONNECT, b""), [0])
    assert isinstance(started, int)
    os.waitpid(started, 0)
    first = bench.launcher._pid
    for _ in range(200):
        # A process is that of no sandbox, and gets no word to go on.
        words = [rng.choice([0, 1, 2, 1 << 20, (1 << 64) - 1, rng.getrandbits(64)]) for _ in range(rng.randrange(12))]
        body = b"".join(word.to_bytes(8, "little") for word in words) + rng.randbytes(rng.randrange(200))
        code, _said = bench.answer(made_of(rng.choice([*Kind]), body))
        assert code == 127
    assert bench.launcher._pid == first


def test_one_that_is_larger_than_a_packet_is_read_from_memory(bench: Bench) -> None:
    where = [
        bytes(16) + spaces.to_bytes(8, "little") + (1).to_bytes(8, "little") for spaces in (1 << 62, os.CLONE_NEWUSER)
    ]
    said = [bench.answer(made_of(Kind.CONNECT, each + bytes(1 << 20)))[1] for each in where]
    assert said[0]["errno"] == errno.EBADMSG
    assert said[1]["lost"], "there is no process 0"


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_a_launcher_that_does_not_answer_is_told_of_and_the_next_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, deed: signal.Signals
) -> None:
    monkeypatch.setattr(launcher, "ANSWER_S", 0.5)
    request = made_of(Kind.CONNECT, b"")
    assert bench.answer(request) == (127, NOTHING)
    pid = bench.launcher._pid
    assert pid is not None
    os.kill(pid, deed)
    assert bench.ask(request, [0]) == "lost"
    os.waitpid(pid, 0)
    assert bench.answer(request) == (127, NOTHING)
    assert bench.launcher._pid != pid


def test_many_are_asked_for_before_the_first_is_answered(bench: Bench) -> None:
    """More than its socket holds: others wait here, with files of their own."""
    begun: list[int] = []
    ours, theirs = socket_pair()
    with ours, theirs:
        theirs.setblocking(True)
        for _ in range(100):
            bench.launcher.start(
                made_of(Kind.MAKE, bytes(20_000)),
                [theirs.fileno()],
                None,
                begun=begun.append,
                ended=lambda _status: None,
                failed=lambda error: pytest.fail(str(error)),
                lost=lambda _files: pytest.fail("lost"),
            )
        bench.loop.until(lambda: len(begun) == 100)
        for pid in begun:
            os.waitpid(pid, 0)
        assert [receive(ours)[0] for _ in begun] == [NOTHING] * 100, "it had one file of four"


TELL = """
from nemo_gym_prorl.sandbox.supervisor.processes import launcher
running = launcher.Launcher._running
def tell(self):
    channel = running(self)
    with open({path!r}, "w") as file:
        file.write(str(self._pid))
    return channel
launcher.Launcher._running = tell
"""
"""Has a supervisor say which process is its launcher: what that forks looks the same."""


def told(path: Path) -> int | None:
    """The launcher, if it lives."""
    try:
        pid = path.read_text()
        return int(pid) if Path(f"/proc/{pid}/cmdline").read_bytes() == f"{program.LAUNCHER}\0".encode() else None
    except (OSError, ValueError):
        return None


@pytest.mark.sandbox
async def test_whenever_the_launcher_is_killed_sandboxes_come_up_and_commands_run_once(
    image: Path, runtime: Runtime, without: Without, tmp_path: Path
) -> None:
    rng = random.Random(1)
    without(Off(TELL.format(path=str(tmp_path / "pid"))))
    async with await Container.start(ContainerSpec(image=image, start="mould"), runtime) as container:
        killed = 0

        async def kill() -> None:
            nonlocal killed
            while True:
                if pid := told(tmp_path / "pid"):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                await asyncio.sleep(rng.choice([0.0, 0.001, 0.005, 0.02]))

        async def command(number: int) -> None:
            assert (await container.run(f"echo {number} >> /tmp/log; echo done")).stdout == "done\n"

        async def another() -> None:
            async with await Container.start(ContainerSpec(image=image, start="auto"), runtime) as other:
                assert (await other.run("echo works")).stdout == "works\n"

        killing = asyncio.create_task(kill())
        try:
            async with asyncio.timeout(120):
                for round_ in range(20):
                    await asyncio.gather(command(2 * round_), command(2 * round_ + 1), another())
        finally:
            killing.cancel()
            await asyncio.wait([killing])
        lines = (await container.run("cat /tmp/log")).stdout.split()
        assert sorted(map(int, lines)) == list(range(40))
        assert killed > 5


@pytest.mark.sandbox
async def test_no_process_inside_knows_of_the_launcher(
    image: Path, runtime: Runtime, without: Without, tmp_path: Path
) -> None:
    without(Off(TELL.format(path=str(tmp_path / "pid"))))
    async with await Container.start(ContainerSpec(image=image, start="mould"), runtime) as container:
        pid = told(tmp_path / "pid")
        assert pid is not None
        seen = await container.run(f"ls /proc; cat /proc/{pid}/cmdline; kill -9 {pid}")
        assert str(pid) not in seen.stdout.split()
        status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
        assert "State:\tS" in status
        # Closed to whoever has its user id: as a file of /proc that is not its user's.
        assert (await asyncio.to_thread(Path(f"/proc/{pid}/environ").stat)).st_uid == 0


@pytest.mark.sandbox
@pytest.mark.usefixtures("way")
async def test_a_command_that_is_larger_than_a_packet(container: Container) -> None:
    told = await container.execute(
        ["sh", "-c", 'printf %s "$1$A" | wc -c', "sh", "x" * 100_000], env={"A": "y" * 100_000}
    )
    assert told.stdout.strip() == "200000"
    with pytest.raises(CallerError, match="Argument list too long"):
        await container.execute(["true", "x" * 200_000])


@pytest.mark.sandbox
@pytest.mark.usefixtures("way")
async def test_no_open_file_of_the_way_in_is_a_folder_that_a_link_inside_leads_to(container: Container) -> None:
    """Names are looked up when it has files of the supervisor's still, which only its own program's start closes."""
    numbers = [*range(3, 12), *range(128, 134)]
    await container.run(f"for n in {' '.join(map(str, numbers))}; do ln -s /proc/self/fd/$n /tmp/$n; done")
    for number in numbers:
        with pytest.raises(CallerError, match=r"working folder .*(Not a directory|No such file)"):
            await container.execute(["true"], cwd=f"/tmp/{number}")
        with pytest.raises(CallerError, match=r"Not a directory|No such file"):
            await container.execute([f"/tmp/{number}/../../bin/true"])


@pytest.mark.sandbox
@pytest.mark.usefixtures("way")
async def test_no_signal_is_ignored_or_held_back_inside_that_is_where_the_supervisor_comes_from(
    image: Path, runtime: Runtime, without: Without
) -> None:
    """As under ``nohup``, and in a thread that leaves signals to others."""
    without(
        Off(
            "import signal\n"
            "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])"
        )
    )
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        told = (await container.run("cat /proc/self/status")).stdout
        assert {line.split()[1] for line in told.splitlines() if line.startswith(("SigBlk", "SigIgn"))} == {"0" * 16}


@pytest.mark.sandbox
async def test_a_program_is_looked_for_in_many_folders_without_as_many_copies_of_its_name(
    image: Path, runtime: Runtime, without: Without, tmp_path: Path
) -> None:
    """In the supervisor, whose memory that would be: some 200 MB."""
    without(Off(TELL.format(path=str(tmp_path / "pid"))))
    async with await Container.start(ContainerSpec(image=image, start="mould"), runtime) as container:
        await container.run("true")
        supervisor = (await asyncio.to_thread(Path(f"/proc/{told(tmp_path / 'pid')}/stat").read_text)).split()[3]
        status = Path(f"/proc/{supervisor}/status")
        before = peak_kib(await asyncio.to_thread(status.read_text))
        with pytest.raises(CallerError, match="No such file"):
            await container.execute(["a" * 200], env={"PATH": "::" * 60_000})
        for name, path in (("true", "/etc/passwd:/nowhere::/usr/bin/"), ("id", "x" * 5000 + ":/root:/usr/bin:/bin")):
            assert (await container.execute([name], env={"PATH": path})).exit_code == 0
        assert peak_kib(await asyncio.to_thread(status.read_text)) - before < 20_000


def peak_kib(status: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
