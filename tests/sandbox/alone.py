# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs for :mod:`test_faults` in their own mount namespaces, which confine the faults.

``alone.py PROGRAM FOLDER IMAGE``: ``FOLDER`` is empty, and covered by a small disk or by one that does not answer.
"""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import sys
import threading
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.isolation.syscalls import MS_NOSUID, mount, unshare_mounts
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir


DISK_MIB = 24

LOOKUP, GETATTR, INIT = 1, 3, 26
NOT_KNOWN = -38


def own_mounts() -> None:
    """Enter a new mount namespace; an ordinary user does so in a user namespace with the same ids."""
    uid, gid = os.geteuid(), os.getegid()
    if uid:
        os.unshare(os.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    unshare_mounts()


def fill(path: Path) -> None:
    """Fill the disk of ``path`` completely."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


async def full_disk(folder: Path, image: Path) -> None:
    """Run sandboxes on a disk that becomes full and gets room again."""
    mount("tmpfs", str(folder), "tmpfs", 0, f"size={DISK_MIB}m,mode=755")
    os.environ["PRORL_STATE"] = str(folder)
    spec = ContainerSpec(image=image, disk_mib=0)
    filler = folder / "filler"
    fill(filler)
    await refused(spec)
    assert not sandboxes(folder), "nothing is left of what could not begin"
    filler.unlink()
    greedy = await Container.start(spec)
    other = await Container.start(spec)
    done = await greedy.run("cat /dev/zero > /tmp/fill")
    assert done.exit_code != 0
    assert "No space left" in done.stderr, done
    assert (await other.run("echo alive")).stdout == "alive\n"
    fill(filler)
    before = sandboxes(folder)
    for _ in range(3):
        await refused(spec)
    assert sandboxes(folder) == before, "a start that failed leaves nothing"
    assert (await greedy.run("echo alive")).stdout == "alive\n"
    await greedy.close()
    await other.close()
    assert not sandboxes(folder)
    async with await Container.start(spec) as again:
        assert (await again.run("echo again")).stdout == "again\n"
    print("passed")


async def refused(spec: ContainerSpec) -> None:
    with pytest.raises(InfrastructureError, match=r"No space left.*PRORL_STATE"):
        await Container.start(spec)


class DeafDisk:
    """A FUSE file system that never answers a lookup; callers wait uninterruptibly."""

    def __init__(self, folder: Path) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0,allow_other"
        mount("deaf", str(folder), "fuse", MS_NOSUID, options)
        self.unanswered: list[int] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def answer(self) -> None:
        """Answer the waiting lookups: no such file."""
        for unique in self.unanswered:
            os.write(self._device, struct.pack("IiQ", 16, -2, unique))

    def _serve(self) -> None:
        while True:
            request = os.read(self._device, 1 << 20)
            _length, operation, unique = struct.unpack_from("IIQ", request)
            if operation == LOOKUP:
                self.unanswered.append(unique)
                continue
            error, body = NOT_KNOWN, b""
            if operation == INIT:
                error, body = 0, struct.pack("IIIIHHIIHHI7I", 7, 31, 0, 0, 16, 12, 4096, 1, 1, 0, 0, *([0] * 7))
            elif operation == GETATTR:
                attributes = struct.pack("6Q10I", 1, *([0] * 5), 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
                error, body = 0, struct.pack("QII", 0, 0, 0) + attributes
            os.write(self._device, struct.pack("IiQ", 16 + len(body), error, unique) + body)


async def deaf_disk(folder: Path, image: Path) -> None:
    """A process that survives SIGKILL, in one of two sandboxes."""
    disk = DeafDisk(folder)
    stuck = await Container.start(ContainerSpec(image=image, binds=[f"{folder}:/deaf"]))
    other = await Container.start(ContainerSpec(image=image))
    owner = Path(stuck.describe()["supervisor"])
    await stuck.run("(cat /deaf/file &) ; sleep 100 &")
    async with asyncio.timeout(60):
        while not disk.unanswered:
            await asyncio.sleep(0.01)
    (waiting,) = [
        pid for space in state_dir.pid_namespaces_of(owner) for pid in space.members() if command(pid) == "cat"
    ]
    closing = asyncio.create_task(stuck.close())
    while not closing.done():
        assert (await other.run("echo alive")).stdout == "alive\n"
        await asyncio.sleep(0.1)
    with pytest.raises(InfrastructureError, match=rf"{waiting}.*survive SIGKILL"):
        await closing
    assert usage.read_stat(waiting)[usage.STATE] == "D"
    assert (owner / stuck.name).exists()
    assert not state_dir.remove_if_dead(owner), "its owner lives"
    disk.answer()
    async with asyncio.timeout(60):
        while (owner / stuck.name).exists():
            await asyncio.sleep(0.01)
    await stuck.close()
    assert (await other.run("echo alive")).stdout == "alive\n"
    await other.close()
    print("passed")


def sandboxes(folder: Path) -> set[str]:
    """Return the folders of all sandboxes."""
    return {path.name for path in folder.glob("*/b-*")}


def command(pid: int) -> str:
    """Return the program name of a process."""
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


if __name__ == "__main__":
    own_mounts()
    ensure_runtime(ignore_progress).activate()
    program = {"full_disk": full_disk, "deaf_disk": deaf_disk}[sys.argv[1]]
    asyncio.run(program(Path(sys.argv[2]), Path(sys.argv[3])))
