# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An untrusted recipe can do nothing to the machine of its builder, and what it needs in its image."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import build_tools, rootfs
from nemo_gym_prorl.sandbox.images.builder import BuildRequest, build
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.running import running_with


pytestmark = pytest.mark.sandbox

as_root = pytest.mark.skipif(
    not is_machine_root(), reason="what an ordinary user runs has no more rights than that user"
)


def recipe(root: Path, **sections: str) -> BuildRequest:
    """Return a request to build an untrusted recipe with these sections."""
    return BuildRequest(
        "".join(f"\n%{name}\n{commands}\n" for name, commands in sections.items()), str(root), "foreign"
    )


@as_root
def test_a_recipe_that_root_builds_has_no_right_of_roots(
    store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    """``%setup`` runs on the host."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        mine = Path(folder)
        # The folder is accessible, the file is not.
        mine.chmod(0o755)
        (mine / "secret").write_text("secret")
        (mine / "secret").chmod(0o600)
        try_from_setup(mine, store, tiny_root, runtime, tmp_path)


def try_from_setup(mine: Path, store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path) -> None:
    attempts = f"""
        set +e
        root=${{APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}}
        found=$root/found
        : > $found
        for folder in {mine} /proc/1/root{mine}; do
            cat $folder/secret >> $found
            echo overwritten > $folder/secret && echo write >> $found
            touch $folder/new && echo create >> $found
            chmod u+s $folder/secret && echo chmod >> $found
        done
        cat /etc/shadow >> $found
        mknod $root/disk b 8 0 && echo mknod >> $found
        mount --bind {mine} /mnt && touch /mnt/new
        kill -0 {os.getpid()} && echo kill >> $found
        true
    """
    built = build(
        recipe(tiny_root, setup=attempts, post="cat /proc/self/uid_map > /map"),
        store,
        runtime,
        ignore_progress,
    )
    assert (built / "found").read_text() == ""
    assert [entry.name for entry in mine.iterdir()] == ["secret"]
    assert (mine / "secret").read_text() == "secret"
    for line in (built / "map").read_text().splitlines():
        _inside, outside, count = map(int, line.split())
        assert outside > 1_000_000 or count > outside + 1_000_000, "root there is somebody here"


def test_a_recipe_sees_no_secret_of_its_builders_environment(
    store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "not-for-strangers")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "not-for-strangers")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    # An ordinary user can read the environment of all of the user's processes.
    whose = "/proc/[0-9]*" if is_machine_root() else "/proc/self"
    look = f"cat {whose}/environ 2> /dev/null"
    setup = f"{look} > ${{APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}}/setup || true"
    built = build(recipe(tiny_root, setup=setup, post=f"{look} > /post || true"), store, runtime, ignore_progress)
    seen = (built / "setup").read_text()
    assert "\0http_proxy=http://proxy.invalid:1\0" in seen
    assert "not-for-strangers" not in seen + (built / "post").read_text()


@pytest.mark.skipif(bool(multi_user_error()), reason="this user has one id")
def test_files_may_be_given_to_other_users_while_an_image_is_built(
    store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    commands = """
        set -e
        mkdir -p /srv/theirs && echo theirs > /srv/theirs/file && chmod 600 /srv/theirs/file && chmod 700 /srv/theirs
        chown -R 33:34 /srv/theirs
        ls -ln /srv/theirs > /seen
    """
    built = build(recipe(tiny_root, post=commands), store, runtime, ignore_progress)
    assert " 33 34 " in (built / "seen").read_text()
    assert (built / "srv/theirs/file").read_text() == "theirs\n"
    assert_settled(built)


def assert_settled(root: Path) -> None:
    """Everything belongs to the caller, and nothing is privileged."""
    for path in (root, *root.rglob("*")):
        found = path.lstat()
        assert (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid()), path
        assert stat.S_ISLNK(found.st_mode) or not found.st_mode & (stat.S_ISUID | stat.S_ISGID), path


def test_nobody_else_gets_at_an_image_before_it_is_settled(
    store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    """A setuid program of the unfinished image would be one on the host."""
    commands = "cp /usr/bin/id /mine; chmod 6755 /mine; : > /ready; while ! test -e /go; do sleep 0.1; done"
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build, recipe(tiny_root, post=commands), store, runtime, ignore_progress)
        deadline = time.monotonic() + 60
        while not (ready := list(store.images.folder.glob(".foreign-*/build-temp-*/rootfs/ready"))):
            assert time.monotonic() < deadline
            assert not building.done(), building.result()
            time.sleep(0.05)
        root = ready[0].parent
        try:
            assert (root / "mine").stat().st_mode & stat.S_ISUID
            work = next(path for path in root.parents if path.parent == store.images.folder)
            assert stat.S_IMODE(work.stat().st_mode) == 0o700
            # On the host the program belongs to an id without a user.
            assert (root / "mine").stat().st_uid != 0
        finally:
            (root / "go").touch()
        built = building.result()
    assert stat.S_IMODE((built / "mine").stat().st_mode) == 0o755


@pytest.mark.parametrize("unpacked", [True, False])
def test_a_link_in_place_of_what_was_built_is_not_followed(runtime: Runtime, tmp_path: Path, unpacked: bool) -> None:
    """A process that ``%setup`` left can put a link there while the builder cleans up; this one always does."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        file, program = Path(folder, "file"), Path(folder, "program")
        file.touch()
        file.chmod(0o4000)
        program.write_text(f"#!/bin/sh\nln -s {folder if unpacked else file} {tmp_path}/made\n")
        program.chmod(0o755)
        with pytest.raises(InfrastructureError, match="replaced the image by something else"):
            build_tools.build(replace(runtime, path=program), tmp_path, "x.def", timeout_s=60, unpacked=unpacked)
        assert stat.S_IMODE(file.stat().st_mode) == 0o4000
    assert (tmp_path.stat().st_uid, stat.S_IMODE(tmp_path.stat().st_mode)) == (os.geteuid(), 0o700)


def test_a_folder_that_becomes_a_link_is_not_settled_through_it(tmp_path: Path) -> None:
    """Another process may hold a folder that a recipe opened to all users."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside, root / "a"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
        (folder / "file").chmod(0o4000)
    away = tmp_path / "away"

    steps = rootfs.walk(root)
    assert [next(steps)[0], next(steps)[0]] == [".", "a"]
    (root / "a").rename(away)
    (root / "a").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        next(steps)
    with pytest.raises(NotADirectoryError):
        rootfs.sanitize(root / "a")
    (root / "b").symlink_to(outside / "file")
    rootfs.sanitize(root)
    assert stat.S_IMODE((outside / "file").stat().st_mode) == 0o4000


@as_root
def test_nothing_that_a_recipe_starts_outlives_its_build(
    store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    seconds = f"{os.getpid()}.77"
    commands = f"setsid env -i /usr/bin/sleep {seconds} < /dev/null > /dev/null 2>&1 &"
    build(recipe(tiny_root, post=commands), store, runtime, ignore_progress)
    assert running_with(seconds) == []
