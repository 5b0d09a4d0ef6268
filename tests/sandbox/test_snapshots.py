# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots of what is hard to keep, and files that are no snapshots, or hostile ones."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxResources, SandboxSpec

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind
from nemo_gym_prorl.sandbox.compose import snapshots
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.files import sparse
from nemo_gym_prorl.sandbox.isolation.files.snapshots import END, HEADER
from nemo_gym_prorl.sandbox.provider import SandboxStartError, SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxRefused
from nemo_gym_prorl.sandbox.supervisor.messages import Request, SnapshotRequest
from nemo_gym_prorl.sandbox.supervisor.signals import start_time


pytestmark = pytest.mark.sandbox

WAYS: tuple[Start, ...] = ("direct", "runtime")

Entries = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Where they are kept."""
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


@pytest_asyncio.fixture(params=WAYS)
async def provider(request: pytest.FixtureRequest, image: Path, runtime: Runtime, kept: Path) -> SingularityProvider:
    return SingularityProvider(image=str(image), snapshots=str(kept), start=request.param, disk_mib=2048)


async def gone_on_from(provider: SingularityProvider, snapshot: str, **spec: Any) -> SandboxHandle:
    """A sandbox from a snapshot."""
    return await provider.create(SandboxSpec(provider_options={"snapshot_id": snapshot, **spec}))


async def test_odd_names_and_attributes_and_holes_are_kept(provider: SingularityProvider, kept: Path) -> None:
    make = r"""
import os
os.makedirs(b"/w/fol\xffder"); os.chdir("/w")
open(b"na\xffme", "w").write("x"); os.symlink(b"to\xfe", b"li\xffnk"); open("new\nline", "w").close()
os.link(b"na\xffme", b"hard\xff"); os.setxattr("new\nline", b"user.a\xff=b\nc", b"\x00\xff=")
with open("holes", "wb") as f:
    f.seek(200 << 20); f.write(b"middle"); f.truncate(3 << 29)
with open("data then hole", "wb") as f:
    f.write(os.urandom(100_000)); f.truncate(1 << 30)
os.mkdir("many")
with open("pieces", "wb") as f:
    for n in range(2000):
        f.seek(n * 8192); f.write(b"%d" % n)
os.truncate("pieces", 20 << 20)
"""
    look = r"""
import hashlib, os
os.chdir("/w")
for name in sorted(os.listdir(b".")):
    found = os.lstat(name)
    print(name, found.st_mode, found.st_nlink, found.st_size, found.st_blocks < 100_000)
print(os.readlink(b"li\xffnk"), os.listxattr("new\nline"), os.getxattr("new\nline", b"user.a\xff=b\nc"))
with open("holes", "rb") as f:
    f.seek(200 << 20); print(f.read(7))
for name in ("pieces", "data then hole"):
    with open(name, "rb") as f:
        print(hashlib.sha256(f.read(20 << 20)).hexdigest())
