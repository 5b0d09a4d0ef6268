# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Memory under a long run: 20,000 rollouts of 20 turns through one service and one ``prorl_model``.

The rollout service and the model server run in a process of their own each, as in a deployment; the engine behind them
speaks vLLM's ``/v1/completions`` and answers at once, as does the environment, so that what is left is ours. A
follower reads every result, as a trainer does. Memory must stand still once everything that is bounded is full: after
the first tenth of the rollouts.

A trainer's own process holds what it was given until its batch is complete: 200 rollouts of 50 turns, with a context
of 30,000 tokens at the end, taken by the DAPO runner from a service that makes them up.

Run with ``python -m benchmarks.soak [--quick | --held ROLLOUTS]``; quick takes 300 rollouts of 3 turns, a bound a
tenth as large, and 40 that are held; with ``--held`` only these are measured, and nothing is written.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.pipeline import SleepingHandler
from benchmarks.real_engines import server
from benchmarks.report import Figure, publish
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import Runner
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.handlers.agent_service import AgentService
from nemo_gym_prorl.handlers.service_config import ServiceConfig
from nemo_gym_prorl.rollout.api import rollout_router
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Trajectory, Verdict
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.serving import memory


MODULE = "benchmarks.soak"

ROLLOUTS, TURNS = 20_000, 20
QUICK_ROLLOUTS, QUICK_TURNS = 300, 3
IN_FLIGHT = 64
HELD, QUICK_HELD = 200, 40
HELD_TURNS, HELD_PROMPT, HELD_SAMPLED, HELD_OBSERVED = 50, 1_000, 280, 300
"""Tokens of the prompt, and of what each turn says and is shown."""
HELD_GROUP = 4
KEEP_ALIVE_S = 30
"""As servers of Gym have it: longer than its clients keep an idle connection, which would break in their hands."""
RETAIN_BYTES, QUICK_RETAIN_BYTES = 64 * 2**20, 2**20
"""What the service may keep of finished rollouts: small, so that it is full long before the first measurement."""
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|end|>'
WORDS = [f"w{number}" for number in range(200)]
TEMPLATE = (
    "{%- if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{%- for message in messages %}<|start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """One token a byte, and a chat template with tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def world_app(tokenizer: Tokenizer) -> FastAPI:
    """The engine and the environment: a policy that calls a tool in each turn, and a tool that answers."""
    app = FastAPI()
    ids = tokenizer.encode(CALL, add_special_tokens=False).ids
    choice = {
        "text": CALL,
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.25] * len(ids)},
        "finish_reason": "stop",
    }
    completion = orjson.dumps({"choices": [choice]})

    @app.post("/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        body = await request.body()
        content = {
            "v1/completions": completion,
            "look": orjson.dumps({"seen": " ".join(WORDS[:20])}),
        }.get(path, b"{}")
        if path == "verify":
            content = orjson.dumps({**orjson.loads(body), "reward": 1.0})
        return Response(content, media_type="application/json")

    @app.get("/v1/models")
    async def known() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 100_000}]}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": "0.11.0"}

    return app


def model_app(port: int, world: str, folder: str) -> FastAPI:
    """``prorl_model`` over the engine."""
    os.environ["NEMO_GYM_CONFIG_DICT"] = "{}"  # Gym's HTTP client asks for the deployment's; there is none here
    from responses_api_models.prorl_model.app import ProrlModel, ProrlModelConfig

    config = ProrlModelConfig(
        host="127.0.0.1",
        port=port,
        name="policy_model",
        entrypoint="app.py",
        base_url=f"{world}/v1",
        api_key="none",
        model="tiny",
        return_token_id_information=True,
        uses_reasoning_parser=False,
        policy={"tokenizer": folder, "engine": "vllm"},
    )
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=DictConfig({}))
    return ProrlModel(config=config, server_client=client).setup_webserver()


def service_app(world: str, model: str, turns: int, retain_bytes: int) -> FastAPI:
    """The rollout service over both."""

    def block(kind: str, url: str) -> dict[str, Any]:
        host, port = url.removeprefix("http://").split(":")
        return {kind: {"any": {"host": host, "port": int(port)}}}

    memory.collect_rarely()  # as ProRLAgent does
    world_ref = {"type": "resources_servers", "name": "world"}
    config = ServiceConfig(resources_server=world_ref, max_steps=turns, retain_bytes=retain_bytes)
    known = {"world": block("resources_servers", world), "policy_model": block("responses_api_models", model)}
    service = AgentService(config, OmegaConf.create(known), model="policy_model")
    app = FastAPI()
    app.include_router(service.router())
    return app


