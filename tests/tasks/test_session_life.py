# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions under random faults: no sandbox outlives its rollout.

Runs in virtual time with the real pipeline and handler, and the real server with its sessions. The connection between
them can lose requests and replies. Agents die, pause and restart; sandboxes start late or fail to start or stop; each
step of the task may hang.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_gym.sandbox.providers import register_provider
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxSpec
from starlette.datastructures import Headers

from nemo_gym_prorl.agent.gym_environment import GymContext, GymEnvironmentHandler, GymSession
from nemo_gym_prorl.agent.gym_http import (
    RENEW_S,
    Address,
    GymServer,
    require_ok,
)
from nemo_gym_prorl.agent.run_rows import empty_response
from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.http.client import ConnectFailed, ConnectionDropped, HttpAnswer, HttpClient
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Trajectory
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.settings import Budgets, PipelineSettings
from nemo_gym_prorl.servers import task_sandboxes
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.sandbox_lifecycle import STOP_RETRY_S
from nemo_gym_prorl.tasks.sessions import LEASE_SWEEPS, Sessions
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, OpenTools, SandboxNeeds
from tests.conftest import LONG
from tests.prorl_code.conftest import task_server
from tests.rollout.virtual_time import VirtualTimeLoop, run_in_virtual_time


FOR_EVER = 1e7
LEASE_S = LEASE_SWEEPS * RENEW_S
BUDGETS = Budgets(init=60.0, run=60.0, eval=60.0)
SETTINGS = PipelineSettings(
    budgets=BUDGETS, release_timeout_s=10.0, cancel_grace_s=5.0, max_attempts=2, unreachable_s=120.0
)
BEGIN_AGAIN_S = 3.0
"""Seconds until a dead agent is restarted."""


@dataclass(frozen=True)
class Plan:
    """Durations of a rollout's steps, and the behaviour of its sandboxes."""

    open: float = 0.0
    prepare: float = 1.0
    work: float = 5.0
    artefacts: float = 0.0
    grade: float = 5.0
    create: float = 1.0
    refused: int = 0
    """Number of failing creations."""
    close: float = 0.0
    stuck: int = 0
    """Number of failing stops."""

    @property
    def bound_s(self) -> float:
        """Seconds in which an unused sandbox must be gone."""
        return LEASE_S + 2 * RENEW_S + self.create + (self.close + STOP_RETRY_S) * (self.stuck + 1)


FIRST, AT_ONCE = "first", Plan(prepare=0.0, work=0.0, grade=0.0, create=0.0)


@dataclass(eq=False)
class Box:
    row: str
    number: int
    unwanted_since: float | None = None


class World:
    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.plans = plans
        self.boxes: list[Box] = []
        self.made = 0
        self.answered = False
        self.refused = {name: plan.refused for name, plan in plans.items()}
        self.stuck = {name: plan.stuck for name, plan in plans.items()}


class Provider:
    world: ClassVar[World]

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        name = str(spec.image)
        await asyncio.sleep(self.world.plans[name].create)
        if self.world.refused[name]:
            self.world.refused[name] -= 1
            raise RuntimeError("no sandbox now")
        self.world.made += 1
        box = Box(name, self.world.made)
        self.world.boxes.append(box)
        return SandboxHandle(str(box.number), "moody", box)

    async def close(self, handle: SandboxHandle) -> None:
        box: Box = handle.raw
        await asyncio.sleep(self.world.plans[box.row].close)
        if self.world.stuck[box.row]:
            self.world.stuck[box.row] -= 1
            raise RuntimeError("it does not stop")
        if box in self.world.boxes:
            self.world.boxes.remove(box)

    async def fetch_image(self, spec: SandboxSpec) -> None:
        pass

    async def has_room(self, handle: SandboxHandle) -> bool:
        return True

    async def egress(self, handle: SandboxHandle) -> list[dict[str, Any]]:
        return []

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        pass

    async def aclose(self) -> None:
        pass


