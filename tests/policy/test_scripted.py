# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The scripted policy over real HTTP, as a client of vLLM sees it."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest

from nemo_gym_prorl.scripted.server import ScriptedConfig, serve
from nemo_gym_prorl.scripted.text import END_OF_TURN, MODEL_NAME, decode_ids


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
    """A few lines of HTTP around one policy."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self.session = session
        self.root = base_url.removesuffix("/v1")

    async def post(self, path: str, body: object, status: int = 200) -> dict:
        async with self.session.post(self.root + path, data=orjson.dumps(body)) as response:
            answer = orjson.loads(await response.read())
            assert response.status == status, answer
            return answer

    async def chat(self, messages: list[dict], status: int = 200, **fields: object) -> dict:
        return await self.post("/v1/chat/completions", {"messages": messages, **fields}, status)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serve(ScriptedConfig(max_model_len=2000)) as base_url, aiohttp.ClientSession() as session:
        yield Client(session, base_url)


def observed(message: dict) -> list[dict]:
    """The message and a result for each of its calls."""
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


async def test_tokenize_gives_the_prompt_of_the_same_chat_request(client):
    tools = [{"type": "function", "function": {"name": "bash"}}]
    answer = await client.chat([QUESTION], tools=tools, return_token_ids=True)
    tokenized = await client.post("/tokenize", {"messages": [QUESTION], "tools": tools})
    assert tokenized["tokens"] == answer["prompt_token_ids"]
    assert tokenized["count"] == len(tokenized["tokens"])
    assert b"What is there?" in decode_ids(tokenized["tokens"])


async def test_completions_take_and_give_the_same_token_ids_as_chat(client):
    chat = await client.chat([QUESTION], metadata={"script": SCRIPT}, return_token_ids=True)
    body = {
        "prompt": chat["prompt_token_ids"],
        "metadata": {"script": SCRIPT},
        "max_tokens": 500,
        "logprobs": 0,
        "return_token_ids": True,
    }
    raw = (await client.post("/v1/completions", body))["choices"][0]
    assert raw["token_ids"] == chat["choices"][0]["token_ids"]
    assert raw["prompt_token_ids"] == chat["prompt_token_ids"]
    assert raw["text"].startswith("Both at once.\n<tool_call>")
    assert len(raw["logprobs"]["token_logprobs"]) == len(raw["token_ids"])

    observation = b"\n\xfftool\nfine\xfe\n\xffassistant\n"
    body["prompt"] = [*raw["prompt_token_ids"], *raw["token_ids"], *observation]
    second = (await client.post("/v1/completions", body))["choices"][0]
    assert '"submit"' in second["text"]


async def test_without_a_script_it_says_what_it_is(client):
    answer = await client.chat([QUESTION])
    assert MODEL_NAME in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0]


async def test_max_tokens_cuts_the_turn(client):
    answer = await client.chat([QUESTION], metadata={"script": SCRIPT}, max_tokens=4, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "Both", "tool_calls": []}
    assert decode_ids(choice["token_ids"]) == b"Both"


async def test_top_logprobs_lead_with_the_chosen_token(client):
    answer = await client.chat([QUESTION], logprobs=True, top_logprobs=3)
    entry = answer["choices"][0]["logprobs"]["content"][0]
    assert [len(entry["top_logprobs"]), entry["top_logprobs"][0]["token"]] == [3, entry["token"]]
    assert entry["top_logprobs"][1]["logprob"] < entry["logprob"]


async def test_log_probs_depend_on_the_seed_only():
    async def sample(seed: int) -> list[float]:
        async with serve(ScriptedConfig(seed=seed)) as url, aiohttp.ClientSession() as session:
            answer = await Client(session, url).chat([QUESTION], logprobs=True)
            return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]

    assert await sample(1) == await sample(1)
    assert await sample(1) != await sample(2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "maximum context length is 2000 tokens"),
        ({"max_tokens": 1999}, "'max_tokens' or 'max_completion_tokens' is too large"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"n": 2}, "n: "),
        ({"stream": True}, "stream: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot"}]}, "messages[0].role: "),
        ({"metadata": {"script": "{}"}}, "metadata.script: "),
        ({"metadata": {"script": {"turns": []}}}, "metadata.script: "),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs: "),
    ],
)
async def test_a_wrong_request_gets_a_clear_400(client, fields, message):
    answer = await client.post("/v1/chat/completions", {"messages": [QUESTION], **fields}, status=400)
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == 400


async def test_other_wrong_requests(client):
    assert "does not exist" in (await client.chat([QUESTION], model="gpt", status=404))["error"]["message"]
    assert "JSON object" in (await client.post("/tokenize", [1], status=400))["error"]["message"]
    out_of_range = await client.post("/v1/completions", {"prompt": [1, 256]}, status=400)
    assert "[0, 256)" in out_of_range["error"]["message"]
    async with client.session.post(client.root + "/tokenize", data=b"{") as response:
        assert response.status == 400


async def test_models_and_health(client):
    async with client.session.get(client.root + "/v1/models") as response:
        card = (await response.json())["data"][0]
    assert card["id"] == MODEL_NAME
    assert card["max_model_len"] == 2000
    async with client.session.get(client.root + "/health") as response:
        assert response.status == 200


async def test_latency_of_server_and_turn_add_up():
    script = '{"turns": [{"content": "late", "latency_s": 0.1}]}'
    async with serve(ScriptedConfig(latency_s=0.1)) as url, aiohttp.ClientSession() as session:
        start = time.monotonic()
        await Client(session, url).chat([QUESTION], metadata={"script": script})
        assert time.monotonic() - start >= 0.2


async def test_a_caller_that_hangs_up_is_not_waited_for():
    async with serve(ScriptedConfig(latency_s=600)) as url:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(Client(session, url).chat([QUESTION]), 0.3)
        start = time.monotonic()
    assert time.monotonic() - start < 60


async def test_as_a_process_it_names_its_address_and_stops_on_interrupt():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from nemo_gym_prorl.cli import main; main()", "scripted"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        assert "no language model" in line
        async with aiohttp.ClientSession() as session:
            client = Client(session, re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0])
            assert (await client.chat([QUESTION]))["model"] == MODEL_NAME
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
