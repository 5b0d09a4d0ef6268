# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The runner with real services over HTTP: pipeline and job API, with a handler that rows script."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.dapo.contract import AgentFailures, NothingToLearn, SamplerConfig
from nemo_gym_prorl.dapo.group import Group, Member, RolloutOutcome
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import Runner, TrainingBatch
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import CallerError, Stage
from nemo_gym_prorl.fleet.forwarder import JobForwarder
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.rollout.job import Checkpoint, Job, JobState, Trajectory, Verdict
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes
from tests.rollout.handlers import Bench, FastSettings, PlannedHandler, application
from tests.rollout.serving import serve


SETTINGS = FastSettings(stages=PoolSizes(init=64, ready=64, run=64, eval=64), cancel_grace_s=0.5, max_attempts=1)


class Scorer(PlannedHandler):
    """Handler with scripted rewards.

    Row fields: ``rewards`` by member; ``late`` members that work for ``late_s``; ``turns`` with a checkpoint each;
    ``then``: rewards from the second epoch on; ``forked``: rewards of forks by turn; ``token_in_rate``.
    """

    async def run(self, job: Job, session: int) -> Trajectory:
        if _member(job) in job.row.get("late", []):
            await asyncio.sleep(job.row["late_s"])
        for turn in range(1, job.row.get("turns", 0) + 1):
            await job.keep_checkpoint(Checkpoint(turn, None, 1))
        return await super().run(job, session)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        await super().eval(job, trajectory)
        if (labels := job.row.get("labels")) is not None:
            first = job.id.endswith(":0")
            job.progress.weight_versions = [{"turn": 0, "first": "0", "last": labels[0] if first else "0"}]
        job.progress.token_in_rate = job.row.get("token_in_rate")
        rewards = job.row["rewards"]
        if job.forked_from is not None:
            rewards = job.row["forked"][str(job.forked_from["turn"])]
        elif job.id.split(":")[1] != "0" and "then" in job.row:
            rewards = job.row["then"]
        reward = float(rewards[_member(job) % len(rewards)])
        told = {name: values[_member(job)] for name in ("accuracy",) if (values := job.row.get(name))}
        told |= job.row["verdicts"][_member(job)] if "verdicts" in job.row else {}
        told |= {"reward": reward, "tokens": [job.id], "response": {"output": said(_member(job))}}
        return Verdict(reward, told)


def said(member: int) -> list[dict[str, Any]]:
    """Return output items of a rollout: one turn with ``member + 1`` tokens."""
    tokens, log_probs = [7] * (member + 1), [-0.5] * (member + 1)
    return [{"prompt_token_ids": [1, 2], "generation_token_ids": tokens, "generation_log_probs": log_probs}]


def _member(job: Job) -> int:
    return int(job.id.split(":")[2])


type Fault = Callable[[str, str], Awaitable[int | None]]
"""Gets method and path of a request, and may return a status that replaces the service's response."""


class Node:
    """Rollout service at one address, which can be restarted without memory.

    Attributes:
        fault: called before each request.
    """

    def __init__(self, settings: PipelineSettings = SETTINGS, token: str | None = None) -> None:
        self.settings, self.token = settings, token
        self._address = socket.socket()  # keeps the port reserved
        self._address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._address.bind(("127.0.0.1", 0))
        self._port = int(self._address.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self.handler = Scorer()
        self.pipeline: Pipeline
        self.fault: Fault | None = None

    async def start(self) -> None:
        self.handler = Scorer()
        self.pipeline = Bench(self.settings, self.handler).pipeline()
        app = application(self.pipeline, self.token)

        async def front(scope: Scope, receive: Receive, send: Send) -> None:
            fault = self.fault if scope["type"] == "http" else None
            status = await fault(scope["method"], scope["path"]) if fault else None
            answer: ASGIApp = app if status is None else Response(status_code=status)
            await answer(scope, receive, send)

        self._served = serve(front, self._port, grace_s=0)
        await self._served.__aenter__()

    async def stop(self) -> None:
        await self._served.__aexit__(None, None, None)
        await self.pipeline.close()


@asynccontextmanager
async def nodes(
    count: int = 1, settings: PipelineSettings = SETTINGS, token: str | None = None
) -> AsyncIterator[list[Node]]:
    started = [Node(settings, token) for _ in range(count)]
    for node in started:
        await node.start()
    try:
        yield started
    finally:
        for node in started:
            await node.stop()


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"responses_create_params": {"input": f"prompt {n}"}, "rewards": [0, 1], **fields} for n in range(count)]


