# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that are started before somebody asks: handing one out takes a fraction of starting one.

Reset-free: one that was handed out never comes back, so no rollout meets what another left. What was found dead is
never handed out. Refilling waits its turn behind those who wait for a sandbox now.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec


RETRY_S = 1.0
"""Pause after a start that failed; whoever asks meanwhile starts one and gets the error."""


class WarmPool:
    """Keeps ``size`` sandboxes of one specification ready. Belongs to one event loop.

    Args:
        spec: what they are; their variables and working folder are set when they are handed out.
        size: how many wait.
        start: starts one.
    """

    def __init__(self, spec: ContainerSpec, size: int, start: Callable[[ContainerSpec], Awaitable[Container]]) -> None:
        self._spec = replace(spec, env={}, workdir=None)
        self._size = size
        self._start = start
        self._ready: deque[Container] = deque()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._full = asyncio.Event()
        self._filler = asyncio.create_task(self._fill())

    @property
    def ready(self) -> int:
        """How many live ones wait."""
        return sum(container.alive for container in self._ready)

    async def filled(self) -> None:
        """Wait until as many as wanted are ready."""
        await self._full.wait()

    async def take(self, env: Mapping[str, str], workdir: str | None) -> Container:
        """A live sandbox, from the pool or started now; the caller's to close.

        Raises:
            CallerError, InfrastructureError: as :meth:`.container.Container.start`.
        """
        container = None
        while self._ready and container is None:
            candidate = self._ready.popleft()
            if candidate.alive:
                container = candidate
        self._full.clear()
        self._wanted.set()
        if container is None:
            container = await self._start(self._spec)
        try:
            await container.configure(env, workdir)
        except BaseException:
            await container.close()
            raise
        return container

    async def close(self) -> None:
        """End those that wait."""
        self._filler.cancel()
        await asyncio.wait([self._filler])
        while self._ready:
            await self._ready.popleft().close()

    async def _fill(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self.ready < self._size:
                try:
                    self._ready.append(await self._start(self._spec))
                except RolloutError:
                    await asyncio.sleep(RETRY_S)
            self._full.set()
