# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet as one service: every job has one outcome, whatever happens to its nodes."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from nemo_gym_prorl.failures import FailureKind, Origin
from nemo_gym_prorl.rollout import schemas
from nemo_gym_prorl.rollout.checkpoints import SharedCheckpoints
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.fleet import dispatcher
from nemo_gym_prorl.rollout.fleet.front import MAX_LOSSES, Front
from nemo_gym_prorl.rollout.fleet.nodes import Joined, Left
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.service import ServiceSettings
from tests.dapo.test_runner import Scorer
from tests.rollout.command_line import prorl, write
from tests.rollout.fleet.fleets import SMALL, Changing, Fleet, Service, fleet, service
from tests.rollout.handlers import PlannedHandler
from tests.rollout.serving import serve


ROW = {"responses_create_params": {"input": "hi"}}


def lasting(seconds: float, **plan: Any) -> dict[str, Any]:
    return ROW | {"plan": {"run": [{"seconds": seconds}]} | plan}


HELD = ROW | {"plan": {"run": [{"how": "held"}]}}


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


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
        while len(there.front.store.live()):
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
        await until(lambda: there.front.dispatcher.statuses)
        row = ROW | {"rewards": [0.5], "long": True, "labels": ["7"]}
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


async def test_what_a_lost_node_ran_is_run_elsewhere_and_what_it_says_later_concerns_nobody() -> None:
    async with fleet(2) as there:
        for i in range(8):
            await there.client.submit(HELD, id=f"r{i}")
        await until(lambda: all(len(handler.sessions) == 3 for handler in there.handlers))
        lost, kept = there.services
        there.nodes.tell(Left(lost.joined.node, "it was unplugged"))
        await until(lambda: len(there.front.dispatcher.nodes) == 1)
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
        await until(lambda: there.front.status().environments and there.front._shares)
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
            await until(lambda: len(there.front.dispatcher.statuses) > number)  # noqa: B023
        for i in range(8):
            await there.client.submit(lasting(0.2), id=f"r{i}")
        await outcomes(there, 8)
        assert [bool(node.handler.calls) for node in there.services] == [True, False, False]
        said = [what for what in there.said if "checkpoint_folder" in what]
        assert len(said) == 2
        assert "is another one" in said[0]
        assert "is not set" in said[1]


