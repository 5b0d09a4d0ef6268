# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Additional capabilities of sandboxes, and snapshots of restored sandboxes."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import get_args

import pytest
from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.failures import AgentError, CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.provider import SandboxStartError, SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start
from tests.sandbox.running import created


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

HUNT = """
import os
caught = set()
open('/tmp/hunting', 'w').close()
while not os.path.exists('/tmp/enough'):
    for number in {*filter(str.isdigit, os.listdir('/proc'))} - {'1'}:
        try:
            caught.add(os.readlink(f'/proc/{number}/exe'))
        except OSError:
            pass
print(caught)
"""
"""Reads the executable of every process but the first."""

WAYS = [way for way in get_args(Start) if way != "auto"]


async def test_a_debugger_is_given_what_it_needs_and_sees_its_own_only(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, capabilities=["SYS_PTRACE", "CAP_NET_ADMIN", "CHOWN"])
    async with await Container.start(spec, runtime) as container:
        bounding = (await container.run("grep CapBnd /proc/self/status")).stdout.split()[1]
        assert int(bounding, 16) >> 19 & 1
        assert int(bounding, 16) >> 12 & 1
        assert not int(bounding, 16) >> 21 & 1
        # A joiner must be closed to ptrace until it has executed a program of the sandbox.
        hunting = asyncio.create_task(container.execute(["python3", "-c", HUNT]))
        await container.run("until test -e /tmp/hunting; do sleep 0.05; done")
        for _ in range(40):
            await container.run("true")
        await container.run("touch /tmp/enough")
        caught = set(ast.literal_eval((await hunting).stdout))
        assert any(name.startswith("/usr/bin/") for name in caught)
        assert not {name for name in caught if not name.startswith(("/usr/bin/", "/bin/"))}


@pytest.mark.parametrize("name", ["SYS_ADMIN", "ALL", "NONSENSE"])
async def test_other_capabilities_are_refused_by_name(image: Path, runtime: Runtime, name: str) -> None:
    with pytest.raises(CallerError, match=f"{name} can.t be granted to a sandbox; choose from NET_ADMIN, SYS_PTRACE"):
        await Container.start(ContainerSpec(image=image, capabilities=[name]), runtime)


async def test_a_snapshot_of_a_restored_sandbox_can_be_restored_until_it_is_deleted(
    image: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    provider = SingularityProvider(snapshots=str(kept))
    spec, taken = SandboxSpec(image=str(image)), list[str]()
    for number in range(3):
        handle = await provider.create(spec)
        try:
            look = await provider.exec(handle, "cat /work/*; stat -c '%a %h %Y' /work/0")
            assert (look.stdout or "").startswith("".join(f"{line}\n" for line in range(number)))
            assert number == 0 or (look.stdout or "").endswith("\n4711 2 1000000000\n")
            make = "ln /work/0 /hard; chmod 4711 /work/0; touch -d @1000000000 /work/0"
            await provider.exec(handle, f"mkdir -p /work; echo {number} > /work/{number}; {make}")
            taken.append(await provider.snapshot(handle, name="a rollout/1"))
        finally:
            await provider.close(handle)
        spec = SandboxSpec(provider_options={"snapshot_id": taken[-1]})
    for snapshot in (*taken, "never"):
        await provider.delete_snapshot(snapshot)
    assert not list(kept.iterdir())
    with pytest.raises(SandboxStartError, match="there is no snapshot"):
        await provider.create(spec)


async def test_a_snapshot_is_no_way_to_fill_the_disk(image: Path, tmp_path: Path) -> None:
    provider = SingularityProvider(snapshots=str(tmp_path / "kept"), disk_mib=1)
    async with created(provider, image=str(image)) as handle:
        # Each file takes 4 KiB on the sandbox's disk, and 5 KiB with its path in the snapshot.
        deep = "name=$(printf %0250d 0); cd /tmp; for _ in $(seq 15); do mkdir $name && cd -P $name || exit; done"
        made = await provider.exec(handle, f"{deep}; seq 215 | xargs touch; ls | wc -l")
        assert made.stdout == "215\n"
        with pytest.raises(AgentError, match="more than the 1 MiB"):
            await provider.snapshot(handle)
        assert (await provider.exec(handle, "echo goes on")).stdout == "goes on\n"
        assert not list((tmp_path / "kept").iterdir())
