# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Nothing outlives its owner, whoever is killed; nothing of a live owner is touched. Real processes, SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor import lifecycle, own_supervisor, sandbox, state_dir
from nemo_gym_prorl.sandbox.supervisor.client import SandboxLost
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree
from tests.sandbox.requests import request_for


SERVER = Path(__file__).with_name("server.py")
REPOSITORY = Path(__file__).parents[2]


def gone_within_s() -> float:
    """Invariant 4 of the architecture: five seconds, of a machine's time that nobody else has."""
    return 5.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


GROUPS = granted.base if (granted := cgroups.delegation()) else None
"""Where sandboxes get control groups, if they can have any."""

pytestmark = pytest.mark.sandbox


class Server:
    """A server process with sandboxes, and what is known about them."""

    def __init__(self, image: Path, sandboxes: int, start: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(image), str(sandboxes), start],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.facts: dict[str, Any] = json.loads(self.line())
        self.folder = Path(self.facts["folder"])
        members = [pid for space in state_dir.spaces_of(self.folder) for pid in space.members()]
        assert len(self.facts["inits"]) == sandboxes
        assert len(state_dir.helpers_of(self.folder)) == (sandboxes if start == "runtime" else 0)
        living = {pid: state_dir.start_time(pid) for pid in (*members, *state_dir.helpers_of(self.folder))}
        # One that has ended meanwhile has no time, as it will have none later.
        self.inside = {pid: started for pid, started in living.items() if started is not None}
        assert len(self.inside) > 4 * sandboxes
        assert not GROUPS or self.remains()["groups"]

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def remains(self) -> dict[str, object]:
        """What is still there; empty values mean that nothing is."""
        return {
            "inside": [pid for pid, started in self.inside.items() if state_dir.start_time(pid) == started],
            "helpers": state_dir.helpers_of(self.folder),
            "groups": [str(path) for path in GROUPS.glob(f"prorl-{self.folder.name}-*")] if GROUPS else [],
            "files": [str(path) for path in self.folder.glob("*")] if self.folder.exists() else [],
        }

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + gone_within_s()
        while any((remains := self.remains()).values()):
            assert time.monotonic() < deadline, remains
            time.sleep(0.02)

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


