# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots: unusual files, damaged and hostile archives; and programs that evade a pause."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxResources, SandboxSpec

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox import snapshots
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.layer_archive import HEADER
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from nemo_gym_prorl.sandbox.provider import SandboxStartError, SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxLost
from nemo_gym_prorl.sandbox.supervisor.state_dir import PID_NAMESPACE_FILE
from tests.conftest import tiered
from tests.sandbox.running import created
from tests.sandbox.without import Off, Without


pytestmark = pytest.mark.sandbox

Entries = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Folder of the snapshots."""
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


@pytest.fixture
def provider(way: str, image: Path, runtime: Runtime, kept: Path) -> SingularityProvider:
    return SingularityProvider(image=str(image), snapshots=str(kept), disk_mib=2048)


def restoring(
    provider: SingularityProvider, snapshot: str, **options: Any
) -> AbstractAsyncContextManager[SandboxHandle]:
    """A sandbox from a snapshot."""
    return created(provider, provider_options={"snapshot_id": snapshot, **options})


async def refused(provider: SingularityProvider, snapshot: str, reason: str, **options: Any) -> SandboxStartError:
    """Check that no sandbox starts from a snapshot, and return why."""
    with pytest.raises(SandboxStartError, match=reason) as caught:
        async with restoring(provider, snapshot, **options):
            pass
    return caught.value


MAKE = r"""
import os, shutil
os.makedirs(b"/w/fol\xffder"); os.chdir("/w")
open(b"na\xffme", "w").write("x"); os.symlink(b"to\xfe", b"li\xffnk"); open("new\nline", "w").close()
os.link(b"na\xffme", b"hard\xff"); os.setxattr("new\nline", b"user.a\xff=b\nc", b"\x00\xff=")
with open("holes", "wb") as f:
    f.seek(200 << 20); f.write(b"middle"); f.truncate(3 << 29)
with open("pieces", "wb") as f:
    for n in range(2000):
        f.seek(n * 8192); f.write(b"%d" % n)
os.truncate("pieces", 20 << 20)
os.makedirs("closed/below"); os.chmod("closed", 0); os.mkfifo("pipe")
os.unlink("/etc/profile"); os.rmdir("/opt"); open("/opt", "w").write("a file now")
shutil.rmtree("/etc/skel", ignore_errors=True); os.makedirs("/etc/skel", exist_ok=True)  # may be refused
"""
LOOK = r"""
import hashlib, os
os.chdir("/w")
for name in sorted(os.listdir(b".")):
    found = os.lstat(name)
    print(name, found.st_mode, found.st_nlink, found.st_uid, found.st_size, found.st_blocks < 100_000)
print(os.readlink(b"li\xffnk"), os.listxattr("new\nline"), os.getxattr("new\nline", b"user.a\xff=b\nc"))
with open("holes", "rb") as f:
    f.seek(200 << 20); print(f.read(7))
