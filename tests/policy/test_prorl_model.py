# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The model server: identification of rollouts, agents' messages, malformed calls, errors and keys."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import Response
from nemo_gym import base_responses_api_model
from yarl import URL

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as scripted
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate
from nemo_gym_prorl.servers.model_server import ChatRequest
from tests.policy.families import FAMILIES, TEMPLATES
from tests.policy.families import TOOLS as LOOK
from tests.policy.runtimes import server
from tests.policy.scripted_engine import ScriptedEngine, saved, says
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve as serving


TOOLS = [{"type": "function", **LOOK[0]["function"], "strict": None}]
GYM_RECORDS = hasattr(base_responses_api_model, "install_model_call_capture")
TOKEN_FIELDS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}
CHATML, THINKING, XML = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("chatml", "thinking", "xml"))
BYTES = tokenizer_of("bytes", CHATML, THINKING, XML, "<|im_end|>")


@contextlib.asynccontextmanager
async def modelled(
    folder: Path,
    texts: Iterator[str] | None = None,
    template: str = CHATML,
    finish: str = "stop",
    **deployment: object,
) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    """Yield the URL of a model server, and its engine, which answers these texts."""
    engine = ScriptedEngine(BYTES, texts, finish=finish)
    policy = {"engine": "vllm", "tokenizer": saved(folder, BYTES, template)}
    async with serving(engine.app()) as upstream:
        model = server(upstream, folder, deployment, policy=policy)
        async with serving(model.setup_webserver()) as url:
            yield url, engine


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with modelled(tmp_path) as (address, _):
        yield address


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any, status: int = 200, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(url, json=body, headers=named) as response:
        said = await response.json()
        assert response.status == status, said
    return said


async def tokens_of(http: aiohttp.ClientSession, url: str, rollout: str = "r") -> Any:
    async with http.get(f"{url}/v1/rollouts/{rollout}/tokens") as response:
        assert response.status == 200, await response.text()
        return await response.json()


def assert_chain(turns: list[dict[str, Any]]) -> None:
    for earlier, later in itertools.pairwise(turns):
        sequence = earlier["prompt_token_ids"] + earlier["generation_token_ids"]
        assert later["prompt_token_ids"][: len(sequence)] == sequence


# Which rollout a request belongs to


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_url_is_a_rollout_on_all_three_routes(recorded: bool, tmp_path: Path) -> None:
    """Callers know only their base URL and send no cookie, header or token ids.

    If Gym records calls, requests go through Gym's application.
    """
    deployment = {"observability_enabled": True, "model_call_capture_dir": str(tmp_path)} if recorded else {}
    deployment |= {"token_id_capture": {"enabled": recorded, "dir": str(tmp_path)}}

    async def said(rollout: str, route: str, **body: object) -> Any:
        async with aiohttp.ClientSession() as http:
            return await post(http, f"{url}{rollout}/v1/{route}", body)

    async with modelled(tmp_path, **deployment) as (url, _):
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
        more = {"context_management": kept}
        await said(one, "messages", model="tiny", messages=asked, max_tokens=4, **more)
        await said(another, "messages", model="tiny", messages=asked[:1], max_tokens=4)
        async with aiohttp.ClientSession() as http:
            tokens = await tokens_of(http, url, "0-1")
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


@pytest.mark.parametrize("path", ["/v1/backends", "/v1/%62ackends", "/v1/rollouts/r9/tokens", "/metrics"])
async def test_the_server_is_not_steered_below_the_url_of_a_rollout(
    http: aiohttp.ClientSession, url: str, path: str
) -> None:
    """Agents receive this URL."""
    for below in (f"{url}/ng-rollout/r9", f"{url}/ng-rollout/r9/training-token-capture"):
        async with http.get(URL(below + path, encoded=True)) as response:
            assert response.status == 404
            assert (await response.json())["detail"] == "control routes do not answer below the URL of a rollout"


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


# What agents send back

THINKS = "<think>\nhm\n</think>\n\n"
BLANK = "<think></think>"
NOTHING = ""
CALLS = '<think>\nso\n</think>\n\n\n<tool_call>\n{"name": "look", "arguments": {"what": "box"}}\n</tool_call>'
ODD = [THINKS, BLANK, NOTHING, CALLS]


