# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands ``prorl harness``: install and list the agent programs that run in sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


harness_app = typer.Typer(name="harness", help="Install and list agent programs.", no_args_is_help=True)


@harness_app.command()
def build(
    name: Annotated[str, typer.Argument(help="Name of a harness, or path of its YAML file.")],
    libc: Annotated[Literal["glibc", "musl"], typer.Option(help="C library of the images.")] = "glibc",
    python: Annotated[
        Path | None, typer.Option(help="Folder of a relocatable Python, if uv can't download one.", exists=True)
    ] = None,
) -> None:
    """Install the bundle of a harness with npm or uv. Sandboxes need no network for a bundle."""
    from rich.console import Console

    from nemo_gym_prorl.cli.image.images import progress_step
    from nemo_gym_prorl.harness.bundles import build_bundle

    with progress_step(Console(highlight=False), name) as say:
        folder = build_bundle(name, libc, python, say)
        say(str(folder or "the image holds the program"))


@harness_app.command("list")
def list_harnesses() -> None:
    """List the shipped harnesses, and the bundles on this machine."""
    from nemo_gym_prorl.harness.bundles import bundles
    from nemo_gym_prorl.harness.specification import load_harness, shipped_harnesses

    for harness in map(load_harness, shipped_harnesses()):
        typer.echo(f"{harness.name}\t{harness.version}\t{harness.api}")
    for entry in bundles().all():
        size = sum(path.lstat().st_size for path in entry.path.rglob("*"))
        typer.echo(f"{entry.path}\t{size / 1e6:.0f} MB")
