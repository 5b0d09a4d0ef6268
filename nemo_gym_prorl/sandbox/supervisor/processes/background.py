# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Work that nobody waits for: it begins at once, and what goes wrong in it ends nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any

from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Refused


_running: set[asyncio.Task[Any]] = set()


def begin[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin something, which runs until it first waits before this returns. An exception that is no
    answer to anybody is told to whoever reads our errors."""
    task = asyncio.eager_task_factory(asyncio.get_running_loop(), work)
    if task.done():
        _ended(task)
    else:
        _running.add(task)
        task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) and not isinstance(error, Refused):
        traceback.print_exception(error)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """What goes wrong in the block is told to whoever reads our errors; what comes after it goes on."""
    try:
        yield
    except Exception:
        traceback.print_exc()


async def to_its_end[T](work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that must not be left half done: who is cancelled meanwhile ends after it."""
    task = asyncio.eager_task_factory(asyncio.get_running_loop(), work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
