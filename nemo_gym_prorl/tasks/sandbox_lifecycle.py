# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start and stop sandboxes so that no cancelled caller leaves a sandbox behind.

Invariants:

- Starts and stops run to completion even if their caller is cancelled.
- A failed stop is retried until the sandbox has stopped.
- One semaphore limits concurrent starts. An image is fetched before the start, outside of this limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import SandboxNeeds


logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0  # on a loaded machine; after this time the stop has failed and is retried
STOP_RETRY_S = 5.0  # pause before a failed stop is retried: time for the provider to recover


class ShieldedTasks:
    """Tasks that run to completion even if their caller is cancelled; await them through :func:`asyncio.shield`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drain(self) -> None:
        """Wait for all tasks, including those that start during the wait."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A cancelled caller never sees the error.
            logger.info("work on a session failed: %s", error)


class SandboxLifecycle:
    """Lifecycle of one environment's sandboxes: every sandbox that starts is also stopped.

    Args:
        sandboxes: :class:`.TaskSandboxes`, which fetches images, starts sandboxes and deletes snapshots. A
            :class:`CallerError` blames the row; other exceptions become ``provider_unavailable``. ``None`` if no row
            needs a sandbox.
        max_starts: limit on concurrent starts, for agents and graders together.
        tasks: runs starts and stops.
    """

    def __init__(self, sandboxes: Any, *, max_starts: int, tasks: ShieldedTasks) -> None:
        self._sandboxes = sandboxes
        self._starts = asyncio.Semaphore(max_starts)
        self._tasks = tasks

    async def start(self, needs: SandboxNeeds, snapshot: str | None = None) -> Sandbox:
        """Start a sandbox, from a snapshot if named; errors as of :class:`.OpenSandbox`. A cancelled call returns
        after the sandbox is stopped."""
        starting = self._tasks.spawn(self._start(needs, snapshot))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(self._tasks.spawn(self._stop_started(starting)))
            raise

    async def stop(self, sandbox: Sandbox) -> None:
        """Stop a sandbox; cancelling the caller does not interrupt the stop. Raises ``session_release_failed`` if the
        sandbox does not stop in time; further stops follow."""
        await asyncio.shield(self._tasks.spawn(self._stop(sandbox)))

    @asynccontextmanager
    async def opened(
        self, own: SandboxNeeds, needs: SandboxNeeds | None = None, snapshot: str | None = None
    ) -> AsyncIterator[Sandbox]:
        """Start a sandbox with ``needs``, or with ``own`` if ``needs`` is ``None``, for the length of the block."""
        sandbox = await self.start(needs or own, snapshot)
        try:
            yield sandbox
        finally:
            await self.stop(sandbox)

    async def delete_snapshots(self, names: Iterable[str]) -> None:
        """Delete snapshots; errors are logged and not raised."""
        for name in names:
            try:
                await self._sandboxes.delete_snapshot(name)
            except Exception:
                logger.exception("could not delete snapshot %s; the sweeper deletes it", name)

    async def _start(self, needs: SandboxNeeds, snapshot: str | None) -> Sandbox:
        try:
            if self._sandboxes is None:
                raise InfrastructureError("missing: the row needs a sandbox", field="sandbox_provider")
            await self._sandboxes.fetch_image(needs)
            async with self._starts:
                sandbox: Sandbox = await self._sandboxes.start(needs, snapshot)
                return sandbox
        except CallerError:
            raise
        except Exception as error:
            raise InfrastructureError(
                f"no sandbox could be started: {type(error).__name__}: {error}",
                kind=FailureKind.PROVIDER_UNAVAILABLE,
                field=getattr(error, "field", None),
            ) from error

    async def _stop_started(self, starting: asyncio.Task[Sandbox]) -> None:
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await self._stop(starting.result())

    async def _stop(self, sandbox: Sandbox) -> None:
        stopping = self._tasks.spawn(sandbox.stop())
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(stopping)
        except Exception as error:
            self._tasks.spawn(self._stop_again(sandbox, stopping))
            raise InfrastructureError(
                f"a sandbox could not be stopped: {type(error).__name__}: {error}",
                kind=FailureKind.SESSION_RELEASE_FAILED,
            ) from error

    async def _stop_again(self, sandbox: Sandbox, stopping: asyncio.Task[None]) -> None:
        await asyncio.wait({stopping})
        if stopping.cancelled() or stopping.exception() is not None:
            await asyncio.sleep(STOP_RETRY_S)
            await self._stop(sandbox)
