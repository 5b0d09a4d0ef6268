# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Binds that can't be mounted: refused before anything is made, by either way, with the fix."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.binds import checked
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start


pytestmark = pytest.mark.sandbox

WAYS: tuple[Start, ...] = ("direct", "runtime")


@pytest.fixture
def host() -> Iterator[Path]:
    """A folder of the host, with a file and a folder in it, that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="prorl-b-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "file").write_text("of the host\n")
        (folder / "folder").mkdir()
        (folder / "folder" / "deep").touch()
        (folder / "with,comma").mkdir()
        (folder / "dangling").symlink_to("nowhere")
        yield folder


@pytest.mark.parametrize("start", WAYS)
@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        ("{host}/none:/mnt", "there is no {host}/none"),
        ("{host}/dangling:/mnt", "there is no {host}/dangling"),
        ("{host}/file/below:/mnt", "Not a directory"),
        ("{host}/file:/home", "/home is a folder in the image.*name /home/file"),
        ("{host}/folder:/etc/os-release", "/etc/os-release is a file in the image"),
        ("{host}/folder:/etc/fstab-of-mine/../..", "must not have '..'"),
        ("{host}/folder:/usr/lib/os-release/x", "/usr/lib/os-release is no folder in the image"),
        ("/etc:/etc", "/etc has files that are made for each sandbox"),
        ("{host}/file:/etc/hosts", "/etc/hosts has files that are made"),
        ("{host}/file:/etc/passwd", "/etc/passwd has files that are made"),
        ("{host}/folder:/", "would hide the image"),
        ("{host}/folder://.//", "would hide the image"),
        ("{host}/folder:/proc", "/proc is the sandbox's own"),
        ("{host}/folder:/proc/1/root/x", "/proc is the sandbox's own"),
        ("{host}/file:/dev/null", "/dev is the sandbox's own"),
        ("{host}/folder:/dev/shm", "/dev is the sandbox's own"),
        ("{host}/folder:/sys/fs/cgroup", "/sys is the sandbox's own"),
        ("{host}/folder:/usr", "would hide the image's /usr/bin"),
        ("{host}/with,comma:/mnt", "has a comma"),
        ("{host}/folder:relative", "is not HOST:INSIDE"),
        ("{host}/folder:/mnt:rx", "is not HOST:INSIDE"),
    ],
)
async def test_a_bind_that_cannot_be_mounted(
    image: Path, runtime: Runtime, state: Path, host: Path, start: Start, bind: str, reason: str
) -> None:
    with pytest.raises(CallerError, match=reason.format(host=host)) as caught:
        await Container.start(ContainerSpec(image=image, start=start, binds=[bind.format(host=host)]), runtime)
    assert caught.value.field == "binds"
    assert bind.format(host=host) in caught.value.reason
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


@pytest.mark.parametrize("start", WAYS)
async def test_two_in_one_place(image: Path, runtime: Runtime, host: Path, start: Start) -> None:
    binds = [f"{host}/folder:/mnt", f"{host}:/mnt/"]
    with pytest.raises(CallerError, match=r"is to be seen where .* is") as caught:
        await Container.start(ContainerSpec(image=image, start=start, binds=binds), runtime)
    assert caught.value.field == "binds"
    for second, reason in (
        (f"{host}/file:/mnt/none", "there is no /none in .*make it first"),
        (f"{host}/folder:/mnt/deep", "/mnt/deep is a file in"),
        (f"{host}/file:/mnt/deep/er", "/deep is no folder in"),
    ):
        with pytest.raises(CallerError, match=reason):
            await Container.start(ContainerSpec(image=image, start=start, binds=[binds[0], second]), runtime)
    hiding = [f"{host}/file:/mnt/deep", binds[0]]
    with pytest.raises(CallerError, match=r"would hide .*name that after this"):
        await Container.start(ContainerSpec(image=image, start=start, binds=hiding), runtime)


@pytest.mark.skipif(not is_machine_root(), reason="of root's sandboxes")
@pytest.mark.parametrize("start", WAYS)
async def test_what_roots_sandboxes_cannot_get_to(image: Path, runtime: Runtime, host: Path, start: Start) -> None:
    os.chmod(host, stat.S_IRWXU)  # noqa: PTH101
    with pytest.raises(CallerError, match=f"can't enter {host}: chmod o\\+x") as caught:
        await Container.start(ContainerSpec(image=image, start=start, binds=[f"{host}/folder:/mnt"]), runtime)
    assert caught.value.field == "binds"


@pytest.mark.parametrize("start", WAYS)
async def test_what_can_be_bound_is(image: Path, runtime: Runtime, host: Path, start: Start) -> None:
    with socket.socket(socket.AF_UNIX) as service, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.chmod(memory, 0o755)  # noqa: PTH101
        service.bind(str(host / "socket"))
        binds = [
            f"{host}/file:/etc/os-release:ro",
            f"{host}/file:/made/for/it",
            f"{host}/folder:/mnt",
            f"{host}/file:/mnt/deep",
            f"{host}/socket:/opt/socket",
            f"{host}:/var/lock",
            f"{memory}:/mnt of/memory",
        ]
        spec = ContainerSpec(image=image, start=start, binds=binds)
        async with await Container.start(spec, runtime) as container:
            look = "cat /etc/os-release /made/for/it /mnt/deep; test -S /opt/socket && ls /var/lock/file"
            assert (await container.run(look)).stdout == "of the host\n" * 3 + "/var/lock/file\n"


def test_links_of_an_image_are_followed_inside_of_it(tmp_path: Path, host: Path) -> None:
    image = tmp_path / "image"
    for folder in ("bin", "etc", "usr"):
        (image / folder).mkdir(parents=True)
    for name, target in {"p": "/proc", "r": "../../..", "l1": "l2", "l2": "l1", "conf": "/etc", "out": "/usr"}.items():
        (image / name).symlink_to(target)
    for bind, reason in (
        ("/p/x", "/proc is"),
        ("/r", "hide the image"),
        ("/conf", "made for each"),
        ("/p", "/proc"),
        ("/l1", "leads nowhere"),
    ):
        with pytest.raises(CallerError, match=reason):
            checked([f"{host}/folder:{bind}"], tmp_path / "state", image)
    for fine in ("/out/x", "/l3", "/usr"):
        assert checked([f"{host}/folder:{fine}"], tmp_path / "state", image)
