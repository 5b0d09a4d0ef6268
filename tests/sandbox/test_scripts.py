# SPDX-License-Identifier: Apache-2.0
"""Scripts of system calls, the program that carries them out, and the runner that forks in the supervisor's place."""

from __future__ import annotations

import asyncio
import errno
import json
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

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.scripting import scripts
from nemo_gym_prorl.sandbox.isolation.scripting.scripts import ANY, FIRST_FILE, Script, UnfitError
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.processes import runner
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.processes.runner import Runner
from tests.sandbox.test_abuse import without


__all__ = ["without"]


ROOM = 32

Carry = Callable[[Script], tuple[int, list[bytes]]]


class Turns:
    """As much of the supervisor's loop as a runner needs, without its signals."""

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
    """A runner of this process's own, and what it is asked."""

    def __init__(self) -> None:
        self.loop = Turns()
        self.runner = Runner(self.loop, Children())  # type: ignore[arg-type]

    def ask(self, script: Script, files: Sequence[int] = ()) -> int | str:
        """The number of the process, or what became of the request."""
        told: list[int | str] = []
        self.runner.start(
            script,
            files,
            None,
            begun=told.append,
            ended=lambda _status: None,
            failed=lambda error: told.append(str(error)),
            lost=lambda _files: told.append("lost"),
        )
        self.loop.until(lambda: told)
        return told[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    pid = made.runner._pid
    if made.runner._channel:
        made.runner._channel.close()
    if pid:
        # Its end is its parent's.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def carry_out(bench: Bench) -> Carry:
    """Has a script carried out that speaks on its first file; returns how it ended, and what it said."""

    def carry(script: Script) -> tuple[int, list[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            pid = bench.ask(script, [theirs.fileno()])
            assert isinstance(pid, int)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ours.setblocking(False)
            said = []
            while True:
                try:
                    said.append(ours.recv(4096))
                except BlockingIOError:
                    return code, said

    return carry


def test_a_step_uses_what_earlier_ones_gave(carry_out: Carry) -> None:
    script = Script(ROOM)
    script.catch(FIRST_FILE)
    file = script.call("openat", -100, b"/dev/zero", os.O_RDONLY, 0)
    read = script.call("read", file, script.data(bytes(16)), 7)
    script.tell(FIRST_FILE, b'{"file": #, "read": #}', file, read)
    script.call("exit_group", read)
    code, said = carry_out(script)
    assert code == 7
    assert [json.loads(each) for each in said] == [{"file": FIRST_FILE + 1, "read": 7}]


@pytest.mark.parametrize("tolerated", [[errno.ENOENT], [errno.EPERM, errno.ENOENT], [ANY]])
def test_a_tolerated_error_skips_and_another_ends_it_and_is_told(carry_out: Carry, tolerated: list[int]) -> None:
    script = Script(ROOM)
    script.catch(FIRST_FILE)
    script.call("chdir", b"/nowhere", tolerate=tolerated, on_error=1)
    script.call("exit_group", 1)
    script.step = "the last"
    script.call("chdir", b"/dev/null", tolerate=[errno.ENOENT])
    code, said = carry_out(script)
    assert code == 127
    (answer,) = map(json.loads, said)
    assert script.words(answer["step"]) == "the last"
    assert answer["errno"] == errno.ENOTDIR


def test_it_goes_on_elsewhere_after_nothing(carry_out: Carry) -> None:
    script = Script(ROOM)
    script.catch(FIRST_FILE)
    nothing = script.call("setgroups", 0, 0) if os.geteuid() == 0 else script.call("chdir", b"/")
    script.call("exit_group", 1)
    script.land(nothing)
    file = script.call("openat", -100, b"/dev/null", os.O_RDONLY, 0)
    script.call_or_end("fcntl", file, 1, 0)
    script.call("exit_group", 0)
    # The flags of an open file, of which there are none.
    assert carry_out(script)[0] == 127


def test_what_is_in_one_script_is_in_no_other(carry_out: Carry, bench: Bench) -> None:
    """What one is given is closed in the runner once it is forked, and is the first file of the next."""
    for _ in range(3):
        script = Script(ROOM)
        script.catch(FIRST_FILE)
        file = script.call("openat", -100, b"/", os.O_PATH, 0)
        script.tell(FIRST_FILE, b"#", file)
        assert int(carry_out(script)[1][0]) == FIRST_FILE + 1
    if os.geteuid() == 0:
        # Nobody else may look.
        assert {file.name for file in Path(f"/proc/{bench.runner._pid}/fd").iterdir()} == {"0", "1", "2", "3"}


def test_a_script_that_is_too_long_is_refused_and_the_runner_goes_on(carry_out: Carry) -> None:
    script = Script(ROOM)
    for _ in range(ROOM + 1):
        script.call("umask", 0)
    with pytest.raises(UnfitError):
        carry_out(script)
    script = Script(ROOM)
    script.call("exit_group", len(script.data(bytes(scripts.LARGEST)).to_bytes(8)))
    with pytest.raises(UnfitError):
        carry_out(script)
    script = Script(ROOM)
    script.call("exit_group", 4)
    assert carry_out(script) == (4, [])


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_a_runner_that_does_not_answer_is_told_of_and_the_next_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, deed: signal.Signals
) -> None:
    monkeypatch.setattr(runner, "ANSWER_S", 0.5)
    script = Script(ROOM)
    script.call("exit_group", 5)
    started = bench.ask(script)
    assert isinstance(started, int)
    assert os.waitstatus_to_exitcode(os.waitpid(started, 0)[1]) == 5
    pid = bench.runner._pid
    assert pid is not None
    os.kill(pid, deed)
    assert bench.ask(script) == "lost"
    os.waitpid(pid, 0)
    started = bench.ask(script)
    assert isinstance(started, int)
    assert os.waitstatus_to_exitcode(os.waitpid(started, 0)[1]) == 5
    assert bench.runner._pid != pid


def test_many_are_asked_for_before_the_first_is_answered(bench: Bench) -> None:
    """More than its socket holds: others wait here, with files of their own."""
    script = Script(ROOM)
    script.data(bytes(20_000))
    script.call("write", FIRST_FILE, b"x", 1)
    script.call("exit_group", 0)
    begun: list[int] = []
    reader, writer = os.pipe()
    for _ in range(100):
        bench.runner.start(
            script,
            [writer],
            None,
            begun=begun.append,
            ended=lambda _status: None,
            failed=lambda error: pytest.fail(str(error)),
            lost=lambda _files: pytest.fail("lost"),
        )
    os.close(writer)
    bench.loop.until(lambda: len(begun) == 100)
    for pid in begun:
        os.waitpid(pid, 0)
    assert os.read(reader, 1000) == b"x" * 100
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_the_program_is_known_for_the_usual_machines() -> None:
    assert set(scripts.CODE) == set(scripts.CALLS) == {"x86_64", "aarch64"}
    assert set(scripts.CALLS["x86_64"]) == set(scripts.CALLS["aarch64"])
    # The word behind it, the address of its frame, is read where a word has to be.
    assert all(len(code) % 8 == 0 for code in scripts.CODE.values())


TELL = """
from nemo_gym_prorl.sandbox.supervisor.processes import runner
running = runner.Runner._running
def tell(self):
    channel = running(self)
    with open({path!r}, "w") as file:
        file.write(str(self._pid))
    return channel
runner.Runner._running = tell
"""
"""Has a supervisor say which process is its runner: what that forks looks the same."""


def told(path: Path) -> int | None:
    """The runner, if it lives."""
    try:
        pid = path.read_text()
        return int(pid) if Path(f"/proc/{pid}/cmdline").read_bytes() == f"{runner.NAME}\0".encode() else None
    except (OSError, ValueError):
        return None


@pytest.mark.sandbox
async def test_whenever_the_runner_is_killed_sandboxes_come_up_and_commands_run_once(
    image: Path, runtime: Runtime, without: Callable[[str], None], tmp_path: Path
) -> None:
    rng = random.Random(1)
    without(TELL.format(path=str(tmp_path / "runner")))
    async with await Container.start(ContainerSpec(image=image, start="mould"), runtime) as container:
        killed = 0

        async def kill() -> None:
            nonlocal killed
            while True:
                if pid := told(tmp_path / "runner"):
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
async def test_no_process_inside_knows_of_the_runner(
    image: Path, runtime: Runtime, without: Callable[[str], None], tmp_path: Path
) -> None:
    without(TELL.format(path=str(tmp_path / "runner")))
    async with await Container.start(ContainerSpec(image=image, start="mould"), runtime) as container:
        pid = told(tmp_path / "runner")
        assert pid is not None
        seen = await container.run(f"ls /proc; cat /proc/{pid}/cmdline; kill -9 {pid}")
        assert str(pid) not in seen.stdout.split()
        status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
        assert "State:\tS" in status
        # Closed to whoever has its user id: as a file of /proc that is not its user's.
        assert (await asyncio.to_thread(Path(f"/proc/{pid}/environ").stat)).st_uid == 0
