# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet as one service: every job has one outcome, whatever happens to its nodes, and clients are told apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.failures import FailureKind, Origin
from nemo_gym_prorl.fleet import dispatcher
from nemo_gym_prorl.fleet.gateway import MAX_LOST_NODES, FleetGateway
from nemo_gym_prorl.fleet.placement import NodeLeft
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.scheduling.fair_queue import GroupBarrier
from nemo_gym_prorl.rollout.settings import ServiceSettings
from nemo_gym_prorl.rollout.storage.checkpoints import SharedCheckpoints
from nemo_gym_prorl.rollout.storage.journal import Journal
from tests.cli.command_line import prorl
from tests.dapo.test_runner import Scorer
from tests.fleet.fleets import Changing, Fleet, Service, fleet, service
from tests.rollout.serving import until
from tests.rollout.test_access_control import OF, write


ROW = {"responses_create_params": {"input": "hi"}}


def lasting(seconds: float, **plan: Any) -> dict[str, Any]:
    return ROW | {"plan": {"run": [{"seconds": seconds}]} | plan}


HELD = ROW | {"plan": {"run": [{"how": "held"}]}}


async def outcomes(there: Fleet, count: int) -> list[JobView]:
    """All of them, as the log tells: each once."""
    cursor, jobs = "0", list[JobView]()
    async with asyncio.timeout(60):
        while len(jobs) < count:
            page = await there.client.ended(cursor, wait=5, results=True, limit=1000)
            jobs, cursor = jobs + page.rollouts, page.cursor
    assert len({job.id for job in jobs}) == len(jobs) == count
    return jobs


async def test_no_node_is_given_more_than_its_window_and_all_are_used() -> None:
    async with fleet(3) as there:
        await asyncio.gather(*(there.client.submit(lasting(0.05), id=f"r{i}", group=f"g{i // 4}") for i in range(40)))
        most = 0
        while len(there.gateway.store.live()):
            for it in there.services:
                held = sum(job.state not in ("evaluating",) for job in it.pipeline.store.live())
                most = max(most, held)
            await asyncio.sleep(0.005)
        jobs = await outcomes(there, 40)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        assert most <= 4
        shares = [sum(1 for (_, what) in handler.calls if what == "run") for handler in there.handlers]
        assert sum(shares) == 40
        assert min(shares) >= 10


async def test_a_result_is_what_the_node_has() -> None:
    async with service(Scorer()) as node, fleet(0) as there:
        there.nodes.tell(node.joined)
        await until(lambda: there.gateway.dispatcher.statuses)
        row = ROW | {"rewards": [0.5], "long": True, "labels": ["7"], "token_in_rate": 0.75}
        await there.client.submit(row, id="a:b:0:0", group="g", client="me", priority=3, run="x", max_attempts=2)
        seen = await there.client.wait("a:b:0:0")
        # Scorer reads the member off the node's id.
        (job,) = node.pipeline.store.find(state=None, group=None)
        async with RolloutClient(node.url) as direct:
            for form in TokenForm:
                theirs = await direct.get(job.id, tokens=form)
                ours = await there.client.get(seen.id, tokens=form)
                about = {"id", "submitted_at", "finished_at"}
                assert ours.model_dump(exclude=about) == theirs.model_dump(exclude=about)
        assert (ours.reward, ours.group, ours.client, ours.priority, ours.run) == (0.5, "g", "me", 3, "x")
        assert ours.weight_versions == ["0"]
        assert ours.token_in_rate == 0.75


async def test_what_a_lost_node_ran_is_run_elsewhere_and_what_it_says_later_concerns_nobody() -> None:
    async with fleet(2) as there:
        for i in range(8):
            await there.client.submit(HELD, id=f"r{i}")
        await until(lambda: all(len(handler.sessions) == 3 for handler in there.handlers))
        lost, kept = there.services
        there.nodes.tell(NodeLeft(lost.joined.node, "it was unplugged"))
        await until(lambda: len(there.gateway.dispatcher.nodes) == 1)
        lost.handler.let_go.set()  # it goes on, cut off
        kept.handler.let_go.set()
        jobs = await outcomes(there, 8)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        again = [job for job in jobs if job.failed_attempts]
        assert len(again) == 4
        assert {failure.kind for job in again for failure in job.failed_attempts} == {FailureKind.SESSION_LOST}
        assert "unplugged" in again[0].failed_attempts[0].reason
        await asyncio.sleep(0.2)
        assert len((await there.client.ended("0")).rollouts) == 8
        assert [said for said in there.said if "unplugged" in said]


async def test_without_a_folder_that_nodes_share_nothing_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.05)
    async with fleet(1) as there, aiohttp.ClientSession(there.url) as http:
        await there.client.submit(ROW, id="r")
        await there.client.wait("r")
        async with http.post("/v1/rollouts/r/fork") as response:
            assert (response.status, (await response.json())["errors"][0]["field"]) == (422, "checkpoint_folder")
        there.services[0].pipeline.shared = SharedCheckpoints(tmp_path)
        await until(lambda: there.gateway.status().environments and there.gateway._shares)
        async with http.post("/v1/rollouts/r/fork") as response:
            assert (response.status, (await response.json())["type"].rpartition(":")[2]) == (
                410,
                "checkpoints-forgotten",
            )
        assert await there.client.checkpoints("r") == []


