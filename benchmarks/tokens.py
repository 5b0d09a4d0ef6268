# SPDX-License-Identifier: Apache-2.0
"""What a turn costs between agent and model server: bytes on the wire and CPU, as a rollout grows to 64k tokens.

Three agents play the same rollout against an engine that answers at once. Gym's way (``simple_agent`` with
``vllm_model``): the whole history goes back every turn, token ids included. The same agent with ``prorl_model`` in its
place. And ``prorl_model`` as it can be used: each turn sends what is new (``previous_response_id``), tokens are read
once at the end.

Run with ``python -m benchmarks.tokens [--quick]``; quick stops at ten turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig
from tokenizers import Tokenizer

from benchmarks.real_engines import SCRIPTS, WORDS, server
from benchmarks.report import Figure, publish


MODULE = "benchmarks.tokens"

WRITTEN = 320
OBSERVED_WORDS = 160
"""About as many tokens as are written: a hundred turns make 64k."""
TURNS = (10, 50, 100)


def engine_app(tokenizer: Tokenizer) -> FastAPI:
    """vLLM's wire protocol over one canned answer."""
    app = FastAPI()
    text = " ".join(random.Random(0).choices(WORDS, k=4 * WRITTEN))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:WRITTEN]
    text = tokenizer.decode(ids)
    log_probs = [-0.123456] * WRITTEN
    completion = {
        "choices": [
            {"token_ids": ids, "logprobs": {"token_logprobs": log_probs}, "finish_reason": "length", "text": text}
        ]
    }
    logged = [{"token": f"token_id:{i}", "logprob": -0.123456, "bytes": None, "top_logprobs": []} for i in ids]
    chat = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
                "logprobs": {"content": logged, "refusal": None},
            }
        ],
    }
    answers = {"/v1/completions": orjson.dumps(completion), "/v1/chat/completions": orjson.dumps(chat)}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Response:
        await request.body()
        return Response(answers[request.url.path], media_type="application/json")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = orjson.loads(await request.body())
        if "prompt" in body:
            ids = tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            return Response(orjson.dumps({"tokens": ids}), media_type="application/json")
        length = sum(len(str(message["content"])) for message in body["messages"]) // 3
        return Response(orjson.dumps({"tokens": list(range(length))}), media_type="application/json")

    return app


