# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Background loops: every loop of the package survives an exception, and health checks tell of the exception."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from nemo_gym_prorl import async_tasks
from nemo_gym_prorl.async_tasks import PROCESS_LOOPS, BackgroundLoops
from nemo_gym_prorl.fleet import dispatcher
from nemo_gym_prorl.fleet.gateway import FleetGateway, gateway_app
from nemo_gym_prorl.http.applications import LoopMetrics, health_router
from nemo_gym_prorl.http.problems import MEDIA_TYPE
from nemo_gym_prorl.policy.http.api import add_control_routes
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.storage.journal import Journal
from nemo_gym_prorl.servers import task_server as task_server_module
from nemo_gym_prorl.tasks.sessions import Sessions
from tests.fleet.fleets import Changing, service
from tests.policy.runtimes import hosted
from tests.prorl_code.conftest import build
from tests.rollout.serving import serve


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart within the time of a test."""
    monkeypatch.setattr(async_tasks, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(async_tasks, "SETTLED_S", 0.3)


def raise_once(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Have the first call of a function raise; later calls are the function's own."""
    original, left = getattr(owner, name), [ValueError("a defect")]

    def replacement(*args: Any, **more: Any) -> Any:
        if left:
            raise left.pop()
        return original(*args, **more)

    patch.setattr(owner, name, replacement)


def bare(loops: BackgroundLoops | None = None) -> FastAPI:
    app = FastAPI()
    app.include_router(health_router(loops or BackgroundLoops()))
    return app


@asynccontextmanager
async def model_server(folder: Path) -> AsyncIterator[str]:
    async with hosted("http://127.0.0.1:9/v1", engine="vllm_chat") as host:
        app = FastAPI()
        add_control_routes(app, host)
        app.router.lifespan_context = FastAPI().router.lifespan_context  # the host runs already
        async with serve(app) as url:
            yield url


@asynccontextmanager
async def front(folder: Path) -> AsyncIterator[str]:
    async with service() as node:
        at = FleetGateway(Changing([node.joined]), report=lambda what: None)
        await at.start()
        async with serve(gateway_app(at, key=None)) as url:
            yield url
        await at.close()


@asynccontextmanager
async def task_server(folder: Path) -> AsyncIterator[str]:
    async with serve(build("prorl_math", sandbox_provider=None, session_ttl_s=0.4).setup_webserver()) as url:
        yield url


@asynccontextmanager
async def journal(folder: Path) -> AsyncIterator[str]:
    kept = Journal(str(folder))
    async with serve(bare()) as url:
        yield url
    await kept.close()
    assert "journal" not in {thread.name for thread in threading.enumerate()}


type Case = tuple[str, Any, str, Callable[[Path], AbstractAsyncContextManager[str]]]

CASES: list[Case] = [
    ("backend-tick", BackendPool, "tick", model_server),
    ("node-survey", RolloutClient, "status", front),
    ("session-sweeper", Sessions, "sweep", task_server),
    ("journal", Journal, "_take", journal),
]


@pytest.mark.parametrize(("name", "owner", "broken", "parts"), CASES, ids=[case[0] for case in CASES])
async def test_a_loop_that_raises_once_is_restarted_and_turns_health_red_meanwhile(
    name: str,
    owner: Any,
    broken: str,
    parts: Callable[[Path], AbstractAsyncContextManager[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, constant in ((dispatcher, "SURVEY_S"), (dispatcher, "_FIRST_S"), (task_server_module, "RENEW_S")):
        monkeypatch.setattr(module, constant, 0.1)
    failed: list[BackgroundLoops] = []
    real = BackgroundLoops._failed
    seen = asyncio.Event()

    async def until_seen(pause_s: float) -> None:
        await seen.wait()
        await asyncio.sleep(pause_s)

    def fails(loops: BackgroundLoops, *args: Any) -> float:
        failed.append(loops)
        monkeypatch.setattr(loops, "sleep", until_seen)  # a loaded machine may look later than a pause lasts
        return real(loops, *args)

    monkeypatch.setattr(BackgroundLoops, "_failed", fails)
    before = PROCESS_LOOPS.restarts[name]
    async with aiohttp.ClientSession() as http:
        raise_once(monkeypatch, owner, broken)
        async with parts(tmp_path) as url, asyncio.timeout(60):
            while (told := await health(http, url))[0] != 503:
                await asyncio.sleep(0.02)
            _, kind, problem = told
            seen.set()
            while (told := await health(http, url))[0] != 200:
                await asyncio.sleep(0.02)
    assert kind == MEDIA_TYPE
    assert problem["type"].endswith("background-loop-failing")
    assert problem["errors"] == [{"field": name, "message": "the last pass ended with ValueError"}]
    (loops,) = failed
    assert loops.restarts[name] == 1 + (before if loops is PROCESS_LOOPS else 0)
    assert f'prorl_background_restarts_total{{loop="{name}"}}' in exposed(loops)


async def health(http: aiohttp.ClientSession, url: str) -> tuple[int, str, Any]:
    async with http.get(f"{url}/healthz") as response:
        return response.status, response.content_type, await response.json(content_type=None)


def exposed(loops: BackgroundLoops) -> str:
    registry = CollectorRegistry()
    registry.register(LoopMetrics(loops))
    return generate_latest(registry).decode()


async def test_pauses_double_up_to_a_bound_and_a_completed_pass_resets_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    now, slept = 0.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    ends = iter(["raise"] * 9 + ["cancel", "ok", "raise", "long", "end"])

    async def work() -> float | None:
        nonlocal now
        match next(ends):
            case "raise":
                raise ValueError("a defect")
            case "cancel":  # what the work awaits is cancelled, the loop is not
                raise asyncio.CancelledError
            case "long":  # the loop has settled before the exception
                now += async_tasks.SETTLED_S
                raise KeyError("another")
            case "end":
                return None
        return 7.0

    loops = BackgroundLoops(lambda: now, sleep)
    await loops.start("loop", work)
    doubling = [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert slept == [*doubling, 7.0, 0.5, 0.5]
    assert loops.restarts == {"loop": 12}
    assert not loops.failing
    traces = [record for record in caplog.records if record.exc_info]
    assert [record.exc_info[0] for record in traces if record.exc_info] == [
        ValueError,
        asyncio.CancelledError,
        KeyError,
    ]
    assert len(caplog.records) == 12, "each failure has a line, and the traceback of a kind is logged once"


async def test_a_cancelled_loop_ends_and_a_client_ends_with_the_exception() -> None:
    loops, client = BackgroundLoops(), BackgroundLoops(restart=False)

    async def waits() -> None:
        await asyncio.Event().wait()

    async def raises() -> None:
        raise ValueError("a defect")

    task, failed = loops.start("waits", waits), client.start("raises", raises)
    await asyncio.wait([failed])
    assert isinstance(failed.exception(), ValueError)
    await loops.aclose()
    assert task.cancelled()
    assert not loops.failing
