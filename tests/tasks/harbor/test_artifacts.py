# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Artifacts that are kept on the host."""

import errno
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from nemo_gym_prorl.tasks.harbor import artifacts
from nemo_gym_prorl.tasks.harbor.task_config import Artifact
from tests.conftest import tiered
from tests.prorl_code.conftest import serving
from tests.tasks.harbor.folders import ANSWER, PLAIN, make_task, play, row_of, shown
from tests.tasks.harbor.test_steps import ONE, steps_task


DECLARED = """\
artifacts = ["answer", "/data/out", { source = "/data", destination = "copy", exclude = ["*.log"] }, "/data/out/late"]
"""

FEW = {"logs/artifacts": "empty", "answer": "ok", "data/out": "missing", "copy": "missing", "data/out/late": "skipped"}

KEPT: dict[str, tuple[str, str | None, dict[str, object]]] = {
    "files and folders": (
        "mkdir -p /data/out/empty; touch /data/a /data/a.log /data/out/b /logs/artifacts/c",
        "copy/a copy/out/b copy/out/empty/ data/out/b data/out/empty/ logs/artifacts/c",
        {"logs/artifacts": "ok", "data/out": "ok", "copy": "ok"},
    ),
    "links": (
        "mkdir -p /data/out; cd /data/out; ln -s /etc/passwd a; ln -s / b; ln -s c d; touch c; ln c e; ln -s . f",
        "copy/out/c copy/out/e data/out/c data/out/e logs/artifacts/",
        {"data/out": ("ok", 4), "copy": ("ok", 4)},
    ),
    "a sparse file": (
        "cd /logs/artifacts; truncate -s 5G a",
        "logs/artifacts/",
        {"logs/artifacts": ("empty", 1)},
    ),
    "more bytes than are kept": (
        "cd /logs/artifacts; head -c 3M /dev/zero > a; head -c 900K /dev/zero > b",
        "logs/artifacts/b",
        {"logs/artifacts": ("ok", 1)},
    ),
    "more files than are kept": (
        "mkdir -p /data/out; cd /data/out; seq 100 | xargs touch",
        None,
        {"data/out": ("ok", 53), "copy": ("failed", 102)},
    ),
    "a tar that never ends": (
        "rm /bin/tar /usr/bin/tar; printf '#!/bin/sh\nsleep 900' > /usr/bin/tar; chmod 755 /usr/bin/tar; "
        "(while :; do touch /logs/artifacts/a; done) > /dev/null 2>&1 & disown; sleep 1",
        "logs/artifacts/a",
        {"logs/artifacts": "ok"},
    ),
}


def names_below(folder: Path) -> str:
    """Return the files, and with a final ``/`` the empty folders; none may be a link, special, or open to others."""
    found = []
    for path in folder.rglob("*"):
        assert stat.S_ISDIR(mode := path.lstat().st_mode) or stat.S_ISREG(mode), path
        assert not mode & 0o7000, path
        if path.is_file() or not any(path.iterdir()):
            found.append(f"{path.relative_to(folder)}{'/' * path.is_dir()}")
    return " ".join(sorted(found))


@pytest.mark.sandbox
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", tiered(KEPT, ["files and folders", "links", "a tar that never ends"]))
async def test_artifacts_are_kept_and_change_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    command, names, changed = KEPT[name]
    for limit, value in (("BYTES", 1 << 20), ("FILES", 50), ("DEPTH", 10)):
        monkeypatch.setattr(artifacts, f"MAX_KEPT_{limit}", value)
    (folder := tmp_path / "kept").mkdir()
    async with serving("prorl_harbor", artifacts_folder=folder) as base_url:
        reply = await play(base_url, row_of(make_task(tmp_path / "t", toml=DECLARED + PLAIN)), f"{ANSWER}; {command}")
    assert shown(reply) == (200, 1.0, "passed"), reply
    [place] = (found / "artifacts" for found in folder.iterdir())
    entries = {str(Path(one["destination"]).relative_to(place)): one for one in reply[1]["artifacts"]}
    expected = {at: one if isinstance(one, tuple) else (one, 0) for at, one in (FEW | changed).items()}
    assert {at: (one["status"], one["left_out"]) for at, one in entries.items()} == expected
    (place / "manifest.json").unlink()
    (place / "answer").unlink()
    assert names is None or names_below(place) == names


@pytest.mark.sandbox
async def test_each_step_keeps_its_artifacts_also_for_a_separate_verifier(tmp_path: Path) -> None:
    (folder := tmp_path / "kept").mkdir()
    row = steps_task(
        tmp_path / "t", one='artifacts = ["/app/one"]', two='[steps.verifier]\nenvironment_mode = "separate"'
    )
    async with serving("prorl_harbor", artifacts_folder=folder) as base_url:
        reply = await play(base_url, row, f"{ONE}; touch /logs/artifacts/a", "SUBMIT", "rm /logs/artifacts/a")
        # The second step declares no artifact, so its verifier sees nothing of it.
        assert shown(reply) == (200, 0.5, "partial"), reply
    [place] = folder.iterdir()
    statuses = {one["destination"].removeprefix(f"{place}/"): one["status"] for one in reply[1]["artifacts"]}
    assert statuses == {
        "steps/one/artifacts/logs/artifacts": "ok",
        "steps/one/artifacts/app/one": "ok",
        "steps/two/artifacts/logs/artifacts": "empty",
    }
    assert (place / "steps/one/artifacts/app/one").read_text() == "done\n"
    manifest = json.loads((place / "steps/one/artifacts/manifest.json").read_text())
    assert manifest[1] == {
        **{"source": "/app/one", "destination": "artifacts/app/one", "type": "file", "status": "ok", "exclude": []},
        **{"bytes": 5, "files": 1, "left_out": 0},
    }


def archive_of(folder: Path, names: list[str]) -> artifacts.Archives:
    (folder / "a").write_bytes(b"x" * 3000)
    with tarfile.open(folder / "raw", "w") as archive:
        for name in names:
            archive.add(folder / "a", name)
    return {0: ("data", folder / "raw")}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_of_the_host_is_no_fault_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_arguments: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    declared, archives = [Artifact(source="/data")], archive_of(tmp_path, ["data/a"])
    monkeypatch.setattr(Path, "open", lambda path, mode="r": fail() if "w" in mode else open(path, mode))  # noqa: PTH123, SIM115
    with pytest.raises(OSError, match=os.strerror(number)):
        artifacts.keep(declared, archives, tmp_path / "kept")
    monkeypatch.undo()
    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        artifacts.sanitize(archives, tmp_path / "merged")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (None, ("failed", None)),
        ([], ("missing", None)),
        (["other"], ("failed", None)),
        (["data"], ("ok", "file")),
        (["data/a"], ("ok", "directory")),
    ],
)
def test_an_absent_artifact_is_missing(tmp_path: Path, members: list[str] | None, expected: tuple[str, str]) -> None:
    archives = {} if members is None else archive_of(tmp_path, members)
    [entry] = artifacts.keep([Artifact(source="/data")], archives, tmp_path / "kept")
    assert (entry["status"], entry["type"]) == expected


def test_an_archive_that_is_cut_off_ends_early(tmp_path: Path) -> None:
    archives = archive_of(tmp_path, ["data/a", "data/b"])
    os.truncate(tmp_path / "raw", 7000)
    [entry] = artifacts.keep([Artifact(source="/data")], archives, tmp_path / "kept")
    assert (entry["status"], entry["files"], entry["left_out"]) == ("ok", 1, 1)
