# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The job API over real sockets: every route, every refusal, and each fault of DESIGN §5 as a caller sees it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Response

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import Budgets, PipelineSettings, PoolSizes
from tests.rollout.handlers import Act, Bench, FastSettings, application
from tests.rollout.serving import serve


SETTINGS = FastSettings(
    stages=PoolSizes(init=2, ready=1, run=2, eval=2),
    budgets=Budgets(init=0.5, run=0.5, eval=0.5),
    release_timeout_s=0.3,
    cancel_grace_s=0.1,
    max_queued=3,
    retain_bytes=2**20,
)
FOREVER = 3600.0


def row(**plan: list[Act]) -> dict[str, Any]:
    """A row whose handler acts as planned."""
    acts = {what: [asdict(act) for act in acts] for what, acts in plan.items()}
    return {"responses_create_params": {"input": "hi"}, "plan": acts}


@asynccontextmanager
async def service(settings: PipelineSettings = SETTINGS) -> AsyncIterator[tuple[RolloutClient, Pipeline, Bench]]:
    bench = Bench(settings)
    pipeline = bench.pipeline()
    async with serve(application(pipeline)) as url, RolloutClient(url, patience_s=0) as client:
        yield client, pipeline, bench
        await pipeline.close()
        assert not any(pipeline.scheduler.working(stage) for stage in Stage), "every slot came back"


async def reach(client: RolloutClient, rollout_id: str, state: str) -> None:
    async with asyncio.timeout(60):
        while (await client.get(rollout_id)).state != state:
            await asyncio.sleep(0.005)


async def refused(work: Awaitable[Any]) -> tuple[int, str, str | None]:
    """Status, type and field of a refusal."""
    with pytest.raises(ApiError) as error:
        await work
    problem = error.value.problem
    field = problem.errors[0]["field"] if problem.errors else None
    return problem.status, problem.type.removeprefix("urn:nemo-gym-prorl:problem:"), field


@pytest.mark.parametrize("state", ["queued", "initializing", "ready", "running", "evaluating"])
async def test_cancel_in_each_state(state: str) -> None:
    settings = FastSettings(stages=PoolSizes(init=1, ready=1, run=1, eval=1))
    block = {"queued": "init", "initializing": "init", "ready": "run", "running": "run", "evaluating": "eval"}[state]
    blocked = row(**{block: [Act("ok", FOREVER)]})
    async with service(settings) as (client, _, bench):
        if state in ("queued", "ready"):
            await client.submit(blocked, id="in-front")
            await reach(client, "in-front", "initializing" if state == "queued" else "running")
        await client.submit(blocked if state != "ready" else row(), id="target")
        await reach(client, "target", state)
        answer = await client.cancel(["target", "nobody"])
        assert answer.unknown == ["nobody"]
        [cancelled] = answer.rollouts
        assert cancelled.state is JobState.CANCELLED
        assert cancelled.failure is not None
        assert cancelled.failure.kind == "cancelled"
        assert cancelled.reward is None
        assert len(bench.handler.sessions) == (1 if state == "ready" else 0), "only the one in front is left"
        assert all(count == 1 for count in bench.handler.releases.values())
        again = await client.cancel(["target"])
        assert again.rollouts[0].state is JobState.CANCELLED
        await client.cancel(["in-front"])
        assert not bench.handler.sessions, "no session outlives its cancellation"
        after = await client.submit(row())
        assert (await client.wait(after.id)).state is JobState.SUCCEEDED


async def test_a_full_queue_asks_to_come_back() -> None:
    async with service() as (client, _, _), aiohttp.ClientSession() as http:
        blocked = {"row": row(init=[Act("ok", FOREVER)]), "budgets": {"init": 3600}}
        for _ in range(SETTINGS.stages.init + SETTINGS.max_queued):
            async with http.post(f"{client.url}/v1/rollouts", json=blocked) as response:
                assert response.status == 202
        async with http.post(f"{client.url}/v1/rollouts", json=blocked) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            assert response.content_type == "application/problem+json"
            assert (await response.json())["type"] == "urn:nemo-gym-prorl:problem:queue-full"


