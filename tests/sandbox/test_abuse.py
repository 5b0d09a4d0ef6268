# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Hostile commands: no escape, no access to other sandboxes or the host, no use beyond the limits.

``make test-long`` also tries each with its protection switched off, when it must succeed; so a test that would pass
whatever happens is noticed. Nothing in the product can switch them off: an option that there is anyway leaves one out,
or the supervisor is started with one step of it, or of its launcher's source, replaced.

``kill -9 -1`` and the like are tried with protections only, since without they would succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxExhausted
from tests.sandbox.running import HANG_S
from tests.sandbox.without import Off, Without


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]

SHOWS_THE_WALL = pytest.mark.long("shows that its wall is what holds")
WITH_AND_WITHOUT = pytest.mark.parametrize(
    "protected",
    [pytest.param(True, id="protected"), pytest.param(False, id="unprotected", marks=SHOWS_THE_WALL)],
)


@asynccontextmanager
async def sandbox(image: Path, runtime: Runtime, **options: Any) -> AsyncIterator[Container]:
    async with await Container.start(ContainerSpec(image=image, **options), runtime) as live:
        yield live


@dataclass(frozen=True)
class Abuse:
    """A command that exits with 0 if the abuse succeeds.

    Attributes:
        command: run with ``sh`` as root inside.
        off: switches the protection off.
        off_if_direct: the same for sandboxes that are made directly, where that is another protection.
    """

    command: str
    off: Off
    off_if_direct: Off | None = None


NO_FILTER = Off(launcher=(("    must(CALL(seccomp,", "    if (0) must(CALL(seccomp,"),))
NO_DROP = Off(launcher=(("if (!(kept >> number & 1))", "if (0 && kept)"),))
NO_SIZE = Off(launcher=((" flags, data)", ' flags, same(kind, "tmpfs", 5) ? "" : data)'),))
NO_SYS = Off(launcher=(('if_allowed(CALL(mount, "sysfs", "/sys", "sysfs", MS_RDONLY, 0));', ""),))
NO_FLAG = Off(launcher=(("must(CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));", ""),))
OF_THE_HOST = Off(launcher=(("int sys = host_network ?", "int sys = 1 ?"),))
LIMIT = 'write_to(must(setting(proc, "sys/user/max_user_namespaces")), "0", 1);'
NO_LIMIT = Off(launcher=((LIMIT, LIMIT.replace('"0"', '"9"')),))
READABLE = Off("change = os.fchmod\nos.fchmod = lambda file, mode: change(file, 0o555 if mode == 0o111 else mode)")
LEAKY = Off(
    """
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.supervisor import creation
def leak(real):
    other = {"--cleanenv": [], "--containall": ["--contain", "--pid", "--ipc"]}
    return lambda *a: [part for word in real(*a) for part in other.get(word, [word])]
creation.runtime_command = leak(creation.runtime_command)
clean = launch.runtime_environment
launch.runtime_environment = lambda folder: {**clean(folder), "HOST_SECRET": "hidden"}
"""
)


NOT_JOINED = Off(
    launcher=(
        ("(spaces & SPACES[index].flag)", "(spaces & SPACES[index].flag & ~(uint64_t)(CLONE_NEWPID | CLONE_NEWIPC))"),
    )
)
NO_CLOSE = Off(
    launcher=(
        (
            'doing("working folder", folder);',
            'doing("working folder", folder), CALL(dup3, 0, 50, 0), CALL(dup3, 0, 51, 0);',
        ),
    )
)


def call(function: str, *arguments: object) -> str:
    """Return a command that makes a system call; an image may lack programs for it."""
    given = ", ".join(map(repr, arguments)).replace("'", '"')
    return f"python3 -c 'import ctypes; raise SystemExit(ctypes.CDLL(None).{function}({given}) != 0)'"


MOUNT = call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
MS_REMOUNT = 32

