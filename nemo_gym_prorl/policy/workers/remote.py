# SPDX-License-Identifier: Apache-2.0
"""The backends as a worker sees them: the pool is another process's, which is told of turns and tells where they run.

To the policy service nothing is different: :class:`RemotePool` takes the events of a pool and decides nothing at once;
the decisions come later, as messages, and are carried out by the worker's own dispatcher.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.backends import Backends
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.pool.backend import Abort, Assign, Backend, Decision, GiveUp, Health, RequestOutcome
from nemo_gym_prorl.policy.pool.dispatcher import Dispatcher
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.workers.channel import Channel


class RemotePool(BackendPool):
    """The turns of one worker. Of the backends it knows id, URL, weights, health and run."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__()
        self._send = send
        self.assigned: dict[int, int | None] = {}
        """By ticket, the number of the assignment that holds."""

    def request(
        self,
        ticket_id: int,
        rollout_id: str,
        group: str | None = None,
        now: float = 0.0,
        tokens: int = 0,
        blocks: bytes = b"",
        run: str | None = None,
    ) -> list[Decision]:
        """A turn wants a backend."""
        self.assigned[ticket_id] = None
        self._send(["request", ticket_id, rollout_id, group, tokens, blocks.hex(), run])
        return []

    def done(self, ticket_id: int, outcome: RequestOutcome, now: float) -> list[Decision]:
        """The ticket's request ended."""
        number = self.assigned[ticket_id]
        if outcome is RequestOutcome.FAILED:
            self.assigned[ticket_id] = None
        else:
            del self.assigned[ticket_id]
        self._send(["done", ticket_id, outcome, number])
        return []

    def withdraw(self, ticket_id: int, now: float) -> list[Decision]:
        """Whoever wanted the turn is gone."""
        if self.assigned.pop(ticket_id, _UNKNOWN) != _UNKNOWN:
            self._send(["withdraw", ticket_id])
        return []

    def finish(self, rollout_id: str) -> list[Decision]:
        """The rollout is over, or looks so."""
        self._send(["finish", rollout_id])
        return []

    def drop(self, rollout_id: str, now: float) -> list[Decision]:
        """The rollout is over for good."""
        self._send(["drop", rollout_id])
        return []


_UNKNOWN = -1


class Refused(CallerError):
    """What the owner of the pool refused, as it said it."""

    def __init__(self, reason: str, field: str | None, status: int, problem: str) -> None:
        super().__init__(reason, field=field)
        self.http_status = status  # type: ignore[misc]  # of the class elsewhere
        self.problem = problem  # type: ignore[misc]


class RemoteBackends(Backends):
    """What a worker has in place of the backends.

    Args:
        config: see there.
        end: of the socket pair with the owner of the pool.
        lost: called when the owner is gone.
    """

    def __init__(self, config: PolicyConfig, end: socket.socket, lost: Callable[[], None]) -> None:
        super().__init__(config)
        self.pool = self._remote = RemotePool(self._send)
        self._end, self._lost = end, lost
        self._channel: Channel | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._questions = itertools.count()

    async def start(self) -> None:
        """Tell the owner that this worker is there."""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._channel = await Channel.over(self._end, self._hear, self._lost)
        self._send(["ready"])

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if (view := message.get("view")) is not None:
            self._see(view)
        for decision in message.get("decisions", ()):
            self._decided(decision)
        if "answer" in message:
            asked = self._asked.pop(message["answer"], None)
            if asked is not None and not asked.done():
                asked.set_result(message)
        if "metrics" in message:
            self._send(["metrics", self.metrics.samples()])

    def _see(self, view: dict[str, Any]) -> None:
        before = dict(self.pool.backends)
        self.by_origin.clear()
        self.by_origin.update(view["keys"])
        self.pool.backends.clear()
        for order, (name, url, version, health, run) in enumerate(view["backends"]):
            backend = before.get(name)
            if backend is None or (backend.url, backend.run) != (url, run):
                backend = Backend(name, url, version, self.pool.limit, order, run)
            # Turns that run there look at it when they end.
            backend.weight_version, backend.health = version, Health(health)
            self.pool.backends[name] = backend
        self.trouble = view["trouble"]
        if view["protocol"] is not None and self.protocol is None:
            self.protocol = str(view["protocol"])
            self.engine = self._engine(self.protocol)
            self.dispatcher = Dispatcher(self.pool, self.engine, waits=self.waits)
        self.on_change()

    def _decided(self, decision: list[Any]) -> None:
        match decision:
            case ["assign", ticket, backend, version, number] if ticket in self._remote.assigned:
                self._remote.assigned[ticket] = number
                self.apply([Assign(ticket, backend, version)])
            case ["abort", ticket, backend] if ticket in self._remote.assigned:
                self.apply([Abort(ticket, backend)])
            case ["give_up", ticket, reason] if ticket in self._remote.assigned:
                self.apply([GiveUp(ticket, reason)])

    # What is asked of the owner

    async def add(
        self,
        url: str,
        backend_id: str | None = None,
        weight_version: str | None = None,
        api_key: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """See :meth:`.Backends.add`."""
        about = {"url": url, "backend_id": backend_id, "weight_version": weight_version, "api_key": api_key}
        return dict(await self._ask("add", {**about, "run": run}))

    async def listing(self, run: str | None = None) -> dict[str, Any]:
        """See :meth:`.Backends.listing`."""
        return dict(await self._ask("listing", {"run": run}))

    async def remove(self, backend_id: str, drain: bool = False) -> dict[str, Any]:
        """See :meth:`.Backends.remove`."""
        return dict(await self._ask("remove", {"backend_id": backend_id, "drain": drain}))

    async def clear(self, run: str | None = None) -> dict[str, Any]:
        """See :meth:`.Backends.clear`."""
        return dict(await self._ask("clear", {"run": run}))

    async def pause(
        self, backend_id: str | None = None, timeout_s: float = 600.0, run: str | None = None
    ) -> dict[str, Any]:
        """See :meth:`.Backends.pause`."""
        return dict(await self._ask("pause", {"backend_id": backend_id, "timeout_s": timeout_s, "run": run}))

    async def resume(
        self, backend_id: str | None = None, weight_version: str | None = None, run: str | None = None
    ) -> dict[str, Any]:
        """See :meth:`.Backends.resume`."""
        about = {"backend_id": backend_id, "weight_version": weight_version}
        return dict(await self._ask("resume", {**about, "run": run}))

    async def label(
        self, weight_version: str, backend_id: str | None = None, run: str | None = None
    ) -> dict[str, Any]:
        """See :meth:`.Backends.label`."""
        about = {"weight_version": weight_version, "backend_id": backend_id}
        return dict(await self._ask("label", {**about, "run": run}))

    async def exposition(self) -> bytes:
        """The metrics of all workers, in Prometheus text format."""
        return str(await self._ask("metrics", {})).encode()

    async def _ask(self, what: str, arguments: dict[str, Any]) -> Any:
        number = next(self._questions)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(["ask", number, what, arguments])
        try:
            said = await answer
        finally:
            self._asked.pop(number, None)
        if (refused := said.get("refused")) is not None:
            raise Refused(refused["reason"], refused["field"], refused["status"], refused["problem"])
        return said["result"]
