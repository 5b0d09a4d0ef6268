# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl image``: its commands' arguments. As in ``cli.py``, modules are imported by the command that needs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.images.recipe import Format

app = typer.Typer(
    name="image", help="Build, pull, list and remove the images that sandboxes start from.", no_args_is_help=True
)
Layout = Annotated[
    str | None,
    typer.Option("--format", help="folder or sif. Default: sif where the cache is on a shared disk, else folder."),
]


@app.command("build")
def build_image(
    template: Annotated[
        str,
        typer.Argument(
            help="plain, agent, or a Jinja2 template of a definition file. "
            "Alone: default, kernel or math, as servers build them."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="What to call the image.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="docker:// address, folder, SIF, an image's name, or apt:."),
    ] = None,
    apt: Annotated[list[str] | None, typer.Option(help="A package of the distribution; NAME or NAME=VERSION.")] = None,
    pip: Annotated[list[str] | None, typer.Option(help="A Python package, as pip is told.")] = None,
    lock: Annotated[list[Path] | None, typer.Option(help="A lock file, for the template.")] = None,
    variables: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE for the template.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Build again, and pull the base again.")] = False,
    layout: Layout = None,
    show: Annotated[bool, typer.Option("--show", help="Print the definition file and build nothing.")] = False,
) -> None:
    """Build an image from a template. One that is there already is used."""
    from rich.console import Console

    from nemo_gym_prorl.cli.images import shown_step
    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.sandbox.images import builder as build
    from nemo_gym_prorl.sandbox.images import recipe
    from nemo_gym_prorl.sandbox.images.builder import BUILTIN_IMAGES, ensure_image
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    if name is None and base is None and template in BUILTIN_IMAGES and not show:
        with shown_step(Console(highlight=False), template) as say:
            say(str(ensure_image(template, say)))
        return
    if name is None or base is None:
        raise CallerError("is missing", field="--name" if name is None else "--base")
    values = [entry.partition("=") for entry in variables or ()]
    if wrong := [name for name, equals, _value in values if not equals]:
        raise CallerError(f"{wrong[0]!r} is not NAME=VALUE", field="--set")
    order = build.BuildRequest(
        template,
        base,
        name,
        apt=apt or (),
        pip=pip or (),
        locks=lock or (),
        variables={name: value for name, _equals, value in values},
        fresh=fresh,
        format=_layout(layout),
    )
    store = ImageStore()
    if show:
        wanted = build.recipe_of(order, store)
        typer.echo(recipe.render(wanted.template, "Bootstrap: localimage\nFrom: BASE", wanted))
        return
    with shown_step(Console(highlight=False), name) as say:
        say(str(build.build(order, store, require_runtime(), say)))


@app.command("pull")
def pull_images(
    names: Annotated[list[str] | None, typer.Argument(help="docker:// addresses; the scheme may be left out.")] = None,
    rows: Annotated[
        Path | None, typer.Option("--from", exists=True, dir_okay=False, help="JSONL file whose rows name images.")
    ] = None,
    field: Annotated[str, typer.Option(help="Where a row names its image; dots lead into objects.")] = "image",
    jobs: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 4,
    tries: Annotated[int, typer.Option(min=1, help="How often each is tried.")] = 4,
    credentials: Annotated[
        bool, typer.Option("--credentials", help="Send what you have stored for registries. Anonymous otherwise.")
    ] = False,
    layout: Layout = None,
) -> None:
    """Pull images that are not there yet. Exit code 1 if one failed; run it again to go on."""
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.pull import Puller
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    wanted = commands.wanted_images(names or [], rows, field)
    puller = Puller(ImageStore(), require_runtime(), _layout(layout), credentials, tries)
    if commands.pull(puller, wanted, jobs, Console(highlight=False)):
        raise typer.Exit(1)


@app.command("list")
def list_images() -> None:
    """Show all images, and this machine's unpacked copies."""
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.store import ImageStore

    commands.show(ImageStore(), Console(highlight=False))


@app.command("gc")
def collect_images(
    max_gb: Annotated[float | None, typer.Option(min=0, help="GiB for images, and as many for copies.")] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Days since the last use.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove images and unpacked copies, the least recently used first, never one in use; and what crashes left."""
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.store import ImageStore

    commands.collect(ImageStore(), max_gb, older_than, dry_run, Console(highlight=False))


def _layout(text: str | None) -> Format | None:
    from nemo_gym_prorl.failures import CallerError

    match text:
        case None | "folder" | "sif":
            return text
    raise CallerError(f"{text!r} is neither 'folder' nor 'sif'", field="--format")
