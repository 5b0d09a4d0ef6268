# SPDX-License-Identifier: Apache-2.0
"""What the wire protocols have in common: keys, who is there, load, and whose fault a refusal is.

Another engine may answer at an address that was known. It can only do so over a new connection, so what is at the
other end of each is asked over that very connection before the first request: how it reads a text, and how long its
context is. What samples is what was asked.

A wrong model name, a wrong key, an answer that is not JSON each end in an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.policy.engines.addresses import bearer, origin_of, root_of
from nemo_gym_prorl.policy.engines.engine import (
    BackendErred,
    BackendFailed,
    ChatPrompt,
    Load,
    Misconfigured,
    RequestRefused,
)
from nemo_gym_prorl.policy.engines.keep_alive import Dropped, KeepAlive, Line, Unreachable
from nemo_gym_prorl.policy.engines.sampling import Sampling
from nemo_gym_prorl.policy.generation import Generation, checked
from nemo_gym_prorl.policy.tokens.prompt import json_of_ids


CONTEXT_OVERFLOW = re.compile(
    r"context length|max_model_len|maximum context|longer than the|max_seq_len|must be at least 1, got 0", re.I
)

_CONTROL_S = 60.0
"""How long a backend may take for one token before it counts as one that does not sample."""

_MEETING_S = 60.0
"""How long an engine, which may be busy, may take to say who it is."""
_TEXT = "The façade's 日本語, Ωmega\n\n\tdef f(x): return 1234567890 # 🙂"
"""A text that other tokenizers read as other ids, where there is none of ours to say a better one."""

_CACHE_CONFIG = re.compile(
    r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)".*?\bnum_gpu_blocks="(\d+)"', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Met:
    """What an engine says of itself, over a connection to it.

    Attributes:
        context: how many tokens prompt and answer may have, if it says so.
    """

    context: int | None


class HttpEngine:
    """What the protocols have in common.

    Args:
        session: asks for all but samples; its owner closes it.
        model: model name as the backend serves it.
        api_key: sent to every backend as a bearer token; empty for none.
        headers: further headers for every backend.
        by_origin: headers for the backends of one origin (see :func:`origin_of`) only.
        connections: asks for samples; its owner closes it. By default one of its own.
        connect_timeout_s: how long a connection may take; sampling itself is not limited here.
    """

    takes_tokens = True
    _load_names: tuple[str, str, str] = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )
    _kept_free = 0
    """Tokens of the context that prompt and answer may not use."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        by_origin: Mapping[str, Mapping[str, str]] | None = None,
        connections: KeepAlive | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._session = session
        self._connections = connections or KeepAlive(connect_timeout_s)
        self.model = model
        self._headers = dict(headers or {}) | bearer(api_key)
        self._by_origin = by_origin if by_origin is not None else {}
        self._brief = aiohttp.ClientTimeout(total=connect_timeout_s)
        self._text = _TEXT
        self._ids: list[int] | None = None
        self._accepted: dict[str, Sampling] = {}

    async def generate(
        self, url: str, prompt: Sequence[int], conversation: ChatPrompt, sampling: Sampling
    ) -> Generation:
        """What the backend samples after the prompt, or after the conversation.

        Raises:
            BackendFailed: the backend cannot, in one of the ways told apart above.
            RequestRefused: no backend would.
        """
        try:
            generation = checked(await self._over_a_line(url, prompt, conversation, sampling))
        except BackendFailed:
            self._connections.leave(url)  # a router's outlive the engines behind it
            raise
        except (TimeoutError, ConnectionError) as error:
            raise _no_answer(url, error) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Misconfigured(
                f"{url} answered in no form of this protocol: {error!r}", field="policy_base_url"
            ) from error
        self._accepted[url] = Sampling(max_tokens=1, temperature=sampling.temperature, top_p=sampling.top_p)
        return generation

    async def _over_a_line(
        self, url: str, prompt: Sequence[int], conversation: ChatPrompt, sampling: Sampling
    ) -> Generation:
        """Engines close a connection that was idle for some seconds (vLLM: 5), perhaps just as it is used again. That
        says nothing about their health, and sampling may be asked for twice: so an answer that never began is asked
        for once more. An engine that died refuses the new connection; one that took its place is met there.
        """
        try:
            async with self._line(url) as line:
                return await self._generate(line, url, prompt, conversation, sampling)
        except Dropped as dropped:
            if dropped.begun:
                raise
        async with self._line(url, fresh=True) as line:
            return await self._generate(line, url, prompt, conversation, sampling)

    async def _generate(
        self, line: Line, url: str, prompt: Sequence[int], conversation: ChatPrompt, sampling: Sampling
    ) -> Generation:
        raise NotImplementedError

    def expect(self, text: str, ids: Sequence[int]) -> None:
        """How engines must read a text; by default as the first one that is met reads some other."""
        self._text, self._ids = text, list(ids)

    @contextlib.asynccontextmanager
    async def _line(self, url: str, *, fresh: bool = False) -> AsyncIterator[Line]:
        """A connection to an engine that is known over it.

        Raises:
            BackendFailed: it does not say who it is.
            Misconfigured: its tokenizer is another one, or its key.
        """
        line = await self._connections.take(url, fresh=fresh)
        try:
            if line.met is None:
                met = Met(await self._context(line, url))
                if not line.usable():  # of an engine that answers once over each
                    line = await self._connections.take(url, fresh=True)
                line.met = met
            yield line
        finally:
            self._connections.keep(url, line)

    async def _context(self, line: Line, url: str) -> int | None:
        """How long the engine's context is, which reads texts as it must."""
        body = orjson.dumps({"model": self.model, "prompt": self._text, "add_special_tokens": False})
        there = f"{root_of(url)}/tokenize"
        async with asyncio.timeout(_MEETING_S):
            status, raw = await self._connections.post(line, there, self._headers_for(there), [body])
        if status >= 500 and status != 501:
            raise BackendFailed(f"{url} answered {status}: {_said(raw)}")
        said = _fields(raw) if status == 200 else {}
        if isinstance(ids := said.get("tokens"), list):
            if self._ids is None:
                self._ids = ids
            if ids != self._ids:
                raise Misconfigured(f"{url} reads text as other ids than this tokenizer: no match", field="tokenizer")
        lengths = [said.get("max_model_len")]
        if self.takes_tokens and not _is_length(lengths[0]):
            cards = await self.models(url)
            mine = [card for card in cards if card.get("id") == self.model] + cards
            lengths = [card.get("max_model_len") for card in mine]
        # A router says nothing while it has no engine.
        return next(filter(_is_length, lengths), None)

    async def samples(self, url: str) -> bool:
        """Whether the backend answers a request that nothing is wrong with: one token, sampled as it did before."""
        sampling = self._accepted.get(url, Sampling(max_tokens=1, temperature=1.0, top_p=1.0))
        try:
            async with asyncio.timeout(_CONTROL_S):
                await self.generate(url, (0,), ChatPrompt([{"role": "user", "content": "hi"}]), sampling)
        except (BackendFailed, RequestRefused, TimeoutError):
            return False
        return True

    def room(self, line: Line, url: str, prompt: int, asked: int | None) -> int:
        """How many tokens may be sampled after so many: what was asked for, and at most what is left of the context.

        An engine that is not told stops after a number of its own (vLLM: 16), and one that is told too many refuses.

        Raises:
            Misconfigured: nobody says.
        """
        assert isinstance(line.met, Met)
        if line.met.context is None:
            line.met = None  # it may say so by the next turn
            if asked is None:
                raise Misconfigured(
                    f"{url} does not say how long its context is (max_model_len in /v1/models): rows need it",
                    field="max_output_tokens",
                )
            return asked
        left = line.met.context - prompt - self._kept_free
        return left if asked is None else min(asked, left)

    async def models(self, url: str) -> list[dict[str, Any]]:
        """What the backend says of its models; nothing if it has no ``/v1/models``.

        Raises:
            BackendFailed: no answer.
            Misconfigured: the key is not the backend's.
        """
        try:
            async with self._get(f"{root_of(url)}/v1/models") as response:
                status, raw = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(url, error) from error
        if status in (401, 403):
            raise Misconfigured(f"{url} refused the key", field="policy_api_key")
        if status >= 500:
            raise BackendFailed(f"{url} answered {status}: {_said(raw)}")
        try:
            cards = orjson.loads(raw)["data"] if status == 200 else []
        except (ValueError, KeyError, TypeError):
            return []
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    async def _post(
        self,
        line: Line,
        url: str,
        body: Mapping[str, Any],
        ids: tuple[str, Sequence[int]] | None = None,
        *,
        echoed: bool = False,
    ) -> dict[str, Any] | None:
        """The JSON answer; ``None`` if the prompt does not fit into the engine's context.

        Args:
            line: the connection.
            url: the route.
            body: the request.
            ids: a field more of it, with the ids of the prompt.
            echoed: where the answer repeats them to the letter they are left out of it.

        Raises:
            TimeoutError, ConnectionError: no answer.
            BackendFailed: a server error.
            Misconfigured: not what this protocol, model name and key expect.
            RequestRefused: the engine refuses the request, or no JSON can carry it.
        """
        try:
            parts: list[bytes] = [orjson.dumps(body)]
        except orjson.JSONEncodeError as error:
            raise RequestRefused(f"cannot be sent as JSON: {error}", field="request") from error
        prompt = json_of_ids(ids[1]) if ids is not None else ()
        if ids is not None:
            parts = [b'{"%b":' % ids[0].encode(), *prompt, b"," + parts[0][1:]]
        echo = prompt if echoed else ()
        status, raw = await self._connections.post(line, url, self._headers_for(url), parts, echo=echo)
        if status == 200:
            try:
                answer = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                raise Misconfigured(
                    f"{url} answered with {bytes(raw[:80])!r}, which is not JSON: is this an inference engine?",
                    field="policy_base_url",
                ) from error
            if not isinstance(answer, dict):
                raise Misconfigured(f"{url} answered with JSON that is not an object", field="policy_base_url")
            return answer
        said = _said(raw)
        if status == 400 and CONTEXT_OVERFLOW.search(said):
            return None
        if status in (400, 413, 415, 422):
            raise RequestRefused(f"{url} refused the request ({status}): {said}", field="request")
        if status in (401, 403):
            raise Misconfigured(f"{url} refused the key: {said}", field="policy_api_key")
        if status == 404:
            raise Misconfigured(f"{url} does not serve {self.model!r}: {said}", field="policy_model_name")
        if status == 500:
            raise BackendErred(f"{url} answered 500: {said}")
        if status < 500 and status not in (408, 409, 425, 429):
            raise Misconfigured(f"{url} answered {status}: {said}", field="policy_base_url")
        raise BackendFailed(f"{url} answered {status}: {said}")

    def _get(self, url: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(url, headers=self._headers_for(url), timeout=self._brief, allow_redirects=False)

    def _headers_for(self, url: str) -> dict[str, str]:
        return self._headers | dict(self._by_origin.get(origin_of(url), {}))

    async def healthy(self, url: str) -> bool:
        """Whether the backend lives: it answers ``/health``, be it that it has no such route (NeMo RL has none)."""
        try:
            async with self._get(f"{root_of(url)}/health") as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def load(self, url: str) -> Load | None:
        """What the backend publishes on ``/metrics``; ``None`` if it publishes nothing of use."""
        try:
            async with self._get(f"{root_of(url)}/metrics") as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        try:
            values = [metric(text, name) for name in self._load_names]
            running, waiting, kv_use = values
            if running is None or waiting is None or kv_use is None:
                return None
            return Load(int(running), int(waiting), kv_use, self._capacity(text))
        except (ValueError, OverflowError):  # no numbers; nobody would report any load if this ended it
            return None

    def _capacity(self, metrics: str) -> int | None:
        """Tokens that fit into the KV cache: vLLM publishes blocks and their size as labels."""
        return sum(int(size) * int(count) for size, count in _CACHE_CONFIG.findall(metrics)) or None


def _no_answer(url: str, error: Exception) -> BackendFailed:
    if isinstance(error, TimeoutError):
        return BackendFailed(f"{url}: no connection in time", kind=FailureKind.TRANSPORT_TIMEOUT)
    if isinstance(error, aiohttp.ClientConnectorError | Unreachable):
        return BackendFailed(f"{url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE)
    return BackendFailed(f"{url}: {error!r}", kind=FailureKind.TRANSPORT_PEER_DROP)


def _fields(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_length(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _said(raw: bytes | bytearray) -> str:
    return raw[:500].decode(errors="replace")


def metric(text: str, name: str) -> float | None:
    """Sum of a metric over its labels in Prometheus text."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None
