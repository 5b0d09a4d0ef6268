# SPDX-License-Identifier: Apache-2.0
"""The wire protocols of inference engines.

Each protocol checks what it gets back, once, where it enters: a wrong model name, a wrong key, an answer that is not
JSON, more than one choice, missing ids or log-probs each end in an error that says so, never in a wrong trajectory.

One that takes tokens is always told how many to sample: left alone, vLLM's completions stop after 16, SGLang's after
128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_gym_prorl.policy.addresses import root_of
from nemo_gym_prorl.policy.engine import (
    BackendErred,
    BackendFailed,
    Conversation,
    HttpEngine,
    Misconfigured,
    RequestRefused,
    metric,
)
from nemo_gym_prorl.policy.sampling import Sampling
from nemo_gym_prorl.policy.tokens import Finish, Generation


class VllmCompletions(HttpEngine):
    """Stock vLLM, tokens in and tokens out, over ``POST /v1/completions``."""

    async def _generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation:
        room = await self.room(url, len(prompt), sampling.max_tokens)
        if room < 1:
            return Generation((), (), Finish.CONTEXT)
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **replace(sampling, max_tokens=room).as_openai(),
        }
        answer = await self._post(f"{root_of(url)}/v1/completions", body)
        if answer is None:
            return Generation((), (), Finish.CONTEXT)
        choice = _only_choice(answer, url)
        ids = _required(choice, "token_ids", url)
        if list(choice.get("prompt_token_ids") or prompt) != list(prompt):
            raise Misconfigured(f"{url} sampled after other tokens than it was given", field="tokenizer")
        log_probs = _required(choice.get("logprobs") or {}, "token_logprobs", url)
        return Generation(ids, log_probs, _finish(choice.get("finish_reason"), url), _cached_tokens(answer))


class VllmChat(HttpEngine):
    """vLLM, messages in and tokens out, over ``POST /v1/chat/completions`` with ``return_token_ids``.

    The engine renders the prompt. It comes back as ids, so a rewritten history is noticed, though not prevented. Where
    the request has no ``max_tokens``, chat completions sample into what is left of the context.
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

    async def _generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation:
        answer = await self._post(f"{root_of(url)}/v1/chat/completions", self._body(conversation, sampling))
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
            raise Misconfigured(
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
    _kept_free = 1

    async def _generate(
        self, url: str, prompt: Sequence[int], conversation: Conversation, sampling: Sampling
    ) -> Generation:
        room = await self.room(url, len(prompt), sampling.max_tokens)
        if room < 1:
            return Generation((), (), Finish.CONTEXT)
        parameters = {
            "max_new_tokens": room,
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
        answer = await self._post(f"{root_of(url)}/generate", body)
        if answer is None:
            return Generation((), (), Finish.CONTEXT)
        about = _required(answer, "meta_info", url)
        pairs = _required(about, "output_token_logprobs", url)
        finish = _finish(about["finish_reason"]["type"], url)
        return Generation([pair[1] for pair in pairs], [pair[0] for pair in pairs], finish, about.get("cached_tokens"))

    def _capacity(self, metrics: str) -> int | None:
        tokens = metric(metrics, "sglang:max_total_num_tokens")
        return int(tokens) if tokens else None


ENGINES: dict[str, type[VllmCompletions] | type[VllmChat] | type[NemoRl] | type[SglangGenerate]] = {
    "vllm": VllmCompletions,
    "vllm_chat": VllmChat,
    "nemo_rl": NemoRl,
    "sglang": SglangGenerate,
}
"""Protocols by the name that a configuration gives them."""


def _only_choice(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    choices = _required(answer, "choices", url)
    if not choices:
        raise LookupError("no choice")
    if len(choices) != 1:
        raise RequestRefused(
            f"{url} returned {len(choices)} choices: ask for n rollouts, not for n choices of one",
            field="n",
        )
    return dict(choices[0])


def _required(answer: Mapping[str, Any], name: str, url: str) -> Any:
    value = answer.get(name)
    if value is None:
        raise Misconfigured(
            f"{url} answered without {name!r}, which an exact trajectory needs: is it the engine that was configured?",
            field="policy_base_url",
        )
    return value


def _finish(reason: str | None, url: str) -> Finish:
    if reason in (None, "abort"):
        raise BackendFailed(f"{url} dropped the request before it was done")
    if reason == "error":
        raise BackendErred(f"{url} met an error before it was done")
    if not isinstance(reason, str):
        raise TypeError(f"finish reason {reason!r:.100}")
    return Finish.LENGTH if reason == "length" else Finish.STOP


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else max(0, int(cached))
