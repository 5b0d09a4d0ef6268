# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox's files are removed, whatever an agent leaves on its disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import launcher
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree
from tests.sandbox.running import HANG_S
from tests.sandbox.without import Off, Without


def make_deep(folder: Path, depth: int, name: str) -> None:
    """Make nested folders, deeper than the longest path."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    try:
        for _ in range(depth):
            Path(name).mkdir()
            os.chdir(name)
        Path("file").touch()
    finally:
        os.fchdir(before)
        os.close(before)


@pytest.mark.parametrize(("depth", "name"), [(2100, "d"), (100, "x" * 255)])
def test_deeper_than_any_path_is_long(tmp_path: Path, depth: int, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make_deep(folder, depth, name)
    remove_tree(folder)
    assert not folder.exists()


def test_links_are_not_followed_and_closed_folders_are_opened(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "closed" / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "link").symlink_to(outside)
    (folder / "closed" / "inner" / "file").touch()
    for path in (folder / "closed" / "inner", folder / "closed", folder):
        path.chmod(0)
    remove_tree(folder)
    assert not folder.exists()
    assert (outside / "kept").exists()
    remove_tree(folder)


MANY = 10_000


@pytest.mark.parametrize("swapped", ["a", "a/b"])
def test_what_becomes_a_link_meanwhile_is_not_followed(tmp_path: Path, swapped: str) -> None:
    """A sandbox with an open folder can replace it or a parent by a link at any step of its removal."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for root in (folder / "a/b", outside / "b", outside):
        root.mkdir(parents=True, exist_ok=True)
        (root / "0").touch()
        for number in range(1, MANY if root.is_relative_to(folder) else 100):
            os.link(root / "0", root / str(number))  # hard links are faster to make than files
    before = sorted(outside.rglob("*"))
    untouched = (folder / "a/b").stat().st_mtime_ns
    with subprocess.Popen([launcher.ERASER, folder], executable=launcher.launcher_path()) as eraser:
        while (folder / "a/b").stat().st_mtime_ns == untouched:
            time.sleep(0.0001)
        eraser.send_signal(signal.SIGSTOP)
        assert count_files(str(folder / "a/b"))
        (folder / swapped).rename(tmp_path / "away")
        (folder / swapped).symlink_to(outside)
        eraser.send_signal(signal.SIGCONT)
    assert sorted(outside.rglob("*")) == before
    assert not folder.exists()


HAND_OVER = """
import os, socket
os.umask(0)
os.mkdir('/trap')
for number in range(20):
    os.mkdir(f'/trap/{number}')
    open(f'/trap/{number}/0', 'w').close()
    for name in range(1, 300):
        os.link(f'/trap/{number}/0', f'/trap/{number}/{name}')
line = socket.socket(socket.AF_UNIX)
line.connect('/meet/socket')
socket.send_fds(line, [b'here'], [os.open('/trap', os.O_RDONLY)])
"""
SWAP = """
import os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind('/meet/socket')
door.listen()
open('/meet/ready', 'w').close()
trap = socket.recv_fds(door.accept()[0], 16, 1)[1][0]
open('/meet/taken', 'w').close()
left = [str(number) for number in range(20)]
while left:
    for name in left[:]:
        try:
            os.rename(name, 'away', src_dir_fd=trap, dst_dir_fd=trap)
            os.symlink(sys.argv[1], name, dir_fd=trap)
            os.unlink(name, dir_fd=trap)
            os.rename('away', name, src_dir_fd=trap, dst_dir_fd=trap)
        except OSError:
            left.remove(name)
"""


FILL = """
import itertools, os, socket
door = socket.socket(socket.AF_UNIX)
door.bind('/meet/socket')
door.listen()
open('/meet/ready', 'w').close()
trap = socket.recv_fds(door.accept()[0], 16, 1)[1][0]
open('/meet/taken', 'w').close()
os.fork()
for number in itertools.cycle(range(200)):
    try:
        os.mkdir(f'{os.getpid()} {number}', dir_fd=trap)
    except FileExistsError:
        pass
    except OSError:
        break
"""


