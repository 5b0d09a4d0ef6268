# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Attribution of failures to the agent or the machine.

Neither does an image: what its own shell does on the way up is its own failure, and takes nothing of the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor import lifecycle, sandbox, state_dir
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost, SandboxRefused
from tests.sandbox.requests import request_for
from tests.sandbox.running import HANG_S, child_pids, supervisor_pid
from tests.sandbox.without import Off, Without


pytestmark = pytest.mark.sandbox


def kill_joiners(supervisor: int, known: set[int], ended: asyncio.Event) -> None:
    """Kill new helpers of the supervisor once they have started a process."""
    while not ended.is_set():
        fresh = child_pids(supervisor) - known
        for pid in fresh:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text(errors="replace")
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
                # Processes inside have two numbers.
                if len(fresh) > 1 and len(numbers) == 1:
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_a_killed_helper_is_no_result(image: Path, runtime: Runtime, start: Start) -> None:
    """Also where it was killed between the two words that it says: which process it started, and that this may
    begin."""
    async with await Container.start(ContainerSpec(image=image, start=start), runtime) as container:
        await container.run("true")
        supervisor = supervisor_pid()
        ended, refused = asyncio.Event(), list[str]()
        killing = asyncio.create_task(asyncio.to_thread(kill_joiners, supervisor, child_pids(supervisor), ended))
        try:
            # On a busy machine most helpers end before they are found.
            enough_at = asyncio.get_running_loop().time() + 20
            while not refused or (len(refused) < 10 and asyncio.get_running_loop().time() < enough_at):
                try:
                    done = await container.run("echo ok; exit 7")
                    assert (done.exit_code, done.stdout) == (7, "ok\n")
                except InfrastructureError as error:
                    refused.append(error.reason)
        finally:
            ended.set()
            await killing
    assert all("helper was killed" in reason for reason in refused)


LEASE = """
import fcntl, os, signal, sys, time
def give_up(*_):
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
signal.signal(signal.SIGIO, signal.SIG_IGN if sys.argv[2] == "kept" else give_up)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(file, b"text")
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
open("/tmp/leased", "w")
while True:
    time.sleep(1)
"""


async def test_a_file_that_a_program_inside_holds_is_no_want_of_the_machines(
    container: Container, tmp_path: Path
) -> None:
    path = "/tmp/solution"
    for kept in ("given up", "kept"):
        holding = asyncio.create_task(container.execute(["python3", "-c", LEASE, path, kept], timeout_s=60))
        await container.run("until [ -e /tmp/leased ]; do :; done; rm /tmp/leased", timeout_s=30)
        if kept == "given up":
            assert await container.files.read_file(path, 100) == b"text"
        else:
            with pytest.raises(OSError, match="busy") as caught:
                await container.files.read_file(path, 100)
            assert caught.value.errno == errno.EBUSY
            with pytest.raises(CallerError, match="leased by a program"):
                await container.files.download(path, tmp_path / "out")
            # Writing replaces the file.
            await container.files.write_file(path, b"new")
            assert await container.files.read_file(path, 100) == b"new"
        holding.cancel()
        await asyncio.wait([holding])


async def test_a_file_system_in_memory_that_is_used_up_is_the_sandboxs(container: Container, tmp_path: Path) -> None:
    """Also if the inodes are used up."""
    source = tmp_path / "file"
    source.write_text("x")
    fill = "import itertools\nfor i in itertools.count(): open(str(i), 'w').close()"
    await container.execute(["python3", "-c", fill], cwd="/dev/shm")
    await container.run("ln -s /dev/shm /work")
    for target in ("/work/t", "/work/a/b/t"):
        with pytest.raises(CallerError, match="no space is left in the file system of /work"):
            await container.files.upload(source, target)
        with pytest.raises(OSError, match="too large") as caught:
            await container.files.write_file(target, b"x")
        assert caught.value.errno == errno.EFBIG
    await container.files.upload(source, "/new/folder/t")
    assert (await container.run("cat /new/folder/t")).stdout == "x"


