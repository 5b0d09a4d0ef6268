# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Finished agent programs at the model server: their wire, capability keys, limits, repeated requests, keep-alive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import Request, Response

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.http import program_calls
from nemo_gym_prorl.policy.http.callers import MAX_BODY_BYTES
from nemo_gym_prorl.policy.text.renderer import LONG_CHARS, Renderer
from nemo_gym_prorl.policy.tokens.conversations import KNOWN_TURN
from tests.agent.peers import until
from tests.policy.runtimes import server
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.test_prorl_model import BYTES, CHATML
from tests.rollout.serving import serve as serving


CALL = '<tool_call>\n{"name": "%s", "arguments": {"what": "box"}}\n</tool_call><|im_end|>'
PARAMETERS = {"type": "object", "properties": {"what": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
HI = {"role": "user", "content": "hi"}
RESPONSES, CHAT, MESSAGES = "responses", "chat/completions", "messages"
COUNT = "messages/count_tokens"


class SlowEngine(ScriptedEngine):
    """Engine that answers a turn once it may."""

    def __init__(self, texts: Iterator[str] | None) -> None:
        super().__init__(BYTES, texts)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def _completions(self, request: Request) -> Any:
        answer = await super()._completions(request)
        if len(self.seen):
            await self.may_answer.wait()
        return Response("oh", 500) if self.seen and "poison" in BYTES.decode(self.seen[-1]["prompt"]) else answer


@dataclass
class Program:
    """A program's client, and its engine; ``control`` is the deployment's own client."""

    url: str
    engine: SlowEngine
    http: aiohttp.ClientSession
    control: aiohttp.ClientSession

    async def key(self, rollout: str = "r", **limits: Any) -> str:
        async with self.control.post(f"{self.url}/v1/rollouts/{rollout}/key", json=limits) as said:
            assert said.status == 201, await said.text()
            return str((await said.json())["key"])

    async def post(self, api: str, body: Any, key: str, **headers: str) -> tuple[int, str]:
        given = {"Authorization": f"Bearer {key}"} | {name.replace("_", "-"): one for name, one in headers.items()}
        async with self.http.post(f"{self.url}/v1/{api}", json=body, headers=given) as said:
            return said.status, await said.text()

    async def asked(self, path: str) -> Any:
        async with self.control.get(f"{self.url}/v1/rollouts/{path}") as said:
            assert said.status == 200, await said.text()
            return await said.json()


@contextlib.asynccontextmanager
async def program(
    folder: Path, texts: Iterator[str] | None = None, token: str | None = None
) -> AsyncIterator[Program]:
    engine = SlowEngine(texts)
    policy = {"engine": "vllm", "tokenizer": saved(folder, BYTES, CHATML), "control_token": token}
    control = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        serving(engine.app()) as upstream,
        serving(server(upstream, folder, policy=policy).setup_webserver()) as url,
        aiohttp.ClientSession() as http,
        aiohttp.ClientSession(headers=control) as deployment,
    ):
        yield Program(url, engine, http, deployment)


# The wire

CODEX = {
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Obey."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}], "phase": "x"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "secret"},
        {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": "x"},
        {"type": "function_call", "call_id": "c1", "name": "look", "namespace": "eyes", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1"}
        | {"output": [{"type": "input_text", "text": "fox"}, {"type": "input_image", "image_url": "data:"}]},
    ],
    "tools": [
        {"type": "function", **LOOK, "strict": False},
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "eyes", "description": "", "tools": [{"type": "function", **LOOK}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
    ],
    **{"model": "gpt-x", "instructions": "You are an agent.", "tool_choice": "auto", "parallel_tool_calls": False},
    **{"reasoning": {"effort": "medium", "summary": "detailed", "context": "x"}, "store": False, "stream": True},
    **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "x", "client_metadata": {"a": "b"}},
    "text": {"verbosity": "low"},
}
OF_CODEX = {
    *("web_search", "custom", "custom_tool_call", "input_image", "input.phase", "input.encrypted_content"),
    *("include", "prompt_cache_key", "client_metadata", "text.verbosity", "reasoning.summary", "reasoning.context"),
    "reasoning_effort",
}
SEEN = [{"type": "text", "text": "fox"}, {"type": "image", "source": {}}]
CLAUDE = {
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": SEEN}]},
        {"role": "system", "content": "Be brief."},
    ],
    "tools": [
        {"name": "look", "description": "Look.", "input_schema": PARAMETERS},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    **{"model": "claude-x", "max_tokens": 64, "thinking": {"type": "adaptive"}, "stream": True},
    **{"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "diagnostics": {"x": 1}},
}
OF_CLAUDE = {"web_search_20250305", "context_management", "diagnostics", "image", "reasoning_effort"}
CALLED = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
QWEN = {
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": CALLED},
        {"role": "tool", "tool_call_id": "c1", "content": "fox"},
    ],
    "tools": [{"type": "function", "function": LOOK}],
    **{"model": "qwen-x", "n": 2, "verbosity": "low", "stream": True, "stream_options": {"include_usage": True}},
}
OF_QWEN = {"image_url", "n", "verbosity"}
WIRES = {"codex": (RESPONSES, CODEX, OF_CODEX), "claude": (MESSAGES, CLAUDE, OF_CLAUDE), "qwen": (CHAT, QWEN, OF_QWEN)}


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def called(api: str, text: str) -> dict[str, Any]:
    """Return name, namespace and arguments of the one call in a stream."""
    events = events_of(text)
    if api == RESPONSES:
        assert [event["type"] for event in (events[0], events[-1])] == ["response.created", "response.completed"]
        (item,) = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        return {name: item.get(name) for name in ("name", "namespace", "arguments")}
    if api == CHAT:
        assert text.endswith("data: [DONE]\n\n")
        assert events[-1]["usage"]["completion_tokens"] > 0
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        (call,) = events[0]["choices"][0]["delta"]["tool_calls"]
        return dict(call["function"])
    (block,) = [one["content_block"] for one in events if one["type"] == "content_block_start"]
    (delta,) = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    return {"name": block["name"], "arguments": delta["partial_json"]}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("by", ["key", "url", "stream"])
async def test_a_programs_request_loses_what_cannot_be_served(tmp_path: Path, wire: str, by: str) -> None:
    """Both requests are sampled: nothing marks the second as a repetition."""
    api, body, dropped = WIRES[wire]
    texts = itertools.repeat(CALL % ("eyes__look" if api == RESPONSES else "look"))
    async with program(tmp_path, texts) as agent:
        headers = {"Authorization": f"Bearer {await agent.key()}"} if by == "key" else {"X-Rollout-Id": "r"}
        url = f"{agent.url}/ng-rollout/r/v1/{api}" if by == "url" else f"{agent.url}/v1/{api}?beta=true"
        for _ in range(2):
            async with agent.http.post(url, json=body, headers=headers) as said:
                text = await said.text()
                assert (said.status, said.content_type) == (200, "text/event-stream"), text
            call = called(api, text)
            assert json.loads(call.pop("arguments")) == {"what": "box"}
            assert call == {"name": "look"} | ({"namespace": "eyes"} if api == RESPONSES else {})
            assert "token_ids" not in text
        prompt = BYTES.decode(agent.engine.seen[0]["prompt"])
        assert all(word in prompt for word in ("You are an agent.", "fox", '"look"'))
        record = await agent.asked("r/calls")
        assert record["dropped"] == dict.fromkeys(dropped, 2)
        assert (record["turns"], record["in_flight"], record["refused"], record["limit"]) == (2, 0, {}, None)
        assert record["total_tokens"] == len(agent.engine.seen[0]["prompt"]) + len(BYTES.encode(next(texts)))


async def test_models_and_counts(tmp_path: Path) -> None:
    """Any name is a model, and a count is the length of the prompt that a turn would have."""
    async with program(tmp_path) as agent:
        headers = {"x-api-key": await agent.key()}
        for name in ("", "/gpt-x", "/org/name"):
            async with agent.http.get(f"{agent.url}/v1/models{name}?limit=9", headers=headers) as said:
                assert said.status == 200
                told = await said.json()
                assert (told if name else told["data"][0])["id"] == (name[1:] or "tiny")
        key = headers["x-api-key"]
        status, text = await agent.post(COUNT, CLAUDE, key)
        assert status == 200, text
        assert (await agent.post(MESSAGES, CLAUDE, key))[0] == 200
        assert json.loads(text) == {"input_tokens": len(agent.engine.seen[0]["prompt"])}


# Keys

OPEN = [("POST", "/v1/responses"), ("POST", "/v1/chat/completions"), ("POST", "/v1/messages"), ("GET", "/v1/models")]
CLOSED = [
    *(("GET", f"/v1/rollouts/{rollout}/{what}") for rollout in "rs" for what in ("tokens", "calls", "turns")),
    *(("POST", "/v1/rollouts/r/key"), ("DELETE", "/v1/rollouts/r/key"), ("DELETE", "/v1/rollouts/r")),
    *(("GET", "/v1/backends"), ("POST", "/v1/backends"), ("GET", "/metrics"), ("GET", "/healthz")),
    *(("GET", "/openapi.json"), ("GET", "/v1/responses"), ("POST", "/ng-rollout/s/v1/responses")),
    *(("POST", "/v1/responses/"), ("POST", "/v1//responses"), ("GET", "/v1/models/"), ("GET", "/")),
]


@pytest.mark.parametrize("token", [None, "s3cret"])
@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_a_key_opens_the_model_api_of_its_rollout_only(tmp_path: Path, token: str | None, header: str) -> None:
    async with program(tmp_path, token=token) as agent:
        replaced, live, revoked = await agent.key(), await agent.key(group="g"), await agent.key("s")
        async with agent.control.delete(f"{agent.url}/v1/rollouts/s/key") as said:
            assert said.status == 200
        for key in (replaced, live, revoked, "rk-guess"):
            given = {header: f"Bearer {key}" if header == "Authorization" else key, "X-Rollout-Id": "s"}
            for method, path in (*OPEN, *CLOSED):
                async with agent.http.request(method, agent.url + path, json=[], headers=given) as said:
                    opened = 404 if (method, path) in CLOSED else 422 if method == "POST" else 200
                    wanted = opened if key == live else 401
                    assert said.status == wanted, (method, path, await said.text())
                    assert wanted == 200 or (await said.json())["error"]["message"]
        # The headers of a request with a key name no other rollout.
        await agent.post(CHAT, {"messages": [HI]}, live, X_Rollout_Id="s", X_Rollout_Run="x")
        assert [(await agent.asked(f"{rollout}/calls"))["turns"] for rollout in "rs"] == [1, 0]
        assert (await agent.asked("r/calls"))["refused"] == {"422": 3}
        async with agent.control.delete(f"{agent.url}/v1/rollouts/r") as said:
            assert said.status == 200
        assert (await agent.post(CHAT, {"messages": [HI]}, live))[0] == 401


async def test_a_revoked_key_ends_its_turns_and_leaves_the_tokens(tmp_path: Path) -> None:
    async with program(tmp_path) as agent:
        key = await agent.key()
        assert (await agent.post(CHAT, {"messages": [HI]}, key))[0] == 200
        agent.engine.may_answer.clear()
        turn = asyncio.create_task(agent.post(CHAT, {"messages": [HI]}, key))
        revoked = asyncio.Event()

        async def late() -> AsyncIterator[bytes]:
            yield b'{"messages": [{"role": "user",'
            await revoked.wait()
            yield b'"content": "hi"}]}'

        slow = asyncio.create_task(agent.http.post(f"{agent.url}/v1/{CHAT}", data=late(), headers={"x-api-key": key}))
        await until(lambda: len(agent.engine.seen) == 2)
        await asyncio.sleep(0.2)  # the other request has come, without its body
        async with agent.control.delete(f"{agent.url}/v1/rollouts/r/key") as said:
            assert said.status == 200
        revoked.set()
        assert ((await turn)[0], (await slow).status) == (410, 401)
        assert (await agent.asked("r/calls"))["unanswered"] == 0
        assert (await agent.post(CHAT, {"messages": [HI]}, key))[0] == 401
        assert len((await agent.asked("r/tokens"))["answers"]) == 1


async def test_a_token_of_the_deployment_is_no_capability_key() -> None:
    with pytest.raises(CallerError, match=r"policy\.control_token: must not begin with rk-"):
        server([], Path(), policy={"control_token": "rk-x"}).setup_webserver()


BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi"},
    CHAT: {"messages": [HI]},
    MESSAGES: {"model": "m", "max_tokens": 64, "messages": [HI]},
}


@pytest.mark.parametrize(
    ("limits", "limit", "turns"),
    [
        ({"max_turns": 2}, "max_turns", 2),
        ({"max_total_tokens": 10}, "max_total_sequence_length", 1),
        ({"max_total_tokens": 10_000, "max_turns": 9}, None, 3),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_limit_ends_the_calls(
    tmp_path: Path, limits: dict[str, int], limit: str | None, turns: int, streams: bool
) -> None:
    async with program(tmp_path) as agent:
        key = await agent.key(**limits)
        said = [await agent.post(api, body | {"stream": streams}, key) for api, body in BODIES.items()]
        assert [status for status, _ in said] == [200] * turns + [403] * (3 - turns)
        for _, text in said[turns:]:
            assert str(limit) in json.loads(text)["error"]["message"]
        record = await agent.asked("r/calls")
        assert (record["turns"], record["limit"]) == (turns, limit)
        assert record["refused"] == ({"403": 3 - turns} if limit else {})
        assert (await agent.post(CHAT, BODIES[CHAT], await agent.key()))[0] == 200
        assert (await agent.asked("r/calls"))["limit"] is None


async def test_turns_in_flight_count(tmp_path: Path) -> None:
    async with program(tmp_path) as agent:
        key = await agent.key(max_turns=2)
        agent.engine.may_answer.clear()
        turns = [asyncio.create_task(agent.post(CHAT, {"messages": [HI]}, key)) for _ in range(4)]
        await until(lambda: sum(turn.done() for turn in turns) == 2)
        record = await agent.asked("r/calls")
        assert (record["in_flight"], record["limit"]) == (2, None)  # a limit ends the program, and its calls
        agent.engine.may_answer.set()
        assert sorted([(await turn)[0] for turn in turns]) == [200, 200, 403, 403]
        assert (await agent.post(CHAT, {"messages": [HI]}, key))[0] == 403
        record = await agent.asked("r/calls")
        assert (record["limit"], record["unanswered"]) == ("max_turns", 0)


def asks(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("first", "then", "unanswered"),
    [
        ("cut", None, 1),
        ("cut", "title", 1),
        ("cut", "main", 0),
        ("cut late", "main", 0),
        ("poison", "title", 1),
        ("refused", None, 0),
    ],
)
async def test_a_call_without_an_answer_is_remembered(
    tmp_path: Path, first: str, then: str | None, unanswered: int
) -> None:
    """Only an answer to the same request, sent again, makes up for it."""
    async with program(tmp_path) as agent:
        key, slow = await agent.key(), agent.engine.may_answer
        if first.startswith("cut"):
            slow.clear()
            main = asyncio.create_task(agent.post(CHAT, asks("main"), key))
            await until(lambda: len(agent.engine.seen) == 1)
            agent.engine.may_answer = asyncio.Event()
            agent.engine.may_answer.set()
            if first == "cut":
                main.cancel()
        else:
            body = asks(first) if first == "poison" else {"messages": 1}
            status, text = await agent.post(CHAT, body, key)
            assert status == (500 if first == "poison" else 422), text
        if then is not None:
            assert (await agent.post(CHAT, asks(then), key))[0] == 200
        if first == "cut late":
            main.cancel()
        async with asyncio.timeout(60):
            while (record := await agent.asked("r/calls"))["in_flight"]:
                await asyncio.sleep(0.01)
        assert record["unanswered"] == unanswered


# Tokens and sampling are not the program's

FORGED = {
    **{"prompt_token_ids": [65, 66], "generation_token_ids": [70] * 9, "generation_log_probs": [-9.0] * 9},
    **{KNOWN_TURN: 0, "routed_experts": "x"},
}
STEERING = {"temperature": 0, "top_p": 0.1}
METADATA = {"extra_body": json.dumps({"allowed_token_ids": [1]}), "chat_template_kwargs": json.dumps({"x": 1})}
STEERED = {
    CHAT: STEERING
    | {"seed": 1, "logit_bias": {"5": 100}, "metadata": METADATA, "chat_template_kwargs": {"x": 1}, "top_k": 1}
    | {"presence_penalty": 1, "frequency_penalty": 1, "response_format": {"type": "json_object"}, "stop": ["END"]},
    RESPONSES: STEERING | {"metadata": METADATA, "text": {"format": {"type": "json_object"}}},
    MESSAGES: STEERING | {"top_k": 1, "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["END"]},
}


@pytest.mark.parametrize("api", STEERED)
async def test_a_program_decides_neither_tokens_nor_sampling(tmp_path: Path, api: str) -> None:
    async with program(tmp_path) as agent:
        key, params = await agent.key(), {"temperature": 0.7, "metadata": {"extra_body": '{"top_k": 5}'}}
        said = [HI, {"role": "assistant", "content": "x"} | FORGED, HI]
        body = BODIES[api] | {"input" if api == RESPONSES else "messages": said} | STEERED[api]
        status, text = await agent.post(api, body, key)
        assert status == 200, text
        assert (await agent.post(api, body, await agent.key(params=params)))[0] == 200
        free, decided = agent.engine.seen
        named = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        assert {name: free[name] for name in named} == named
        assert {name: decided[name] for name in named} == named | {"temperature": 0.7, "top_k": 5}
        for seen in agent.engine.seen:
            assert not {"seed", "logit_bias", "allowed_token_ids", "response_format"} & seen.keys()
            assert seen.get("stop") == (None if api == RESPONSES else ["END"])
            assert seen["max_tokens"] == 64 or api != MESSAGES
        tokens = await agent.asked("r/tokens")
        assert len(tokens["answers"]) == (await agent.asked("r/calls"))["turns"] == 2
        assert "70, 70, 70" not in str(tokens)
        dropped = (await agent.asked("r/calls"))["dropped"]
        assert {"temperature", "top_p", *FORGED} <= dropped.keys()


WRONG = {
    "half a character": (COUNT, '{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'),
    "no object": (COUNT, "[]"),
    "no JSON": (CHAT, '{"stream": true'),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_request_is_refused_in_the_form_of_programs(tmp_path: Path, name: str) -> None:
    path, body = WRONG[name]
    async with program(tmp_path) as agent:
        by_key = {"x-api-key": await agent.key()}
        for below, headers in (("", by_key), ("/ng-rollout/r", {})):
            async with agent.http.post(f"{agent.url}{below}/v1/{path}", data=body, headers=headers) as said:
                assert said.status == 422, await said.text()
                assert (await said.json())["error"]["message"]


@pytest.mark.parametrize("api", [*BODIES, COUNT])
async def test_a_long_request_is_refused_before_it_is_read(
    tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(tmp_path) as agent:
        key, body = await agent.key(), BODIES.get(api, BODIES[MESSAGES])
        assert (await agent.post(CHAT, BODIES[CHAT], key))[0] == 200  # the engine has told its context
        context = agent.engine.context or 0
        said = [HI | {"content": "x" * 32 * context}]
        monkeypatch.setattr(Renderer, "render_prompt", None)
        status, text = await agent.post(api, body | {"input" if api == RESPONSES else "messages": said}, key)
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded"), text

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"[" * 100_000

        for data in (b" " * (MAX_BODY_BYTES + 1), endless()):
            with contextlib.suppress(aiohttp.ClientOSError):
                async with agent.http.post(f"{agent.url}/v1/{api}", data=data, headers={"x-api-key": key}) as said:
                    assert said.status == 413
                    assert (await said.json())["error"]["message"]
        assert len(agent.engine.seen) == 1


@pytest.mark.parametrize("path", [CHAT, COUNT])
async def test_a_long_prompt_is_rendered_beside_the_event_loop(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte takes half a second."""
    on_loop: list[bool] = []
    for name in ("render_prompt", "render_continuation"):

        def render(*args: Any, _real: Any = getattr(Renderer, name), **options: Any) -> Any:
            on_loop.append(threading.current_thread() is threading.main_thread())
            return _real(*args, **options)

        monkeypatch.setattr(Renderer, name, render)
    async with program(tmp_path) as agent:
        key = await agent.key()
        on_loop.clear()  # the template was tried at the start
        for length in (9, LONG_CHARS, 9):
            body = {"model": "m", "messages": [HI, HI | {"content": "x" * length}]}
            assert (await agent.post(path, body, key))[0] == 200
        assert on_loop == [True, False, True]


# Repeated requests and keep-alive


NAMED, OTHER, FIRST, AGAIN = (
    *({"Idempotency_Key": "a", "x_stainless_retry_count": "0"}, {"Idempotency_Key": "b"}),
    *({"x_stainless_retry_count": "0"}, {"x_stainless_retry_count": "1"}),
)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "other_body", "same"),
    [
        (NAMED, NAMED, False, True),
        (NAMED, NAMED, True, False),
        (NAMED, OTHER, False, False),
        (FIRST, AGAIN, False, True),
        (FIRST, AGAIN, True, False),
        (FIRST, FIRST, False, False),
        ({}, {}, False, False),
    ],
)
async def test_a_repeated_request_gets_the_same_turn(
    tmp_path: Path, in_flight: bool, first: dict[str, str], second: dict[str, str], other_body: bool, same: bool
) -> None:
    async with program(tmp_path) as agent:
        key, body = await agent.key(), {"messages": [HI]}
        if in_flight:
            agent.engine.may_answer.clear()
        one = asyncio.create_task(agent.post(CHAT, body, key, **first))
        await until(lambda: one.done() or (in_flight and len(agent.engine.seen) == 1))
        two = asyncio.create_task(agent.post(CHAT, body | {"seed": 1} if other_body else body, key, **second))
        if in_flight and same:
            await asyncio.sleep(0.2)  # the second has joined
            one.cancel()  # its client has gone; the other still waits
            await asyncio.wait([one])
        agent.engine.may_answer.set()
        assert (await two)[0] == 200
        assert one.cancelled() or (await one == await two) == same
        assert len(agent.engine.seen) == (await agent.asked("r/calls"))["turns"] == 2 - same


async def test_a_failed_call_is_sampled_when_it_is_repeated(tmp_path: Path) -> None:
    async with program(tmp_path) as agent:
        key = await agent.key()
        agent.engine.status = 400
        status, text = await agent.post(CHAT, {"messages": [HI]}, key, **NAMED)
        assert status >= 400
        assert json.loads(text)["error"]["message"]
        agent.engine.status = 200
        assert (await agent.post(CHAT, {"messages": [HI]}, key, **NAMED))[0] == 200


@pytest.mark.parametrize("api", BODIES)
async def test_a_stream_is_kept_alive_before_its_turn(
    tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error then becomes the last event, and a client that hangs up cancels the turn."""
    monkeypatch.setattr(program_calls, "KEEP_ALIVE_S", 0.05)
    async with program(tmp_path) as agent:
        headers = {"x-api-key": await agent.key()}
        for ends in ("answered", "deleted", "hung up"):
            agent.engine.may_answer.clear()
            async with agent.http.post(
                f"{agent.url}/v1/{api}", json=BODIES[api] | {"stream": True}, headers=headers
            ) as said:
                assert (said.status, said.content_type) == (200, "text/event-stream")
                assert await said.content.readexactly(28) == b": keep-alive\n\n" * 2
                if ends == "hung up":
                    break
                if ends == "deleted":
                    await agent.control.delete(f"{agent.url}/v1/rollouts/r/key")
                agent.engine.may_answer.set()
                events = events_of(await said.text())
            if ends == "answered":
                assert len(events) > 1
            else:
                assert [event["error"]["code"] for event in events] == ["rollout-gone"]
                headers = {"x-api-key": await agent.key()}
        async with asyncio.timeout(60):
            while (await agent.asked("r/calls"))["in_flight"]:
                await asyncio.sleep(0.01)
        assert (await agent.asked("r/calls"))["turns"] == 1