"""
    handle = await provider.create(SandboxSpec())
    try:
        done = await provider.exec(handle, f"python3 - <<'EOT'\n{make}\nEOT")
        assert done.return_code == 0, done.stderr
        before = await provider.exec(handle, f"python3 - <<'EOT'\n{look}\nEOT")
        assert before.return_code == 0, before.stderr
        snapshot = await provider.snapshot(handle)
    finally:
        await provider.close(handle)
    assert (kept / snapshot).stat().st_size < 80 << 20
    handle = await gone_on_from(provider, snapshot)
    try:
        assert (await provider.exec(handle, f"python3 - <<'EOT'\n{look}\nEOT")).stdout == before.stdout
    finally:
        await provider.close(handle)


async def test_a_path_that_nothing_can_open_is_the_agents_doing(provider: SingularityProvider, kept: Path) -> None:
    handle = await provider.create(SandboxSpec())
    deep = "import os\nfor n in range(30): os.mkdir('x' * 200); os.chdir('x' * 200)"
    try:
        assert (await provider.exec(handle, f'cd /tmp && python3 -c "{deep}"')).return_code == 0
        with pytest.raises(AgentError, match="too long"):
            await provider.snapshot(handle)
        assert (await provider.exec(handle, "echo goes on")).stdout == "goes on\n"
    finally:
        await provider.close(handle)
    assert list(kept.iterdir()) == []  # noqa: ASYNC240


@pytest.mark.parametrize(("number", "expected"), [(errno.EBUSY, AgentError), (errno.EIO, SandboxRefused)])
async def test_files_that_change_while_they_are_kept_are_no_failure_of_the_machine(
    container: Container, kept: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    """As whoever was handed a folder can have them do."""
    ask = container.ask

    async def refused(request: Request, files: Sequence[int] = ()) -> tuple[Message, list[int]]:
        if isinstance(request, SnapshotRequest):
            raise SandboxRefused("changed", number)
        return await ask(request, files)

    monkeypatch.setattr(container, "ask", refused)
    with pytest.raises(expected):
        await snapshots.take(container, kept, "x")


async def test_no_snapshot_is_restored_over_another_image(
    image: Path, tiny_root: Path, runtime: Runtime, kept: Path, tmp_path: Path
) -> None:
    # As its owner, who can be anybody.
    mine = Path(tempfile.mkdtemp(prefix="prorl-s-", dir="/tmp")) / "root"
    shutil.copytree(tiny_root, mine, symlinks=True)
    mine.parent.chmod(0o755)
    try:
        provider = SingularityProvider(snapshots=str(kept))
        handle = await provider.create(SandboxSpec(image=str(mine)))
        snapshot = await provider.snapshot(handle)
        await provider.close(handle)
        async with await Container.start(ContainerSpec(image=image), runtime) as other:
            with pytest.raises(CallerError) as caught:
                await snapshots.read(kept / snapshot).restore(other)
            assert str(mine) in caught.value.reason
            assert str(image) in caught.value.reason
            assert caught.value.field == "snapshot_id"
        await provider.close(await gone_on_from(provider, snapshot))
        (mine / "new-top").mkdir()
        with pytest.raises(SandboxStartError, match=f"snapshot_id.*image at {mine} was changed since"):
            await gone_on_from(provider, snapshot)
        for option in ("root", "users"):
            (kept / "other").write_bytes((kept / snapshot).read_bytes())
            changed = {"root": False} if option == "root" else {"users": True}
            with pytest.raises(SandboxStartError, match=r"snapshot_id|users"):
                await gone_on_from(provider, "other", **changed)
    finally:
        shutil.rmtree(mine.parent)


def archive(image: Path, entries: Entries, *, end: int | None = -1, header: Any = None) -> bytes:
    """A snapshot as we make them, with these entries; ``end`` is the count that it claims, ``None`` for no end."""
    origin = asdict(snapshots.Base.of(image, ContainerSpec(image=image)))
    said = {HEADER: json.dumps(origin) if header is None else header}
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers=said) as made:
        for entry, data in entries:
            entry.size = entry.size or len(data)
            made.addfile(entry, io.BytesIO(data) if data else None)
        if end is not None:
            last = entry_of(".", tarfile.DIRTYPE)
            last.pax_headers = {END: str(len(entries) if end < 0 else end)}
            made.addfile(last)
    return file.getvalue()


def entry_of(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any) -> tarfile.TarInfo:
    """An entry."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, link, 0o755
    for key, value in more.items():
        setattr(entry, key, value)
    return entry


