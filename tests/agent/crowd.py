# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout service with real ``prorl_model`` servers in processes of their own, and engines whose turns say which
engine sampled them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.rollout.api.client import RolloutClient
from tests.agent.peers import agent_service
from tests.policy.engines import free_port
from tests.policy.model_process import Server, started
from tests.policy.scripted_engine import ScriptedEngine, is_probe, saved
from tests.policy.test_prorl_model import BYTES, CHATML


TURNS = 3


class Engine(ScriptedEngine):
    """Samples a call of a tool in each turn, whose argument is the engine's name.

    Attributes:
        delay_s: seconds until it answers.
        prompts: number of prompts by run, which the words of a prompt name.
    """

    def __init__(self, name: str, delay_s: float = 0.0) -> None:
        super().__init__(BYTES, context=10**6)
        self.name, self.delay_s = name, delay_s
        self.prompts = Counter[str]()

    def say(self, body: dict[str, Any]) -> str:
        self.prompts[BYTES.decode(body["prompt"]).partition("run:")[2].partition(";")[0]] += 1
        call = json.dumps({"name": "look", "arguments": {"by": self.name}})
        return f"<tool_call>\n{call}\n</tool_call><|im_end|>"

    async def _completions(self, request: Request) -> Any:
        answer = await super()._completions(request)
        if not is_probe(await request.json()):
            await asyncio.sleep(self.delay_s)
        return answer


@contextlib.contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """Serve an application on a loop of its own; yield its URL."""
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


def world() -> FastAPI:
    """Return an environment whose rewards take turns."""
    app, verdicts = FastAPI(), Counter[str]()

    @app.post("/{route}")
    async def answer(route: str, request: Request) -> Any:
        if route != "verify":
            return {"seen": "a box"}
        verdicts[route] += 1
        return {**await request.json(), "reward": verdicts[route] % 2}

    return app


@dataclass
class Crowd:
    """The service and its model servers."""

    service: RolloutClient
    url: str
    models: Sequence[Server]

    @property
    def model(self) -> Server:
        return self.models[0]


def row(run: str | None = None) -> dict[str, Any]:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    return {"responses_create_params": {"input": f"run:{run};", "max_output_tokens": 200, "tools": [tool]}}


@contextlib.contextmanager
def model_server(folder: Path, **settings: Any) -> Iterator[Server]:
    """Run a model server without engines, with these settings of its policy."""
    saved(folder, BYTES, CHATML)
    model = started(None, folder, **settings)
    try:
        yield model
    finally:
        model.kill()


@contextlib.asynccontextmanager
async def crowd(*models: Server, **settings: Any) -> AsyncIterator[Crowd]:
    """Run a service with these settings before model servers."""
    names = [f"policy_model_{index}" for index in range(len(models))]

    def block(kind: str, url: str) -> dict[str, Any]:
        host, port = url.removeprefix("http://").split(":")
        return {kind: {"any": {"host": host, "port": int(port)}}}

    with in_thread(world()) as at:
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
        async with agent_service(config, known, names[0]) as (_, url), RolloutClient(url) as client:
            yield Crowd(client, url, models)
