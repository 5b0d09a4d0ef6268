# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Life cycle of a sandbox under faults: nothing outlives its owner, and nothing of a live owner is removed.

Real processes and SIGKILL throughout. A table kills parts of a server process that has sandboxes; a state machine
starts, uses, copies, gives up, kills and closes sandboxes of this process in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from nemo_gym_prorl.failures import AgentError, InfrastructureError
from nemo_gym_prorl.sandbox import snapshots
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions import kernel as kernels
from nemo_gym_prorl.sandbox.sessions import shell as shells
from nemo_gym_prorl.sandbox.sessions.bash_channel import BashChannel
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxLost, Start
from tests.sandbox.running import HANG_S, child_pids, gone_within_s, kill_supervisor, open_files, supervisor_pid, until


SERVER = Path(__file__).with_name("server.py")
REPOSITORY = Path(__file__).parents[2]
LONG = bool(os.environ.get("PRORL_TEST_LONG"))

GROUPS = granted.base if (granted := cgroups.probe_delegation()) else None
"""Parent of the sandboxes' control groups; ``None`` without delegation."""

pytestmark = pytest.mark.sandbox


def sandboxes(state: Path) -> list[Path]:
    return list(state.glob("*/b-*"))


class Server:
    """A server process with hostile sandboxes, and the processes and files to look for."""

    def __init__(self, image: Path, sandboxes: int, start: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(image), str(sandboxes), start],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.facts: dict[str, Any] = json.loads(self.line())
        self.folder = Path(self.facts["folder"])
        members = [pid for space in state_dir.pid_namespaces_of(self.folder) for pid in space.members()]
        assert len(self.facts["inits"]) == sandboxes
        assert len(state_dir.helpers_of(self.folder)) == (sandboxes if start == "runtime" else 0)
        living = {pid: state_dir.start_time(pid) for pid in (*members, *state_dir.helpers_of(self.folder))}
        # A process that has ended meanwhile has no start time.
        self.inside = {pid: started for pid, started in living.items() if started is not None}
        assert len(self.inside) > 4 * sandboxes
        assert not GROUPS or self.remains()["groups"]

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def remains(self) -> dict[str, list[Any]]:
        """Return the remaining processes, groups and files."""
        return {
            "inside": [pid for pid, started in self.inside.items() if state_dir.start_time(pid) == started],
            "helpers": state_dir.helpers_of(self.folder),
            "groups": [str(path) for path in GROUPS.glob(f"prorl-{self.folder.name}-*")] if GROUPS else [],
            "files": [str(path) for path in self.folder.glob("*")] if self.folder.exists() else [],
        }

    def wait_until_gone(self, *what: str) -> None:
        deadline = time.monotonic() + gone_within_s()
        while any((remains := self.remains())[name] for name in what):
            assert time.monotonic() < deadline, remains
            time.sleep(0.02)

    def kill(self, victim: str) -> None:
        pids = {
            "server": [self.process.pid],
            "supervisor": [self.facts["supervisor"]],
            "first process": self.facts["inits"][:1],
            "anything inside": self.remains()["inside"][-1:],
        }[victim]
        for pid in pids:
            if pid not in self.inside or state_dir.start_time(pid) == self.inside[pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
        deadline = time.monotonic() + gone_within_s()
        while (self.folder.exists() or any(self.remains().values())) and time.monotonic() < deadline:
            state_dir.sweep(self.folder.parent)
            time.sleep(0.02)
        assert not any(self.remains().values())


@pytest.fixture
def server(image: Path, way: str) -> Iterator[Server]:
    live = Server(image, 2, way)
    yield live
    live.end()


DEATHS = [
    ("server",),
    ("supervisor",),
    ("first process", "supervisor"),
    ("anything inside", "first process", "server"),
    ("supervisor", "server"),
]


@pytest.mark.parametrize("victims", DEATHS, ids=", ".join)
def test_whatever_is_killed_nothing_is_left(server: Server, victims: tuple[str, ...]) -> None:
    """If server and supervisor die at once, the next sweep removes the files (:meth:`Server.end`)."""
    both = {"server", "supervisor"} <= {*victims}
    if both:
        server.process.send_signal(signal.SIGSTOP)
    for victim in victims:
        server.kill(victim)
    if victims == ("supervisor",):
        assert json.loads(server.line()) == ["SandboxLost"] * 2
    if both:
        server.process.wait()
    server.wait_until_gone("inside", "helpers", *([] if both else ["groups", "files"]))


def test_a_terminated_supervisor_cleans_up(server: Server) -> None:
    os.kill(server.facts["supervisor"], signal.SIGTERM)
    server.wait_until_gone("inside", "helpers", "groups", "files")


def test_scratch_folders_last_as_long_as_their_owner(state: Path) -> None:
    code = f"from {state_dir.__name__} import *; one = ScratchFolder(); print(one.path, flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        mine = state_dir.ScratchFolder()
        assert state_dir.sweep(state) == []
        owner.kill()
    assert state_dir.sweep(state) == [folder.parent]
    assert not folder.exists()
    for path, mode in ((state / "scratch", 0o711), (mine.path.parent, 0o711), (mine.path, 0o755)):
        assert path.stat().st_mode & 0o777 == (mode if os.geteuid() == 0 or path == mine.path else 0o700)
    (mine.path / "closed").mkdir(mode=0)
    mine.close()
    assert list((state / "scratch").iterdir()) == []


def test_nothing_of_a_live_owner_is_touched(server: Server, state: Path) -> None:
    assert state_dir.sweep(state) == []
    first, second = server.facts["inits"]
    assert all(state_dir.start_time(pid) == server.inside[pid] for pid in (first, second))
    server.kill("first process")
    deadline = time.monotonic() + gone_within_s()
    while len(list(server.folder.glob("b-*"))) > 1:
        assert time.monotonic() < deadline, server.remains()
        time.sleep(0.02)
    assert state_dir.start_time(first) is None
    assert state_dir.start_time(second), "it was another sandbox's"


# Any order of what can happen to sandboxes of one process


async def usable(box: Container) -> None:
    """Wait until commands are accepted; they are refused while a cancelled snapshot is taken."""
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(InfrastructureError):
                assert (await box.run("echo alive")).stdout == "alive\n"
                return
            await asyncio.sleep(0.05)


BEATS = (
    "(setsid sh -c 'trap \"\" HUP TERM; while :; do echo >> /tmp/beats; sleep 0.01; done' >/dev/null 2>&1 &)"
    "; until [ -s /tmp/beats ]; do sleep 0.01; done"
)


async def ended(box: Container) -> None:
    while box.alive:
        await asyncio.sleep(0.01)


class Lives(RuleBasedStateMachine):
    """Sandboxes with their expected state: alive or ended."""

    image: Path
    state: Path

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.boxes: list[Container] = []

    def do[T](self, work: Awaitable[T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    @property
    def alive(self) -> list[Container]:
        return [box for box in self.boxes if box.alive]

    @precondition(lambda self: len(self.boxes) < 4)
    @rule(start=st.sampled_from(["direct", "direct", "runtime"]))
    def start(self, start: Start) -> None:
        box = self.do(Container.start(ContainerSpec(image=self.image, start=start)))
        self.do(box.run(BEATS))
        self.boxes.append(box)

    @rule(delay_s=st.sampled_from([0.0, 0.01, 0.04]))
    def give_a_start_up(self, delay_s: float) -> None:
        async def give_up() -> None:
            starting = asyncio.create_task(Container.start(ContainerSpec(image=self.image)))
            await asyncio.sleep(delay_s)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).close()  # on a busy machine it may be there by now

        before = {*sandboxes(self.state)}  # a killed one may still be removed
        self.do(give_up())
        assert {*sandboxes(self.state)} <= before

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        box = data.draw(st.sampled_from(self.alive))
        done = self.do(box.run("kill -9 -1; kill -15 1; rm -f /tmp/beats; " + BEATS + "; echo alive"))
        assert done.stdout == "alive\n", "killing all that it can leaves a sandbox usable"

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), delay_s=st.sampled_from([0.0, 0.002, 0.02]), busy=st.booleans())
    def give_a_command_up(self, data: st.DataObject, delay_s: float, busy: bool) -> None:
        box = data.draw(st.sampled_from(self.alive))

        async def give_up() -> None:
            running = asyncio.create_task(box.run("exec sleep 5432"))
            await asyncio.sleep(delay_s)
            if busy:
                os.kill(supervisor_pid(), signal.SIGSTOP)
            running.cancel()
            await asyncio.wait([running])
            if busy:
                os.kill(supervisor_pid(), signal.SIGCONT)
            while (await box.run("ps -A -o args= | grep '^sleep 5432'")).stdout:
                await asyncio.sleep(0.05)

        self.do(give_up())

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), given_up=st.booleans())
    def take_a_snapshot(self, data: st.DataObject, given_up: bool) -> None:
        box = data.draw(st.sampled_from(self.alive))
        beats = box.folder / "overlay/upper/tmp/beats"

        async def take() -> None:
            taking = asyncio.create_task(snapshots.take(box, self.state / "taken", "one"))
            if given_up:
                await asyncio.sleep(0.002)
                taking.cancel()
            await asyncio.wait([taking])
            await usable(box)
            before = beats.stat().st_size
            while beats.stat().st_size == before:
                await asyncio.sleep(0.02)

        self.do(take())

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def kill_the_first_process(self, data: st.DataObject) -> None:
        box = data.draw(st.sampled_from(self.alive))
        running = self.begin(box)
        [number, *_rest] = (box.folder / state_dir.PID_NAMESPACE_FILE).read_text().split()
        os.kill(int(number), signal.SIGKILL)
        with pytest.raises(SandboxLost):
            self.do(running)
        self.do(ended(box))

    @precondition(lambda self: self.alive)
    @rule()
    def kill_the_supervisor(self) -> None:
        boxes, owner = self.alive, self.alive[0].folder.parent
        running = [self.begin(box) for box in boxes]
        kill_supervisor()
        for task in running:
            with pytest.raises(SandboxLost):
                self.do(task)
        self.do(self.until_gone(owner))
        assert not any(box.alive for box in boxes)

    def begin(self, box: Container) -> Awaitable[Any]:
        async def begin() -> asyncio.Task[Any]:
            return asyncio.create_task(box.run("exec sleep 1000"))

        return self.runner.run(begin())

    async def until_gone(self, owner: Path) -> None:
        while await asyncio.to_thread(owner.exists):
            await asyncio.sleep(0.02)

    @precondition(lambda self: self.boxes)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        box = data.draw(st.sampled_from(self.boxes))
        self.do(box.close())
        self.do(box.close())
        assert not box.folder.exists()
        with pytest.raises(SandboxLost):
            self.do(box.run("true"))
        self.boxes.remove(box)

    def teardown(self) -> None:
        for box in self.boxes:
            self.do(box.close())
        self.runner.close()
        assert sandboxes(self.state) == []


