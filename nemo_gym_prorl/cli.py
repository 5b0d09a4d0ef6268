# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command.

Thin: a command reads its arguments, calls the library, and prints. Modules are imported inside the command that needs
them, so that ``prorl --help`` does not wait for web frameworks that it will not use. An error of ours is one line and
exit code 1, without a traceback; anything else is a defect and shows one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer


if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="prorl",
    help="Rollouts as a service for NeMo Gym: staged, sandboxed, token-exact.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def setup() -> None:
    """Put everything that rollouts need into place: a container runtime and the default sandbox image.

    What is there already is used as it is, so a second run takes no time. Nothing outside the cache folder is touched.
    """
    from rich.console import Console

    from nemo_gym_prorl.sandbox.image import default_image_path, ensure_default_image, try_image
    from nemo_gym_prorl.sandbox.install import ensure_runtime

    console = Console(highlight=False)
    with _step(console, "Container runtime") as say:
        runtime = ensure_runtime(say)
        say(f"{runtime.flavor} {runtime.version_text}, {runtime.path}")
    with _step(console, "Default sandbox image") as say:
        say(str(ensure_default_image(say)))
    with _step(console, "A first container") as say:
        say(", ".join(try_image(default_image_path(), runtime).splitlines()))


@app.command()
def doctor() -> None:
    """Show what is there, what is missing and how to get it. Exit code 1 if rollouts can't run."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from nemo_gym_prorl.doctor import Level, examine

    console = Console(highlight=False)
    with console.status("looking"):
        checks = list(examine())
    table = Table("", "What", box=None, pad_edge=False)
    table.add_column("Found", overflow="fold")
    table.add_column("How to get it", overflow="fold")
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}
    for check in checks:
        table.add_row(f"[{colours[check.level]}]{check.level}[/]", check.name, escape(check.found), escape(check.fix))
    console.print(table)
    if any(check.level is Level.MISSING for check in checks):
        raise typer.Exit(1)


@app.command()
def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hydra overrides for Gym, e.g. ++prorl_code_agent.responses_api_agents.prorl_agent.stages.run=4"
        ),
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="How many rollouts.")] = 16,
    output: Annotated[Path, typer.Option(help="JSONL file for the finished rollouts.")] = Path("out/demo.jsonl"),
) -> None:
    """Run HumanEval rollouts in a real Gym deployment with real sandboxes, and watch them.

    The policy is scripted unless PRORL_MODEL_URL names an endpoint (PRORL_MODEL_NAME, PRORL_API_KEY). Exit code 1 if
    a rollout was not scored, or earned another reward than its script deserves.
    """
    from nemo_gym_prorl.demo import Demo

    try:
        fine = Demo(rollouts, output, overrides or ()).run()
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    if not fine:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``prorl`` script."""
    from nemo_gym_prorl.failures import RolloutError

    try:
        app()
    except RolloutError as error:
        sys.exit(f"prorl: {error.reason}")


@contextmanager
def _step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show a step while it runs, and its last word and duration when it is done."""
    started = time.monotonic()
    last = ""

    def say(message: str) -> None:
        nonlocal last
        last = message
        status.update(f"{title}: {message}")
        if not console.is_terminal:
            console.print(f"  {title}: {message}", markup=False, soft_wrap=True)

    with console.status(title) as status:
        yield say
    if console.is_terminal:
        console.print(f"{title}: {last} ({time.monotonic() - started:.1f} s)", markup=False, soft_wrap=True)
    else:
        console.print(f"{title}: done in {time.monotonic() - started:.1f} s", markup=False, soft_wrap=True)