def runner(
    up: list[Node],
    dataset: list[dict[str, Any]],
    config: SamplerConfig,
    *,
    epochs: int | None = None,
    state: Mapping[str, Any] | None = None,
    token: str | None = None,
    run: str = "dapo",
    options_run: str | None = None,
    **options: Any,
) -> Runner:
    prompts = Epochs(dataset, seed=None, epochs=epochs)
    clients = [RolloutClient(node.url, token) for node in up]
    options |= {"run": options_run} if options_run else {}
    return Runner(DynamicSampler(config, prompts, run=run), prompts, clients, state=state, options=options)


async def test_batches_from_two_services() -> None:
    dataset = rows(40)
    for uninformative in dataset[::4]:
        uninformative["rewards"] = [1]
    async with (
        nodes(2) as up,
        runner(up, dataset, SamplerConfig(3, 4, 24, max_staleness=2, reference_share=0.0)) as driver,
    ):
        seen: set[str] = set()
        for step in range(4):
            batch = await driver.batch()
            assert batch is not None
            assert (batch.number, batch.version, len(batch.groups)) == (step, step, 3)
            for group in batch.groups:
                assert [rollout.reward for rollout in group] == [0, 1, 0, 1]
                assert [rollout.result["tokens"] for rollout in group] == [[rollout.id] for rollout in group]
                assert [[*rollout.tokens[0].sampled] for rollout in group] == [[7] * size for size in range(1, 5)]
                assert all(rollout.prompt in dataset for rollout in group)
                ids = {rollout.id for rollout in group}
                assert not ids & seen
                seen |= ids
            driver.weights(step + 1)
            places = driver.state()["services"]
            by_url = {node.url: node for node in up}
            for rollout in driver.sampler.results():
                assert by_url[places[rollout]].pipeline.store.get(rollout) is not None, "where its result is to be had"
        assert all([*node.pipeline.store.find(state=None, group=None)] for node in up), "both had work"
        sampler = driver.sampler
        await driver.__aexit__(None, None, None)
        assert sampler.in_flight == 0
        assert sampler.submitted == sampler.outcomes.rollouts
        assert sampler.outcomes[RolloutOutcome.EMITTED].rollouts == 48
        assert not any(node.handler.sessions for node in up)
        assert not any(node.pipeline.store.live() for node in up)


class EnoughError(Exception):
    """Ends a training."""


PAGE = (Path(__file__).parents[2] / "docs/train-your-own.md").read_text()


async def test_the_pages_trainer_trains_without_blocking_the_event_loop() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("groups_per_batch=32, group_size=8", "groups_per_batch=2, group_size=4"), names)
    trained = []

    def train(batch: TrainingBatch) -> None:
        assert threading.current_thread() is not threading.main_thread()
        trained.append((batch.version, [len(group) for group in batch.groups]))
        if len(trained) == 2:
            raise EnoughError

    async with nodes() as up:
        with pytest.raises(EnoughError):
            await names["batches"](rows(8), [node.url for node in up], train)
    assert trained == [(0, [4, 4]), (1, [4, 4])]