MANY_VARIABLES = """#!/bin/dash
ulimit -s unlimited
a=0123456789abcdef; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a
for i in 1 2 3 4 5; do for k in 0 1 2 3 4 5 6 7 8 9; do eval "export V$i$k=$a"; done; done
exec dash "$@"
"""
MANY_COMPLAINTS = """#!/bin/dash
a=0123456789abcdef; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a; a=$a$a$a$a
i=0; while [ $i -lt 1000 ]; do printf %s "$a" >&2 || exit 9; i=$((i + 1)); done
exit 8
"""


def with_shell(root: Path, text: str, made: Path) -> Path:
    """Make an image whose ``/bin/sh`` is a script."""
    shutil.copytree(root, made, symlinks=True)
    shell = made / "usr/bin/sh"
    shell.unlink()
    shell.write_text(text)
    shell.chmod(0o755)
    return made


@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_an_image_that_sets_too_many_variables_is_refused(
    tiny_root: Path, runtime: Runtime, tmp_path: Path, start: Start
) -> None:
    root = with_shell(tiny_root, MANY_VARIABLES, tmp_path / "root")
    with pytest.raises(InfrastructureError, match=f"sandbox of {root}: .*the image sets more than 2 MiB of variables"):
        await Container.start(ContainerSpec(image=root, start=start), runtime)


async def test_what_an_image_complains_of_is_bounded(tiny_root: Path, runtime: Runtime, tmp_path: Path) -> None:
    root = with_shell(tiny_root, MANY_COMPLAINTS, tmp_path / "root")
    with pytest.raises(InfrastructureError, match="89abcdef") as caught:
        await Container.start(ContainerSpec(image=root, start="runtime"), runtime)
    assert isinstance(caught.value.__cause__, SandboxRefused)
    assert caught.value.__cause__.reason == "the runtime ended with 9"
    assert len(caught.value.__cause__.log) <= 4000


@pytest.mark.parametrize("root", [False, True])
async def test_no_file_of_the_host_is_to_be_had_from_the_first_process(
    image: Path, runtime: Runtime, root: bool
) -> None:
    """Nor one of a prepared image that the supervisor has."""
    spec = ContainerSpec(image=image, root=root)
    async with (
        await Container.start(replace(spec, start="direct"), runtime),
        await Container.start(replace(spec, start="runtime"), runtime) as container,
    ):
        found = (await container.run("ls /proc/1/fd; readlink /proc/1/fd/*")).stdout.split()
        assert {"0", "1", "2"} <= set(found)
        assert all(name.startswith("socket:") or name == "/dev/null" for name in found if not name.isdigit())


async def test_a_group_that_no_system_has_is_no_failure_of_the_machine(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        for line in ("x:x:5:99999999999999::/:/bin/sh", "x:x:99999999999999:5::/:/bin/sh"):
            assert (await container.run(f"echo {line} >> /etc/passwd")).exit_code == 0
            with pytest.raises(CallerError):
                await container.execute(["id"], user="x")
            assert (await container.run("sed -i '$d' /etc/passwd")).exit_code == 0


async def test_a_session_that_the_agent_broke_is_its_own_doing(kernel_image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image, start="runtime"), runtime) as container:
        async with await Kernel.start(container) as kernel:
            await container.run("mv $(command -v python3) /tmp/python3")
            with pytest.raises(SandboxBroken, match="IPython does not start in the sandbox any more"):
                await kernel.restart()
        await container.run("mv $(command -v bash) /tmp/bash")
        # The image has bash, though no shell was started.
        with pytest.raises(SandboxBroken, match="bash does not start in the sandbox any more"):
            await Shell.start(container)


END_FROM_INSIDE = """
import os, resource, time
try: resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))
except OSError: pass
for number in [*range(1, 65)] * 3:
    try: os.kill(1, number)
    except OSError: pass
    try: os.kill(-1, 9)
    except OSError: pass
    time.sleep(0.01)
"""
"""Some signals end the runtime's first process, a shell."""


