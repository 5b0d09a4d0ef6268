# SPDX-License-Identifier: Apache-2.0
"""Owns a policy service: what must be there before the first turn is checked at the start. Engines may come later."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.backends import Backends
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.registry import ENGINES
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.pool.waits import Waits
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.parsers import FORMATS
from nemo_gym_prorl.policy.text.rehearsal import rehearse
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
        self._lock = asyncio.Lock()
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
            if self._service is not None:
                return
            config, renderer = self.config, None
            if ENGINES[config.protocol].takes_tokens and config.tokenizer_folder is not None:
                # It tokenises one text at a time: handing that to a pool of threads costs half as much again.
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
                renderer = await asyncio.to_thread(self._followed, config.tokenizer_folder)
            await self.backends.start()
            engine, dispatcher = self.backends.engine, self.backends.dispatcher
            assert engine is not None
            assert dispatcher is not None
            self._service = PolicyService(
                engine,
                dispatcher,
                self.metrics,
                renderer=renderer,
                tool_format=config.tool_call_parser,
                thoughts=config.thoughts,
                history=config.history,
                keep_s=config.keep_s,
            )

    def _followed(self, folder: str) -> Renderer:
        """Tokenizer and template, once it is known that they can be followed."""
        renderer = Renderer.load(folder, self.config.chat_template)
        rehearse(renderer, self.config.tool_call_parser, thoughts=self.config.thoughts)
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

    async def service(self) -> PolicyService:
        """The running service.

        Raises:
            CallerError: the configuration cannot work.
        """
        await self.start()
        assert self._service is not None
        return self._service