def make_files(folder: str) -> None:
    for name in range(300):
        Path(folder, str(name)).touch()


def count_files(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


@pytest.fixture
def meeting_place() -> Iterator[str]:
    """A folder of the host that both sandboxes have bound."""
    with tempfile.TemporaryDirectory(prefix="prorl-h-", dir="/tmp") as folder:
        if is_machine_root():
            os.chown(folder, 4711, 4711)
        yield folder


@pytest.mark.sandbox
async def test_an_accomplice_has_nothing_of_the_host_erased(
    image: Path, runtime: Runtime, way: str, meeting_place: str
) -> None:
    """A sandbox that was given an open folder of an ending sandbox replaces its entries by links to the host."""
    with tempfile.TemporaryDirectory(prefix="prorl-h-", dir="/tmp") as victim:
        make_files(victim)
        spec = ContainerSpec(image=image, binds=(f"{meeting_place}:/meet",))
        async with await Container.start(spec, runtime) as other, await Container.start(spec, runtime) as ends:
            swapping = asyncio.create_task(other.run(f"python3 -c {quote(SWAP)} {victim}", timeout_s=120))
            await ends.run("until [ -e /meet/ready ]; do sleep 0.05; done", timeout_s=60)
            handed = await ends.run(f"python3 -c {quote(HAND_OVER)}", timeout_s=60)
            assert handed.exit_code == 0, handed.stderr
            await ends.run("until [ -e /meet/taken ]; do sleep 0.05; done", timeout_s=60)
            with contextlib.suppress(InfrastructureError):
                await ends.close()
            assert count_files(victim) == 300
            await swapping


@pytest.mark.sandbox
@pytest.mark.skipif(not is_machine_root(), reason="an ordinary user's sandboxes are all the same owner's")
async def test_an_accomplice_holds_up_no_end(image: Path, runtime: Runtime, meeting_place: str) -> None:
    """A sandbox that was given an open folder of an ending sandbox can't add entries, which no limit would count."""
    spec = ContainerSpec(image=image, binds=(f"{meeting_place}:/meet",))
    async with await Container.start(spec, runtime) as other, await Container.start(spec, runtime) as ends:
        filling = asyncio.create_task(other.run(f"python3 -c {quote(FILL)}", timeout_s=60))
        await ends.run("until [ -e /meet/ready ]; do sleep 0.05; done", timeout_s=60)
        handed = await ends.run(f"python3 -c {quote(HAND_OVER)}", timeout_s=60)
        assert handed.exit_code == 0, handed.stderr
        await ends.run("until [ -e /meet/taken ]; do sleep 0.05; done", timeout_s=60)
        await asyncio.wait_for(ends.close(), HANG_S)
        # The accomplice may continue with names that only its own mount shows.
        filling.cancel()
        await asyncio.wait([filling])


async def test_who_closes_a_sandbox_is_told_that_its_files_do_not_go(
    image: Path, runtime: Runtime, without: Without, tmp_path: Path
) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    without(
        Off(
            "from nemo_gym_prorl.sandbox.supervisor import lifecycle\n"
            "delete = lifecycle.Sandboxes._delete\n"
            "async def kept(self, sandbox):\n"
            f"    if os.path.exists({str(obstacle)!r}):\n"
            "        raise lifecycle.Refused({'error': 'not empty'})\n"
            "    await delete(self, sandbox)\n"
            "lifecycle.Sandboxes._delete = kept"
        )
    )
    container = await Container.start(ContainerSpec(image=image), runtime)
    with pytest.raises(InfrastructureError, match="not empty"):
        await asyncio.wait_for(container.close(), HANG_S)
    obstacle.unlink()
    await container.close()
    assert not container.folder.exists()
