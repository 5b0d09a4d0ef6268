# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What no sandbox can be made of: refused when it is asked for, with what is wrong and the fix; nothing is left."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl import disks
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.validate import fuse_trouble
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor import own_supervisor, state_dir


pytestmark = pytest.mark.sandbox

as_root = pytest.mark.skipif(not is_machine_root(), reason="of root's sandboxes")
as_user = pytest.mark.skipif(is_machine_root(), reason="of an ordinary user's sandboxes")
with_fuse = pytest.mark.skipif(bool(fuse_trouble()), reason=str(fuse_trouble()))
without_fuse = pytest.mark.skipif(not fuse_trouble(), reason="/dev/fuse can be used here")


@pytest.fixture(autouse=True)
def nothing_is_left(state: Path) -> Iterator[None]:
    """Check after each test that no sandbox, helper or control group is left."""
    yield
    assert not any(state.glob("*/b-*"))
    for owner in state.glob("s-*"):
        assert not state_dir.helpers_of(owner)
        assert not any(space.alive for space in state_dir.spaces_of(owner))
        assert not any(group.processes() for group in state_dir.groups_of(owner))


def contents(path: Path) -> bytearray:
    """All of a file, to change."""
    return bytearray(path.read_bytes())


@contextlib.contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Let nothing be made in a folder."""
    mode = folder.stat().st_mode
    folder.chmod(0o500)
    try:
        yield
    finally:
        folder.chmod(mode)


async def refused(image: Path, runtime: Runtime) -> str:
    """The reason why no sandbox is made of an image."""
    with pytest.raises(CallerError) as caught:
        await Container.start(ContainerSpec(image=image), runtime)
    assert caught.value.field == "image"
    assert str(image) in caught.value.reason
    return caught.value.reason


async def test_an_image_that_is_not_there(runtime: Runtime, tmp_path: Path) -> None:
    assert "prorl setup" in await refused(tmp_path / "none", runtime)


async def test_what_is_no_image(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "/bin/sh" in await refused(tmp_path / "folder", runtime)
    for name, content in (("text", b"hello"), ("torn", b"#!/usr/bin/env run-singularity\nnot an image" * 10)):
        (tmp_path / name).write_bytes(content)
        assert "no usable image" in await refused(tmp_path / name, runtime)


async def test_half_a_sif(runtime: Runtime, tiny_sif: Path, tmp_path: Path) -> None:
    whole = contents(tiny_sif)
    half = tmp_path / "half.sif"
    half.write_bytes(whole[: len(whole) // 2])
    assert f"{len(whole) // 2} of {len(whole)} bytes" in await refused(half, runtime)


@with_fuse
async def test_a_damaged_sif(runtime: Runtime, tiny_sif: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sif"
    content = contents(tiny_sif)
    begin = content.index(b"hsqs")
    content[begin : begin + 96] = bytes(96)
    damaged.write_bytes(content)
    with pytest.raises(InfrastructureError, match=r"damaged\.sif.*build it again"):
        await Container.start(ContainerSpec(image=damaged), runtime)


@with_fuse
async def test_a_sif_is_as_good_as_a_folder(runtime: Runtime, tiny_sif: Path) -> None:
    async with await Container.start(ContainerSpec(image=tiny_sif, workdir="/srv/deep"), runtime) as container:
        done = await container.run("pwd; touch /tmp/x /root/x /usr/bin/x && echo written; read line < /dev/fuse")
        assert done.stdout == "/srv/deep\nwritten\n"
        assert "/dev/fuse" in done.stderr, "no device of ours is in it"


@without_fuse
async def test_a_sif_without_fuse(runtime: Runtime, tiny_sif: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"tiny\.sif.*/dev/fuse.*build --sandbox"):
        await Container.start(ContainerSpec(image=tiny_sif), runtime)


@as_user
async def test_an_image_that_cannot_be_read(runtime: Runtime, tiny_root: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "image").symlink_to(tiny_root)
    (closed / "file.sif").touch()
    (closed / "file.sif").chmod(0)
    assert "chmod" in await refused(closed / "file.sif", runtime)
    closed.chmod(0)
    try:
        assert "chmod" in await refused(closed / "image", runtime)
    finally:
        closed.chmod(0o755)


@as_user
async def test_an_image_of_somebody_else(runtime: Runtime) -> None:
    assert "belongs to user 0, not to you" in await refused(Path("/"), runtime)


@as_root
async def test_root_starts_an_image_of_somebody_else(runtime: Runtime, tiny_root: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(tiny_root, theirs, symlinks=True)
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 1001, 1002, follow_symlinks=False)
    async with await Container.start(ContainerSpec(image=theirs), runtime) as container:
        done = await container.run("touch /tmp/x /root/x /usr/bin/x && mkdir /etc/x && echo written")
        assert done.stdout == "written\n", done
    assert not (theirs / "usr/bin/x").exists()


@pytest.fixture
def without_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had not started one yet."""
    monkeypatch.setattr(own_supervisor, "_current", None)


async def start_in(state: Path, image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason why no sandbox can be kept in a folder."""
    monkeypatch.setenv("PRORL_STATE", str(state))
    with pytest.raises(InfrastructureError, match="set PRORL_STATE") as caught:
        await Container.start(ContainerSpec(image=image), runtime)
    assert str(state) in caught.value.reason
    return caught.value.reason


@pytest.mark.usefixtures("without_supervisor")
async def test_a_state_folder_whose_path_is_too_long(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = tmp_path / ("x" * 100)
    assert "107 at most" in await start_in(state, image, runtime, monkeypatch)
    assert not state.exists(), "nor what was made to look at it"


@pytest.mark.usefixtures("without_supervisor")
async def test_a_state_folder_that_is_a_file(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        await start_in(path, image, runtime, monkeypatch)


@pytest.mark.usefixtures("without_supervisor")
async def test_a_state_folder_that_machines_share(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disks, "_SHARED_KINDS", re.compile(disks.kind_under(tmp_path)))
    assert "other machines may share" in await start_in(tmp_path, image, runtime, monkeypatch)


@as_user
@pytest.mark.usefixtures("without_supervisor")
async def test_a_state_folder_of_somebody_else(image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (Path("/proc"), Path(pwd.getpwuid(0).pw_dir, "prorl"), Path("/usr")):
        await start_in(path, image, runtime, monkeypatch)


@as_user
async def test_a_state_folder_that_was_closed_meanwhile(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        refusal = pytest.raises(InfrastructureError, match=r"Permission denied; set PRORL_STATE")
        with closed(Path(container.describe()["supervisor"])), refusal:
            await Container.start(ContainerSpec(image=image), runtime)
        assert (await container.run("echo alive")).stdout == "alive\n"


@as_root
@pytest.mark.usefixtures("without_supervisor")
async def test_a_state_folder_that_roots_sandboxes_cannot_enter(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wall = tmp_path / "wall"
    wall.mkdir(mode=0o700)
    assert "can't enter" in await start_in(wall / "s", image, runtime, monkeypatch)


async def test_no_bash_and_no_python(runtime: Runtime, tiny_root: Path) -> None:
    async with await Container.start(ContainerSpec(image=tiny_root), runtime) as container:
        with pytest.raises(InfrastructureError, match="needs bash in the image"):
            await Shell.start(container)
        with pytest.raises(InfrastructureError, match="needs python3 with IPython in the image"):
            await Kernel.start(container)
        assert (await container.run("echo alive")).stdout == "alive\n"


async def test_no_ipython(container: Container) -> None:
    with pytest.raises(InfrastructureError, match=r"needs python3 with IPython in the image: .*No module"):
        await Kernel.start(container)
