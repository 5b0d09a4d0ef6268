# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl selfcheck``."""

from __future__ import annotations

import asyncio
import json

import typer
from nemo_gym.sandbox.providers import create_provider
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.sandbox.gym import conformance
from nemo_gym_prorl.sandbox.images.building.default import default_image_path
from nemo_gym_prorl.sandbox.runtime.apptainer import find_runtime


def check_provider(name: str, options: str, image: str | None, console: Console) -> bool:
    """Put a sandbox provider through the conformance suite; whether it passed.

    Args:
        name: as NeMo Gym knows it.
        options: its own, as JSON.
        image: in the provider's terms; the default image.
        console: where the table goes.
    """
    try:
        settings = json.loads(options)
    except ValueError as error:
        raise typer.BadParameter(f"--options is not JSON: {error}") from None
    if runtime := find_runtime():
        runtime.activate()
    outcomes = asyncio.run(conformance.run(create_provider({name: settings}), image or str(default_image_path())))
    table = Table("check", "", "seconds", "what came instead", title=f"sandbox provider {name}")
    for outcome in outcomes:
        verdict = "[green]passed" if outcome.passed else "[red]failed"
        table.add_row(outcome.name, verdict, f"{outcome.seconds:.1f}", escape(outcome.reason))
    console.print(table)
    passed = sum(outcome.passed for outcome in outcomes)
    typer.echo(f"{passed} of {len(outcomes)} passed")
    return passed == len(outcomes)