async def test_a_node_whose_folder_changes_is_measured_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by what it said before: alone it sets the measure, and a front tells of none before its nodes are up."""
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.05)
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
    async with fleet(2, joined=0) as there:
        one, other = there.services
        there.nodes.tell(one.joined)
        await until(lambda: there.front.dispatcher.statuses)
        one.pipeline.shared = SharedCheckpoints(first)
        await until(lambda: there.front.status().checkpoint_folder == one.pipeline.shared.identity)
        other.pipeline.shared = SharedCheckpoints(first)
        there.nodes.tell(other.joined)
        await until(lambda: sum(view.usable for view in there.front.dispatcher.views()) == 2)
        assert not [what for what in there.said if "checkpoint_folder" in what]
        one.pipeline.shared = SharedCheckpoints(second)
        await until(lambda: [what for what in there.said if "is another one" in what])
        await asyncio.sleep(0.5)
        for i in range(8):
            await there.client.submit(lasting(0.1), id=f"r{i}")
        await outcomes(there, 8)
        assert [bool(node.handler.calls) for node in there.services] == [False, True]
        assert len([what for what in there.said if "checkpoint_folder" in what]) == 1


async def test_a_next_try_is_told_of_those_before_it() -> None:
    async with fleet(3) as there:
        await there.client.submit(HELD, id="r")
        for lost in range(2):
            await until(lambda: sum(len(it.sessions) for it in there.handlers) > lost)  # noqa: B023
            node = there.front.dispatcher.placement.node_of(next(iter(there.front._jobs)))
            there.nodes.tell(Left(str(node), "gone"))
            await until(lambda: len(there.front.dispatcher.nodes) == 2 - lost)  # noqa: B023
        await until(lambda: all(it.sessions for it in there.handlers))
        tries = sorted((job for it in there.services for job in it.pipeline.store.live()), key=lambda job: job.id)
        one, two, three = (one.id for one in tries)
        told = [one.begin.tries if one.begin else None for one in tries]
        assert told == [None, (one,), (two, one)]
        (live,) = there.front.store.live()
        assert live.tries == [one, two, three]
        for handler in there.handlers:
            handler.let_go.set()
        (job,) = await outcomes(there, 1)
        assert [failure.kind for failure in job.failed_attempts] == [FailureKind.SESSION_LOST] * 2


async def test_a_job_that_is_lost_with_every_node_fails() -> None:
    async with fleet(MAX_LOSSES + 1, joined=1) as there:
        await there.client.submit(HELD, id="r")
        for number in range(MAX_LOSSES):
            await until(lambda: there.handlers[number].sessions)  # noqa: B023
            there.nodes.tell(there.services[number + 1].joined)
            there.nodes.tell(Left(there.services[number].joined.node, "gone"))
        (job,) = await outcomes(there, 1)
        assert (job.state, job.reward) == (JobState.FAILED, None)
        assert job.failure
        assert (job.failure.kind, job.failure.origin) == (FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE)
        assert not there.handlers[-1].calls


async def test_a_node_that_ends_in_order_loses_nothing() -> None:
    async with fleet(2) as there:
        for i in range(8):
            await there.client.submit(HELD, id=f"r{i}")
        await until(lambda: all(handler.sessions for handler in there.handlers))
        await there.services[0].pipeline.close()
        there.handlers[1].let_go.set()
        assert {job.state for job in await outcomes(there, 8)} == {JobState.SUCCEEDED}


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
        there.front.dispatcher.drain(first, False)
        await until(lambda: there.handlers[0].sessions)
        for handler in there.handlers:
            handler.let_go.set()
        await outcomes(there, 6)


async def test_what_waits_and_what_runs_is_cancelled() -> None:
    async with fleet(1, joined=1) as there, service() as another:
        there.nodes.tell(another.joined)  # with two nodes there are windows
        await until(lambda: len(there.front.dispatcher.statuses) == 2)
        for i in range(10):
            await there.client.submit(HELD, id=f"r{i}", group="g")
        await until(lambda: there.front.dispatcher.waiting == 2)
        answer = await there.client.cancel(group="g")
        assert {job.state for job in answer.rollouts} == {JobState.CANCELLED}
        assert {job.failure.kind for job in answer.rollouts if job.failure} == {FailureKind.CANCELLED}
        assert not there.handlers[0].sessions
        assert not another.handler.sessions
        assert not there.front.store.live()
        await there.client.submit(ROW, id="s")
        assert (await there.client.wait("s")).state is JobState.SUCCEEDED


async def test_what_ended_as_it_was_cancelled_has_its_result_or_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a cancellation tells of an outcome, and not what came of it."""
    async with fleet(1) as there:
        (carried,) = there.front.dispatcher._carriers.values()
        get, may = carried.client.get, asyncio.Event()

        async def late(rollout: str, **options: Any) -> JobView:
            await may.wait()
            return await get(rollout, **options)

        monkeypatch.setattr(carried.client, "get", late)
        await there.client.submit(lasting(0.05), id="a")
        await until(lambda: there.services[0].pipeline.store.states[JobState.SUCCEEDED])
        asked = asyncio.create_task(there.client.cancel(["a"]))
        await asyncio.sleep(0.3)
        may.set()
        await asked
        job = await there.client.get("a")
        assert (job.state, job.reward) == (JobState.SUCCEEDED, 1.0)
        assert job.result is not None
        assert job.result["reward"] == 1.0


