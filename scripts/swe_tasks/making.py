# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Make the tasks of all packages: rows and one image per task in a folder.

The finished tasks of a package are one file, so an interrupted run continues with the next package. Leftovers of
killed runs are removed by the next run.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.entries import Entries, Progress, cache_dir
from nemo_gym_prorl.sandbox.images.reference import portable_path
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.swe.task import make_row
from scripts.swe_tasks import packages as packages_module
from scripts.swe_tasks import repositories
from scripts.swe_tasks.hiding import by_file
from scripts.swe_tasks.images import LayeredImages, ensure_base
from scripts.swe_tasks.packages import Package
from scripts.swe_tasks.trials import Bug, pytest_command, sandbox_with_package


ROWS, PARTIAL, IMAGES, MAKING = "rows.jsonl", "partial.jsonl", "images", "making"

SHOWN = 8
"""Number of failures that a statement lists."""

WIDTH = 300
"""Longest line of a failure, in characters."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of a package.

    Attributes:
        rows: rows of ``prorl_swe``.
        partial: task name to patches that fix only a part of its bug.
        tried: number of mistakes that were tried.
    """

    rows: Sequence[Mapping[str, Any]]
    partial: Mapping[str, Sequence[str]]
    tried: int


def default_folder() -> Path:
    """Return the default output folder."""
    return cache_dir() / "swe-tasks"


async def make(
    packages: Sequence[Package], singles: int, folder: Path, runtime: Runtime, progress: Progress, *, at_once: int = 2
) -> list[Tasks]:
    """Make the missing tasks of packages and rewrite the rows.

    Args:
        packages: the packages.
        singles: tasks per package with one mistake; one more has two mistakes.
        folder: output folder for sources, images and rows.
        runtime: container runtime that builds images.
        progress: receives messages about each step.
        at_once: number of packages processed concurrently.

    Raises:
        InfrastructureError: a source, image or program is unavailable.
    """
    await asyncio.to_thread(packages_module.fetch, tuple(packages), folder / "sources")
    base = await asyncio.to_thread(ensure_base, runtime, progress)
    stack = LayeredImages(base, default_folder(), runtime)
    await asyncio.to_thread(stack.pack)
    being_made = Entries(folder / MAKING)
    await asyncio.to_thread(being_made.sweep)
    places = asyncio.Semaphore(at_once)

    async def one(package: Package) -> Tasks:
        kept = folder / "packages" / f"{package.name}-{_key(package, singles, base)}.json"
        async with places:
            with ExitStack() as held:
                work = await asyncio.to_thread(held.enter_context, being_made.making(package.name, progress))
                assert work is not None, "making() returns None only for published entries"
                if not kept.exists():
                    done = await _tasks(package, singles, folder, work, stack, base, progress)
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    part = work / kept.name
                    part.write_bytes(orjson.dumps(done))
                    part.rename(kept)
        tasks = Tasks(**orjson.loads(kept.read_bytes()))
        # The folder may have been moved since the tasks were made.
        return replace(
            tasks, rows=[{**row, "image": portable_path(image_path(row["instance_id"], folder))} for row in tasks.rows]
        )

    # Finished packages are kept if another one fails.
    done = await asyncio.gather(*map(one, packages), return_exceptions=True)
    if failed := [result for result in done if isinstance(result, BaseException)]:
        raise failed[0]
    made = [result for result in done if isinstance(result, Tasks)]
    rows = [row for tasks in made for row in tasks.rows]
    (folder / ROWS).write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    partial = [
        {"instance_id": name, "patch": patch}
        for tasks in made
        for name, patches in tasks.partial.items()
        for patch in patches
    ]
    (folder / PARTIAL).write_bytes(b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in partial))
    return made


def image_path(instance_id: str, folder: Path) -> Path:
    """Return the path of a task's image."""
    return folder / IMAGES / f"{instance_id}.sif"


async def _tasks(
    package: Package, singles: int, folder: Path, work: Path, stack: LayeredImages, base: Path, progress: Progress
) -> Tasks:
    tree = packages_module.unpack(package, folder / "sources", work / "tree")
    async with sandbox_with_package(package, tree, base) as trials:
        stable = await trials.stable()
        progress(f"{package.name}: {len(stable)} tests")
        bugs = [(bug, ()) for bug in await trials.bugs(stable, singles, package.version)]
        double = await trials.double(stable, [bug for bug, _ in bugs])
        tried = trials.tried
    chosen: list[tuple[Bug, tuple[Bug, ...]]] = [*bugs, *([(double[0], double[1:])] if double else [])]
    rows, partial = [], {}
    for number, (bug, parts) in enumerate(chosen, 1):
        name = f"made__{package.name}-{number}"
        row, patches = await asyncio.to_thread(_task, package, tree, bug, parts, name, work, folder, stack)
        rows.append(row)
        if patches:
            partial[name] = patches
        progress(f"{name}: {', '.join(bug.kinds)}; breaks {len(bug.effect.broken)} tests of {len(stable)}")
    if not rows:
        raise InfrastructureError(f"none of {tried} mistakes in {package.name} makes a usable task")
    return Tasks(rows, partial, tried)


def _task(
    package: Package,
    tree: Path,
    bug: Bug,
    parts: tuple[Bug, ...],
    name: str,
    work: Path,
    folder: Path,
    stack: LayeredImages,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    contents, scratch = work / name, work / f"{name}.image"
    made = repositories.make(tree, bug, parts, contents / "testbed")
    image = image_path(name, folder)
    image.parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    stack.add(contents, image, scratch)
    shutil.rmtree(contents)
    shutil.rmtree(scratch)
    instance = SweInstance(
        dataset="made",
        repo=package.repo,
        version=package.version,
        base_commit=made.base_commit,
        problem_statement=statement(package.name, package.version, bug.effect.messages),
        patch=made.patch,
        test_patch=made.test_patch,
        FAIL_TO_PASS=tuple(sorted(bug.effect.broken)),
        PASS_TO_PASS=tuple(sorted(bug.effect.kept)),
        test_command=pytest_command(" ".join(sorted(by_file(bug.effect.broken)))),
    )
    return make_row(name, portable_path(image), instance), made.partial


def statement(package: str, version: str, broken: Mapping[str, str]) -> str:
    """Return the problem statement.

    Args:
        package: name of the package.
        version: version of the package.
        broken: broken test to its failure message.
    """
    lines = [f"{package} {version} does not do what it should. These checks of its behaviour fail:", ""]
    for test in sorted(broken)[:SHOWN]:
        lines.append(f"- {test.partition('::')[2].replace('::', ', ')}"[:WIDTH])
        if message := broken[test].strip():
            lines.append(f"      {message[:WIDTH]}")
    if len(broken) > SHOWN:
        lines.append(f"- and {len(broken) - SHOWN} more")
    lines += ["", "All others pass. Find what is wrong in the package and mend it there."]
    return "\n".join(lines)


def _key(package: Package, singles: int, base: Path) -> str:
    """Return a key of all inputs of a package's tasks."""
    return hashlib.sha256(repr((package, singles, base.parent.name)).encode()).hexdigest()[:12]