LIMIT_NEWCOMERS = """
import os, resource, signal
open("/tmp/watching", "w").close()
while True:
    for number in range(os.getpid() + 1, os.getpid() + 20):
        try:
            os.kill(number, signal.SIGSTOP)
            try: resource.prlimit(number, resource.RLIMIT_AS, (0, 0))
            finally: os.kill(number, signal.SIGCONT)
        except OSError: pass
"""


@pytest.mark.usefixtures("way")
async def test_nobody_inside_has_what_begins_there_fail_for_want_of_memory(container: Container) -> None:
    """A process has a number inside some time before it is the program: whoever limits it then, stopped, would have
    the machine lack memory."""
    watching = asyncio.create_task(container.execute(["python3", "-c", LIMIT_NEWCOMERS], timeout_s=60))
    await container.run("until [ -e /tmp/watching ]; do :; done", timeout_s=30)
    for _ in range(10):
        assert (await container.execute(["true"], timeout_s=30)).exit_code == 0
    watching.cancel()
    await asyncio.wait([watching])


KEEP_TERMINAL = """
import fcntl, os
open("/tmp/watching", "w").close()
while True:
    try:
        file = os.open("/dev/pts/0", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(file, 0x540C)
        break
    except OSError: pass
input()
"""
"""Opens the terminal first, exclusively (``TIOCEXCL``)."""


async def test_a_terminal_that_a_program_inside_takes_first_is_no_lost_sandbox(
    image: Path, runtime: Runtime, without: Without
) -> None:
    """The test widens the race between two steps of opening the terminal."""
    opening = "    int terminal = (int)must(CALL(ioctl, opened, TIOCGPTPEER"
    without(Off(launcher=((opening, "    pause_ms(300);\n" + opening),)))
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        taking = asyncio.create_task(container.execute(["python3", "-c", KEEP_TERMINAL], timeout_s=60))
        await container.run("until [ -e /tmp/watching ]; do :; done", timeout_s=30)
        with pytest.raises(CallerError, match="terminal: Device or resource busy"):
            await container.spawn(["true"], terminal=(24, 80))
        taking.cancel()
        await asyncio.wait([taking])


@pytest.mark.parametrize(
    ("start", "inside", "error", "reason"),
    [
        ("runtime", True, SandboxBroken, "was ended from inside: its first process (exited with code|was ended by)"),
        ("runtime", False, SandboxLost, r"has ended; its first process was killed \(SIGKILL\) from outside"),
        ("direct", False, SandboxLost, r"has ended; its first process was killed \(SIGKILL\) from outside"),
    ],
)
async def test_who_ended_a_sandbox_is_said_and_logged(
    kernel_image: Path,
    runtime: Runtime,
    caplog: pytest.LogCaptureFixture,
    start: Start,
    inside: bool,
    error: type[Exception],
    reason: str,
) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image, start=start), runtime) as container:
        ended = asyncio.Event()
        container.on_end(ended.set)
        if inside:
            with contextlib.suppress(SandboxBroken):
                await container.execute(["python3", "-c", END_FROM_INSIDE], timeout_s=30)
        else:
            [number, *_] = (container.folder / state_dir.PID_NAMESPACE_FILE).read_text().split()
            os.kill(int(number), signal.SIGKILL)
            await asyncio.wait_for(ended.wait(), HANG_S)
        with pytest.raises(error, match=reason):
            await container.check()
        await asyncio.wait_for(ended.wait(), HANG_S)
        with pytest.raises(error, match=reason):
            await container.run("true")
        logged = [record.message for record in caplog.records if container.name in record.message]
        assert len(logged) == 1, logged
        assert "has ended early: its first process " in logged[0]


async def test_a_first_process_from_a_prepared_image_cannot_be_ended_from_inside(
    kernel_image: Path, runtime: Runtime
) -> None:
    async with await Container.start(ContainerSpec(image=kernel_image, start="direct"), runtime) as container:
        await container.execute(["python3", "-c", END_FROM_INSIDE], timeout_s=30)
        await container.run("for number in $(seq 64); do kill -$number 1; done")
        await container.check()
        assert (await container.run("echo alive")).stdout == "alive\n"


