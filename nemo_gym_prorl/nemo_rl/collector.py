# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The DAPO runner in a thread of its own, for a trainer that has an event loop which it may block.

NeMo RL's controller turns groups into tensors on its event loop, and ends without asking anybody whether there is
something to clean up. Here rollouts are submitted and cancelled whatever that loop does, and :meth:`Collector.close`
can be waited for from anywhere: when it returns, no sandbox of this run lives.

    collector = Collector(plan)
    collector.weights(0)            # the engines have them: rollouts begin
    group = await asyncio.wrap_future(collector.take())
    collector.weights(1)            # the batch of weights 0 was trained on
    collector.close()

The batch for weights ``v`` is asked for when they are announced: it is as young as ``max_staleness`` lets it be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from nemo_gym_prorl.background import PROCESS_LOOPS
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.group import Fate
from nemo_gym_prorl.dapo.prompts import Epochs, SkipSolved
from nemo_gym_prorl.dapo.runner import CLOSE_S, Runner
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.groups import Group, Shape, group_of, with_loss
from nemo_gym_prorl.nemo_rl.services import Servers
from nemo_gym_prorl.nemo_rl.validation import Validation, validated
from nemo_gym_prorl.rollout.api.client import RolloutClient


LOG = logging.getLogger(__name__)

JOIN_S = CLOSE_S + 30.0
"""How long to wait for the thread at the end: the runner's own patience, and what its connections need."""
REMIND_S = 10.0
"""How often model servers that run elsewhere are told of engines and weights that they should know."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be collected; goes to another process as a pickle.

    Attributes:
        rows: the data set, ready to be sampled.
        sampler: what is asked of the sampler, but for the first version.
        servers: where.
        shape: rewards as they are trained on.
        seed: of the order of prompts; ``None`` keeps that of the data set.
        skip_solved: leave out prompts that were solved so often.
        client: under which rollouts are submitted. They can be ended by it, if it is no other run's.
        validation: of which weights, and on which rows.
        state: what :meth:`Collector.state` of an earlier run gave.
    """

    rows: Sequence[Mapping[str, Any]]
    sampler: SamplerConfig
    servers: Servers
    shape: Shape
    seed: int | None = 0
    skip_solved: int | None = None
    client: str = "nemo-rl"
    validation: Validation | None = None
    state: Mapping[str, Any] | None = None

    def runner(self, version: int) -> Runner:
        """What collects, not yet begun.

        Args:
            version: that the engines sample from first.
        """
        prompts = Epochs(self.rows, seed=self.seed)
        curriculum = SkipSolved(self.skip_solved) if self.skip_solved else None
        first = version - (self.state["sampler"]["emitted"] if self.state else 0)
        sampler = DynamicSampler(replace(self.sampler, first_version=first), prompts, curriculum)
        return Runner(
            sampler, prompts, self._services(), client=self.client, options=self._options(), state=self.state
        )

    async def validated(self, version: int) -> dict[str, float]:
        """Metrics of the weights that the engines have; none, if they are not due."""
        if self.validation is None or not self.validation.is_due(version):
            return {}
        return await validated(version, self.validation.rows, self._services(), self.client, self._options())

    def _options(self) -> dict[str, Any]:
        return {"run": self.servers.run} if self.servers.run else {}

    def _services(self) -> list[RolloutClient]:
        return [RolloutClient(url, self.servers.key) for url in self.servers.services]


def metrics_of(runner: Runner) -> dict[str, float]:
    """What became of rollouts so far, and what they were like, for a trainer's logger."""
    sampler = runner.sampler
    found = {f"prorl/rollouts/{fate.value}": float(sampler.fates[fate].rollouts) for fate in Fate}
    found |= {f"prorl/dropped_groups/{why}": float(count) for why, count in [*sampler.dropped.items()]}
    found |= {f"prorl/prefix_groups/{what}": float(count) for what, count in [*sampler.prefixes.counts.items()]}
    found["prorl/in_flight"] = float(sampler.in_flight)
    found["prorl/wasted_share"] = sampler.fates.wasted
    for name, bias in (("length", sampler.length_bias), ("accuracy", sampler.accuracy_bias)):
        if bias is not None:
            found |= {f"prorl/{name}_bias{end}": value for end, value in bias.told()}
    return found | runner.rollout_metrics.metrics()


