# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The wire protocols: vLLM by tokens or by messages, NeMo RL's HTTP server, SGLang.

Requests to engines that take tokens always limit the sampled tokens; the defaults of vLLM's completions (16) and of
SGLang (128) are too small. Several choices, missing ids or log-probs, and an aborted generation raise errors, so they
never become a wrong trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from nemo_gym_prorl.policy.engines.engine import (
    BackendErred,
    BackendFailed,
    Misconfigured,
    RequestRefused,
    SampleRequest,
)
from nemo_gym_prorl.policy.engines.engine_control import metric
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.engines.log_probs import LogProbMode
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.tokens.prompt import json_parts


def _single_choice(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the only choice of an OpenAI-style answer.

    Raises:
        RequestRefused: there are several choices.
        LookupError: there is no choice.
    """
    choices = _required(answer, "choices", url)
    if not choices:
        raise LookupError("no choice")
    if len(choices) != 1:
        raise RequestRefused(
            f"{url} returned {len(choices)} choices: run n rollouts in place of n choices",
            field="n",
        )
    return dict(choices[0])


def _required(answer: Mapping[str, Any], name: str, url: str) -> Any:
    """Return a field that an exact trajectory requires; raise :class:`Misconfigured` without the field."""
    value = answer.get(name)
    if value is None:
        raise Misconfigured(
            f"{url} answered without {name!r}, which an exact trajectory needs: check policy.engine",
            field="policy_base_url",
        )
    return value


def _finish(reason: str | None, url: str) -> Finish:
    """Convert an engine's finish reason.

    Raises:
        BackendFailed: the engine aborted the request or reported an error.
        TypeError: the reason is not a text.
    """
    if reason in (None, "abort"):
        raise BackendFailed(f"{url} aborted the request before the sample was complete")
    if reason == "error":
        raise BackendErred(f"{url} reported an error before the sample was complete")
    if not isinstance(reason, str):
        raise TypeError(f"finish reason {reason!r:.100}")
    return Finish.LENGTH if reason == "length" else Finish.STOP


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """Return the number of prompt tokens from the engine's prefix cache; ``None`` if not reported."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else max(0, int(cached))


class VllmCompletions(HttpEngine):
    """Client of stock vLLM that sends token ids to ``POST /v1/completions``."""

    name = "vllm"
    _sample_route = "/v1/completions"

    async def _generate(self, url: str, context: int | None, request: SampleRequest) -> Generation:
        prompt, sampling = request.prompt, request.sampling
        room = self.sampling_limit(url, context, len(prompt), sampling.max_tokens)
        body = {
            "model": self.model,
            "logprobs": request.top,
            "return_token_ids": True,
            # Otherwise the most probable tokens are keyed by their text, which several tokens may share.
            **({"return_tokens_as_token_ids": True} if request.top else {}),
            "skip_special_tokens": False,
            **sampling.as_openai(room),
        }
        answer = await self._post(url, body, ("prompt", prompt), echoed=True)
        choice = _single_choice(answer, url)
        sampled = _required(choice, "token_ids", url)
        echoed = choice.get("prompt_token_ids")
        if echoed and list(echoed) != list(prompt):
            raise Misconfigured(f"{url} sampled after other tokens than the request's prompt", field="tokenizer")
        logged = choice.get("logprobs") or {}
        return Generation(
            sampled,
            _required(logged, "token_logprobs", url),
            _finish(choice.get("finish_reason"), url),
            _cached_tokens(answer),
            top=list(logged["top_logprobs"][0].values()) if request.top else (),
            text=choice.get("text") or "",
        )


class VllmChat(HttpEngine):
    """Client of vLLM that sends messages to ``POST /v1/chat/completions`` with ``return_token_ids``.

    The engine renders the prompt and returns its ids, so a rewritten history is detected but not prevented. Without
    ``max_tokens``, chat completions sample into the rest of the context.
    """

    name = "vllm_chat"
    takes_tokens = False
    _biased_mode = LogProbMode.PROCESSED
    _sample_route = "/v1/chat/completions"
    _required_route: str | None = "/v1/completions"  # a route that NeMo RL's server lacks

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(request.messages),
            "logprobs": True,
            "top_logprobs": request.top,
            "return_token_ids": True,
            **request.sampling.as_openai(request.sampling.max_tokens),
        }
        if request.tools:
            body["tools"] = list(request.tools)
            if request.tool_choice is not None:
                body["tool_choice"] = request.tool_choice
        if request.effort is not None:
            body["reasoning_effort"] = request.effort
        if request.template_variables:
            body["chat_template_kwargs"] = dict(request.template_variables)
        return body

    async def _generate(self, url: str, context: int | None, request: SampleRequest) -> Generation:
        answer = await self._post(url, self._body(request))
        choice = _single_choice(answer, url)
        message = _required(choice, "message", url)
        prompt_ids = message.get("prompt_token_ids") or answer.get("prompt_token_ids")
        ids = message.get("generation_token_ids", choice.get("token_ids"))
        log_probs = message.get("generation_log_probs")
        logged = choice.get("logprobs") or {}
        if log_probs is None:
            content = _required(logged, "content", url)
            log_probs = [token["logprob"] for token in content]
            if ids is None and all(token["token"].startswith("token_id:") for token in content):
                ids = [int(token["token"].removeprefix("token_id:")) for token in content]
        if prompt_ids is None or ids is None:
            raise Misconfigured(
                f"{url} returned no token ids: the engine must support return_token_ids (vLLM 0.10.2 or later)",
                field="policy_base_url",
            )
        return Generation(
            ids,
            log_probs,
            _finish(choice.get("finish_reason"), url),
            _cached_tokens(answer),
            prompt_ids=prompt_ids,
            message=message,
            routed_experts=message.pop("routed_experts", None),
            top=[one["logprob"] for one in logged["content"][0]["top_logprobs"]] if request.top else (),
            text=message.get("content") or "",
        )