register_provider("moody", Provider)


class Work(OpenTools):
    def __init__(self) -> None:
        self.schemas = [{"name": "work", "description": "Works."}]

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> Self:
        assert needs is not None
        assert needs.image is not None
        await asyncio.sleep(Provider.world.plans[needs.image].open)
        return self

    async def call(self, tool: str, arguments: object) -> str:
        assert isinstance(arguments, dict)
        await asyncio.sleep(arguments["seconds"])
        return "done"


class Steps:
    """A task whose steps take the planned time."""

    def __init__(self) -> None:
        self.tools = Work()

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        return SandboxNeeds(image=row["name"])

    async def prepare(self, row: Mapping[str, Any], tools: Work) -> None:
        await asyncio.sleep(Provider.world.plans[row["name"]].prepare)

    async def artefacts(self, row: Mapping[str, Any], tools: Work) -> str:
        await asyncio.sleep(Provider.world.plans[row["name"]].artefacts)
        return "taken"

    async def grade(
        self, row: Mapping[str, Any], artefacts: str, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        async with open_sandbox():
            await asyncio.sleep(Provider.world.plans[row["name"]].grade)
        return Grade(1.0, "right")


class Server(TaskServer):
    def make_task(self) -> Steps:
        return Steps()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Any]:
    config = {"host": "127.0.0.1", "port": 1, "name": "steps", "entrypoint": "app.py", "domain": "math"}
    settings = TaskServerConfig(**config, sandbox_provider={"moody": {}}, image="none", max_sandbox_starts=100)
    with (
        mock.patch.object(task_sandboxes, "OWN_PROVIDER", "moody"),
        mock.patch.object(task_sandboxes, "require_runtime"),
    ):
        app = task_server(Server, settings).setup_webserver()
        async with app.router.lifespan_context(app):
            yield app


