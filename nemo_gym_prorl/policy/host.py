# SPDX-License-Identifier: Apache-2.0
"""Owns a policy service: what must be there before the first turn is checked at the start, and what may come later
(the engines) is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.backends import Backends
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.engine import BackendFailed, Misconfigured
from nemo_gym_prorl.policy.engines.registry import ENGINES
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.pool.waits import Waits
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.parsers import FORMATS
from nemo_gym_prorl.policy.text.rehearsal import CannotFollow, rehearse
from nemo_gym_prorl.policy.text.renderer import Renderer


class PolicyHost:
    """A policy service, its backends and its connections, from start to end.

    Args:
        config: see there.

    Raises:
        CallerError: the configuration cannot work.
    """

    def __init__(self, config: PolicyConfig) -> None:
        if config.tool_call_parser not in FORMATS:
            raise CallerError(f"{config.tool_call_parser!r} is none of {', '.join(FORMATS)}", field="tool_call_parser")
        self.config = config
        self.backends = Backends(config)
        self.backends.on_change = self._look
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._started = False
        self._renderer: Renderer | None = None
        self._cannot_follow: CannotFollow | None = None
        self._service: PolicyService | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start, and end, with an application: one whose tokenizer is missing does not start."""
        try:
            await self.start()
            yield
        finally:
            await self.aclose()

    async def start(self) -> None:
        """Read the tokenizer, and have the backends looked for.

        Raises:
            CallerError: the tokenizer or its template cannot be read.
        """
        async with self._lock:
            if self._started:
                return
            config = self.config
            wanted = config.engine == "auto" or ENGINES[config.engine].takes_tokens
            if wanted and config.tokenizer_folder is not None:
                # It tokenises one text at a time: handing that to a pool of threads costs half as much again.
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
                self._renderer = await asyncio.to_thread(self._followed, config.tokenizer_folder)
            await self.backends.start()
            self._started = True
            self._look()

    def _followed(self, folder: str) -> Renderer:
        """Tokenizer and template, once it is known that they can be followed.

        What an engine is that is asked for it may need neither; it is refused when it turns out to need them.
        """
        config = self.config
        renderer = Renderer.load(folder, config.chat_template)
        try:
            rehearse(renderer, config.tool_call_parser, thoughts=config.thoughts)
        except CannotFollow as error:
            if config.engine != "auto":
                raise
            self._cannot_follow = error
        return renderer

    async def aclose(self) -> None:
        """Stop background work and close connections."""
        await self.backends.aclose()

    @property
    def pool(self) -> BackendPool:
        """The backends."""
        return self.backends.pool

    @property
    def metrics(self) -> PolicyMetrics:
        """What is counted in this process."""
        return self.backends.metrics

    @property
    def waits(self) -> Waits:
        """How long rollouts have waited for a backend."""
        return self.backends.waits

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
        if (ready := self.ready) is not None:
            return ready
        await self.start()
        with self.waits.waiting(rollout) if rollout is not None else contextlib.nullcontext():
            try:
                async with asyncio.timeout(self.config.unreachable_s):
                    while self._service is None:
                        engine = self.backends.engine
                        if self._cannot_follow is not None and engine is not None and engine.takes_tokens:
                            raise self._cannot_follow
                        if self.backends.trouble is not None:
                            raise Misconfigured(self.backends.trouble, field="policy.engine")
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                urls = ", ".join(backend.url for backend in self.pool.backends.values()) or "there is none"
                raise BackendFailed(f"no backend answered for {self.config.unreachable_s:g} s ({urls})") from None
        return self._service

    def _look(self) -> None:
        """What the backends are may be known now."""
        engine, dispatcher, config = self.backends.engine, self.backends.dispatcher, self.config
        if self._cannot_follow is not None and engine is not None and engine.takes_tokens:
            engine = None
        if self._started and self._service is None and engine is not None and dispatcher is not None:
            self._service = PolicyService(
                engine,
                dispatcher,
                self.metrics,
                renderer=self._renderer if engine.takes_tokens else None,
                tool_format=config.tool_call_parser,
                thoughts=config.thoughts,
                history=config.history,
                keep_s=config.keep_s,
            )
        self._changed.set()
