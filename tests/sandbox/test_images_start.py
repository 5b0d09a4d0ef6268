# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From an image to a running sandbox: unpacked once, kept while used, refused with a reason if unusable."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images import store as images_module
from nemo_gym_prorl.sandbox.images.builder import BuildRequest, build
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


pytestmark = pytest.mark.sandbox


@pytest.fixture
def provider(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SingularityProvider:
    runtime.activate()
    monkeypatch.setenv("PRORL_UNPACKED", str(tmp_path / "unpacked"))
    return SingularityProvider()


async def test_a_sif_is_unpacked_once_for_all_and_its_sandboxes_can_change_everything(
    provider: SingularityProvider, tiny_sif: Path, tmp_path: Path
) -> None:
    handles = await asyncio.gather(*(provider.create(SandboxSpec(image=str(tiny_sif))) for _ in range(4)))
    try:
        done = await provider.exec(handles[0], "id -u; echo more >> /etc/passwd && ls /.singularity.d > /dev/null")
        assert (done.return_code, done.stdout) == (0, "0\n")
        copies = ImageStore(tmp_path / "images", tmp_path / "unpacked")
        assert len(copies.all_copies()) == 1
        removed, _ = copies.collect(max_bytes=0)
        assert [image for image in removed if image.info.kind == "copy"] == [], "four sandboxes use it"
        for handle in handles[1:]:
            await provider.close(handle)
        assert copies.all_copies()[0].entry.used
        assert (await provider.exec(handles[0], "cat /etc/group")).return_code == 0
    finally:
        for handle in handles:
            await provider.close(handle)
    assert not copies.all_copies()[0].entry.used
    assert not (tmp_path / "unpacked" / copies.all_copies()[0].entry.name / "root/etc/more").exists()


def test_an_unpacked_copy_is_the_callers_own_and_harmless(
    store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(tiny_root, root, symlinks=True)
    (root / "usr/bin/id").chmod(0o6755)
    (root / "closed").mkdir()
    (root / "closed" / "file").touch(mode=0o000)
    (root / "closed").chmod(0o000)
    if is_machine_root():
        os.chown(root / "etc/group", 33, 33)
        os.mknod(root / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    size = rootfs.sanitize(root)
    assert size > 1 << 20
    assert stat.S_IMODE((root / "usr/bin/id").stat().st_mode) == 0o755
    assert (root / "closed" / "file").read_bytes() == b""
    assert (root / "etc/group").stat().st_uid == os.geteuid()
    assert not (root / "device").exists()


def test_another_file_of_the_same_path_has_another_copy(
    store: ImageStore, tiny_sif: Path, runtime: Runtime, tmp_path: Path
) -> None:
    image = tmp_path / "x.sif"
    shutil.copy(tiny_sif, image)
    with ThreadPoolExecutor(3) as pool:
        starts = list(pool.map(lambda _: store.open(image, runtime), range(3)))
    assert len({start.path for start in starts}) == 1
    for start in starts:
        start.release()
    image.touch()
    again = store.open(image, runtime)
    again.release()
    assert again.path != starts[0].path
    assert len(store.all_copies()) == 2


def test_what_an_older_version_left_is_swept_and_nothing_else(
    store: ImageStore, tiny_root: Path, runtime: Runtime
) -> None:
    old = store.images.folder / "default-x86_64-0123456789ab"
    shutil.copytree(tiny_root, old, symlinks=True)
    kept = build(BuildRequest("", str(tiny_root), "kept"), store, runtime, ignore_progress)
    assert [image.names for image in store.all()] == [("kept",)]
    assert store.collect(dry_run=True) == ([], [old])
    assert old.exists()
    assert store.collect() == ([], [old])
    assert not old.exists()
    assert kept.is_dir()


def test_room_is_made_by_removing_what_was_used_least_and_never_what_is_used(
    tiny_sif: Path, runtime: Runtime, tmp_path: Path
) -> None:
    files = [tmp_path / f"{name}.sif" for name in "abc"]
    for file in files:
        shutil.copy(tiny_sif, file)
    wanted = images_module.UNPACKED_SIZE_FACTOR * tiny_sif.stat().st_size
    one = ImageStore(tmp_path / "images", tmp_path / "unpacked")
    first = one.open(files[0], runtime)
    size = one.all_copies()[0].info.bytes
    two_fit = ImageStore(tmp_path / "images", tmp_path / "unpacked", room=size + max(size, wanted))
    two_fit.open(files[1], runtime).release()
    two_fit.open(files[2], runtime).release()
    assert {Path(image.info.source).name for image in one.all_copies()} == {"a.sif", "c.sif"}
    none_fits = ImageStore(tmp_path / "images", tmp_path / "unpacked", room=size)
    with pytest.raises(InfrastructureError, match=r"no room for .* MiB to unpack .*PRORL_UNPACKED"):
        none_fits.open(files[1], runtime)
    assert first.path.is_dir()
    first.release()
    assert {entry.name for entry in (tmp_path / "unpacked").glob(".*")} == {".locks"}
