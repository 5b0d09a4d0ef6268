# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An engine without a model that answers scripted tokens in vLLM's protocols.

Probes of the service get the answers of an engine with a small, known distribution.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.policy.engines.log_probs import LogProbMode
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from tests.policy.engines import MODEL


LOGITS = {10: 1.0, 11: 0.5, 12: 0.0, 13: -1.0}
"""Logits after every prompt."""


def settings_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a request in any of the protocols."""
    settings: Mapping[str, Any] = body.get("sampling_params", body)
    return settings


def is_probe(body: Mapping[str, Any]) -> bool:
    """Return whether a request is a probe of the engine, not a turn."""
    if "zqxj" in json.dumps(body):
        return True
    settings = settings_of(body)
    limit = next((settings[name] for name in ("max_tokens", "max_new_tokens") if name in settings), None)
    logged = body.get("top_logprobs_num") or body.get("top_logprobs")
    if body.get("logprobs") is not True:
        logged = logged or body.get("logprobs")
    return limit == 1 and bool(logged or settings.get("logit_bias"))


def sampled(
    settings: Mapping[str, Any], mode: str = LogProbMode.PROCESSED, logits: Mapping[int, float] = LOGITS
) -> tuple[int, dict[int, float]]:
    """Return the most probable token, and the log-probs that an engine of this mode returns."""
    biased = dict(logits)
    for token, bias in (settings.get("logit_bias") or {}).items():
        biased[int(token)] = biased.get(int(token), -9.0) + bias
    heat = settings.get("temperature") or 1.0
    scaled = {token: logit / heat for token, logit in biased.items()}
    best = max(scaled, key=lambda token: scaled[token])
    kept = {best: scaled[best]} if settings.get("top_k") == 1 else scaled
    told = {LogProbMode.PROCESSED: kept, LogProbMode.SCALED: scaled}.get(LogProbMode(mode), {**biased, **logits})
    highest = max(told.values())
    norm = highest + math.log(sum(math.exp(logit - highest) for logit in told.values()))
    return best, {token: logit - norm for token, logit in told.items()}


def answer_of(
    body: Mapping[str, Any], mode: str = LogProbMode.PROCESSED, logits: Mapping[int, float] = LOGITS
) -> dict[str, Any]:
    """Return the answer to a request for one token, in the protocol of the request."""
    token, log_probs = sampled(settings_of(body), mode, logits)
    text = "zqxj" if "zqxj" in json.dumps(body) else "x"
    top = sorted(log_probs.items(), key=lambda one: -one[1])[:5]
    if "sampling_params" in body:
        about: dict[str, Any] = {
            "output_token_logprobs": [[log_probs[token], token, None]],
            "finish_reason": {"type": "length"},
        }
        return {
            "text": text,
            "meta_info": about | {"output_top_logprobs": [[[value, one, None] for one, value in top]]},
        }
    if "messages" in body:
        named = [{"token": f"token_id:{one}", "logprob": value} for one, value in top]
        content = [{"token": f"token_id:{token}", "logprob": log_probs[token], "top_logprobs": named}]
        message = {"role": "assistant", "content": text, "prompt_token_ids": [0]}
        choice = {"message": message, "logprobs": {"content": content}, "token_ids": [token]}
    else:
        named_top = {f"token_id:{one}": value for one, value in top}
        logged = {"token_logprobs": [log_probs[token]], "top_logprobs": [named_top]}
        choice = {"text": text, "token_ids": [token], "logprobs": logged}
    return {"choices": [choice | {"finish_reason": "length"}]}


def completion(**changes: Any) -> dict[str, Any]:
    """Return an answer of two tokens over ``/v1/completions``."""
    choice = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
    return {"choices": [choice | changes]}


def says(
    path: str,
    answer: Callable[[dict[str, Any]], Any],
    seen: list[dict[str, Any]] | None = None,
    *,
    published: bool = True,
) -> FastAPI:
    """Return an endpoint with chosen answers, such as those of a misconfigured or foreign server.

    Args:
        path: path of the endpoint.
        answer: returns a response or JSON for a body. Probes are answered unless it returns a response.
        seen: collects the bodies that are not probes.
        published: whether the routes are published.
    """
    app = FastAPI(openapi_url="/openapi.json" if published else None)

    @app.post(path)
    async def respond(request: Request) -> Response:
        body = await request.json()
        if is_probe(body):
            said = answer(body)
            said = said if isinstance(said, Response) else answer_of(body)
        else:
            said = answer(body)
            if seen is not None:
                seen.append(body)
        return said if isinstance(said, Response) else Response(json.dumps(said), media_type="application/json")

    return app


def letters_after(prompt: list[int]) -> str:
    """Return twenty letters that the prompt determines."""
    return "".join(chr(97 + byte % 26) for byte in blake2b(repr(prompt).encode(), digest_size=20).digest())


class ScriptedEngine:
    """vLLM's routes over a tokenizer, without a model.

    Args:
        tokenizer: tokenizer of the engine.
        texts: one text per turn; by default twenty letters that the prompt determines.
        context: maximum of prompt and sampled tokens.
        finish: why sampling ends.

    Attributes:
        status: status of answers; anything but 200 refuses requests.
        seen: sampling requests that are not probes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Iterator[str] | None = None,
        *,
        context: int | None = 8192,
        finish: str = "stop",
    ) -> None:
        self.tokenizer, self.texts, self.context, self.finish = tokenizer, texts, context, finish
        self.status = 200
        self.seen: list[dict[str, Any]] = []

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/completions", self._completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/v1/models", self._models)
        return app

    def say(self, body: dict[str, Any]) -> str:
        return next(self.texts) if self.texts is not None else letters_after(body["prompt"])

    async def _completions(self, request: Request) -> Any:
        body = await request.json()
        if self.status != 200:
            return Response("not now", status_code=self.status)
        if is_probe(body):
            return answer_of(body)
        self.seen.append(body)
        ids = self.tokenizer.encode(self.say(body))
        return completion(token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)}, finish_reason=self.finish)

    async def _chat(self, request: Request) -> Any:
        """Answer with calls of the first tool, as many as the request allows, or with ``ok``."""
        body = await request.json()
        if is_probe(body):
            return answer_of(body)
        self.seen.append(body)
        count = 0 if not body.get("tools") or body.get("tool_choice") == "none" else 2
        count = min(count, 1) if body.get("parallel_tool_calls") is False else count
        function = {"name": "look", "arguments": '{"what": "box"}'}
        calls = [{"id": f"call{index}", "type": "function", "function": function} for index in range(count)]
        message = {"role": "assistant", "content": None if calls else "ok", "tool_calls": calls}
        ids = self.tokenizer.encode("ok")
        logged = {"content": [{"token": f"token_id:{one}", "logprob": -0.5} for one in ids]}
        finish = "tool_calls" if calls else "stop"
        choice = {"message": message, "finish_reason": finish, "logprobs": logged, "token_ids": ids}
        return {"prompt_token_ids": [1], "choices": [choice]}

    async def _tokenize(self, request: Request) -> Any:
        said = {} if self.context is None else {"max_model_len": self.context}
        return {"tokens": self.tokenizer.encode((await request.json()).get("prompt") or ""), **said}

    async def _models(self) -> Any:
        return {"data": [] if self.context is None else [{"id": MODEL, "max_model_len": self.context}]}


def nemo_rl_server(seen: list[dict[str, Any]], mixture: bool = False) -> FastAPI:
    """Return a server with NeMo RL's rules: required prefix, asserted sampling parameters, ids as ``token_id:``.

    With ``mixture``, each token except the last has its own id as its only expert.
    """

    def answer(body: dict[str, Any]) -> Any:
        if body.get("top_p") != 1.0 or body.get("temperature") != 1.0:
            return Response("sampling parameters differ from the training profile", status_code=500)
        prompt = [*body.get("required_prefix_token_ids", []), 100 + len(body["messages"])]
        logged = {"content": [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -0.25}]}
        message = {"role": "assistant", "content": "so", "prompt_token_ids": prompt}
        if mixture:
            message["routed_experts"] = own_experts([*prompt, 3, 0])
        return {"choices": [{"message": message, "logprobs": logged, "finish_reason": "stop"}]}

    return says("/v1/chat/completions", answer, seen)


def own_experts(ids: list[int]) -> str:
    return f"nrlre1:int8:{len(ids)}x1x1:{b64encode(bytes(ids)).decode()}"


def saved(folder: Path, tokenizer: Tokenizer, template: str) -> str:
    """Write a tokenizer and a template into the folder, and return it."""
    tokenizer._fast.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
