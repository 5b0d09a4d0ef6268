# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The scripted policy: its scripts, and its routes over HTTP as a client of vLLM sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest

from nemo_gym_prorl.cli.scripted import text
from nemo_gym_prorl.cli.scripted.server import ScriptedConfig, serve
from nemo_gym_prorl.cli.scripted.text import END_OF_TURN, MODEL_NAME, ScriptError


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ("nonsense", "metadata.script"),
        ('{"turns": [{}, {"tool_calls": [{}]}]}', "metadata.script.turns[1].tool_calls[0].name"),
        ('{"turns": [{"text": "x"}]}', "metadata.script.turns[0].text"),
    ],
)
def test_a_malformed_script_is_refused_by_field(script, field):
    with pytest.raises(ScriptError) as error:
        text.parse_script(script)
    assert error.value.field == field


SCRIPT = orjson.dumps(
    {
        "turns": [
            {
                "content": "Both at once.",
                "tool_calls": [
                    {"name": "bash", "arguments": {"command": "ls"}},
                    {"name": "python", "arguments": {"code": "print(1)"}},
                ],
            },
            {"content": None, "tool_calls": [{"name": "submit", "arguments": "{}"}]},
        ]
    }
).decode()
QUESTION = {"role": "user", "content": "What is there?"}


class Client:
    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self.session = session
        self.root = base_url.removesuffix("/v1")

    async def post(self, path: str, body: object) -> dict:
        async with self.session.post(self.root + path, data=orjson.dumps(body)) as response:
            answer = orjson.loads(await response.read())
            assert response.status == 200, answer
            return answer

    async def chat(self, messages: list[dict], **fields: object) -> dict:
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serve(ScriptedConfig(max_model_len=2000)) as base_url, aiohttp.ClientSession() as session:
        yield Client(session, base_url)


def observed(message: dict) -> list[dict]:
    """Return the message and a result for each of its calls."""
    return [
        message,
        *({"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in message["tool_calls"]),
    ]


async def test_a_rollout_is_played_turn_by_turn_with_chained_tokens(client):
    messages, chain = [QUESTION], []
    want = {
        "metadata": {"script": SCRIPT},
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    names = []
    for finish_reason in ("tool_calls", "tool_calls", "stop"):
        answer = await client.chat(messages, **want)
        choice = answer["choices"][0]
        assert answer["model"] == answer["system_fingerprint"] == MODEL_NAME
        assert choice["finish_reason"] == finish_reason
        assert answer["prompt_token_ids"][: len(chain)] == chain
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)
        assert choice["token_ids"][-1] == END_OF_TURN
        names.append([call["function"]["name"] for call in choice["message"]["tool_calls"]])
        chain = answer["prompt_token_ids"] + choice["token_ids"]
        messages += observed(choice["message"])
    assert names == [["bash", "python"], ["submit"], []]
    assert "script of 2 turn(s) has ended" in messages[-1]["content"]


async def test_tokenize_and_a_cut_answer_agree_with_chat(client):
    chat = await client.chat([QUESTION], metadata={"script": SCRIPT}, return_token_ids=True)
    tokenized = await client.post("/tokenize", {"messages": [QUESTION]})
    assert tokenized["tokens"] == chat["prompt_token_ids"]
    cut = await client.chat([QUESTION], metadata={"script": SCRIPT}, max_tokens=4, return_token_ids=True)
    (choice,) = cut["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Both", "tool_calls": []}
    assert (choice["finish_reason"], bytes(choice["token_ids"])) == ("length", b"Both")