def test_no_order_of_faults_leaves_anything_or_hangs(image: Path, runtime: Runtime, state: Path) -> None:
    runtime.activate()
    machine = type("Lives", (Lives,), {"image": image, "state": state})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100 if LONG else 4,
            stateful_step_count=12,
            # No shrinking: examples depend on timing.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


# Faults at one moment that random faults rarely hit


async def test_a_shell_that_is_given_up_while_it_starts_is_ended(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    await container.run("true")
    connect = BashChannel.connect

    def give_up(self: BashChannel, pid: int, terminal: int) -> None:
        connect(self, pid, terminal)
        starting.cancel()

    monkeypatch.setattr(BashChannel, "connect", give_up)
    files = open_files()
    starting = asyncio.create_task(Shell.start(container))
    await asyncio.wait([starting])
    assert starting.cancelled()
    async with asyncio.timeout(HANG_S):
        while (await container.run("pgrep -x bash")).exit_code == 0:
            await asyncio.sleep(0.02)
    assert open_files() == files


async def test_what_went_with_its_supervisor_is_closed_without_complaint(kernel_image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=kernel_image), runtime)
    shell, kernel = await Shell.start(container), await Kernel.start(container)
    kill_supervisor()
    assert container.alive, "nobody has told yet"
    await kernel.close()
    await shell.close()
    await container.close()


