# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the policy side from its start to its end. What must be there before the first turn is checked at the start;
engines may come later, and which may join is checked here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.config import PolicyConfig, check_host
from nemo_gym_prorl.policy.engines.connections import Connections
from nemo_gym_prorl.policy.engines.engine import (
    BackendFailed,
    LogitsReturned,
    Misconfigured,
    checked_url,
    origin_of,
    root_of,
)
from nemo_gym_prorl.policy.engines.protocols import ENGINES
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.backend import AlreadyThere, Backend
from nemo_gym_prorl.policy.pool.dispatcher import Dispatcher
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.formats import FORMATS, format_named
from nemo_gym_prorl.policy.text.parsers import Format
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.validate_template import validate_template
from nemo_gym_prorl.serving.keys import authorization


_log = logging.getLogger(__name__)


class PolicyRuntime:
    """A policy service, its backends and its connections.

    Args:
        config: see there.

    Attributes:
        pool: which backend samples what.
        metrics: what is counted in this process.
        engine: how backends are asked.
        dispatcher: runs requests.
        service: the service, from the start on.

    Raises:
        CallerError: the configuration cannot work.
    """

    def __init__(self, config: PolicyConfig) -> None:
        form = format_named(config.tool_call_parser or "hermes")
        if form is None:
            raise CallerError(f"{config.tool_call_parser!r} is none of {', '.join(FORMATS)}", field="tool_call_parser")
        self._form = form
        if ENGINES[config.protocol].takes_tokens and config.tokenizer_folder is None:
            raise CallerError(f"engine {config.protocol!r} takes tokens, so it needs a tokenizer", field="tokenizer")
        self.config = config
        self.pool = BackendPool(limit=config.limit, unreachable_s=config.unreachable_s)
        self._by_origin: dict[str, dict[str, str]] = {}
        for index, (given, key) in enumerate(zip(config.base_url, config.keys(), strict=True)):
            url = checked_url(given, "base_url")
            self._by_origin[origin_of(url)] = config.headers | authorization(key)
            self.pool.add(f"backend{index}", url)
        self._connections = Connections()
        self.engine = ENGINES[config.protocol](self._connections, config.model, self._by_origin)
        self.dispatcher = Dispatcher(self.pool, self.engine)
        self.metrics = PolicyMetrics(self.pool, self.dispatcher.loops)
        self.service: PolicyService

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start, and end, with an application: one whose tokenizer is missing does not start.

        Raises:
            CallerError: the tokenizer or its template cannot be read, or not be followed.
        """
        config, renderer = self.config, None
        async with self._connections, contextlib.aclosing(self.dispatcher):
            if self.engine.takes_tokens and config.tokenizer_folder is not None:
                # It tokenises one text at a time: handing that to a pool of threads costs half as much again.
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
                renderer, self._form = await asyncio.to_thread(self._followed, config.tokenizer_folder)
            self.service = PolicyService(
                self.dispatcher,
                self.metrics,
                renderer=renderer,
                form=self._form,
                thoughts=config.thoughts,
                developers=not config.replace_developer_role_with_system,
                history=config.history,
                keep_s=config.keep_s,
            )
            self.dispatcher.start()
            self.dispatcher.spawn(self._look_over())
            yield

    def _followed(self, folder: str) -> tuple[Renderer, Format]:
        """Tokenizer and template, once it is known that they can be followed, and how the model writes its turns."""
        renderer = Renderer.load(folder, self.config.chat_template)
        return renderer, validate_template(renderer, self.config.tool_call_parser, thoughts=self.config.thoughts)

    async def _look_over(self) -> None:
        """Say early what every turn would fail with; engines may also come later, so nothing ends for it."""
        for backend in list(self.pool.backends.values()):
            try:
                await self.engine.check_protocol(backend.url)
                served = [str(card.get("id")) for card in await self.engine.models(backend.url)]
                if served and self.config.model not in served:
                    _log.warning(
                        "policy_model_name: %s serves %s, not %r", backend.url, ", ".join(served), self.config.model
                    )
                else:
                    await self.engine.learn_mode(backend.url)
            except Misconfigured as error:
                _log.error("%s", error.reason)
            except BackendFailed as error:
                _log.warning("policy_base_url: %s: not there yet", error.reason)

    # Who may join

    async def add(
        self,
        url: str,
        backend_id: str | None = None,
        weight_version: str | None = None,
        api_key: str | None = None,
        run: str | None = None,
    ) -> Backend:
        """Add a backend, for the rollouts of a run; it gets its own key, and never one that was configured for others.
        One that the run has at that URL already stays the one that it is, with the new label and key.

        Raises:
            AlreadyThere: there is one of that id, or another run has one at that URL.
            CallerError: no URL, no host that is allowed, an engine of another kind than the others, or one that
                returns logits.
        """
        url = checked_url(url)
        check_host(url, self.config)
        self._known(backend_id, url, run)
        try:
            await self.engine.check_protocol(url)
        except Misconfigured as error:
            raise CallerError(error.reason, field="url") from error
        except BackendFailed:
            pass  # it is looked at when it is first met
        known = self._known(backend_id, url, run)
        if known is None:
            backend_id = backend_id or f"backend{time.monotonic_ns():x}"
            self.dispatcher.apply(self.pool.add(backend_id, url, weight_version, run))
            known = self.pool.backends[backend_id]
        elif weight_version is not None:
            self.pool.label(weight_version, known.id)
        if api_key is not None:
            self._by_origin[origin_of(url)] = authorization(api_key)
        try:
            await self.engine.learn_mode(url)
        except LogitsReturned as error:
            self.dispatcher.apply(self.pool.remove(known.id))
            raise CallerError(error.reason, field="url") from error
        except BackendFailed:
            pass  # the engine is probed before its first turn
        return known

    async def resume(
        self,
        backend_id: str | None = None,
        weight_version: str | None = None,
        run: str | None = None,
        *,
        reset_prefix_cache: bool = False,
    ) -> None:
        """Resume one backend or all of a run. With ``reset_prefix_cache`` each is drained, and its prefix cache
        emptied, before any resumes.

        An error leaves each backend paused that was paused, and no other.

        Raises:
            CallerError: an engine has no route for the reset.
            BackendFailed: an engine did not do it, or turns are still in flight.
        """
        if reset_prefix_cache:
            sampling = [backend for backend in self.pool.chosen(backend_id, run) if not backend.paused]
            try:
                if not await self.dispatcher.pause(backend_id, run=run):
                    raise BackendFailed("turns are still in flight, so no prefix cache was emptied; pause first")
                chosen = self.pool.chosen(backend_id, run)
                await asyncio.gather(*(self.engine.reset_prefix_cache(backend.url) for backend in chosen))
            except BaseException as error:
                for backend in sampling:
                    self.dispatcher.apply(self.pool.resume(backend.id, run=backend.run))
                if isinstance(error, Misconfigured):
                    raise CallerError(error.reason) from error
                raise
        if weight_version is not None:
            self._forget_engines(backend_id, run)
        self.dispatcher.apply(self.pool.resume(backend_id, weight_version, run))

    def label(self, weight_version: str, backend_id: str | None = None, run: str | None = None) -> None:
        """Label the weights of one backend or all of a run, without a pause."""
        self._forget_engines(backend_id, run)
        self.pool.label(weight_version, backend_id, run)

    def _forget_engines(self, backend_id: str | None, run: str | None) -> None:
        for backend in self.pool.chosen(backend_id, run):
            self.engine.forget(backend.url)

    def _known(self, backend_id: str | None, url: str, run: str | None) -> Backend | None:
        """The backend that this run has at that URL: an engine has one policy, and one limit."""
        # Who is there first keeps it: the other may mean a host of its own network.
        known = next((one for one in self.pool.backends.values() if _address(one.url) == _address(url)), None)
        if known is None or (known.run == run and backend_id in (None, known.id) and not known.draining):
            return known
        whose = f"run {known.run!r}" if known.run else "rollouts that name no run"
        raise AlreadyThere(
            f"{url} is backend {known.id!r} of {whose}; if that is over, DELETE /v1/backends/{known.id} first",
            field="url",
        )


def _address(url: str) -> str:
    """Where an engine is, by one of the names that this machine has for itself."""
    return re.sub(r"^(\w+://)(localhost|\[::1\])(?=[:/]|$)", r"\g<1>127.0.0.1", root_of(url))
