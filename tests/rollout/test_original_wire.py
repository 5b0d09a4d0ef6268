# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The original ProRL wire format over real sockets, and the faults of the original that must not come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from nemo_gym_prorl.rollout.api.attached_callers import AttachedCallers
from nemo_gym_prorl.rollout.api.original_wire import to_messages, wire_router
from nemo_gym_prorl.rollout.api.routes import PipelineMetrics, rollout_router
from nemo_gym_prorl.rollout.settings import Budgets
from tests.rollout.handlers import Act, Bench, FastSettings
from tests.rollout.serving import serve


class Backends:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    async def add(self, address: str) -> None:
        self.addresses.append(address)

    async def clear(self) -> None:
        self.addresses.clear()


class Wire:
    """Posts JSON and returns status and JSON."""

    def __init__(self, url: str, http: aiohttp.ClientSession, bench: Bench, backends: Backends) -> None:
        self.url, self.http, self.bench, self.backends = url, http, bench, backends

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def status(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/status") as response:
            return dict(await response.json())


@asynccontextmanager
async def service(grace_s: float = 0.1) -> AsyncIterator[Wire]:
    bench = Bench(FastSettings(budgets=Budgets(run=2.0), cancel_grace_s=0.1))
    pipeline = bench.pipeline()
    backends = Backends()
    app = FastAPI()
    app.include_router(wire_router(pipeline, AttachedCallers(pipeline, grace_s), backends.add, backends.clear))
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
    async with serve(app) as url, aiohttp.ClientSession() as http:
        yield Wire(url, http, bench, backends)
        await pipeline.close()


def instance(**plan: Act) -> dict[str, Any]:
    acts = {stage: [asdict(act)] for stage, act in plan.items()}
    return {"instance_id": "i-1", "trajectory_id": 4, "prompt": "Fix it.", "plan": acts}


async def test_start_process_stop() -> None:
    async with service() as wire:
        assert (await wire.post("/process", instance=instance()))[0] == 503
        assert (await wire.post("/start"))[0] == 200
        assert (await wire.post("/start"))[0] == 400
        status, result = await wire.post("/process", instance=instance(), sampling_params={"temperature": 0.5})
        assert status == 200
        assert (result["instance_id"], result["trajectory_id"]) == ("i-1", 4)
        assert result["success"]
        assert result["resolved"]
        assert not result["filter"]
        assert result["critical_error"] is None
        assert result["messages"] == [{"role": "user", "content": "Fix it."}]
        expected = {"init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "timeout_triggered"}
        assert set(result["timing"]) == expected
        assert (await wire.post("/stop"))[0] == 200
        assert (await wire.post("/process", instance=instance()))[0] == 503


async def test_a_cancelled_job_answers_with_its_state_and_an_unknown_one_is_404() -> None:
    async with service() as wire:
        await wire.post("/start")
        running = asyncio.create_task(wire.post("/process", instance=instance(run=Act("ok", 60)), job_id="j"))
        async with asyncio.timeout(60):
            while (await wire.status())["active_run"] == 0:
                await asyncio.sleep(0.005)
        assert (await wire.post("/cancel", job_id="nobody"))[0] == 404
        assert (await wire.post("/cancel", job_id="j"))[0] == 200
        status, result = await running
        assert status == 200
        assert (result["critical_error"], result["success"], result["filter"]) == ("cancelled", False, True)
        assert result["reward"] is None
        assert not wire.bench.handler.sessions
        assert (await wire.status())["pending_jobs"] == 0


@pytest.mark.parametrize(
    ("plan", "critical"),
    [
        ({"init": Act("agent")}, "init"),
        ({"run": Act("agent")}, "run"),
        ({"eval": Act("agent")}, "eval"),
        ({"run": Act("ok", 60)}, "timeout"),
    ],
)
async def test_failures_say_where(plan: dict[str, Act], critical: str) -> None:
    async with service() as wire:
        await wire.post("/start")
        status, result = await wire.post("/process", instance=instance(**plan))
        assert status == 200
        assert (result["critical_error"], result["filter"], result["reward"]) == (critical, True, None)
        assert result["error"]


async def test_a_job_id_again_is_a_new_job_once_its_answer_was_delivered() -> None:
    """A trainer uses its ids again under new weights, also with another row."""
    async with service() as wire:
        await wire.post("/start")
        for round_ in range(3):
            wanted = {**instance(), "round": round_}
            status, result = await wire.post("/process", instance=wanted, job_id="j")
            assert (status, result["job_id"], result["success"]) == (200, "j", True), result
        assert sum(calls for (_, what), calls in wire.bench.handler.calls.items() if what == "run") == 3


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/process", {"instance": {"instance_id": "i"}}, "instance"),
        ("/process", {"instance": {"prompt": 5}}, "instance.responses_create_params.input"),
        ("/process", {"instance": {"prompt": "\ud800"}}, "instance.prompt"),
        ("/add_llm_server", {"address": "no url"}, "address"),
    ],
)
async def test_what_is_refused_names_the_field(path: str, body: dict[str, Any], field: str) -> None:
    async with service() as wire:
        await wire.post("/start")
        status, problem = await wire.post(path, **body)
        assert status == 422
        assert problem["errors"][0]["field"].startswith(field)


async def test_backends_reach_the_model_server() -> None:
    async with service() as wire:
        await wire.post("/add_llm_server", address="http://127.0.0.1:9/v1")
        assert wire.backends.addresses == ["http://127.0.0.1:9/v1"]
        await wire.post("/clear_llm_server")
        assert wire.backends.addresses == []


def test_a_turn_becomes_one_message_with_its_tokens() -> None:
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}", **tokens},
        {"type": "function_call_output", "call_id": "c1", "output": "files"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}], **tokens},
    ]
    assert to_messages([{"role": "system", "content": "Be good."}], output) == [
        {"role": "system", "content": "Be good."},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "c1", "name": "bash", "arguments": "{}"}],
            "token_ids": [3, 4],
            "input_ids": [1, 2],
            "logprobs": [-0.1, -0.2],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "files"},
        {
            "role": "assistant",
            "content": "Done.",
            "tool_calls": [],
            "token_ids": [3, 4],
            "input_ids": [1, 2],
            "logprobs": [-0.1, -0.2],
        },
    ]