async def test_create_use_destroy_cycles_leave_no_descriptor_process_or_file(
    image: Path, runtime: Runtime, state: Path
) -> None:
    async def cycle() -> None:
        async with await Container.start(ContainerSpec(image=image, ttl_s=3600.0), runtime) as container:
            async with await Shell.start(container) as shell:
                assert (await shell.run("echo hello > /tmp/x; cat /tmp/x")).output == "hello\n"
            await container.run("mkdir -p /tmp/a/b && touch /tmp/a/b/c && chmod 000 /tmp/a/b /tmp/a")

    def counts() -> tuple[int, int, int, int]:
        server = supervisor_pid()
        return open_files(), open_files(server), len(child_pids(server)), len(list(state.rglob("*")))

    await cycle()
    before = counts()
    for _ in range(5):
        await cycle()
    await until(lambda: counts() == before)


# Commands end at every stage of their start, whatever sandboxed processes do


FREEZE = "(setsid sh -c 'while :; do kill -STOP -1; done' >/dev/null 2>&1 &)"
"""Stops every new process."""


@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_a_time_limit_is_kept_where_newcomers_are_stopped(image: Path, runtime: Runtime, start: Start) -> None:
    async with await Container.start(ContainerSpec(image=image, start=start), runtime) as container:
        await container.run(FREEZE, timeout_s=1.0)  # it may stop the shell that starts it, too
        # Above the sum of the time limits; a wait for a stopped process would not end.
        async with asyncio.timeout(HANG_S):
            done = [await container.run("exec sleep 4321", timeout_s=0.3) for _ in range(5)]
        assert [(one.timed_out, one.exit_code) for one in done] == [(True, 137)] * 5
        # Stopped joiners do not delay the sandbox's end.
        async with asyncio.timeout(HANG_S):
            await container.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_cancelled_command_never_runs_on(container: Container, busy: bool) -> None:
    """Also if the supervisor receives the cancellation and the start at once."""
    rng = random.Random(0)
    for number in range(30):
        task = asyncio.create_task(container.run(f"exec sleep 54{number:02}"))
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.002, 0.004, 0.008, 0.02]))
        if busy:
            os.kill(supervisor_pid(), signal.SIGSTOP)
            await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.wait([task])
        os.kill(supervisor_pid(), signal.SIGCONT)
    listed = "ps -A -o args= | grep '^sleep 54'"
    async with asyncio.timeout(60):
        while (await container.run(listed)).stdout:
            await asyncio.sleep(0.05)
    for _ in range(5):
        assert (await container.run(listed)).stdout == "", "for a while nothing comes"
        await asyncio.sleep(0.05)


