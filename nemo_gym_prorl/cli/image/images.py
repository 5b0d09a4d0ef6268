# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Implementation of ``prorl image``: pull, build, list and remove sandbox images, with progress.

Images are pulled or built in parallel, within a limit of disk space, with one outcome per image. A failed image does
not stop the others. Existing images are skipped, so an interrupted run can be continued.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nemo_gym_prorl.cli.json_lines import json_lines
from nemo_gym_prorl.cli.show import visible
from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.sandbox.dockerfile.builder import DockerfileRequest, build_dockerfile, inspect_dockerfile
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.builder import BUILD_TIMEOUT_S, BUILTIN_IMAGES, MIN_FREE_BYTES, image_path
from nemo_gym_prorl.sandbox.images.entries import free_bytes, ignore_progress
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import RegistryImage, parse, parse_registry
from nemo_gym_prorl.sandbox.images.store import Image, ImageStore, read_info
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.tasks.harbor.task_folder import HarborRow, HarborTask, built_image, plain_file, refusing_anything


@dataclass(frozen=True, slots=True)
class ImageJob:
    """An image to pull or build.

    Attributes:
        name: registry address or name of the image.
        find: returns the path of an existing image; ``None`` if the image is missing.
        make: pulls or builds the image and returns its path; raises :class:`RolloutError`.
    """

    name: str
    find: Callable[[], Path | None]
    make: Callable[[], Path]


class ImageState(StrEnum):
    """Outcome of an image job."""

    MADE = "made"
    PRESENT = "present"
    FAILED = "failed"
    NO_ROOM = "no_room"
    """Not begun, for lack of disk space."""


@dataclass(frozen=True, slots=True)
class ImageOutcome:
    """Result of an image job.

    Attributes:
        name: registry address or name of the image.
        state: how the job ended.
        reason: why the image is missing; empty if it exists.
        seconds: duration of the pull or build, also of a failed one; 0 if none was begun.
        bytes: size of a new image on disk; 0 otherwise, and if another job has made the same image.
    """

    name: str
    state: ImageState
    reason: str = ""
    seconds: float = 0.0
    bytes: int = 0


def pull_job(puller: Puller, wanted: RegistryImage) -> ImageJob:
    return ImageJob(wanted.uri, lambda: puller.store.locate(wanted), lambda: puller.pull(wanted))


def make_images(
    jobs: Sequence[ImageJob], store: ImageStore, parallel: int, max_bytes: int | None = None
) -> Generator[ImageOutcome]:
    """Run ``parallel`` jobs at a time and yield one outcome per job, in order of completion. Closing the generator
    ends all pulls and builds.

    Args:
        max_bytes: limit for all images of the store; ``None`` for no limit. No job is begun if the running jobs may
            reach the limit, or if the disk is nearly full.
    """
    budget = _DiskBudget(store, max_bytes)
    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(_make, job, budget) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            build_tools.stop_all()
            raise


def _make(job: ImageJob, budget: _DiskBudget) -> ImageOutcome:
    started = time.monotonic()
    try:
        if job.find():
            return ImageOutcome(job.name, ImageState.PRESENT)
        if reason := budget.enter():
            return ImageOutcome(job.name, ImageState.NO_ROOM, reason)
        try:
            size = budget.take(job.make())
        finally:
            budget.leave()
    except Exception as error:  # a bug that one image triggers must not stop the others
        reason = error.reason if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
        return ImageOutcome(job.name, ImageState.FAILED, reason, time.monotonic() - started)
    return ImageOutcome(job.name, ImageState.MADE, "", time.monotonic() - started, size)


@dataclass(slots=True)
class _DiskBudget:
    """Disk space for further images. A running job counts with the size of the largest finished image."""

    store: ImageStore
    max_bytes: int | None
    running: int = 0
    largest: int = 0
    made: set[Path] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> str:
        """Count one more running job, or return why the disk space does not suffice; empty if it does."""
        with self.lock:
            free = free_bytes(self.store.images.folder)
            if free < (self.running + 1) * MIN_FREE_BYTES:
                return f"only {free >> 20} MiB are free on the disk of {self.store.images.folder}"
            if self.max_bytes is not None:
                taken = sum(image.info.bytes for image in self.store.all())
                if taken + (self.running + 1) * self.largest > self.max_bytes or taken >= self.max_bytes:
                    return f"the images take {taken >> 20} of {self.max_bytes >> 20} MiB"
            self.running += 1
        return ""

    def take(self, image: Path) -> int:
        """Record a new image and return its size in bytes; 0 if an earlier job has made the same image."""
        info = read_info(image.parent)
        with self.lock:
            size = info.bytes if info and image not in self.made else 0
            self.made.add(image)
            self.largest = max(self.largest, size)
        return size

    def leave(self) -> None:
        with self.lock:
            self.running -= 1


GIB = 1 << 30
DAY_S = 86400.0


