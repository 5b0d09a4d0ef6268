# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Entries that several processes make, use and remove, some of which are killed; references and eviction."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.filesystems import filesystem_type_in
from nemo_gym_prorl.sandbox.images import entries as entries_module
from nemo_gym_prorl.sandbox.images.entries import Entries, Entry
from nemo_gym_prorl.sandbox.images.reference import LocalImage, NamedImage, RegistryImage, parse, parse_registry
from nemo_gym_prorl.sandbox.images.store import INFO_FILE, ROOT, Image, ImageInfo, ImageStore, eviction_candidates
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root


REPOSITORY = Path(__file__).parents[2]

MAKE = """
import sys, time
from pathlib import Path
from nemo_gym_prorl.sandbox.images.entries import Entries
entries = Entries(Path(sys.argv[1]))
with entries.making("thing") as work:
    if work is None:
        print("there")
    else:
        made = work / "made"
        made.mkdir()
        for number in range(200):
            (made / str(number)).write_text("x" * 1000)
            if number == 100 and sys.argv[2:] == ["hang"]:
                print("half", flush=True)
                time.sleep(1000)
        entries.publish(made, "thing")
        print("made")
"""


@contextmanager
def maker(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", MAKE, str(folder), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def made_by(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=60)[0].strip()


def put(entries: Entries, name: str) -> None:
    with entries.making(name) as work:
        assert work is not None
        (work / "made").mkdir()
        (work / "made" / "file").write_text(name)
        entries.publish(work / "made", name)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_last_use_of_an_entry_is_its_creation_or_use(tmp_path: Path) -> None:
    """An archive may set the time of its top folder; an old time would count as long unused."""
    entries = Entries(tmp_path)
    with entries.making("thing") as work:
        assert work is not None
        (work / "made").mkdir()
        os.utime(work / "made", (0, 0))
        entries.publish(work / "made", "thing")
    assert time.time() - entries.all()[0].last_use < 3600
    os.utime(tmp_path / "thing", (1, 1))
    for _ in range(2):
        assert entries.all()[0].last_use == 1, "listing is no use"
    hold = entries.use("thing")
    assert hold
    hold.release()
    assert time.time() - entries.all()[0].last_use < 3600


def test_of_many_processes_one_makes_a_thing(tmp_path: Path) -> None:
    with maker(tmp_path) as a, maker(tmp_path) as b, maker(tmp_path) as c:
        assert sorted(map(made_by, (a, b, c))) == ["made", "there", "there"]
    assert len(names(tmp_path / "thing")) == 200
    assert names(tmp_path) == [".locks", "thing"]


def test_a_killed_maker_leaves_nothing_that_is_used_and_the_next_one_makes_it(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    with maker(tmp_path, "hang") as hung:
        assert hung.stdout
        assert hung.stdout.readline() == "half\n"
        assert entries.sweep() == [], "it lives"
        assert entries.use("thing") is None
        assert entries.all() == []
    assert len(names(tmp_path)) == 2, "its remains are there"
    with maker(tmp_path) as other:
        assert made_by(other) == "made"
    assert len(entries.sweep(dry_run=True)) == 1
    assert len(entries.sweep()) == 1
    assert names(tmp_path) == [".locks", "thing"]
    assert len(names(tmp_path / "thing")) == 200


def test_what_is_used_stays(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    put(entries, "thing")
    first, second = entries.use("thing"), entries.use("thing")
    assert first
    assert second
    assert [(entry.name, entry.used) for entry in entries.all()] == [("thing", True)]
    first.release()
    assert not entries.remove("thing")
    # The supervisor of a sandbox has such a copy.
    copy = os.dup(second.descriptor)
    second.release()
    assert not entries.remove("thing")
    assert (entries.path("thing") / "file").read_text() == "thing"
    os.close(copy)
    assert [entry.used for entry in entries.all()] == [False]
    assert entries.remove("thing")
    assert entries.use("thing") is None
    assert names(tmp_path) == [".locks"]


def test_users_and_removers_at_once_meet_a_whole_thing_or_none(tmp_path: Path) -> None:
    entries = Entries(tmp_path)

    def use(_number: int) -> str:
        hold = entries.use("thing")
        if hold is None:
            return "none"
        try:
            return (entries.path("thing") / "file").read_text()
        finally:
            hold.release()

    def make_and_remove(_number: int) -> None:
        with entries.making("thing") as work:
            if work is not None:
                (work / "made").mkdir()
                (work / "made" / "file").write_text("whole")
                entries.publish(work / "made", "thing")
        entries.remove("thing")

    with ThreadPoolExecutor(6) as pool:
        changes = pool.map(make_and_remove, range(100))
        seen = set(pool.map(use, range(300)))
        list(changes)
    assert seen <= {"none", "whole"}


def test_without_locks_whatever_was_first_stays_and_recent_things_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    entries = Entries(tmp_path)
    with entries.making("thing") as one, entries.making("thing") as other:
        assert one
        assert other
        for work, text in ((one, "first"), (other, "second")):
            (work / "made").mkdir()
            (work / "made" / "file").write_text(text)
            entries.publish(work / "made", "thing")
        assert entries.sweep() == [], "somebody may be at it"
    assert (tmp_path / "thing" / "file").read_text() == "first"
    assert names(tmp_path) == [".locks", "thing"]
    hold = entries.use("thing")
    assert hold
    hold.release()
    assert [entry.used for entry in entries.all()] == [True]
    monkeypatch.setattr(entries_module, "UNSEEN_USE_S", -1.0)
    assert [entry.used for entry in entries.all()] == [False]


@pytest.mark.skipif(is_machine_root(), reason="root may write everywhere")
def test_somebody_elses_folder_can_be_used_but_not_cleared(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    put(entries, "thing")
    before = entries.use("thing")
    assert before
    before.release()
    for path in (tmp_path / ".locks" / "thing.use", tmp_path / ".locks", tmp_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        hold = entries.use("thing")
        assert hold
        hold.release()
        assert not entries.remove("thing")
    finally:
        tmp_path.chmod(0o755)
        (tmp_path / ".locks").chmod(0o755)


def test_a_note_of_another_version_breaks_no_command(store: ImageStore) -> None:
    """A later version may write more fields, an older one fewer, and a disk may lose the file."""
    now = {"kind": "image", "source": "", "format": "folder", "bytes": 1, "made": 1.0}
    old = {name: now[name] for name in ("kind", "source")}
    for name, note in (("now", now), ("later", {**now, "more": 1}), ("older", old), ("lost", None)):
        (store.images.path(name) / ROOT).mkdir(parents=True)
        (store.images.path(name) / INFO_FILE).write_text(json.dumps(note) if note else "")
    assert [image.entry.name for image in store.all()] == ["later", "now"]


# References, eviction, file systems


SHA = "@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("docker://python", "docker://docker.io/library/python:latest"),
        ("docker://index.docker.io/us/it", "docker://docker.io/us/it:latest"),
        ("docker://localhost/it", "docker://localhost/it:latest"),
        ("docker://127.0.0.1:5000/a/b/c:1", "docker://127.0.0.1:5000/a/b/c:1"),
        (f"docker://us/it:3{SHA}", f"docker://docker.io/us/it{SHA}"),
        ("docker://swe/x.y_1776_z-12:latest", "docker://docker.io/swe/x.y_1776_z-12:latest"),
    ],
)
def test_addresses_of_registries_are_completed(text: str, uri: str) -> None:
    assert parse(text) == parse(uri) == parse_registry(text.removeprefix("docker://")) == RegistryImage(uri)


def test_paths_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, path in {"/a/b": "/a/b", "./b": "b", "x.sif": "x.sif", "~/x": "~/x"}.items():
        assert parse(text) == LocalImage(Path(path).expanduser().absolute())
    assert parse("swe-base_1.2") == NamedImage("swe-base_1.2")
    for folder in ("/one", "/other"):
        monkeypatch.setenv("PRORL_CACHE", folder)
        assert parse("cache:swe-tasks/x.sif") == LocalImage(Path(folder, "swe-tasks/x.sif"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "library://x", "docker://A/b", "docker://a/b:", "docker://a/b@sha256:1", "docker://u:p@host/x"),
        *("cache:", "cache:/etc/x", "cache:x/../../y"),
    ],
)
def test_an_invalid_reference_is_refused_for_its_field(text: str) -> None:
    with pytest.raises(CallerError, match=r"^somewhere: "):
        parse(text, "somewhere")


def image_of(name: str, size: int, last_use: float, used: bool) -> Image:
    return Image(Entry(name, Path(name), last_use, used), ImageInfo("image", "", "sif", size, 0.0))


images = st.lists(
    st.builds(image_of, st.uuids().map(str), st.integers(0, 100), st.floats(0, 100), st.booleans()), max_size=12
)


@given(images, st.none() | st.integers(0, 500), st.none() | st.floats(0, 100))
def test_only_what_must_go_goes(given_: list[Image], most: int | None, before: float | None) -> None:
    protected = {image.entry.name for image in given_ if image.info.bytes % 7 == 0}
    gone = eviction_candidates(given_, protected, max_bytes=most, before=before)
    left = [image for image in given_ if image not in gone]
    assert not any(image.entry.used or image.entry.name in protected for image in gone)
    free = [image for image in left if not image.entry.used and image.entry.name not in protected]
    assert most is None or not free or sum(image.info.bytes for image in left) <= most
    assert before is None or all(image.entry.last_use >= before for image in free)
    for image in gone:
        if before is None or image.entry.last_use >= before:
            assert most is not None
            assert all(other.entry.last_use >= image.entry.last_use for other in free), "the least recently used first"
            newer = [other for other in given_ if other in left or other.entry.last_use >= image.entry.last_use]
            assert sum(other.info.bytes for other in newer) > most, "and no more than needed"


def test_the_type_of_a_file_system() -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 22 0:40 / /home rw - nfs4 server:/home rw\n"
        "31 30 0:41 / /home/a\\040b rw - tmpfs tmpfs rw\n"
        "32 22 0:42 / /scratch rw - lustre mds:/x rw\n"
    )
    kinds = {"/": "ext4", "/home": "nfs4", "/home/x": "nfs4", "/homes": "ext4", "/home/a b/c": "tmpfs"}
    assert {path: filesystem_type_in(mounts, path) for path in kinds} == kinds