async def test_a_malformed_submission_names_the_field() -> None:
    malformed: list[tuple[dict[str, Any], str]] = [
        ({"row": {}}, "row.responses_create_params"),
        ({"row": {"responses_create_params": {}}}, "row.responses_create_params.input"),
        ({"row": row(), "budgets": {"run": 0}}, "budgets.run"),
        ({"row": row(), "budgets": {"rum": 5}}, "budgets.rum"),
        ({"row": row(), "id": "a/b"}, "id"),
        ({"row": row(), "client": "\u200b"}, "client"),
        ({"row": row(), "environment": "nope"}, "environment"),
        ({"row": {**row(), "rollout": {"grup": "g"}}}, "grup"),
        ({"row": {**row(), "rollout": "g"}}, "row.rollout"),
        ({}, "row"),
    ]
    async with service() as (client, pipeline, _), aiohttp.ClientSession() as http:
        for body, field in malformed:
            async with http.post(f"{client.url}/v1/rollouts", json=body) as response:
                assert response.status == 422, body
                problem = await response.json()
            assert any(error["field"].startswith(field) for error in problem["errors"]), body
            assert field.split(".")[-1] in problem["detail"], body
        assert len(pipeline.store) == 0


async def test_the_log_of_outcomes_can_be_followed_and_says_when_it_is_cut() -> None:
    settings = PipelineSettings(stages=PoolSizes(init=1, ready=0, run=1, eval=1), retain_bytes=22_000)
    async with service(settings) as (client, _, _):
        for number in range(4):
            await client.submit(row(), id=f"r{number}", group="even" if number % 2 == 0 else "odd")
            await client.wait(f"r{number}")
        first = await client.ended("0", limit=3)
        assert [job.id for job in first.rollouts] == ["r0", "r1", "r2"]
        rest = await client.ended(first.cursor)
        assert [job.id for job in rest.rollouts] == ["r3"]
        follower = asyncio.create_task(client.ended(rest.cursor, wait=20, results=True))
        await asyncio.sleep(0.05)
        await client.submit(row(), id="r4")
        news = await follower
        assert [job.id for job in news.rollouts] == ["r4"]
        assert news.rollouts[0].result == {"reward": 1.0}
        for number in range(5, 9):
            await client.submit(row(), id=f"r{number}")
            await client.wait(f"r{number}")
        assert (await refused(client.ended("0")))[0] == 410
        assert (await refused(client.ended(news.cursor.split("-")[0] + "-10000")))[0] == 422
        assert (await refused(client.ended("0123456789ab-1", wait=20)))[0] == 410
        for forgotten in (client.get("r0"), client.submit(row(), id="r0")):
            assert (await refused(forgotten))[:2] == (410, "rollout-forgotten")


async def test_events_tell_every_transition_in_order_and_can_be_resumed() -> None:
    async with service() as (client, _, _):
        await client.submit(row(), id="a")
        await client.wait("a")
        seen = []
        async for event in client.events(after="0"):
            seen.append(event)
            if event.state.terminal:
                break
        expected = ["queued", "initializing", "ready", "running", "evaluating", "succeeded"]
        assert [event.state.value for event in seen] == expected
        assert [event.seq for event in seen] == list(range(1, 7))
        assert seen[-1].reward == 1.0
        async for event in client.events(after=seen[-2].cursor):
            assert event.seq == 6
            break
        for wrong, status in [(seen[-1].cursor.replace("-6", "-7"), 422), ("0123456789ab-1", 410), ("x", 422)]:
            assert (await refused(anext(client.events(after=wrong))))[0] == status


async def test_a_listener_that_fell_behind_is_told_and_not_left_with_a_gap() -> None:
    async with service() as (client, pipeline, _):
        events = client.events(after="0")
        pipeline.submit(JobRequest(row(), id="a"))
        assert (await anext(events)).seq == 1
        while (await anext(events)).state is not JobState.SUCCEEDED:
            pass
        pipeline.submit(JobRequest(row(), id="b"))
        pipeline.store._events.clear()  # as a burst of ten thousand others would
        assert (await refused(anext(events)))[:2] == (410, "cursor-expired")