class Simple:
    """Agent like Gym's ``simple_agent`` that sends no ids: results for calls, and otherwise asks on."""

    def __init__(self, http: aiohttp.ClientSession, url: str, name: str) -> None:
        self._http = http
        self._url, self._name = f"{url}/v1/responses", name
        self._said: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "?"}]
        self.turns: list[dict[str, Any]] = []

    async def step(self) -> None:
        body = {"input": self._said, "tools": TOOLS, "max_output_tokens": 64}
        output = (await post(self._http, self._url, body, X_Rollout_Id=self._name))["output"]
        self.turns += [item for item in output if item.get("generation_token_ids")]
        self._said += [{k: v for k, v in item.items() if k not in TOKEN_FIELDS} for item in output]
        for item in output:
            if item["type"] == "function_call":
                self._said.append({"type": "function_call_output", "call_id": item["call_id"], "output": "a frog"})


async def test_odd_turns_stay_in_the_chain(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Empty and reasoning-only turns stay in one chain or count as ambiguous; no sampled token is tokenised again."""
    scripts = list(itertools.permutations(ODD, 3))
    texts = (f"{text}<|im_end|>" for script in scripts for text in (CALLS, *script, CALLS, "the end"))
    async with modelled(tmp_path, texts, THINKING) as (url, _):
        for index, script in enumerate(scripts):
            agent = Simple(http, url, f"r{index}")
            for _ in range(6):
                await agent.step()
            tokens = await tokens_of(http, url, f"r{index}")
            doubtful = len(tokens["sequences"]) > 1 or tokens["counts"]["ambiguous"]
            # A turn in which there is nothing to see may be any of those that look so.
            assert not doubtful or {BLANK, NOTHING} & set(script)
            if not doubtful:
                assert_chain(agent.turns)
            assert tokens["counts"]["retokenised"] == 0
            sampled = sum(len(turn["generation_token_ids"]) for turn in agent.turns)
            assert sum(sum(sequence["mask"]) for sequence in tokens["sequences"]) == sampled


def thinking() -> Iterator[str]:
    """Yield turns with reasoning and a call twice, and then an answer."""
    for turn in (1, 2):
        yield f"<think>\nhm {turn}\n</think>\n\n{FAMILIES['thinking'].call % turn}<|im_end|>"
    yield "Done.<|im_end|>"


async def assert_straight(http: aiohttp.ClientSession, url: str) -> None:
    told = await tokens_of(http, url)
    assert (len(told["sequences"]), len(told["answers"])) == (1, 3)
    assert not any(told["counts"].values()), told["counts"]


async def test_messages_take_their_own_thinking_blocks_back(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Claude Code returns thinking blocks with the empty signature that it received."""
    tool = {"name": "look", "description": "", "input_schema": LOOK[0]["function"]["parameters"]}
    body: dict[str, Any] = {"model": "m", "max_tokens": 999, "tools": [tool]}
    body["messages"] = [{"role": "user", "content": "?"}]
    async with modelled(tmp_path, thinking(), THINKING) as (url, _):
        for kinds in (["thinking", "tool_use"], ["thinking", "tool_use"], ["text"]):
            said = await post(http, f"{url}/v1/messages", body, X_Rollout_Id="r")
            assert [block["type"] for block in said["content"]] == kinds
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
                for block in said["content"]
                if block["type"] == "tool_use"
            ]
            body["messages"] += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": results},
            ]
        await assert_straight(http, url)


@pytest.mark.parametrize("form", ["content", "reasoning", "reasoning_content", "dropped"])
async def test_chat_completions_take_a_thought_under_every_name(
    http: aiohttp.ClientSession, tmp_path: Path, form: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    async with modelled(tmp_path, thinking(), THINKING) as (url, _):
        for turn in (1, 2, 3):
            body = {"messages": messages, "tools": LOOK, "max_tokens": 999}
            said = await post(http, f"{url}/v1/chat/completions", body, X_Rollout_Id="r")
            message = {name: said["choices"][0]["message"].get(name) for name in ("role", "content", "tool_calls")}
            if turn == 3:
                assert message["content"] == "Done."
                break
            thought, _, rest = str(message["content"]).removeprefix("<think>").partition("</think>")
            assert thought.strip() == f"hm {turn}"
            if form != "content":
                message["content"] = rest.strip()
            if form in ("reasoning", "reasoning_content"):
                message[form] = thought
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"}
            messages += [message, result]
        await assert_straight(http, url)


def test_a_thought_of_somebody_else_is_shown_to_the_policy() -> None:
    """The template sees reasoning under both names, as in vLLM."""
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}[{{ m.reasoning }}|{{ m.reasoning_content }}]{% endfor %}"
    )
    renderer = Renderer(BYTES, ChatTemplate(template))
    own = {"role": "assistant", "content": "So.", "reasoning": "hm"}
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}, own]})
    prompt = renderer.render_prompt(asked.model_dump(exclude_unset=True)["messages"])
    assert BYTES.decode(prompt.ids) == "user?[|]assistantSo.[hm|hm]"


