# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl doctor``: the findings as a table."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.cli.doctor_checks import Check, Level, examine
from nemo_gym_prorl.policy.engine_checks import check_engine
from nemo_gym_prorl.policy.runtime import PolicyConfig


_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


def show(console: Console, policy: Mapping[str, Any] | None = None) -> bool:
    """Show the findings and their fixes; return whether rollouts can run.

    Args:
        console: where the table goes.
        policy: settings of a :class:`PolicyConfig`, to check its engine and tokenizer instead of the machine.
    """
    # What a sandbox's start logs about limits is one of the findings.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with console.status("looking"):
            checks = (
                list(examine()) if policy is None else asyncio.run(_of_policy(PolicyConfig.model_validate(policy)))
            )
    finally:
        logging.disable(before)
    # What to do stands below what was found, so that both are wide enough on a terminal of 80 columns.
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        colour = _COLOURS[check.level]
        table.add_row(f"[{colour}]{check.level}[/]", check.name, _printable(check.found))
        if check.fix:
            table.add_row("", "", f"[{colour}]→ {_printable(check.fix)}[/]")
    console.print(table)
    return all(check.level is not Level.MISSING for check in checks)


def _printable(text: str) -> str:
    """Text without control characters, which an endpoint may have put there, for rich."""
    return escape("".join(one if one.isprintable() else " " for one in text))


async def _of_policy(config: PolicyConfig) -> list[Check]:
    return [Check(one.name, Level(one.level), one.found, one.fix) async for one in check_engine(config)]