class Wire(GymServer):
    """Connection from one agent to the server, with faults."""

    def __init__(self, app: Any) -> None:
        http = HttpClient()
        http.request = self._request  # type: ignore[method-assign]
        super().__init__("steps", Address("http://steps"), http)
        self._app = app
        self._in_flight: set[asyncio.Future[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._passable = asyncio.Event()
        self._passable.set()
        self.dead = self.is_cut = False

    def kill(self) -> None:
        """The agent sends no more requests, and its connections close."""
        self.dead = True
        self._break()

    async def cut(self, seconds: float) -> None:
        self.is_cut = True
        self._break()
        await asyncio.sleep(seconds)
        self.is_cut = False

    async def stand_still(self, seconds: float) -> None:
        """Pause requests and replies for a time; connections stay open."""
        self._passable.clear()
        await asyncio.sleep(seconds)
        self._passable.set()

    def _break(self) -> None:
        for broken in self._in_flight:
            if not broken.done():
                broken.set_result(None)

    async def is_reachable(self) -> bool:
        return not self.is_cut

    async def _request(self, method: str, url: str, headers: Mapping[str, str], data: Sequence[bytes]) -> HttpAnswer:
        await self._passable.wait()
        if self.dead:
            await asyncio.Event().wait()
        if self.is_cut:
            raise ConnectFailed
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone = asyncio.Event()
        answer = HttpAnswer(0, b"", Headers(raw=[]))
        asked = [{"type": "http.request", "body": b"".join(data), "more_body": False}]

        async def receive() -> Any:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal answer
            if message["type"] == "http.response.start":
                answer = HttpAnswer(message["status"], b"", Headers(raw=message["headers"]))
            else:
                answer = replace(answer, body=answer.body + message.get("body", b""))

        path = url.removeprefix(self.url)
        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"},
            **{"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""},
            **{"client": ("127.0.0.1", 2), "server": ("127.0.0.1", 1)},
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        served = asyncio.create_task(self._app(scope, receive, send))
        self._serving.add(served)
        served.add_done_callback(self._serving.discard)
        self._in_flight.add(broken)
        try:
            await asyncio.wait({served, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._in_flight.discard(broken)
            gone.set()
        await self._passable.wait()
        if self.dead:
            await asyncio.Event().wait()
        if broken.done():
            raise ConnectionDropped("cut", begun=False)
        served.result()
        return answer


class Doer(GymEnvironmentHandler):
    async def run(self, job: Job, session: GymSession) -> Trajectory:
        response = empty_response(job.row["responses_create_params"])
        job.trajectory = trajectory = Trajectory(response, evidence=session)
        for seconds in job.row["work"]:
            answer = await self._server.post("/work", {"seconds": seconds}, session.cookies)
            require_ok(answer, "work", FailureKind.SESSION_LOST, InfrastructureError)
        session.awaits_verdict = True
        return trajectory


class Agent:
    """An agent process between two restarts."""

    def __init__(self, app: Any) -> None:
        self.wire = Wire(app)
        context = GymContext(self.wire, self.wire)
        clock = asyncio.get_running_loop().time
        self.pipeline = Pipeline(Environments.of(Doer(context)), SETTINGS, clock)
        self.pipeline.loops.start("session-leases", context.cleanup.renew)
        self.jobs: dict[str, Job] = {}

    @classmethod
    async def begin(cls, app: Any) -> Self:
        """Start an agent that has completed a rollout and so knows the server's routes."""
        agent = cls(app)
        agent.submit(FIRST, AT_ONCE)
        while not agent.jobs[FIRST].state.terminal:
            await asyncio.sleep(0)
        del agent.jobs[FIRST]
        return agent

    def submit(self, name: str, plan: Plan) -> None:
        row = {"name": name, "work": [plan.work] * 2, "responses_create_params": {"input": []}}
        self.jobs[name] = self.pipeline.submit(JobRequest(row, id=name))


@dataclass
class Play:
    """Rollouts with fault events at given seconds."""

    plans: dict[str, Plan]
    events: list[tuple[float, str, float]] = field(default_factory=list)
    ended: dict[str, Job] = field(default_factory=dict)
    agent: Agent = field(init=False)

    async def run(self) -> dict[str, Job]:
        self.world = Provider.world = World(self.plans | {FIRST: AT_ONCE})
        async with serving() as app:
            self.app = app
            self.agent = await Agent.begin(app)
            for name, plan in self.plans.items():
                self.agent.submit(name, plan)
            doing = [asyncio.create_task(self._do(*event)) for event in self.events]
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*doing)
            while not all(job.state.terminal for job in self.agent.jobs.values()):
                await asyncio.sleep(1)
            await asyncio.sleep(1 + max(plan.bound_s for plan in self.plans.values()))
            assert not self.world.boxes, f"all rollouts have ended: {self.world.boxes}"
            watching.cancel()
            await asyncio.wait({watching})
            if not watching.cancelled():
                watching.result()
            return {**self.ended, **self.agent.jobs}

    async def _do(self, after: float, what: str, much: float) -> None:
        await asyncio.sleep(after)
        agent = self.agent
        if what == "cancel":
            if names := [*agent.jobs]:
                await agent.pipeline.cancel(agent.jobs[names[int(much) % len(names)]])
        elif what == "cut":
            await agent.wire.cut(much)
        elif what == "stop":
            await agent.wire.stand_still(much)
        elif what == "stall":  # of the server, with all else on the machine
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop._now += much
            for box in self.world.boxes:
                box.unwanted_since = box.unwanted_since and box.unwanted_since + much
        elif not agent.wire.dead:
            assert what == "kill"
            agent.wire.kill()
            await asyncio.sleep(BEGIN_AGAIN_S + much)
            self.ended |= {name: job for name, job in agent.jobs.items() if job.state.terminal}
            self.agent = await Agent.begin(self.app)
            for name in agent.jobs.keys() - self.ended.keys():
                self.agent.submit(name, self.plans[name])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1)
            now = asyncio.get_running_loop().time()
            for box in self.world.boxes:
                job = self.agent.jobs.get(box.row)
                lives = job is not None and not job.state.terminal and not self.agent.wire.dead
                newest = max(other.number for other in self.world.boxes if other.row == box.row)
                if lives and box.number == newest:
                    box.unwanted_since = None
                elif box.unwanted_since is None:
                    box.unwanted_since = now
                else:
                    assert now - box.unwanted_since <= self.plans[box.row].bound_s, (box, job)


def play(plans: Mapping[str, Plan], *events: tuple[float, str, float]) -> dict[str, Job]:
    return run_in_virtual_time(Play(dict(plans), list(events)).run())


PLAN = Plan()
"""INIT until 2 s, RUN until 12 s, EVAL until 18 s."""


@pytest.mark.parametrize(
    ("plan", "events", "attempts"),
    [
        pytest.param(replace(PLAN, work=25, grade=50), [], 1, id="it works for longer than a lease"),
        pytest.param(PLAN, [(0.5, "kill", 0)], 1, id="an agent dies while its sandbox comes up"),
        pytest.param(PLAN, [(1.5, "kill", 0)], 1, id="... while its session is made ready"),
        pytest.param(PLAN, [(5, "kill", 0)], 1, id="... during a call"),
        pytest.param(PLAN, [(14, "kill", 0)], 1, id="... during its verdict"),
        pytest.param(replace(PLAN, work=FOR_EVER), [(5, "kill", 600)], None, id="... for long, in an endless call"),
        pytest.param(PLAN, [(1.5, "cut", 1)], 2, id="the answer of a seed is lost"),
        pytest.param(replace(PLAN, prepare=FOR_EVER), [(20, "cancel", 0)], None, id="a session is never made ready"),
        pytest.param(PLAN, [(7, "cancel", 0), (7, "cut", 3)], None, id="a release is lost"),
        pytest.param(replace(PLAN, artefacts=FOR_EVER), [], None, id="nothing can be taken out"),
        pytest.param(replace(PLAN, artefacts=FOR_EVER), [(15, "kill", 0)], None, id="... and the agent dies"),
        pytest.param(replace(PLAN, grade=FOR_EVER), [(20, "cancel", 0)], None, id="a verdict never ends"),
        pytest.param(replace(PLAN, grade=FOR_EVER), [(20, "kill", 0)], None, id="... and its agent dies"),
        pytest.param(replace(PLAN, stuck=2), [], None, id="a sandbox does not stop at once"),
        pytest.param(replace(PLAN, close=70), [], None, id="stopping takes longer than it may"),
        pytest.param(PLAN, [(5, "stop", LEASE_S - 2 * RENEW_S)], 1, id="an agent stands still for a while"),
        pytest.param(PLAN, [(5, "stop", 600)], None, id="... for long"),
        pytest.param(PLAN, [(5, "stall", 50)], 1, id="all stand still"),
    ],
)
def test_no_sandbox_outlives_its_rollout(plan: Plan, events: list[tuple[float, str, float]], attempts: int) -> None:
    """``attempts`` is the number of attempts of a successful rollout; ``None`` allows any outcome."""
    [job] = play({"it": plan}, *events).values()
    if attempts is not None:
        assert job.outcome is not None
        assert (job.outcome.reward, len(job.failures) + 1) == (1.0, attempts), job.failures


@given(
    st.lists(
        st.builds(
            Plan,
            open=st.sampled_from([0.0] * 8 + [3.0, FOR_EVER]),
            prepare=st.sampled_from([0.0, 1.0, 1.0, 30.0, FOR_EVER]),
            work=st.sampled_from([0.0, 5.0, 5.0, 40.0, FOR_EVER]),
            artefacts=st.sampled_from([0.0] * 6 + [5.0, FOR_EVER]),
            grade=st.sampled_from([0.0, 5.0, 5.0, 40.0, FOR_EVER]),
            create=st.sampled_from([0.0, 1.0, 1.0, 20.0, 90.0]),
            refused=st.sampled_from([0, 0, 0, 1, 3]),
            close=st.sampled_from([0.0, 0.0, 2.0, 70.0]),
            stuck=st.sampled_from([0, 0, 0, 1, 3]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 12.0, 12.5, 15.0, 18.0, 33.0, 61.0, 70.0]),
            st.sampled_from(["kill", "kill", "cut", "cut", "cancel", "stop", "stall"]),
            st.sampled_from([0.0, 1.0, 2.0, 5.0, 25.0, 70.0]),
        ),
        max_size=5,
    ),
)
@settings(max_examples=200 if LONG else 12)
def test_random_faults_leave_no_sandbox(plans: list[Plan], events: list[tuple[float, str, float]]) -> None:
    jobs = play({f"r{number}": plan for number, plan in enumerate(plans)}, *events)
    assert all(job.state.terminal for job in jobs.values())


class Boxes(Provider):
    async def start(self, needs: SandboxNeeds, snapshot: str | None) -> Sandbox:
        return Sandbox(self, await self.create(SandboxSpec(image=needs.image)))


async def seeded(sessions: Sessions[Any, str]) -> str:
    await sessions.seed("s", {"name": "a"})
    Provider.world.answered = True
    return await sessions.call("s", "work", {"seconds": 0})


async def graded(sessions: Sessions[Any, str]) -> float:
    await sessions.seed("s", {"name": "a"})
    Provider.world.answered = True
    return (await sessions.verify("s", {})).reward


@pytest.mark.parametrize("life", [seeded, graded])
@pytest.mark.parametrize("cut", ["cancel", "close", "end"])
@pytest.mark.parametrize("beside", [False, True])
async def test_session_cut_at_any_step_leaves_no_sandbox(
    life: Callable[..., Awaitable[Any]], cut: str, beside: bool
) -> None:
    """Cancel a caller, close the session or close all at each step of the event loop.

    A second caller of the same session succeeds if only the first one was cancelled.
    """
    for steps in range(0, 60, 1 if LONG else 2):
        world = Provider.world = World({"a": AT_ONCE})
        sessions: Sessions[Any, str] = Sessions(Steps(), Boxes())
        first = asyncio.create_task(life(sessions))
        second = asyncio.create_task(life(sessions)) if beside else None
        for _ in range(steps):
            await asyncio.sleep(0)
        if cut == "cancel":
            first.cancel()
        elif cut == "close":
            await sessions.close("s")
        else:
            await sessions.aclose()
        ended = await asyncio.gather(*filter(None, (first, second)), return_exceptions=True)
        if cut == "cancel" and second is not None:
            assert second.result() in ("done", 1.0), (steps, ended)
        await sessions._work.drain()
        owned = sum(session.sandbox is not None for session in sessions._sessions.values())
        assert len(world.boxes) == owned, (steps, ended)
        assert not owned or (cut != "end" and world.answered), (steps, ended)
        await sessions.aclose()
        assert not world.boxes, (steps, ended)


async def test_idle_session_without_a_lease_is_closed() -> None:
    world = Provider.world = World({"a": AT_ONCE})
    sessions: Sessions[Any, str] = Sessions(Steps(), Boxes(), ttl_s=0.05)
    await sessions.seed("s", {"name": "a"})
    working = asyncio.create_task(sessions.call("s", "work", {"seconds": 0.5}))
    while not working.done():
        sessions.sweep()
        await asyncio.sleep(0.1)
    assert (await working, len(world.boxes)) == ("done", 1)
    await asyncio.sleep(0.1)
    sessions.sweep()
    await sessions.aclose()
    assert not world.boxes
