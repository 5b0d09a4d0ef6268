# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What is still to be said to a server when nobody waits for the answer any more.

A session is closed, a model server forgets a rollout, a sandbox that came up too late is given back: none of that may
hold up or fail a rollout that is over, and none of it may be lost because its rollout is over.

All of it may be lost with the agent or on its way. So each session has a lease: the agent chooses the lease, names it
to the server when it seeds the session, and renews it. Where the lease lapses the server ends the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from nemo_gym_prorl.handlers.gym_http import CookieJar, GymServer
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.tasks import begin


LOGGER = logging.getLogger(__name__)

LEASE_HEADER = "X-ProRL-Lease"
RENEW_S = 5.0  # a server ends a session after six without a renewal


class Farewells:
    """Bounded background work of one service.

    Args:
        bound_s: seconds after which such work is given up, unless it is started with another bound.
    """

    def __init__(self, bound_s: float = 60.0) -> None:
        self._bound_s = bound_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.leases: dict[str, tuple[Job, GymServer, str]] = {}
        """By lease: the rollout that it is renewed for as long as that lives, at which server and path."""

    async def renew(self) -> float:
        """Renew the leases of sessions; returns the pause until the next time."""
        self.leases = {lease: held for lease, held in self.leases.items() if not held[0].state.terminal}
        told: dict[tuple[GymServer, str], list[str]] = defaultdict(list)
        for lease, (_, server, path) in self.leases.items():
            told[server, path].append(lease)
        for (server, path), leases in told.items():
            self.start(f"leases at {server.name}", server.post(path, {"leases": leases}, CookieJar()), RENEW_S)
        return RENEW_S

    def start(self, what: str, work: Coroutine[Any, Any, Any], bound_s: float | None = None) -> asyncio.Task[None]:
        """Have ``work`` done. The task never raises: what goes wrong is logged under the name ``what``."""
        task = begin(self._bounded(what, work, bound_s or self._bound_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout: float) -> None:
        """Wait until all is said, at most ``timeout`` seconds; what is left then is cancelled."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _bounded(self, what: str, work: Coroutine[Any, Any, Any], bound_s: float) -> None:
        try:
            async with asyncio.timeout(bound_s):
                await work
        except Exception as error:  # the rollout is over; a failure of its clean-up changes nothing about it
            LOGGER.warning("%s: %s: %s", what, type(error).__name__, error)