async def test_what_is_cancelled_on_its_way_to_a_node_that_drains_runs_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(2) as there:
        first, second = there.services
        carried = there.front.dispatcher._carriers[first.joined.node]
        submit, may = carried.client.submit_once, asyncio.Event()

        async def late(row: dict[str, Any], **options: Any) -> JobView:
            await may.wait()
            return await submit(row, **options)

        monkeypatch.setattr(carried.client, "submit_once", late)
        there.front.dispatcher.drain(second.joined.node)
        await there.client.submit(lasting(3), id="a")
        await until(lambda: there.front._jobs)
        first.pipeline.draining = True
        there.front.dispatcher.drain(second.joined.node, drained=False)
        asked = asyncio.create_task(there.client.cancel(["a"]))
        await asyncio.sleep(0.2)
        may.set()
        assert (await asked).rollouts[0].state is JobState.CANCELLED
        assert not second.handler.calls


async def test_a_service_that_begins_anew_at_its_address_has_lost_its_rollouts() -> None:
    """As an agent does that dies and is started again: a job that kills its agent kills so many, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    front = Front(Changing([Joined("n", RolloutClient(f"http://127.0.0.1:{port}"))]))
    lives: list[Service] = []
    for number in range(MAX_LOSSES):
        it = Service(PlannedHandler(), SMALL)
        lives.append(it)
        async with serve(it.app(), port):
            if not number:
                await front.start()
                await until(lambda: front.dispatcher.statuses)
                job = await front.accept(JobRequest(HELD, id="poison"))
            await until(lambda: lives[-1].handler.sessions)
    async with serve(Service(PlannedHandler(), SMALL).app(), port):
        assert await front.wait(job, 30)
    assert job.outcome is not None
    assert job.outcome.failure is not None
    assert job.outcome.failure.kind is FailureKind.SESSION_LOST
    assert len(job.failures) == MAX_LOSSES
    names = {call[0] for it in lives for call in it.handler.calls}
    assert len(names) == MAX_LOSSES, "each try has an id of its own, and is told of those before"
    await front.close()
    for it in lives:
        it.handler.let_go.set()
        await it.pipeline.close()


async def test_what_a_node_has_lost_does_not_go_to_whatever_is_at_its_address_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(1) as there:
        old = Service(PlannedHandler(), SMALL)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        async with serve(old.app(), port):
            there.nodes.tell(Joined("changes", RolloutClient(f"http://127.0.0.1:{port}")))
            await until(lambda: len(there.front.dispatcher.statuses) == 2)
            there.front.dispatcher.drain(there.services[0].joined.node)
            for number in range(3):
                await there.client.submit(HELD, id=f"r{number}")
            await until(lambda: len(old.handler.sessions) == 3)
            there.front.dispatcher.drain(there.services[0].joined.node, drained=False)
        new = Service(PlannedHandler(), SMALL)
        status = new.pipeline.status
        monkeypatch.setattr(new.pipeline, "status", lambda: status().model_copy(update={"version": "0.0.9"}))
        there.handlers[0].let_go.set()
        async with serve(new.app(), port):
            for number in range(3):
                assert (await there.client.wait(f"r{number}")).reward == 1.0
            assert not new.handler.calls
        old.handler.let_go.set()
        for it in (old, new):
            await it.pipeline.close()


async def test_states_are_seen_as_at_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.1)
    async with fleet(1) as there:
        seen = list[tuple[str, str]]()

        async def follow() -> None:
            async for event in there.client.events("0"):
                seen.append((event.id, event.state))

        following = asyncio.create_task(follow())
        await there.client.submit(HELD, id="r")
        await until(lambda: there.front.store.states[JobState.RUNNING] == 1)
        await until(lambda: there.front.status().sessions == 1)
        assert (await there.client.status()).states[JobState.RUNNING] == 1
        there.handlers[0].let_go.set()
        await there.client.wait("r")
        await until(lambda: len(seen) == 6)
        following.cancel()
        states = ["queued", "initializing", "ready", "running", "evaluating", "succeeded"]
        assert seen == [("r", state) for state in states]


async def test_groups_that_are_scored_together_stay_together() -> None:
    async with fleet(3) as there:
        for it in there.services:
            (name,) = it.pipeline.environments.names
            together = replace(it.pipeline.environments.environment(name), scores_groups_of=4)
            it.pipeline.environments._all[name] = together
        views = [it.pipeline.status() for it in there.services]
        await until(lambda: [*there.front.dispatcher.statuses.values()] == views)
        for i in range(24):
            await there.client.submit(lasting(0.01), id=f"r{i}", group=f"g{i // 4}")
        await outcomes(there, 24)
        groups = [{job.group for job in it.pipeline.store.find(state=None, group=None)} for it in there.services]
        assert sum(map(len, groups)) == 6


async def test_bad_nodes_are_told_by_name_and_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.1)
    monkeypatch.setattr(schemas, "VERSION", "0.1.0")
    something_else = FastAPI()

    @something_else.get("/{path:path}")
    async def page(path: str) -> dict[str, str]:
        return {"welcome": path}

    async with fleet(1) as there, service() as old, serve(something_else) as elsewhere:
        older = old.pipeline.status().model_copy(update={"version": "0.0.9"})
        monkeypatch.setattr(old.pipeline, "status", lambda: older)
        there.nodes.tell(old.joined)
        there.nodes.tell(Joined("elsewhere", RolloutClient(elsewhere)))
        there.nodes.tell(Joined("nobody", RolloutClient("http://127.0.0.1:9")))
        await until(lambda: len(there.front.dispatcher.nodes) == 4)
        await until(lambda: len([said for said in there.said if "0.0.9" in said or "no rollout service" in said]) >= 3)
        for i in range(12):
            await there.client.submit(lasting(0.01), id=f"r{i}")
        assert {job.state for job in await outcomes(there, 12)} == {JobState.SUCCEEDED}
        assert not old.handler.calls
        said = " ".join(there.said)
        assert "it runs nemo-gym-prorl 0.0.9, and this is 0.1.0" in said
        assert f"what answers at {elsewhere} is no rollout service" in said
        assert "no rollout service answers at http://127.0.0.1:9" in said


async def test_without_nodes_a_front_says_so_and_takes_nothing() -> None:
    async with fleet(0) as there:
        with pytest.raises(ApiError, match="503: no node is up yet"):
            await there.client.submit_once(ROW)
        assert (await there.client.status()).stages["run"].slots == 0  # type: ignore[index]


async def test_a_front_has_bounds() -> None:
    async with fleet(2, settings=ServiceSettings(max_queued=2)) as there:
        for i in range(10):  # two windows of 4, and 2
            await there.client.submit_once(HELD, id=f"r{i}")
        with pytest.raises(ApiError, match="429: 2 rollouts are waiting"):
            await there.client.submit_once(HELD, id="r10")
        again = await there.client.submit_once(HELD, id="r0")
        assert again.id == "r0"
        with pytest.raises(ApiError, match=r"409.*another row"):
            await there.client.submit_once(ROW, id="r0")
        with pytest.raises(ApiError, match=r"422.*environment: there is no 'nope'"):
            await there.client.submit_once(ROW, environment="nope")


async def test_the_command_line_finds_a_front_and_its_nodes(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", *[lasting(0.01)] * 10)
    async with fleet(2) as there:
        code, said = await prorl("submit", str(rows), "--repeats", "2", PRORL_HEAD=there.url, PRORL_URL="")
        assert (code, "20 rollouts" in said or "20" in said) == (0, True), said
        urls = ",".join(it.url for it in there.services)
        code, said = await prorl("submit", str(rows), "--repeats", "2", "--run", "direct", url=urls)
        assert code == 0, said
        shares = [
            sum(1 for (rollout, what) in it.calls if what == "run" and "direct" in rollout) for it in there.handlers
        ]
        assert sum(shares) == 20
        assert all(shares)
        code, said = await prorl("status", url=urls)
        assert code == 1
        assert "several services" in said
