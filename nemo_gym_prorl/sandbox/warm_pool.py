# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that are started before somebody asks: handing one out takes a fraction of starting one.

Reset-free: one that was handed out never comes back, so no rollout meets what another left. What was found dead is
never handed out. Refilling waits its turn behind those who wait for a sandbox now.

What waits holds memory and processes, so it is bounded: a pool is kept for each of the few specifications that were
asked for last, and ends when nobody has asked for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from nemo_gym_prorl.background import PROCESS_LOOPS
from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec


RETRY_S = 1.0
"""Pause after a start that failed; whoever asks meanwhile starts one and gets the error."""

MOST_POOLS = 8
"""Specifications for which sandboxes wait; the one that was asked for longest ago makes room for another."""

IDLE_S = 600.0
"""A pool that nobody has asked for so long, in seconds, ends."""

StartOne = Callable[[ContainerSpec], Awaitable[Container]]


class WarmPool:
    """Keeps ``size`` sandboxes of one specification ready. Belongs to one event loop.

    Args:
        spec: what they are; their variables and working folder are set when they are handed out.
        size: how many wait.
        start: starts one.
    """

    def __init__(self, spec: ContainerSpec, size: int, start: StartOne) -> None:
        self._spec = replace(spec, env={}, workdir=None)
        self._size = size
        self._start = start
        self._ready: deque[Container] = deque()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._full = asyncio.Event()
        self._filler = PROCESS_LOOPS.start("warm-pool", self._fill)

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

    async def _fill(self) -> float:
        await self._wanted.wait()
        while self.ready < self._size:
            try:
                self._ready.append(await self._start(self._spec))
            except RolloutError:
                await asyncio.sleep(RETRY_S)
        self._wanted.clear()
        self._full.set()
        return 0.0


class WarmPools:
    """The pools of one event loop, by specification.

    Args:
        most: how many there are at a time.
        idle_s: seconds after which one that nobody asks for ends.
    """

    def __init__(self, most: int = MOST_POOLS, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._pools: OrderedDict[str, WarmPool] = OrderedDict()
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pools)

    async def take(self, spec: ContainerSpec, size: int, start: StartOne) -> Container:
        """A sandbox as :meth:`WarmPool.take`; the first of its kind makes a pool of ``size``."""
        key = repr(replace(spec, env={}, workdir=None))
        if key not in self._pools:
            self._pools[key] = WarmPool(spec, size, start)
        self._pools.move_to_end(key)
        if len(self._pools) > self._most:
            self._end(next(iter(self._pools)))
        if key in self._idle:
            self._idle[key].cancel()
        self._idle[key] = asyncio.get_running_loop().call_later(self._idle_s, self._end, key)
        return await self._pools[key].take(spec.env, spec.workdir)

    async def close(self) -> None:
        """End all that wait."""
        for key in list(self._pools):
            self._end(key)
        await asyncio.gather(*self._ending)

    def _end(self, key: str) -> None:
        self._idle.pop(key).cancel()
        ending = asyncio.create_task(self._pools.pop(key).close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