async def test_other_signals_reach_the_whole_group(container: Container) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    try:
        process = await container.spawn(["/bin/sh", "-c", "sleep 1000 & wait"], [null] * 3)
    finally:
        os.close(null)
    await container.signal(process, signal.SIGTERM)
    async with asyncio.timeout(HANG_S):
        assert await process.ended == -signal.SIGTERM
    await container.signal(process, signal.SIGTERM)


TRACER = """
import ctypes, sys, time
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0
open("/tmp/traced", "w").close()
time.sleep(1000)
"""
"""While this tracer lives and does not wait, the kernel reports no end of the process that it seized."""


async def trace(container: Container, program: str) -> None:
    """Have a sandboxed process trace the program with a name, which needs no right."""
    start = f"setsid python3 -c '{TRACER}' $(pgrep -n {program})"
    await container.run(f"({start} >/dev/null 2>/tmp/why &) ; until [ -e /tmp/traced ]; do :; done", timeout_s=20)


@pytest.mark.parametrize("act", ["close", "restart", "time limit"])
async def test_a_shell_whose_end_is_not_told_is_given_up(
    kernel_image: Path, runtime: Runtime, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shells, "ENDING_S", 0.5)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        shell = await Shell.start(container)
        await trace(container, "bash")
        async with asyncio.timeout(HANG_S):
            if act == "time limit":
                action = await shell.run("trap '' INT; while :; do :; done", timeout_s=0.5)
                assert (action.timed_out, action.exited) == (True, True)
                with pytest.raises(AgentError):
                    await shell.run("true")
            else:
                await getattr(shell, act)()
            await shell.restart()
            assert (await shell.run("echo new")).output == "new\n"


async def test_a_kernel_whose_end_is_not_told_is_given_up(
    kernel_image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "INTERRUPT_GRACE_S", 0.5)
    async with await Container.start(ContainerSpec(image=kernel_image), runtime) as container:
        kernel = await Kernel.start(container)
        await trace(container, "python3")
        async with asyncio.timeout(HANG_S):
            stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
            cell = await kernel.run(stubborn, timeout_s=0.5)
            assert (cell.timed_out, cell.died) == (True, True)
            with pytest.raises(AgentError):
                await kernel.run("1")
            await kernel.restart()
            assert (await kernel.run("1")).data == [{"text/plain": "1"}]
