# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Any request that the model server's OpenAPI document allows, and some that it forbids: none ends in a 5xx, in a
status that the document does not name, in an answer that is not what it says, or not at all. Behind it is the scripted
policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig, serve
from tests.policy.engines import free_port
from tests.policy.runtimes import server


PATHS = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/backends",
    "/v1/backends/{backend_id}",
    "/v1/backends/pause",
    "/v1/backends/resume",
    "/v1/backends/share",
    "/v1/backends/weight_version",
    "/v1/rollouts/{rollout}",
    "/v1/rollouts/{rollout}/tokens",
    "/v1/rollouts/{rollout}/turns",
    "/v1/rollouts/{rollout}/waited",
    "/metrics",
    "/healthz",
]
ENGINE: dict[str, str] = {}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server in a thread of its own, since schemathesis is synchronous."""
    started, address, loop = threading.Event(), f"http://127.0.0.1:{free_port()}", asyncio.new_event_loop()
    over = asyncio.Event()

    async def run() -> None:
        async with serve() as engine:
            ENGINE["url"] = engine
            model = server(engine, Path(), model=ScriptedConfig().model, policy={"unreachable_s": 1.0})
            app = model.setup_webserver()
            port = int(address.rpartition(":")[2])
            served = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
            serving = asyncio.create_task(served.serve())
            while not served.started:
                await asyncio.sleep(0.01)
            started.set()
            await over.wait()
            served.should_exit = True
            await serving

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(30)
    yield address
    loop.call_soon_threadsafe(over.set)
    thread.join(30)
    assert not thread.is_alive()


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
EXAMPLES = 20


def try_out(url: str, operation: Any) -> int:
    """Requests of one operation in any form; how many there were."""
    count = 0

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def hold(case: Any) -> None:
        nonlocal count
        count += 1
        if isinstance(case.body, dict) and "timeout_s" in case.body:
            case.body["timeout_s"] = 0.1  # as allowed as a day, and sooner over
        case.call_and_validate(checks=CHECKS, timeout=20)
        # Neither a pause nor a missing backend is what the next request is about.
        httpx.post(f"{url}/v1/backends/resume", json={}).raise_for_status()
        httpx.post(f"{url}/v1/backends/share", json={"parts": 1}).raise_for_status()
        if not httpx.get(f"{url}/v1/backends").json()["backends"]:
            httpx.post(f"{url}/v1/backends", json={"url": ENGINE["url"]}).raise_for_status()

    hold()
    return count


@pytest.mark.long("requests of any form to fifteen routes; nonsense has a short test in test_prorl_model.py")
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_documented(url: str, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} == set(PATHS)
    for operation in operations:
        if operation.path == path:
            assert try_out(url, operation) >= 1