def hostile() -> Iterator[tuple[str, Entries]]:
    """Archives that we would not have made."""
    folder, secret = entry_of("d", tarfile.DIRTYPE), entry_of("d", tarfile.SYMTYPE, "/etc")
    yield "an absolute name", [(entry_of("/etc/owned"), b"x")]
    yield "a name upwards", [(entry_of("../../owned"), b"x")]
    yield "a name upwards in the middle", [(folder, b""), (entry_of("d/../../owned"), b"x")]
    yield "an empty name", [(entry_of("d//owned", tarfile.DIRTYPE), b"")]
    yield "through a link", [(secret, b""), (entry_of("d/owned"), b"x")]
    yield "a link in place of a folder", [(folder, b""), (secret, b""), (entry_of("d/owned"), b"x")]
    yield "without its folder", [(entry_of("nowhere/owned"), b"x")]
    yield "a hard link out", [(entry_of("hard", tarfile.LNKTYPE, "../../etc/passwd"), b"")]
    yield "a hard link to nothing", [(entry_of("hard", tarfile.LNKTYPE, "nothing"), b"")]
    yield "a disk", [(entry_of("disk", tarfile.BLKTYPE, devmajor=8, devminor=0), b"")]
    yield "memory", [(entry_of("mem", tarfile.CHRTYPE, devmajor=1, devminor=1), b"")]
    yield "an owner that nobody has", [(entry_of("f", uid=123456), b"x")]
    yield "an owner beyond numbers", [(entry_of("f", uid=1 << 40), b"x")]
    yield "a time beyond time", [(entry_of("f", mtime=1 << 70), b"x")]
    yield "an attribute that is none", [(entry_of("f", pax_headers={"LIBARCHIVE.xattr.user.a": "%"}), b"x")]
    yield "an entry of other systems", [(entry_of("f", b"Z"), b"x")]
    holes = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s"}
    for title, table, size in (
        ("holes beyond the largest file", "1\n0\n1\n", str(1 << 66)),
        ("holes that go back", "2\n4096\n1\n0\n1\n", "8192"),
        ("holes that are negative", "1\n-5\n1\n", "8192"),
        ("data beyond the end", "1\n8000\n4096\n", "8192"),
        ("a map that never ends", "9" * 600, "8192"),
        ("a map of letters", "a\nb\nc\n", "8192"),
    ):
        entry = entry_of("s", pax_headers={**holes, "GNU.sparse.realsize": size})
        yield title, [(entry, table.encode().ljust(-(-len(table) // 512) * 512, b"\0") + b"data")]


@pytest.mark.parametrize(("title", "entries"), hostile(), ids=lambda value: value if isinstance(value, str) else "")
async def test_a_hostile_snapshot_is_refused_and_does_nothing(
    image: Path, kept: Path, state: Path, title: str, entries: Entries
) -> None:
    (kept / "hostile").write_bytes(archive(image, entries))
    provider = SingularityProvider(snapshots=str(kept))
    with pytest.raises(SandboxStartError, match="snapshot_id") as caught:
        await gone_on_from(provider, "hostile")
    assert caught.value.kind is FailureKind.BAD_ROW
    assert "Traceback" not in caught.value.reason
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


async def test_what_is_set_in_a_snapshot_raises_nobody(image: Path, kept: Path, runtime: Runtime) -> None:
    """A setuid program of root's is one in the sandbox only, whose root is nobody outside."""
    (kept / "setuid").write_bytes(archive(image, [(entry_of("x", mode=0o6755), b"#!/bin/sh\nid -u\n")]))
    provider = SingularityProvider(snapshots=str(kept))
    handle = await gone_on_from(provider, "setuid")
    try:
        looked = await provider.exec(handle, "stat -c %a /x; /x; grep NoNewPrivs /proc/self/status")
        assert looked.stdout == "6755\n0\nNoNewPrivs:\t1\n"
    finally:
        await provider.close(handle)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda whole: b"",
    "text": lambda whole: b"no snapshot\n" * 1000,
    "zeros": lambda whole: bytes(20_480),
    "an archive of somebody's": lambda whole: whole[1024:],
    "its first block": lambda whole: whole[:512],
    "its header": lambda whole: whole[:1024],
    "half": lambda whole: whole[: len(whole) // 2],
    "without its end": lambda whole: whole[:-11_000],
    "cut at an entry": lambda whole: whole[: whole.index(b"second") - 0].ljust(10_240, b"\0"),
    "a header of a gigabyte": lambda whole: whole.replace(
        b"%011o\0" % len(whole[512:1024].rstrip(b"\0")), b"7777777777\0\0"
    ),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_file_that_is_no_snapshot_or_was_cut_off(image: Path, kept: Path, state: Path, how: str) -> None:
    whole = archive(image, [(entry_of("first"), b"x" * 5000), (entry_of("second"), b"y" * 5000)])
    (kept / "broken").write_bytes(BROKEN[how](whole))
    with pytest.raises(SandboxStartError, match="snapshot_id") as caught:
        await gone_on_from(SingularityProvider(snapshots=str(kept)), "broken")
    assert caught.value.kind is FailureKind.BAD_ROW
    assert str(kept / "broken") in caught.value.reason
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


@pytest.mark.parametrize("header", ["", "5", "{}", "[1]", '{"image": 5}', '{"image": "/x", "root": "yes"}'])
def test_a_header_that_is_none(image: Path, kept: Path, header: str) -> None:
    (kept / "odd").write_bytes(archive(image, [], header=header))
    with pytest.raises(CallerError, match="is no snapshot"):
        snapshots.read(kept / "odd")


async def test_fewer_entries_than_there_were(image: Path, kept: Path) -> None:
    for end in (None, 2):
        (kept / "short").write_bytes(archive(image, [(entry_of("f"), b"x")], end=end))
        with pytest.raises(SandboxStartError, match=r"cut off|1 of 2 entries"):
            await gone_on_from(SingularityProvider(snapshots=str(kept)), "short")


async def test_one_that_is_larger_than_the_sandbox_may_be_is_the_callers(
    provider: SingularityProvider, kept: Path
) -> None:
    handle = await provider.create(SandboxSpec())
    try:
        await provider.exec(handle, "mkdir /w; for n in 1 2 3; do head -c 1000000 /dev/urandom > /w/$n; done")
        large = await provider.snapshot(handle)
        await provider.exec(handle, "rm /w/*; cd /w; for n in $(seq 600); do echo > $n; done")
        many = await provider.snapshot(handle)
    finally:
        await provider.close(handle)
    assert (kept / many).stat().st_size < 2 << 20
    for snapshot in (large, many):
        with pytest.raises(SandboxStartError, match=r"snapshot_id.*disk_mib") as caught:
            await gone_on_from(provider, snapshot, disk_mib=2)
        assert caught.value.kind is FailureKind.BAD_ROW


async def test_what_the_next_sandbox_has_mounted_stays_as_it_is(provider: SingularityProvider, kept: Path) -> None:
    handle = await provider.create(SandboxSpec())
    try:
        await provider.exec(handle, "mkdir -p /srv/data/deep; echo mine > /srv/data/file; echo x > /srv/data/deep/er")
        snapshot = await provider.snapshot(handle)
    finally:
        await provider.close(handle)
    with tempfile.TemporaryDirectory(prefix="prorl-s-", dir="/tmp") as name:
        host = Path(name)
        os.chmod(host, 0o777)  # noqa: PTH101
        (host / "file").write_text("the host's")
        handle = await gone_on_from(provider, snapshot, binds=[f"{host}:/srv/data"])
        try:
            assert (await provider.exec(handle, "cat /srv/data/file")).stdout == "the host's"
        finally:
            await provider.close(handle)
        assert [path.name for path in host.iterdir()] == ["file"]  # noqa: ASYNC240


async def test_a_folder_that_can_hold_none(image: Path) -> None:
    provider = SingularityProvider(image=str(image), snapshots="/proc/nowhere")
    handle = await provider.create(SandboxSpec(resources=SandboxResources(disk_gib=1)))
    try:
        with pytest.raises(CallerError, match="/proc/nowhere can hold none") as caught:
            await provider.snapshot(handle)
        assert caught.value.field == "snapshots"
    finally:
        await provider.close(handle)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_becomes_something_else_meanwhile_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe would hold up who reads it for ever."""
    path, target = tmp_path / "file", tmp_path / "other"
    for made in (path, target):
        made.write_text("as it was")
    found = path.lstat()
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(target)
    with pytest.raises(OSError, match=r"changed while it is read|symbolic links"):
        sparse.reader(str(path), tarfile.TarInfo("file"), found)


IN_DISGUISE = """
import ctypes, os, sys, time
words = open('/proc/1/cmdline', 'rb').read()
begin = int(open('/proc/self/stat').read().rpartition(')')[2].split()[45])
memory = open('/proc/self/mem', 'r+b', buffering=0)
memory.seek(begin)
memory.write(words)
if os.fork():
    os._exit(0)
while os.getppid() != 1:
    pass
assert open('/proc/self/cmdline', 'rb').read() == words
open('/tmp/disguised', 'w').close()
while not os.path.exists('/tmp/end'):
    with open('/tmp/times', 'a') as times:
        print(time.time(), file=times)
    time.sleep(0.02)
"""
"""Looks like the sandbox's first process, whose orphan it is."""

PUT_ON = """
import os, sys
length = len(open('/proc/1/cmdline', 'rb').read())
words = ['p', '/hide', 'x' * (length - len('p./hide.') - 1)]
if os.fork() == 0:
    os.setsid()
    os.execve(sys.executable, words[: 2 if length == len('p./hide.') else 3], {'PYTHONHOME': sys.prefix})
"""


@pytest.mark.usefixtures("way")
async def test_no_program_is_taken_for_the_sandboxs_own_and_left_running(
    image: Path, runtime: Runtime, tmp_path: Path
) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        for name, program in (("hide", IN_DISGUISE), ("put_on", PUT_ON)):
            (tmp_path / name).write_text(program)
            await container.upload(tmp_path / name, f"/{name}")
        done = await container.run(
            "python3 /put_on 2>/tmp/err; for _ in $(seq 200); do [ -s /tmp/times ] && exit; sleep 0.05; done; "
            "cat /tmp/err; exit 1",
            timeout_s=60,
        )
        assert done.exit_code == 0, done
        await container.pause()
        await asyncio.sleep(1)
        await container.resume()
        times = (await container.run("sleep 0.5; touch /tmp/end; cat /tmp/times", timeout_s=60)).stdout.split()
    assert max(float(later) - float(sooner) for sooner, later in pairwise(times)) > 0.8


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
"""Each forks the next and ends."""


@pytest.mark.usefixtures("way")
async def test_what_forks_for_ever_is_paused(image: Path, runtime: Runtime, tmp_path: Path) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:
        (tmp_path / "chain").write_text(CHAIN)
        await container.upload(tmp_path / "chain", "/chain")
        await container.run("for _ in 1 2 3; do python3 /chain; done; sleep 0.5", timeout_s=60)
        await container.pause()
        await asyncio.sleep(1)
        await container.resume()
        times = (await container.run("sleep 0.5; touch /tmp/end; sort -n /tmp/times", timeout_s=60)).stdout.split()
    assert max(float(later) - float(sooner) for sooner, later in pairwise(times)) > 0.8


HELPER = """
import os, sys, time
from nemo_gym_prorl.sandbox.isolation import joining, syscalls
supervisor = os.getpid()
if os.fork() == 0:
    syscalls.end_with(supervisor)
    process = joining.ProcessFolder(int(sys.argv[1]))
    joining.join_users(joining.Place(process, 0, {}, joining.spaces_of(process), rooted=True))
    print(os.getpid(), flush=True)
time.sleep(20)
"""


async def test_who_reads_a_sandboxs_layer_ends_with_the_supervisor(container: Container) -> None:
    first = (container.folder / "pid_namespace").read_text().split()[0]
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HELPER, first, stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout
    helper = int(await supervisor.stdout.readline())
    supervisor.kill()
    async with asyncio.timeout(10):
        await supervisor.wait()
        while start_time(helper) is not None:
            await asyncio.sleep(0.02)
