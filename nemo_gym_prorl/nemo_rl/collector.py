# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""DAPO runner in its own thread, for a trainer that blocks its event loop.

NeMo RL's controller converts groups to tensors on its event loop, and ends without a hook for cleanup. The collector
submits and cancels rollouts independently of that loop. Invariant: when :meth:`Collector.close` returns, no sandbox of
the training run exists, unless services took longer than :data:`JOIN_S`.

    collector = Collector(plan)
    collector.weights(0)            # the engines have weights 0: rollouts begin
    group = await asyncio.wrap_future(collector.take())
    collector.weights(1)            # the batch of weights 0 was trained on
    collector.close()

NeMo RL's SingleController has no validation, so the services run it. A validation begins when the engines have a
weight version that is due, takes precedence in the services' queues, and runs concurrently with training. The next
weights wait until the validation has ended and its metrics are logged. Therefore one policy samples the whole
validation, and no result is lost at the end of training.

The collector asks for the batch of weights ``v`` when ``v`` is announced, so that the batch is as fresh as possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym_prorl.async_tasks import PROCESS_LOOPS
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.group import RolloutOutcome
from nemo_gym_prorl.dapo.prompts import Epochs, SkipSolved
from nemo_gym_prorl.dapo.runner import CLOSE_S, Runner
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import CallerError, InfrastructureError, Origin
from nemo_gym_prorl.nemo_rl.groups import RewardFunction, TrainingGroup, training_group, with_loss
from nemo_gym_prorl.nemo_rl.services import Servers
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.rollout.job import JobState


LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Validation:
    """Rows and schedule of validations; pickled for another process.

    Attributes:
        rows: rows with sampling parameters.
        period: weight versions between two validations; 0 for none after the start.
        at_start: whether to validate weights 0.
        last: final weight version, which is not validated because its metrics would not be logged.
    """

    rows: Sequence[Mapping[str, Any]]
    period: int
    at_start: bool
    last: int

    def is_due(self, version: int) -> bool:
        if not version:
            return self.at_start
        return bool(self.period) and version % self.period == 0 and version < self.last


def validation_of(config: Mapping[str, Any]) -> Validation | None:
    """Return the validation that a resolved configuration asks for; ``None`` without rows or without a schedule."""
    grpo, generation = config["grpo"], config["policy"]["generation"]
    data = config["data"].get("validation")
    if not data or not (grpo["val_period"] or grpo.get("val_at_start")):
        return None
    lines = [line for line in Path(data["data_path"]).read_text().splitlines() if line.strip()]
    sampling = {name: generation.get(f"val_{name}", generation[name]) for name in ("temperature", "top_p")}
    sampling["max_new_tokens"] = generation["max_new_tokens"]
    rows = [with_sampling_params(json.loads(line), sampling) for line in lines] * int(data.get("repeat", 1))
    return Validation(rows, grpo["val_period"], bool(grpo.get("val_at_start")), grpo["max_num_steps"])


