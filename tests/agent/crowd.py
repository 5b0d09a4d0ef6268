# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout service with a real ``prorl_model`` in processes of its own, and engines in vLLM's protocol that say in
each turn who they are, with which weights, and are told by nobody whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemo_gym_prorl.agent.agent_service import AgentService
from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.rollout.api.client import RolloutClient
from tests.policy.engines import free_port
from tests.policy.model_process import Server, started
from tests.policy.scripted_engine import answer_of, is_probe
from tests.rollout.serving import serve


TURNS = 3
TEMPLATE = (
    "{%- if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{%- for message in messages %}<|start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass
class Engine:
    """Samples a call of a tool in each turn, whose arguments say what the turn was sampled by.

    Attributes:
        name: of the engine.
        weights: that it has.
        delay_s: until it answers.
        most: requests that it had at a time.
        prompts: which runs its prompts were of, by the words in them.
    """

    tokenizer: Tokenizer
    name: str
    weights: int = 0
    delay_s: float = 0.0
    running: int = 0
    most: int = 0
    prompts: Counter[str] = field(default_factory=Counter)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (event := await receive())["type"] == "http.request":
            body += event["body"]
            if not event["more_body"]:
                break
        status, said = 404, b"{}"
        if scope["path"] == "/v1/models":
            status, said = 200, orjson.dumps({"data": [{"id": "tiny", "max_model_len": 10**6}]})
        elif scope["path"] == "/v1/completions":
            asked = orjson.loads(body)
            status, said = 200, orjson.dumps(answer_of(asked))
            if not is_probe(asked):
                said = await self._sample(asked["prompt"], receive)
        head = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": said})

    async def _sample(self, prompt: list[int], receive: Any) -> bytes:
        self.running += 1
        self.most = max(self.most, self.running)
        self.prompts[self.tokenizer.decode(prompt).partition("run:")[2].partition(";")[0]] += 1
        arguments = {"by": self.name, "weights": self.weights}
        try:
            async with asyncio.timeout(self.delay_s or 0.001):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
        finally:
            self.running -= 1
        text = f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call><|end|>"
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        logged = {"token_logprobs": [-0.25] * len(ids)}
        return orjson.dumps(
            {"choices": [{"text": text, "token_ids": ids, "logprobs": logged, "finish_reason": "stop"}]}
        )


@contextlib.contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """An application on a loop of its own."""
    # As Gym's servers, it keeps connections for longer than their clients: one that is used is not closed just then.
    config = uvicorn.Config(
        app, host="127.0.0.1", port=free_port(), log_level="warning", backlog=4096, timeout_keep_alive=60
    )
    served = uvicorn.Server(config)
    thread = threading.Thread(target=served.run)
    thread.start()
    while not served.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{served.config.port}"
    finally:
        served.should_exit = served.force_exit = True
        thread.join()


def world() -> tuple[FastAPI, Counter[str]]:
    """An environment whose rewards take turns, and what was asked of it."""
    app, asked = FastAPI(), Counter[str]()

    @app.post("/{route}")
    async def answer(route: str, request: Request) -> Any:
        asked[route] += 1
        body = await request.json() if route == "verify" else {}
        return {**body, "reward": asked[route] % 2} if route == "verify" else {"seen": "a box"}

    return app, asked


@dataclass
class Crowd:
    """The service, its model servers, of which most tests have one, and what its environment was asked."""

    service: RolloutClient
    url: str
    models: Sequence[Server]
    tokenizer: Tokenizer
    asked: Counter[str]

    @property
    def model(self) -> Server:
        return self.models[0]

    async def tell(self, method: str, path: str, body: Any = None) -> None:
        for model in self.models:
            status, said = await model.ask(method, path, body)
            assert status in (200, 201), said

    def engine(self, name: str, **settings: Any) -> Engine:
        return Engine(self.tokenizer, name, **settings)

    async def ended(self, wanted: int) -> list[Any]:
        """So many outcomes, with their results."""
        cursor, jobs = "0", []
        while len(jobs) < wanted:
            page = await self.service.ended(cursor, wait=30, results=True, limit=1000)
            cursor, jobs = page.cursor, jobs + page.rollouts
        return jobs


def row(run: str | None = None) -> dict[str, Any]:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    return {"responses_create_params": {"input": f"run:{run};", "max_output_tokens": 200, "tools": [tool]}}


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a byte, and a chat template with tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def model_server(folder: Path, **settings: Any) -> Iterator[Server]:
    """A model server without engines.

    Args:
        folder: for the tokenizer and logs.
        settings: of its policy.
    """
    make_tokenizer(folder)
    model = started(None, folder, **settings)
    try:
        yield model
    finally:
        model.kill()


@contextlib.asynccontextmanager
async def crowd(*models: Server, **settings: Any) -> AsyncIterator[Crowd]:
    """A service before its model servers.

    Args:
        models: they.
        settings: of the service.
    """
    tokenizer = Tokenizer.from_file(str(models[0].log.parent / "tokenizer.json"))
    names = [f"policy_model_{index}" for index in range(len(models))]
    environment, asked = world()

    def block(kind: str, url: str) -> dict[str, Any]:
        host, port = url.removeprefix("http://").split(":")
        return {kind: {"any": {"host": host, "port": int(port)}}}

    with in_thread(environment) as at:
        known = {
            "world": block("resources_servers", at),
            **{name: block("responses_api_models", model.url) for name, model in zip(names, models, strict=True)},
        }
        config = ServiceConfig(
            resources_server={"type": "resources_servers", "name": "world"},
            max_steps=TURNS,
            further_model_servers=names[1:],
            **settings,
        )
        service = AgentService(config, OmegaConf.create(known), model=names[0])
        app = FastAPI()
        app.include_router(service.router())
        async with serve(app) as url, RolloutClient(url) as client:
            try:
                yield Crowd(client, url, models, tokenizer, asked)
            finally:
                await service.close()
