# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Stacks of servers that :mod:`benchmarks.stack` compares, and players: functions that play a row with a stack."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import jinja2
import orjson
from tokenizers import Tokenizer

from benchmarks.model_agents import KeepAliveClient
from benchmarks.servers import (
    AGENT,
    MODEL_SERVER,
    PEER_AGENT,
    PEER_MODEL_SERVER,
    GymServer,
    Process,
    agent_of,
    gym_servers,
    model_of,
)
from benchmarks.stack_engine import COMMAND, DONE
from benchmarks.stand_in_engine import TEMPLATE, pieces
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell


Player = Callable[[dict[str, Any]], Coroutine[Any, Any, list[float]]]
"""Function that plays a row and returns the milliseconds of its tool calls, if known."""
Stack = contextlib.AbstractAsyncContextManager[dict[str, Process]]
"""Context of the server processes ``model``, ``agent`` and ``environment``."""
_LIMITS = {"singularity": {"memory_mib": 1024, "processes": 64, "disk_mib": 256}}


def our_stack(engine: str, folder: Path, image: Path, at_once: int) -> Stack:
    settings = {"image": str(image), "domain": "coding", "max_sandbox_starts": 16}
    stages = {"init": 16, "ready": 16, "run": at_once, "eval": 16}
    servers = {
        "model": model_of(MODEL_SERVER, [engine], folder),
        "agent": agent_of(AGENT, "environment", "model", stages=stages),
        "environment": GymServer("resources_servers", "prorl_code", settings),
    }
    return gym_servers(servers, {"sandbox": _LIMITS})


def peer_stack(engine: str, folder: Path, image: Path, at_once: int) -> Stack:
    """Return the stack of ``simple_agent``, ``vllm_model`` and an environment over Gym's ``apptainer`` provider."""
    # Twice as many slots as rollouts, since a stopping container holds a slot of the provider for 10 s.
    settings = {"image": str(image), "domain": "coding", "concurrency": 2 * at_once}
    servers = {
        "model": model_of(PEER_MODEL_SERVER, [engine], folder),
        "agent": agent_of(PEER_AGENT, "environment", "model"),
        "environment": GymServer("resources_servers", "bash_environment", settings),
    }
    return gym_servers(servers)


@contextlib.asynccontextmanager
async def our_player(url: str) -> AsyncIterator[Player]:
    async with RolloutClient(url) as client:

        async def one(row: dict[str, Any]) -> list[float]:
            number = row["_ng_task_index"]
            job = await client.submit(row, id=f"rollout-{number}", group=f"group-{number // 8}")
            while not job.state.terminal:
                job = await client.get(job.id, wait=60, tokens=TokenForm.PACKED)
            _check(job.result or {"failure": job.failure})
            return [1e3 * tool["seconds"] for step in job.steps or () for tool in step["tools"]]

        yield one


@contextlib.asynccontextmanager
async def peer_player(url: str) -> AsyncIterator[Player]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def one(row: dict[str, Any]) -> list[float]:
            async with http.post(f"{url}/run", json=row) as response:
                # On a busy machine the provider kills commands at its time limit; such turns still count.
                if failed := _failed_commands(orjson.loads(await response.read())):
                    print(f"{PEER_AGENT}: {len(failed)} commands failed, such as {failed[0][-100:]!r}")
            return []

        yield one


def bare_player(url: str, tokenizer: Tokenizer) -> Player:
    """Return a player that sends a row's turns directly to the engine, without agent, model server and tools."""
    client, template = KeepAliveClient(url), jinja2.Environment().from_string(TEMPLATE)
    printed = COMMAND.format(pieces(tokenizer, 130, seed=0)[0])
    between = f"\n<|im_start|>user\n<tool_response>\n{printed}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    observed = tokenizer.encode(between, add_special_tokens=False).ids

    async def one(row: dict[str, Any]) -> list[float]:
        params = row["responses_create_params"]
        tools = [{"type": "function", "function": tool} for tool in params["tools"]]
        text = template.render(messages=params["input"], tools=tools, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        while True:
            body = {"model": "tiny", "prompt": ids, "max_tokens": 2048, "logprobs": 0, "return_token_ids": True}
            answer = await client.call("POST", "/v1/completions", orjson.dumps(body))
            choice = orjson.loads(answer.body)["choices"][0]
            if "<tool_call>" not in choice["text"]:
                return []
            ids += choice["token_ids"] + observed

    return one


async def bare_shell(image: Path, runtime: Runtime, commands: int) -> list[float]:
    """Return the milliseconds of each command in a shell session of this package, without servers."""
    taken = []
    container = await Container.start(ContainerSpec(image=image), runtime)
    async with container, await Shell.start(container) as shell:
        for number in range(commands):
            begin = time.perf_counter()
            assert DONE in (await shell.run(COMMAND.format(f"line {number}\n" * 40))).output
            taken.append(1e3 * (time.perf_counter() - begin))
    return taken


def _check(result: Mapping[str, Any]) -> None:
    failed = _failed_commands(result)
    assert not failed, failed


def _failed_commands(result: Mapping[str, Any]) -> list[str]:
    assert "response" in result, result
    outputs = [item["output"] for item in result["response"]["output"] if item["type"] == "function_call_output"]
    return [output for output in outputs if "[exit code: 0]" not in output]
