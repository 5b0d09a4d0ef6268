# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Steps that take a while, as they are shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def shown_step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show a step while it runs, and its last word and duration when it is done."""
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