print(hashlib.sha256(open("pieces", "rb").read()).hexdigest())
print(os.path.exists("/etc/profile"), open("/opt").read(), os.listdir("/etc/skel"))
"""


async def test_a_snapshot_keeps_names_attributes_holes_and_deletions(
    way: str, provider: SingularityProvider, kept: Path
) -> None:
    async def python(program: str) -> str:
        done = await provider.exec(handle, f"python3 - <<'EOT'\n{program}\nEOT")
        assert done.return_code == 0, done.stderr
        return str(done.stdout)

    async with created(provider) as handle:
        await python(MAKE)
        before = await python(LOOK)
        snapshot = await provider.snapshot(handle)
    assert "False a file now" in before
    assert before.endswith("[]\n") or way == "runtime"
    assert (kept / snapshot).stat().st_size < 80 << 20
    async with restoring(provider, snapshot) as handle:
        assert await python(LOOK) == before


@pytest.mark.skipif(bool(multi_user_error()), reason="this user has no range of ids")
async def test_a_snapshot_keeps_owners(image: Path, runtime: Runtime, kept: Path) -> None:
    provider = SingularityProvider(image=str(image), snapshots=str(kept), users=True)
    look = "stat -c '%u %g' /tmp/file /tmp/folder /tmp/folder/deep"
    async with created(provider) as handle:
        make = (
            "cd /tmp && touch file && mkdir -p folder/deep && chown 1234:33 file folder && chown 65534:5 folder/deep"
        )
        before = await provider.exec(handle, f"{make} && {look}")
        snapshot = await provider.snapshot(handle)
    async with restoring(provider, snapshot) as handle:
        assert before.stdout == "1234 33\n1234 33\n65534 5\n"
        assert (await provider.exec(handle, look)).stdout == before.stdout


async def test_a_snapshot_is_restored_only_over_its_image(
    image: Path, tiny_root: Path, runtime: Runtime, kept: Path
) -> None:
    # Owned by the user, who can be any.
    mine = Path(tempfile.mkdtemp(prefix="prorl-s-", dir="/tmp")) / "root"
    shutil.copytree(tiny_root, mine, symlinks=True)
    mine.parent.chmod(0o755)
    try:
        provider = SingularityProvider(snapshots=str(kept))
        async with created(provider, image=str(mine)) as handle:
            snapshot = await provider.snapshot(handle)
        base = snapshots.read(kept / snapshot).base
        with pytest.raises(CallerError, match=f"taken over {mine}.* is of {image}") as caught:
            base.check(ContainerSpec(image=image))
        assert caught.value.field == "snapshot_id"
        async with restoring(provider, snapshot):
            pass
        for changed in ({"root": False}, {"users": True}):
            await refused(provider, snapshot, r"snapshot_id|users", **changed)
        (mine / "new-top").mkdir()
        await refused(provider, snapshot, f"snapshot_id.*image at {mine} was changed since")
    finally:
        shutil.rmtree(mine.parent)


def archive(image: Path, entries: Entries, *, header: str | None = None) -> bytes:
    """Return a snapshot with these entries."""
    base = asdict(snapshots.SnapshotBase.of(image, ContainerSpec(image=image)))
    said = base64.b64encode((json.dumps(base) if header is None else header).encode()).decode()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={HEADER: said}) as made:
        for entry, data in entries:
            entry.size = entry.size or len(data)
            made.addfile(entry, io.BytesIO(data) if data else None)
    return file.getvalue()


def entry_of(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any) -> tarfile.TarInfo:
    """Return an archive entry."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, link, 0o755
    for key, value in more.items():
        setattr(entry, key, value)
    return entry


