# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A model that thinks, three turns on each route: one chain of tokens, whatever form a thought comes back in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate
from responses_api_models.prorl_model.app import ChatRequest
from tests.policy.families import FAMILIES, TEMPLATES, TOOLS
from tests.policy.hosts import server
from tests.policy.test_engines import completion, says
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve as serving


THINKING = (TEMPLATES / "thinking.jinja").read_text()
CALL = FAMILIES["thinking"].call
FUNCTION = TOOLS[0]["function"]


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A model server before an engine that thinks and calls twice, and then answers."""
    tokenizer = tokenizer_of("bytes", THINKING, "<|im_end|>")
    tokenizer._fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    texts = iter([f"<think>\nhm {turn}\n</think>\n\n{CALL % turn}<|im_end|>" for turn in (1, 2)] + ["Done.<|im_end|>"])

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if not body["max_tokens"] > 1:
            return completion(token_ids=[0], logprobs={"token_logprobs": [-0.5]})
        ids = tokenizer.encode(next(texts))
        return completion(token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)})

    policy = {"engine": "vllm", "tokenizer": str(tmp_path)}
    async with (
        serving(says("/v1/completions", answer)) as engine,
        serving(server(engine, tmp_path, policy=policy).setup_webserver()) as at,
    ):
        yield at


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body, headers={"X-Rollout-Id": "r"}) as response:
        said = await response.json()
        assert response.status == 200, said
    return dict(said)


async def _one_chain(http: aiohttp.ClientSession, url: str) -> None:
    async with http.get(f"{url}/v1/rollouts/r/tokens") as response:
        told = await response.json()
    assert len(told["sequences"]) == 1
    assert len(told["answers"]) == 3
    assert not any(told["counts"].values()), told["counts"]


async def test_messages_take_their_own_thinking_blocks_back(url: str) -> None:
    """Their signature is empty, since no open model signs; Claude Code sends that back on its second turn."""
    tool = {"name": "look", "description": "", "input_schema": FUNCTION["parameters"]}
    body: dict[str, Any] = {"model": "m", "max_tokens": 999, "tools": [tool]}
    body["messages"] = [{"role": "user", "content": "?"}]
    async with aiohttp.ClientSession() as http:
        for kinds in (["thinking", "tool_use"], ["thinking", "tool_use"], ["text"]):
            said = await _post(http, f"{url}/v1/messages", body)
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
        await _one_chain(http, url)


@pytest.mark.parametrize("form", ["content", "reasoning", "reasoning_content", "dropped"])
async def test_chat_completions_take_a_thought_under_every_name(url: str, form: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    async with aiohttp.ClientSession() as http:
        for turn in (1, 2, 3):
            said = await _post(
                http, f"{url}/v1/chat/completions", {"messages": messages, "tools": TOOLS, "max_tokens": 999}
            )
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
        await _one_chain(http, url)


def test_a_thought_of_somebody_else_is_shown_to_the_policy() -> None:
    """Under both names, as vLLM 0.32 gives it to templates."""
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}[{{ m.reasoning }}|{{ m.reasoning_content }}]{% endfor %}"
    )
    tokenizer = tokenizer_of("bytes", "<|end|>")
    renderer = Renderer(tokenizer, ChatTemplate(template))
    own = {"role": "assistant", "content": "So.", "reasoning": "hm"}
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}, own]})
    prompt = renderer.first(asked.model_dump(exclude_unset=True)["messages"])
    assert tokenizer.decode(prompt.ids) == "user?[|]assistantSo.[hm|hm]"


@pytest.mark.parametrize("cut", ["", "\n</parameter>\n"], ids=["in a value", "behind a parameter"])
@pytest.mark.parametrize("route", ["responses", "chat/completions", "messages"])
async def test_a_call_that_the_token_limit_cut_off_is_complete_on_no_route(
    tmp_path: Path, route: str, cut: str
) -> None:
    """`rm -rf /data/old-backups` must not arrive as `rm -rf /data/old`, nor without the parameters after it."""
    xml = (TEMPLATES / "xml.jinja").read_text()
    tokenizer = tokenizer_of("bytes", xml, "<|im_end|>")
    tokenizer._fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(xml)
    ids = tokenizer.encode(f"<tool_call>\n<function=look>\n<parameter=what>\nrm -rf /data/old{cut}")
    said = completion(token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)}, finish_reason="length")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "max_tokens": len(ids)}
    if route == "responses":
        tool = {"type": "function", "strict": False, **FUNCTION}
        asked = {"input": asked["messages"], "tools": [tool], "max_output_tokens": len(ids)}
    if route == "messages":
        asked |= {"model": "m", "tools": [{"name": "look", "description": "", "input_schema": FUNCTION["parameters"]}]}
    async with serving(says("/v1/completions", lambda _: said)) as engine, aiohttp.ClientSession() as http:
        model = server(engine, tmp_path, policy={"engine": "vllm", "tokenizer": str(tmp_path)})
        async with serving(model.setup_webserver()) as url:
            answer = await _post(http, f"{url}/v1/{route}", asked)
    match route:
        case "responses":
            (item,) = answer["output"]
            assert item["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            arguments = item["arguments"]
        case "messages":
            (block,) = answer["content"]
            assert answer["stop_reason"] == "max_tokens"
            assert list(block["input"]) == ["malformed"]
            return
        case _:
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "length"
            arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