class TellingHandler(SleepingHandler):
    """Makes rollouts up: each turn says a sentence, calls a tool and is shown what that answers."""

    async def init(self, job: Job) -> None:
        pass

    async def run(self, job: Job, session: None) -> Trajectory:
        rng = random.Random(job.id)
        ids = [rng.randrange(150_000) for _ in range(HELD_PROMPT)]
        output: list[dict[str, Any]] = []
        for turn in range(HELD_TURNS):
            sampled = [rng.randrange(150_000) for _ in range(HELD_SAMPLED)]
            tokens = {
                "prompt_token_ids": ids,
                "generation_token_ids": sampled,
                "generation_log_probs": [-rng.expovariate(1.0) for _ in sampled],
            }
            text = {"type": "output_text", "text": _words(rng, HELD_SAMPLED), "annotations": []}
            output.append({"id": f"m{turn}", "type": "message", "role": "assistant", "content": [text]})
            call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": f"c{turn}"}
            output.append({"id": f"f{turn}", "status": "completed", **call, **tokens})
            seen = _words(rng, HELD_OBSERVED)
            output.append({"type": "function_call_output", "call_id": f"c{turn}", "output": seen})
            ids = ids + sampled + [rng.randrange(150_000) for _ in range(HELD_OBSERVED)]
        return Trajectory({"id": job.id, "object": "response", "model": "tiny", "output": output})

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        reward = float(job.id.split(":")[-2]) % 2
        return Verdict(reward, {**job.row, "response": trajectory.response, "reward": reward})


def _words(rng: random.Random, tokens: int) -> str:
    """Text of some four letters a token."""
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


def telling_app() -> FastAPI:
    """The job API over rollouts that are made up."""
    pipeline = Pipeline(Environments.of(TellingHandler()))
    app = FastAPI()
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
    return app


async def held(rollouts: int) -> Figure:
    """What a trainer's process grows by for each rollout of a batch that it is given."""
    groups = rollouts // HELD_GROUP
    prompts = Epochs([{"responses_create_params": {"input": f"look around {n}"}} for n in range(groups)], epochs=1)
    sampler = DynamicSampler(SamplerConfig(groups, HELD_GROUP, 16), prompts)
    async with server(MODULE, "telling") as (url, _), Runner(sampler, prompts, [RolloutClient(url)]) as runner:
        before = resident_mb(os.getpid())
        batch = await runner.batch()
        gc.collect()
        grown = resident_mb(os.getpid()) - before
    assert batch is not None, "every group varies"
    mib = grown * 1e6 / 2**20 / sum(len(group) for group in batch.groups)
    name = f"trainer: resident for each of {rollouts} rollouts of {HELD_TURNS} turns, 30,000 tokens"
    return Figure(name, mib, "MiB", goal="<= 1")


def serve(kind: str, port: int, arguments: list[str]) -> None:
    """Run one of the processes."""
    if kind == "telling":
        app = telling_app()
    elif kind == "world":
        app = world_app(Tokenizer.from_file(f"{arguments[0]}/tokenizer.json"))
    elif kind == "model":
        app = model_app(port, *arguments)
    else:
        app = service_app(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))

    @app.get("/up")
    async def up() -> str:
        return "up"

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)


def resident_mb(pid: int) -> float:
    """Memory that a process holds, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def soak(rollouts: int, turns: int, retain_bytes: int) -> list[Figure]:
    """Run them all, and watch both processes."""
    row = {
        "responses_create_params": {
            "input": "look around",
            "max_output_tokens": 200,
            "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}],
        }
    }
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make_tokenizer(Path(folder))
        world, _ = await stack.enter_async_context(server(MODULE, "world", folder))
        model, model_pid = await stack.enter_async_context(server(MODULE, "model", world, folder))
        url, service_pid = await stack.enter_async_context(
            server(MODULE, "service", world, model, str(turns), str(retain_bytes))
        )
        client = await stack.enter_async_context(RolloutClient(url))
        pids = {"service": service_pid, "prorl_model": model_pid}
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def submit() -> None:
            for number in range(rollouts):
                await gate.acquire()
                await client.submit(row, id=f"soak-{number}", group=f"group-{number // 8}")

        submitting = asyncio.create_task(submit())
        started, cursor, ended = time.monotonic(), "0", 0
        levels: list[dict[str, float]] = []
        while ended < rollouts:
            page = await client.ended(cursor, wait=30, results=True)
            if submitting.done():
                submitting.result()
            cursor = page.cursor
            for job in page.rollouts:
                if job.reward != 1.0 or job.turns != turns:
                    raise RuntimeError(f"{job.id} ended as {job.state} after {job.turns} turns: {job.failure}")
                ended += 1
                gate.release()
                if ended % (rollouts // 10) == 0:
                    levels.append({name: resident_mb(pid) for name, pid in pids.items()})
                    print(f"{ended} rollouts, {time.monotonic() - started:.0f} s: {levels[-1]}", flush=True)
        seconds = time.monotonic() - started
    figures = [Figure(f"{rollouts} rollouts of {turns} turns", rollouts / seconds, "rollouts/s")]
    for name in pids:
        first, most = levels[0][name], max(level[name] for level in levels[1:])
        figures.append(Figure(f"{name}: resident after the first {rollouts // 10}", first, "MB"))
        figures.append(Figure(f"{name}: most of it later", most, "MB", goal="<= 1.1", goal_value=most / first))
    return figures


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rollouts of few turns")
    parser.add_argument("--held", type=int, metavar="ROLLOUTS", help="only what a trainer holds")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        kind, port, *rest = arguments.serve
        serve(kind, int(port), rest)
        return
    if arguments.held:
        publish("soak", [asyncio.run(held(arguments.held))], quick=True)
        return
    size = (QUICK_ROLLOUTS, QUICK_TURNS, QUICK_RETAIN_BYTES) if arguments.quick else (ROLLOUTS, TURNS, RETAIN_BYTES)
    figures = [asyncio.run(held(QUICK_HELD if arguments.quick else HELD)), *asyncio.run(soak(*size))]
    publish("soak", figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
