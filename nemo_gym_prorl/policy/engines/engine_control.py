# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Control routes of an engine: published routes and models, health, load, and the reset of its prefix cache."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.http.client import ConnectFailed, ConnectionDropped, HttpAnswer, HttpClient
from nemo_gym_prorl.http.tracing import trace_headers
from nemo_gym_prorl.policy.engines.engine import BackendFailed, BackendLoad, Misconfigured, origin_of, root_of


CONNECT_S = 5.0
"""Time limit for opening a connection, and for a control request, in seconds; sampling has no limit."""

HANDSHAKE_TIMEOUT_S = 60.0
"""Time limit of a handshake, or of a probe that samples one token, in seconds; the engine may be busy."""

_CACHE_RESET_TIMEOUT_S = 5.0
"""Time limit in seconds for an engine to free the blocks of ended requests, which it does after its next step."""

_TRIES = 3
"""Attempts at a request whose connection ends before an answer; each reused connection may have been idle too long."""


class EngineControl:
    """Requests to an engine besides sampling.

    Args:
        client: connections to all engines; the caller closes them.
        headers_by_origin: headers for the backends of one origin (see :func:`origin_of`).
    """

    _load_names: tuple[str, str] = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    reset_route: str | None = "/reset_prefix_cache"
    """Route that empties the prefix cache; ``None`` if the engine has none."""
    reset_hint = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, which adds the route"

    def __init__(
        self, client: HttpClient, headers_by_origin: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    ) -> None:
        self._client = client
        self._headers_by_origin = headers_by_origin

    def forget(self, url: str) -> None:
        """Discard what a handshake found out about the engine at a URL. A client without a handshake does nothing."""

    async def routes(self, url: str) -> list[str] | None:
        """Return the routes that an engine publishes; ``None`` if it publishes none.

        Raises:
            BackendFailed: no answer, or a gateway's error (502, 503 or 504).
        """
        answer = await self._get(url, "/openapi.json")
        if answer.status in (502, 503, 504):
            raise BackendFailed(f"{url} answered {answer.status}")
        paths = json_object(answer.body).get("paths")
        return list(paths) if isinstance(paths, dict) else None

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Return the backend's model cards; empty without ``/v1/models``.

        Raises:
            BackendFailed: no answer, or a server error.
            Misconfigured: the key is wrong.
        """
        answer = await self._get(url, "/v1/models")
        status, raw = answer.status, answer.body
        if status in (401, 403):
            raise Misconfigured(f"{url} refused the key", field="policy_api_key")
        if status >= 500:
            raise BackendFailed(f"{url} answered {status}: {excerpt(raw)}")
        cards = json_object(raw).get("data") if status == 200 else None
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    async def healthy(self, url: str) -> bool:
        """Return whether ``/health`` answers with a status below 500; NeMo RL answers 404, as it has no such route."""
        try:
            return (await self._get(url, "/health")).status < 500
        except BackendFailed:
            return False

    async def reset_prefix_cache(self, url: str) -> None:
        """Empty the prefix cache of an idle backend. An engine keeps the blocks of requests in flight.

        Raises:
            Misconfigured: the engine has no route for the reset, or refuses the key.
            BackendFailed: no answer, or the cache is in use for longer than ``_CACHE_RESET_TIMEOUT_S``.
        """
        if self.reset_route is None:
            raise Misconfigured(f"{url} cannot empty its prefix cache: {self.reset_hint}", field="reset_prefix_cache")
        there, deadline = f"{root_of(url)}{self.reset_route}", time.monotonic() + _CACHE_RESET_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    status, raw = await post(self._client, there, self._headers_for(there), [])
            except OSError as error:
                raise unreachable(url, error) from error
            if status in (404, 405):
                raise Misconfigured(f"{url} has no {self.reset_route}: {self.reset_hint}", field="reset_prefix_cache")
            if status in (401, 403):
                raise Misconfigured(f"{url} refused the key", field="policy_api_key")
            # vLLM answers 200 and {"success": false} while a request holds blocks, SGLang 400.
            if status == 200 and json_object(raw).get("success", True):
                return
            if time.monotonic() > deadline:
                in_use = ": other clients use the engine; pause every model server of the engine first"
                why = in_use if status in (200, 400) else ""
                raise BackendFailed(f"{url} did not empty its prefix cache (answer {status}: {excerpt(raw)}){why}")
            await asyncio.sleep(0.2)

    async def published_metrics(self, url: str) -> str:
        """Return the text of ``/metrics``. Without an answer, return an empty text and discard the handshake."""
        try:
            return (await self._get(url, "/metrics")).text()
        except BackendFailed:
            self.forget(url)
            return ""

    async def load(self, url: str) -> BackendLoad | None:
        """Return the load that the backend publishes on ``/metrics``; ``None`` if the load is missing or malformed."""
        text = await self.published_metrics(url)
        try:
            waiting, kv_use = (metric(text, name) for name in self._load_names)
            if waiting is None or kv_use is None:
                return None
            return BackendLoad(int(waiting), kv_use, self._capacity(text))
        except (ValueError, OverflowError):  # malformed metrics must not end the load reports of other backends
            return None

    def _capacity(self, metrics: str) -> int | None:
        """Return how many tokens fit into the KV cache, from number and size of vLLM's blocks; ``None`` if unknown."""
        known = [one.labels for one in samples(metrics, "vllm:cache_config_info")]
        pairs = [(labels.get("block_size", ""), labels.get("num_gpu_blocks", "")) for labels in known]
        return sum(int(size) * int(count) for size, count in pairs if size.isdecimal() and count.isdecimal()) or None

    async def _get(self, url: str, path: str) -> HttpAnswer:
        there = f"{root_of(url)}{path}"
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._client.request("GET", there, self._headers_for(there))
        except OSError as error:
            raise unreachable(url, error) from error

    def _headers_for(self, url: str) -> dict[str, str]:
        return dict(self._headers_by_origin.get(origin_of(url), {}))