def serve(kind: str, port: int, engine_url: str, model: str) -> None:
    """Run the engine or one of the model servers; each has a process of its own, so that its CPU time is its own."""
    # Gym's HTTP client asks for the deployment's configuration; there is none here.
    os.environ["NEMO_GYM_CONFIG_DICT"] = "{}"
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "name": "policy_model",
        "entrypoint": "app.py",
        "base_url": f"{engine_url}/v1",
        "api_key": "none",
        "model": "tiny",
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
    }
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig({})
    )
    if kind == "engine":
        app = engine_app(Tokenizer.from_file(f"{model}/tokenizer.json"))
    elif kind == "gym":
        from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

        app = VLLMModel(config=VLLMModelConfig(**settings), server_client=client).setup_webserver()
    else:
        from responses_api_models.prorl_model.app import ProrlModel, ProrlModelConfig

        settings["policy"] = {"tokenizer": model, "engine": "vllm"}
        app = ProrlModel(config=ProrlModelConfig(**settings), server_client=client).setup_webserver()

    @app.get("/up")
    async def up() -> str:
        return "up"

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Agent:
    """Plays one rollout and keeps, per turn, the bytes both ways and the server's CPU seconds."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int, *, incremental: bool) -> None:
        self._session = session
        self._url = url
        self._pid = pid
        self._incremental = incremental
        self._rng = random.Random(1)
        self.bytes: list[int] = []
        self.cpu: list[float] = []

    async def play(self, turns: int) -> None:
        items: list[dict[str, Any]] = []
        previous: str | None = None
        for _ in range(turns):
            new = [{"role": "user", "content": " ".join(self._rng.choices(WORDS, k=OBSERVED_WORDS))}]
            body: dict[str, Any] = {"input": items + new, "temperature": 1.0, "max_output_tokens": WRITTEN}
            headers = {"content-type": "application/json"}
            if self._incremental:
                body["input"] = new
                headers |= {"x-rollout-id": "r", "x-rollout-tokens": "deferred"}
                if previous is not None:
                    body["previous_response_id"] = previous
            answer = await self._call("post", "/v1/responses", orjson.dumps(body), headers)
            items += [*new, *answer["output"]]
            previous = answer["id"]
        if self._incremental:
            await self._call("get", "/v1/rollouts/r/tokens", b"", {})
            # Reading the tokens is part of the price: spread it over the turns.
            last, cpu = self.bytes.pop(), self.cpu.pop()
            self.bytes = [count + last // turns for count in self.bytes]
            self.cpu = [seconds + cpu / turns for seconds in self.cpu]

    async def _call(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> dict[str, Any]:
        before = cpu_s(self._pid)
        async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
            raw = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{self._url}{path} answered {response.status}: {raw[:300]!r}")
        self.cpu.append(cpu_s(self._pid) - before)
        self.bytes.append(len(data) + len(raw))
        return orjson.loads(raw)


async def measure(model: Path, lengths: tuple[int, ...]) -> list[Figure]:
    """Play a rollout of every length with every agent."""
    agents = {"gym": ("gym", False), "drop-in": ("prorl", False), "ours": ("prorl", True)}
    played: dict[tuple[str, int], Agent] = {}
    async with server(MODULE, "engine", "http://127.0.0.1:1", str(model)) as (engine, _):
        for name, (kind, incremental) in agents.items():
            async with server(MODULE, kind, engine, str(model)) as (url, pid):
                for length in lengths:
                    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                        agent = played[name, length] = Agent(session, url, pid, incremental=incremental)
                        await agent.play(length)
                        if incremental:
                            await session.delete(f"{url}/v1/rollouts/r")
    figures = []
    for length in lengths:
        per_turn = {name: sum(played[name, length].bytes) / length / 1000 for name in agents}
        cpu = {name: sum(played[name, length].cpu) / length * 1000 for name in agents}
        peers = {"vllm_model": per_turn["gym"], "prorl_model as a drop-in": per_turn["drop-in"]}
        figures.append(Figure(f"{length} turns: bytes per turn", per_turn["ours"], "kB", peers=peers))
        peers = {"vllm_model": cpu["gym"], "prorl_model as a drop-in": cpu["drop-in"]}
        figures.append(Figure(f"{length} turns: server CPU per turn", cpu["ours"], "ms", peers=peers))
    first, last = lengths[0], lengths[-1]
    if first != last:
        growth = {n: (sum(played[n, last].bytes) / last) / (sum(played[n, first].bytes) / first) for n in agents}
        peers = {"vllm_model": growth["gym"], "prorl_model as a drop-in": growth["drop-in"]}
        figures.append(Figure("bytes per turn, 100 turns over 10", growth["ours"], "times", "<= 1.1", peers=peers))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ten turns alone")
    parser.add_argument("--serve", nargs=4, metavar=("KIND", "PORT", "ENGINE", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        kind, port, engine, model = arguments.serve
        serve(kind, int(port), engine, model)
        return
    done = subprocess.run([SCRIPTS / "setup_vllm.sh"], check=True, capture_output=True, text=True)
    python = Path(done.stdout.strip().splitlines()[-1])
    model_folder = python.parents[1] / "random-model"
    if not (model_folder / "model.safetensors").is_file():
        subprocess.run([python, SCRIPTS / "make_tiny_model.py", model_folder], check=True, capture_output=True)
    lengths = TURNS[:1] if arguments.quick else TURNS
    publish("tokens", asyncio.run(measure(model_folder, lengths)), quick=arguments.quick)


if __name__ == "__main__":
    main()
