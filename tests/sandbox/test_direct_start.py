# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that the launcher creates: variables from the runtime, contents, and the fallback to the runtime."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import creation, state_dir
from tests.sandbox.requests import request_for
from tests.sandbox.running import open_files, until
from tests.sandbox.without import Off, Without


pytestmark = pytest.mark.sandbox


@pytest.fixture
def other_image(tiny_root: Path, tmp_path: Path) -> Path:
    """An image of this test's own, whose script sets variables."""
    copy = tmp_path / "image"
    shutil.copytree(tiny_root, copy, symlinks=True)
    scripts = copy / ".singularity.d" / "env"
    scripts.mkdir(parents=True, exist_ok=True)
    (scripts / "95-own.sh").write_text('export OF_THE_IMAGE="it\'s\n$((40 + 2))"\n')
    return copy


async def test_both_ways_give_the_same_variables(other_image: Path, runtime: Runtime) -> None:
    found = []
    for start in ("direct", "runtime"):
        spec = ContainerSpec(image=other_image, start=start)  # type: ignore[arg-type]
        async with await Container.start(spec, runtime) as container:
            assert container.start_method == start
            found.append(container.environment)
    assert found[0] == found[1]
    assert found[0]["OF_THE_IMAGE"] == "it's\n42"


async def test_the_runtime_is_asked_once_until_the_image_changes(other_image: Path, runtime: Runtime) -> None:
    """The image's script sets another value each time the runtime starts."""
    script = other_image / ".singularity.d" / "env" / "95-own.sh"
    script.write_text("export OF_THE_IMAGE=$(cat /proc/sys/kernel/random/uuid)\n")
    spec = ContainerSpec(image=other_image, start="direct")
    first = await asyncio.gather(*(Container.start(spec, runtime) for _ in range(4)))
    told = {container.environment["OF_THE_IMAGE"] for container in first}
    await asyncio.gather(*(container.close() for container in first))
    assert len(told) == 1, "those who come meanwhile wait for the one"
    script.write_text("export OF_THE_IMAGE=changed\n")
    async with await Container.start(spec, runtime) as container:
        assert container.environment["OF_THE_IMAGE"] == "changed"


async def test_what_the_runtime_says_of_a_broken_image_is_told(other_image: Path, runtime: Runtime) -> None:
    next((other_image / "usr/lib").rglob("libc.so.6")).unlink()
    for start in ("auto", "direct"):
        spec = ContainerSpec(image=other_image, start=start)  # type: ignore[arg-type]
        with pytest.raises(InfrastructureError, match=r"libc\.so\.6"):
            await Container.start(spec, runtime)