async def post(client: HttpClient, url: str, headers: Mapping[str, str], body: Sequence[bytes]) -> tuple[int, bytes]:
    """Send a POST request with JSON, in parts, and return status and content of the answer.

    Engines close connections that were idle for some seconds (vLLM: 5), possibly just as a request reuses a
    connection. Such a close says nothing about the engine's health, so the request is repeated.

    Raises:
        ConnectFailed: no connection could be opened in time.
        ConnectionDropped: the connection ended within the answer, or before the answer at every attempt, or the answer
            is not HTTP.
    """
    for left in reversed(range(_TRIES)):
        try:
            answer = await client.request(
                "POST", url, {**headers, "Content-Type": "application/json", **trace_headers()}, body
            )
        except ConnectionDropped as dropped:
            if dropped.begun or not left:
                raise
        else:
            return answer.status, answer.body
    raise AssertionError


def unreachable(url: str, error: Exception) -> BackendFailed:
    if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
        return BackendFailed(f"{url}: no answer within the time limit", kind=FailureKind.TRANSPORT_TIMEOUT)
    if isinstance(error, ConnectFailed):
        return BackendFailed(f"{url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE)
    return BackendFailed(f"{url}: {error!r}", kind=FailureKind.TRANSPORT_PEER_DROP)


def json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def excerpt(raw: bytes) -> str:
    return raw[:500].decode(errors="replace")


def samples(text: str, name: str) -> list[Sample]:
    """Return the samples of one metric in Prometheus text; raise ValueError if its lines are malformed."""
    lines = "".join(line for line in text.splitlines(keepends=True) if line.startswith(name))
    return [one for family in text_string_to_metric_families(lines) for one in family.samples if one.name == name]


def metric(text: str, name: str) -> float | None:
    """Return the sum of a metric over its labels; ``None`` if the metric is absent or not finite."""
    values = [one.value for one in samples(text, name)]
    return sum(values) if values and all(map(math.isfinite, values)) else None