async def test_status_health_and_metrics() -> None:
    async with service() as (client, pipeline, _), aiohttp.ClientSession() as http:
        await client.submit(row(run=[Act("agent")]), id="a")
        await client.wait("a")
        await client.submit(row(run=[Act("ok", FOREVER)]), id="b", budgets={"run": 3600})
        await reach(client, "b", "running")
        status = await client.status()
        assert status.stages["run"].working == 1
        assert status.stages["run"].slots == 2
        assert status.sessions == 1
        assert status.states["failed"] == 1
        assert status.environments["planned"].handler == "planned"
        async with http.get(f"{client.url}/metrics") as response:
            text = await response.text()
        assert 'prorl_stage_working{environment="planned",stage="run"} 1.0' in text
        assert 'prorl_rollouts_total{environment="planned",failure_kind="agent_run_error",state="failed"} 1.0' in text
        assert (
            'prorl_failed_attempts_total{environment="planned",failure_kind="agent_run_error",stage="run"} 1.0' in text
        )
        async with http.get(f"{client.url}/healthz") as response:
            assert await response.json() == {"status": "ok"}
        drained = asyncio.create_task(pipeline.drain())
        await asyncio.sleep(0)
        assert (await refused(client.submit(row())))[0] == 503
        async with http.get(f"{client.url}/healthz") as response:
            assert await response.json() == {"status": "draining"}
        await client.cancel(["b"])
        assert await drained


async def test_an_id_in_anybodys_words_works_throughout() -> None:
    name = "schritt 7.prompt-3 — größer, 質問 %2F 🙂"
    async with service(PipelineSettings()) as (client, _, _):
        await client.submit(row(), id=name, group=name, client=name)
        assert (await client.wait(name)).id == name
        assert [job.id for job in (await client.list(group=name)).rollouts] == [name]
        assert [job.id for job in (await client.cancel([name])).rollouts] == [name]
        assert [job.id for job in (await client.cancel(group=name)).rollouts] == [name]


BAD_JSON = [
    (b'{"row": {"responses_create_params": {"input": "\\ud800"}}}', "row.responses_create_params.input"),
    (b'{"row": {"responses_create_params": {"input": "x"}, "a": [{"\\udfff": 1}]}}', "row.a.0"),
    (b'{"row": {"responses_create_params": {"input": "x"}, "n": [0, 36893488147419103232]}}', "row.n.1"),
    (b'{"row": {"responses_create_params": {"input": "\xff"}}}', "body"),
    (b"{", "body"),
]


async def test_what_cannot_be_written_again_is_refused_with_its_field() -> None:
    async with service() as (client, pipeline, _), aiohttp.ClientSession() as http:
        headers = {"Content-Type": "application/json"}
        for body, field in BAD_JSON:
            async with http.post(f"{client.url}/v1/rollouts", data=body, headers=headers) as response:
                assert (response.status, response.content_type) == (422, "application/problem+json"), body[:100]
                problem = await response.json()
            assert [error["field"] for error in problem["errors"]] == [field], body[:100]
            assert problem["title"] == "Invalid request"
        assert len(pipeline.store) == 0


async def test_a_drain_over_http() -> None:
    async with service() as (client, pipeline, _), aiohttp.ClientSession() as http:
        await client.submit(row(run=[Act("ok", FOREVER)]), id="r", budgets={"run": 3600})
        answer = await client.drain()
        assert (answer.draining, answer.live) == (True, 1)
        assert (await client.status()).draining
        with pytest.raises(ApiError) as draining:
            await client.submit(row())
        assert draining.value.problem.type.endswith(":draining")
        assert draining.value.retry_after_s == 30
        waiting = asyncio.create_task(client.drain(60))
        await client.cancel(["r"])
        assert (await waiting).live == 0
        async with http.post(f"{client.url}/v1/resume") as response:
            assert await response.json() == {"draining": False, "live": 0}
        assert (await client.wait((await client.submit(row())).id)).reward == 1.0
        assert not pipeline.draining


@pytest.mark.parametrize("status", [429, 503])
async def test_the_client_comes_back_when_it_is_asked_to(status: int) -> None:
    calls: list[float] = []
    app = FastAPI()

    @app.get("/v1/rollouts/r")
    async def get() -> Response:
        calls.append(asyncio.get_running_loop().time())
        if len(calls) < 3:
            return Response(status_code=status, headers={"Retry-After": "0.3"})
        return Response(status_code=404)

    async with serve(app) as url, RolloutClient(url) as client:
        assert (await refused(client.get("r")))[0] == 404
    assert len(calls) == 3
    assert calls[1] - calls[0] > 0.25, "it waited as it was asked to"