async def test_a_node_with_another_folder_is_named_and_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.05)
    async with fleet(3, joined=0) as there:
        for number, node in enumerate(there.services):
            if number < 2:
                folder = tmp_path / str(number)
                folder.mkdir()
                node.pipeline.shared = SharedCheckpoints(folder)
            there.nodes.tell(node.joined)
            await until(lambda: len(there.gateway.dispatcher.statuses) > number)  # noqa: B023
        for i in range(8):
            await there.client.submit(lasting(0.2), id=f"r{i}")
        await outcomes(there, 8)
        assert [bool(node.handler.calls) for node in there.services] == [True, False, False]
        said = [what for what in there.said if "checkpoint_folder" in what]
        assert len(said) == 2
        assert "differs" in said[0]
        assert "is not set" in said[1]


async def test_a_job_that_is_lost_with_every_node_fails() -> None:
    async with fleet(MAX_LOST_NODES + 1, joined=1) as there:
        await there.client.submit(HELD, id="r")
        for number in range(MAX_LOST_NODES):
            await until(lambda: there.handlers[number].sessions)  # noqa: B023
            there.nodes.tell(there.services[number + 1].joined)
            there.nodes.tell(NodeLeft(there.services[number].joined.node, "gone"))
        (job,) = await outcomes(there, 1)
        assert (job.state, job.reward) == (JobState.FAILED, None)
        assert job.failure
        assert (job.failure.kind, job.failure.origin) == (FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE)
        assert not there.handlers[-1].calls


async def test_a_node_that_drains_gets_nothing_new_and_loses_nothing() -> None:
    async with fleet(2) as there:
        first = there.services[0].joined.node
        async with aiohttp.ClientSession(there.url) as http:
            async with http.post("/v1/nodes/drain", json={"node": first}) as answer:
                told = {view["node"]: (view["usable"], view["draining"]) for view in await answer.json()}
            assert told == {first: (False, True), there.services[1].joined.node: (True, False)}
            async with http.post("/v1/nodes/drain", json={"node": "nope"}) as answer:
                assert (answer.status, first in await answer.text()) == (422, True)
            async with http.get("/metrics") as answer:
                assert 'prorl_fleet_nodes{usable="true"} 1.0' in await answer.text()
        for i in range(6):
            await there.client.submit(HELD, id=f"r{i}")
        await until(lambda: len(there.handlers[1].sessions) == 3)
        assert not there.handlers[0].calls
        there.gateway.dispatcher.drain(first, False)
        await until(lambda: there.handlers[0].sessions)
        for handler in there.handlers:
            handler.let_go.set()
        await outcomes(there, 6)


async def test_what_waits_and_what_runs_is_cancelled() -> None:
    async with fleet(1, joined=1) as there, service() as another:
        there.nodes.tell(another.joined)  # with two nodes there are windows
        await until(lambda: len(there.gateway.dispatcher.statuses) == 2)
        for i in range(10):
            await there.client.submit(HELD, id=f"r{i}", group="g")
        await until(lambda: there.gateway.dispatcher.waiting == 2)
        answer = await there.client.cancel(group="g")
        assert {job.state for job in answer.rollouts} == {JobState.CANCELLED}
        assert {job.failure.kind for job in answer.rollouts if job.failure} == {FailureKind.CANCELLED}
        assert not there.handlers[0].sessions
        assert not another.handler.sessions
        assert not there.gateway.store.live()
        await there.client.submit(ROW, id="s")
        assert (await there.client.wait("s")).state is JobState.SUCCEEDED


async def test_groups_that_are_scored_together_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.05)
    async with fleet(3) as there:
        for it in there.services:
            (name,) = it.pipeline.environments.names
            together = replace(it.pipeline.environments.environment(name), scores_groups_of=4)
            it.pipeline.environments._all[name] = together
            it.pipeline.scheduler._cohorts = GroupBarrier({name: 4})  # siblings wait for each other, however slow
        views = [it.pipeline.status() for it in there.services]
        await until(lambda: [*there.gateway.dispatcher.statuses.values()] == views)
        for i in range(24):
            await there.client.submit(lasting(0.3), id=f"r{i}", group=f"g{i // 4}")
        await outcomes(there, 24)
        groups = [{job.group for job in it.pipeline.store.find(state=None, group=None)} for it in there.services]
        assert sum(map(len, groups)) == 6


async def test_without_nodes_a_front_says_so_and_takes_nothing() -> None:
    async with fleet(0) as there:
        with pytest.raises(ApiError, match="503: no node is up yet"):
            await there.client.submit_once(ROW)
        assert (await there.client.status()).stages["run"].slots == 0  # type: ignore[index]


