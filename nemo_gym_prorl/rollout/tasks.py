# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks that begin at once: what never has to wait is done when :func:`begin` returns, without a turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def begin[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of the running loop that has come to its first wait, or to its end. What it raises is in the task."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