ABUSES = {
    "mount": Abuse(MOUNT, NO_DROP),
    "larger /dev/shm": Abuse(call("mount", b"none", b"/dev/shm", b"tmpfs", MS_REMOUNT, b"size=1g"), NO_DROP),
    "unmount": Abuse(call("umount2", b"/sys", 2), NO_DROP),
    "memory of PID 1": Abuse("cat /proc/1/environ >/dev/null && head -c 0 /proc/1/mem", NO_DROP, READABLE),
    "files of PID 1": Abuse("ls /proc/1/fd /proc/1/cwd", NO_DROP, READABLE),
    "host name": Abuse("hostname other && [ $(hostname) = other ]", NO_DROP),
    "more rights by exec": Abuse("grep -q 'NoNewPrivs:.0' /proc/self/status", NO_FLAG),
    "user namespace": Abuse("unshare -U true", NO_LIMIT),
    "rights in a user namespace": Abuse(f"unshare -Urm {MOUNT}", NO_LIMIT),
    "refused call": Abuse(call("unshare", 0), NO_FILTER),
    "call refused by its argument": Abuse(call("personality", 0x0040000), NO_FILTER),
    "devices of the host": Abuse("ls -d /sys/class/net/* | grep -qv '/lo$'", NO_SYS, OF_THE_HOST),
    "open files": Abuse("[ $(ls /proc/self/fd | wc -l) -gt 4 ]", NO_CLOSE),
    "memory in /dev/shm": Abuse("head -c 200000000 /dev/zero > /dev/shm/fill", NO_SIZE),
    "memory in /dev": Abuse("head -c 200000000 /dev/zero > /dev/fill", NO_SIZE),
}


@pytest.mark.parametrize("filtered", [True, False])
async def test_no_abuse_succeeds(image: Path, runtime: Runtime, without: Without, filtered: bool) -> None:
    """All abuses run in one sandbox. Without the seccomp filter, the other protections must suffice."""
    if not filtered:
        without(NO_FILTER)
    walls = {name: abuse for name, abuse in ABUSES.items() if filtered or abuse.off is not NO_FILTER}
    async with sandbox(image, runtime) as container:
        done = {name: await container.run(abuse.command) for name, abuse in walls.items()}
    assert {name: found for name, found in done.items() if found.exit_code == 0} == {}


@SHOWS_THE_WALL
@pytest.mark.parametrize("name", ABUSES)
async def test_an_abuse_succeeds_unprotected(
    image: Path, runtime: Runtime, without: Without, way: str, name: str
) -> None:
    abuse = ABUSES[name]
    without(*{NO_FILTER, abuse.off_if_direct if way == "direct" and abuse.off_if_direct else abuse.off})
    async with sandbox(image, runtime) as container:
        done = await container.run(abuse.command)
    assert done.exit_code == 0, done


CONNECT = "python3 -c 'import socket,sys; socket.create_connection((\"127.0.0.1\", int(sys.argv[1])), 3)' {port}"