@contextmanager
def progress_step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with messages, then the last message and the duration; yields the function for messages."""
    started = time.monotonic()
    last = ""

    def say(message: str) -> None:
        nonlocal last
        last = message
        spinner.update(f"{title}: {message}")
        if not console.is_terminal:
            console.print(f"  {title}: {message}", markup=False, soft_wrap=True)

    with console.status(title) as spinner:
        yield say
    if console.is_terminal:
        console.print(f"{title}: {last} ({time.monotonic() - started:.1f} s)", markup=False, soft_wrap=True)
    else:
        console.print(f"{title}: done in {time.monotonic() - started:.1f} s", markup=False, soft_wrap=True)


def pull(puller: Puller, images: Sequence[RegistryImage], jobs: int, console: Console) -> bool:
    """Pull images with a progress bar; return whether all images exist."""
    wanted = [pull_job(puller, one) for one in images]
    return print_outcomes([*_run(wanted, puller.store, jobs, None, console)], console)


def _run(
    jobs: Sequence[ImageJob], store: ImageStore, parallel: int, max_gb: float | None, console: Console
) -> Generator[ImageOutcome]:
    """Make images as :func:`make_images`, with a progress bar."""
    if not jobs:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    max_bytes = None if max_gb is None else int(max_gb * GIB)
    with (
        Progress(*columns, console=console) as bar,
        closing(make_images(jobs, store, parallel, max_bytes)) as outcomes,
    ):
        task = bar.add_task("images", total=len(jobs))
        for outcome in outcomes:
            failed += bool(outcome.reason)
            bar.update(task, advance=1, description=f"images, {failed} failed" if failed else "images")
            yield outcome


def print_outcomes(outcomes: Sequence[ImageOutcome], console: Console) -> bool:
    """Print counts of outcomes and the reasons of failures; return whether all images exist."""
    counts = Counter(outcome.state for outcome in outcomes)
    size, seconds = sum(one.bytes for one in outcomes), sum(one.seconds for one in outcomes)
    left = f", {counts[ImageState.NO_ROOM]} left out for lack of room" if counts[ImageState.NO_ROOM] else ""
    console.print(
        f"{counts[ImageState.MADE]} made ({size >> 20} MiB, {seconds:.0f} s of work), "
        f"{counts[ImageState.PRESENT]} already present, {counts[ImageState.FAILED]} failed{left}"
    )
    for outcome in outcomes:
        if outcome.reason:
            console.print(
                f"[red]{escape(visible(outcome.name))}[/]: {escape(visible(outcome.reason))}", soft_wrap=True
            )
    return not any(outcome.reason for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class _HarborBuild:
    """Image that is built from a Dockerfile of a Harbor task.

    Attributes:
        task: task of the first row that names the image.
        replaced: by base image of the Dockerfile, the base to use instead.
        bases: registry images that the Dockerfile needs.
    """

    name: str
    task: HarborTask
    replaced: Mapping[str, str]
    bases: Sequence[RegistryImage]

    @classmethod
    def of(cls, name: str, task: HarborTask) -> _HarborBuild:
        """Read the Dockerfile of the image ``name``.

        Raises:
            CallerError: the folder has changed since the row was made, or the Dockerfile cannot be built.
        """
        root, context = Path(task.folder).resolve(), task.builds[name]
        images = sorted(inspect_dockerfile(plain_file(root, f"{context}/Dockerfile"))[0])
        replaced = {image: task.replaced[image] for image in images if image in task.replaced}
        if built_image(root, context, replaced) != name:
            raise CallerError(f"{str(root / context)!r} has changed; make the rows again with `prorl data harbor`")
        return cls(name, task, replaced, [parse_registry(image, "FROM") for image in images if image not in replaced])

    def make(self, store: ImageStore, runtime: Runtime) -> Path:
        folder = Path(self.task.folder, self.task.builds[self.name])
        # In Harbor the limit bounds the start of each trial, so it may be short; here an image is built only once.
        timeout_s = max(BUILD_TIMEOUT_S, self.task.config.environment.build_timeout_sec)
        request = DockerfileRequest(folder, self.name, replaced=self.replaced, timeout_s=timeout_s)
        return build_dockerfile(request, store, runtime, ignore_progress)


def build_all(
    rows: Path, puller: Puller, jobs: int, max_gb: float | None, console: Console
) -> Generator[ImageOutcome]:
    """Pull or build the images of all rows, with a progress bar; yield one outcome for each, in order of completion.

    Bases of Dockerfiles are pulled first, each once. A build on an unavailable base fails with the base's name.

    Raises:
        CallerError: a row names no image, or is no valid row of a Harbor task; names the line.
    """
    store = puller.store
    pulls: dict[RegistryImage, None] = {}
    builds: list[_HarborBuild] = []
    for name, task in _images_of_rows(rows).items():
        try:
            if task is None and isinstance(wanted := parse(name), RegistryImage):
                pulls[wanted] = None
            elif task is None or ((entry := store.entry_named(name)) and store.payload(entry)):
                store.find(name)
                yield ImageOutcome(name, ImageState.PRESENT)
            else:
                with refusing_anything():
                    builds.append(_HarborBuild.of(name, task))
        except CallerError as error:
            yield ImageOutcome(name, ImageState.FAILED, error.reason)
    bases = [base for build in builds for base in build.bases]
    wanted_first = [pull_job(puller, one) for one in dict.fromkeys([*pulls, *bases])]
    missing, todo = set[str](), []
    with closing(_run(wanted_first, store, jobs, max_gb, console)) as outcomes:
        for outcome in outcomes:
            if outcome.reason:
                missing.add(outcome.name)
            yield outcome
    for build in builds:
        if lost := [base.uri for base in build.bases if base.uri in missing]:
            hint = "rows made by `prorl data harbor --replace` name another base"
            yield ImageOutcome(build.name, ImageState.FAILED, f"its base {lost[0]} is missing; {hint}")
        else:
            todo.append(ImageJob(build.name, lambda: None, partial(build.make, store, puller.runtime)))
    yield from _run(todo, store, jobs, max_gb, console)


def _images_of_rows(rows: Path) -> dict[str, HarborTask | None]:
    """Return the images that rows name, in order, with the task that contains an image's Dockerfile, else ``None``."""
    found: dict[str, HarborTask | None] = {}
    for number, row in json_lines(rows):
        try:
            if isinstance(row, CallerError):
                raise row
            if not isinstance(row, dict) or not isinstance(row.get("image"), str):
                raise CallerError("names no image", field="image")
            if "harbor" not in row:
                found.setdefault(row["image"])
                continue
            task = (harbor := HarborRow.parse(row)).harbor
            for name in (harbor.image, *(used.image for used in task.verifier_images.values())):
                found.setdefault(name, task if name in task.builds else None)
        except CallerError as error:
            raise CallerError(error.reason, field=f"{rows}:{number}") from error
    if not found:
        raise CallerError("has no rows", field=str(rows))
    return found


