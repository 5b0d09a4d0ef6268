# SPDX-License-Identifier: Apache-2.0
"""What every inference engine is to us: one question, what do you sample after these tokens?

Errors tell apart what another backend could do better (:class:`BackendFailed`) from what every backend would refuse
(:class:`RequestRefused`).

An engine holds no state of a rollout. Cancelling the task that awaits :meth:`Engine.generate` closes the connection,
by which the engines here abort the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.policy.messages import Message
from nemo_gym_prorl.policy.tokens import Generation


CONTEXT_OVERFLOW = re.compile(
    r"context length|max_model_len|maximum context|longer than the|max_seq_len|must be at least 1, got 0", re.I
)

_CACHE_CONFIG = re.compile(
    r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)".*?\bnum_gpu_blocks="(\d+)"', re.MULTILINE
)


class BackendFailed(InfrastructureError):
    """The backend is gone, broken or overloaded; the same request may succeed on another one."""


class RequestRefused(CallerError):
    """The engine refused the request as such; every backend would."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, in the names that OpenAI-style engines share. ``None`` leaves it to the engine.

    ``extra`` goes into the request as it is, for what only one engine knows.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_openai(self) -> dict[str, Any]:
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": list(self.stop) or None,
            "seed": self.seed,
        }
        return {name: value for name, value in named.items() if value is not None} | dict(self.extra)


@dataclass(frozen=True, slots=True)
class Load:
    """What a backend says about itself.

    Attributes:
        running: requests that it works on.
        waiting: requests that it has queued.
        kv_use: share of its KV cache in use, 0 to 1.
        capacity: tokens that fit into its KV cache, if it says so.
    """

    running: int
    waiting: int
    kv_use: float
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages behind a prompt, for engines that render them themselves."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    prefix: Sequence[int] = ()
    """Ids that the rendered prompt must start with, for engines that can be told."""


class Engine(Protocol):
    """One wire protocol. ``takes_tokens`` says which of prompt and conversation it reads."""

    takes_tokens: bool

    async def generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation: ...

    async def tokenize(self, url: str, text: str) -> list[int] | None: ...

    async def healthy(self, url: str) -> bool: ...

    async def load(self, url: str) -> Load | None: ...


class HttpEngine:
    """What the protocols have in common.

    Args:
        session: the connection pool; its owner closes it.
        model: model name as the backend serves it.
        api_key: sent as a bearer token; empty for none.
        headers: further headers.
        connect_timeout_s: how long a connection may take; sampling itself is not limited here.
    """

    takes_tokens = True
    _load_names: tuple[str, str, str] = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._session = session
        self.model = model
        self._headers = dict(headers or {}) | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._brief = aiohttp.ClientTimeout(total=connect_timeout_s)

    async def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The JSON answer; ``None`` if the prompt does not fit into the engine's context.

        Raises:
            BackendFailed: no answer, an answer that is not JSON, or a server error.
            RequestRefused: the engine refuses the request.
        """
        try:
            status, raw = await self._exchange(url, orjson.dumps(body))
        except aiohttp.ClientConnectorError as error:
            raise BackendFailed(f"{url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE) from error
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise BackendFailed(f"{url}: no connection in time", kind=FailureKind.TRANSPORT_TIMEOUT) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BackendFailed(f"{url}: {error!r}", kind=FailureKind.TRANSPORT_PEER_DROP) from error
        if status == 200:
            try:
                answer = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                raise RequestRefused(
                    f"{url} answered with {raw[:80]!r}, which is not JSON: is this an inference engine?",
                    field="policy_base_url",
                ) from error
            if not isinstance(answer, dict):
                raise RequestRefused(f"{url} answered with JSON that is not an object", field="policy_base_url")
            return answer
        said = raw[:500].decode(errors="replace")
        if status == 400 and CONTEXT_OVERFLOW.search(said):
            return None
        if status in (401, 403):
            raise RequestRefused(f"{url} refused the key: {said}", field="policy_api_key")
        if status == 404:
            raise RequestRefused(f"{url} does not serve {self.model!r}: {said}", field="policy_model_name")
        if status < 500 and status not in (408, 409, 429):
            raise RequestRefused(f"{url} refused the request ({status}): {said}", field="request")
        raise BackendFailed(f"{url} answered {status}: {said}")

    async def _exchange(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Status and content of the answer.

        Engines close a connection that was idle for some seconds (vLLM: 5), perhaps just as it is used again. That
        says nothing about their health, and sampling may be asked for twice: so an answer that never began is asked
        for once more. An engine that died refuses the new connection.
        """
        try:
            return await self._send(url, body)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._send(url, body)

    async def _send(self, url: str, body: bytes) -> tuple[int, bytes]:
        headers = self._headers | {"Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers, timeout=self._timeout) as response:
            return response.status, await response.read()

    def _get(self, url: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(url, headers=self._headers, timeout=self._brief)

    async def tokenize(self, url: str, text: str) -> list[int] | None:
        """The text in the engine's own ids; ``None`` from an engine that does not tell."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            async with self._session.post(
                f"{root_of(url)}/tokenize", json=body, headers=self._headers, timeout=self._brief
            ) as response:
                tokens = (await response.json()).get("tokens") if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            return None
        return tokens if isinstance(tokens, list) else None

    async def healthy(self, url: str) -> bool:
        """Whether the backend answers on ``/health``."""
        try:
            async with self._get(f"{root_of(url)}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def load(self, url: str) -> Load | None:
        """What the backend publishes on ``/metrics``; ``None`` if it publishes nothing of use."""
        try:
            async with self._get(f"{root_of(url)}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        values = [metric(text, name) for name in self._load_names]
        running, waiting, kv_use = values
        if running is None or waiting is None or kv_use is None:
            return None
        return Load(int(running), int(waiting), kv_use, self._capacity(text))

    def _capacity(self, metrics: str) -> int | None:
        """Tokens that fit into the KV cache: vLLM publishes blocks and their size as labels."""
        return sum(int(size) * int(count) for size, count in _CACHE_CONFIG.findall(metrics)) or None


def root_of(url: str) -> str:
    """The URL of a server, whose routes begin with ``/v1`` or not."""
    return url.rstrip("/").removesuffix("/v1")


def metric(text: str, name: str) -> float | None:
    """Sum of a metric over its labels in Prometheus text."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None
