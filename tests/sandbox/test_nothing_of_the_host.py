# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox reads nothing of the host: accounts, names, paths, groups, processes; in both ways of starting."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]


async def read(container: Container, *names: str) -> str:
    return (await container.run(f"cd /etc && cat {' '.join(names)}")).stdout


@pytest.mark.parametrize("root", [True, False])
async def test_accounts_and_names_are_the_images_and_the_sandboxes(image: Path, runtime: Runtime, root: bool) -> None:
    async with await Container.start(ContainerSpec(image=image, root=root), runtime) as container:
        accounts = (await read(container, "passwd")).splitlines()
        own = set((image / "etc/passwd").read_text().splitlines())
        added = [line for line in accounts if line not in own]
        assert added == ([] if root else ["sandbox:x:1000:1000::/tmp:/bin/sh"])
        assert "nameserver" not in await read(container, "resolv.conf")
        assert (await read(container, "hostname")) == "sandbox\n"
        hosts = await read(container, "hosts")
        assert {line.split()[0] for line in hosts.splitlines()} == {"127.0.0.1", "::1"}
        assert socket.gethostname() not in hosts
        name = (await container.run("id -un; id -gn")).stdout
        assert name == ("root\nroot\n" if root else "sandbox\nsandbox\n")
        asked = "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'"
        assert (await container.run(asked)).stdout == "127.0.0.1\n"
        # Missing files are not copied from the host.
        zone = "localtime" in [path.name for path in (image / "etc").iterdir()]
        assert ((await container.run("test -L /etc/localtime || test -e /etc/localtime")).exit_code == 0) is zone


async def test_on_the_hosts_network_its_nameservers_are_known(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, network=True), runtime) as container:
        assert await read(container, "resolv.conf") == Path("/etc/resolv.conf").read_text()  # noqa: ASYNC240


async def test_no_path_of_the_host_in_a_direct_ones_mounts(
    image: Path, runtime: Runtime, state: Path, way: str
) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        mounts = (await container.run("cat /proc/self/mountinfo")).stdout.splitlines()
    told = [line for line in mounts if str(state) in line or str(image) in line]
    if way == "direct":
        assert told == []
        assert any("lowerdir=image,upperdir=overlay/upper" in line for line in mounts)


FILES_OF_THE_FIRST = ("environ", "cwd", "root", "exe", "fd", "maps", "mem", "auxv", "stack", "io")


async def test_the_first_process_tells_nothing(image: Path, runtime: Runtime, way: str) -> None:
    if way == "runtime":
        pytest.skip("its first process is a shell of the image's own")
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        for name in FILES_OF_THE_FIRST:
            read = f"ls /proc/1/{name}/ || readlink /proc/1/{name} || head -c 1 /proc/1/{name}"
            assert (await container.run(read)).stdout == "", name
        assert (await container.run("tr '\\0' ' ' < /proc/1/cmdline")).stdout == "sandbox "
        assert "Groups:\t \n" in (await container.run("cat /proc/1/status")).stdout or not is_machine_root()


async def test_no_group_of_the_caller_is_had_inside(image: Path, runtime: Runtime, way: str) -> None:
    """A process's groups apply to files in binds."""
    if not is_machine_root() and not set(os.getgroups()) - {os.getegid()}:
        pytest.skip("this user has no group but his own")
    if not is_machine_root() and multi_user_error():
        pytest.skip("without a range of ids the kernel lets nobody give up groups")
    if not is_machine_root() and way == "runtime":
        pytest.skip("the runtime makes the user namespace of an ordinary user, in which nobody can give up groups")
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        listed = await container.run("grep -h ^Groups /proc/self/status /proc/1/status; id -G")
    assert listed.stdout.split() == ["Groups:", "Groups:", "0"]


async def test_an_invalid_line_of_accounts_names_no_user(container: Container) -> None:
    for line in ("0:0", "evil:x:0:none::/:/bin/sh", "evil:x::0::/:", "evil:x:99999999999:0::/:", ":::::"):
        await container.run(f"echo '{line}' >> /etc/passwd")
    for user in ("nobody-knows", "4294967295"):
        with pytest.raises(CallerError, match="no user"):
            await container.run("id", user=user)


async def test_a_user_that_the_image_knows_and_the_sandbox_does_not_have(container: Container) -> None:
    with pytest.raises(CallerError, match=r"one user.*users: true"):
        await container.run("id", user="nobody")