class NemoRl(VllmChat):
    """Client of NeMo RL's HTTP server: chat completions whose prompt must begin with the token ids in the field
    ``required_prefix_token_ids``. A first turn has no such field.

    The server refuses any ``top_k``, and any temperature or ``top_p`` other than those of its training or validation
    profile.
    """

    name = "nemo_rl"
    log_probs_fix = "set policy.generation.vllm_cfg.logprobs_mode to processed_logprobs"
    _fixed_sampling = True
    _required_route, _forbidden_route = None, "/v1/completions"
    reset_route = None
    reset_hint = "NeMo RL does it: set async_rl.recompute_kv_cache_after_weight_updates to true"

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        body = super()._body(request)
        body["return_tokens_as_token_ids"] = True
        if request.prompt:
            body["required_prefix_token_ids"] = orjson.Fragment(b"".join(json_parts(request.prompt)))
        return body


def _parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling settings under SGLang's names, without those that SGLang would refuse."""
    parameters = {name: value for name, value in settings.items() if name not in ("metadata", "user")}
    if "seed" in parameters:
        parameters["sampling_seed"] = parameters.pop("seed")
    match parameters.pop("response_format", None):
        case {"type": "json_object"}:
            parameters["json_schema"] = '{"type": "object"}'
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            parameters["json_schema"] = json.dumps(schema)
    return parameters


class SglangGenerate(HttpEngine):
    """Client of SGLang that sends token ids to ``POST /generate``."""

    name = "sglang"
    _sample_route = "/generate"
    _load_names = ("sglang:num_queue_reqs", "sglang:token_usage")
    reset_route = "/flush_cache"
    reset_hint = "SGLang has it since 0.2"
    _reserved_tokens = 1
    log_probs_fix = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB (truncation is never included)"

    async def _generate(self, url: str, context: int | None, request: SampleRequest) -> Generation:
        prompt, sampling = request.prompt, request.sampling
        room = self.sampling_limit(url, context, len(prompt), sampling.max_tokens)
        parameters = {
            **_parameters(sampling.as_openai(None)),
            "max_new_tokens": room,
            "skip_special_tokens": False,
        }
        body = {"sampling_params": parameters, "return_logprob": True}
        if request.top:
            body["top_logprobs_num"] = request.top
        answer = await self._post(url, body, ("input_ids", prompt))
        about = _required(answer, "meta_info", url)
        pairs = _required(about, "output_token_logprobs", url)
        ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        return Generation(
            ids,
            log_probs,
            _finish(about["finish_reason"]["type"], url),
            about.get("cached_tokens"),
            top=[one[0] for one in about["output_top_logprobs"][0]] if request.top else (),
            text=answer.get("text") or "",
        )

    def _capacity(self, metrics: str) -> int | None:
        tokens = metric(metrics, "sglang:max_total_num_tokens")
        return int(tokens) if tokens else None


ENGINES: dict[str, type[VllmCompletions] | type[VllmChat] | type[NemoRl] | type[SglangGenerate]] = {
    engine.name: engine for engine in (VllmCompletions, VllmChat, NemoRl, SglangGenerate)
}
"""Engine clients by the name of their protocol in a configuration."""
