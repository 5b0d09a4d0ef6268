# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Control groups: found, used, ended and removed. Tests of a controller need its delegation."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor import state_dir


GRANTED = cgroups.probe_delegation()

with_group = pytest.mark.skipif(GRANTED is None, reason="no control group is delegated to this process")


def with_controller(name: str) -> pytest.MarkDecorator:
    there = GRANTED is not None and name in GRANTED.controllers
    return pytest.mark.skipif(not there, reason=f"no {name} controller is delegated to this process")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user can write to no group but its own")
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("name", "is_unit"), [("session-3.scope", True), ("x.service", True), ("job_7", False)])
def test_root_moves_processes_of_a_unit_only_where_it_is_delegated(
    tmp_path: Path, name: str, is_unit: bool, marked: bool
) -> None:
    group = tmp_path / name
    group.mkdir()
    if marked:
        try:
            os.setxattr(group, "user.delegate", b"1")
        except OSError as error:
            pytest.skip(f"no attributes of users here: {error}")
    assert cgroups.is_delegated(group) is (marked or not is_unit)


def test_our_own_group_is_found_where_version_2_is_mounted() -> None:
    mounts = (
        "30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
        "41 31 0:38 /inner /elsewhere rw - cgroup2 cgroup2 rw\n"
        "42 31 0:38 / /sys/fs/with\\040space rw,relatime - cgroup2 cgroup2 rw\n"
    )
    assert cgroups.group_of(mounts, "4:memory:/x\n0::/user.slice/a b\n") == Path("/sys/fs/with space/user.slice/a b")
    assert cgroups.group_of(mounts, "0::/\n") == Path("/sys/fs/with space")
    assert cgroups.group_of(mounts, "4:memory:/x\n1:cpu:/x\n") is None, "version 1"
    assert cgroups.group_of(mounts, "0::/../sibling\n") is None, "out of sight"
    assert cgroups.group_of(mounts.splitlines()[0], "0::/\n") is None, "not mounted"


def groups_of(container: Container) -> list[Path]:
    """Return the existing control groups of a sandbox."""
    assert GRANTED
    return list(GRANTED.base.glob(f"prorl-s-*-{container.name}"))


@pytest.mark.sandbox
@with_group
@pytest.mark.parametrize("start", ["direct", "runtime"])
async def test_every_process_of_a_sandbox_is_in_its_group_and_the_group_goes_with_it(
    image: Path, runtime: Runtime, start: Start
) -> None:
    async with await Container.start(ContainerSpec(image=image, start=start), runtime) as container:
        (group,) = groups_of(container)
        await container.run("(setsid sleep 100 >/dev/null 2>&1 &)")
        held = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        owner = Path(container.describe()["supervisor"])
        spaces = [space for space in state_dir.pid_namespaces_of(owner) if space.init in held]
        assert len(spaces) == 1
        assert len(spaces[0].members()) >= 2
        assert set(spaces[0].members()) <= held
        outside = set(state_dir.helpers_of(owner)) & held
        assert bool(outside) is (start == "runtime"), "the runtime outside of the container, too"
        assert os.getpid() not in held
    assert groups_of(container) == []


@pytest.mark.sandbox
@with_controller("pids")
async def test_processes_are_bounded_by_the_group(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, processes=40), runtime) as container:
        (group,) = groups_of(container)
        assert int((group / "pids.max").read_text()) >= 40 + cgroups.PROCESS_SLACK
        for _ in range(3):
            with contextlib.suppress(CallerError):
                await container.run("for i in $(seq 200); do (sleep 100 &); done 2>/dev/null", timeout_s=10)
        assert int((group / "pids.current").read_text()) <= int((group / "pids.max").read_text()) < 200


@pytest.mark.sandbox
@with_controller("memory")
async def test_memory_is_bounded_by_the_kernel(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, memory_mib=100), runtime) as container:
        done = await container.run("python3 -c 'x = bytearray(1 << 30)'", timeout_s=30)
        assert done.exit_code == 137
        assert any("the kernel" in note for note in container.notes), container.notes
        assert (await container.run("echo alive")).stdout == "alive\n"


@pytest.mark.sandbox
@with_controller("cpu")
async def test_processor_time_is_bounded(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, cpus=0.2), runtime) as container:
        (group,) = groups_of(container)
        before, begin = processor_time(group), time.monotonic()
        await container.run("while :; do :; done", timeout_s=1.0)
        after, end = processor_time(group), time.monotonic()
        assert after["nr_throttled"] > before["nr_throttled"]
        assert (after["usage_usec"] - before["usage_usec"]) / 1e6 < 0.4 * (end - begin)


def processor_time(group: Path) -> dict[str, int]:
    """Return the group's processor statistics."""
    return {
        name: int(value) for name, value in (line.split() for line in (group / "cpu.stat").read_text().splitlines())
    }
