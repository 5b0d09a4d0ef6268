# SPDX-License-Identifier: Apache-2.0
"""What a hostile command must not get: out, at others, at the host, or more than its share.

Each protection is tried twice where it can be switched off: with it, and without it, so that a test that would pass
whatever happens is noticed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox import lease
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.link import SandboxLost
from nemo_gym_prorl.sandbox.runtime import Runtime


pytestmark = pytest.mark.sandbox

CONNECT = "python3 -c 'import socket,sys; socket.create_connection((\"127.0.0.1\", int(sys.argv[1])), 3)' {port}"


@pytest.mark.parametrize("network", [False, True])
async def test_no_way_to_the_hosts_network(image: Path, runtime: Runtime, network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with await Container.start(ContainerSpec(image=image, network=network), runtime) as container:
            reached = await container.run(CONNECT.format(port=port))
            devices = (await container.run("ls /sys/class/net; cut -d: -f1 /proc/net/dev | tail -n +3")).stdout.split()
    assert (reached.exit_code == 0) is network
    if not network:
        assert set(devices) == {"lo"}


@pytest.mark.parametrize("bound", [False, True])
async def test_no_path_of_the_host(image: Path, runtime: Runtime, tmp_path: Path, bound: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    for folder in [tmp_path, *tmp_path.parents[:-2]]:
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o755)
    spec = ContainerSpec(image=image, binds=[f"{tmp_path}:/outside:ro"] if bound else ())
    async with await Container.start(spec, runtime) as container:
        assert (await container.run("cat /outside/secret")).stdout == ("host" if bound else "")
        tried = f"cat {secret} /proc/1/root{secret} /proc/1/cwd{secret} /proc/*/root{secret}"
        assert (await container.run(tried)).stdout == ""
        assert (await container.run("echo x > /outside/secret")).exit_code != 0
    assert secret.read_text() == "host"


async def test_nothing_of_the_kernel_can_be_set(container: Container) -> None:
    tried = await container.run(
        "for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sysrq-trigger "
        "/proc/sys/vm/swappiness "
        "/sys/kernel/mm/ksm/run /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/*/release_agent "
        "/proc/sys/user/max_user_namespaces; do (: >> $f) 2>/dev/null && [ -e $f ] && echo $f; done"
    )
    assert tried.stdout == ""
    for command in (
        "mount -t tmpfs none /mnt",
        "mount -o remount,size=1g /dev/shm",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "chroot /proc/1/root mount -t proc none /proc",
        "nsenter -t 1 -m true",
        "hostname other",
        "mknod /tmp/disk b 8 0 && head -c 1 /tmp/disk",
        "swapoff -a",
    ):
        assert (await container.run(command)).exit_code != 0, command


async def test_the_first_process_and_the_supervisor_cannot_be_looked_into(container: Container) -> None:
    assert (await container.run("cat /proc/1/environ /proc/1/mem; ls -l /proc/1/fd")).stdout.count("->") == 0
    seen = (await container.run("ps -A -o pid=,args=")).stdout.splitlines()
    assert len(seen) <= 4, seen


async def test_no_signal_reaches_a_process_of_the_host(container: Container) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        await container.run(f"kill -9 {bystander.pid}; kill -9 -{bystander.pid}; kill -9 -1; pkill -9 -f sleep")
        await asyncio.sleep(0.1)
        assert bystander.returncode is None
    finally:
        bystander.kill()
        await bystander.wait()


async def test_sandboxes_see_nothing_of_each_other(image: Path, runtime: Runtime, container: Container) -> None:
    await container.run("echo secret > /tmp/file; (setsid sleep 4321 >/dev/null 2>&1 &)")
    await container.run(
        'python3 -c \'import socket; s=socket.socket(socket.AF_UNIX); s.bind("\\0abstract"); s.listen(); '
        "import time; time.sleep(100)' >/dev/null 2>&1 &"
    )
    await container.run("ipcmk -M 100")
    async with await Container.start(ContainerSpec(image=image), runtime) as other:
        assert (await other.run("cat /tmp/file")).exit_code != 0
        assert "4321" not in (await other.run("ps -A -o args=")).stdout
        assert (await other.run("grep -c abstract /proc/net/unix")).stdout == "0\n"
        assert (await other.run("ipcs -m | grep -c 0x")).stdout == "0\n"
    assert (await container.run("ipcs -m | grep -c 0x")).stdout == "1\n"


async def test_processes_see_no_file_of_their_parents(container: Container) -> None:
    assert (await container.run("ls /proc/self/fd")).stdout.split() == ["0", "1", "2", "3"]
    assert (await container.run("readlink /proc/self/fd/3")).stdout == "", "3 is the folder that ls reads"


@pytest.mark.parametrize("processes", [40, 512])
async def test_processes_are_bounded(image: Path, runtime: Runtime, processes: int) -> None:
    async with await Container.start(ContainerSpec(image=image, processes=processes), runtime) as container:
        done = await container.run(
            "for i in $(seq 100); do sleep 100 & done; sleep 2; ps -A | grep -c sleep", timeout_s=30
        )
        assert (done.exit_code == 0 and done.stdout == "100\n") is (processes > 100)
        (space,) = [space for space in await asyncio.to_thread(spaces) if len(space.members()) > 20]
        assert len(space.members()) <= processes + 5


async def test_a_fork_bomb_ends_with_its_sandbox(image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=image, processes=100), runtime)
    await container.run("bomb() { bomb | bomb & }; bomb", timeout_s=2)
    found = await asyncio.to_thread(spaces)
    assert any(len(space.members()) > 3 for space in found)
    begin = time.monotonic()
    await container.close()
    assert time.monotonic() - begin < 10
    assert not any(space.members() for space in found)


@pytest.mark.parametrize("limit", [64, 0])
async def test_memory_is_bounded(image: Path, runtime: Runtime, limit: int) -> None:
    grab = "python3 -c 'import time; x = bytearray(300 << 20); time.sleep(2.5)'"
    async with await Container.start(ContainerSpec(image=image, memory_mib=limit), runtime) as container:
        done = await container.run(grab, timeout_s=30)
        assert done.exit_code == (137 if limit else 0)
        assert bool(container.notes) is bool(limit)
        assert (await container.run("echo alive")).stdout == "alive\n"


async def test_memory_file_systems_are_bounded(container: Container) -> None:
    for folder in ("/dev/shm", "/dev"):
        filled = await container.run(f"head -c 200000000 /dev/zero > {folder}/fill; stat -c %s {folder}/fill")
        assert int(filled.stdout) <= 64 << 20
    left = (await container.run("grep tmpfs /proc/self/mounts")).stdout.splitlines()
    assert all("size=" in line for line in left if "/sys" not in line), left


async def test_a_single_file_is_bounded(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, disk_mib=10), runtime) as container:
        done = await container.run("head -c 20000000 /dev/zero > /tmp/large; stat -c %s /tmp/large")
        assert int(done.stdout) == 10 << 20


@pytest.mark.parametrize("limit", [20, 0])
async def test_disk_use_is_bounded(image: Path, runtime: Runtime, limit: int) -> None:
    async with await Container.start(ContainerSpec(image=image, disk_mib=limit), runtime) as container:
        await container.run("for i in 1 2 3 4 5 6; do head -c 8000000 /dev/zero > /tmp/$i; done")
        if limit:
            await container.run("sleep 20")
            with pytest.raises(SandboxLost, match="disk"):
                await container.run("true")
        else:
            await asyncio.sleep(3)
            assert (await container.run("echo alive")).stdout == "alive\n"


def spaces() -> list[lease.Space]:
    """The PID namespaces of all sandboxes of this test run."""
    root = Path(os.environ["PRORL_STATE"])
    return [space for owner in root.glob("s-*") for space in lease.spaces_of(owner)]
