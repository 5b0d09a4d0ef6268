# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands of ``prorl image`` and their arguments.

Each command imports its modules when it runs, so ``prorl --help`` stays fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer


image_app = typer.Typer(name="image", help="Build, pull, list and remove sandbox images.", no_args_is_help=True)


@image_app.command("build")
def build_image(
    source: Annotated[
        str,
        typer.Argument(
            help="A Dockerfile, or a folder that has one; needs --name. "
            "Or default, kernel or math, the images that servers use."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new image.")] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(help="IMAGE=BASE: build on BASE where the Dockerfile says FROM IMAGE; repeatable."),
    ] = None,
) -> None:
    """Build an image from a Dockerfile. Unchanged stages are reused."""
    from rich.console import Console

    from nemo_gym_prorl.cli.image.images import progress_step
    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.sandbox.dockerfile.builder import DockerfileRequest, build_dockerfile, is_dockerfile
    from nemo_gym_prorl.sandbox.images.builder import BUILTIN_IMAGES, ensure_image
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    if name is None and source in BUILTIN_IMAGES:
        with progress_step(Console(highlight=False), source) as say:
            say(str(ensure_image(source, say)))
        return
    if not is_dockerfile(Path(source)):
        raise CallerError(f"is no Dockerfile and no folder with one, nor {', '.join(BUILTIN_IMAGES)}", field=source)
    if name is None:
        raise CallerError("is required for a Dockerfile", field="--name")
    request = DockerfileRequest(Path(source), name, replaced=parse_pairs("--replace", replace))
    with progress_step(Console(highlight=False), name) as say:
        say(str(build_dockerfile(request, ImageStore(), require_runtime(), say)))


def parse_pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    """Return the NAME=VALUE entries of a repeatable option as a mapping; the last of equal names counts."""
    from nemo_gym_prorl.failures import CallerError

    pairs = [entry.partition("=") for entry in values or ()]
    if wrong := [name for name, equals, _value in pairs if not equals]:
        raise CallerError(f"must be NAME=VALUE, not {wrong[0]!r}", field=option)
    return {name: value for name, _equals, value in pairs}


@image_app.command("pull")
def pull_images(
    names: Annotated[list[str], typer.Argument(help="Image addresses, with or without docker://.")],
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel pulls.")] = 4,
    credentials: Annotated[
        bool, typer.Option("--credentials", help="Use your stored registry logins. Default: anonymous.")
    ] = False,
) -> None:
    """Pull missing images. Exit code 1 if an image failed; run the command again to continue.

    `prorl image build-all ROWS` pulls the images of rows.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli.image import images as commands
    from nemo_gym_prorl.sandbox.images.pull import Puller
    from nemo_gym_prorl.sandbox.images.reference import parse_registry
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    images = list(dict.fromkeys(map(parse_registry, names)))
    puller = Puller(ImageStore(), require_runtime(), credentials=credentials)
    if not commands.pull(puller, images, jobs, Console(highlight=False)):
        raise typer.Exit(1)


@image_app.command("build-all")
def build_all_images(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", exists=True, dir_okay=False, help="JSONL file of rows.")],
    jobs: Annotated[int, typer.Option(min=1, help="Number of images that are made at a time.")] = 2,
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="Limit in GiB for all images; no further image is begun above it.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSONL file for the outcome of each image.")
    ] = None,
    credentials: Annotated[
        bool, typer.Option("--credentials", help="Use your stored registry logins. Default: anonymous.")
    ] = False,
) -> None:
    """Build or pull the missing images of all rows. Exit code 1 if an image failed; run the command again to continue.

    Rows of `prorl data harbor` have Dockerfiles, whose commands have your rights. Stages are shared between tasks.
    """
    from contextlib import closing

    from rich.console import Console

    from nemo_gym_prorl.cli.image import images as commands
    from nemo_gym_prorl.sandbox.images.pull import Puller
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    console = Console(highlight=False)
    puller = Puller(ImageStore(), require_runtime(), credentials=credentials)
    with closing(commands.build_all(rows, puller, jobs, max_gb, console)) as made:
        outcomes = [*(commands.write_report(made, report) if report else made)]
    if not commands.print_outcomes(outcomes, console):
        raise typer.Exit(1)


@image_app.command("tools")
def make_tools(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make or complete.")],
    tasks: Annotated[list[Path] | None, typer.Option(help="Folder of Harbor tasks to equip; repeatable.")] = None,
    pythons: Annotated[
        list[str] | None, typer.Option("--python", help="Version, or folder of a relocatable Python; repeatable.")
    ] = None,
) -> None:
    """Make a folder of uv, Python and wheels for tests without a network. Exit code 1 if a package is unavailable."""
    from nemo_gym_prorl.cli.image.tools import build_tools_folder

    if build_tools_folder(folder, tasks or (), pythons or ()):
        raise typer.Exit(1)


@image_app.command("list")
def list_images() -> None:
    """List images, and the unpacked copies on this machine."""
    from rich.console import Console

    from nemo_gym_prorl.cli.image import images as commands
    from nemo_gym_prorl.sandbox.images.store import ImageStore

    commands.show(ImageStore(), Console(highlight=False))


@image_app.command("gc")
def collect_images(
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="Limit in GiB for images, and the same limit for unpacked copies.")
    ] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Remove images unused for this many days.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed.")] = False,
) -> None:
    """Remove images and unpacked copies, least recently used first.

    Images in use are kept.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli.image import images as commands
    from nemo_gym_prorl.sandbox.images.store import ImageStore

    commands.collect(ImageStore(), max_gb, older_than, dry_run, Console(highlight=False))