# Malformed and cut calls


@pytest.mark.parametrize("cut", ["", "\n</parameter>\n"], ids=["in a value", "behind a parameter"])
@pytest.mark.parametrize("route", ["responses", "chat/completions", "messages"])
async def test_a_call_that_the_token_limit_cut_off_is_complete_on_no_route(
    http: aiohttp.ClientSession, tmp_path: Path, route: str, cut: str
) -> None:
    """`rm -rf /data/old-backups` must not arrive as `rm -rf /data/old`, nor without the parameters after it."""
    text = f"<tool_call>\n<function=look>\n<parameter=what>\nrm -rf /data/old{cut}"
    asked, function = [{"role": "user", "content": "?"}], LOOK[0]["function"]
    bodies: dict[str, dict[str, Any]] = {
        "responses": {"input": asked, "tools": TOOLS},
        "chat/completions": {"messages": asked, "tools": LOOK},
        "messages": {"model": "m", "max_tokens": 99, "messages": asked}
        | {"tools": [{"name": "look", "description": "", "input_schema": function["parameters"]}]},
    }
    async with modelled(tmp_path, iter([text]), XML, "length") as (url, _):
        answer = await post(http, f"{url}/v1/{route}", bodies[route])
    if route == "messages":
        (block,) = answer["content"]
        assert (answer["stop_reason"], list(block["input"])) == ("max_tokens", ["malformed"])
        return
    if route == "responses":
        (item,) = answer["output"]
        assert (item["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        arguments = item["arguments"]
    else:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


# Whose fault an error is


async def test_what_the_deployment_must_mend_is_no_fault_of_the_row(http: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    locked = says("/v1/chat/completions", lambda _: Response("what?", 404), published=False)
    async with serving(locked) as engine:
        model = server(engine, Path(), model="nope", policy={"engine": "vllm_chat"})
        async with serving(model.setup_webserver()) as url, http.post(f"{url}/v1/chat/completions", json=body) as said:
            assert (said.status, said.content_type) == (500, "application/problem+json")
            assert said.headers["X-ProRL-Failure-Kind"] == "provider_unavailable"
            assert "policy_model_name: " in (await said.json())["detail"]


DEEP = b"[" * 3000 + b"]" * 3000
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = b'"messages": [{"role": "user", "content": "hi"}]'
NONSENSE = {
    "text": (RESPONSES, b"hello"),
    "no UTF-8": (RESPONSES, b'{"input": "\xff\xfe"}'),
    "deep": (RESPONSES, DEEP),
    "deep schema of a tool": (
        CHAT,
        b'{%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]}' % (ASKED, DEEP),
    ),
    "half a character": (RESPONSES, b'{"input": "\\ud800"}'),
    "template variables as text": (CHAT, b'{%s, "chat_template_kwargs": "x"}' % ASKED),
    "stops by name": (MESSAGES, b'{"model": "m", "max_tokens": 9, %s, "stop_sequences": {"a": 1}}' % ASKED),
    "messages as text": (MESSAGES, b'{"messages": "hi"}'),
    "a backend that is no URL": ("/v1/backends", b'{"url": "not a url"}'),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_is_answered_with_a_problem_document(http: aiohttp.ClientSession, url: str, name: str) -> None:
    path, body = NONSENSE[name]
    async with http.post(url + path, data=body, headers={"Content-Type": "application/json"}) as said:
        problem = await said.json(content_type=None)
        assert said.status in (400, 422), problem
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
            routes += [("GET", "/v1/rollouts/r/tokens"), ("DELETE", "/v1/rollouts/r"), ("POST", "/v1/backends")]
            for key in ({}, {"Authorization": "Bearer guess"}):
                for method, path in routes:
                    async with http.request(method, url + path, json={}, headers=key) as response:
                        assert (response.status, response.content_type) == (401, "application/problem+json")
