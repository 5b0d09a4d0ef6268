# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of the policy side, and its start and end. What must be there before the first turn is checked at the
start. Engines may come later; which may join is checked here.
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
from nemo_gym_prorl.http.key_guard import is_loopback
from nemo_gym_prorl.http.keys import authorization
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
from nemo_gym_prorl.policy.service import PolicyService, Rewriting
from nemo_gym_prorl.policy.text.formats import FORMATS, format_named
from nemo_gym_prorl.policy.text.parsers import Format
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.validate_template import validate_template


class PolicyConfig(BaseModel):
    """How to reach the policy and how to read it.

    Attributes:
        base_url: one backend or several, with or without ``/v1``, for rollouts that name no run; none, where all come
            with the runs that use them.
        api_key: bearer token for these backends, or one for each of them; empty for none.
        model: model name as the backends serve it.
        engine: wire protocol; ``null`` is vLLM's, by tokens where there is a tokenizer, else by messages. An engine
            that is of another kind is refused when it is first met.
        tokenizer: folder or Hugging Face name; ``null`` takes ``model`` if that is a folder with a tokenizer.
        chat_template: file of a Jinja template that replaces the tokenizer's own.
        tool_call_parser: how the model writes tool calls, by vLLM's name; ``null`` finds the one that reads what the
            chat template writes. Where the engine takes turns apart itself (``nemo_rl``, ``vllm_chat``), the format
            tells whether it does: a call that is left in a final answer is an error (``null``: ``hermes``).
        thoughts: whether a leading ``<think>`` block is taken as reasoning.
        replace_developer_role_with_system: also where the template has the role, or the engine renders.
        history: keep tokens as sampled when the template would rewrite them, or start a branch.
        limit: live rollouts per backend at most.
        unreachable_s: how long nothing of a run may be under way, for want of a backend that serves, before its turns
            that wait fail; in seconds. As long as anything is, they wait.
        keep_s: how long an unused rollout's tokens are remembered, in seconds.
        headers: sent to these backends with every request.
        backend_hosts: hosts, or patterns as ``10.0.*``, of backends that may be added at run time, besides loopback
            and the hosts of ``base_url``.
        control_token: bearer token that every route asks for; ``null`` for none.
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
    history: Rewriting = "keep"
    limit: Annotated[int, Field(ge=1)] = 256
    unreachable_s: Annotated[float, Field(gt=0)] = 900.0
    keep_s: Annotated[float, Field(gt=0)] = 3600.0
    headers: dict[str, str] = Field(default_factory=dict)
    backend_hosts: list[str] = Field(default_factory=list)
    control_token: str | None = None

    @property
    def tokenizer_folder(self) -> str | None:
        """Where the tokenizer is, or its name; ``None`` if there is none."""
        return self.tokenizer or (self.model if Path(self.model, "tokenizer.json").is_file() else None)

    @property
    def protocol(self) -> str:
        """Which of ``ENGINES`` the backends speak."""
        return self.engine or ("vllm" if self.tokenizer_folder is not None else "vllm_chat")

    def keys(self) -> list[str]:
        """The key of each backend in ``base_url``.

        Raises:
            CallerError: there are not as many keys as backends.
        """
        if isinstance(self.api_key, str):
            return [self.api_key] * len(self.base_url)
        if len(self.api_key) != len(self.base_url):
            raise CallerError(f"{len(self.api_key)} keys for {len(self.base_url)} backends", field="api_key")
        return self.api_key


class HostRefused(CallerError):
    """A backend is to be added on a host that nobody allowed: prompts would go there."""

    http_status = 403
    problem = "backend-host-refused"


def check_host(url: str, config: PolicyConfig) -> None:
    """Refuse a backend on a host that is neither loopback, nor in ``base_url``, nor allowed.

    Raises:
        HostRefused: it is none of these.
    """
    host = urlsplit(url).hostname or ""
    known = {urlsplit(known).hostname for known in config.base_url}
    if (
        host in known
        or is_loopback(host)
        or any(fnmatchcase(host, pattern.lower()) for pattern in config.backend_hosts)
    ):
        return
    raise HostRefused(f"{host} is not among the hosts in policy.backend_hosts", field="url")


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
