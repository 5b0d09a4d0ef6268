# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""State of a rollout while its turns wait, run, are cancelled or are forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig, serve
from nemo_gym_prorl.policy.pool.dispatcher import WaitClock
from nemo_gym_prorl.servers.model_server import ProrlModel
from tests.agent.peers import until
from tests.policy.runtimes import server
from tests.rollout.serving import serve as serving


class Client:
    def __init__(self, http: aiohttp.ClientSession, url: str, model: ProrlModel) -> None:
        self._http = http
        self._url = url
        self.model = model

    async def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with self._http.request(method, f"{self._url}{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def turn(self, rollout: str, **more: Any) -> tuple[int, Any]:
        headers = {"X-Rollout-Id": rollout, "X-Rollout-Tokens": "deferred"}
        return await self.call("POST", "/v1/responses", {"input": "hi", **more}, headers)

    async def waited(self, rollout: str) -> float:
        status, said = await self.call("GET", f"/v1/rollouts/{rollout}/waited")
        assert status == 200, said
        return float(said["waited_s"])

    async def until_waited(self, rollout: str, more_than_s: float) -> float:
        async with asyncio.timeout(60):
            while (waited := await self.waited(rollout)) <= more_than_s:
                await asyncio.sleep(0.01)
        return waited

    @property
    def live(self) -> int:
        return sum(len(backend.live) for backend in self.model._runtime.pool.backends.values())

    @property
    def waiting(self) -> int:
        return sum(self.model._runtime.pool.waiting_of.values())

    @property
    def in_flight(self) -> int:
        return sum(len(backend.in_flight) for backend in self.model._runtime.pool.backends.values())


@contextlib.asynccontextmanager
async def client(base_url: str | list[str], **policy: Any) -> AsyncIterator[Client]:
    model = server(base_url, Path(), model=ScriptedConfig().model, policy=policy)
    async with serving(model.setup_webserver()) as url, aiohttp.ClientSession() as http:
        yield Client(http, url, model)


async def given_up(turn: asyncio.Task[Any]) -> None:
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn


async def test_a_body_whose_fields_are_all_optional_may_be_missing() -> None:
    async with serve() as engine, client(engine) as agent:
        for path in ("/v1/backends/pause", "/v1/backends/resume", "/v1/rollouts/r/key"):
            status, said = await agent.call("POST", path)
            assert status in (200, 201), said


async def test_waiting_for_a_backend_and_through_a_pause_is_told_while_it_lasts() -> None:
    async with serve() as engine, client(engine) as agent:
        began = time.monotonic()
        at_work = {"metadata": {"script": '{"turns": [{"content": "x", "latency_s": 0.2}]}'}}
        assert (await agent.turn("r", **at_work))[0] == 200
        before = await agent.waited("r")
        assert before <= time.monotonic() - began - 0.2, "an engine's own time is no waiting"
        assert (await agent.call("POST", "/v1/backends/pause", {"weight_version": "2"}))[0] == 422
        assert (await agent.call("POST", "/v1/backends/pause", {}))[0] == 200
        began = time.monotonic()
        turn = asyncio.create_task(agent.turn("r"))
        paused = await agent.until_waited("r", before + 0.3)
        assert paused - before <= time.monotonic() - began
        await agent.call("POST", "/v1/backends/resume", {})
        assert (await turn)[0] == 200
        over = await agent.waited("r")
        await asyncio.sleep(0.05)
        assert await agent.waited("r") == over >= paused
        assert (await agent.call("GET", "/v1/rollouts/other/waited"))[0] == 410
        await agent.call("DELETE", "/v1/rollouts/r")
        assert (await agent.call("GET", "/v1/rollouts/r/waited"))[0] == 410
        status, said = await agent.turn("r", previous_response_id="resp_of_another_process")
        assert (status, said["errors"][0]["field"]) == (410, "previous_response_id")


@given(moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 2.0, 4.0])), max_size=30))
def test_time_in_which_several_turns_wait_counts_once(moves: list[tuple[int, float]]) -> None:
    """Four turns start and stop waiting in any order, on a clock of the test."""
    wait, turns, expected = WaitClock(), dict[int, contextlib.ExitStack](), 0.0
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_gym_prorl.policy.pool.dispatcher.time.monotonic", lambda: now)
        for turn, seconds in moves:
            if turn in turns:
                turns.pop(turn).close()
            else:
                turns[turn] = contextlib.ExitStack()
                turns[turn].enter_context(wait.waiting_turn())
            now += seconds
            expected += seconds if turns else 0.0
            assert wait.seconds == expected
        for turn in turns.values():
            turn.close()