@pytest.mark.parametrize("label", ["2", "someone's"])
async def test_what_other_weights_sampled_is_no_data_of_a_run(label: str | None) -> None:
    """Each first try has a span of other weights."""
    dataset, config = rows(4, labels=[label]), SamplerConfig(1, 2, 2)
    async with nodes() as up, runner(up, dataset, config, run="a") as driver:
        batch = await driver.batch()
        assert batch is not None, "it names no run, so nobody holds its versions against anything"
        assert [rollout.id for rollout in batch.groups[0]] == ["a:0:0:0", "a:0:1:0"]
    async with nodes() as up, runner(up, dataset, config, run="b", options_run="x") as driver:
        batch = await driver.batch()
        assert batch is not None
        assert [rollout.id for rollout in batch.groups[0]] == ["b:0:0:1", "b:0:1:1"]
        assert driver.sampler.outcomes[RolloutOutcome.FAILED].rollouts >= 2  # the next group may have begun
        jobs = [*up[0].pipeline.store.find(state=None, group=None)]
        assert {job.run for job in jobs} == {"x"}


async def test_a_new_life_of_a_trainer_samples_again_what_its_old_one_had_under_way() -> None:
    """The new trainer has another run name, so the service refuses ids of the old one."""
    dataset, config = rows(4, labels=["0"], late=[0], late_s=1.0), SamplerConfig(1, 2, 2)
    async with nodes() as up:
        driver = await runner(up, dataset, config, options_run="old").__aenter__()
        while not any(job.state is JobState.RUNNING for job in up[0].pipeline.store.live()):
            await asyncio.sleep(0.01)
        state = json.loads(json.dumps(driver.state()))
        await driver._services.close()  # a killed trainer cancels nothing
        async with runner(up, dataset, config, state=state, options_run="new") as again:
            batch = await again.batch()
            assert batch is not None
            [group] = batch.groups
            jobs = [up[0].pipeline.store.get(rollout.id) for rollout in group]
            assert {job.run for job in jobs if job is not None} == {"new"}


async def test_a_complete_batch_ends_the_rest_and_its_sandboxes() -> None:
    dataset = rows(8, late=[0], late_s=3600.0)
    dataset[0] |= {"late": []}
    async with (
        nodes() as up,
        runner(up, dataset, SamplerConfig(1, 2, 16, max_staleness=0, reference_share=0.0)) as driver,
    ):
        assert await driver.batch() is not None
        while up[0].pipeline.store.live():
            await asyncio.sleep(0.01)
        assert not up[0].handler.sessions
        driver.weights(1)
        while len(up[0].handler.sessions) < 7:
            await asyncio.sleep(0.01)
    assert not up[0].handler.sessions, "leaving the runner ends what was begun"


async def test_a_service_that_dies_and_comes_back_gets_its_rollouts_again() -> None:
    dataset = rows(10, late=[0, 1], late_s=0.3)
    async with nodes() as up, runner(up, dataset, SamplerConfig(2, 2, 8, reference_share=0.0)) as driver:
        waiting = asyncio.create_task(driver.batch())
        while not up[0].handler.sessions:
            await asyncio.sleep(0.01)
        before = {job.id for job in up[0].pipeline.store.live()}
        await up[0].stop()
        await asyncio.sleep(0.2)
        await up[0].start()
        batch = await waiting
        assert batch is not None
        assert before & {job.id for job in up[0].pipeline.store.find(state=None, group=None)}, "under the same ids"
        assert driver.sampler.outcomes[RolloutOutcome.FAILED].rollouts == 0


async def test_a_runner_goes_on_where_another_one_stopped() -> None:
    dataset = rows(10)
    dataset[1] |= {"late": [1], "late_s": 1.0}
    config = SamplerConfig(1, 2, 4, reference_share=0.0)
    async with nodes() as up:
        first = runner(up, dataset, config)
        await first.__aenter__()
        batch = await first.batch()
        assert batch is not None
        while "dapo:1:0:0" not in first.sampler.results():
            await asyncio.sleep(0.01)
        state = json.loads(json.dumps(first.state()))
        await kill(first)
        async with runner(up, dataset, config, state=state) as second:
            groups = []
            for version in range(1, 4):
                second.weights(version)
                batch = await second.batch()
                assert batch is not None
                assert batch.number == version
                groups += batch.groups
        assert {rollout.id for group in groups for rollout in group} >= {"dapo:1:0:0", "dapo:1:1:0"}
        assert up[0].handler.calls["dapo:1:0:0", "run"] == up[0].handler.calls["dapo:1:1:0", "run"] == 1


