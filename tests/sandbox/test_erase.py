# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox's files are removed, whatever an agent leaves on its disk."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox import launcher
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


def make_deep(folder: Path, depth: int, name: str) -> None:
    """Make nested folders, deeper than the longest path."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    try:
        for _ in range(depth):
            Path(name).mkdir()
            os.chdir(name)
        Path("file").touch()
    finally:
        os.fchdir(before)
        os.close(before)


@pytest.mark.parametrize(("depth", "name"), [(2100, "d"), (100, "x" * 255)])
def test_deeper_than_any_path_is_long(tmp_path: Path, depth: int, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make_deep(folder, depth, name)
    remove_tree(folder)
    assert not folder.exists()


def test_links_are_not_followed_and_closed_folders_are_opened(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "closed" / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "link").symlink_to(outside)
    (folder / "closed" / "inner" / "file").touch()
    for path in (folder / "closed" / "inner", folder / "closed", folder):
        path.chmod(0)
    remove_tree(folder)
    assert not folder.exists()
    remove_tree(folder)
    # The eraser gets a link, as if the folder had been replaced just before it was opened.
    folder.symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        remove_tree(folder)
    assert (outside / "kept").exists()


MANY = 10_000


@pytest.mark.parametrize("swapped", ["a", "a/b"])
def test_what_becomes_a_link_meanwhile_is_not_followed(tmp_path: Path, swapped: str) -> None:
    """A sandbox with an open folder can replace it or a parent by a link at any step of its removal."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for root in (folder / "a/b", outside / "b", outside):
        root.mkdir(parents=True, exist_ok=True)
        (root / "0").touch()
        for number in range(1, MANY if root.is_relative_to(folder) else 100):
            os.link(root / "0", root / str(number))  # hard links are faster to make than files
    before = sorted(outside.rglob("*"))
    untouched = (folder / "a/b").stat().st_mtime_ns
    with subprocess.Popen([launcher.ERASER, folder], executable=launcher.launcher_path()) as eraser:
        while (folder / "a/b").stat().st_mtime_ns == untouched:
            time.sleep(0.0001)
        eraser.send_signal(signal.SIGSTOP)
        assert count_files(str(folder / "a/b"))
        (folder / swapped).rename(tmp_path / "away")
        (folder / swapped).symlink_to(outside)
        eraser.send_signal(signal.SIGCONT)
    assert sorted(outside.rglob("*")) == before
    assert not folder.exists()


def count_files(folder: str) -> int:
    return len(list(Path(folder).iterdir()))