class _Announced:
    """What the model servers were told last. One that begins a new life knows no engines of a run, and a batch may
    wait for just these: so they are told again, every :data:`REMIND_S`, while this is entered.

    Args:
        servers: which.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._version = 0
        self._lock = asyncio.Lock()
        self._reminding: asyncio.Task[None] | None = None

    async def weights(self, version: int, *, needed: bool = False) -> None:
        """Tell them; see :meth:`.Servers.announce`."""
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
    """See the module. All methods may be called from any thread, and none of them but :meth:`close` waits."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._groups: deque[Group] = deque()
        self._takers: deque[Future[Group]] = deque()
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
        self._found: dict[str, float] = {}

    def weights(self, version: int) -> None:
        """The engines sample from these weights now. The first call begins."""
        if self._closed:
            return
        if self._thread is None:
            started = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(version, started), name="prorl", daemon=True)
            self._thread.start()
            started.wait()
        elif self._loop is not None and self._versions is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: takers are told why
                self._loop.call_soon_threadsafe(self._versions.put_nowait, version)

    def take(self) -> Future[Group]:
        """The next group, whoever asks first gets it first. Fails when there will be none, with what ended it."""
        taker: Future[Group] = Future()
        with self._lock:
            if self._error is not None:
                taker.set_exception(self._error)
            else:
                self._takers.append(taker)
        self._hand_over()
        return taker

    def close(self) -> None:
        """Cancel what is left, and wait until its sandboxes are gone."""
        with self._lock:
            self._closed = True
        self._end(CallerError("training is over"))
        if self._thread is not None and self._loop is not None and self._work is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended already
                self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                LOG.warning("rollouts were still being cancelled after %s s", JOIN_S)

    def state(self, version: int) -> dict[str, Any] | None:
        """What a new run goes on from, as JSON: of when the batch for these weights was complete, and the next not
        begun. Of the last two such batches, so that a checkpoint may be written while the next batch is collected."""
        with self._lock:
            return self._states.get(version)

    def metrics(self) -> dict[str, float]:
        """What became of rollouts until the last batch was complete, for a trainer's logger; what a validation found,
        once."""
        with self._lock:
            found, self._found = self._found, {}
        if found:
            self._validated.set()
        return self._metrics | found

    def finish_validation(self) -> None:
        """Wait until the engines may have other weights: none are validated any more, and what was found is told. A
        trainer that logs now and then would else not have what was found since the last time before its end."""
        self._validated.wait()

    # In the thread

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
        with contextlib.suppress(asyncio.CancelledError):  # closed
            await self._work

    async def _collect(self, version: int, versions: asyncio.Queue[int]) -> None:
        plan = self._plan
        announced = _Announced(plan.servers)
        await announced.weights(version, needed=True)
        async with plan.runner(version) as runner, announced, self._validation():
            self._validate(version)
            if plan.state:
                runner.weights(version)
            while (batch := await runner.batch()) is not None:
                self._remember(version, runner.state())
                groups = await asyncio.to_thread(lambda: [group_of(group, plan.shape) for group in batch.groups])
                runner.rollout_metrics.train(with_loss(groups))
                self._metrics = metrics_of(runner)
                with self._lock:
                    self._groups.extend(groups)
                self._hand_over()
                version = await versions.get()
                await announced.weights(version)
                self._validate(version)
                runner.weights(version)
        self._end(CallerError("there are no prompts left", field="data.train"))

    def _validate(self, version: int) -> None:
        self._validated.clear()
        self._validating = asyncio.create_task(self._plan.validated(version), name=f"validation of weights {version}")
        self._validating.add_done_callback(self._has_validated)

    def _has_validated(self, task: asyncio.Task[dict[str, float]]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)
        elif not task.cancelled() and task.result():
            with self._lock:
                self._found = task.result()
            return  # until it is told
        self._validated.set()

    @contextlib.asynccontextmanager
    async def _validation(self) -> AsyncIterator[None]:
        """No rollout of a validation outlives this."""
        try:
            yield
        finally:
            if self._validating is not None and not self._validating.done():
                LOG.warning("the %s is cancelled: the run has ended", self._validating.get_name())
                self._validating.cancel()
                await asyncio.to_thread(self._plan.servers.end_all, self._plan.client)
            self._validated.set()

    # Between the threads

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
