# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Shared part of the wire protocols: handshake, keys, health, load, and whose fault a refusal is.

The handshake asks an engine how it reads a text and how long its context is. It happens at registration or before the
first turn, after a failed request, probe or load report, and after each weight update (:meth:`HttpEngine.forget`). A
wrong protocol, model name or key, and an answer that is not JSON, each end in an error that says so.

An engine is probed for the mode of its log-probs when it is registered, else before its first turn, and for grammars
before the first turn that asks for one. The verdicts go with the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.policy.engines.connections import Connections, ContextFull, post, without_echo
from nemo_gym_prorl.policy.engines.engine import (
    BackendErred,
    BackendFailed,
    Load,
    Misconfigured,
    RequestRefused,
    SampleRequest,
    Sampling,
    origin_of,
    root_of,
)
from nemo_gym_prorl.policy.engines.log_probs import EngineProbe, LogProbMode, check, grammar_of
from nemo_gym_prorl.policy.generation import Finish, Generation, checked
from nemo_gym_prorl.policy.text.tokenizer import SAMPLE
from nemo_gym_prorl.policy.tokens.prompt import json_of_ids


CONTEXT_OVERFLOW = re.compile(
    r"context length|max_model_len|maximum context|longer than the|max_seq_len|must be at least 1, got 0", re.I
)

_CONTROL_S = 60.0
"""How long a backend may take for one token before it counts as one that does not sample."""

_RESET_S = 5.0  # an engine frees the blocks of an aborted request within a step
"""How long an engine may hold blocks of requests that have ended."""

_MEETING_S = 60.0
"""How long an engine, which may be busy, may take to say who it is."""

_REGISTRATION_PROBE_S = 15.0
"""Limit of the probe at registration; an engine that is asleep is probed before its first turn."""