def with_sampling_params(row: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataset row with NeMo RL's ``temperature`` and ``top_p``, and at most ``max_new_tokens`` per turn."""
    params = dict(row["responses_create_params"])
    longest = params.get("max_output_tokens")
    own = generation["max_new_tokens"]
    params["temperature"], params["top_p"] = generation["temperature"], generation["top_p"]
    params["max_output_tokens"] = own if longest is None else min(longest, own)
    return {**row, "responses_create_params": params}


async def validate(
    version: int,
    rows: Sequence[Mapping[str, Any]],
    services: Sequence[RolloutClient],
    client: str,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """Run one rollout of each row, with unopened clients of services, and return the metrics of a weight version. Rows
    without a reward are counted, errors are logged. ``options``: further fields of each submission."""
    async with AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(service)

        async def outcome(index: int) -> JobView | None:
            service = services[index % len(services)]
            group = f"{client}:validation-{version}:{index}"
            try:
                # Validation precedes training rollouts in the queue, since the next weights wait for the validation.
                fields = {"group": group, "client": client, "priority": 1, **options}
                await service.submit(dict(rows[index]), id=f"{group}:0", **fields)
                return await service.wait(f"{group}:0")
            except (ApiError, InfrastructureError, aiohttp.ClientError, OSError) as error:
                LOG.warning("validation row %d has no reward: %s", index, error or type(error).__name__)
                return None

        jobs = await asyncio.gather(*map(outcome, range(len(rows))))
    scored = [(job, reward) for job in jobs if job and (reward := _reward_of(job)) is not None]
    found = {
        "validation/weight_version": float(version),
        "validation/rollouts": float(len(jobs)),
        "validation/without_reward": float(len(jobs) - len(scored)),
    }
    if scored:
        found["validation/reward"] = statistics.fmean(reward for _, reward in scored)
        found["validation/turns"] = statistics.fmean(job.turns for job, _ in scored)
    LOG.info("validation: %s", found)
    return found


def _reward_of(job: JobView) -> float | None:
    """Return a job's reward, 0 for an agent failure (leaving it out would favour quick rollouts), else ``None``."""
    if job.failure is not None and job.failure.origin is Origin.AGENT:
        return 0.0
    return job.reward if job.state is JobState.SUCCEEDED else None


JOIN_S = CLOSE_S + 30.0  # limit for the thread to end: the runner's own limit, and time to close its connections
REMIND_S = 10.0  # between announcements to external model servers, which lose engines and weights in a restart


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """Settings of a collector; pickled for another process.

    Attributes:
        rows: dataset rows with sampling parameters.
        sampler: settings of the sampler; :meth:`runner` sets ``first_version``.
        servers: rollout services and model servers.
        reward_of: scaling and overlong penalty of rewards.
        seed: seed of the shuffles of prompts; ``None`` keeps the dataset's order.
        skip_solved: number of consecutive solved groups after which a prompt is skipped; ``None`` for never.
        client: client name of the submissions, unique to the training run, by which its rollouts can be cancelled.
        validation: rows and schedule of validations; ``None`` for no validation.
        state: return value of :meth:`Collector.state` of an earlier start; ``None`` for a new training run.
    """

    rows: Sequence[Mapping[str, Any]]
    sampler: SamplerConfig
    servers: Servers
    reward_of: RewardFunction
    seed: int | None = 0
    skip_solved: int | None = None
    client: str = "nemo-rl"
    validation: Validation | None = None
    state: Mapping[str, Any] | None = None

    def runner(self, version: int) -> Runner:
        """Return a runner that is not entered yet, for engines that first sample from the weights ``version``."""
        prompts = Epochs(self.rows, seed=self.seed)
        curriculum = SkipSolved(self.skip_solved) if self.skip_solved else None
        first = version - (self.state["sampler"]["emitted"] if self.state else 0)
        sampler = DynamicSampler(replace(self.sampler, first_version=first), prompts, curriculum)
        return Runner(
            sampler, prompts, self._services(), client=self.client, options=self._options(), state=self.state
        )

    async def validate(self, version: int) -> dict[str, float]:
        """Validate a weight version and return the metrics; empty if no validation is due."""
        if self.validation is None or not self.validation.is_due(version):
            return {}
        return await validate(version, self.validation.rows, self._services(), self.client, self._options())

    def _options(self) -> dict[str, Any]:
        return {"run": self.servers.run} if self.servers.run else {}

    def _services(self) -> list[RolloutClient]:
        return [RolloutClient(url, self.servers.key) for url in self.servers.services]


def metrics_of(runner: Runner) -> dict[str, float]:
    """Return metrics of the runner's rollouts, groups and bias for a trainer's logger."""
    sampler = runner.sampler
    found = {
        f"prorl/rollouts/{outcome.value}": float(sampler.outcomes[outcome].rollouts) for outcome in RolloutOutcome
    }
    found |= {f"prorl/dropped_groups/{why}": float(count) for why, count in [*sampler.dropped.items()]}
    found |= {f"prorl/prefix_groups/{what}": float(count) for what, count in [*sampler.prefixes.counts.items()]}
    found["prorl/in_flight"] = float(sampler.in_flight)
    found["prorl/wasted_share"] = sampler.outcomes.wasted
    for name, bias in (("length", sampler.length_bias), ("accuracy", sampler.accuracy_bias)):
        if bias is not None:
            found |= {f"prorl/{name}_bias{end}": value for end, value in bias.by_suffix()}
    return found | runner.rollout_metrics.metrics()


class _WeightAnnouncer:
    """Announcements of weights to model servers, repeated every :data:`REMIND_S` while the announcer is entered.

    A model server that was restarted has no engines of the training run, and a batch may wait for that server's turns.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._version = 0
        self._lock = asyncio.Lock()
        self._reminding: asyncio.Task[None] | None = None

    async def weights(self, version: int, *, needed: bool = False) -> None:
        async with self._lock:
            self._version = version
            await asyncio.to_thread(self._servers.announce, version, needed=needed)

    async def __aenter__(self) -> None:
        if self._servers.engines:
            self._reminding = PROCESS_LOOPS.start("weights-reminder", self._remind, delay_s=REMIND_S)

    async def __aexit__(self, *_: object) -> None:
        if self._reminding is not None:
            self._reminding.cancel()

    async def _remind(self) -> float:
        await self.weights(self._version)
        return REMIND_S


class Collector:
    """Runner in its own thread; see the module. All methods are thread-safe.

    :meth:`close`, :meth:`finish_validation` and the first call of :meth:`weights`, which starts the thread, block.
    """

    def __init__(self, plan: CollectionPlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._groups: deque[TrainingGroup] = deque()
        self._takers: deque[Future[TrainingGroup]] = deque()
        self._states: dict[int, dict[str, Any]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._versions: asyncio.Queue[int] | None = None
        self._work: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}
        self._validating: asyncio.Task[dict[str, float]] | None = None
        self._validated = threading.Event()
        self._validated.set()
        self._validation_metrics: dict[str, float] = {}

    def weights(self, version: int) -> None:
        """Announce the weight version from which the engines sample now; the first call starts the thread."""
        if self._closed:
            return
        if self._thread is None:
            started = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(version, started), name="prorl", daemon=True)
            self._thread.start()
            started.wait()
        elif self._loop is not None and self._versions is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed after an error, which take() reports
                self._loop.call_soon_threadsafe(self._versions.put_nowait, version)

    def take(self) -> Future[TrainingGroup]:
        """Return a future of the next group, in order of calls. An error that ends training becomes its exception."""
        taker: Future[TrainingGroup] = Future()
        with self._lock:
            if self._error is not None:
                taker.set_exception(self._error)
            else:
                self._takers.append(taker)
        self._hand_over()
        return taker

    def close(self) -> None:
        """Cancel the remaining rollouts and wait until their sandboxes are gone, at most :data:`JOIN_S`."""
        with self._lock:
            self._closed = True
        self._end(CallerError("training is over"))
        if self._thread is not None and self._loop is not None and self._work is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended already
                self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                LOG.warning("rollouts were still being cancelled after %s s; services end them", JOIN_S)

    def state(self, version: int) -> dict[str, Any] | None:
        """Return the state for a later start as JSON, taken when the batch of this weight version was complete.

        The states of the last two batches are kept, so that a checkpoint can be written while the next batch is
        collected. ``None`` for other versions.
        """
        with self._lock:
            return self._states.get(version)

    def metrics(self) -> dict[str, float]:
        """Return metrics up to the last complete batch; each validation's metrics are returned once."""
        with self._lock:
            metrics, self._validation_metrics = self._validation_metrics, {}
        if metrics:
            self._validated.set()
        return self._metrics | metrics

    def finish_validation(self) -> None:
        """Block until no validation runs and :meth:`metrics` has returned the results of the last validation.

        Without the wait, results of a validation could be lost, because the trainer only logs at intervals.
        """
        self._validated.wait()

    # In the collector's thread

    def _run(self, version: int, started: threading.Event) -> None:
        try:
            asyncio.run(self._collect_until_closed(version, started))
        except BaseException as error:
            self._end(error)
        finally:
            started.set()

    async def _collect_until_closed(self, version: int, started: threading.Event) -> None:
        self._loop, self._versions = asyncio.get_running_loop(), asyncio.Queue()
        with self._lock:
            if self._closed:
                return
            self._work = asyncio.create_task(self._collect(version, self._versions))
        started.set()
        with contextlib.suppress(asyncio.CancelledError):  # close() cancels the work
            await self._work

    async def _collect(self, version: int, versions: asyncio.Queue[int]) -> None:
        plan = self._plan
        announcer = _WeightAnnouncer(plan.servers)
        await announcer.weights(version, needed=True)
        async with plan.runner(version) as runner, announcer, self._validation():
            self._validate(version)
            if plan.state:
                runner.weights(version)
            while (batch := await runner.batch()) is not None:
                self._remember(version, runner.state())
                groups = await asyncio.to_thread(
                    lambda: [training_group(group, plan.reward_of) for group in batch.groups]
                )
                runner.rollout_metrics.train(with_loss(groups))
                self._metrics = metrics_of(runner)
                with self._lock:
                    self._groups.extend(groups)
                self._hand_over()
                version = await versions.get()
                await announcer.weights(version)
                self._validate(version)
                runner.weights(version)
        self._end(CallerError("the prompts are used up; raise grpo.max_num_epochs or add rows", field="data.train"))

    def _validate(self, version: int) -> None:
        self._validated.clear()
        self._validating = asyncio.create_task(self._plan.validate(version), name=f"validation of weights {version}")
        self._validating.add_done_callback(self._has_validated)

    def _has_validated(self, task: asyncio.Task[dict[str, float]]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)
        elif not task.cancelled() and task.result():
            with self._lock:
                self._validation_metrics = task.result()
            return  # metrics() sets the event
        self._validated.set()

    @contextlib.asynccontextmanager
    async def _validation(self) -> AsyncIterator[None]:
        """Cancel the rollouts of a running validation on exit."""
        try:
            yield
        finally:
            if self._validating is not None and not self._validating.done():
                LOG.warning("the %s is cancelled because the training has ended", self._validating.get_name())
                self._validating.cancel()
                await asyncio.to_thread(self._plan.servers.cancel_all, self._plan.client)
            self._validated.set()

    # Shared by the threads

    def _remember(self, version: int, state: dict[str, Any]) -> None:
        with self._lock:
            self._states[version] = state
            self._states.pop(version - 2, None)

    def _hand_over(self) -> None:
        with self._lock:
            while self._groups and self._takers:
                taker = self._takers.popleft()
                if taker.set_running_or_notify_cancel():
                    taker.set_result(self._groups.popleft())

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            takers, self._takers = self._takers, deque()
        self._validated.set()
        for taker in takers:
            if taker.set_running_or_notify_cancel():
                taker.set_exception(self._error)
