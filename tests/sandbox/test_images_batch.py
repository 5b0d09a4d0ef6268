# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl image build-all``: the images of rows, several at a time, each with one outcome."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_gym_prorl.cli.image import images
from nemo_gym_prorl.cli.image.images import ImageJob, ImageOutcome, ImageState, build_all, make_images, write_report
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.dockerfile.builder import DockerfileRequest, build_dockerfile, inspect_dockerfile
from nemo_gym_prorl.sandbox.images.entries import ignore_progress, machine
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.rootfs import link_unchanged
from nemo_gym_prorl.sandbox.images.store import ImageInfo, ImageStore, config_of
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.tasks.harbor.task_folder import DockerfileFacts, make_row
from tests.sandbox.registry import layer, serve
from tests.tasks.harbor.task_files import write_task


STAGES = "FROM debian:13 AS tools\nRUN echo tool > /tool\n\nFROM debian:13\nCOPY --from=tools /tool /tool\n"
UNREACHABLE = "127.0.0.1:9/us/base:1"


def task(folder: Path, dockerfile: str, base: object, **files: str) -> dict[str, Any]:
    write_task(folder, {"environment/Dockerfile": dockerfile, **files})
    facts_of = lambda path: DockerfileFacts(inspect_dockerfile(path)[0])  # noqa: E731
    return make_row(folder, replaced={"debian:13": str(base)}, facts_of=facts_of)


def written(rows: Path, *made: Mapping[str, Any]) -> Path:
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    return rows


def run(rows: Path, store: ImageStore, runtime: Runtime, max_gb: float | None = None) -> dict[str, ImageOutcome]:
    outcomes = [*build_all(rows, Puller(store, runtime, tries=1), 2, max_gb, Console(quiet=True))]
    assert len({one.name for one in outcomes}) == len(outcomes)
    return {one.name: one for one in outcomes}