async def test_where_it_cannot_be_made_directly_the_runtime_starts_it_and_the_reason_is_logged_once(
    image: Path, runtime: Runtime, without: Without, caplog: pytest.LogCaptureFixture
) -> None:
    rlimits.warn_slow_start_once.cache_clear()
    without(Off(launcher=(('doing("pivot_root", "");', 'doing("mounts are forbidden here", ""), must(-EPERM);'),)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with await Container.start(ContainerSpec(image=image), runtime) as container:
                assert (await container.run("echo works")).stdout == "works\n"
                assert container.start_method == "runtime"
    told = [record.getMessage() for record in caplog.records if "through the container runtime" in record.getMessage()]
    assert len(told) == 1
    assert "mounts are forbidden here" in told[0]
    with pytest.raises(InfrastructureError, match="mounts are forbidden here"):
        await Container.start(ContainerSpec(image=image, start="direct"), runtime)


async def test_an_image_that_cannot_start_directly_is_not_started_by_the_runtime(
    image: Path, runtime: Runtime, without: Without
) -> None:
    """The probe decides for all images."""
    without(
        Off(
            "from nemo_gym_prorl.sandbox.supervisor import creation\n"
            "hand_over = creation._send_image\n"
            "def first(*arguments):\n"
            "    creation._send_image = later\n"
            "    hand_over(*arguments)\n"
            "def later(*_arguments):\n"
            "    raise creation.Refused({'error': 'no second one'})\n"
            "creation._send_image = first"
        )
    )
    with pytest.raises(InfrastructureError, match="no second one"):
        await Container.start(ContainerSpec(image=image), runtime)


PASSING = {
    "the first process was killed": "sandbox.starter.kill()",
    "a helper was killed": "raise creation.Refused({'error': 'killed', 'killed': True})",
    "no file could be opened": "raise OSError(24, 'Too many open files')",
}


@pytest.mark.parametrize("trouble", PASSING.values(), ids=PASSING)
async def test_trouble_of_the_machine_is_an_error_and_decides_nothing(
    image: Path, runtime: Runtime, without: Without, trouble: str
) -> None:
    without(
        Off(
            "from nemo_gym_prorl.sandbox.supervisor import creation\n"
            "hand_over = creation._send_image\n"
            "def fail(sandbox, prepared, owners):\n"
            "    creation._send_image = hand_over\n"
            f"    {trouble}\n"
            "creation._send_image = fail"
        )
    )
    with pytest.raises(InfrastructureError):
        await Container.start(ContainerSpec(image=image), runtime)
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        assert (await container.run("echo works")).stdout == "works\n"
        assert container.start_method == "direct"


DEVICES = {"null", "zero", "full", "random", "urandom", "tty"}


async def test_what_linux_brings_is_there(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, start="direct", shared_memory_mib=32)
    async with await Container.start(spec, runtime) as container:
        said = await container.run("cd /dev; for i in *; do [ -c $i ] && echo $i; done")
        assert set(said.stdout.split()) >= DEVICES
        assert (await container.run("umask; hostname")).stdout == "0022\nsandbox\n"
        assert " 32 " in (await container.run("df -m /dev/shm | tail -n1")).stdout
        assert (await container.run("echo works > /dev/null && head -c 3 /dev/zero | wc -c")).stdout == "3\n"
        assert (await container.run("cat /sys/class/net/lo/operstate /proc/net/dev")).stdout.count("lo") == 1
        assert "UP" in (await container.run("cat /sys/class/net/lo/flags | grep -q 0x.*9 && echo UP")).stdout


HIDDEN = "/proc/kcore /proc/keys /proc/timer_list /proc/kallsyms /proc/interrupts /sys/firmware/*"


async def test_files_that_reveal_the_machine_are_hidden_and_settings_read_only(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, start="direct"), runtime) as container:
        assert (await container.run(f"cat {HIDDEN}")).stdout == ""
        for setting in ("/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger", "/proc/irq"):
            assert (await container.run(f"[ -e {setting} ] && touch {setting}")).exit_code != 0


async def test_a_bind_is_read_only_where_asked_and_has_no_devices_or_setuid_programs(
    image: Path, runtime: Runtime, open_folder: Path
) -> None:
    binds = [f"{open_folder}:/made/for/it:ro", "/etc/hostname:/etc/name"]
    spec = ContainerSpec(image=image, start="direct", binds=binds)
    async with await Container.start(spec, runtime) as container:
        assert (await container.run("ls -d /made/for/it; cat /etc/name")).stdout.startswith("/made/for/it\n")
        assert (await container.run("echo x > /made/for/it/new")).exit_code != 0
        mounts = (await container.run("grep -E ' (/made/for/it|/etc/name) ' /proc/self/mounts")).stdout
        assert mounts.count("nosuid,nodev") == 2


async def test_an_idle_sandbox_is_one_small_process(image: Path, runtime: Runtime, state: Path) -> None:
    async with await Container.start(ContainerSpec(image=image, start="direct"), runtime) as container:
        (folder,) = await asyncio.to_thread(lambda: list(state.glob(f"*/{container.name}")))
        note = (folder / state_dir.PID_NAMESPACE_FILE).read_text().split()
        (space,) = [box for box in state_dir.pid_namespaces_of(folder.parent) if str(box.init) == note[0]]
        assert space.members() == [space.init]
        assert state_dir.helpers_of(folder.parent) == []
        used = (await asyncio.to_thread(Path(f"/proc/{space.init}/statm").read_text)).split()[1]
        assert int(used) * os.sysconf("SC_PAGE_SIZE") < 256 << 10


async def test_a_prepared_image_is_kept_as_long_as_a_sandbox_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox uses the descriptors of its prepared image some time after it asked for the image."""
    monkeypatch.setattr(creation, "MAX_PREPARED_IMAGES", 2)
    made = {"owner": [0, 0], "one_user": "", "ranges": []}
    children = Mock()
    children.run = AsyncMock(side_effect=lambda _action: (made, [os.open("/", os.O_PATH), os.open("/", os.O_PATH)]))
    kept = creation.PreparedImages(tmp_path, children, Mock())

    async def ask(image: str) -> PreparedImage:
        return await kept.get(request_for(Path(image)))

    gc.collect()  # files of other tests' objects would be closed meanwhile
    before = open_files()
    held = await ask("held")
    for number in range(4):
        await ask(f"other {number}")
    assert await ask("other 3") is await ask("other 3")
    await until(lambda: open_files() - before == 2 * (1 + 2))
    del held
    assert open_files() - before == 2 * 2