@pytest.fixture(params=["direct", "runtime"])
def server(image: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    live = Server(image, 2, request.param)
    yield live
    live.end()


def test_a_killed_server_leaves_nothing(server: Server) -> None:
    server.process.kill()
    server.wait_until_gone()
    assert not server.folder.exists()


def test_a_killed_supervisor_leaves_nothing_and_its_sandboxes_end_as_lost(server: Server) -> None:
    os.kill(server.facts["supervisor"], signal.SIGKILL)
    assert json.loads(server.line()) == ["SandboxLost"] * 2
    server.wait_until_gone()


def test_server_and_supervisor_killed_together_leave_no_process_and_the_next_sweep_takes_the_files(
    server: Server,
) -> None:
    server.process.send_signal(signal.SIGSTOP)
    os.kill(server.facts["supervisor"], signal.SIGKILL)
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + gone_within_s()
    while (remains := server.remains())["inside"] or remains["helpers"]:
        assert time.monotonic() < deadline, remains
        time.sleep(0.02)
    server.end()


def test_a_terminated_supervisor_cleans_up(server: Server) -> None:
    os.kill(server.facts["supervisor"], signal.SIGTERM)
    server.wait_until_gone()


def test_a_folder_that_somebody_has_cleared_away_is_no_error_at_the_end(state: Path) -> None:
    folder, lock = state_dir.take(state)
    remove_tree(folder)
    state_dir.clear(folder)
    os.close(lock)


def test_a_sweep_touches_nothing_of_a_live_owner(server: Server, state: Path) -> None:
    assert state_dir.sweep(state) == []
    # Others come and go by themselves.
    assert all(state_dir.start_time(pid) == server.inside[pid] for pid in server.facts["inits"])
    assert len(list(server.folder.glob("b-*"))) == len(server.facts["inits"])


def test_a_killed_first_process_ends_only_its_own_sandbox(server: Server) -> None:
    first, second = server.facts["inits"]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + gone_within_s()
    while len(list(server.folder.glob("b-*"))) > 1:
        assert time.monotonic() < deadline, server.remains()
        time.sleep(0.02)
    assert state_dir.start_time(first) is None
    assert state_dir.start_time(second)


@settings(max_examples=20 if os.environ.get("PRORL_TEST_LONG") else 2, suppress_health_check=list(HealthCheck))
@given(
    start=st.sampled_from(["direct", "runtime"]),
    victims=st.lists(st.sampled_from(["server", "supervisor", "init", "anything"]), min_size=1, max_size=3),
    pause=st.floats(0, 0.05),
)
def test_whatever_is_killed_nothing_is_left(image: Path, start: str, victims: list[str], pause: float) -> None:
    server = Server(image, 2, start)
    try:
        for victim in [*victims, "server"]:
            inside = server.remains()["inside"]
            assert isinstance(inside, list)
            numbers = {
                "server": [server.process.pid],
                "supervisor": [server.facts["supervisor"]],
                "init": server.facts["inits"][:1],
                "anything": inside[-1:],
            }[victim]
            for number in numbers:
                if victim in ("server", "supervisor") or number in inside:
                    try:
                        os.kill(number, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            time.sleep(pause)
        server.process.wait()
        deadline = time.monotonic() + gone_within_s()
        while (remains := server.remains())["inside"] or remains["helpers"]:
            assert time.monotonic() < deadline, remains
            time.sleep(0.02)
    finally:
        server.end()


async def test_a_killed_shell_is_reported_and_can_be_restarted(shell: Shell, container: Container) -> None:
    action = await shell.run("kill -9 $$")
    assert action.exited
    assert action.exit_code == 137
    with pytest.raises(SandboxLost):
        await shell.run("true")
    await shell.restart()
    assert (await shell.run("echo again")).output == "again\n"


async def test_killing_everything_inside_leaves_the_sandbox_usable(container: Container) -> None:
    assert (await container.run("kill -9 -1; echo alive")).stdout == "alive\n"
    assert (await container.run("kill -9 1; kill -15 1; echo alive")).stdout == "alive\n"
    assert (await container.run("echo still")).stdout == "still\n"


async def test_teardown_ends_daemons_and_leaves_no_file(image: Path, runtime: Runtime, state: Path) -> None:
    container = await Container.start(ContainerSpec(image=image), runtime)
    await container.run("(setsid sh -c 'trap \"\" TERM HUP; sleep 1000' >/dev/null 2>&1 &)")
    await container.run("mkdir -p /tmp/a/b && touch /tmp/a/b/c && chmod 000 /tmp/a/b /tmp/a")
    folder, space = found(state, container)
    async with asyncio.timeout(60):
        while len(space.members()) < 3:
            await asyncio.sleep(0.05)
    inside = {pid: state_dir.start_time(pid) for pid in space.members()}
    await container.close()
    assert [pid for pid, started in inside.items() if state_dir.start_time(pid) == started] == []
    assert not folder.exists()
    await container.close()
    with pytest.raises(SandboxLost):
        await container.run("true")


async def test_what_went_with_its_supervisor_is_closed_without_complaint(kernel_image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=kernel_image), runtime)
    shell, kernel = await Shell.start(container), await Kernel.start(container)
    os.kill(_supervisor(), signal.SIGKILL)
    assert container.alive, "nobody has told yet"
    await kernel.close()
    await shell.close()
    await container.close()


async def test_cancelling_a_start_leaves_nothing(image: Path, runtime: Runtime, state: Path) -> None:
    for delay in (0.0, 0.01, 0.04):
        task = asyncio.create_task(Container.start(ContainerSpec(image=image), runtime))
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            # On a busy machine it may be there by now.
            await (await task).close()
        assert sandboxes(state) == []


async def test_create_use_destroy_cycles_leave_no_descriptor_process_or_file(
    image: Path, runtime: Runtime, state: Path
) -> None:
    async def cycle() -> None:
        async with await Container.start(ContainerSpec(image=image), runtime) as container:
            async with await Shell.start(container) as shell:
                assert (await shell.run("echo hello > /tmp/x; cat /tmp/x")).output == "hello\n"
            assert (await container.run("cat /tmp/x")).stdout == "hello\n"

    def counts() -> tuple[int, int, int]:
        children = sum(1 for pid in state_dir.process_ids() if _parent(pid) == _supervisor())
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), children, len(list(state.rglob("*")))

    await cycle()
    before = counts()
    for _ in range(5):
        await cycle()
    assert counts() == before


def found(state: Path, container: Container) -> tuple[Path, state_dir.Space]:
    """A sandbox's folder and its PID namespace."""
    (folder,) = state.glob(f"*/{container.name}")
    (space,) = [space for space in state_dir.spaces_of(folder.parent) if (folder / state_dir.SPACE_FILE).exists()]
    return folder, space


def sandboxes(state: Path) -> list[Path]:
    """The folders of all sandboxes."""
    return list(state.glob("*/b-*"))


def _supervisor() -> int:
    assert own_supervisor._current
    return own_supervisor._current.popen.pid


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.parametrize("fails", ["looking", "telling"])
async def test_an_end_goes_on_whatever_fails_at_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Others have their turn, and it is tried again until nothing is left, where there is no room for a note, say."""
    box = sandbox.Sandbox("b-1", tmp_path, request_for(), [], [], stage=sandbox.Stage.UP)
    box.created.set()
    box.space = Mock(init=1, alive=False)
    boxes = lifecycle.Sandboxes.__new__(lifecycle.Sandboxes)
    boxes._loop, boxes._all, boxes._inits = asyncio.get_running_loop(), {"b-1": box}, {}
    boxes._watchdog, boxes._launcher, boxes.on_gone = Mock(), AsyncMock(), []
    failing = Mock(side_effect=OSError(errno.ENOSPC, "full"))
    if fails == "looking":
        monkeypatch.setattr(lifecycle, "look_for_first", failing)
    else:
        boxes._watchdog.tell = failing
    boxes._close(box)
    failing.assert_called_once()
    assert not boxes._all
