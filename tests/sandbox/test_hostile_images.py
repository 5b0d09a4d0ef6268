# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Images with hostile files: links to the host, links in place of kernel file systems, pipes.

Each is tried with the check of images, which names the problem, and without it, since creating a sandbox must not rely
on the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor.creation import MAX_CONCURRENT_STARTS
from tests.conftest import tiered
from tests.sandbox.running import HANG_S, gone_within_s, kill_supervisor, running_with, until


pytestmark = pytest.mark.sandbox

WAYS: tuple[Start, ...] = ("direct", "runtime")
BOTH_WAYS = pytest.mark.parametrize("start", WAYS)

Make = Callable[[], Path]


@pytest.fixture
def make(tiny_root: Path, open_folder: Path) -> Make:
    """Return a function that makes a copy of the tiny image to change."""
    made: list[Path] = []

    def copy() -> Path:
        made.append(open_folder / f"image-{len(made)}")
        shutil.copytree(tiny_root, made[-1], symlinks=True, copy_function=os.link)
        for name in ("run", "home"):
            (made[-1] / name).mkdir()
        for name in ("passwd", "group"):
            path = made[-1] / "etc" / name
            text = path.read_text()
            path.unlink()
            path.write_text(text)
        return made[-1]

    return copy


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "_check_sandbox_paths", lambda _root: None)


def put(root: Path, name: str, link: str) -> None:
    """Replace a path of an image by a link."""
    path = root / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(link)


def host_folder(folder: Path) -> Path:
    """Make a folder of the host that a sandbox's user could change if a path led to it."""
    victim = folder / "victim"
    victim.mkdir()
    for name in ("hosts", "passwd"):
        (victim / name).write_text("of the host\n")
        (victim / name).chmod(0o666)
    victim.chmod(0o777)
    return victim