async def test_results_that_a_new_life_has_forgotten_are_sampled_again() -> None:
    dataset = rows(10)
    dataset[0] |= {"late": [1], "late_s": 0.5}
    config = SamplerConfig(1, 2, 2, reference_share=0.0)
    async with nodes() as up:
        first = runner(up, dataset, config)
        await first.__aenter__()
        while "dapo:0:0:0" not in first.sampler.results():
            await asyncio.sleep(0.01)
        state = first.state()
        await kill(first)
        await up[0].stop()
        await up[0].start()
        async with runner(up, dataset, config, state=state) as second:
            batch = await second.batch()
        assert batch is not None
        again, joined = (rollout.id for rollout in batch.groups[0])
        assert again.startswith("dapo:0:0:")
        assert again != "dapo:0:0:0"
        assert joined == "dapo:0:1:0"


@pytest.mark.parametrize("bad", [{"rewards": [1]}, {**rows(1)[0], "number": 2**70}], ids=["no request", "no JSON"])
async def test_a_row_that_the_service_refuses_costs_its_group_only(bad: dict[str, Any]) -> None:
    dataset = rows(3)
    dataset[0] = bad
    async with nodes() as up, runner(up, dataset, SamplerConfig(2, 2, 4, reference_share=0.0), epochs=1) as driver:
        batch = await driver.batch()
        assert batch is not None
        assert driver.sampler.dropped["refused"] == 1
        assert await driver.batch() is None, "there are no more prompts"


async def test_a_service_that_wants_a_key_ends_the_training_at_once() -> None:
    async with nodes(token="secret") as up:
        with pytest.raises(ApiError, match="401"):
            async with runner(up, rows(3), SamplerConfig(1, 2, 4, reference_share=0.0), token="wrong") as driver:
                await driver.batch()
        async with runner(up, rows(3), SamplerConfig(1, 2, 4, reference_share=0.0), token="secret") as driver:
            assert await driver.batch() is not None


async def kill(driver: Runner) -> None:
    """Stop a runner without cancelling rollouts, as a killed process does."""
    await driver._services.close()


async def test_a_state_that_would_lose_a_batch_is_refused() -> None:
    async with (
        nodes() as up,
        runner(up, rows(12, late=[0], late_s=0.5), SamplerConfig(1, 2, 2, reference_share=0.0)) as driver,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.batch(), 0.1)
        while not driver.sampler.emitted:
            await asyncio.sleep(0.01)
        with pytest.raises(CallerError, match="call batch"):
            driver.state()
        batch = await driver.batch()
        assert batch is not None
        assert batch.number == 0
        driver.state()


@pytest.mark.parametrize(
    ("filter_on", "trained"), [("accuracy", [[0.5, 1.0]]), ("reward", [[-0.3, -0.4]]), (None, None), ("right", None)]
)
async def test_groups_vary_in_what_the_filter_is_on(filter_on: str | None, trained: list[list[float]] | None) -> None:
    """Shaped rewards vary in a group without a correct rollout."""
    wrong = rows(1, rewards=[-0.3, -0.4], accuracy=[0, 0])
    dataset = [*wrong, *rows(1, rewards=[0.5, 1.0], accuracy=[0, 1])]
    config = SamplerConfig(1, 2, 2, filter_on=filter_on, reference_share=0.0)
    async with nodes() as up, runner(up, dataset, config, epochs=1) as driver:
        if trained is None:
            with pytest.raises(CallerError, match=r"filter_on: .*(filter_on: accuracy|its numbers: accuracy, reward)"):
                await driver.batch()
            return
        batch = await driver.batch()
        assert batch is not None
        assert [[rollout.reward for rollout in group] for group in batch.groups] == trained


async def test_a_masked_rollout_stays_in_its_group_and_is_not_drawn_again() -> None:
    dataset = rows(1, rewards=[0, 0, 1], verdicts=[{"mask_sample": True}, {}, {}])
    config = SamplerConfig(1, 3, 3, reference_share=0.0)
    async with nodes() as up, runner(up, dataset, config, epochs=1) as driver:
        batch = await driver.batch()
        assert batch is not None
        told = [(r.reward, r.masked) for group in batch.groups for r in group]
        assert told == [(0.0, True), (0.0, False), (1.0, False)]
        assert driver.sampler.submitted == 3