FOLDER, LINK = entry_of("d", tarfile.DIRTYPE), entry_of("d", tarfile.SYMTYPE, "/tmp")
HOSTILE: dict[str, Entries] = {
    "a name upwards": [(entry_of("../../owned"), b"x")],
    "a name upwards in the middle": [(FOLDER, b""), (entry_of("d/../../owned"), b"x")],
    "through a link": [(LINK, b""), (entry_of("d/prorl-owned"), b"x")],
    "a link in place of a folder": [(FOLDER, b""), (LINK, b""), (entry_of("d/prorl-owned"), b"x")],
    "a hard link out": [(entry_of("hard", tarfile.LNKTYPE, "../../../../../../../../../etc/passwd"), b"")],
    "memory": [(entry_of("mem", tarfile.CHRTYPE, devmajor=1, devminor=1), b"")],
    "an owner that no user has": [(entry_of("f", uid=123456), b"x")],
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_snapshot_is_refused_and_does_nothing(image: Path, kept: Path, state: Path, what: str) -> None:
    (kept / "hostile").write_bytes(archive(image, HOSTILE[what]))
    error = await refused(SingularityProvider(snapshots=str(kept)), "hostile", "snapshot_id")
    assert error.kind is FailureKind.BAD_ROW
    assert not Path("/tmp/prorl-owned").exists()  # noqa: ASYNC240
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


async def test_entries_of_a_snapshot_have_no_rights_outside(image: Path, kept: Path) -> None:
    """Setuid programs get only the sandbox's root, and absolute names lead into the sandbox."""
    entries = [
        (entry_of("x", mode=0o6755), b"#!/bin/sh\nid -u\n"),
        (entry_of("/tmp/prorl-absolute"), b"x"),
        (entry_of("dev", tarfile.SYMTYPE, "/etc"), b""),
    ]
    (kept / "odd").write_bytes(archive(image, entries[:2]))
    (kept / "link").write_bytes(archive(image, entries))
    provider = SingularityProvider(snapshots=str(kept))
    async with restoring(provider, "odd") as handle:
        looked = await provider.exec(
            handle, "stat -c %a /x; /x; grep NoNewPrivs /proc/self/status; ls /tmp/prorl-absolute"
        )
        assert looked.stdout == "6755\n0\nNoNewPrivs:\t1\n/tmp/prorl-absolute\n"
        assert not Path("/tmp/prorl-absolute").exists()  # noqa: ASYNC240
    await refused(provider, "link", "/dev of the image, which must be a folder and no link")


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda whole: b"",
    "text": lambda whole: b"no snapshot\n" * 1000,
    "an archive without a header": lambda whole: whole[1024:],
    "half of it": lambda whole: whole[: len(whole) // 2],
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_damaged_snapshot_is_refused(image: Path, kept: Path, state: Path, how: str) -> None:
    whole = archive(image, [(entry_of("first"), b"x" * 5000), (entry_of("second"), b"y" * 15000)])
    (kept / "broken").write_bytes(BROKEN[how](whole))
    error = await refused(SingularityProvider(snapshots=str(kept)), "broken", "snapshot_id")
    assert error.kind is FailureKind.BAD_ROW
    assert str(kept / "broken") in error.reason
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


async def test_a_snapshot_larger_than_the_next_sandbox_may_be_is_the_callers_failure(
    provider: SingularityProvider, kept: Path
) -> None:
    async with created(provider) as handle:
        await provider.exec(handle, "mkdir /w; for n in 1 2 3; do head -c 1000000 /dev/urandom > /w/$n; done")
        large = await provider.snapshot(handle)
        await provider.exec(handle, "rm /w/*; cd /w; for n in $(seq 600); do echo > $n; done")
        many = await provider.snapshot(handle)
    assert (kept / many).stat().st_size < 2 << 20
    for snapshot in (large, many):
        error = await refused(provider, snapshot, r"snapshot_id.*disk_mib", disk_mib=2)
        assert error.kind is FailureKind.BAD_ROW


HIDING = {
    "a link": "ln -s /etc /logs",
    "a link at the target": "mkdir /logs; ln -s /etc /logs/verifier",
    "a file": "touch /logs /tests",
    "a pipe": "mkfifo /logs; mkfifo /tests",
    "closed folders": "mkdir -p /logs/verifier /tests; touch /tests/test.sh; chmod 000 /logs/verifier /logs /tests /",
    "links that lead back": "ln -s /tests /logs; ln -s /logs /tests",
}
"""Commands that leave something at ``/tests`` and on the way to ``/logs/verifier``."""


@pytest.mark.parametrize("left", tiered(HIDING, ["a link at the target", "a pipe", "closed folders"]))
async def test_nothing_of_a_snapshot_redirects_or_prevents_a_bind(
    provider: SingularityProvider, open_folder: Path, left: str
) -> None:
    async with created(provider) as handle:
        await provider.exec(handle, HIDING[left])
        if left == "closed folders" and not is_machine_root():
            with pytest.raises(AgentError, match="no snapshot can be taken"):  # the agent's own doing
                await provider.snapshot(handle)
            return
        snapshot = await provider.snapshot(handle)
    tests, logs = open_folder / "tests", open_folder / "logs"
    tests.mkdir()
    logs.mkdir()
    logs.chmod(0o777)
    (tests / "test.sh").write_text("true")
    async with restoring(provider, snapshot, binds=[f"{tests}:/tests:ro", f"{logs}:/logs/verifier"]) as handle:
        use = "cat /tests/test.sh && ! touch /tests/a 2> /dev/null && echo 1 > /logs/verifier/reward && ls /etc/passwd"
        done = await provider.exec(handle, use)
        assert (done.return_code, done.stdout) == (0, "true/etc/passwd\n"), done.stderr
        assert (logs / "reward").read_text() == "1\n"


async def test_a_snapshot_can_be_restored_in_part(provider: SingularityProvider) -> None:
    """A link on the way to a path is left out, as it could lead to other files of the snapshot."""
    async with created(provider) as handle:
        make = "mkdir -p /a/b /a/c /real/d; touch /a/b/1 /a/c/2 /real/d/3 /etc/4; ln -s /real /link; ln -s /a /a/b/5"
        assert (await provider.exec(handle, make)).return_code == 0
        snapshot = await provider.snapshot(handle)
    async with restoring(provider, snapshot, snapshot_paths=["/a/b/", "/link/d", "/gone", "/etc/4"]) as handle:
        done = await provider.exec(
            handle, "ls -d /a/* /a/b/* /real /link /gone /etc/4 2> /dev/null; ls -A /etc | wc -l"
        )
        *paths, count = str(done.stdout).split()
        assert paths == ["/a/b", "/a/b/1", "/a/b/5", "/etc/4"]
        assert int(count) > 10
    await refused(provider, snapshot, "snapshot_paths", snapshot_paths=["a/b"])


async def test_a_folder_that_can_hold_no_snapshots_is_named(image: Path) -> None:
    provider = SingularityProvider(image=str(image), snapshots="/proc/nowhere")
    async with created(provider, resources=SandboxResources(disk_gib=1)) as handle:
        with pytest.raises(CallerError, match=r"/proc/nowhere can't hold snapshots") as caught:
            await provider.snapshot(handle)
        assert caught.value.field == "snapshots"


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


CHAIN = """
import os, time
last = 0
os.setsid()
while not os.path.exists('/tmp/end'):
    if os.fork():
        os._exit(0)
    if time.time() - last > 0.02:
        last = time.time()
        with open('/tmp/times', 'a') as times:
            print(last, file=times)
"""
"""Each process forks the next one and ends."""


SLOW_PACK = """
import time
from nemo_gym_prorl.sandbox.isolation import layer_archive
pack = layer_archive.pack
layer_archive.pack = lambda *arguments: time.sleep(1) or pack(*arguments)
"""


@pytest.mark.usefixtures("way")
async def test_a_pause_stops_every_program(image: Path, runtime: Runtime, tmp_path: Path, without: Without) -> None:
    without(Off(SLOW_PACK))
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        await container.files.write_file("/chain", CHAIN.encode())
        done = await container.run("for _ in 1 2 3; do python3 /chain; done; sleep 0.5", timeout_s=60)
        assert done.exit_code == 0, done
        taking = asyncio.create_task(snapshots.take(container, tmp_path / "kept", "x"))
        await asyncio.sleep(0.5)
        with pytest.raises(InfrastructureError, match="paused"):
            await container.run("true")
        await taking
        times = (await container.run("sleep 0.5; touch /tmp/end; sort -n /tmp/times", timeout_s=60)).stdout.split()
    assert max(float(later) - float(sooner) for sooner, later in pairwise(times)) > 0.8


HALF_A_PAUSE = """
from nemo_gym_prorl.sandbox.supervisor import programs
def fails(*_arguments, **_named):
    raise OSError(12, "no memory")
programs._verify_stopped = fails
"""


async def test_a_pause_that_fails_leaves_no_program_stopped(
    image: Path, runtime: Runtime, tmp_path: Path, without: Without
) -> None:
    without(Off(HALF_A_PAUSE))
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        await container.run("(while :; do echo >> /tmp/beats; sleep 0.02; done) >/dev/null 2>&1 &")
        with pytest.raises(InfrastructureError, match="no memory"):
            await snapshots.take(container, tmp_path / "kept", "x")
        before, after = (await container.run("wc -l < /tmp/beats; sleep 0.3; wc -l < /tmp/beats")).stdout.split()
        assert int(after) > int(before)


async def test_a_snapshot_of_a_sandbox_that_is_killed_meanwhile_is_no_fault_of_the_agent(
    image: Path, runtime: Runtime, tmp_path: Path, without: Without
) -> None:
    without(Off(SLOW_PACK.replace("pack(*arguments)", "open('/proc/1/none/file')")))  # as files that have gone
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        taking = asyncio.create_task(snapshots.take(container, tmp_path / "kept", "x"))
        await asyncio.sleep(0.5)
        number = (container.folder / PID_NAMESPACE_FILE).read_text().split()[0]
        os.kill(int(number), signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await taking


async def test_a_shells_command_goes_on_after_a_snapshot(provider: SingularityProvider) -> None:
    async with created(provider) as handle, await Shell.start(handle.raw) as shell:
        loop = "until [ -e /tmp/end ]; do touch /tmp/begun; sleep 0.01; done; echo through"
        running = asyncio.create_task(shell.run(loop))
        await provider.exec(handle, "until [ -e /tmp/begun ]; do sleep 0.02; done", timeout_s=60)
        for _ in range(3):
            await provider.snapshot(handle)
        await provider.exec(handle, "touch /tmp/end")
        action = await running
    assert (action.output, action.exit_code) == ("through\n", 0)
