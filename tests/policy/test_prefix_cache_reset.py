# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""After new weights and a resume with a cache reset, samples equal those of a fresh engine.

A real vLLM reloads weights with a shared prefix in its cache, as a custom trainer would.
"""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.policy.engines.protocols import ENGINES
from nemo_gym_prorl.policy.http.api import add_control_routes
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from tests.policy.engines import MODEL, vllm, vllm_python
from tests.policy.runtimes import hosted
from tests.rollout.serving import serve


PREFIX = [5 + (7 * place) % 200 for place in range(1500)]
"""Prompt of several cache blocks."""
PERTURB = """
import sys, torch
from safetensors.torch import load_file, save_file
torch.manual_seed(0)
weights = load_file(sys.argv[1])
# Not the embeddings: this build of vLLM keeps a packed copy of the output layer over a reload.
changed = {name: 0.1 * one.std() * torch.randn_like(one) for name, one in weights.items() if "layers" in name}
save_file({name: one + changed.get(name, 0) for name, one in weights.items()}, sys.argv[1], {"format": "pt"})
"""


@asynccontextmanager
async def controlled(*urls: str, **config: Any) -> AsyncIterator[tuple[PolicyRuntime, aiohttp.ClientSession]]:
    """Yield a policy with its control routes, and a client of them."""
    async with hosted(*urls, **config) as host:
        app = FastAPI()
        lifespan = app.router.lifespan_context
        add_control_routes(app, host)
        app.router.lifespan_context = lifespan  # the host runs already
        async with serve(app) as url, aiohttp.ClientSession(url) as client:
            yield host, client


async def call(client: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with client.post(f"/v1/backends/{path}", json=body) as response:
        return response.status, await response.json(content_type=None)


async def sampled(http: aiohttp.ClientSession, url: str) -> tuple[dict[str, float], int]:
    """Return log-probs of the most probable tokens after the prefix, and the cached length of the prefix."""
    body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 1, "temperature": 1.0, "logprobs": 20, "seed": 1}
    body |= {"return_tokens_as_token_ids": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return top, (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the largest difference of common log-probs; infinite if too few tokens are common."""
    common = one.keys() & other.keys()
    return max(abs(one[token] - other[token]) for token in common) if len(common) > 15 else float("inf")


@pytest.mark.engine
async def test_a_reset_makes_samples_those_of_the_new_weights(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(model_folder, tmp_path / "other", ignore=shutil.ignore_patterns("lock", "*.jsonl"))
    await asyncio.to_thread(subprocess.run, [vllm_python(), "-c", PERTURB, other / "model.safetensors"], check=True)
    with vllm(other, tmp_path / "fresh.log") as (fresh, _):
        async with aiohttp.ClientSession() as http:
            wanted, cached = await sampled(http, fresh)
            assert cached == 0
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with vllm(model_folder, tmp_path / "engine.log") as (url, _):
        async with aiohttp.ClientSession() as http, controlled(url, engine="vllm_chat") as (_, client):
            old, _ = await sampled(http, url)
            assert (await call(client, "pause"))[1] == {"drained": True}
            order = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
            async with http.post(f"{url}/collective_rpc", json=order) as response:
                assert response.status == 200, await response.text()
            assert (await call(client, "resume", weight_version="2"))[0] == 200
            stale, cached = await sampled(http, url)
            assert cached > 1000, "the prefix is read from the cache"
            status, listing = await call(client, "resume", weight_version="2", reset_prefix_cache=True)
            assert status == 200, listing
            assert not listing["backends"][0]["paused"]
            right, cached = await sampled(http, url)
            assert cached == 0
    figures = {"old": old, "stale": stale, "reset": right}
    print("distance from a fresh engine:", {name: distance(one, wanted) for name, one in figures.items()})
    assert distance(stale, wanted) > 1e-2
    assert distance(right, wanted) <= 1e-4


@pytest.mark.parametrize(
    ("engine", "answers", "status", "says"),
    [
        ("vllm_chat", ['{"success": true}'], 200, None),
        ("vllm_chat", ['{"success": false}', '{"success": true}'], 200, None),  # blocks are freed in a moment
        ("vllm_chat", ['{"success": false}'], 500, "pause every model server"),
        ("vllm_chat", [404], 422, "VLLM_SERVER_DEV_MODE=1"),
        ("nemo_rl", [], 422, "recompute_kv_cache_after_weight_updates"),
        ("sglang", [400, "Cache flushed."], 200, None),
        ("sglang", [400], 500, "pause every model server"),
        ("vllm_chat", [500], 500, "(answer 500: )"),
    ],
)
async def test_no_backend_resumes_unless_every_cache_is_empty(
    engine: str,
    answers: list[str | int],
    status: int,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("nemo_gym_prorl.policy.engines.engine_control._CACHE_RESET_TIMEOUT_S", 0.3)
    resets: list[str] = []

    async def reset(request: Request) -> Response:
        resets.append(request.url.path)
        said = answers[min(len(resets), len(answers)) - 1]
        return Response(said, media_type="application/json") if isinstance(said, str) else Response("", said)

    async def good(request: Request) -> Response:
        return Response('{"success": true}', media_type="application/json")

    app, fine = FastAPI(), FastAPI()
    for served, route in ((app, reset), (fine, good)):
        for path in ("/reset_prefix_cache", "/flush_cache"):
            served.add_api_route(path, route, methods=["POST"])
    async with serve(app) as url, serve(fine) as other:
        spoken = engine if engine == "nemo_rl" else "vllm_chat"
        async with controlled(url, other, engine=spoken) as (host, client):
            host.engine = ENGINES[engine](host._client, MODEL)  # one that takes tokens would need a tokenizer
            assert (await call(client, "pause"))[1] == {"drained": True}
            answered, told = await call(client, "resume", reset_prefix_cache=True, weight_version="2")
            backends = host.pool.backends.values()
            assert answered == status, told
            assert {backend.paused for backend in backends} == {says is not None}
            assert {backend.weight_version for backend in backends} == {None if says else "2"}
            assert says is None or says in told["detail"]
            assert says is None or "; paused engines stay paused, and resume can be repeated" in told["detail"]
            assert status != 500 or ("other clients" in told["detail"]) == (answers != [500])
    assert {*resets} <= {"/flush_cache" if engine == "sglang" else "/reset_prefix_cache"}
    assert len(resets) >= min(1, len(answers))