_CACHE_CONFIG = re.compile(
    r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)".*?\bnum_gpu_blocks="(\d+)"', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The backend of one request for samples.

    Attributes:
        url: of the backend.
        context: how many tokens prompt and answer may have, if the engine says so.
    """

    url: str
    context: int | None


class HttpEngine:
    """What the protocols have in common.

    Args:
        connections: to all engines; their owner closes them.
        model: model name as the backend serves it.
        by_origin: headers for the backends of one origin (see :func:`origin_of`).
    """

    name: str
    """In a configuration."""
    takes_tokens = True
    _route: str
    """Where it is asked for samples."""
    _also: str | None = None
    """A route that such an engine has, too."""
    _foreign: str | None = None
    """A route that only engines of other protocols have."""
    _load_names: tuple[str, str] = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    reset_route: str | None = "/reset_prefix_cache"
    """Where the engine is told to empty its prefix cache; ``None`` if it has no such route."""
    reset_hint = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, which adds the route"
    _kept_free = 0
    """Tokens of the context that prompt and answer may not use."""
    log_probs_fix = "start vLLM with --logprobs-mode processed_logprobs"
    """What makes the engine's log-probs include all settings."""
    _fixed_sampling = False
    """The engine refuses other temperatures than its own, so it is probed under those of a request."""
    _biased_mode = LogProbMode.SCALED
    """The mode of an engine of which is known only that its log-probs include a bias."""

    def __init__(
        self,
        connections: Connections,
        model: str,
        by_origin: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self._connections = connections
        self.model = model
        self._by_origin = by_origin
        self.contexts: dict[str, int | None] = {}
        """Of the engines that were met: how many tokens prompt and answer may have, if they say so."""
        self._text = SAMPLE
        self._ids: list[int] | None = None
        self._accepted: dict[str, Sampling] = {}
        self.log_prob_modes: dict[str, LogProbMode] = {}
        """By URL, of the engines that were probed."""
        self._grammars: set[tuple[str, str]] = set()
        """URLs and settings by which engines follow grammars."""

    async def generate(self, url: str, request: SampleRequest) -> Generation:
        """What the backend samples.

        Raises:
            BackendFailed: the backend cannot, in one of the ways told apart above.
            RequestRefused: no backend would.
        """
        try:
            asked = Asked(url, self.contexts[url]) if url in self.contexts else await self._handshake(url)
            generation = checked(await self._sample(asked, request))
        except ContextFull:
            return Generation((), (), Finish.CONTEXT)
        except BackendFailed:
            self.forget(url)
            raise
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            self.forget(url)
            raise _no_answer(url, error) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Misconfigured(
                f"{url} answered in no form of this protocol: {error!r}", field="policy_base_url"
            ) from error
        self._accepted[url] = request.sampling.probe(1)
        return generation

    def forget(self, url: str) -> None:
        """Repeat handshake and probes before the next turn: another engine may answer at this address."""
        self.contexts.pop(url, None)
        self._discard_verdicts(url)

    async def _sample(self, asked: Asked, request: SampleRequest) -> Generation:
        """Sample, with log-probs of the distribution that was sampled from.

        Raises:
            RequestRefused: the engine's log-probs do not include a setting, or the engine does not follow a grammar.
        """
        sampling = request.sampling
        known = self.log_prob_modes.get(asked.url)
        mode = known or await self._probe_mode(asked, sampling)
        forced_call = request.tool_choice not in (None, "none", "auto")
        refusal = check(sampling, mode, forced_call=forced_call, fix=self.log_probs_fix)
        if refusal and known:
            # Another engine, which may serve the request, could have taken this address.
            mode = await self._probe_mode(asked, sampling)
            refusal = check(sampling, mode, forced_call=forced_call, fix=self.log_probs_fix)
        if refusal:
            field, reason = refusal
            raise RequestRefused(f"{asked.url}: {reason}", field=field)
        if grammar := grammar_of(sampling):
            await self._require_grammar(asked, grammar, sampling)
        generation = await self._generate(asked, request)
        # Engines return log-probs of temperature 1 for greedy sampling, whose tokens have probability 1.
        log_probs = [0.0] * len(generation.log_probs) if sampling.greedy else generation.log_probs
        return replace(generation, log_probs=log_probs, log_prob_mode=mode)

    async def learn_mode(self, url: str) -> None:
        """Probe a newly registered engine for the mode of its log-probs, if it can be probed without a request.

        Raises:
            BackendFailed: the engine cannot be probed yet.
            Misconfigured: the engine returns logits, or is not the one that was configured.
        """
        if self._fixed_sampling or url in self.log_prob_modes:
            return
        try:
            async with asyncio.timeout(_REGISTRATION_PROBE_S):
                await self._probe_mode(await self._handshake(url), Sampling())
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise _no_answer(url, error) from error

    async def _probe_mode(self, asked: Asked, sampling: Sampling) -> LogProbMode:
        try:
            async with asyncio.timeout(_CONTROL_S):
                mode, known = await self._probe(asked).mode(sampling)
        except TimeoutError as error:
            raise _no_answer(asked.url, error) from error
        if known:
            self.log_prob_modes[asked.url] = mode
        return mode

    async def _require_grammar(self, asked: Asked, name: str, sampling: Sampling) -> None:
        """Refuse a grammar that the engine takes and does not follow.

        Raises:
            RequestRefused: names the setting.
        """
        if (asked.url, name) not in self._grammars:
            await self._probe(asked).require_grammar(name, sampling)
            self._grammars.add((asked.url, name))

    def _probe(self, asked: Asked) -> EngineProbe:
        return EngineProbe(
            asked.url,
            lambda request: self._generate(asked, request),
            takes_tokens=self.takes_tokens,
            biased_mode=self._biased_mode,
            fixed_sampling=self._fixed_sampling,
            fix=self.log_probs_fix,
        )

    def _discard_verdicts(self, url: str) -> None:
        self.log_prob_modes.pop(url, None)
        self._grammars = {known for known in self._grammars if known[0] != url}

    async def _generate(self, asked: Asked, request: SampleRequest) -> Generation:
        raise NotImplementedError

    def expect(self, text: str, ids: Sequence[int]) -> None:
        """How engines must read a text; by default all as the first one that is met."""
        self._text, self._ids = text, list(ids)

    async def _handshake(self, url: str) -> Asked:
        """Perform the handshake.

        Raises:
            BackendFailed: no answer.
            Misconfigured: the engine speaks another protocol, its tokenizer is another one, or its key.
        """
        await self.check_protocol(url)
        self.contexts[url] = context = await self._context(url)
        return Asked(url, context)

    async def check_protocol(self, url: str) -> None:
        """Refuse an engine that publishes other routes than this protocol's. One that publishes none is found out by
        its answers.

        Raises:
            Misconfigured: names the setting.
            BackendFailed: no answer.
        """
        if (routes := await self.routes(url)) is None:
            return
        wrong = [f"has no {route}" for route in (self._route, self._also) if route and route not in routes]
        wrong += [f"has {self._foreign}"] if self._foreign in routes else []
        if wrong:
            raise Misconfigured(f"{url} {wrong[0]}, so it is not {self.name!r}", field="policy.engine")

    async def routes(self, url: str) -> list[str] | None:
        """Return the routes that an engine publishes; ``None`` if it publishes none.

        Raises:
            BackendFailed: no answer.
        """
        async with self._get(url, "/openapi.json") as response:
            if response.status in (502, 503, 504):
                raise BackendFailed(f"{url} answered {response.status}")
            try:
                return list((await response.json(content_type=None))["paths"])
            except (KeyError, TypeError, ValueError, RecursionError):
                return None

    async def _context(self, url: str) -> int | None:
        """How long the engine's context is, which reads texts as it must."""
        body = orjson.dumps({"model": self.model, "prompt": self._text, "add_special_tokens": False})
        there = f"{root_of(url)}/tokenize"
        async with asyncio.timeout(_MEETING_S):
            status, raw = await post(self._connections.kept, there, self._headers_for(there), [body])
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
        sampling = self._accepted.get(url, Sampling(max_tokens=1))
        try:
            async with asyncio.timeout(_CONTROL_S):
                prompt = (0,) if self.takes_tokens else ()
                await self.generate(url, SampleRequest(prompt, sampling, [{"role": "user", "content": "hi"}]))
        except (BackendFailed, RequestRefused, TimeoutError):
            return False
        return True

    def room(self, asked: Asked, prompt: int, wanted: int | None) -> int:
        """How many tokens may be sampled after so many: what was asked for, and at most what is left of the context.

        An engine that is not told stops after a number of its own (vLLM: 16), and one that is told too many refuses.

        Raises:
            ContextFull: none.
            Misconfigured: nobody says.
        """
        if asked.context is None:
            self.contexts.pop(asked.url, None)  # it may say so by the next turn
            if wanted is None:
                raise Misconfigured(
                    f"{asked.url} does not say how long its context is (max_model_len in /v1/models): rows need it",
                    field="max_output_tokens",
                )
            return wanted
        left = asked.context - prompt - self._kept_free
        if left < 1:
            raise ContextFull
        return left if wanted is None else min(wanted, left)

    async def models(self, url: str) -> list[dict[str, Any]]:
        """What the backend says of its models; nothing if it has no ``/v1/models``.

        Raises:
            BackendFailed: no answer.
            Misconfigured: the key is not the backend's.
        """
        async with self._get(url, "/v1/models") as response:
            status, raw = response.status, await response.read()
        if status in (401, 403):
            raise Misconfigured(f"{url} refused the key", field="policy_api_key")
        if status >= 500:
            raise BackendFailed(f"{url} answered {status}: {_said(raw)}")
        cards = _fields(raw).get("data") if status == 200 else None
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    async def _post(
        self,
        asked: Asked,
        body: Mapping[str, Any],
        ids: tuple[str, Sequence[int]] | None = None,
        *,
        echoed: bool = False,
    ) -> dict[str, Any]:
        """The JSON answer.

        Args:
            asked: of whom.
            body: the request.
            ids: a field more of it, with the ids of the prompt.
            echoed: where the answer repeats them to the letter they are left out of it.

        Raises:
            ContextFull: the engine has no room for the prompt.
            TimeoutError, aiohttp.ClientError, Dropped: no answer.
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
        url = f"{root_of(asked.url)}{self._route}"
        status, raw = await post(self._connections.kept, url, self._headers_for(url), parts)
        if status == 200:
            try:
                answer = orjson.loads(without_echo(raw, prompt if echoed else ()))
            except orjson.JSONDecodeError as error:
                raise Misconfigured(
                    f"{url} answered with {raw[:80]!r}, which is not JSON: is this an inference engine?",
                    field="policy_base_url",
                ) from error
            if not isinstance(answer, dict):
                raise Misconfigured(f"{url} answered with JSON that is not an object", field="policy_base_url")
            return answer
        said = _said(raw)
        if status == 400 and CONTEXT_OVERFLOW.search(said):
            raise ContextFull
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

    @contextlib.asynccontextmanager
    async def _get(self, url: str, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """What a backend answers at a path.

        Raises:
            BackendFailed: nothing.
        """
        ask, there = self._connections.control.get, f"{root_of(url)}{path}"
        try:
            async with ask(there, headers=self._headers_for(there), allow_redirects=False) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(url, error) from error

    def _headers_for(self, url: str) -> dict[str, str]:
        return dict(self._by_origin.get(origin_of(url), {}))

    async def healthy(self, url: str) -> bool:
        """Whether the backend lives: it answers ``/health``, be it that it has no such route (NeMo RL has none)."""
        try:
            async with self._get(url, "/health") as response:
                return response.status < 500
        except BackendFailed:
            return False

    async def reset_prefix_cache(self, url: str) -> None:
        """Empty the backend's prefix cache. The backend must be idle: an engine keeps blocks that a request holds.

        Raises:
            Misconfigured: the engine has no route for it; names the fix.
            BackendFailed: no answer, or the cache is in use for longer than ``_RESET_S``.
        """
        if self.reset_route is None:
            raise Misconfigured(f"{url} cannot empty its prefix cache: {self.reset_hint}", field="reset_prefix_cache")
        there, deadline = f"{root_of(url)}{self.reset_route}", time.monotonic() + _RESET_S
        while True:
            try:
                async with asyncio.timeout(_MEETING_S):
                    status, raw = await post(self._connections.kept, there, self._headers_for(there), [])
            except (TimeoutError, OSError, aiohttp.ClientError) as error:
                raise _no_answer(url, error) from error
            if status in (404, 405):
                raise Misconfigured(f"{url} has no {self.reset_route}: {self.reset_hint}", field="reset_prefix_cache")
            if status in (401, 403):
                raise Misconfigured(f"{url} refused the key", field="policy_api_key")
            # vLLM answers 200 and {"success": false} while a request holds blocks, SGLang 400.
            if status == 200 and _fields(raw).get("success", True):
                return
            if time.monotonic() > deadline:
                raise BackendFailed(
                    f"{url} did not empty its prefix cache ({status}: {_said(raw)}): other clients use the engine; "
                    "pause every model server of the engine first"
                )
            await asyncio.sleep(0.2)

    async def published_metrics(self, url: str) -> str:
        """Return the text of ``/metrics``, or nothing. An engine that does not answer is met again when it does."""
        try:
            async with self._get(url, "/metrics") as response:
                return await response.text(errors="replace")
        except BackendFailed:
            self.forget(url)
            return ""

    async def load(self, url: str) -> Load | None:
        """What the backend publishes on ``/metrics``; ``None`` if it publishes nothing of use."""
        text = await self.published_metrics(url)
        try:
            waiting, kv_use = (metric(text, name) for name in self._load_names)
            if waiting is None or kv_use is None:
                return None
            return Load(int(waiting), kv_use, self._capacity(text))
        except (ValueError, OverflowError):  # no numbers; nobody would report any load if this ended it
            return None

    def _capacity(self, metrics: str) -> int | None:
        """Tokens that fit into the KV cache: vLLM publishes blocks and their size as labels."""
        return sum(int(size) * int(count) for size, count in _CACHE_CONFIG.findall(metrics)) or None


def _no_answer(url: str, error: Exception) -> BackendFailed:
    if isinstance(error, TimeoutError):
        return BackendFailed(f"{url}: no connection in time", kind=FailureKind.TRANSPORT_TIMEOUT)
    if isinstance(error, aiohttp.ClientConnectorError):
        return BackendFailed(f"{url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE)
    return BackendFailed(f"{url}: {error!r}", kind=FailureKind.TRANSPORT_PEER_DROP)


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_length(value: object) -> bool:
    return type(value) is int and value > 0


def _said(raw: bytes) -> str:
    return raw[:500].decode(errors="replace")


def metric(text: str, name: str) -> float | None:
    """Sum of a metric over its labels in Prometheus text."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None
