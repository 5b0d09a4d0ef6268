# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request's fields: one request for each, sent to a model server in front of an engine that records.

A field is *served* if the engine is told it under a name that vLLM has, or the answer shows it; *refused* if the error
names it; *changed* if another value than the one asked for is what holds; and *dropped* if the answer is a 200 that
nothing of it is in. Whatever else happens is *failed*: an error that names something else, or nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from tests.policy.probes import answer_of, is_probe
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve as serving


MODEL = "tiny"
TEMPLATE = """{% if tools %}[tools {{ tools | tojson }}]{% endif %}\
{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}\
{% if enable_thinking is defined %}[enable_thinking {{ enable_thinking }}]{% endif %}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}\
</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
CALL = '<tool_call>{"name": "look", "arguments": {"what": "box"}}</tool_call>'

KNOWN = {
    *(
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "response_format",
        "top_k",
        "thinking_token_budget",
        "user",
    ),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "n", "stream", "stream_options"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "min_p", "logprobs"),
    *("top_logprobs", "messages"),
}
"""Of the fields below, those that vLLM 0.32 has: it reads past any other."""


def tokenizer() -> Tokenizer:
    """Every byte is a token, and the end of a turn."""
    return tokenizer_of("bytes", "<|im_end|>")._fast


def tokenizer_folder(folder: Path) -> Path:
    """A tokenizer and a template that shows all that it is told."""
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@dataclass
class Engine:
    """Says as vLLM does what it is asked for, and keeps what that was.

    Args:
        upstream: a real one that answers instead.
        fast: its tokenizer.
    """

    upstream: str | None = None
    fast: Tokenizer = field(default_factory=tokenizer)
    seen: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Starlette:
        """The routes."""
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        body = json.loads(raw) if raw else {}
        if is_probe(body) and self.upstream is None:
            return JSONResponse(answer_of(body))
        if path.endswith("completions") and body and not is_probe(body):
            self.seen.append(body)
        if self.upstream is not None:
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, self.upstream + path, data=raw, headers=_JSON) as response,
            ):
                said = await response.read()
                return Response(said, response.status, media_type=response.content_type)
        if path == "/v1/models":
            return JSONResponse({"data": [{"id": MODEL, "max_model_len": 4096}]})
        if path == "/tokenize":
            text = body.get("prompt") or json.dumps(body.get("messages"))
            return JSONResponse({"tokens": self.fast.encode(text).ids, "max_model_len": 4096})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return Response(status_code=404)
        return JSONResponse(self._chat(body) if "messages" in body else self._completion(body))

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        text = CALL * 2 if "[tools" in self.fast.decode(body["prompt"]) else "ok"
        ids = self.fast.encode(text).ids
        logged = {"token_logprobs": [-0.5] * len(ids)}
        return {"choices": [{"index": 0, "text": text, "token_ids": ids, "logprobs": logged, "finish_reason": "stop"}]}

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = body.get("tool_choice", "auto")
        count = (
            0 if not body.get("tools") or choice == "none" else 1 if body.get("parallel_tool_calls") is False else 2
        )
        function = {"name": "look", "arguments": '{"what": "box"}'}
        calls = [{"id": f"call{index}", "type": "function", "function": function} for index in range(count)]
        message = {"role": "assistant", "content": None if calls else "ok", "tool_calls": calls}
        tokens = [{"token": f"token_id:{one}", "logprob": -0.5} for one in self.fast.encode("ok").ids]
        finish = "tool_calls" if calls else "stop"
        answered = {"index": 0, "message": message, "finish_reason": finish, "logprobs": {"content": tokens}}
        about = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "prompt_token_ids": [1]}
        answered["token_ids"] = self.fast.encode("ok").ids
        return about | {"choices": [answered | {"index": index} for index in range(body.get("n") or 1)]}


_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Seen:
    """What one request came to: what the engine was asked, and what the caller was told."""

    asked: dict[str, Any]
    answer: dict[str, Any]
    prompt: str

    def told(self, name: str, value: object) -> bool:
        """Whether the engine was told a field that it knows, or a template variable."""
        if name in KNOWN and name in self.asked:
            return self.asked[name] == value
        return False

    def calls(self) -> int:
        """How many calls the caller was told of."""
        said = self.answer
        if "choices" in said:
            return len(said["choices"][0]["message"].get("tool_calls") or [])
        items = said.get("output") or said["content"]
        return sum(item["type"] in ("function_call", "tool_use") for item in items)


Witness = Callable[[Seen], bool]


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        api: the route.
        name: the field.
        change: what the request has beyond the least that it must have.
        served: whether it was.
        changed: whether something else was, knowingly.
    """

    api: str
    name: str
    change: dict[str, Any]
    served: Witness
    changed: Witness = lambda _: False

    def __str__(self) -> str:
        return f"{self.api} {self.name}"

    def body(self) -> dict[str, Any]:
        """The request."""
        return {"model": MODEL, **_LEAST[self.api], **self.change}

    def outcome(self, status: int, said: str, seen: Seen) -> str:
        """What became of the field."""
        if status == 200:
            return "served" if self.served(seen) else "changed" if self.changed(seen) else "dropped"
        named = self.name.split(" ")[0].rpartition(".")[2] in said
        return "refused" if 400 <= status < 500 and named else "failed"