@pytest.mark.parametrize("treatment", AgentFailures)
async def test_an_agent_that_runs_out_of_time_is_an_outcome_and_not_drawn_again(treatment: AgentFailures) -> None:
    dataset = rows(1, rewards=[1, 1, 0], late=[0], late_s=600.0)
    config = SamplerConfig(1, 3, 3, agent_failures=treatment, reference_share=0.0)
    async with nodes() as up, runner(up, dataset, config, epochs=1, budgets={"run": 0.2}) as driver:
        batch = await driver.batch()
        assert batch is not None
        rollouts = [(r.reward, r.masked) for group in batch.groups for r in group]
        assert rollouts == [(0.0, treatment is AgentFailures.MASK), (1.0, False), (0.0, False)]
        assert driver.sampler.submitted == 3


@pytest.mark.parametrize(
    ("members", "trained"),
    [
        ([(1, False), (0, False)], True),
        ([(1, False), (0, True)], False),  # the unmasked members are equal
        ([(1, False), (1, False), (0, True)], False),
        ([(1, False), (0, False), (0, True)], True),
        ([(1, False), (0, True), (0, True)], False),
        ([(1, True), (0, True)], False),
    ],
)
def test_a_group_varies_by_its_members_with_a_loss(members: list[tuple[float, bool]], trained: bool) -> None:
    group = Group(0, 0, "p", [Member(n, reward=a, accuracy=a, masked=m) for n, (a, m) in enumerate(members)])
    assert group.is_trainable is trained


def unlucky() -> list[dict[str, Any]]:
    """Return a prompt that is solved in the first epoch only, and from turn 5 of that rollout every other time."""
    return rows(1, then=[0], turns=7, forked={"4": [0], "6": [1], "5": [0, 1]})


async def test_a_group_without_variance_is_followed_by_one_that_begins_where_another_succeeded() -> None:
    config = SamplerConfig(1, 2, 2, reference_share=0.0, prefix_tries=3)
    async with (
        nodes(2) as up,
        runner(up, unlucky(), config, epochs=2, budgets={"run": 77.0}, environment="planned") as driver,
    ):
        first, second = await driver.batch(), await driver.batch()
        assert first is not None
        assert second is not None
        [solved] = [rollout.id for rollout in first.groups[0] if rollout.reward]
        [group] = second.groups
        assert [rollout.reward for rollout in group] == [0.0, 1.0]
        assert [rollout.inherited for rollout in group] == [5, 5]
        assert [rollout.prompt["turns"] for rollout in group] == [7, 7]
        jobs = [job for node in up for job in node.pipeline.store.find(state=None, group=None) if job.forked_from]
        assert {job.forked_from["id"] for job in jobs if job.forked_from} == {solved}
        assert [job.forked_from["turn"] for job in jobs if job.forked_from] == [4, 4, 6, 6, 5, 5]
        assert {job.budgets.of(Stage.RUN) for job in jobs} == {77.0}
        assert driver.sampler.prefixes.counts == {"begun": 3, "helped": 1}
        assert driver.sampler.dropped == {"no_variance": 3}


async def test_a_source_whose_checkpoints_are_erased_costs_nothing_else() -> None:
    """In the third epoch no rollout is known any more that could help."""
    dataset = rows(1, then=[0], turns=7, forked={"4": [0], "6": [0], "7": [0]})
    config = SamplerConfig(1, 2, 2, reference_share=0.0, prefix_tries=3)
    async with nodes() as up, runner(up, dataset, config, epochs=3) as driver:
        pipeline = up[0].pipeline
        assert await driver.batch() is not None

        async def erase(method: str, path: str) -> None:
            for job in pipeline.store.find(state=None, group=None) if path.endswith("/fork") else ():
                for checkpoint in [*job.checkpoints.values()]:
                    job.drop_checkpoint(checkpoint)

        up[0].fault = erase
        assert await driver.batch() is None
        counts = driver.sampler.prefixes.counts
        refused = counts["refused"]  # 2, if the third epoch ended before the first answer
        assert 1 <= refused <= 2
        assert driver.sampler.dropped == {"no_variance": 2, "refused": refused}
        assert counts == {"begun": refused, "refused": refused}
        assert not pipeline.store.live()


