# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Capabilities that sandboxes ask for, and snapshots that others go on from."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import get_args

import pytest
from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.failures import AgentError, CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec, container_of
from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from nemo_gym_prorl.sandbox.provider import SandboxStartError, SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start


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
"""Looks into every process that there is, for what it runs, but the first, in which there is nothing to gain."""

WAYS = [way for way in get_args(Start) if way != "auto"]


async def test_a_debugger_is_given_what_it_needs_and_sees_its_own_only(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, capabilities=["SYS_PTRACE", "CAP_NET_ADMIN", "CHOWN"])
    async with await Container.start(spec, runtime) as container:
        bounding = (await container.run("grep CapBnd /proc/self/status")).stdout.split()[1]
        assert int(bounding, 16) >> 19 & 1
        assert int(bounding, 16) >> 12 & 1
        assert not int(bounding, 16) >> 21 & 1
        # Whatever the supervisor sends stays closed until it has become a program of the sandbox's own.
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


@pytest.mark.parametrize("start", WAYS)
async def test_a_snapshot_is_gone_on_from(image: Path, tmp_path: Path, start: Start) -> None:
    provider = SingularityProvider(snapshots=str(tmp_path / "kept"), start=start)
    first = await provider.create(SandboxSpec(image=str(image)))
    change = (
        "mkdir -p /work/sub /opt/empty && echo text > '/work/ä file' && ln -s nowhere /work/link "
        "&& chmod 4711 /bin/ls && ln '/work/ä file' /work/hard && chmod 500 /work/sub && rm /etc/os-release "
        "&& rm -rf /usr/share/doc && mkdir /usr/share/doc && echo mine > /usr/share/doc/own "
        "&& touch -d @1000000000 /work/old "
        "&& python3 -c \"import os; os.setxattr('/work/hard', 'user.note', b'\\\\xff')\""
    )
    look = (
        "cd / && stat -c '%n %a %h %Y' work/* bin/ls usr/share/doc/* | sed 's/ 1[0-9]*$//' ; readlink work/link; "
        "cat work/hard; ls etc/os-release; ls -a usr/share/doc opt/empty; stat -c %Y work/old; "
        "python3 -c \"import os; print(os.getxattr('/work/hard', 'user.note'))\""
    )
    try:
        assert (done := await provider.exec(first, change)).return_code == 0, done.stderr
        before = await provider.exec(first, look)
        snapshot = await provider.snapshot(first, name="a rollout/1")
        await provider.exec(first, "echo later > /work/later")
        assert (await provider.exec(first, "cat /work/later")).stdout == "later\n"
    finally:
        await provider.close(first)
    second = await provider.create(SandboxSpec(provider_options={"snapshot_id": snapshot}))
    try:
        after = await provider.exec(second, look)
        assert after.stdout == before.stdout
        assert "mine" not in (await provider.exec(second, "ls /work")).stdout
        again = await provider.snapshot(second)
    finally:
        await provider.close(second)
    third = await provider.create(SandboxSpec(provider_options={"snapshot_id": again}))
    try:
        assert (await provider.exec(third, look)).stdout == before.stdout
        assert container_of(third).alive
    finally:
        await provider.close(third)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    await provider.delete_snapshot(snapshot)
    await provider.delete_snapshot(again)
    await provider.delete_snapshot("never")
    assert not list((tmp_path / "kept").iterdir())
    with pytest.raises(SandboxStartError, match="there is no snapshot"):
        await provider.create(SandboxSpec(provider_options={"snapshot_id": snapshot}))


async def test_files_of_several_users_stay_theirs(image: Path, tmp_path: Path) -> None:
    if trouble := multi_user_error():
        pytest.skip(trouble)
    provider = SingularityProvider(snapshots=str(tmp_path), users=True)
    write = "for f in /srv/e /srv/f; do mkdir -p /srv; echo x > $f; chown 33:4000 $f; chmod 640 $f; done"
    look = "stat -c '%u:%g %a' /srv/e /srv/f"
    first = await provider.create(SandboxSpec(image=str(image)))
    try:
        assert (done := await provider.exec(first, write)).return_code == 0, done.stderr
        snapshot = await provider.snapshot(first)
        second = await provider.create(SandboxSpec(provider_options={"snapshot_id": snapshot}))
        try:
            assert (await provider.exec(second, look)).stdout == "33:4000 640\n" * 2
        finally:
            await provider.close(second)
    finally:
        await provider.close(first)


async def test_a_snapshot_is_no_way_to_fill_the_disk(image: Path, tmp_path: Path) -> None:
    provider = SingularityProvider(snapshots=str(tmp_path / "kept"), disk_mib=1)
    handle = await provider.create(SandboxSpec(image=str(image)))
    try:
        # Each takes 4 KiB of the sandbox's disk, but with its whole path 5 of the snapshot's.
        deep = "name=$(printf %0250d 0); cd /tmp; for _ in $(seq 15); do mkdir $name && cd -P $name || exit; done"
        made = await provider.exec(handle, f"{deep}; seq 215 | xargs touch; ls | wc -l")
        assert made.stdout == "215\n"
        with pytest.raises(AgentError, match="more than the 1 MiB"):
            await provider.snapshot(handle)
        assert (await provider.exec(handle, "echo goes on")).stdout == "goes on\n"
        assert not list((tmp_path / "kept").iterdir())
    finally:
        await provider.close(handle)