SLOW = {"metadata": {"script": '{"turns": [{"content": "x", "latency_s": 600}, {"content": "y"}]}'}}


async def test_deleting_a_rollout_ends_its_turns_and_frees_its_slot_at_once() -> None:
    async with serve() as engine, client(engine, limit=1) as agent:
        running = asyncio.create_task(agent.turn("r", **SLOW))
        await until(lambda: agent.in_flight == 1)
        waiting = asyncio.create_task(agent.turn("other"))
        await until(lambda: agent.waiting == 1)
        assert await agent.call("DELETE", "/v1/rollouts/r") == (200, {"rollout": "r"})
        assert (await waiting)[0] == 200
        status, said = await running
        assert (status, said["type"]) == (410, "urn:nemo-gym-prorl:problem:rollout-gone")
        assert await agent.call("DELETE", "/v1/rollouts/r") == (200, {"rollout": "r"})
        assert await agent.call("DELETE", "/v1/rollouts/never-was") == (200, {"rollout": "never-was"})


async def test_a_turn_that_is_given_up_gives_its_place_back_at_once_and_finds_it_again() -> None:
    async with serve() as engine, client(engine, limit=1) as agent:
        running = asyncio.create_task(agent.turn("r", **SLOW))
        await until(lambda: agent.in_flight == 1)
        waiting = asyncio.create_task(agent.turn("other", **SLOW))
        await until(lambda: agent.waiting == 1)
        # The pool is not told of time, so nobody rests for having been idle.
        agent.model._runtime.pool.tick = lambda now: []
        await given_up(running)
        await until(lambda: agent.waiting == 0)
        assert agent.in_flight == agent.live == 1
        await given_up(waiting)
        await until(lambda: agent.live == 0)
        assert agent.model._runtime.pool.backend_of("r") is not None
        assert (await agent.turn("r"))[0] == 200


async def test_weights_are_labelled_without_a_pause() -> None:
    async with serve() as engine, client(engine) as agent:
        _, unlabelled = await agent.turn("r")
        assert (await agent.call("POST", "/v1/backends/weight_version", {"weight_version": "1"}))[0] == 200
        status, said = await agent.call("POST", "/v1/backends/weight_version", {"weight_version": "1", "id": "nope"})
        assert (status, said["errors"][0]["field"]) == (404, "id")
        script = {"metadata": {"script": '{"turns": [{"content": "a"}, {"content": "x", "latency_s": 1}]}'}}
        turn = asyncio.create_task(agent.turn("r", previous_response_id=unlabelled["id"], **script))
        await until(lambda: agent.in_flight == 1)
        status, said = await agent.call("POST", "/v1/backends/weight_version", {"weight_version": "2"})
        assert (status, said["backends"][0]["weight_version"]) == (200, "2")
        assert agent.in_flight == 1, "nothing was drained"
        _, across = await turn
        _, told = await agent.call("GET", "/v1/rollouts/r/tokens")
        assert told["answers"][unlabelled["id"]]["weight_versions"] == [None, None]
        assert told["answers"][across["id"]]["weight_versions"] == ["1", "2"]


@pytest.mark.parametrize("name", ["ü-ß", "日本", "a b", "100%", "%41", "x" * 200, "a/b", "."])
async def test_ids_of_any_script_keep_their_tokens(name: str) -> None:
    """Names that no path can contain are refused, because their tokens could not be read."""
    async with serve() as engine, client(engine) as agent:
        coded = quote(name, safe="")
        if name in ("a/b", "."):
            status, problem = await agent.turn(coded)
            assert (status, problem["errors"][0]["field"]) == (422, "X-Rollout-Id")
            return
        status, answer = await agent.turn(coded)
        assert status == 200
        status, told = await agent.call("GET", f"/v1/rollouts/{coded}/tokens")
        assert (status, told["rollout"], list(told["answers"])) == (200, name, [answer["id"]])


async def test_a_turn_that_waits_for_longer_than_rollouts_are_kept_is_no_disuse() -> None:
    async with serve() as engine, client(engine, keep_s=2.0) as agent:
        _, first = await agent.turn("r")
        assert (await agent.call("POST", "/v1/backends/pause", {}))[0] == 200
        turn = asyncio.create_task(agent.turn("r", previous_response_id=first["id"]))
        await agent.until_waited("r", 2.3)
        assert (await agent.call("POST", "/v1/backends/resume", {}))[0] == 200
        status, second = await turn
        assert status == 200
        assert (await agent.turn("other"))[0] == 200  # which is when old ones are looked for
        assert (await agent.turn("r", previous_response_id=second["id"]))[0] == 200
