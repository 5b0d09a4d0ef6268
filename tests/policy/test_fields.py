# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Every field of every route is served or refused by name, for each kind of engine.

A field is *served* if the engine's request, the prompt or the answer shows it, as one of the row's witnesses checks.
It is *refused* if a 4xx names it. A row without witnesses must be refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.policy.engines import MODEL
from tests.policy.runtimes import server
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve as serving


type Witness = Callable[[dict[str, Any], dict[str, Any], str], bool]
"""Checks the engine's request, the answer and the prompt."""
TEMPLATE = """{% if tools %}[tools {{ tools | tojson }}]{% endif %}\
{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}\
{% if enable_thinking is defined %}[enable_thinking {{ enable_thinking }}]{% endif %}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}\
</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
CALL = '<tool_call>{"name": "look", "arguments": {"what": "box"}}</tool_call>'
HI = [{"role": "user", "content": "hello"}]
LEAST: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "max_tokens": 16},
    "responses": {"input": HI, "max_output_tokens": 16},
    "messages": {"messages": HI, "max_tokens": 16},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
LOOK = {"name": "look", "description": "Look at something.", "parameters": PARAMETERS}
CHAT_TOOLS = {"tools": [{"type": "function", "function": LOOK}]}
TOOLS = {"tools": [{"type": "function", **LOOK, "strict": None}]}
CLAUDE_TOOLS = {"tools": [{"name": "look", "description": "Look at something.", "input_schema": PARAMETERS}]}
NAMED = {"type": "function", "function": {"name": "look"}}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def told(name: str, value: object) -> Witness:
    return lambda asked, answer, prompt: asked.get(name) == value


def shown(*texts: str) -> Witness:
    return lambda asked, answer, prompt: all(text in prompt for text in texts)


def calls(count: int) -> Witness:
    def look(asked: dict[str, Any], answer: dict[str, Any], prompt: str) -> bool:
        if "choices" in answer:
            return len(answer["choices"][0]["message"].get("tool_calls") or []) == count
        items = answer.get("output") or answer["content"]
        return sum(item["type"] in ("function_call", "tool_use") for item in items) == count

    return look


def formatted(asked: dict[str, Any], answer: dict[str, Any], prompt: str) -> bool:
    form = asked.get("response_format") or {}
    return bool(form.get("type") == "json_schema" and form["json_schema"]["schema"] == SCHEMA)


def has_log_probs(asked: dict[str, Any], answer: dict[str, Any], prompt: str) -> bool:
    return bool(answer["choices"][0]["logprobs"]["content"])


def effort(value: str) -> tuple[Witness, ...]:
    return told("reasoning_effort", value), shown(f"[effort {value}]")


THINKING_OFF = (told("chat_template_kwargs", {"enable_thinking": False}), shown("[enable_thinking False]"))
BRIEF = [{"role": "system", "content": "be brief"}, *HI]
DEVELOPER = [{"role": "developer", "content": "be brief"}, *HI]
FOX = {"id": "abcdefgh1", "type": "function", "function": {"name": "look", "arguments": '{"what": "fox"}'}}
CALLED = [{"role": "assistant", "tool_calls": [FOX]}, {"role": "tool", "tool_call_id": FOX["id"], "content": "red"}]
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
type Row = tuple[str, dict[str, Any], *tuple[Witness, ...]]


def same(**fields: Any) -> list[Row]:
    """Return rows of fields that engines have under the same name."""
    return [(name, {name: value}, told(name, value)) for name, value in fields.items()]


def never(**fields: Any) -> list[Row]:
    return [(name, {name: value}) for name, value in fields.items()]


CHAT: list[Row] = [
    ("messages", {"messages": BRIEF}, shown("be brief")),
    ("messages", {"messages": DEVELOPER}, shown("be brief")),
    ("messages", {"messages": [*HI, *CALLED]}, shown("fox", "red")),
    ("content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]}),
    ("model", {"model": "another"}, lambda asked, answer, prompt: answer["model"] == MODEL),
    *same(max_tokens=7, temperature=0.5, top_p=0.5, seed=3, frequency_penalty=0.5, presence_penalty=0.5, top_k=5),
    *same(logit_bias={"5": 10}, user="me", stop=["!", "?"]),
    ("max_completion_tokens", {"max_completion_tokens": 7}, told("max_tokens", 7)),
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": True}, has_log_probs),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 2}),
    *(
        (f"response_format {kind}", {"response_format": {"type": kind}}, told("response_format", {"type": kind}))
        for kind in ("text", "json_object")
    ),
    ("response_format", {"response_format": FORMAT}, formatted),
    ("tools", CHAT_TOOLS, shown("Look at something.")),
    ("tool_choice", CHAT_TOOLS | {"tool_choice": "auto"}, calls(2)),
    ("tool_choice", CHAT_TOOLS | {"tool_choice": "none"}, calls(0)),
    ("tool_choice", CHAT_TOOLS | {"tool_choice": "required"}, told("tool_choice", "required")),
    ("tool_choice", CHAT_TOOLS | {"tool_choice": NAMED}, told("tool_choice", NAMED)),
    ("parallel_tool_calls", CHAT_TOOLS | {"parallel_tool_calls": False}, calls(1)),
    ("reasoning_effort", {"reasoning_effort": "low"}, *effort("low")),
    ("metadata.extra_body", {"metadata": {"extra_body": '{"min_p": 0.1}'}}, told("min_p", 0.1)),
    (
        "metadata.chat_template_kwargs",
        {"metadata": {"chat_template_kwargs": '{"enable_thinking": false}'}},
        *THINKING_OFF,
    ),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}, *THINKING_OFF),
    ("metadata.extra_body", {"metadata": {"extra_body": "{"}}),
    ("metadata.chat_template_kwargs", {"metadata": {"chat_template_kwargs": "[]"}}),
    ("extra_body", {"metadata": {"extra_body": '{"n": 2}'}}),
    ("tool_choice", {"tool_choice": "required"}),
    *never(service_tier="flex", store=True, min_p=0.1, modalities=["text", "audio"], web_search_options={}),
    *never(audio={"voice": "ash", "format": "wav"}, prediction={"type": "content", "content": "x"}, verbosity="low"),
    *never(prompt_cache_key="x", no_such_field="x", stream_options={"include_usage": True}),
]
RESPONSES: list[Row] = [
    ("input", {"input": DEVELOPER}, shown("be brief")),
    ("instructions", {"instructions": "be brief"}, shown("be brief")),
    ("max_output_tokens", {"max_output_tokens": 7}, told("max_tokens", 7)),
    *same(temperature=0.5, top_p=0.5, user="me"),
    ("metadata", {"metadata": {"a": "b"}}, lambda asked, answer, prompt: answer["metadata"] == {"a": "b"}),
    ("tools", TOOLS, shown("Look at something.")),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tool_choice", TOOLS | {"tool_choice": "none"}, calls(0)),
    ("tool_choice", TOOLS | {"tool_choice": {"type": "function", "name": "look"}}, told("tool_choice", NAMED)),
    ("parallel_tool_calls", TOOLS | {"parallel_tool_calls": False}, calls(1)),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}}, formatted),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("reasoning.effort", {"reasoning": {"effort": "low"}}, *effort("low")),
    ("reasoning.summary", {"reasoning": {"summary": "concise"}}),
    ("max_tool_calls", TOOLS | {"max_tool_calls": 1}),
    *never(include=["message.output_text.logprobs"], background=True, previous_response_id="resp_1"),
    *never(prompt={"id": "p"}, truncation="auto", top_logprobs=2, service_tier="flex", no_such_field="x"),
]
MESSAGES: list[Row] = [
    ("system", {"system": "be brief"}, shown("be brief")),
    *same(max_tokens=7, temperature=0.5, top_p=0.5, top_k=5),
    ("stop_sequences", {"stop_sequences": ["!"]}, told("stop", ["!"])),
    ("tools", CLAUDE_TOOLS, shown("Look at something.")),
    ("tools.0.type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tool_choice", CLAUDE_TOOLS | {"tool_choice": {"type": "any"}}, told("tool_choice", "required")),
    ("parallel", CLAUDE_TOOLS | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, calls(1)),
    ("thinking.type", {"thinking": {"type": "disabled"}}, *effort("none"), *THINKING_OFF),
    ("thinking.budget", {"thinking": {"type": "enabled", "budget_tokens": 99}}, told("thinking_token_budget", 99)),
    ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, formatted),
    ("metadata.user_id", {"metadata": {"user_id": "me"}}, told("user", "me")),
    ("service_tier", {"service_tier": "standard_only"}, lambda asked, answer, prompt: True),
    ("mcp_servers", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    ("image", {"messages": [{"role": "user", "content": [PICTURE]}]}),
]


class Engine(ScriptedEngine):
    """Engine that writes two calls if the prompt has tools."""

    def say(self, body: dict[str, Any]) -> str:
        return CALL * 2 if "[tools" in self.tokenizer.decode(body["prompt"]) else "ok"


@pytest.mark.parametrize("protocol", ["vllm", "vllm_chat"])
async def test_every_field_is_served_or_refused_by_its_name(protocol: str, tmp_path: Path) -> None:
    tokenizer, wrong = tokenizer_of("bytes", "<|im_end|>"), []
    engine, folder = Engine(tokenizer), saved(tmp_path, tokenizer, TEMPLATE)
    tables = dict(zip(LEAST, (CHAT, RESPONSES, MESSAGES), strict=True))
    rows = [(api, *row) for api, table in tables.items() for row in table]
    async with serving(engine.app()) as upstream, aiohttp.ClientSession() as http:
        model = server(upstream, tmp_path, policy={"engine": protocol, "tokenizer": folder})
        async with serving(model.setup_webserver()) as url:
            for number, (api, field, change, *witnesses) in enumerate(rows):
                engine.seen.clear()
                body = {"model": MODEL, **LEAST[api], **change}
                async with http.post(f"{url}/v1/{api}", json=body, headers={"X-Rollout-Id": f"r{number}"}) as answer:
                    status, said = answer.status, await answer.text()
                asked = engine.seen[-1] if engine.seen else {}
                prompt = tokenizer.decode(asked["prompt"]) if "prompt" in asked else json.dumps(asked)
                if status == 200:
                    fine = any(witness(asked, json.loads(said), prompt) for witness in witnesses)
                else:
                    fine = 400 <= status < 500 and field.split(" ")[0].split(".")[-1] in said
                if not fine:
                    wrong.append(f"{api} {field}: {status} {said[:300]}")
    assert not wrong, "\n".join(wrong)