class MemoryGroup(cgroups.Group):
    """A control group in an ordinary folder."""

    def kill(self) -> None:
        """Nothing is in it."""


@pytest.mark.parametrize(("ooms", "whose"), [(0, "the machine ran out of memory"), (1, "memory: all of 9 MiB used")])
async def test_what_the_kernel_kills_for_the_machines_memory_is_not_the_agents_doing(
    tmp_path: Path, ooms: int, whose: str
) -> None:
    (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax 5\noom {ooms}\noom_kill 1\noom_group_kill 0\n")
    told: list[str] = []
    client: Any = SimpleNamespace(post=lambda message: told.append(message["reason"]))
    box = sandbox.Sandbox("b-1", tmp_path, request_for(memory_mib=9), [client], [], stage=sandbox.SandboxStage.UP)
    box.group = MemoryGroup(tmp_path, frozenset({"memory"}))
    boxes = lifecycle.Sandboxes.__new__(lifecycle.Sandboxes)
    boxes._loop = asyncio.get_running_loop()
    boxes._check_oom_kills(box)
    assert len(told) == 1
    assert whose in told[0]
    assert boxes._lacked_memory(box) is not bool(ooms)

    # A check without ``memory`` ignores that.
    boxes._all = {"b-1": box}
    await boxes.check(client, "b-1", memory=False)
    with contextlib.nullcontext() if ooms else pytest.raises(sandbox.NoSandbox):
        await boxes.check(client, "b-1", memory=True)


async def test_a_program_that_goes_with_its_sandbox_on_its_way_in_is_no_killed_helper(
    image: Path, runtime: Runtime, without: Without
) -> None:
    """The sandbox's end is reported, which attributes the failure."""
    without(
        Off(
            "import os\n"
            "from nemo_gym_prorl.sandbox.supervisor import programs\n"
            "from nemo_gym_prorl.sandbox import signals\n"
            "async def go_with_it(self, program, request, *_):\n"
            "    folder = os.readlink(f'/proc/self/fd/{request.namespaces.process.fd}')\n"
            "    first = int(folder.rpartition('/')[2])\n"
            "    os.kill(first, 9)\n"
            "    while not signals.is_exiting(first):\n"
            "        pass\n"
            "    raise programs.Refused(programs.HELPER_KILLED)\n"
            "programs.Programs._start = go_with_it"
        )
    )
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        with pytest.raises(SandboxLost):
            await container.spawn(["true"])


END_AS_IF_KILLED = """
import glob, os
at = int(open("/proc/1/syscall").read().split()[-1], 16)
with open("/proc/1/mem", "r+b", buffering=0) as memory:
    memory.seek(at)
    memory.write(b"\\xbf\\x89\\0\\0\\0\\xb8\\xe7\\0\\0\\0\\x0f\\x05")
for path in glob.glob("/proc/[0-9]*"):
    number = int(path[6:])
    if number not in (1, os.getpid(), os.getppid()):
        os.kill(number, 9)
"""
"""Makes the first process call ``exit_group(137)`` when its child ends."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="these are instructions of that")
async def test_a_first_process_that_is_made_to_end_as_if_killed_is_the_agents_doing(
    kernel_image: Path, runtime: Runtime
) -> None:
    """Commands with the user id of the first process can write to its memory."""
    spec = ContainerSpec(image=kernel_image, start="runtime", root=False)
    async with await Container.start(spec, runtime) as container:
        ended = asyncio.Event()
        container.on_end(ended.set)
        with contextlib.suppress(SandboxBroken):
            await container.execute(["python3", "-c", END_AS_IF_KILLED], timeout_s=30)
        await asyncio.wait_for(ended.wait(), HANG_S)
        with pytest.raises(SandboxBroken, match="ended from inside"):
            await container.run("true")
