# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration, start and shutdown of the policy side, and registration of engines.

The tokenizer and its template are validated at the start. Engines may join later, on hosts that :func:`check_host`
allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.http.key_guard import is_loopback
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.policy.engines.engine import (
    BackendFailed,
    LogitsReturned,
    Misconfigured,
    checked_url,
    origin_of,
    root_of,
)
from nemo_gym_prorl.policy.engines.engine_control import CONNECT_S
from nemo_gym_prorl.policy.engines.protocols import ENGINES
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.backend import Backend, BackendExists
from nemo_gym_prorl.policy.pool.dispatcher import BackendDispatcher
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.service import HistoryPolicy, PolicyService
from nemo_gym_prorl.policy.text.formats import FORMATS, format_named
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.turn_scanner import TurnFormat
from nemo_gym_prorl.policy.text.validate_template import validate_template


class PolicyConfig(BaseModel):
    """Settings to reach the policy and to parse its turns.

    Attributes:
        base_url: URLs of backends, with or without ``/v1``, for rollouts that name no training run; empty if every
            run registers its own backends.
        api_key: bearer token for these backends, or a list with a token for each backend; empty for none.
        model: model name as the backends serve it.
        engine: wire protocol; ``null`` is ``vllm`` with a tokenizer, else ``vllm_chat``. An engine with another
            protocol is refused at its handshake.
        tokenizer: folder or Hugging Face name; ``null``: that of a ``model`` folder.
        chat_template: Jinja file in place of the tokenizer's template.
        tool_call_parser: the model's call format, by vLLM's name; ``null`` detects the format from the chat template.
            For an engine that parses turns itself (``nemo_rl``, ``vllm_chat``), the format detects calls left in a
            final answer, which are an error (``null``: ``hermes``).
        thoughts: whether a leading ``<think>`` block is separated as reasoning.
        replace_developer_role_with_system: whether to replace the role even if the template has a role ``developer``,
            or the engine renders prompts.
        history: ``keep`` tokens as sampled when the template would rewrite them, or ``branch``.
        limit: live rollouts per engine.
        unreachable_s: seconds without a serving engine after which waiting turns fail.
        keep_s: lifetime of an unused rollout's tokens.
        headers: headers of every request to these backends.
        backend_hosts: hosts, or patterns such as ``10.0.*``, of engines that may be added later.
        control_token: bearer token that every route requires.
    """

    model_config = ConfigDict(extra="forbid")

    base_url: list[str]
    api_key: str | list[str] = ""
    model: str
    engine: Literal["vllm", "vllm_chat", "nemo_rl", "sglang"] | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    thoughts: bool = True
    replace_developer_role_with_system: bool = False
    history: HistoryPolicy = "keep"
    limit: Annotated[int, Field(ge=1)] = 256
    unreachable_s: Annotated[float, Field(gt=0)] = 900.0
    keep_s: Annotated[float, Field(gt=0)] = 3600.0
    headers: dict[str, str] = Field(default_factory=dict)
    backend_hosts: list[str] = Field(default_factory=list)
    control_token: str | None = None

    @property
    def tokenizer_folder(self) -> str | None:
        """Folder or Hugging Face name of the tokenizer; ``None`` without a tokenizer."""
        return self.tokenizer or (self.model if Path(self.model, "tokenizer.json").is_file() else None)

    @property
    def protocol(self) -> str:
        """Name of the backends' protocol in ``ENGINES``."""
        return self.engine or ("vllm" if self.tokenizer_folder is not None else "vllm_chat")

    def keys(self) -> list[str]:
        """Return the key of each backend in ``base_url``.

        Raises:
            CallerError: the number of keys differs from the number of backends.
        """
        if isinstance(self.api_key, str):
            return [self.api_key] * len(self.base_url)
        if len(self.api_key) != len(self.base_url):
            raise CallerError(
                f"{len(self.api_key)} keys for {len(self.base_url)} backends: give one key, or one per backend",
                field="api_key",
            )
        return self.api_key


class HostRefused(CallerError):
    """A backend is on a host that is not allowed, so prompts must not be sent there."""

    http_status = 403
    problem = "backend-host-refused"


def check_host(url: str, config: PolicyConfig) -> None:
    """Refuse a backend on a host that is neither loopback, nor in ``base_url``, nor in ``backend_hosts``.

    Raises:
        HostRefused: the host is not allowed.
    """
    host = urlsplit(url).hostname or ""
    known = {urlsplit(known).hostname for known in config.base_url}
    if (
        host in known
        or is_loopback(host)
        or any(fnmatchcase(host, pattern.lower()) for pattern in config.backend_hosts)
    ):
        return
    raise HostRefused(f"{host} is not an allowed host: add it to policy.backend_hosts", field="url")


_log = logging.getLogger(__name__)


