# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own chat server over a vLLM on the CPU: what its generation workers serve, less their GPUs.

    python -m tests.nemo_rl.chat_server FOLDER_OF_MODEL PORT GENERATIONS_AS_JSON

The worker's class makes the engine and the routes. Its constructor is left out, since it wants devices and weights of
a trainer. The last argument has blocks ``policy.generation``, as NeMo RL hands them to its workers, by name. A block
has the routes, with its own parsers, under that name. All blocks share one engine, with the settings of the first,
since starting an engine takes minutes.

Two more routes stand in for Ray calls. ``POST /weights`` reads weights from a folder, in place of a refit by NCCL.
``POST /prefix_cache_resets`` calls the worker's own method, and ``GET`` lists what vLLM answered.
"""

from __future__ import annotations

import copy
import json
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI


MODEL = "tiny"
KV_BLOCKS = 256  # of 128 tokens each: twice the context of every rollout in flight, in place of a GiB


def application(folder: str, generations: dict[str, dict[str, Any]]) -> FastAPI:
    """The worker's routes, by recipe."""
    # Not above: the engine's own process imports this module as well.
    from nemo_rl.models.generation.interfaces import get_num_routed_experts, resolve_routed_experts_dtype
    from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl
    from transformers import AutoConfig

    first, worker = next(iter(generations.values())), object.__new__(VllmAsyncGenerationWorkerImpl)
    experts = get_num_routed_experts(AutoConfig.from_pretrained(folder))
    worker.routed_experts_dtype = resolve_routed_experts_dtype(experts)
    # It serves on all addresses by itself, and counts by threads; we want neither.
    quiet = {"expose_http_server": False, "enable_vllm_metrics_logger": False}
    vllm, more = first["vllm_cfg"], first.get("vllm_kwargs") or {}
    # NeMo RL turns the prefix cache on where a recipe leaves it open, on GPUs since Ampere.
    caches = vllm.get("enable_prefix_caching")
    mode = vllm.get("logprobs_mode")
    worker.cfg = first | {"vllm_cfg": first["vllm_cfg"] | quiet}
    worker._create_engine(
        {
            "model": folder,
            "served_model_name": MODEL,
            "dtype": "float32",
            "enforce_eager": True,
            "enable_return_routed_experts": experts is not None,
            "enable_prefix_caching": caches is not False,
            "worker_extension_cls": "tests.nemo_rl.cpu_experts.Tells" if experts is not None else "",
            "max_model_len": vllm["max_model_len"],
            "distributed_executor_backend": "uni",
            "num_gpu_blocks_override": KV_BLOCKS,
            **more,
            **({"logprobs_mode": mode} if mode else {}),
        }
    )
    resets: list[bool] = []
    reset_prefix_cache = worker.llm.reset_prefix_cache

    async def recorded_reset() -> None:
        resets.append(await reset_prefix_cache())

    worker.llm.reset_prefix_cache = recorded_reset

    async def weights(folder: str) -> None:
        await worker.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    async def reset() -> None:
        await worker.reset_prefix_cache_async()

    async def answers() -> list[bool]:
        return resets

    app = FastAPI()
    for name, generation in generations.items():
        own, routes = copy.copy(worker), FastAPI()
        own.cfg = generation | {"vllm_cfg": generation["vllm_cfg"] | quiet}
        own._setup_vllm_openai_api_server(routes)
        routes.post("/weights")(weights)
        routes.post("/prefix_cache_resets")(reset)
        routes.get("/prefix_cache_resets")(answers)
        app.mount(f"/{name}", routes)
    return app


if __name__ == "__main__":
    # Before the model, which takes its time, in which others look for ports.
    listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=2048)
    served = uvicorn.Config(application(sys.argv[1], json.loads(sys.argv[3])), log_level="warning")
    uvicorn.Server(served).run(sockets=[listener])