HI = [{"role": "user", "content": "hello"}]
_LEAST: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "max_tokens": 16},
    "responses": {"input": HI, "max_output_tokens": 16},
    "messages": {"messages": HI, "max_tokens": 16},
}


def _told(name: str, value: object) -> Witness:
    return lambda seen: seen.told(name, value)


def _in_prompt(*texts: str) -> Witness:
    return lambda seen: all(text in seen.prompt for text in texts)


def _echoed(name: str, value: object) -> Witness:
    return lambda seen: seen.answer.get(name) == value


def _either(*witnesses: Witness) -> Witness:
    return lambda seen: any(witness(seen) for witness in witnesses)


def _calls(count: int) -> Witness:
    return lambda seen: seen.calls() == count


def _never(_: Seen) -> bool:
    return False


def _effort(effort: str) -> Witness:
    return _either(_told("reasoning_effort", effort), _in_prompt(f"[effort {effort}]"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
LOOK = {"name": "look", "description": "Look at something.", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": LOOK}]
TOOLS = [{"type": "function", **LOOK, "strict": None}]
CLAUDE_TOOLS = [{"name": "look", "description": "Look at something.", "input_schema": PARAMETERS}]
NAMED = {"type": "function", "function": {"name": "look"}}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def _formatted(seen: Seen) -> bool:
    told = seen.asked.get("response_format") or {}
    return bool(told.get("type") == "json_schema" and told["json_schema"]["schema"] == SCHEMA)


def _chat() -> list[Case]:
    def case(name: str, change: dict[str, Any], served: Witness, changed: Witness = _never) -> Case:
        return Case("chat/completions", name, change, served, changed)

    def told(name: str, value: object) -> Case:
        return case(name, {name: value}, _told(name, value))

    system, developer = ({"role": role, "content": "be brief"} for role in ("system", "developer"))
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "look", "arguments": '{"what": "fox"}'}}
    called = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "red"},
    ]
    tokens = _either(lambda seen: bool((seen.answer["choices"][0].get("logprobs") or {}).get("content")))
    in_message = _either(lambda seen: bool(seen.answer["choices"][0]["message"].get("generation_log_probs")))
    other_model: Witness = lambda seen: seen.answer["model"] == MODEL  # noqa: E731 - a witness like the others
    return [
        case("messages (system)", {"messages": [system, *HI]}, _in_prompt("be brief")),
        case("messages (developer)", {"messages": [developer, *HI]}, _in_prompt("be brief")),
        case("messages (parts)", {"messages": [parts]}, _in_prompt("one", "two")),
        case("messages (calls and results)", {"messages": [*HI, *called]}, _in_prompt("fox", "red")),
        case("content (image)", {"messages": [image]}, _in_prompt(IMAGE)),
        case("model", {"model": "another"}, _never, other_model),
        *(told("max_tokens", 7), told("temperature", 0.5), told("top_p", 0.5), told("seed", 3)),
        case(
            "max_completion_tokens",
            {"max_completion_tokens": 7},
            _either(_told("max_tokens", 7), _told("max_completion_tokens", 7)),
        ),
        case("stop (one)", {"stop": "!"}, _either(_told("stop", "!"), _told("stop", ["!"]))),
        case("stop (several)", {"stop": ["!", "?"]}, _told("stop", ["!", "?"])),
        case("n (1)", {"n": 1}, lambda seen: len(seen.answer["choices"]) == 1),
        case("n (2)", {"n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
        *(
            told("frequency_penalty", 0.5),
            told("presence_penalty", 0.5),
            told("logit_bias", {"5": 10}),
            told("user", "me"),
        ),
        case("logprobs", {"logprobs": True}, tokens, in_message),
        case("top_logprobs", {"logprobs": True, "top_logprobs": 2}, _told("top_logprobs", 2), in_message),
        *(
            case(
                f"response_format ({kind})",
                {"response_format": {"type": kind}},
                _told("response_format", {"type": kind}),
            )
            for kind in ("text", "json_object")
        ),
        case("response_format (json_schema)", {"response_format": FORMAT}, _formatted),
        case("tools", {"tools": CHAT_TOOLS}, _in_prompt("Look at something.")),
        case("tool_choice (auto)", {"tools": CHAT_TOOLS, "tool_choice": "auto"}, _calls(2)),
        case("tool_choice (none)", {"tools": CHAT_TOOLS, "tool_choice": "none"}, _calls(0)),
        case(
            "tool_choice (required)",
            {"tools": CHAT_TOOLS, "tool_choice": "required"},
            _told("tool_choice", "required"),
        ),
        case("tool_choice (named)", {"tools": CHAT_TOOLS, "tool_choice": NAMED}, _told("tool_choice", NAMED)),
        case("parallel_tool_calls", {"tools": CHAT_TOOLS, "parallel_tool_calls": False}, _calls(1)),
        case("reasoning_effort", {"reasoning_effort": "low"}, _effort("low")),
        case("metadata.extra_body", {"metadata": {"extra_body": '{"min_p": 0.1}'}}, _told("min_p", 0.1)),
        case(
            "metadata.chat_template_kwargs",
            {"metadata": {"chat_template_kwargs": '{"enable_thinking": false}'}},
            _either(_told("chat_template_kwargs", {"enable_thinking": False}), _in_prompt("[enable_thinking False]")),
        ),
        case(
            "chat_template_kwargs",
            {"chat_template_kwargs": {"enable_thinking": False}},
            _either(_told("chat_template_kwargs", {"enable_thinking": False}), _in_prompt("[enable_thinking False]")),
        ),
        *(
            told(name, value)
            for name, value in (("service_tier", "flex"), ("store", True), ("top_k", 5), ("min_p", 0.1))
        ),
        told("modalities", ["text", "audio"]),
        told("audio", {"voice": "ash", "format": "wav"}),
        told("prediction", {"type": "content", "content": "x"}),
        told("web_search_options", {}),
        *(told(name, "x") for name in ("prompt_cache_key", "safety_identifier", "no_such_field")),
        told("verbosity", "low"),
        told("stream_options", {"include_usage": True}),
    ]


def _responses() -> list[Case]:
    def case(name: str, change: dict[str, Any], served: Witness, changed: Witness = _never) -> Case:
        return Case("responses", name, change, served, changed)

    def told(name: str, value: object) -> Case:
        return case(name, {name: value}, _told(name, value))

    developer = {"role": "developer", "content": "be brief"}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    named = {"type": "function", "name": "look"}
    return [
        case("input", {"input": "good day"}, _in_prompt("good day")),
        case("input (developer)", {"input": [developer, *HI]}, _in_prompt("be brief")),
        case("instructions", {"instructions": "be brief"}, _in_prompt("be brief")),
        case("max_output_tokens", {"max_output_tokens": 7}, _told("max_tokens", 7)),
        *(told("temperature", 0.5), told("top_p", 0.5)),
        case("user", {"user": "me"}, _told("user", "me")),
        case("metadata", {"metadata": {"a": "b"}}, _echoed("metadata", {"a": "b"})),
        case("tools", {"tools": TOOLS}, _in_prompt("Look at something.")),
        case("tools.0.type", {"tools": [{"type": "web_search"}]}, _in_prompt("web_search")),
        case("tool_choice (none)", {"tools": TOOLS, "tool_choice": "none"}, _calls(0)),
        case("tool_choice (required)", {"tools": TOOLS, "tool_choice": "required"}, _told("tool_choice", "required")),
        case("tool_choice (named)", {"tools": TOOLS, "tool_choice": named}, _told("tool_choice", NAMED)),
        case("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": False}, _calls(1)),
        case("text.format", {"text": form}, _formatted),
        case("text.verbosity", {"text": {"verbosity": "low"}}, _told("verbosity", "low")),
        case("reasoning.effort", {"reasoning": {"effort": "low"}}, _effort("low")),
        case("reasoning.summary", {"reasoning": {"summary": "concise"}}, _never),
        case("include", {"include": ["message.output_text.logprobs"]}, _never),
        case("background", {"background": True}, _never),
        case("max_tool_calls", {"tools": TOOLS, "max_tool_calls": 1}, _calls(1)),
        case("previous_response_id", {"previous_response_id": "resp_1"}, _never),
        case("prompt", {"prompt": {"id": "p"}}, _never),
        case("truncation", {"truncation": "auto"}, _never),
        case("top_logprobs", {"top_logprobs": 2}, _told("top_logprobs", 2)),
        told("service_tier", "flex"),
        told("no_such_field", "x"),
    ]


def _messages() -> list[Case]:
    def case(name: str, change: dict[str, Any], served: Witness, changed: Witness = _never) -> Case:
        return Case("messages", name, change, served, changed)

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    off = _either(_effort("none"), _told("chat_template_kwargs", {"enable_thinking": False}))
    return [
        case("system", {"system": "be brief"}, _in_prompt("be brief")),
        case("max_tokens", {"max_tokens": 7}, _told("max_tokens", 7)),
        *(case(name, {name: 0.5}, _told(name, 0.5)) for name in ("temperature", "top_p")),
        case("top_k", {"top_k": 5}, _told("top_k", 5)),
        case("stop_sequences", {"stop_sequences": ["!"]}, _told("stop", ["!"])),
        case("tools", {"tools": CLAUDE_TOOLS}, _in_prompt("Look at something.")),
        case("tools.0.type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, _never),
        case(
            "tool_choice (any)",
            {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}},
            _told("tool_choice", "required"),
        ),
        case("disable_parallel_tool_use", {"tools": CLAUDE_TOOLS, "tool_choice": choice}, _calls(1)),
        case("thinking (disabled)", {"thinking": {"type": "disabled"}}, off),
        case(
            "thinking (enabled)",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            _told("thinking_token_budget", 1024),
        ),
        case(
            "output_config.format",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            _formatted,
        ),
        case("metadata.user_id", {"metadata": {"user_id": "me"}}, _told("user", "me")),
        case("service_tier", {"service_tier": "standard_only"}, lambda _: True),
        case("mcp_servers", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, _never),
        case("image", {"messages": [{"role": "user", "content": [image]}]}, _in_prompt(IMAGE)),
    ]


CASES = [*_chat(), *_responses(), *_messages()]


@contextlib.asynccontextmanager
async def before(engine: Engine) -> AsyncIterator[str]:
    """The engine, recording; yields its URL."""
    async with serving(engine.app()) as url:
        yield url


async def ask(session: aiohttp.ClientSession, url: str, engine: Engine, case: Case) -> tuple[str, str]:
    """What became of a case's field, and what the server said."""
    engine.seen.clear()
    headers = {"X-Rollout-Id": str(id(case))}
    async with session.post(f"{url}/v1/{case.api}", json=case.body(), headers=headers) as response:
        said = await response.text()
    asked = engine.seen[-1] if engine.seen else {}
    if isinstance(asked.get("prompt"), list):
        prompt = engine.fast.decode(asked["prompt"], skip_special_tokens=False)
    else:
        prompt = json.dumps({name: asked.get(name) for name in ("messages", "tools")})
    answer = json.loads(said) if response.status == 200 else {}
    return case.outcome(response.status, said, Seen(asked, answer, prompt)), f"{response.status} {said[:300]}"
