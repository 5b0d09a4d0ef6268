# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl image``: pulls, lists and removes sandbox images, and shows the progress of builds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.builder import BUILTIN_IMAGES, image_path
from nemo_gym_prorl.sandbox.images.pull import Puller, PullOutcome, images_in_rows, pull_all
from nemo_gym_prorl.sandbox.images.reference import RegistryImage, parse_registry
from nemo_gym_prorl.sandbox.images.store import Image, ImageStore


GIB = 1 << 30
DAY_S = 86400.0


@contextmanager
def progress_step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show a step while it runs, then its last message and duration; yields the function that takes messages."""
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


def images_to_pull(names: Sequence[str], rows: Path | None, field: str) -> list[RegistryImage]:
    """Return the images to pull: those named on the command line and those of a file of rows.

    Raises:
        CallerError: no image is named, or a reference is invalid.
    """
    images = [parse_registry(name) for name in names]
    if rows:
        images += images_in_rows(rows, field)
    if not images:
        raise CallerError("give images, or a file of rows with --from", field="NAMES")
    return list(dict.fromkeys(images))


def pull(puller: Puller, images: Sequence[RegistryImage], jobs: int, console: Console) -> list[PullOutcome]:
    """Pull images with a progress bar, and return the failed pulls."""
    failed: list[PullOutcome] = []
    pulled = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar, closing(pull_all(puller, images, jobs)) as outcomes:
        task = bar.add_task("pulling", total=len(images))
        for outcome in outcomes:
            bar.advance(task)
            pulled += outcome.new
            if outcome.reason:
                failed.append(outcome)
                bar.update(task, description=f"pulling, {len(failed)} failed")
    present = len(images) - pulled - len(failed)
    console.print(f"{pulled} pulled, {present} already present, {len(failed)} failed")
    for outcome in failed:
        console.print(f"[red]{escape(outcome.uri)}[/]: {escape(outcome.reason)}", soft_wrap=True)
    return failed


def show(store: ImageStore, console: Console) -> None:
    """Print all images, and the unpacked copies on this machine."""
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
    """Remove images and copies that are not in use, except the default images of this version."""
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