class PolicyRuntime:
    """A policy service with its backends and connections.

    Attributes:
        pool: places rollouts on backends.
        metrics: Prometheus metrics of this process.
        engine: client of the backends' protocol.
        dispatcher: runs requests.
        service: the service, available after the start.

    Raises:
        CallerError: the configuration is invalid.
    """

    def __init__(self, config: PolicyConfig) -> None:
        form = format_named(config.tool_call_parser or "hermes")
        if form is None:
            raise CallerError(f"{config.tool_call_parser!r} is none of {', '.join(FORMATS)}", field="tool_call_parser")
        self._form = form
        if ENGINES[config.protocol].takes_tokens and config.tokenizer_folder is None:
            raise CallerError(f"engine {config.protocol!r} needs a tokenizer: set policy.tokenizer", field="tokenizer")
        self.config = config
        self.pool = BackendPool(limit=config.limit, unreachable_s=config.unreachable_s)
        self._headers_by_origin: dict[str, dict[str, str]] = {}
        for index, (given, key) in enumerate(zip(config.base_url, config.keys(), strict=True)):
            url = checked_url(given, "base_url")
            self._headers_by_origin[origin_of(url)] = config.headers | authorization(key)
            self.pool.add(f"backend{index}", url)
        self._client = HttpClient(CONNECT_S)
        self.engine = ENGINES[config.protocol](self._client, config.model, self._headers_by_origin)
        self.dispatcher = BackendDispatcher(self.pool, self.engine)
        self.metrics = PolicyMetrics(self.pool, self.dispatcher.loops)
        self.service: PolicyService

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start and stop the service with an application.

        Raises:
            CallerError: the tokenizer or its template is missing or unsupported.
        """
        config, renderer = self.config, None
        async with self._client, contextlib.aclosing(self.dispatcher):
            if self.engine.takes_tokens and config.tokenizer_folder is not None:
                # The service encodes one text at a time, so the tokenizer's own thread pool has no use.
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
                renderer, self._form = await asyncio.to_thread(self._load_renderer, config.tokenizer_folder)
            self.service = PolicyService(
                self.dispatcher,
                self.metrics,
                renderer=renderer,
                form=self._form,
                reads_reasoning=config.thoughts,
                developers=not config.replace_developer_role_with_system,
                history=config.history,
                keep_s=config.keep_s,
            )
            self.dispatcher.start()
            self.dispatcher.spawn(self._check_backends())
            yield

    def _load_renderer(self, folder: str) -> tuple[Renderer, TurnFormat]:
        renderer = Renderer.load(folder, self.config.chat_template)
        return renderer, validate_template(
            renderer, self.config.tool_call_parser, reads_reasoning=self.config.thoughts
        )

    async def _check_backends(self) -> None:
        """Log errors that would fail every turn. Engines may also start later, so no error stops the server."""
        for backend in list(self.pool.backends.values()):
            try:
                await self.engine.check_protocol(backend.url)
                served = [str(card.get("id")) for card in await self.engine.models(backend.url)]
                if served and self.config.model not in served:
                    _log.warning(
                        "policy_model_name: %s serves %s, not %r", backend.url, ", ".join(served), self.config.model
                    )
                else:
                    await self.engine.probe_log_prob_mode(backend.url)
            except Misconfigured as error:
                _log.error("%s", error.reason)
            except BackendFailed as error:
                _log.warning("policy_base_url: %s: no engine answers yet", error.reason)

    async def add(
        self,
        url: str,
        backend_id: str | None = None,
        weight_version: str | None = None,
        api_key: str | None = None,
        run: str | None = None,
    ) -> Backend:
        """Add a backend for the rollouts of a training run, with its own key.

        The key is sent to all backends of the URL's origin. If the run already has a backend at the URL, only its
        label and key change. Without an id, an id is generated; without a key, a known key of the origin stays.

        Raises:
            BackendExists: the id is in use, or the URL belongs to another run, another id, or a draining backend.
            CallerError: the URL is invalid, its host is not allowed, or the engine has another protocol or returns
                logits.
        """
        url = checked_url(url)
        check_host(url, self.config)
        self._backend_at(backend_id, url, run)
        try:
            await self.engine.check_protocol(url)
        except Misconfigured as error:
            raise CallerError(error.reason, field="url") from error
        except BackendFailed:
            pass  # the handshake before the first turn checks the protocol
        known = self._backend_at(backend_id, url, run)
        if known is None:
            backend_id = backend_id or f"backend{time.monotonic_ns():x}"
            self.dispatcher.apply(self.pool.add(backend_id, url, weight_version, run))
            known = self.pool.backends[backend_id]
        elif weight_version is not None:
            self.pool.label(weight_version, known.id)
        if api_key is not None:
            self._headers_by_origin[origin_of(url)] = authorization(api_key)
        try:
            await self.engine.probe_log_prob_mode(url)
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
        """Resume one backend or all of a run, with a new label if ``weight_version`` is given.

        With ``reset_prefix_cache``, the chosen backends are paused and their prefix caches emptied before any backend
        resumes. After an error, exactly the backends that were paused before the call are paused.

        Raises:
            CallerError: an engine has no route for the reset, or no such backend or run exists.
            BackendFailed: an engine did not empty its cache, or turns are still in flight.
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
                if not isinstance(error, BackendFailed):
                    raise
                reason = f"{error.reason}; paused engines stay paused, and resume can be repeated"
                if isinstance(error, Misconfigured):
                    raise CallerError(reason) from error
                raise BackendFailed(reason, kind=error.kind) from error
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

    def _backend_at(self, backend_id: str | None, url: str, run: str | None) -> Backend | None:
        """Return the backend that this run has at the URL; ``None`` for a new URL.

        An engine has one policy and one limit, so two runs never share a URL.

        Raises:
            BackendExists: another run, or another id, has the URL, or the backend is draining.
        """
        # The first registration wins: for the other run the URL may name a host in another network.
        known = next((one for one in self.pool.backends.values() if _address(one.url) == _address(url)), None)
        if known is None or (known.run == run and backend_id in (None, known.id) and not known.draining):
            return known
        whose = f"training {known.run!r}" if known.run else "rollouts that name no training"
        raise BackendExists(
            f"{url} is backend {known.id!r} of {whose}; if that training has ended, "
            f"DELETE /v1/backends/{known.id} first",
            field="url",
        )


def _address(url: str) -> str:
    return re.sub(r"^(\w+://)(localhost|\[::1\])(?=[:/]|$)", r"\g<1>127.0.0.1", root_of(url))
