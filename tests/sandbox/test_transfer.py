# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""File transfer: contents, refusals by field, limits and attribution of failures."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.protocol import PutRequest, SandboxRefused
from tests.sandbox.running import HANG_S


pytestmark = pytest.mark.sandbox


def of_size(path: Path, size: int) -> Path:
    path.write_bytes(bytes(size))
    return path


@pytest.mark.usefixtures("way")
async def test_files_go_in_and_come_out_unchanged(container: Container, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "new" / "back"
    for data in (random.Random(0).randbytes(3_000_000), b""):
        source.write_bytes(data)
        source.chmod(0o750)
        await container.files.upload(source, "/data/deep/ä file")
        assert (await container.run("stat -c '%s %a %U' /data/deep/*")).stdout == f"{len(data)} 750 root\n"
        await container.files.download("/data/deep/ä file", back)
        assert back.read_bytes() == data
    longest = tmp_path / ("x" * 255)
    await container.files.download("/etc/hostname", longest)
    assert longest.exists()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd(image: Path, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sandbox and a folder of the host with special files."""
    folder = tmp_path_factory.mktemp("odd")
    of_size(folder / "file", 5)
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    with (folder / "huge").open("wb") as file:
        file.truncate(1 << 40)
    async with await Container.start(ContainerSpec(image=image), runtime) as box:
        await box.run(
            "cd /tmp; mkdir -p folder/x; mkfifo fifo; ln -s loop loop; truncate -s 9G huge; ln -s huge link; "
            "echo x > x; mknod null c 1 3; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'"
        )
        links = "import os; [os.symlink(f'l{number + 1}', f'/tmp/l{number}') for number in range(1, 1500)]"
        assert (await box.execute(["python3", "-c", links], timeout_s=60)).exit_code == 0
        yield box, folder


INTO = ["/tmp/folder", "/tmp/folder/", "/", "/tmp/..", "/tmp/x/below", "/dev", "/" + "x" * 300, "/proc/x", "/sys/x"]
INTO += ["relative", "/with\0nul", "/tmp/l1"]
FROM = ["folder", "fifo", "loop", "null", "socket", "missing", "missing/below", "x" * 300, "huge", "link", "/dev/zero"]
FROM += ["l1", "/proc/self/fd/0", "/proc/1/mem", "/proc/1/environ"]
HOST_SOURCES = [".", "fifo", "loop", "/dev/zero", "x" * 300, "huge", "none"]
HOST_TARGETS = [".", "file/below", "/proc/none/x", "x" * 300]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("source", "target", "field"),
    [
        *(("file", target, "target_path") for target in INTO),
        *((source, "/x", "source_path") for source in HOST_SOURCES),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_what_cannot_go_in_is_refused_by_its_field(odd: Any, source: str, target: str, field: str) -> None:
    box, folder = odd
    with pytest.raises(CallerError) as caught:
        await asyncio.wait_for(box.files.upload(folder / source, target), HANG_S)
    assert caught.value.field == field
    left = await box.run("ls -A /tmp/folder; cat /tmp/x; ls -A / | grep -E '^[.][0-9a-f]{32}'")
    assert left.stdout == "x\nx\n"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("source", "target", "field"),
    [
        *((source, "new", "source_path") for source in FROM),
        *(("x", target, "target_path") for target in HOST_TARGETS),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_what_cannot_come_out_is_refused_by_its_field(odd: Any, source: str, target: str, field: str) -> None:
    box, folder = odd
    before = sorted(folder.iterdir())
    with pytest.raises(CallerError) as caught:
        await asyncio.wait_for(box.files.download(str(Path("/tmp") / source), folder / target), HANG_S)
    assert caught.value.field == field
    assert sorted(folder.iterdir()) == before


async def test_what_is_larger_than_the_sandbox_may_be_is_the_callers(
    image: Path, runtime: Runtime, tmp_path: Path
) -> None:
    large = of_size(tmp_path / "large", 3 << 20)
    async with await Container.start(ContainerSpec(image=image, disk_mib=2), runtime) as container:
        with pytest.raises(CallerError, match="disk_mib is 2; raise disk_mib") as caught:
            await container.files.upload(large, "/tmp/large")
        assert caught.value.field == "source_path"
        with pytest.raises(OSError, match="disk_mib is 2") as too_large:
            await container.files.write_file("/tmp/large", bytes(3 << 20))
        assert too_large.value.errno == errno.EFBIG
        # Longer than the watchdog's interval.
        assert (await container.run("sleep 3; ls /tmp")).stdout == ""
    async with await Container.start(ContainerSpec(image=image, shared_memory_mib=2), runtime) as container:
        with pytest.raises(CallerError, match="no space is left in the file system of /dev/shm") as caught:
            await container.files.upload(large, "/dev/shm/large")
        assert caught.value.field == "target_path"
        assert (await container.run("ls -A /dev/shm")).stdout == ""


async def test_a_machine_without_room_is_nobodys_fault(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_arguments: object, **_details: object) -> None:
        raise SandboxRefused("No space left on device", errno.ENOSPC)

    monkeypatch.setattr(container._supervisor, "ask", full)
    with pytest.raises(InfrastructureError, match="No space left"):
        await container.files.upload(of_size(tmp_path / "file", 5), "/x")
    with pytest.raises(InfrastructureError, match="No space left"):
        await container.files.download("/x", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # noqa: ASYNC240


async def test_a_copy_that_lasts_holds_up_no_command(container: Container) -> None:
    """A copying helper must not inherit the channel of a command that is starting."""
    source, nothing_comes = os.pipe()
    copying = []
    try:
        for _ in range(30):
            running = asyncio.create_task(container.run("true", timeout_s=20))
            copying.append(asyncio.create_task(container.ask(PutRequest(container.name, "/x", 0o644), [source])))
            assert not (await running).timed_out
    finally:
        os.close(nothing_comes)
        await asyncio.gather(*copying)
        os.close(source)


async def test_a_file_of_holes_counts_with_its_size(container: Container, tmp_path: Path) -> None:
    await container.run("truncate -s 2G /tmp/large; truncate -s 10M /tmp/file; printf ab >> /tmp/file")
    with pytest.raises(CallerError, match="more than the limit"):
        await container.files.download("/tmp/large", tmp_path / "large")
    data = await container.files.read_file("/tmp/file", 1 << 30)
    assert data == bytes(10 << 20) + b"ab"
    with pytest.raises(OSError, match="large"):
        await container.files.read_file("/tmp/file", 10 << 20)


@pytest.mark.usefixtures("way")
async def test_a_download_has_no_more_rights_than_a_command(container: Container, tmp_path: Path) -> None:
    await container.run("ln -s /proc/1/environ /tmp/link; echo secret > /tmp/own; chmod 0 /tmp/own")
    for path in ("/proc/1/environ", "/tmp/link"):
        assert (await container.run(f"cat {path}")).stdout == ""
        with pytest.raises(Exception, match=r"Permission denied|No such file"):
            await container.files.download(path, tmp_path / "environ")
    await container.files.download("/tmp/own", tmp_path / "own")
    assert (tmp_path / "own").read_text() == "secret\n"
    await container.files.download("/proc/cpuinfo", tmp_path / "cpuinfo")
    assert (tmp_path / "cpuinfo").read_text()