@WITH_AND_WITHOUT
async def test_no_way_to_the_hosts_network(image: Path, runtime: Runtime, protected: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with sandbox(image, runtime, network=not protected) as container:
            reached = await container.run(CONNECT.format(port=port))
            devices = (await container.run("ls /sys/class/net; cut -d: -f1 /proc/net/dev | tail -n +3")).stdout.split()
    assert (reached.exit_code != 0) is protected
    if protected:
        assert set(devices) == {"lo"}


@WITH_AND_WITHOUT
async def test_no_path_of_the_host(image: Path, runtime: Runtime, tmp_path: Path, protected: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    for folder in [tmp_path, *tmp_path.parents[:-2]]:
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o755)
    async with sandbox(image, runtime, binds=() if protected else [f"{tmp_path}:/outside:ro"]) as container:
        assert (await container.run("cat /outside/secret")).stdout == ("" if protected else "host")
        tried = f"cat {secret} /proc/1/root{secret} /proc/1/cwd{secret} /proc/*/root{secret}"
        assert (await container.run(tried)).stdout == ""
        assert (await container.run("echo x > /outside/secret")).exit_code != 0
    assert secret.read_text() == "host"


@WITH_AND_WITHOUT
async def test_no_variable_of_the_server(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, without: Without, protected: bool
) -> None:
    monkeypatch.setenv("HOST_SECRET", "hidden")
    if not protected:
        without(LEAKY)
    async with sandbox(image, runtime) as container:
        found = await container.run("env | grep -q HOST_SECRET || grep -q HOST_SECRET /proc/*/environ")
    assert (found.exit_code != 0) is protected


@WITH_AND_WITHOUT
async def test_no_signal_reaches_a_process_of_the_host(
    image: Path, runtime: Runtime, without: Without, protected: bool
) -> None:
    """The bystander has the sandbox's own user id, so that only the namespace protects it."""
    if not protected:
        without(NOT_JOINED)
    async with sandbox(image, runtime) as container:
        own = {"user": container._host_id} if is_machine_root() else {}
        bystander = await asyncio.create_subprocess_exec("sleep", "1000", **own)
        try:
            await container.run(f"kill -9 {bystander.pid}")
            if protected:
                await container.run(f"kill -9 -{bystander.pid}; kill -9 -1; pkill -9 -f sleep")
            await asyncio.sleep(0.2)
            assert (bystander.returncode is None) is protected
        finally:
            if bystander.returncode is None:
                bystander.kill()
            await bystander.wait()


ANY_BIND = Off(
    "from nemo_gym_prorl.sandbox.supervisor import lifecycle; lifecycle.check_binds = lambda binds, *_: binds"
)


@WITH_AND_WITHOUT
async def test_no_file_of_another_sandbox(
    image: Path,
    runtime: Runtime,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    without: Without,
    protected: bool,
) -> None:
    if not protected:
        # Root's sandboxes have three protections: refused binds, mount namespaces and separate user ids.
        without(ANY_BIND)
        monkeypatch.setattr(user_ids, "SINGLE_USER_IDS", 1)
    async with sandbox(image, runtime) as victim:
        await victim.run("echo secret > /tmp/file; echo evil > /usr/bin/evil")
        (overlay,) = await asyncio.to_thread(lambda: list(state.glob(f"*/{victim.name}/overlay")))
        binds = [] if protected else [f"{overlay}/upper/tmp:/other"]
        async with sandbox(image, runtime, binds=binds) as other:
            assert (await other.run("cat /other/file")).stdout == ("" if protected else "secret\n")
            assert (await other.run("cat /tmp/file /usr/bin/evil")).stdout == ""


@pytest.mark.skipif(not is_machine_root(), reason="all sandboxes of an ordinary user run under its own id")
async def test_sandboxes_of_root_have_ids_of_their_own(image: Path, runtime: Runtime, without: Without) -> None:
    """A sandbox of root that is shown another sandbox's folder cannot enter it."""
    without(ANY_BIND)
    async with sandbox(image, runtime) as victim:
        spec = ContainerSpec(image=image, binds=[f"{victim.folder}/overlay:/other"])
        async with await Container.start(spec, runtime) as curious:
            tried = await curious.run("id -u; ls /other; touch /other/new")
        assert tried.stdout == "0\n"
        assert tried.stderr.lower().count("permission denied") == 2


LISTEN = (
    'python3 -c \'import socket; s = socket.socket(socket.AF_UNIX); s.bind("\\0abstract"); s.listen(); print(1); '
    "import time; time.sleep(100)' >/tmp/up 2>&1 &\n"
    "until [ -s /tmp/up ]; do sleep 0.01; done"
)
REACH = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0abstract\")'"


@WITH_AND_WITHOUT
async def test_no_socket_of_another_sandbox(image: Path, runtime: Runtime, protected: bool) -> None:
    async with (
        sandbox(image, runtime, network=not protected) as victim,
        sandbox(image, runtime, network=not protected) as other,
    ):
        await victim.run(LISTEN.replace("print(1)", "print(1, flush=True)"), timeout_s=20)
        assert (await victim.run(REACH)).exit_code == 0
        assert ((await other.run(REACH)).exit_code != 0) is protected


@WITH_AND_WITHOUT
async def test_no_shared_memory_of_another_sandbox(
    image: Path, runtime: Runtime, without: Without, protected: bool
) -> None:
    if not protected:
        without(NOT_JOINED)
    async with sandbox(image, runtime) as victim, sandbox(image, runtime) as other:
        made = (await victim.run("ipcmk -M 100")).stdout.split()[-1]
        try:
            seen = await other.run(f"ipcs -m -i {made} | grep -q bytes=100")
            assert (seen.exit_code != 0) is protected
        finally:
            await victim.run(f"ipcrm -m {made}")


def not_closed(folder: Path) -> Off:
    """Let the runtime inherit the supervisor's files, and the first process a folder of the host."""
    kept = f'CALL(openat, AT_FDCWD, "{folder}", O_PATH, 0);'
    before = "    become_user(uid, gid);\n    doing"
    return Off("os.set_inheritable = os.closerange = lambda *a: None", ((before, kept + before),))


@WITH_AND_WITHOUT
async def test_no_process_holds_a_file_of_the_host(
    image: Path, runtime: Runtime, state: Path, without: Without, protected: bool
) -> None:
    if not protected:
        without(not_closed(state))
    async with sandbox(image, runtime) as container:
        await container.run(
            "(setsid sleep 1000 >/dev/null 2>&1 &); until ps -A -o args= | grep -qx 'sleep 1000'; do :; done"
        )
        (space,) = await asyncio.to_thread(spaces)
        held = [str(file) for pid in space.members() for file in open_files(pid)]
    assert len(held) >= 3
    assert (not any(name.startswith(str(state)) and container.name not in name for name in held)) is protected


async def test_no_process_of_another_sandbox(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime) as victim, sandbox(image, runtime) as other:
        await victim.run("(setsid sleep 4321 >/dev/null 2>&1 &)")
        assert "4321" in (await victim.run("ps -A -o args=")).stdout
        assert "4321" not in (await other.run("ps -A -o args=")).stdout
        seen = (await other.run("ps -A -o pid=,args=")).stdout.splitlines()
        assert len(seen) <= 4, seen


async def test_nothing_of_the_kernel_can_be_set(container: Container) -> None:
    """The kernel requires capabilities in the initial user namespace, which no test can switch off."""
    tried = await container.run(
        "for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sysrq-trigger "
        "/proc/sys/vm/swappiness "
        "/sys/kernel/mm/ksm/run /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/*/release_agent "
        "/proc/sys/user/max_user_namespaces; do (: >> $f) 2>/dev/null && [ -e $f ] && echo $f; done"
    )
    assert tried.stdout == ""
    for command in (
        call("swapoff", b"/none"),
        call("reboot", 0),
        call("init_module", b"", 0, b""),
        "mknod /tmp/disk b 8 0 && head -c 1 /tmp/disk",
    ):
        assert (await container.run(command)).exit_code != 0, command


SLEEPERS = "for i in $(seq 100); do sleep 100 & done; sleep 0.5; ps -A | grep -c sleep"
GRAB = "python3 -c 'import time; x = bytearray(300 << 20); time.sleep(1.5)'"
# Sparse, since a full file would exceed the sandbox's disk limit.
LARGE = "dd if=/dev/zero of=/tmp/large bs=1M seek=9 count=5 2>/dev/null; stat -c %s /tmp/large"
FILL = "for i in 1 2 3 4 5 6; do head -c 8000000 /dev/zero > /tmp/$i; done"


async def test_without_limits_nothing_is_bounded(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime, processes=512, memory_mib=0, disk_mib=0) as container:
        assert (await container.run(SLEEPERS, timeout_s=30)).stdout == "100\n"
        assert (await container.run(GRAB, timeout_s=30)).exit_code == 0
        assert int((await container.run(LARGE)).stdout) == 14 << 20
        await container.run(f"{FILL}; sleep 3")  # longer than the watchdog's interval
        assert (await container.run("echo alive")).stdout == "alive\n"
        assert container.notes == []


BOMB = """setsid python3 -c '
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
' >/dev/null 2>&1 & sleep 0.5"""


async def test_a_fork_bomb_ends_with_its_sandbox(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime, processes=100) as container:
        await container.run(BOMB, timeout_s=20)
        found = await asyncio.to_thread(spaces)
        assert any(len(space.members()) > 50 for space in found)
        await asyncio.wait_for(container.close(), HANG_S)
        assert not any(space.members() for space in found)


async def test_memory_is_bounded(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime, memory_mib=64) as container:
        assert (await container.run(GRAB, timeout_s=30)).exit_code == 137
        assert container.notes
        assert (await container.run("echo alive")).stdout == "alive\n"


async def test_every_memory_file_system_has_a_size(container: Container) -> None:
    left = (await container.run("grep tmpfs /proc/self/mounts")).stdout.splitlines()
    assert all("size=" in line for line in left if "/sys" not in line), left


async def test_a_single_file_is_bounded(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime, disk_mib=10) as container:
        assert int((await container.run(LARGE)).stdout) == 10 << 20


async def test_disk_use_is_bounded(image: Path, runtime: Runtime) -> None:
    async with sandbox(image, runtime, disk_mib=20) as container:
        with contextlib.suppress(SandboxExhausted):
            await container.run(f"{FILL}; sleep 20")
        with pytest.raises(SandboxExhausted, match="disk"):
            await container.run("true")


def open_files(pid: int) -> list[Path]:
    """Return the open files of a process."""
    return [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]


def spaces() -> list[state_dir.PidNamespace]:
    """The PID namespaces of all sandboxes of this test run."""
    root = Path(os.environ["PRORL_STATE"])
    return [space for owner in root.glob("s-*") for space in state_dir.pid_namespaces_of(owner)]