@pytest.mark.sandbox
def test_images_of_rows_are_made_once_and_failures_stop_nothing(
    image: Path, tiny_root: Path, store: ImageStore, runtime: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/Dockerfile").write_text("FROM debian:13\n")
    of_base = DockerfileRequest(tmp_path / "base", "base", replaced={"debian:13": str(image)})
    base = build_dockerfile(of_base, store, runtime, ignore_progress)
    good = task(tmp_path / "good", f"{STAGES}RUN echo x >> /etc/passwd\nWORKDIR /srv\nUSER nobody\n", "base")
    shared = task(tmp_path / "shared", f"{STAGES}RUN cat /tool > /copy\n", "base")
    broken = task(tmp_path / "broken", "FROM debian:13\n\nRUN echo a reason >&2; exit 3\n", "base")
    changed = task(tmp_path / "changed", f"{STAGES}RUN true\n", "base")
    (tmp_path / "changed/environment/data.txt").write_text("43")
    lost = task(tmp_path / "lost", f"FROM {UNREACHABLE}\nRUN true\n", "base")
    verified = task(tmp_path / "verified", STAGES, "base", **{
        "task.toml": '[verifier]\nenvironment_mode = "separate"\n',
        "tests/Dockerfile": "FROM debian:13\nCOPY test.sh /tests/\n",
    })  # fmt: skip
    with serve() as registry:
        pulled = registry.add("us/task:1", [layer(tiny_root)], machine(), WorkingDir="/app")
        rows = written(
            tmp_path / "rows.jsonl", good, good | {"instance_id": "again"}, shared, broken, changed, lost, verified,
            {"image": pulled}, {"image": "no-such-name"},
        )  # fmt: skip
        outcomes = run(rows, store, runtime)
    states = {name: outcome.state for name, outcome in outcomes.items()}
    tests = verified["harbor"]["verifier_images"][""]["image"]
    assert states == {
        **{row["image"]: ImageState.MADE for row in (good, shared, verified)},
        tests: ImageState.MADE,
        pulled: ImageState.MADE,
        f"docker://{UNREACHABLE}": ImageState.FAILED,
        **{row["image"]: ImageState.FAILED for row in (broken, changed, lost)},
        "no-such-name": ImageState.FAILED,
    }
    said = {row["instance_id"]: outcomes[row["image"]].reason for row in (broken, changed, lost)}
    assert "a reason" in said["broken"]
    assert "Dockerfile: line 3 failed with exit code 3" in said["broken"]
    assert "has changed; make the rows again" in said["changed"]
    assert f"its base docker://{UNREACHABLE} is missing" in said["lost"]
    made = store.find(good["image"])
    assert made is not None
    config = config_of(made)
    assert config is not None
    assert (config.workdir, config.user) == ("/srv", "nobody")
    assert (store.find(shared["image"]) or Path()).joinpath("copy").read_text() == "tool\n"
    # The stage ``tools`` exists once for all tasks: a base, four targets, one stage, one pulled image.
    assert len(store.all()) == 7
    # An image takes the room of what it changed.
    assert (made / "usr/bin/env").samefile(base / "usr/bin/env")
    assert not (made / "etc/passwd").samefile(base / "etc/passwd")
    assert "x" not in (base / "etc/passwd").read_text().splitlines()
    file = tmp_path / "report.jsonl"
    assert [*write_report(outcomes.values(), file)] == [*outcomes.values()]
    lines = {line["image"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert lines[broken["image"]]["line"] == 3
    assert lines[good["image"]].keys() == {"image", "state", "seconds", "mib"}
    assert lines[good["image"]]["mib"] < 40
    again = run(written(rows, good, shared, verified), store, runtime)
    assert {one.state for one in again.values()} == {ImageState.PRESENT}


@pytest.mark.sandbox
def test_removed_image_is_made_again(image: Path, store: ImageStore, runtime: Runtime, tmp_path: Path) -> None:
    row = task(tmp_path / "good", "FROM debian:13\nRUN true\n", image)
    rows = written(tmp_path / "rows.jsonl", row)
    assert run(rows, store, runtime)[row["image"]].state == ImageState.MADE
    for made in store.all():
        store.images.remove(made.entry.name)
    assert run(rows, store, runtime)[row["image"]].state == ImageState.MADE
    assert run(rows, store, runtime, max_gb=0)[row["image"]].state == ImageState.PRESENT


def test_only_files_that_are_the_same_become_links(tmp_path: Path) -> None:
    root, base = tmp_path / "entry/root", tmp_path / "base"
    for folder in (root, base):
        for name in ("same", "mode", "time", "content", "deep/same", "linked/a", "new/a"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x" * 5000)
            os.utime(folder / name, (1, 1 + 0.5 * (folder == base)))  # the runtime copies whole seconds
    (root / "mode").chmod(0o755)
    os.utime(root / "time", (1, 2))
    (root / "content").write_bytes(b"x" * 4999 + b"y")
    os.utime(root / "content", (1, 1))
    (base / "new/a").unlink()
    (base / "linked").rename(tmp_path / "outside")
    (base / "linked").symlink_to(tmp_path / "outside")
    os.link(root / "deep/same", root / "deep/other")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    saved = link_unchanged(root, base)
    assert saved == (root / "same").stat().st_blocks * 512 > 0
    linked = [str(path.relative_to(root)) for path in before if any(path.samefile(one) for one in base.rglob("*"))]
    assert linked == ["same"], "a second name of a file stays with the first"
    assert {path: path.read_bytes() for path in before} == before
    assert not (root / "linked/a").samefile(tmp_path / "outside/a")
    assert [path.name for path in root.parent.iterdir()] == ["root"]


def test_rows_without_an_image_are_refused_by_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for text, said in (("", "has no rows"), ("\n{", ":2: is not JSON"), ('{"a": 1}', ":1: image: names no image"),
                       ('{"image": "a", "instance_id": "b", "harbor": {}}', ":1: harbor.folder")):  # fmt: skip
        rows.write_text(text)
        with pytest.raises(CallerError, match=said):
            next(build_all(rows, Puller(ImageStore(tmp_path), None), 1, None, Console(quiet=True)))  # type: ignore[arg-type]


def test_report_has_an_outcome_before_the_next_is_known(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", {"image": "unknown"}, {"image": UNREACHABLE})
    made = build_all(rows, Puller(ImageStore(tmp_path), None), 1, None, Console(quiet=True))  # type: ignore[arg-type]
    with closing(made):
        next(write_report(made, tmp_path / "report.jsonl"))
    [line] = map(json.loads, (tmp_path / "report.jsonl").read_text().splitlines())
    assert (line["image"], line["state"]) == ("unknown", "failed")
    with pytest.raises(CallerError, match="--report: cannot be written"):
        next(write_report((), tmp_path))


def stored(store: ImageStore, name: str, mib: int) -> Path:
    with store.images.making(name) as work:
        assert work is not None
        (work / "made").mkdir()
        (work / "made/file").write_bytes(bytes(mib << 20))
        return store.publish(work, work / "made", name, ImageInfo("image", name, "folder", 0, time.time()))


@pytest.mark.parametrize(("mib", "made"), [(40, 9), (32, 7), (5, 1), (0, 0)])
def test_no_image_is_begun_above_the_limit(store: ImageStore, mib: int, made: int) -> None:
    """Each of 9 images has 4 MiB: with a limit none ends above it but the first, whose size nobody knew."""
    jobs = [ImageJob(f"i{one}", lambda: None, lambda one=one: stored(store, f"i{one}", 4)) for one in range(9)]
    outcomes = list(make_images(jobs, store, 1, mib << 20))
    counts = [sum(one.state == state for one in outcomes) for state in (ImageState.MADE, ImageState.NO_ROOM)]
    assert counts == [made, 9 - made]
    assert sum(one.info.bytes for one in store.all()) <= max(mib, 4) << 20
    assert all(bool(one.reason) == (one.state == ImageState.NO_ROOM) for one in outcomes)


def test_no_image_is_begun_on_a_full_disk(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([5 << 30, 1 << 30, 1 << 20])
    monkeypatch.setattr(images, "free_bytes", lambda _folder: next(free))
    jobs = [ImageJob(f"i{one}", lambda: None, lambda one=one: stored(store, f"i{one}", 1)) for one in range(3)]
    assert [one.state for one in make_images(jobs, store, 1)] == ["made", "made", "no_room"]


def test_images_are_made_side_by_side_and_any_failure_is_an_outcome(store: ImageStore) -> None:
    meet = threading.Barrier(3)

    def fail(error: Exception) -> Path:
        meet.wait(30)
        raise error

    errors = [InfrastructureError("no network"), OSError(28, "no space"), RecursionError("deep")]
    jobs = [ImageJob(str(one), lambda: None, lambda one=one: fail(one)) for one in errors]
    outcomes = {one.name: one.reason for one in make_images(jobs, store, 3)}
    assert outcomes["no network"] == "no network"
    assert "no space" in outcomes["[Errno 28] no space"]
    assert outcomes["deep"] == "RecursionError: deep"


@pytest.mark.parametrize(
    ("put", "context", "said"),
    [
        (lambda file: file.symlink_to("../../secret"), "environment", "is a link that leaves the task's folder"),
        (lambda file: file.touch(), "..", "Dockerfile: is a link that leaves the task's folder"),
    ],
    ids=["host's file", "context outside"],
)
def test_hostile_dockerfile_is_one_failed_image(
    put: Callable[[Path], object], context: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("TOKEN=of-the-host")
    (tmp_path / "Dockerfile").write_text("TOKEN=of-the-host")
    row = task(tmp_path / "task", "FROM debian:13\n", "base")
    (tmp_path / "task/environment/Dockerfile").unlink()
    put(tmp_path / "task/environment/Dockerfile")
    row["harbor"]["builds"] = {row["image"]: context}
    rows = written(tmp_path / "rows.jsonl", row)
    [outcome] = build_all(rows, Puller(ImageStore(tmp_path / "store"), None), 1, None, Console(quiet=True))  # type: ignore[arg-type]
    assert outcome.state == ImageState.FAILED
    assert said in outcome.reason
    assert "TOKEN" not in outcome.reason


@pytest.mark.parametrize(("own", "limit_s"), [("60", 3600.0), ("7200", 7200.0)])
def test_a_task_raises_the_time_limit_of_its_build_and_never_lowers_it(
    own: str, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def record(request: DockerfileRequest, *_more: object) -> Path:
        limits.append(request.timeout_s)
        raise InfrastructureError("not built")

    monkeypatch.setattr(images, "build_dockerfile", record)
    toml = f"[environment]\nbuild_timeout_sec = {own}\n"
    row = task(tmp_path / "task", "FROM debian:13\n", "base", **{"task.toml": toml})
    run(written(tmp_path / "rows.jsonl", row), ImageStore(tmp_path / "store"), None)  # type: ignore[arg-type]
    assert limits == [limit_s]
