# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Callers that hold a connection: vanish, come back, post twice. Real sockets, since that is what drops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import aiohttp
import orjson
import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.rollout.api.attached_callers import AttachedCallers, CallerGone, row_key
from nemo_gym_prorl.rollout.job import Job, JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import PipelineSettings
from tests.rollout.handlers import Act, Bench
from tests.rollout.serving import serve, until


def row(seconds: float, **fields: Any) -> dict[str, Any]:
    return {"plan": {"run": [asdict(Act("ok", seconds))]}, **fields}


def held(**fields: Any) -> dict[str, Any]:
    """A row whose rollout runs until it is let go."""
    return {"plan": {"run": [asdict(Act("held"))]}, **fields}


INDEXED = {"_ng_task_index": 0, "_ng_rollout_index": 0}


def answer(job: Job) -> bytes:
    assert job.outcome is not None
    return orjson.dumps({**job.outcome.result, "id": job.id, "state": job.state.value})


@asynccontextmanager
async def service(grace_s: float) -> AsyncIterator[tuple[str, Pipeline, Bench]]:
    bench = Bench(PipelineSettings())
    pipeline = bench.pipeline()
    watch = AttachedCallers(pipeline, grace_s)
    app = FastAPI()

    @app.post("/run")
    async def run(request: Request) -> Response:
        body = await request.body()
        try:
            wanted = orjson.loads(body)
            named = wanted.get("named")
            key = row_key(wanted, body) if named is None else named.encode()
            return Response(await watch.run(JobRequest(wanted, id=named), key, request, answer))
        except CallerGone:
            return Response(status_code=499)

    @app.middleware("http")  # Gym has one; it wraps the connection that the watch listens to
    async def passing(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    async with serve(app) as url:
        yield f"{url}/run", pipeline, bench
        await pipeline.close()


async def vanish(url: str, body: dict[str, Any], pipeline: Pipeline) -> None:
    """Post, and hang up as soon as the rollout runs."""
    posting = asyncio.create_task(post(url, body))
    await until(lambda: JobState.RUNNING in states(pipeline))
    posting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await posting


async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        return orjson.loads(await response.read())


def states(pipeline: Pipeline) -> list[JobState]:
    return [job.state for job in pipeline.store.find(state=None, group=None)]


async def test_an_abandoned_rollout_is_cancelled_after_the_grace_and_its_session_released() -> None:
    async with service(grace_s=0.5) as (url, pipeline, bench):
        await vanish(url, row(3600, **INDEXED), pipeline)
        assert states(pipeline) == [JobState.RUNNING], "within the grace it goes on"
        await until(lambda: states(pipeline) == [JobState.CANCELLED])
        assert not bench.handler.sessions


async def test_a_caller_that_comes_back_joins_its_rollout() -> None:
    async with service(grace_s=60) as (url, pipeline, bench):
        await vanish(url, held(**INDEXED), pipeline)
        again = asyncio.create_task(post(url, held(**INDEXED)))
        await asyncio.sleep(0.1)
        bench.handler.let_go.set()
        got = await again
        assert got["reward"] == 1.0
        assert got["state"] == "succeeded"
        assert states(pipeline) == [JobState.SUCCEEDED]
        assert sum(bench.handler.calls.values()) == 4, "each stage and the release, once"


@pytest.mark.parametrize(("fields", "rollouts"), [(INDEXED, 3), ({}, 3), ({**INDEXED, "named": "r"}, 1)])
async def test_callers_of_one_row_at_once_share_a_rollout_only_by_its_name(
    fields: dict[str, Any], rollouts: int
) -> None:
    async with service(grace_s=5) as (url, pipeline, _):
        got = await asyncio.gather(*(post(url, row(1.5, **fields)) for _ in range(3)))
        assert len({answer["id"] for answer in got}) == len(pipeline.store) == rollouts


async def test_a_delivered_result_is_never_replayed() -> None:
    """Under new weights the same row is a new rollout."""
    async with service(grace_s=5) as (url, pipeline, _):
        first = await post(url, row(0, **INDEXED))
        second = await post(url, row(0, **INDEXED))
        assert first["id"] != second["id"]
        assert states(pipeline) == [JobState.SUCCEEDED] * 2
        assert [job.row for job in pipeline.store.find(state=None, group=None)] == [{}, {}], "memory is given back"


async def test_two_callers_of_which_one_vanishes() -> None:
    async with service(grace_s=0.1) as (url, pipeline, bench):
        staying = asyncio.create_task(post(url, held(named="r")))
        await until(lambda: JobState.RUNNING in states(pipeline))
        await vanish(url, held(named="r"), pipeline)
        await asyncio.sleep(0.3)
        assert states(pipeline) == [JobState.RUNNING], "somebody still waits"
        bench.handler.let_go.set()
        assert (await staying)["state"] == "succeeded"
        assert sum(bench.handler.calls.values()) == 4


async def test_an_answer_that_lands_in_a_closed_connection_waits_for_its_caller() -> None:
    """The caller vanishes in the moment in which the job ends: the result is not thrown away with the connection."""
    pipeline = Bench(PipelineSettings()).pipeline()
    watch = AttachedCallers(pipeline, grace_s=60)
    wanted = row(0, **INDEXED)

    class Closed:
        async def receive(self) -> dict[str, str]:
            while not pipeline.store.states[JobState.SUCCEEDED]:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

    class Open:
        async def receive(self) -> dict[str, str]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

    with pytest.raises(CallerGone):
        await watch.run(JobRequest(wanted), b"key", Closed(), answer)  # type: ignore[arg-type]
    again = await watch.run(JobRequest(wanted), b"key", Open(), answer)  # type: ignore[arg-type]
    assert orjson.loads(again)["reward"] == 1.0
    assert len(pipeline.store) == 1
    await pipeline.close()
