# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher, which forks sandboxes' processes for the supervisor."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox import launcher
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.launcher.requests import Request, RequestKind, receive_reply
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.children import Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.connection import Message, PeerGone
from tests.sandbox.without import Off, Without


class Bench:
    """A launcher of this process."""

    def __init__(self, folder: Path) -> None:
        self.children = Children()
        self.launcher = Launcher(self.children, folder)

    @property
    def pid(self) -> int:
        """Process number of the launcher."""
        assert self.launcher._process
        return self.launcher._process.pid

    async def answer(self, request: Request) -> tuple[int, Message]:
        """Send a request; returns the exit code of its process and the reply."""
        child, channel = await self.launcher.begin(request, [], None)
        with channel:
            code = await child.wait()
            try:
                return code, receive_reply(channel)[0]
            except PeerGone:
                return code, {}


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    if made.launcher._connection and made.launcher._process:
        made.launcher._connection.close()
        # The launcher ends with its connection.
        assert await made.launcher._process.wait() == 0
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def made_of(kind: RequestKind, body: bytes) -> Request:
    request = Request(kind)
    request._body += body
    return request


NOTHING = {"error": f"start: {os.strerror(errno.EBADMSG)}", "errno": errno.EBADMSG}


@pytest.mark.parametrize("kind", [*sorted(RequestKind), 77])
async def test_a_request_that_is_cut_off_is_refused_and_the_next_is_served(bench: Bench, kind: RequestKind) -> None:
    for size in (0, 7, 8, 15):
        assert await bench.answer(made_of(kind, bytes(size))) == (127, NOTHING)
    if is_machine_root():
        # The launcher closes a request's descriptors after the fork. Only root may list them.
        assert set(await asyncio.to_thread(os.listdir, f"/proc/{bench.pid}/fd")) == {"0", "1", "2", "3"}


async def test_many_are_asked_for_before_the_first_is_answered(bench: Bench) -> None:
    """The requests exceed the buffer of the launcher's socket."""
    request = made_of(RequestKind.MAKE, bytes(20_000))
    answers = await asyncio.gather(*(bench.answer(request) for _ in range(100)))
    assert answers == [(127, NOTHING)] * 100, "it had one file of four"


TELL = """
from nemo_gym_prorl.sandbox.supervisor import children as launcher
running = launcher.Launcher._running
def tell(self):
    channel = running(self)
    with open({path!r}, "w") as file:
        file.write(str(self._process.pid))
    return channel
launcher.Launcher._running = tell
"""
"""Has a supervisor write down which process is its launcher."""


def told(path: Path) -> int | None:
    """Return the launcher's process number if it is running."""
    try:
        pid = path.read_text()
        return int(pid) if Path(f"/proc/{pid}/cmdline").read_bytes() == f"{launcher.LAUNCHER}\0".encode() else None
    except (OSError, ValueError):
        return None


@pytest.mark.sandbox
async def test_whenever_the_launcher_is_killed_sandboxes_come_up_and_commands_run_once(
    image: Path, runtime: Runtime, without: Without, tmp_path: Path
) -> None:
    rng, busy = random.Random(1), max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    without(Off(TELL.format(path=str(tmp_path / "pid"))))
    async with await Container.start(ContainerSpec(image=image, start="direct"), runtime) as container:
        killed = 0

        async def kill() -> None:
            nonlocal killed
            while True:
                if pid := told(tmp_path / "pid"):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                # Leave a launcher time to run before it is killed again.
                await asyncio.sleep(busy * rng.choice([0.0, 0.001, 0.005, 0.02]))

        async def command(number: int) -> None:
            assert (await container.run(f"echo {number} >> /tmp/log; echo done")).stdout == "done\n"

        async def another() -> None:
            async with await Container.start(ContainerSpec(image=image, start="auto"), runtime) as other:
                assert (await other.run("echo works")).stdout == "works\n"

        killing = asyncio.create_task(kill())
        try:
            async with asyncio.timeout(200):
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
    async with await Container.start(ContainerSpec(image=image, start="direct"), runtime) as container:
        pid = told(tmp_path / "pid")
        assert pid is not None
        seen = await container.run(f"ls /proc; cat /proc/{pid}/cmdline; kill -9 {pid}")
        assert str(pid) not in seen.stdout.split()
        status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
        assert "State:\tS" in status
        # A non-dumpable process has files in /proc that belong to root.
        assert (await asyncio.to_thread(Path(f"/proc/{pid}/environ").stat)).st_uid == 0


def test_the_copy_is_static_sealed_and_closed(tmp_path: Path) -> None:
    """For a process that is about to become a script, ``/proc/self/exe`` is the launcher (CVE-2019-5736)."""
    copy = launcher.load_launcher(tmp_path)
    with pytest.raises(PermissionError):
        os.pwrite(copy, b"x", 0)
    with pytest.raises(PermissionError):
        os.truncate(copy, 0)
    program = launcher.launcher_path().read_bytes()
    assert os.pread(copy, 1 << 20, 0) == program
    assert b"/ld-" not in program, "an image could replace its dynamic loader"
    assert stat.S_IMODE(os.fstat(copy).st_mode) == 0o111
    os.close(copy)


@pytest.mark.sandbox
async def test_sandboxes_start_without_memory_files(image: Path, runtime: Runtime, without: Without) -> None:
    without(Off("def forbidden(*_):\n    raise PermissionError\nsyscalls.create_executable_memfd = forbidden"))
    async with await Container.start(ContainerSpec(image=image, start="direct"), runtime) as container:
        assert (await container.run("echo works")).stdout == "works\n"


@pytest.mark.sandbox
@pytest.mark.usefixtures("way")
async def test_a_script_that_is_run_by_its_own_executable_does_nothing(container: Container) -> None:
    """The launcher starts commands by ``/bin/sh``, and exits with 127 without its socket."""
    await container.files.write_file("/bin/sh", b"#!/proc/self/exe\n")
    assert (await container.run("true")).exit_code == 127


@pytest.mark.sandbox
@pytest.mark.usefixtures("way")
async def test_no_open_file_of_the_way_in_is_a_folder_that_a_link_inside_leads_to(container: Container) -> None:
    """Names are looked up while the process still has the supervisor's descriptors."""
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
    """The supervisor ignores SIGHUP as under ``nohup``, and blocks SIGUSR1."""
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
