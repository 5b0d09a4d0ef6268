# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The model server as Gym runs it, in front of a real vLLM."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fastapi import Body, FastAPI
from nemo_gym import base_responses_api_model
from yarl import URL

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.handlers.conversation import Conversation
from nemo_gym_prorl.handlers.gym_http import Address, GymServer, HttpClient
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.scripted.server import ScriptedConfig
from nemo_gym_prorl.scripted.server import serve as scripted
from tests.policy.hosts import server, words_in
from tests.rollout.serving import serve as serving


TOOLS = [
    {
        "type": "function",
        "name": "look",
        "description": "Look at something.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        "strict": None,
    }
]


GYM_RECORDS = hasattr(base_responses_api_model, "install_model_call_capture")
TOKEN_FIELDS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}


@pytest.fixture
async def url(engine_url: str, model_folder: Path) -> AsyncIterator[str]:
    model = server(f"{engine_url}/v1", model_folder)
    async with serving(model.setup_webserver()) as address:
        yield address


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def respond(http: aiohttp.ClientSession, url: str, items: list[dict], **more: object) -> dict:
    headers = more.pop("headers", {})
    # A random model ends its turn at random, too.
    metadata = {"extra_body": '{"ignore_eos": true}'}
    body = {"input": items, "max_output_tokens": 16, "metadata": metadata, "temperature": 1.0, "tools": TOOLS, **more}
    async with http.post(f"{url}/v1/responses", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_turns_are_an_exact_prefix_chain(http: aiohttp.ClientSession, url: str) -> None:
    items: list[dict] = [{"role": "user", "content": "What is in the box? 📦"}]
    previous: dict | None = None
    for turn in range(3):
        answer = await respond(http, url, items)
        last = answer["output"][-1]
        assert len(last["generation_token_ids"]) == len(last["generation_log_probs"]) == 16
        if previous is not None:
            chain = previous["prompt_token_ids"] + previous["generation_token_ids"]
            assert last["prompt_token_ids"][: len(chain)] == chain
        previous = last
        # An agent that carries no ids back.
        items += [{k: v for k, v in item.items() if k not in TOKEN_FIELDS} for item in answer["output"]]
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        items += [{"type": "function_call_output", "call_id": call, "output": "a frog 🐸"} for call in calls]
        if not calls:
            items.append({"role": "user", "content": f"And then? {turn}"})


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_url_is_a_rollout_on_all_three_routes(
    recorded: bool, engine_url: str, model_folder: Path, tmp_path: Path
) -> None:
    """Of callers that know nothing but their base URL: no cookie, no header, no token ids sent back. Where Gym records
    calls, they go another way: through its application."""
    deployment = {"observability_enabled": True, "model_call_capture_dir": str(tmp_path)} if recorded else {}
    deployment |= {"token_id_capture": {"enabled": recorded, "dir": str(tmp_path)}}

    async def said(rollout: str, route: str, **body: object) -> dict:
        body |= {"temperature": 0.0}
        async with aiohttp.ClientSession() as http, http.post(f"{url}{rollout}/v1/{route}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    model = server(f"{engine_url}/v1", model_folder, deployment)
    async with serving(model.setup_webserver()) as url:
        one, the_same, another = "/ng-rollout/0-1", "/ng-rollout/0-1/training-token-capture", "/ng-rollout/0-2"
        asked: list[dict] = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            chat = await said(one, "chat/completions", messages=asked, max_tokens=4)
            text = chat["choices"][0]["message"]["content"]
            noted = {"provider_specific_fields": {"refusal": None}}  # litellm's, which agents send back
            asked += [{"role": "assistant", "content": text, **noted}, {"role": "user", "content": "More"}]
        asked = [{"role": turn["role"], "content": turn["content"]} for turn in asked]
        [message] = (await said(the_same, "responses", input=asked, max_output_tokens=4))["output"]
        asked += [{"role": "assistant", "content": message["content"][0]["text"]}, {"role": "user", "content": "More"}]
        kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # Claude Code's, and done anyway
        more = {"context_management": kept, "thinking": {"display": "updates"}}
        await said(one, "messages", model="tiny", messages=asked, max_tokens=4, **more)
        await said(another, "messages", model="tiny", messages=asked[:1], max_tokens=4)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/rollouts/0-1/tokens") as answer:
            tokens = await answer.json()
    (sequence,) = tokens["sequences"]
    assert len(tokens["answers"]) == sum(sampled for _, _, sampled, _ in sequence["spans"]) == 4
    assert tokens["counts"]["retokenised"] == 0
    of_gym = {"0-1.capture.jsonl": 4, "0-2.capture.jsonl": 1, "0-1.tokens.jsonl": 1}
    assert lines_in(tmp_path) == (of_gym if recorded and GYM_RECORDS else {})


def lines_in(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.jsonl")}


@pytest.mark.skipif(not GYM_RECORDS, reason="this Gym captures no tokens")
def test_an_engine_that_is_to_stage_tokens_is_refused() -> None:
    model = server([], Path(), {"token_id_capture": {"enabled": True, "external_staging": True}}, policy={})
    with pytest.raises(CallerError, match=r"token_id_capture\.external_staging: must be false"):
        model.setup_webserver()


async def test_a_header_and_a_url_are_one_rollout(http: aiohttp.ClientSession, url: str) -> None:
    first = await respond(http, url, [{"role": "user", "content": "Hello"}], headers={"X-Rollout-Id": "r9"})
    below = f"{url}/ng-rollout/r9"
    await respond(http, below, [{"role": "user", "content": "More"}], previous_response_id=first["id"])
    for headers, path, field in (
        ({"X-Rollout-Id": "r8"}, "/ng-rollout/r9/v1/responses", "X-Rollout-Id"),
        ({}, "/ng-rollout/caf%C3%A9/v1/responses", "URL"),
    ):
        async with http.post(f"{url}{path}", json={"input": "Hello"}, headers=headers) as response:
            assert response.status == 422
            assert [error["field"] for error in (await response.json())["errors"]] == [field]
    async with http.post(f"{below}/v1/nothing", json={}) as response:
        assert response.status == 404


@pytest.mark.parametrize("path", ["/v1/backends", "/v1/%62ackends", "/v1/rollouts/r9/tokens", "/metrics"])
async def test_the_server_is_not_steered_below_the_url_of_a_rollout(
    http: aiohttp.ClientSession, url: str, path: str
) -> None:
    """An agent is handed that, and no more."""
    for below in (f"{url}/ng-rollout/r9", f"{url}/ng-rollout/r9/training-token-capture"):
        async with http.get(URL(below + path, encoded=True)) as response:
            assert response.status == 404
            assert (await response.json())["detail"] == "it does not answer below the URL of a rollout"


async def test_previous_response_id_continues_with_what_is_new(http: aiohttp.ClientSession, url: str) -> None:
    headers = {"X-Rollout-Id": "r1", "X-Rollout-Tokens": "deferred"}
    first = await respond(http, url, [{"role": "user", "content": "Hello"}], headers=headers)
    assert "prompt_token_ids" not in first["output"][-1]
    more = {"headers": headers, "previous_response_id": first["id"]}
    second = await respond(http, url, [{"role": "user", "content": "More"}], **more)
    async with http.get(f"{url}/v1/rollouts/r1/tokens") as response:
        tokens = await response.json()
    (sequence,) = tokens["sequences"]
    assert len(sequence["ids"]) == len(sequence["mask"]) == len(sequence["log_probs"])
    assert sum(sequence["mask"]) == 32
    assert tokens["answers"][first["id"]]["end"] < tokens["answers"][second["id"]]["start"]


async def post(http: aiohttp.ClientSession, url: str, body: dict) -> tuple[int, dict]:
    async with http.post(url, json=body) as response:
        return response.status, await response.json()


async def test_chat_completions_and_messages_reach_the_same_policy(http: aiohttp.ClientSession, url: str) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    status, chat = await post(http, f"{url}/v1/chat/completions", {"messages": asked, "max_tokens": 4})
    assert status == 200
    message = chat["choices"][0]["message"]
    assert len(message["generation_token_ids"]) == chat["usage"]["completion_tokens"] <= 4
    asked += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "More"}]
    _, more = await post(http, f"{url}/v1/chat/completions", {"messages": asked, "max_tokens": 4})
    chain = message["prompt_token_ids"] + message["generation_token_ids"]
    assert more["choices"][0]["message"]["prompt_token_ids"][: len(chain)] == chain
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    status, anthropic = await post(http, f"{url}/v1/messages", body)
    assert (status, anthropic["role"]) == (200, "assistant")


async def test_what_cannot_be_done_is_refused_by_name(http: aiohttp.ClientSession, url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    wrong: list[tuple[str, dict]] = [
        ("n", {"n": 2}),
        ("tool_choice", {"tool_choice": "required"}),
        ("metadata.extra_body", {"metadata": {"extra_body": "{"}}),
        ("metadata.chat_template_kwargs", {"metadata": {"chat_template_kwargs": "[]"}}),
        # What only the engine knows, in its own words.
        ("request", {"top_p": 7.0}),
        ("request", {"metadata": {"extra_body": '{"min_tokens": -3}'}}),
    ]
    for field, change in wrong:
        status, problem = await post(http, f"{url}/v1/chat/completions", body | change)
        assert (status, problem["type"]) == (422, "urn:nemo-gym-prorl:problem:invalid-request")
        assert problem["errors"][0]["field"] == field
    async with http.get(f"{url}/v1/backends") as response:
        assert [backend["health"] for backend in (await response.json())["backends"]] == ["up"]


async def test_what_the_deployment_must_mend_is_no_fault_of_the_row(
    http: aiohttp.ClientSession, engine_url: str, model_folder: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    model = server(engine_url, model_folder, model="nope")
    async with serving(model.setup_webserver()) as url, http.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 500
        assert response.headers["X-ProRL-Failure-Kind"] == "provider_unavailable"
        assert response.content_type == "application/problem+json"
        assert "policy_model_name: " in (await response.json())["detail"]


async def test_a_row_without_a_limit_samples_into_what_is_left_of_the_context(
    http: aiohttp.ClientSession, url: str
) -> None:
    """Not 16 tokens, at which vLLM's completions stop if nobody says a number; nor an error if it is too large."""
    unending = {"metadata": {"extra_body": '{"ignore_eos": true}'}, "temperature": 1.0, "tools": TOOLS}
    asked = [{"role": "user", "content": "box " * 4000}]
    body = {"input": asked, **unending, "max_output_tokens": 1}
    async with http.post(f"{url}/v1/responses", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        prompt = answer["usage"]["input_tokens"]
    assert prompt < 8192 - 32
    for limit in ({}, {"max_output_tokens": 5000}):
        async with http.post(f"{url}/v1/responses", json={"input": asked, **unending, **limit}) as response:
            answer = await response.json()
            assert response.status == 200, answer
        assert answer["usage"]["total_tokens"] == 8192
        assert answer["usage"]["output_tokens"] == 8192 - prompt > 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        # Gym calls responses() here without a response on which to set a header, as all its dispatchers since 0.5 do.
        ("/v1/messages", {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_deferral_is_echoed_exactly_when_the_ids_are_left_out(
    http: aiohttp.ClientSession, path: str, body: dict
) -> None:
    config = ScriptedConfig()
    async with scripted(config) as engine:
        model = server(engine, Path(), model=config.model, policy={})
        async with serving(model.setup_webserver()) as url:
            for asked in ("deferred", None):
                headers = {"X-Rollout-Id": f"r-{asked}"} | ({"X-Rollout-Tokens": asked} if asked else {})
                async with http.post(f"{url}{path}", json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    assert response.headers.get("X-Rollout-Tokens") == asked
                    if path != "/v1/messages":
                        assert ("generation_token_ids" in await response.text()) == (asked is None)
                async with http.get(f"{url}/v1/rollouts/r-{asked}/tokens") as response:
                    assert sum((await response.json())["sequences"][0]["mask"]) > 0


async def test_what_our_agent_defers_is_in_its_finished_row(http: aiohttp.ClientSession) -> None:
    client, config = HttpClient(), ScriptedConfig()
    async with scripted(config) as engine:
        model = server(engine, Path(), model=config.model, policy={})
        async with serving(model.setup_webserver()) as url:
            conversation = Conversation(GymServer("policy_model", Address(url), client), "r", "g")
            turns = [await conversation.turn({}, [{"role": "user", "content": text}]) for text in ("hi", "and?")]
            await conversation.settle()
            await conversation.forget()
            items = [item for turn in turns for item in turn["output"]]
            async with http.get(f"{url}/v1/rollouts/r/tokens") as response:
                assert response.status == 410, "it is over, so it is forgotten"
    await client.close()
    first, second = items
    chain = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(chain)] == chain
    for item in items:
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0


def test_a_drop_in_takes_the_keys_of_gyms_own(model_folder: Path) -> None:
    keys = {"uses_interleaved_reasoning": True, "sequential_reasoning_allowed": True, "is_responses_native": False}
    assert server("http://127.0.0.1:1", model_folder, **keys).setup_webserver()


async def test_a_malformed_call_is_flagged_and_answered_like_any_other(http: aiohttp.ClientSession) -> None:
    """An engine that writes broken arguments: the agent gets a call that it cannot carry out, not an error."""
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions")
    async def answer() -> dict:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"what": '}}
        message = {"role": "assistant", "content": None, "tool_calls": [call], "prompt_token_ids": [1]}
        logged = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
        return {"choices": [{"message": message, "logprobs": logged, "finish_reason": "tool_calls"}]}

    async with serving(app) as engine:
        model = server(engine, Path(), policy={"engine": "vllm_chat"})
        async with serving(model.setup_webserver()) as address:
            answered = await respond(http, address, [{"role": "user", "content": "?"}])
    (item,) = answered["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "look", "incomplete")
    assert item["arguments"] == '{"what": '
    assert item["generation_token_ids"] == [7]


@pytest.mark.parametrize("arguments", ['{"what": ', "look", "[1]", ""])
async def test_a_malformed_or_cut_call_is_an_input_of_the_messages_api(
    http: aiohttp.ClientSession, arguments: str
) -> None:
    """There it is an object, whatever the policy wrote; and the conversation goes on behind it."""
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions")
    async def answer(asked: dict = Body()) -> dict:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        later = len(asked["messages"]) > 1
        message = {"role": "assistant", "content": "ok" if later else None, "tool_calls": [] if later else [call]}
        message["prompt_token_ids"] = [1, 7, 2] if later else [1]
        logged = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
        return {"choices": [{"message": message, "logprobs": logged, "finish_reason": "length"}]}

    body: dict = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    async with (
        serving(app) as engine,
        serving(server(engine, Path(), policy={"engine": "vllm_chat"}).setup_webserver()) as address,
    ):
        for expected in ("tool_use", "text"):
            async with http.post(f"{address}/v1/messages", json=body, headers={"X-Rollout-Id": "r"}) as response:
                said = await response.json()
                assert response.status == 200, said
            (block,) = said["content"]
            assert block["type"] == expected
            if expected == "tool_use":
                assert block["input"] == ({"malformed": arguments} if arguments else {})
            result = {"type": "tool_result", "tool_use_id": block.get("id"), "content": "no"}
            body["messages"] += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": [result]},
            ]
        async with http.get(f"{address}/v1/rollouts/r/tokens") as response:
            assert len((await response.json())["sequences"]) == 1


async def test_a_caller_that_hangs_up_stops_its_engine(http: aiohttp.ClientSession, url: str, engine_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4000}
    endless = body | {"metadata": {"extra_body": '{"ignore_eos": true}'}}
    asking = asyncio.create_task(post(http, f"{url}/v1/chat/completions", endless))
    await until_running(http, engine_url, 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until_running(http, engine_url, 0)


async def until_running(http: aiohttp.ClientSession, url: str, count: int) -> None:
    async with asyncio.timeout(60):
        while "num_requests_running" not in (text := await metrics(http, url)) or running(text) != count:
            await asyncio.sleep(0.02)


async def metrics(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/metrics") as response:
        return await response.text()


def running(text: str) -> float:
    return sum(map(float, re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)))


DEEP = b"[" * 3000 + b"]" * 3000
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = b'"messages": [{"role": "user", "content": "hi"}]'
NONSENSE = {
    "text": (RESPONSES, b"hello"),
    "nothing": (RESPONSES, b""),
    "no object": (RESPONSES, b"[]"),
    "nothing in it": (RESPONSES, b"{}"),
    "no UTF-8": (RESPONSES, b'{"input": "\xff\xfe"}'),
    "deep": (RESPONSES, DEEP),
    "deep input": (RESPONSES, b'{"input": %s}' % DEEP),
    "deep schema of a tool": (
        CHAT,
        b'{%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]}' % (ASKED, DEEP),
    ),
    "300 deep schema of a tool": (
        CHAT,
        b'{%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]}'
        % (ASKED, b"[" * 300 + b"]" * 300),
    ),
    "a tool without a name": (CHAT, b'{%s, "tools": [{"type": "function", "function": {}}]}' % ASKED),
    "a tool without anything": (CHAT, b'{%s, "tools": [{}]}' % ASKED),
    "a tool of Responses without a name": (RESPONSES, b'{"input": "hi", "tools": [{"type": "function"}]}'),
    "half a character": (RESPONSES, b'{"input": "\\ud800"}'),
    "half a character in chat": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "half a character in a tool": (
        CHAT,
        b'{%s, "tools": [{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]}' % ASKED,
    ),
    "template variables as text": (CHAT, b'{%s, "chat_template_kwargs": "x"}' % ASKED),
    "a number as a stop": (MESSAGES, b'{"model": "m", "max_tokens": 9, %s, "stop_sequences": 5}' % ASKED),
    "stops by name": (MESSAGES, b'{"model": "m", "max_tokens": 9, %s, "stop_sequences": {"a": 1}}' % ASKED),
    "no messages": (MESSAGES, b"{}"),
    "messages as text": (MESSAGES, b'{"messages": "hi"}'),
    "deep messages": (MESSAGES, b'{"messages": %s}' % DEEP),
    "a backend as text": ("/v1/backends", b"http://127.0.0.1:1"),
    "a backend that is no URL": ("/v1/backends", b'{"url": "not a url"}'),
    "a backend with a deep name": ("/v1/backends", b'{"url": %s}' % DEEP),
}


@pytest.mark.parametrize("engine", ["vllm_chat", "vllm"])
async def test_nonsense_is_answered_with_a_problem_document(
    http: aiohttp.ClientSession, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tokenizer of two words has too few for a rehearsal.
    monkeypatch.setattr("nemo_gym_prorl.policy.host.validate_template", lambda *_, **__: FORMATS["hermes"])
    words_in(tmp_path, "hi", "?", template="{{ messages[0].content }}{{ tools | tojson if tools }}")
    policy, headers = {"engine": engine, "tokenizer": str(tmp_path)}, {"Content-Type": "application/json"}
    async with scripted() as upstream:
        model = server(upstream, tmp_path, model=ScriptedConfig().model, policy=policy)
        async with serving(model.setup_webserver()) as url:
            for name, (path, body) in NONSENSE.items():
                async with http.post(url + path, data=body, headers=headers) as said:
                    problem = await said.json(content_type=None)
                    assert said.status in (400, 422), (name, problem)
                    assert said.content_type == "application/problem+json"
                    assert problem["type"].startswith("urn:nemo-gym-prorl:problem:")
                    assert problem["title"]
                    assert problem["status"] == said.status


async def test_with_a_key_every_route_needs_it(http: aiohttp.ClientSession) -> None:
    async with scripted() as engine:
        policy = {"control_token": "s3cret"}
        model = server(engine, Path(), model=ScriptedConfig().model, host="0.0.0.0", policy=policy)
        async with serving(model.setup_webserver()) as url:
            asked = {"json": {"input": "hi"}, "headers": {"X-Rollout-Id": "r", "Authorization": "Bearer s3cret"}}
            async with http.post(f"{url}/v1/responses", **asked) as response:
                assert response.status == 200
            routes = [("POST", RESPONSES), ("POST", CHAT), ("POST", MESSAGES), ("GET", "/metrics")]
            routes += [
                ("GET", "/v1/rollouts/r/tokens"),
                ("DELETE", "/v1/rollouts/r"),
                ("GET", "/v1/rollouts/r/waited"),
            ]
            routes += [("POST", "/v1/backends"), ("GET", "/v1/backends"), ("DELETE", "/v1/backends/backend0")]
            for key in ({}, {"Authorization": "Bearer guess"}):
                for method, path in routes:
                    async with http.request(method, url + path, json={}, headers=key) as response:
                        assert (response.status, response.content_type) == (401, "application/problem+json")


def test_without_a_key_nobody_else_can_reach_it(model_folder: Path) -> None:
    with pytest.raises(CallerError, match=r"policy\.control_token: the server would listen on 0\.0\.0\.0"):
        server("http://127.0.0.1:1", model_folder, host="0.0.0.0").setup_webserver()


def test_workers_of_earlier_versions_are_refused_with_what_to_configure() -> None:
    with pytest.raises(CallerError, match=r"^num_workers: must be 1: .* the agent's further_model_servers"):
        server("http://127.0.0.1:1", Path(), num_workers=4).setup_webserver()


async def test_backends_are_added_as_the_configuration_allows(http: aiohttp.ClientSession) -> None:
    async with scripted() as engine:
        model = server(engine, Path(), model=ScriptedConfig().model, policy={"backend_hosts": ["gpu*"]})
        async with serving(model.setup_webserver()) as url:
            bodies = [({"url": "http://gpu7:8000/v1", "api_key": "k"}, 201), ({"url": "http://evil:8000/v1"}, 403)]
            for body, status in bodies:
                said, problem = await post(http, f"{url}/v1/backends", body)
                assert said == status
                assert "api_key" not in problem
            assert problem["type"] == "urn:nemo-gym-prorl:problem:backend-host-refused"
            assert "policy.backend_hosts" in problem["detail"]
