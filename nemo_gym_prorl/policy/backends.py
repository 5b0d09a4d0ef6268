# SPDX-License-Identifier: Apache-2.0
"""Owns the pool of backends: who may join is checked, and weights are swapped here."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.config import PolicyConfig, check_host
from nemo_gym_prorl.policy.engines.addresses import checked_url, origin_of, root_of
from nemo_gym_prorl.policy.engines.connections import Connections
from nemo_gym_prorl.policy.engines.engine import BackendFailed, Misconfigured
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.engines.registry import ENGINES
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.backend import Backend, Decision
from nemo_gym_prorl.policy.pool.dispatcher import Dispatcher
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.pool.waits import Waits
from nemo_gym_prorl.serving.keys import authorization


_log = logging.getLogger(__name__)


class AlreadyThere(CallerError):
    """What is to be added exists."""

    http_status = 409
    problem = "already-there"


class NoSuchBackend(CallerError):
    """A backend is asked for that is not there."""

    http_status = 404
    problem = "no-such-backend"


class Backends:
    """The pool and its connections.

    Args:
        config: see there.

    Attributes:
        pool: the decisions.
        waits: how long rollouts have waited for a backend.
        metrics: what is counted in this process.
        engine: how backends are asked; there after :meth:`start`.
        dispatcher: runs requests; likewise.

    Raises:
        CallerError: the configuration cannot work.
    """

    def __init__(self, config: PolicyConfig) -> None:
        if ENGINES[config.protocol].takes_tokens and config.tokenizer_folder is None:
            raise CallerError(f"engine {config.protocol!r} takes tokens, so it needs a tokenizer", field="tokenizer")
        self.config = config
        self.pool = BackendPool(limit=config.limit, unreachable_s=config.unreachable_s)
        self.waits = Waits()
        self.metrics = PolicyMetrics(self.pool)
        self.engine: HttpEngine | None = None
        self.dispatcher: Dispatcher | None = None
        self._by_origin: dict[str, dict[str, str]] = {}
        for index, (given, key) in enumerate(zip(config.base_url, config.keys(), strict=True)):
            url = checked_url(given, "base_url")
            self._by_origin[origin_of(url)] = config.headers | authorization(key)
            self.pool.add(f"backend{index}", url)
        self._connections: Connections | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open what needs a running loop, and look at the backends in the background."""
        if self._connections is not None:
            return
        self._connections = Connections()
        self.engine = ENGINES[self.config.protocol](
            self._connections,
            self.config.model,
            by_origin=self._by_origin,
            named=self.config.engine is not None,
        )
        self.dispatcher = Dispatcher(self.pool, self.engine, waits=self.waits)
        self.dispatcher.start()
        self._looking = asyncio.create_task(self._look_over(self.engine))

    async def aclose(self) -> None:
        """Stop background work and close connections."""
        if self._connections is None or self.dispatcher is None or self._looking is None:
            return
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self.dispatcher.aclose()
        await self._connections.aclose()

    def apply(self, decisions: list[Decision]) -> None:
        """Carry out what the pool decided; before the start nothing waits for anything."""
        if self.dispatcher is not None:
            self.dispatcher.apply(decisions)

    # What may be asked

    async def add(
        self,
        url: str,
        backend_id: str | None = None,
        weight_version: str | None = None,
        api_key: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Add a backend, for the rollouts of a run; it gets its own key, and never one that was configured for others.
        One that the run has at that URL already stays the one that it is, with the new label and key.

        Raises:
            AlreadyThere: there is one of that id, or another run has one at that URL.
            CallerError: no URL, no host that is allowed, or an engine of another kind than the others.
        """
        url = checked_url(url)
        check_host(url, self.config)
        known = self._known(backend_id, url, run)
        if self.engine is not None:
            await self._check_protocol(self.engine, url)
            known = self._known(backend_id, url, run)
        if api_key is not None:
            self._by_origin[origin_of(url)] = authorization(api_key)
        if known is not None:
            if weight_version is not None:
                self.pool.label(weight_version, known.id, run)
                self.apply([])
            return described(known)
        backend_id = backend_id or f"backend{time.monotonic_ns():x}"
        self.apply(self.pool.add(backend_id, url, weight_version, run))
        return described(self.pool.backends[backend_id])

    async def listing(self, run: str | None = None) -> dict[str, Any]:
        """The backends, how they fare, and how many turns wait: of all runs, or of one."""
        waiting, backends = self.pool.waiting_of, [*self.pool.backends.values()]
        if run is not None:
            waiting, backends = {run: waiting.get(run, 0)}, self.pool.of_run(run)
        return {"backends": [described(b) for b in backends], "waiting": sum(waiting.values())}

    async def remove(self, backend_id: str, drain: bool = False) -> dict[str, Any]:
        """Remove a backend: at once, or with ``drain`` give it no new rollouts.

        Raises:
            NoSuchBackend: it is not there.
        """
        self._check_there(backend_id)
        self.apply(self.pool.drain(backend_id) if drain else self.pool.remove(backend_id))
        return {"id": backend_id, "draining": drain}

    async def clear(self, run: str | None = None) -> dict[str, Any]:
        """Remove all backends of a run; turns wait for new ones."""
        self.apply(self.pool.clear(run))
        return {"backends": []}

    async def pause(
        self, backend_id: str | None = None, timeout_s: float = 600.0, run: str | None = None
    ) -> dict[str, Any]:
        """Start nothing there until :meth:`resume`; returns when nothing runs there, or the time is over.

        Raises:
            NoSuchBackend: it is not there, or the run has none.
        """
        self._check_there(backend_id, run)
        if self.dispatcher is None:
            self.pool.pause(backend_id, run)
            return {"drained": True}
        return {"drained": await self.dispatcher.pause(backend_id, timeout_s, run)}

    async def resume(
        self, backend_id: str | None = None, weight_version: str | None = None, run: str | None = None
    ) -> dict[str, Any]:
        """Go on, with a new label if the weights are new.

        Raises:
            NoSuchBackend: it is not there, or the run has none.
        """
        self._check_there(backend_id, run)
        self.apply(self.pool.resume(backend_id, weight_version, run))
        return await self.listing(run)

    async def label(
        self, weight_version: str, backend_id: str | None = None, run: str | None = None
    ) -> dict[str, Any]:
        """Label the weights, without a pause.

        Raises:
            NoSuchBackend: it is not there, or the run has none.
        """
        self._check_there(backend_id, run)
        self.pool.label(weight_version, backend_id, run)
        self.apply([])
        return await self.listing(run)

    def _check_there(self, backend_id: str | None, run: str | None = None) -> None:
        if run is not None and not self.pool.of_run(run):
            raise NoSuchBackend(f"run {run!r} has no backend: register them first", field="run")
        if backend_id is not None and backend_id not in self.pool.backends:
            known = ", ".join(self.pool.backends) or "none"
            raise NoSuchBackend(f"no backend {backend_id!r}; there are: {known}", field="id")

    def _known(self, backend_id: str | None, url: str, run: str | None) -> Backend | None:
        """The backend that this run has at that URL: an engine has one policy, and one limit."""
        # Who is there first keeps it: the other may mean a host of its own network.
        known = next((one for one in self.pool.backends.values() if _address(one.url) == _address(url)), None)
        if known is not None and known.run == run and backend_id in (None, known.id) and not known.draining:
            return known
        if backend_id in self.pool.backends:
            raise AlreadyThere(f"there is a backend {backend_id!r} already", field="id")
        if known is None:
            return None
        whose = f"run {known.run!r}" if known.run else "rollouts that name no run"
        raise AlreadyThere(
            f"{url} is backend {known.id!r} of {whose}; if that is over, DELETE /v1/backends/{known.id} first",
            field="url",
        )

    @staticmethod
    async def _check_protocol(engine: HttpEngine, url: str) -> None:
        """Refuse a backend that is of another kind; one that does not answer yet is looked at when it is first met."""
        try:
            await engine.check_protocol(url)
        except Misconfigured as error:
            raise CallerError(error.reason, field="url") from error
        except BackendFailed:
            return

    async def _look_over(self, engine: HttpEngine) -> None:
        """Say early what every turn would fail with; engines may also come later, so nothing ends for it."""
        for backend in list(self.pool.backends.values()):
            try:
                await engine.check_protocol(backend.url)
                served = [str(card.get("id")) for card in await engine.models(backend.url)]
            except Misconfigured as error:
                _log.error("%s", error.reason)
            except BackendFailed as error:
                _log.warning("policy_base_url: %s: not there yet", error.reason)
            else:
                if served and self.config.model not in served:
                    _log.warning(
                        "policy_model_name: %s serves %s, not %r", backend.url, ", ".join(served), self.config.model
                    )


def described(backend: Backend) -> dict[str, Any]:
    """A backend as the control routes show it."""
    return {
        "id": backend.id,
        "url": backend.url,
        "run": backend.run,
        "health": backend.health,
        "draining": backend.draining,
        "paused": backend.paused,
        "weight_version": backend.weight_version,
        "live_rollouts": len(backend.live),
        "in_flight": len(backend.in_flight),
        "limit": backend.limit,
        "live_tokens": backend.demand,
        "capacity": backend.capacity,
    }


def _address(url: str) -> str:
    """Where an engine is, by one of the names that this machine has for itself."""
    return re.sub(r"^(\w+://)(localhost|\[::1\])(?=[:/]|$)", r"\g<1>127.0.0.1", root_of(url))
