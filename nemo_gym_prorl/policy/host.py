# SPDX-License-Identifier: Apache-2.0
"""Owns a policy service: what must be there before the first turn is checked at the start, and what may come later
(the engines) is waited for.

With ``engine: auto`` the protocol is found in the background once a backend answers; turns wait for that. Backends,
and how long a rollout has waited, can be asked about at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.config import PolicyConfig, check_host
from nemo_gym_prorl.policy.engines.addresses import bearer, checked_url, origin_of
from nemo_gym_prorl.policy.engines.detection import detect, published, speaks
from nemo_gym_prorl.policy.engines.engine import BackendFailed, Misconfigured
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.engines.registry import ENGINES
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.backend import Backend, Decision
from nemo_gym_prorl.policy.pool.placement import Placement
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.pool.waits import Waits
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.chat import Renderer
from nemo_gym_prorl.policy.text.parsers import FORMATS


_log = logging.getLogger(__name__)

_SEARCH_S = 1.0
"""Interval at which backends are asked what they are, until one answers."""


class AlreadyThere(CallerError):
    """What is to be added exists."""

    http_status = 409
    problem = "already-there"


class PolicyHost:
    """A policy service, its pool and its connections, from start to end.

    Args:
        config: see there.

    Raises:
        CallerError: the configuration cannot work.
    """

    def __init__(self, config: PolicyConfig) -> None:
        if config.tool_call_parser not in FORMATS:
            raise CallerError(f"{config.tool_call_parser!r} is none of {', '.join(FORMATS)}", field="tool_call_parser")
        self.config = config
        named = Path(config.model, "tokenizer.json").is_file()
        self._tokenizer = config.tokenizer or (config.model if named else None)
        if config.engine != "auto" and ENGINES[config.engine].takes_tokens and self._tokenizer is None:
            raise CallerError(f"engine {config.engine!r} takes tokens, so it needs a tokenizer", field="tokenizer")
        self.pool = BackendPool(limit=config.limit)
        self.metrics = PolicyMetrics(self.pool)
        self.waits = Waits()
        self._by_origin: dict[str, dict[str, str]] = {}
        for index, (given, key) in enumerate(zip(config.base_url, config.keys(), strict=True)):
            url = checked_url(given, "base_url")
            self._by_origin[origin_of(url)] = config.headers | bearer(key)
            self.pool.add(f"backend{index}", url)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._renderer: Renderer | None = None
        self._service: PolicyService | None = None
        self._trouble: str | None = None
        self._work: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start, and end, with an application: one whose tokenizer is missing does not start."""
        try:
            await self.start()
            yield
        finally:
            await self.aclose()

    async def start(self) -> None:
        """Read the tokenizer, and find out what the backends are, in the background where they must be asked.

        Raises:
            CallerError: the tokenizer or its template cannot be read.
        """
        async with self._lock:
            if self._session is not None:
                return
            config = self.config
            wanted = config.engine == "auto" or ENGINES[config.engine].takes_tokens
            if wanted and self._tokenizer is not None:
                self._renderer = await asyncio.to_thread(Renderer.load, self._tokenizer, config.chat_template)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            if config.engine != "auto":
                self._build(config.engine)
            self._spawn(self._search() if config.engine == "auto" else self._look_over())

    async def aclose(self) -> None:
        """Stop background work and close connections."""
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        if self._service is not None:
            await self._service.placement.aclose()
        if self._session is not None:
            await self._session.close()

    @property
    def ready(self) -> PolicyService | None:
        """The running service, if it runs already."""
        return self._service

    async def service(self, rollout: str | None = None) -> PolicyService:
        """The running service, as soon as it is known what the backends are.

        Args:
            rollout: on whose behalf is waited, if anybody's.

        Raises:
            CallerError: the configuration cannot work.
            BackendFailed: no backend answered in time.
            Misconfigured: it cannot be told what they are.
        """
        await self.start()
        with self.waits.waiting(rollout) if rollout is not None else contextlib.nullcontext():
            try:
                async with asyncio.timeout(self.config.wait_s):
                    while self._service is None:
                        if self._trouble is not None:
                            raise Misconfigured(self._trouble, field="policy.engine")
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                urls = ", ".join(backend.url for backend in self.pool.backends.values()) or "there is none"
                raise BackendFailed(f"no backend answered for {self.config.wait_s:g} s ({urls})") from None
        return self._service

    async def add(
        self, url: str, backend_id: str | None = None, weight_version: str | None = None, api_key: str | None = None
    ) -> Backend:
        """Add a backend; it gets its own key, and never one that was configured for others.

        Raises:
            AlreadyThere: there is one of that id.
            CallerError: no URL, no host that is allowed, or an engine of another kind than the others.
        """
        await self.start()
        url = checked_url(url)
        check_host(url, self.config)
        if backend_id in self.pool.backends:
            raise AlreadyThere(f"there is a backend {backend_id!r} already", field="id")
        if self._service is not None:
            await self._check_protocol(url, self._protocol)
            if backend_id in self.pool.backends:
                raise AlreadyThere(f"there is a backend {backend_id!r} already", field="id")
        if api_key is not None:
            self._by_origin[origin_of(url)] = bearer(api_key)
        backend_id = backend_id or f"backend{time.monotonic_ns():x}"
        if self._service is not None:
            self._service.changed(url)
        self.apply(self.pool.add(backend_id, url, weight_version))
        return self.pool.backends[backend_id]

    def apply(self, decisions: list[Decision]) -> None:
        """Carry out what the pool decided; before there is a service, nothing waits for anything."""
        if self._service is not None:
            self._service.placement.apply(decisions)

    async def _check_protocol(self, url: str, protocol: str) -> None:
        """Refuse a backend that says that it is something else; one that says nothing is found out by its answers."""
        assert self._session is not None
        try:
            routes = await published(self._session, url)
        except (OSError, TimeoutError, aiohttp.ClientError):
            return
        if routes is not None and not speaks(routes, protocol):
            raise CallerError(f"{url} does not speak {protocol!r}, as the other backends do", field="url")

    async def _search(self) -> None:
        """Ask the backends what they are until that is known."""
        while self._service is None:
            urls = [backend.url for backend in self.pool.backends.values()]
            found = dict(zip(urls, await asyncio.gather(*map(self._found, urls)), strict=True))
            protocols = {protocol for protocol in found.values() if protocol is not None}
            if len(protocols) > 1:
                self._says(f"the backends are of different kinds: {found}")
            elif protocols and (protocol := protocols.pop()):
                if ENGINES[protocol].takes_tokens and self._renderer is None:
                    self._says(f"the backends are {protocol!r}, which takes tokens: set policy.tokenizer")
                else:
                    self._build(protocol)
                    self._spawn(self._look_over())
            self._changed.set()
            if self._service is None:
                await asyncio.sleep(_SEARCH_S)

    async def _found(self, url: str) -> str | None:
        assert self._session is not None
        try:
            return await detect(self._session, url, self._engine, tokenizer=self._renderer is not None)
        except Misconfigured as error:
            self._says(error.reason.removeprefix("policy.engine: "))
        except (BackendFailed, OSError, TimeoutError, aiohttp.ClientError):
            pass  # not there yet
        return None

    def _says(self, trouble: str) -> None:
        if trouble != self._trouble:
            _log.error("policy.engine: %s", trouble)
        self._trouble = trouble

    async def _look_over(self) -> None:
        """Say early what every turn would fail with; engines may also come later, so nothing ends for it."""
        engine = self._engine(self._protocol)
        for backend in list(self.pool.backends.values()):
            try:
                served = [str(card.get("id")) for card in await engine.models(backend.url)]
            except Misconfigured as error:
                _log.warning("%s", error.reason)
            except BackendFailed as error:
                _log.warning("policy_base_url: %s: not there yet", error.reason)
            else:
                if served and self.config.model not in served:
                    _log.warning(
                        "policy_model_name: %s serves %s, not %r", backend.url, ", ".join(served), self.config.model
                    )

    def _engine(self, protocol: str) -> HttpEngine:
        assert self._session is not None
        return ENGINES[protocol](self._session, self.config.model, by_origin=self._by_origin)

    def _build(self, protocol: str) -> None:
        config = self.config
        engine = self._engine(protocol)
        placement = Placement(self.pool, engine, wait_s=config.wait_s, waits=self.waits)
        placement.start()
        self._protocol = protocol
        self._trouble = None
        self._service = PolicyService(
            engine,
            placement,
            self.metrics,
            renderer=self._renderer if engine.takes_tokens else None,
            tool_format=config.tool_call_parser,
            thoughts=config.thoughts,
            history=config.history,
            keep_s=config.keep_s,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        def over(task: asyncio.Task[None]) -> None:
            self._work.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("work in the background ended", exc_info=error)

        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(over)
