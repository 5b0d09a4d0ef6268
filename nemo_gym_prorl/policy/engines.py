# SPDX-License-Identifier: Apache-2.0
"""The wire protocols of inference engines, reduced to one question: what do you sample after these tokens?

Each protocol checks what it gets back, once, where it enters: a wrong model name, a wrong key, an answer that is not
JSON, more than one choice, missing ids or log-probs each end in an error that says so, never in a wrong trajectory.
Errors tell apart what another backend could do better (:class:`BackendFailed`) from what every backend would refuse
(:class:`RequestRefused`).

An engine holds no state of a rollout. Cancelling the task that awaits :meth:`Engine.generate` closes the connection,
by which the engines here abort the request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.policy.chat import Message
from nemo_gym_prorl.policy.tokens import Finish, Generation


CONTEXT_OVERFLOW = re.compile(
    r"context length|max_model_len|maximum context|longer than the|max_seq_len|must be at least 1, got 0", re.I
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
    """

    running: int
    waiting: int
    kv_use: float


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
            async with self._session.post(
                url,
                data=orjson.dumps(body),
                headers=self._headers | {"Content-Type": "application/json"},
                timeout=self._timeout,
            ) as response:
                status, raw = response.status, await response.read()
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

    def _get(self, url: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(url, headers=self._headers, timeout=self._brief)

    async def healthy(self, url: str) -> bool:
        """Whether the backend answers on ``/health``."""
        try:
            async with self._session.get(
                f"{_root(url)}/health", headers=self._headers, timeout=self._brief
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def load(self, url: str) -> Load | None:
        """What the backend publishes on ``/metrics``; ``None`` if it publishes nothing of use."""
        try:
            async with self._session.get(
                f"{_root(url)}/metrics", headers=self._headers, timeout=self._brief
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        values = [_metric(text, name) for name in self._load_names]
        running, waiting, kv_use = values
        if running is None or waiting is None or kv_use is None:
            return None
        return Load(int(running), int(waiting), kv_use)


class VllmCompletions(HttpEngine):
    """Stock vLLM, tokens in and tokens out, over ``POST /v1/completions``."""

    async def generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **sampling.as_openai(),
        }
        answer = await self._post(f"{_v1(url)}/completions", body)
        if answer is None:
            return Generation((), (), Finish.CONTEXT)
        choice = _only_choice(answer, url)
        ids = _required(choice, "token_ids", url)
        if list(choice.get("prompt_token_ids") or prompt) != list(prompt):
            raise RequestRefused(f"{url} sampled after other tokens than it was given", field="tokenizer")
        log_probs = _required(choice.get("logprobs") or {}, "token_logprobs", url)
        return Generation(ids, log_probs, _finish(choice.get("finish_reason"), url), _cached_tokens(answer))


class VllmChat(HttpEngine):
    """vLLM, messages in and tokens out, over ``POST /v1/chat/completions`` with ``return_token_ids``.

    The engine renders the prompt. It comes back as ids, so a rewritten history is noticed, though not prevented.
    """

    takes_tokens = False

    def _body(self, conversation: Conversation, sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(conversation.messages),
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            **sampling.as_openai(),
        }
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        if conversation.template_variables:
            body["chat_template_kwargs"] = dict(conversation.template_variables)
        return body

    async def generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation:
        answer = await self._post(f"{_v1(url)}/chat/completions", self._body(conversation, sampling))
        if answer is None:
            return Generation((), (), Finish.CONTEXT)
        choice = _only_choice(answer, url)
        message = _required(choice, "message", url)
        prompt_ids = message.get("prompt_token_ids") or answer.get("prompt_token_ids")
        ids = message.get("generation_token_ids", choice.get("token_ids"))
        log_probs = message.get("generation_log_probs")
        if log_probs is None:
            content = _required(choice.get("logprobs") or {}, "content", url)
            log_probs = [token["logprob"] for token in content]
            if ids is None and all(token["token"].startswith("token_id:") for token in content):
                ids = [int(token["token"].removeprefix("token_id:")) for token in content]
        if prompt_ids is None or ids is None:
            raise RequestRefused(
                f"{url} returned no token ids: it must understand return_token_ids (vLLM 0.10.2 or later)",
                field="policy_base_url",
            )
        return Generation(
            ids,
            log_probs,
            _finish(choice.get("finish_reason"), url),
            _cached_tokens(answer),
            prompt_ids=prompt_ids,
            message=message,
        )


class NemoRl(VllmChat):
    """NeMo RL's own HTTP server: chat completions whose prompt continues exactly the ids it is told to continue.

    It refuses requests whose temperature and ``top_p`` are not those of its training or validation profile, and wants
    ``top_p`` spelled out.
    """

    def _body(self, conversation: Conversation, sampling: Sampling) -> dict[str, Any]:
        body = super()._body(conversation, sampling)
        body["return_tokens_as_token_ids"] = True
        body.setdefault("top_p", 1.0)
        if conversation.prefix:
            body["required_prefix_token_ids"] = list(conversation.prefix)
        return body


class SglangGenerate(HttpEngine):
    """SGLang, tokens in and tokens out, over ``POST /generate``."""

    _load_names = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")

    async def generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation:
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "sampling_seed": sampling.seed,
            "skip_special_tokens": False,
            **sampling.extra,
        }
        body = {
            "input_ids": list(prompt),
            "sampling_params": {name: value for name, value in parameters.items() if value is not None},
            "return_logprob": True,
        }
        answer = await self._post(f"{_root(url)}/generate", body)
        if answer is None:
            return Generation((), (), Finish.CONTEXT)
        about = _required(answer, "meta_info", url)
        pairs = _required(about, "output_token_logprobs", url)
        finish = _finish(about["finish_reason"]["type"], url)
        return Generation([pair[1] for pair in pairs], [pair[0] for pair in pairs], finish, about.get("cached_tokens"))


ENGINES: dict[str, type[VllmCompletions] | type[VllmChat] | type[NemoRl] | type[SglangGenerate]] = {
    "vllm": VllmCompletions,
    "vllm_chat": VllmChat,
    "nemo_rl": NemoRl,
    "sglang": SglangGenerate,
}
"""Protocols by the name that a configuration gives them."""


async def detect(session: aiohttp.ClientSession, url: str, *, tokenizer: bool) -> str:
    """The name of the protocol to use with a backend, judged by the routes that it publishes.

    Args:
        session: the connection pool.
        url: the backend.
        tokenizer: whether we could render prompts ourselves.
    """
    try:
        async with asyncio.timeout(5), session.get(f"{_root(url)}/openapi.json") as response:
            routes = set((await response.json())["paths"])
    except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError):
        routes = {"/v1/completions"}
    if "/v1/chat/completions" in routes and "/v1/completions" not in routes:
        return "nemo_rl"
    if not tokenizer:
        return "vllm_chat"
    return "sglang" if "/generate" in routes else "vllm"


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _v1(url: str) -> str:
    return f"{_root(url)}/v1"


def _only_choice(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    choices = _required(answer, "choices", url)
    if len(choices) != 1:
        raise RequestRefused(
            f"{url} returned {len(choices)} choices: ask for n rollouts, not for n choices of one",
            field="n",
        )
    return dict(choices[0])


def _required(answer: Mapping[str, Any], name: str, url: str) -> Any:
    value = answer.get(name)
    if value is None:
        raise RequestRefused(
            f"{url} answered without {name!r}, which an exact trajectory needs: is it the engine that was configured?",
            field="policy_base_url",
        )
    return value


def _finish(reason: str | None, url: str) -> Finish:
    if reason in (None, "abort"):
        raise BackendFailed(f"{url} dropped the request before it was done")
    return Finish.LENGTH if reason == "length" else Finish.STOP


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else int(cached)


def _metric(text: str, name: str) -> float | None:
    """Sum of a metric over its labels in Prometheus text."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None
