# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The trained branch of a program's rollout as a Gym response, over a real model server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

from tests.policy.families import TOOLS
from tests.policy.test_prorl_model import assert_chain, modelled, post, tokens_of


CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "box"}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "look", "arguments": {"what'


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


async def traces_of(http: aiohttp.ClientSession, url: str, status: int = 200) -> Any:
    async with http.get(f"{url}/v1/rollouts/r/traces") as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_all_that_a_branch_holds_is_written_as_gym_writes_it(tmp_path: Path) -> None:
    """Reasoning, text, calls, a call that was cut, observations and later user messages, sent over chat."""
    texts = iter([f"<think>Hm.</think>Let me see.{CALL}", f"And.{CUT}", "Done."])
    asked: list[dict[str, Any]] = [message("system", "Be an agent."), message("user", "Open the box.")]
    async with modelled(tmp_path, texts) as (url, _), aiohttp.ClientSession() as http:
        await traces_of(http, url, 410)
        for more in (
            [message("user", [{"type": "text", "text": "Look again."}])],  # type: ignore[arg-type]
            [message("user", "And?")],
            [],
        ):
            body = {"messages": asked, "tools": TOOLS}
            answer = await post(http, f"{url}/v1/chat/completions", body, X_Rollout_Id="r")
            said = answer["choices"][0]["message"]
            results = [
                {**message("tool", f"result {place}"), "tool_call_id": call["id"]}
                for place, call in enumerate(said.get("tool_calls") or ())
            ]
            asked += [said, *results, *more]
        told, tokens = await traces_of(http, url), await tokens_of(http, url)

    response = told["response"]
    kinds = [(item["type"], item.get("role") or item.get("status")) for item in response["output"][1:]]
    turn = [("message", "assistant"), ("function_call", "completed")]
    assert response["output"][0]["type"] == "reasoning"
    observed = [("function_call_output", None), ("message", "user")]
    cut = [("message", "assistant"), ("function_call", "incomplete")]
    assert kinds == [*turn, *observed, *cut, *observed, ("message", "assistant")]
    read = NeMoGymResponse.model_validate(response)
    for item, written in zip(response["output"], read.model_dump(by_alias=True)["output"], strict=True):
        assert item == {name: written[name] for name in item}
    asked_for = NeMoGymResponseCreateParamsNonStreaming(input=told["input"], tools=response["tools"])
    assert [item.role for item in asked_for.input] == ["system", "user"]  # type: ignore[union-attr]
    turns = [item for item in response["output"] if "generation_token_ids" in item]
    assert [response["output"].index(item) for item in turns] == [2, 6, 9]
    assert_chain(turns)
    [sequence] = tokens["sequences"]
    assert turns[-1]["prompt_token_ids"] + turns[-1]["generation_token_ids"] == sequence["ids"]
    log_probs = [one for item in turns for one in item["generation_log_probs"]]
    assert log_probs == [one for one, on in zip(sequence["log_probs"], sequence["mask"], strict=True) if on]
    assert told["tool_calls"] == 2
    assert [(step["items"], step["output_tokens"]) for step in told["steps"]] == [
        (items, len(turn["generation_token_ids"])) for items, turn in zip((3, 2, 1), turns, strict=True)
    ]
    usage = response["usage"]
    assert usage["input_tokens"] == sum(len(item["prompt_token_ids"]) for item in turns)
    assert usage["output_tokens"] == len(log_probs)
    assert told["training_traces"] is None, "the response has all tokens"
    assert [branch["role"] for branch in told["branches"]] == ["main"]
