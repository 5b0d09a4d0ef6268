# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl doctor``: what was found, as a table."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.doctor import Level, examine


_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


def show(console: Console) -> bool:
    """Show what is there, what is missing and how to get it; whether rollouts can run."""
    # What a sandbox's start logs about limits is one of the findings.
    logging.disable(logging.WARNING)
    with console.status("looking"):
        checks = list(examine())
    # What to do stands below what was found, so that both are wide enough on a terminal of 80 columns.
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        colour = _COLOURS[check.level]
        table.add_row(f"[{colour}]{check.level}[/]", check.name, escape(check.found))
        if check.fix:
            table.add_row("", "", f"[{colour}]→ {escape(check.fix)}[/]")
    console.print(table)
    return all(check.level is not Level.MISSING for check in checks)
