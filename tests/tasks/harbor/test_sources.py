# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data harbor``: tasks from folders, registries, repositories and packed files."""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from nemo_gym_prorl.cli.app import app
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor import sources
from nemo_gym_prorl.tasks.harbor.task_folder import HarborRow
from tests.tasks.harbor.task_files import write_task


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, and a git that runs a hook wherever it may."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    (tmp_path / "hooks/post-checkout").chmod(0o755)
    (tmp_path / "gitconfig").write_text(
        f"[core]\n\thooksPath = {tmp_path}/hooks\n[user]\n\tname = a\n\temail = a@b.c\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "harbor"


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with tasks ``sum`` and, from the second commit on, ``difference``; the first has the tag ``v1``."""
    folder = tmp_path / "repository"
    write_task(folder / "sets/sum")
    git(folder, "init", "--quiet", "--initial-branch=main")
    for task in ("sum", "difference"):
        write_task(folder / "sets" / task)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", task)
        if task == "sum":
            git(folder, "tag", "v1")
    return folder


def prorl_data(source: object, output: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["data", "harbor", str(source), "-o", str(output), *map(str, words)])


def tasks_in(output: Path) -> dict[str, Path]:
    rows = [HarborRow.parse(json.loads(line)) for line in output.read_text().splitlines()]
    return {row.instance_id: Path(row.harbor.folder) for row in rows}


def refusal(done: Result) -> str:
    assert isinstance(done.exception, CallerError), done.output
    return done.exception.reason


def test_folders_at_any_depth(tmp_path: Path) -> None:
    for task in ("one", "deep/er/two", "one/tests/inner", ".hidden/three"):
        write_task(tmp_path / "set" / task)
    (tmp_path / "set/dataset.toml").write_text('[dataset]\nname = "us/set"\n')
    (tmp_path / "set/link").symlink_to(tmp_path / "set/deep")
    output = tmp_path / "rows.jsonl"
    assert prorl_data(tmp_path / "set", output).exit_code == 0
    assert tasks_in(output) == {"one": tmp_path / "set/one", "two": tmp_path / "set/deep/er/two"}
    assert prorl_data(tmp_path / "set/one", output).exit_code == 0
    assert list(tasks_in(output)) == ["one"]
    assert "has no folder with a task.toml" in refusal(prorl_data(tmp_path / "hooks", output))
    assert "is no folder" in refusal(prorl_data(tmp_path / "nowhere", output))


def test_refused_tasks_are_listed_and_the_others_written(tmp_path: Path) -> None:
    write_task(tmp_path / "set/a")
    write_task(tmp_path / "set/b", {"task.toml": "[environment]\ngpus = 1"})
    write_task(tmp_path / "set/more/a")
    write_task(tmp_path / "set/c", {"task.toml": '[environment]\ndocker_image = "Not An Image"'})
    output = tmp_path / "rows.jsonl"
    done = prorl_data(tmp_path / "set", output)
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    for expected in (
        "task b: environment.gpus: is not supported",
        "task c: docker_image: 'docker://Not An Image' is not the address of an image",
        f"task more/a: name: 'a' is the name of {tmp_path}/set/a, too",
        "4 tasks: 1 kept, 0 dropped, 3 refused",
    ):
        assert expected in said
    assert tasks_in(output) == {"a": tmp_path / "set/a"}


def test_replaced_base_is_in_the_row_and_an_unused_one_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "set/a")
    write_task(tmp_path / "set/b", {"environment/Dockerfile": "FROM debian:12\n"})
    output = tmp_path / "rows.jsonl"
    assert "'debian:11'" in refusal(prorl_data(tmp_path / "set", output, "--replace", "debian:11=mine"))
    assert not output.exists()
    plain, other = tmp_path / "plain.jsonl", tmp_path / "other.jsonl"
    assert prorl_data(tmp_path / "set", plain).exit_code == 0
    assert prorl_data(tmp_path / "set", other, "--replace", "debian:13=mine", "--data-source", "x").exit_code == 0
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in (plain, other)]
    assert [one["harbor"].get("replaced") for one in rows[1]] == [{"debian:13": "mine"}, None]
    assert [one["image"] == two["image"] for one, two in zip(*rows, strict=True)] == [False, True]
    assert {row["data_source"] for row in rows[1]} == {"x"}


@pytest.mark.parametrize(
    ("tail", "tasks"),
    [("@main", ["difference", "sum"]), ("@v1", ["sum"]), ("@v1#sets/sum", ["sum"]), ("@COMMIT#sets", ["sum"])],
)
def test_repository_at_a_reference(tail: str, tasks: list[str], repository: Path, cache: Path, tmp_path: Path) -> None:
    first, output = git(repository, "rev-parse", "v1"), tmp_path / "rows.jsonl"
    done = prorl_data(f"file://{repository}{tail.replace('COMMIT', first)}", output)
    assert done.exit_code == 0, done.output
    found = tasks_in(output)
    assert sorted(found) == tasks
    assert all(folder.is_relative_to(cache) and (folder / "task.toml").is_file() for folder in found.values())
    assert not (tmp_path / "hook-ran").exists()
    assert not list(cache.glob(".making-*"))


def test_commit_in_the_cache_is_not_fetched_again(repository: Path, tmp_path: Path) -> None:
    first, output = git(repository, "rev-parse", "v1"), tmp_path / "rows.jsonl"
    assert prorl_data(f"file://{repository}@v1", output).exit_code == 0
    before = output.read_text()
    repository.rename(tmp_path / "moved")
    assert prorl_data(f"file://{repository}@{first}", output).exit_code == 0
    assert output.read_text() == before
    done = prorl_data(f"file://{repository}@main", output)
    assert "git fetch failed" in str(done.exception)
    assert output.read_text() == before


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("https://example.org/us/tasks", "must end with @REF"),
        ("git@example.org:us/tasks.git", "must end with @REF"),
        ("ext::sh -c true@main", "is no folder"),
    ],
)
def test_address_without_a_reference_is_refused(source: str, said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "harbor", "-o", str(tmp_path / "rows.jsonl"), "--", source])
    assert said in refusal(done)


def registry(repository: Path, tmp_path: Path) -> Path:
    def task(name: str, path: str, commit: str = "HEAD", url: str | None = f"file://{repository}") -> dict[str, Any]:
        return {"name": name, "path": path, "git_url": url, "git_commit_id": commit}

    write_task(tmp_path / "own/local")
    first = git(repository, "rev-parse", "v1")
    tasks = [
        task("sum", "sets/sum", first),
        task("later", "sets/difference", first),
        task("difference", "sets/difference"),
        task("outside", "../.."),
        task("gone", "sets/sum", url="file:///nowhere/at/all"),
        task("option", "sets/sum", url="--upload-pack=touch hook-ran"),
        task("helper", "sets/sum", url="fd::7"),
        {"name": "zero", "path": "a\0b"},
        {"name": "local", "path": "own/local"},
    ]
    file = tmp_path / "registry.json"
    versions = [
        {"name": "set", "version": "2.0", "tasks": tasks},
        {"name": "set", "version": "1.0", "tasks": tasks[:1]},
    ]
    file.write_text(json.dumps([{**one, "description": ""} for one in versions]))
    return file


def test_registry_names_tasks_of_repositories(repository: Path, tmp_path: Path) -> None:
    file, output = registry(repository, tmp_path), tmp_path / "rows.jsonl"
    done = prorl_data(file, output, "--name", "set@2.0")
    assert done.exit_code == 1
    assert list(tasks_in(output)) == ["sum", "difference", "local"]
    said = " ".join(done.output.split())
    for expected in (
        "task later: task.toml: missing",
        "task outside: path: '../..' leaves the repository",
        "task gone: git_url: git fetch failed",
        "task option: git_url:",
        "task helper: git_url: git fetch failed: fatal: transport 'fd' not allowed",
        "task zero: cannot be read: ValueError",
        "9 tasks: 3 kept",
    ):
        assert expected in said
    assert not (tmp_path / "hook-ran").exists()
    assert prorl_data(file, output, "--name", "set@1.0").exit_code == 0
    assert list(tasks_in(output)) == ["sum"]
    for words in ([], ["--name", "set"], ["--name", "other"]):
        assert "there are: set@2.0, set@1.0" in refusal(prorl_data(file, output, *words))
    file.write_text('[{"name": 1}]')
    assert "is no registry: 0.name" in refusal(prorl_data(file, output))


def packed(*members: tarfile.TarInfo | Path, mode: Any = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for member in members:
            if isinstance(member, Path):
                archive.add(member, ".")
            else:
                archive.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


def packed_headers(count: int) -> bytes:
    """An archive that begins with headers for headers."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 11
    return (info.tobuf(tarfile.USTAR_FORMAT) + b"11 path=ab\n".ljust(512, b"\0")) * count


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def test_packed_tasks_are_unpacked_safely(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TASK_BYTES", 100_000)
    task, sparse = write_task(tmp_path / "task"), member("a")
    sparse.pax_headers = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0", "GNU.sparse.name": "a"}
    cases: list[tuple[str, Any, str]] = [
        ("us/sum", packed(task), ""),
        ("us/plain", packed(task, mode="w"), ""),
        ("us/long", packed(task, member("x/" + "y" * 200)), ""),
        ("above", packed(task, member("../../outside")), "leads out"),
        ("absolute", packed(task, member("/outside")), "leads out"),
        ("deep", packed(task, member("a/" * 101 + "b")), "too deep"),
        ("link", packed(task, member("a", tarfile.SYMTYPE, "task.toml")), "not a regular file or folder"),
        ("device", packed(task, member("a", tarfile.CHRTYPE)), "not a regular file or folder"),
        ("pipe", packed(task, member("a", tarfile.FIFOTYPE)), "not a regular file or folder"),
        ("sparse", packed(task, sparse), "not a regular file or folder"),
        ("old sparse", packed(task, member("a", tarfile.GNUTYPE_SPARSE)), "not a regular file or folder"),
        ("large", packed(task, member("a", size=200_000)), "it has more than"),
        ("cut", packed(task, mode="w")[:5000], "unexpected end of data"),
        ("cut at a header", packed(task, member("zz"), mode="w").partition(b"zz\0")[0], "its end is missing"),
        ("damaged", packed(task, member("zz"), mode="w").replace(b"zz\0", b"zy\0"), "its end is missing"),
        ("deep headers", packed_headers(3000), "cannot be unpacked"),
        ("cut gzip", packed(task)[:100], "cannot be unpacked"),
        ("a\0b", packed(task), "cannot be unpacked"),
        ("\x1b[2J\n", packed(task, member("../x")), "leads out"),
        ("empty", packed(), "task.toml"),
        ("nothing", None, "must be the bytes"),
    ]
    file, output = tmp_path / "tasks.parquet", tmp_path / "rows.jsonl"
    records = [{"path": path, "task_binary": data} for path, data, _said in cases]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    done = prorl_data(file, output)
    assert done.exit_code == 1
    found = tasks_in(output)
    assert list(found) == ["sum", "plain", "long"]
    assert "\x1b" not in done.stderr
    assert (cache / found["long"] / "x" / ("y" * 200)).is_file()
    assert all(folder.is_relative_to(cache) for folder in found.values())
    refused = [line for line in done.stderr.splitlines() if line.startswith("task ")]
    for line, (_path, _data, said) in zip(refused, [case for case in cases if case[2]], strict=True):
        assert said in line
    assert not list(tmp_path.rglob("outside"))
    assert not list(cache.glob(".making-*"))
