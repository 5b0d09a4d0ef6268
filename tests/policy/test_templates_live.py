# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Templates of every kind through the policy service and a real vLLM, compared with vLLM's own rendering."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest
from tests.policy.engines import MODEL
from tests.policy.families import TEMPLATES
from tests.policy.runtimes import hosted


pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
TOOLS: list[dict[str, Any]] = [
    # The order of keys in which Gym's converter writes them is not vLLM's.
    {"function": {"parameters": {"type": "object", "properties": {}}, "name": "look"}, "type": "function"}
]
HERMES = '<tool_call>{"name": "look", "arguments": {"what": "%s"}}</tool_call>'
CASES: dict[str, tuple[str, str, str, str]] = {
    # A template's end of turn, the parser of its calls, how a call is written, and a stop string where it needs one.
    "appended": ("<|end|>\n", "plain", "", ""),
    "numbered": ("</s>\n", "hermes", '<tool_call>{"number": %d, "name": "look", "arguments": {"what": "%s"}}', ""),
    "worded": ("\n### End", "plain", "", "\n### End"),
    "pythonic": ("<|eot_id|>", "pythonic", '[look(what="%s")]', ""),
    "chatml": ("<|im_end|>\n", "hermes", "\n" + HERMES.replace("call>{", "call>\n{").replace("}<", "}\n<"), ""),
}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def rendered_by_vllm(
    session: aiohttp.ClientSession, url: str, template: str, messages: list[dict[str, Any]], *, tools: bool = True
) -> list[int]:
    """Return the prompt that vLLM renders for the conversation."""
    body = {"model": MODEL, "messages": messages, "tools": TOOLS if tools else None, "chat_template": template}
    body |= {"add_generation_prompt": True, "add_special_tokens": False}
    async with session.post(f"{url}/tokenize", json=body) as response:
        said = await response.json()
        assert response.status == 200, said
        return [int(token_id) for token_id in said["tokens"]]


class Agent:
    """Has the engine sample given texts by a grammar."""

    def __init__(self, host: PolicyRuntime, case: tuple[str, str, str, str]) -> None:
        self.host = host
        self.end, _, self.call, self.stop = case
        self.calls = 0
        parts = [{"type": "text", "text": "box"}, {"type": "text", "text": "key"}]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]

    async def ask(self, text: str) -> PolicyAnswer:
        service = self.host.service
        stop = (self.stop,) if self.stop else ()
        only = {"structured_outputs": {"choice": [text + self.stop]}}
        sampling = Sampling(max_tokens=200, temperature=1.0, stop=stop, extra=only)
        answer = await service.turn(
            TurnRequest("r", tuple(self.messages), tools=TOOLS if self.call else (), sampling=sampling)
        )
        self.messages.append(dict(answer.message))
        return answer

    def written_call(self, what: str) -> str:
        number = (self.calls,) if "%d" in self.call else ()
        self.calls += 1
        return self.call % (*number, what) + ("</tool_call>" if number else "")


def ended(sampled: str, end: str) -> str:
    """Return a sampled text with the template's end; this model ends turns by any known end token."""
    found = re.search(r"(<[^<>]+>)$", sampled)
    if found is None or end.startswith(found[0]) or found[0] == "</tool_call>":
        return sampled
    return sampled.removesuffix(found[0]) + end.strip()


@pytest.mark.parametrize("name", CASES)
async def test_every_prompt_is_what_vllm_would_make_of_the_conversation(
    name: str, engine_url: str, session: aiohttp.ClientSession, model_folder: Path
) -> None:
    file, case = TEMPLATES / f"{name}.jinja", CASES[name]
    async with hosted(
        engine_url, engine="vllm", tokenizer=str(model_folder), chat_template=str(file), tool_call_parser=case[1]
    ) as host:
        agent = Agent(host, case)
        tokenizer = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
        asked: list[list[dict[str, Any]]] = []
        answers: list[PolicyAnswer] = []
        for turn, text in enumerate(["lamp key", "call", "door", "call", "call", "coat"]):
            asked.append(list(agent.messages))
            is_call = text == "call" and agent.call
            answers.append(await agent.ask(agent.written_call(f"w{turn}") if is_call else text))
            if is_call:
                (call,) = agent.messages[-1]["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"what": f"w{turn}"}
                agent.messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"seen {turn}"})
            else:
                assert agent.messages[-1]["content"] == text
                agent.messages.append({"role": "user", "content": f"and {turn}?"})
        template = file.read_text()
        first = await rendered_by_vllm(session, engine_url, template, asked[0], tools=bool(agent.call))
        assert answers[0].turn.prompt() == first, "the first prompt, tools and all, to the token"
        for messages, answer in zip(asked, answers, strict=True):
            theirs = tokenizer.decode(
                await rendered_by_vllm(session, engine_url, template, messages, tools=bool(agent.call)),
                skip_special_tokens=False,
            )
            ours = ""
            for past in answer.turn.path():
                ours += tokenizer.decode(list(past.observed), skip_special_tokens=False)
                if past is not answer.turn:
                    ours += ended(tokenizer.decode(list(past.sampled), skip_special_tokens=False), agent.end)
            assert ours == theirs
        service = host.service
        assert service.ledger("r").branches == 1
        counts = service.rollout("r").counts
        assert not any(counts[name] for name in ("rewrites", "differences", "retokenised", "ambiguous"))