# -- services that refuse the runner or its rows, restart, or hold another state ------------------------------------


async def test_a_runner_that_one_service_refuses_leaves_nothing_behind_at_the_others() -> None:
    armed: list[int] = []

    async def refuse(method: str, path: str) -> int | None:
        return 403 if armed and (method, path) == ("POST", "/v1/rollouts") else None

    async with nodes(2) as up:
        up[1].fault = refuse
        async with runner(
            up, rows(40, late=[1], late_s=3600.0), SamplerConfig(1, 3, 9, reference_share=0.0), max_attempts=1
        ) as driver:
            while not (up[0].handler.sessions and up[1].handler.sessions):
                await asyncio.sleep(0.01)
            armed.append(1)
            job = next(iter(up[1].pipeline.store.live()))
            await up[1].pipeline.cancel(job)  # a failure: the member is submitted again
            for _ in range(2):
                with pytest.raises(ApiError, match="403"):
                    await asyncio.wait_for(driver.batch(), 30)
        assert not [*up[0].pipeline.store.live()]


async def test_what_cannot_be_run_ends_the_training_with_the_reason() -> None:
    async with nodes() as up:
        for dataset, epochs in ((rows(3), 1), (rows(3), None)):
            driver = runner(
                up,
                dataset,
                SamplerConfig(1, 2, 4, max_dropped=5, reference_share=0.0),
                epochs=epochs,
                environment="misspelt",
            )
            async with driver:
                for _ in range(2):
                    with pytest.raises(NothingToLearn, match=r"max_dropped: .* could not be run.*misspelt"):
                        await driver.batch()


async def test_what_was_cancelled_does_not_run_behind_its_back() -> None:
    """The service restarts without memory while rollouts are being cancelled, and is slow afterwards."""
    settings = PipelineSettings(
        stages=PoolSizes(init=400, ready=400, run=400, eval=64), max_attempts=1, cancel_grace_s=0.5
    )
    told: set[str] = set()

    async def slowly(method: str, path: str) -> None:
        if (method, path) == ("POST", "/v1/rollouts"):
            await asyncio.sleep(0.5)

    async with nodes(settings=settings) as up, RolloutClient(up[0].url) as client:
        service = JobForwarder(
            client,
            tokens=TokenForm.PACKED,
            on_ended=lambda job: told.add(job.id),
            on_lost=lambda rollout, *_: told.add(rollout),
            on_error=lambda error: pytest.fail(repr(error)),
            report=lambda _: None,
        )
        service.start()
        ids = [f"run:{number}:0:0" for number in range(100)]
        for rollout in ids:
            service.submit(rollout, {"row": rows(1, late=[0], late_s=3600.0)[0]})
        while len(up[0].handler.sessions) < 100:
            await asyncio.sleep(0.02)
        await up[0].stop()
        for rollout in ids:
            service.cancel(rollout)
        up[0].fault = slowly
        await up[0].start()
        while len(told) < 100:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert not up[0].handler.sessions
        await service.close()


async def test_a_start_that_fails_leaves_nothing_behind() -> None:
    async with nodes() as up:
        async with runner(up, rows(3, late=[0], late_s=5.0), SamplerConfig(1, 2, 2, reference_share=0.0)) as first:
            state = first.state()
        before = asyncio.all_tasks()
        second = runner(up, rows(3), SamplerConfig(1, 3, 3, reference_share=0.0), state=state)
        with pytest.raises(CallerError, match="group_size"):
            await second.__aenter__()
        await asyncio.sleep(0.1)
        assert not [task for task in asyncio.all_tasks() - before if "JobForwarder" in repr(task.get_coro())]
