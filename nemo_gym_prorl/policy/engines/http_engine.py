# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Common base of the wire protocols: handshake, log-prob probes, and classification of refusals.

The handshake compares the engine's tokenizer and reads its context length, at registration or before the first turn.
After a failed request, probe or load report and after each weight update (:meth:`HttpEngine.forget`) the handshake is
repeated. A wrong protocol, model name or key, and an answer that is not JSON, each raise an error that names the
setting.

An engine is probed for the mode of its log-probs at registration, or else before its first turn, and for grammars
before the first turn that uses a grammar. :meth:`HttpEngine.forget` also discards these verdicts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import orjson

from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.policy.engines.engine import (
    BackendErred,
    BackendFailed,
    ContextFull,
    Misconfigured,
    RequestRefused,
    SampleRequest,
    Sampling,
    root_of,
)
from nemo_gym_prorl.policy.engines.engine_control import (
    HANDSHAKE_TIMEOUT_S,
    EngineControl,
    excerpt,
    json_object,
    post,
    unreachable,
)
from nemo_gym_prorl.policy.engines.log_probs import EngineProbe, LogProbMode, grammar_of, unsupported_setting
from nemo_gym_prorl.policy.generation import Finish, Generation, validate_generation
from nemo_gym_prorl.policy.text.tokenizer import SAMPLE
from nemo_gym_prorl.policy.tokens.prompt import PROMPT_IDS, json_parts


CONTEXT_OVERFLOW = re.compile(
    r"context length|max_model_len|maximum context|longer than the|max_seq_len|must be at least 1, got 0", re.I
)
"""Pattern of the errors (400) with which engines refuse a prompt that is longer than their context."""

_REGISTRATION_PROBE_S = 15.0
"""Time limit of the probe at registration in seconds; a sleeping engine is probed later, before its first turn."""