async def test_a_front_has_bounds() -> None:
    async with fleet(2, settings=ServiceSettings(max_queued=2)) as there:
        for i in range(10):  # two windows of 4, and 2
            await there.client.submit_once(HELD, id=f"r{i}")
        with pytest.raises(ApiError, match="429: the queue is full"):
            await there.client.submit_once(HELD, id="r10")
        again = await there.client.submit_once(HELD, id="r0")
        assert again.id == "r0"
        with pytest.raises(ApiError, match=r"409.*another row"):
            await there.client.submit_once(ROW, id="r0")
        with pytest.raises(ApiError, match=r"422.*environment: no environment 'nope'"):
            await there.client.submit_once(ROW, environment="nope")


async def test_a_front_tells_its_clients_apart(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", OF["alice"], OF["bob"])
    async with (
        fleet(1, key="admin", clients=keys) as there,
        RolloutClient(there.url, "a", patience_s=0) as alice,
        RolloutClient(there.url, "b", patience_s=0) as bob,
        aiohttp.ClientSession() as http,
    ):
        for method, path in [("GET", "/v1/rollouts"), ("GET", "/v1/nodes"), ("GET", "/server_instances")]:
            for key, status in [(None, 401), ("c", 401), ("a", 403 if path == "/v1/nodes" else 200), ("admin", 200)]:
                async with http.request(method, there.url + path, headers=authorization(key)) as answer:
                    assert answer.status == status, (path, key)
        async with http.post(f"{there.url}/v1/nodes/drain", json={"node": "x"}, headers=authorization("b")) as answer:
            assert answer.status == 403
        assert (await alice.submit(HELD, id="r", group="g")).client == "alice"
        assert (await bob.submit(HELD, id="s", group="g")).client == "bob"
        with pytest.raises(ApiError, match="403"):
            await bob.get("r")
        with pytest.raises(ApiError, match="403"):
            await bob.cancel(["r"])
        assert [job.id async for job in alice.every(group="g")] == ["r"]
        (node,) = there.services
        await until(lambda: len(node.handler.sessions) == 2)
        groups = {job.group for job in node.pipeline.store.live()}
        assert len(groups) == 2, "at the node they are no siblings"
        node.handler.let_go.set()
        done = await alice.wait("r")
        assert (done.state, done.group) == (JobState.SUCCEEDED, "g")


# -- a gateway that dies --------------------------------------------------------------------------------------------


def runs(node: Service) -> list[str]:
    """Ids, at the node, of what it has run, once for each time."""
    return [rollout for (rollout, what), times in node.handler.calls.items() if what == "run" for _ in range(times)]


async def test_an_end_leaves_rollouts_at_their_nodes_and_a_node_that_is_gone_loses_them(tmp_path: Path) -> None:
    async with service() as stays, service() as goes:
        gateway = FleetGateway(Changing([stays.joined, goes.joined]), journal=Journal(str(tmp_path)))
        await gateway.start()
        await until(lambda: len(gateway.dispatcher.statuses) == 2)
        jobs = [await gateway.accept(JobRequest(HELD, id=f"r{i}")) for i in range(6)]
        jobs.append(await gateway.accept(JobRequest(HELD, id="taken back")))
        await until(lambda: len(stays.handler.sessions) + len(goes.handler.sessions) == 6)
        await gateway.cancel(jobs[-1])
        await gateway.close()
        assert not any(job.state.terminal for job in jobs[:-1])
        assert len(stays.pipeline.store.live()) + len(goes.pipeline.store.live()) == 6
        ran = set(runs(stays))
        stays.handler.let_go.set()

        gateway = FleetGateway(Changing([stays.joined]), journal=Journal(str(tmp_path)))
        await gateway.start()
        await gateway.store.wait_for_recovery()
        assert {job.id for job in gateway.store.live()} == {f"r{i}" for i in range(6)}
        for job in gateway.store.live():
            assert await gateway.wait(job, 30)
        ended = {job.id: job for job in gateway.store.find(state=None, group=None)}
        assert {job.state for job in ended.values()} == {JobState.SUCCEEDED}
        notes = [failure for job in ended.values() for failure in job.failures]
        assert {note.kind for note in notes} == {FailureKind.SHUTDOWN}
        assert len(notes) == len(goes.pipeline.store.live()), "these began again"
        assert ran <= set(runs(stays)), "those went on"
        assert len(runs(stays)) == 6
        await gateway.close()


async def test_a_second_front_is_refused_by_name(tmp_path: Path) -> None:
    async with service() as node:
        journal = Journal(str(tmp_path))
        code, said = await prorl("fleet", node.url, "--port", "1", "--journal", str(tmp_path))
        await journal.close()
        assert (code, f"journal: {tmp_path} is in use by another process" in " ".join(said.split())) == (1, True)
        code, told = await prorl("fleet", node.url, "--port", "1", "--journal", "here")
        assert code == 1
        assert "relative" in told