def seen(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, owner and text of everything in a folder."""
    paths = (folder, *sorted(folder.rglob("*")))
    return {str(p): (p.stat().st_mode, p.stat().st_uid, p.read_text() if p.is_file() else "") for p in paths}


@BOTH_WAYS
@pytest.mark.parametrize("name", tiered(["etc", "etc/passwd", "var"], ["etc/passwd"]))
@pytest.mark.usefixtures("unchecked")
async def test_links_to_open_files_lead_to_nothing_of_the_host(
    make: Make, runtime: Runtime, open_folder: Path, start: Start, name: str
) -> None:
    """The links name open files of the process that creates the sandbox, by several descriptor numbers."""
    victim = host_folder(open_folder)
    before = seen(victim)
    for number in (3, 4, 5, 8):
        root = make()
        put(root, name, f"/proc/self/fd/{number}{victim}{'/passwd' if name == 'etc/passwd' else ''}")
        try:
            async with await Container.start(ContainerSpec(image=root, start=start, start_timeout_s=20), runtime):
                pass
        except InfrastructureError:
            # It may well not start.
            pass
        assert seen(victim) == before


def like_proc(folder: Path) -> None:
    """Fill a folder with regular files that have the names of ``/proc``."""
    (folder / "sys/user").mkdir(parents=True)
    (folder / "sys/user/max_user_namespaces").write_text("77")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() and entry.name not in ("sys", "self", "thread-self"):
            path = folder / entry.name
            if entry.is_dir():
                path.mkdir()
            else:
                path.touch()


HIDES = [("sys", "/proc/sys/kernel"), ("sys", "/proc/sys"), ("dev", "/proc/sys/kernel"), ("proc", "/../{host}")]


@BOTH_WAYS
@pytest.mark.parametrize("hides", tiered(HIDES, [HIDES[0], HIDES[-1]]), ids=" is ".join)
@pytest.mark.usefixtures("unchecked")
async def test_no_link_hides_what_is_set(
    make: Make, runtime: Runtime, open_folder: Path, start: Any, hides: tuple[str, str]
) -> None:
    """A sandbox does not start if kernel file systems would be mounted elsewhere or settings be regular files."""
    name, link = hides
    root, host = make(), open_folder / "proc"
    host.mkdir()
    like_proc(Path(f"{root}{host}"))
    put(root, name, link.format(host=host.relative_to("/")))
    with pytest.raises(InfrastructureError):
        await Container.start(ContainerSpec(image=root, start=start, start_timeout_s=30), runtime)


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


REFUSED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "accounts that are a folder": ("etc/passwd", Path.mkdir),
    "groups that are a pipe": ("etc/group", os.mkfifo),
    "a shell that is a pipe": ("usr/bin/sh", os.mkfifo),
    "hosts that are a folder": ("etc/hosts", Path.mkdir),
    "no folder of the kernel's": ("proc", Path.touch),
    "no folder": ("var", Path.touch),
    "the kernel's folder elsewhere": ("sys", link("/proc/sys/kernel")),
    "a folder by an open file": ("etc", link("/proc/self/fd/5/etc")),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_an_image_that_fits_no_sandbox_is_refused_by_name(make: Make, runtime: Runtime, what: str) -> None:
    name, substitute = REFUSED[what]
    root = make()
    path = root / name
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    substitute(path)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(CallerError, match=rf"^image: {root} .*/{name.removeprefix('usr/')} ") as caught:
            await Container.start(ContainerSpec(image=root), runtime)
    assert caught.value.field == "image"


def waiting_program() -> bytes:
    """An executable that says nothing and does not end."""
    machine, code = {
        # again: mov eax, 34 (pause); syscall; jmp again
        "x86_64": (62, bytes.fromhex("b822000000 0f05 ebf7")),
        # again: mov x0..x4, 0; mov x8, 73 (ppoll); svc 0; b again
        "aarch64": (183, struct.pack("<8I", *range(0xD2800000, 0xD2800005), 0xD2800928, 0xD4000001, 0x17FFFFF9)),
    }[os.uname().machine]
    size = 64 + 56 + len(code)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 64 + 56, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 0x10000) + code


@pytest.mark.parametrize("start", tiered(WAYS, ["direct"]))
async def test_an_image_whose_sandboxes_never_come_up_holds_up_its_own_only(
    make: Make, runtime: Runtime, state: Path, start: Start
) -> None:
    root = make()
    shell = root / "usr/bin/dash"
    shell.unlink()
    shell.write_bytes(waiting_program())
    shell.chmod(0o755)
    spec = ContainerSpec(image=root, start=start, start_timeout_s=2 * HANG_S)
    slow = [asyncio.create_task(Container.start(spec, runtime)) for _ in range(2 * MAX_CONCURRENT_STARTS)]
    try:
        await asyncio.sleep(0.5)
        async with asyncio.timeout(HANG_S), await Container.start(ContainerSpec(image=make(), start=start), runtime):
            assert not any(task.done() for task in slow)
    finally:
        # The image would be asked for its variables until the time limit of a start.
        kill_supervisor()
        await asyncio.gather(*slow, return_exceptions=True)
        await until(lambda: not any(state.glob("s-*/[bm]-*")), gone_within_s())


async def test_links_that_images_have_are_followed(make: Make, runtime: Runtime) -> None:
    """Ordinary links, some of which lead to files that exist in a running system only."""
    root = make()
    for folder in ("private/var", "usr/etc", "usr/share"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group"):
        (root / "etc" / name).rename(root / "usr/share" / name)
    shutil.rmtree(root / "etc")
    for name, link in {
        "etc": "usr/etc",
        "usr/etc/passwd": "/usr/share/passwd",
        "usr/etc/group": "../../../../usr/share/group",
        "usr/etc/resolv.conf": "../run/systemd/resolve/stub-resolv.conf",
        "var": "/private/var",
        "private/var/run": "/run",
        "private/var/tmp": "../../tmp",
        "root": "var/roothome",
    }.items():
        put(root, name, link)
    (root / "usr/share/passwd").write_text("somebody:x:5:5::/:/bin/sh\n")
    async with await Container.start(ContainerSpec(image=root, start="direct", workdir="/tmp"), runtime) as container:
        done = await container.run("echo x > /var/tmp/file; cat /tmp/file; id -un; cat /etc/hostname /etc/passwd")
    assert done.stdout.splitlines()[:3] == ["x", "root", "sandbox"], done
    assert (root / "usr/share/passwd").read_text() == "somebody:x:5:5::/:/bin/sh\n"


SHELLS = {
    # The shell changes its root to a folder with a fake /proc.
    "another root": 'chroot /x true && exec chroot /x /usr/bin/dash "$@"',
    # The shell replaces the runtime's mounts by links.
    "a link where a mount is": "rm -f /etc/passwd /etc/group; ln -s /sys /etc/passwd; ln -s /proc /etc/group",
}
"""Attacks of an image's shell, which runs as the first process before the sandbox is set up."""


@pytest.mark.parametrize("deed", SHELLS)
async def test_a_first_process_changes_nothing_of_what_is_set_up_around_it(
    make: Make, image: Path, runtime: Runtime, deed: str
) -> None:
    root = make()
    shell = root / "usr/bin/sh"
    shell.unlink()
    shell.write_text(f'#!/usr/bin/dash\n[ $$ = 1 ] && {{ {SHELLS[deed]}; }} 2>/dev/null\nexec /usr/bin/dash "$@"\n')
    shell.chmod(0o755)
    for name in ("bin/ln", "bin/rm", "bin/true", "sbin/chroot"):
        shutil.copy(image / "usr" / name, root / "usr/bin" / name.partition("/")[2])
    shutil.copytree(root / "usr", root / "x/usr", symlinks=True, copy_function=os.link)
    for name in ("lib", "lib64"):
        (root / "x" / name).symlink_to(f"usr/{name}")
    for name in ("dev/pts", "dev/shm", "sys", "proc/1", "proc/sys/user"):
        (root / "x" / name).mkdir(parents=True)
    for name in ("1/environ", "1/mounts", "sys/user/max_user_namespaces"):
        (root / "x/proc" / name).touch()
    looks = "cat /proc/sys/user/max_user_namespaces; ls /sys/class/net"
    said = []
    for path in (root, image):
        async with await Container.start(ContainerSpec(image=path, start="runtime"), runtime) as container:
            said.append((await container.run(looks)).stdout)
    assert said[0] == said[1]


LINGERING = {
    "ignores the end of its input": "echo; exec {sleep}",
    "has a child speak": "(echo; exec {sleep}) & exec {sleep}",
    "says nothing": "exec {sleep}",
}


@BOTH_WAYS
async def test_nothing_of_an_image_outlives_its_sandbox(make: Make, runtime: Runtime, start: Start) -> None:
    """The image's shell is untrusted wherever the runtime starts it: for a sandbox, or to report variables."""
    mark = f"{time.time_ns()}"

    async def live_and_end(kind: str) -> None:
        shell = (root := make()) / "usr/bin/sh"
        shell.unlink()
        sleep = f"setpriv --pdeathsig clear sleep {mark}"
        shell.write_text(f"#!/usr/bin/dash\n{LINGERING[kind].format(sleep=sleep)}\n")
        shell.chmod(0o755)
        # It may well not start.
        with contextlib.suppress(InfrastructureError):
            async with await Container.start(ContainerSpec(image=root, start=start, start_timeout_s=4), runtime):
                pass

    await asyncio.gather(*map(live_and_end, LINGERING))
    # Leave time for remaining processes to appear.
    await asyncio.sleep(1)
    assert running_with(mark) == []
