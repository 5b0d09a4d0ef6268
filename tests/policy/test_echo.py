# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What Gym's agents send back of odd turns, through Gym's own converters: the tokens stay one chain.

The engine here samples what it is told to, token by token, so that the odd turns come in every order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from tests.policy.families import TEMPLATES
from tests.policy.hosts import server
from tests.policy.probes import answer_of, is_probe
from tests.policy.test_prorl_model import TOKEN_FIELDS, TOOLS
from tests.rollout.serving import serve as serving


THINKS = "<think>\nhm\n</think>\n\n"
BLANK = "<think></think>"
NOTHING = ""
CALLS = '<think>\nso\n</think>\n\n\n<tool_call>\n{"name": "look", "arguments": {"what": "box"}}\n</tool_call>'
ODD = [THINKS, BLANK, NOTHING, CALLS]


def engine(tokenizer: Tokenizer, turns: Iterator[str]) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/completions")
    async def sample(body: dict[str, Any]) -> dict[str, Any]:
        if is_probe(body):
            return answer_of(body)
        ids = tokenizer.encode(f"{next(turns)}<|im_end|>")
        logged = {"token_logprobs": [-0.5] * len(ids)}
        return {"choices": [{"token_ids": ids, "logprobs": logged, "finish_reason": "stop"}]}

    return app


class Simple:
    """An agent like Gym's ``simple_agent``: results for calls, and otherwise the same again with what came last."""

    def __init__(self, http: aiohttp.ClientSession, url: str, name: str, *, carries: bool) -> None:
        self._http = http
        self._path = f"{url}/v1/rollouts/{name}/tokens"
        self._url = f"{url}/v1/responses"
        self._headers = {"X-Rollout-Id": name}
        self._hidden = set() if carries else TOKEN_FIELDS
        self._said: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "?"}]
        self.turns: list[dict[str, Any]] = []

    async def step(self) -> None:
        body = {"input": self._said, "tools": TOOLS, "max_output_tokens": 64}
        async with self._http.post(self._url, json=body, headers=self._headers) as response:
            assert response.status == 200, await response.text()
            output = (await response.json())["output"]
        self.turns += [item for item in output if item.get("generation_token_ids")]
        self._said += [{k: v for k, v in item.items() if k not in self._hidden} for item in output]
        for item in output:
            if item["type"] == "function_call":
                self._said.append({"type": "function_call_output", "call_id": item["call_id"], "output": "a frog"})

    async def tokens(self) -> dict[str, Any]:
        async with self._http.get(self._path) as response:
            return await response.json()


@pytest.mark.parametrize("carries", [True, False], ids=["with ids", "without ids"])
async def test_odd_turns_stay_in_the_chain(model_folder: Path, carries: bool) -> None:
    tokenizer = Tokenizer(FastTokenizer.from_file(str(model_folder / "tokenizer.json")))
    scripts = list(itertools.permutations(ODD, 3))
    answers = (text for script in scripts for text in (CALLS, *script, CALLS, "the end"))
    policy = {"tokenizer": str(model_folder), "chat_template": str(TEMPLATES / "thinking.jinja"), "engine": "vllm"}
    async with aiohttp.ClientSession() as http, serving(engine(tokenizer, answers)) as sampling:
        model = server(sampling, model_folder, policy=policy)
        async with serving(model.setup_webserver()) as url:
            for index, script in enumerate(scripts):
                agent = Simple(http, url, f"r{index}", carries=carries)
                for _ in range(6):
                    await agent.step()
                # Without ids a turn in which there is nothing to see may be any of those that look so.
                straight = carries or not {BLANK, NOTHING} & set(script)
                check(agent.turns, await agent.tokens(), straight=straight)


def check(turns: list[dict[str, Any]], tokens: dict[str, Any], *, straight: bool) -> None:
    """One chain where that can be known, a doubt that is counted elsewhere; and each sampled token once, none from
    text."""
    assert len(turns) == 6
    doubtful = len(tokens["sequences"]) > 1 or tokens["counts"]["ambiguous"]
    assert not (straight and doubtful)
    if not doubtful:
        for earlier, later in itertools.pairwise(turns):
            sequence = earlier["prompt_token_ids"] + earlier["generation_token_ids"]
            assert later["prompt_token_ids"][: len(sequence)] == sequence
    assert tokens["counts"]["retokenised"] == 0
    assert sum(sum(s["mask"]) for s in tokens["sequences"]) == sum(len(t["generation_token_ids"]) for t in turns)