def write_report(outcomes: Iterable[ImageOutcome], file: Path) -> Iterator[ImageOutcome]:
    """Yield outcomes; write each to ``file`` as a JSON line first, with the failed line of a Dockerfile.

    Raises:
        CallerError: the file cannot be written.
    """

    def write(mode: str, text: str) -> None:
        try:
            with file.open(mode) as lines:
                lines.write(text)
        except OSError as error:
            raise CallerError(f"cannot be written: {error.strerror}", field="--report") from error

    write("w", "")
    for one in outcomes:
        line = re.search(r"\bDockerfile: line (\d+)\b", one.reason)
        facts = {"image": one.name, "state": one.state, "seconds": round(one.seconds, 1), "mib": one.bytes >> 20}
        failure = {"line": int(line[1]) if line else None, "reason": one.reason} if one.reason else {}
        write("a", json.dumps({**facts, **failure}) + "\n")
        yield one


def show(store: ImageStore, console: Console) -> None:
    now = time.time()
    table = Table("name", "kind", "format", box=None, pad_edge=False)
    for column in ("MiB", "last use"):
        table.add_column(column, justify="right")
    table.add_column("unpacked")
    table.add_column("made from", overflow="fold")
    for image in sorted(store.all(), key=_title):
        table.add_row(
            escape(_title(image)),
            image.info.kind,
            image.info.format,
            f"{image.info.bytes / (1 << 20):.0f}",
            "now" if image.entry.used else _ago(now - image.entry.last_use),
            "yes" if image.unpacked else "no",
            escape(image.info.source),
        )
    console.print(table)
    copies = store.all_copies()
    console.print(
        f"{store.images.folder}; {len(copies)} unpacked copies, {_gib(copies)}, in {store.copies.folder}",
        soft_wrap=True,
    )


def collect(
    store: ImageStore, max_gb: float | None, older_than: float | None, dry_run: bool, console: Console
) -> None:
    """Remove unused images and unpacked copies by size (GiB) and age (days); keep this version's built-in images."""
    current = map(image_path, BUILTIN_IMAGES)
    removed, leftovers = store.collect(
        [path.parent.name for path in current if path],
        max_bytes=None if max_gb is None else int(max_gb * GIB),
        older_than_s=None if older_than is None else older_than * DAY_S,
        dry_run=dry_run,
    )
    for image in removed:
        console.print(f"{_title(image)}, {image.info.kind}, {_gib([image])}", markup=False, soft_wrap=True)
    for folder in leftovers:
        console.print(f"{folder}, left by a killed process or an older version", markup=False, soft_wrap=True)
    console.print(f"{_gib(removed)} {'would be' if dry_run else 'were'} freed")


def _title(image: Image) -> str:
    return ", ".join(image.names) or image.entry.name


def _gib(images: Iterable[Image]) -> str:
    return f"{sum(image.info.bytes for image in images) / GIB:.2f} GiB"


def _ago(seconds: float) -> str:
    for size, unit in ((DAY_S, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