class HttpEngine(EngineControl):
    """Client of one wire protocol; ``model`` is the model's name as the backends serve it."""

    name: str
    takes_tokens = True
    _sample_route: str
    _required_route: str | None = None
    """Further route that every engine of this protocol has."""
    _forbidden_route: str | None = None
    """Route that only engines of other protocols have."""
    _reserved_tokens = 0
    """Tokens of the context that neither prompt nor sample can use."""
    log_probs_fix = "start vLLM with --logprobs-mode processed_logprobs"
    """Setting with which the engine's log-probs include all sampling settings."""
    _fixed_sampling = False
    """Whether the engine refuses other temperatures than its own, so that probes need a request's settings."""
    _biased_mode = LogProbMode.SCALED
    """Mode to assume if a probe finds out only that the engine's log-probs include a bias."""

    def __init__(
        self,
        client: HttpClient,
        model: str,
        headers_by_origin: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        super().__init__(client, headers_by_origin)
        self.model = model
        self.contexts: dict[str, int | None] = {}
        """Maximum of prompt and sampled tokens together by URL, after the handshake; ``None`` if not reported."""
        self._tokenizer_text = SAMPLE
        self._tokenizer_ids: list[int] | None = None
        self._accepted_sampling: dict[str, Sampling] = {}
        self.log_prob_modes: dict[str, LogProbMode] = {}
        """Log-prob mode by URL, after the probe."""
        self._grammars: set[tuple[str, str]] = set()
        """Pairs of a URL and a setting (such as ``response_format``) with a grammar that the engine follows."""

    async def generate(self, url: str, request: SampleRequest) -> Generation:
        """Sample on a backend. The sample is empty (:attr:`Finish.CONTEXT`) if the prompt fills the context.

        Raises:
            BackendFailed: the backend failed; subclasses of the error name the cause.
            RequestRefused: every backend would refuse the request.
        """
        try:
            context = self.contexts[url] if url in self.contexts else await self._handshake(url)
            generation = validate_generation(await self._sample(url, context, request))
        except ContextFull:
            return Generation((), (), Finish.CONTEXT)
        except BackendFailed:
            self.forget(url)
            raise
        except OSError as error:
            self.forget(url)
            raise unreachable(url, error) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Misconfigured(
                f"{url} answered in an unknown form, not that of this protocol: {error!r}", field="policy_base_url"
            ) from error
        self._accepted_sampling[url] = request.sampling
        return generation

    def forget(self, url: str) -> None:
        """Repeat handshake and probes before the next turn, because another engine may answer at this address."""
        self.contexts.pop(url, None)
        self.log_prob_modes.pop(url, None)
        self._grammars = {known for known in self._grammars if known[0] != url}

    async def _sample(self, url: str, context: int | None, request: SampleRequest) -> Generation:
        """Sample with log-probs of the sampled distribution; refuse settings that log-probs would not include."""
        sampling = request.sampling
        mode = self.log_prob_modes.get(url) or await self._probe_mode(url, context, sampling)
        forced_call = request.tool_choice not in (None, "none", "auto")
        refusal = unsupported_setting(sampling, mode, forced_call=forced_call, fix=self.log_probs_fix)
        if refusal:
            field, reason = refusal
            raise RequestRefused(f"{url}: {reason}", field=field)
        if (grammar := grammar_of(sampling)) and (url, grammar) not in self._grammars:
            await self._probe(url, context).require_grammar(grammar, sampling)
            self._grammars.add((url, grammar))
        generation = await self._generate(url, context, request)
        # Engines return log-probs of temperature 1 for greedy sampling, whose tokens have probability 1.
        log_probs = [0.0] * len(generation.log_probs) if sampling.greedy else generation.log_probs
        return replace(generation, log_probs=log_probs, log_prob_mode=mode)

    async def probe_log_prob_mode(self, url: str) -> None:
        """Probe a newly registered engine for the mode of its log-probs, unless probes need a request's settings.

        Raises:
            BackendFailed: the engine cannot be probed yet.
            Misconfigured: the engine returns logits, or does not match the configuration.
        """
        if self._fixed_sampling or url in self.log_prob_modes:
            return
        try:
            async with asyncio.timeout(_REGISTRATION_PROBE_S):
                await self._probe_mode(url, await self._handshake(url), Sampling())
        except OSError as error:
            raise unreachable(url, error) from error

    async def _probe_mode(self, url: str, context: int | None, sampling: Sampling) -> LogProbMode:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                mode, known = await self._probe(url, context).mode(sampling)
        except TimeoutError as error:
            raise unreachable(url, error) from error
        if known:
            self.log_prob_modes[url] = mode
        return mode

    def _probe(self, url: str, context: int | None) -> EngineProbe:
        return EngineProbe(
            url,
            lambda request: self._generate(url, context, request),
            takes_tokens=self.takes_tokens,
            biased_mode=self._biased_mode,
            fixed_sampling=self._fixed_sampling,
            fix=self.log_probs_fix,
        )

    async def _generate(self, url: str, context: int | None, request: SampleRequest) -> Generation:
        raise NotImplementedError

    def expect_tokenization(self, text: str, ids: Sequence[int]) -> None:
        """Set the ids into which every engine must tokenise a text; by default the first engine's ids count."""
        self._tokenizer_text, self._tokenizer_ids = text, list(ids)

    async def _handshake(self, url: str) -> int | None:
        """Check protocol and tokenizer of the engine at a URL, and return its context length."""
        await self.check_protocol(url)
        self.contexts[url] = context = await self._context(url)
        return context

    async def check_protocol(self, url: str) -> None:
        """Check that the engine's published routes, if any, match this protocol.

        Raises:
            Misconfigured: a required route is missing, or a forbidden route is published.
            BackendFailed: no answer, or a gateway's error (502, 503 or 504).
        """
        if (routes := await self.routes(url)) is None:
            return
        wrong = [
            f"has no {route}" for route in (self._sample_route, self._required_route) if route and route not in routes
        ]
        wrong += [f"has {self._forbidden_route}"] if self._forbidden_route in routes else []
        if wrong:
            raise Misconfigured(f"{url} {wrong[0]}, so it is not {self.name!r}", field="policy.engine")

    async def _context(self, url: str) -> int | None:
        """Compare the engine's tokenizer and return its context length; ``None`` if not reported."""
        body = orjson.dumps({"model": self.model, "prompt": self._tokenizer_text, "add_special_tokens": False})
        there = f"{root_of(url)}/tokenize"
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            status, raw = await post(self._client, there, self._headers_for(there), [body])
        if status >= 500 and status != 501:
            raise BackendFailed(f"{url} answered {status}: {excerpt(raw)}")
        detail = json_object(raw) if status == 200 else {}
        if isinstance(ids := detail.get("tokens"), list):
            if self._tokenizer_ids is None:
                self._tokenizer_ids = ids
            if ids != self._tokenizer_ids:
                raise Misconfigured(
                    f"{url} tokenises text differently from this tokenizer: name the tokenizer of the served model",
                    field="tokenizer",
                )
        lengths = [detail.get("max_model_len")]
        if self.takes_tokens and not _is_length(lengths[0]):
            cards = await self.models(url)
            mine = [card for card in cards if card.get("id") == self.model] + cards
            lengths = [card.get("max_model_len") for card in mine]
        # A router reports no length while it has no engine.
        return next(filter(_is_length, lengths), None)

    async def can_sample(self, url: str) -> bool:
        """Return whether the backend samples one token, with temperature and ``top_p`` of its last success."""
        accepted = self._accepted_sampling.get(url)
        sampling = accepted.probe(1) if accepted is not None else Sampling(max_tokens=1)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                prompt = (0,) if self.takes_tokens else ()
                await self.generate(url, SampleRequest(prompt, sampling, [{"role": "user", "content": "hi"}]))
        except (BackendFailed, RequestRefused, TimeoutError):
            return False
        return True

    def sampling_limit(self, url: str, context: int | None, prompt: int, requested: int | None) -> int:
        """Return how many tokens may be sampled after a prompt: ``requested``, and at most the rest of the context.

        Without a limit an engine stops at a default (vLLM: 16), and engines refuse a limit above their context.

        Raises:
            ContextFull: the context is full.
            Misconfigured: neither the request nor the engine has a limit.
        """
        if context is None:
            self.contexts.pop(url, None)  # the next turn repeats the handshake, and may find a length
            if requested is None:
                raise Misconfigured(
                    f"{url} does not report max_model_len in /v1/models, so every row needs this field",
                    field="max_output_tokens",
                )
            return requested
        left = context - prompt - self._reserved_tokens
        if left < 1:
            raise ContextFull
        return left if requested is None else min(requested, left)

    async def _post(
        self,
        engine_url: str,
        body: Mapping[str, Any],
        ids: tuple[str, Sequence[int]] | None = None,
        *,
        echoed: bool = False,
    ) -> dict[str, Any]:
        """Send a sampling request and return the JSON answer.

        ``ids`` are name and token ids of a prompt that is not in the body. With ``echoed``, an answer that repeats
        exactly these ids loses them.

        Raises:
            ContextFull: the engine has no room for the prompt.
            OSError: no answer.
            BackendFailed: a server error.
            Misconfigured: protocol, model name or key does not match.
            RequestRefused: the engine refuses the request, or JSON cannot represent it.
        """
        try:
            parts: list[bytes] = [orjson.dumps(body)]
        except orjson.JSONEncodeError as error:
            raise RequestRefused(f"cannot be sent as JSON: {error}", field="request") from error
        prompt = json_parts(ids[1]) if ids is not None else ()
        if ids is not None:
            parts = [b'{"%b":' % ids[0].encode(), *prompt, b"," + parts[0][1:]]
        url = f"{root_of(engine_url)}{self._sample_route}"
        status, raw = await post(self._client, url, self._headers_for(url), parts)
        if status == 200:
            try:
                answer = orjson.loads(_without_echo(raw, prompt if echoed else ()))
            except orjson.JSONDecodeError as error:
                raise Misconfigured(
                    f"{url} answered with {raw[:80]!r}, which is not JSON: check that the URL is an inference engine",
                    field="policy_base_url",
                ) from error
            if not isinstance(answer, dict):
                raise Misconfigured(f"{url} answered with JSON that is not an object", field="policy_base_url")
            return answer
        detail = excerpt(raw)
        if status == 400 and CONTEXT_OVERFLOW.search(detail):
            raise ContextFull
        if status == 400 and "Out of range float" in detail:  # vLLM fails to write NaN as JSON
            raise BackendErred(f"{url}: the model computed NaN; check its weights, data type and context length")
        if status in (400, 413, 415, 422):
            raise RequestRefused(f"{url} refused the request ({status}): {detail}", field="request")
        if status in (401, 403):
            raise Misconfigured(f"{url} refused the key: {detail}", field="policy_api_key")
        if status == 404:
            raise Misconfigured(f"{url} does not serve {self.model!r}: {detail}", field="policy_model_name")
        if status == 500:
            raise BackendErred(f"{url} answered 500: {detail}")
        if status < 500 and status not in (408, 409, 425, 429):
            raise Misconfigured(f"{url} answered {status}: {detail}", field="policy_base_url")
        raise BackendFailed(f"{url} answered {status}: {detail}")


def _without_echo(content: bytes, echo: Sequence[bytes]) -> bytes:
    """Replace the prompt's ids in an answer by ``null`` if they equal the sent ids byte for byte.

    The comparison of bytes avoids parsing up to 64k numbers. Other ids stay, and are checked after parsing.
    """
    field = content.find(PROMPT_IDS)
    if field < 0 or not echo:
        return content
    at = start = field + len(PROMPT_IDS)
    for part in echo:
        if not content.startswith(part, at):
            return content
        at += len(part)
    return b"%bnull%b" % (content[:start], content[at:])


def _is_length(value: object) -> bool:
    return type(value) is int and value > 0
