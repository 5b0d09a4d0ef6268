# SPDX-License-Identifier: Apache-2.0
"""Batches for a trainer from running rollout services: carries out what the sampler decides.

    services = [RolloutClient(url) for url in urls]
    async with Runner(DynamicSampler(config, prompts), prompts, services) as runner:
        while (batch := await runner.batch()) is not None:
            train(batch)
            runner.weights(batch.version + 1)

Between :meth:`Runner.batch` and the next call rollouts go on in the background, as far as ``max_staleness`` allows.
The trainer loads its weights into the engines before it announces them here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from nemo_gym_prorl.dapo.decision import Batch, Decision, Submission
from nemo_gym_prorl.dapo.fates import Usage
from nemo_gym_prorl.dapo.prompts import PromptStream
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.dapo.service import Service
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Origin
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView


LOG = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long to wait for the sandboxes of what is cancelled at the end."""


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """A rollout to train on.

    Attributes:
        id: of the rollout.
        prompt: its row.
        reward: raw.
        version: weights it began under.
        result: what the environment's ``/verify`` answered, the response with its tokens in it.
    """

    id: str
    prompt: Mapping[str, Any]
    reward: float
    version: int
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Groups with variance, of equal size.

    Attributes:
        number: of the batch, from 0.
        version: weights to train, whose successor is to be announced as ``version + 1``.
        groups: the rollouts of each prompt.
    """

    number: int
    version: int
    groups: list[list[TrainedRollout]]


class Runner:
    """See the module. An async context manager: on leaving, what is left is cancelled, and its sandboxes waited for.

    Args:
        sampler: a new one, or one whose state is given as ``state``.
        prompts: those of the sampler.
        services: clients that are not open yet; the runner opens and closes them. A group stays on one service.
        client: under which the services share their slots among callers.
        options: more for each submission: ``environment``, ``budgets``, ``max_attempts``.
        state: what :meth:`state` of an earlier runner gave; its services must be the same ones in the same order.
    """

    def __init__(
        self,
        sampler: DynamicSampler,
        prompts: PromptStream,
        services: Sequence[RolloutClient],
        *,
        client: str = "dapo",
        options: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not services:
            raise CallerError("at least one rollout service is needed", field="services")
        self.sampler = sampler
        self._prompts = prompts
        self._client = client
        self._options = dict(options or {})
        self._state = state
        self._open = AsyncExitStack()
        self._services = [
            Service(service, ended=self._ended, refused=self._refused, broke=self._broke) for service in services
        ]
        self._at: dict[str, int] = {}
        """Services by group, while it has rollouts in flight or results here."""
        self._rollouts: Counter[str] = Counter()
        """Rollouts of a group that are in flight or kept here."""
        self._results: dict[str, JobView] = {}
        self._batches: asyncio.Queue[TrainingBatch | BaseException | None] = asyncio.Queue()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        for service in self._services:
            await self._open.enter_async_context(service.client)
            await service.start()
        if self._state is not None:
            await self._resume(self._state)
        self._pump()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._carry_out(self.sampler.close())
            async with asyncio.timeout(CLOSE_S):
                while self.sampler.in_flight:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            LOG.warning("%d rollouts are not known to have ended", self.sampler.in_flight)
        finally:
            for service in self._services:
                await service.close()
            await self._open.aclose()

    async def batch(self) -> TrainingBatch | None:
        """The next batch, as soon as it is complete; ``None`` if there are not prompts enough for another one.

        Raises:
            NothingToLearn: groups have no variance, for long.
            CallerError: a service refuses this runner, not just a row.
        """
        self.sampler.ask()
        self._pump()
        if isinstance(batch := await self._batches.get(), BaseException):
            raise batch
        return batch

    def weights(self, version: int) -> None:
        """The engines sample from these weights now."""
        self.sampler.weights(version)
        self._pump()

    def state(self) -> dict[str, Any]:
        """What a new runner goes on from, as JSON; for a checkpoint that is written between two batches."""
        return {"sampler": self.sampler.state(), "services": dict(self._at)}

    async def _resume(self, state: Mapping[str, Any]) -> None:
        again = self.sampler.restore(state["sampler"])
        self._at = {group: place for group, place in state["services"].items() if place < len(self._services)}
        for rollout in self.sampler.results():
            place = self._at.get(_group(rollout))
            try:
                if place is None:
                    raise InfrastructureError("its service is not given any more", kind=FailureKind.SESSION_LOST)
                self._keep(await self._services[place].result(rollout))
            except InfrastructureError as error:
                LOG.warning("the result of %s is sampled again: %s", rollout, error)
                self.sampler.lost(rollout)
        cancel, again.cancel = again.cancel, []
        self._carry_out(again)
        for rollout in cancel:
            self._rollouts[_group(rollout)] += 1
            place = self._at.setdefault(_group(rollout), 0)
            self._services[place].live[rollout] = {}
        self._cancel(cancel)

    def _keep(self, job: JobView) -> None:
        self._results[job.id] = job
        self._rollouts[_group(job.id)] += 1

    # What services tell

    def _ended(self, job: JobView) -> None:
        usage = Usage(sum(timing.worked_s for timing in job.timings.values()), float(job.turns))
        masked = bool((job.result or {}).get("mask_sample"))
        if job.state is JobState.SUCCEEDED and job.reward is not None and not masked:
            if self.sampler.wants(job.id):
                self._keep(job)
            self.sampler.scored(job.id, job.reward, usage)
        else:
            origin = job.failure.origin if job.failure else Origin.AGENT
            if job.state is JobState.CANCELLED:
                origin = Origin.INFRASTRUCTURE
            self.sampler.failed(job.id, origin, usage)
        self._gone(job.id)
        self._pump()

    def _refused(self, rollout: str, origin: Origin, why: str) -> None:
        LOG.warning("%s was not run: %s", rollout, why)
        self.sampler.failed(rollout, origin)
        self._gone(rollout)
        self._pump()

    def _broke(self, error: BaseException) -> None:
        self._batches.put_nowait(error)

    # What the sampler decides

    def _pump(self) -> None:
        try:
            decision = self.sampler.decide()
        except CallerError as error:
            self._batches.put_nowait(error)
            return
        self._carry_out(decision)
        if self.sampler.finished and self.sampler.asked > self.sampler.emitted and self._batches.empty():
            self._batches.put_nowait(None)
        self._changed.set()

    def _carry_out(self, decision: Decision) -> None:
        for batch in decision.batches:
            self._batches.put_nowait(self._training_batch(batch))
        for rollout in decision.forget:
            self._results.pop(rollout, None)
            self._gone(rollout)
        self._cancel(decision.cancel)
        for submission in decision.submit:
            self._submit(submission)

    def _submit(self, submission: Submission) -> None:
        prompt = self._prompts[submission.prompt]
        if prompt is None:
            raise AssertionError(f"there is no prompt {submission.prompt}")
        body = {"row": prompt.row, "group": submission.group, "client": self._client, **self._options}
        self._rollouts[submission.group] += 1
        self._service_of(submission.group).submit(submission.rollout, body | {"priority": int(submission.urgent)})

    def _cancel(self, rollouts: Sequence[str]) -> None:
        for place, service in enumerate(self._services):
            if here := [rollout for rollout in rollouts if self._at.get(_group(rollout)) == place]:
                service.cancel(here)

    def _service_of(self, group: str) -> Service:
        """Where all rollouts of a group go, since they have a prefix in common: to the least loaded service."""
        if group not in self._at:
            loads = [(service.away, len(service.live), place) for place, service in enumerate(self._services)]
            self._at[group] = min(loads)[2]
        return self._services[self._at[group]]

    def _gone(self, rollout: str) -> None:
        """A rollout left: it has no outcome to come, or no result to keep."""
        group = _group(rollout)
        self._rollouts[group] -= 1
        if not self._rollouts[group]:
            del self._rollouts[group], self._at[group]

    def _training_batch(self, batch: Batch) -> TrainingBatch:
        groups = []
        for number, members in batch.groups.items():
            prompt = self._prompts[number]
            row = prompt.row if prompt else {}
            group = []
            for member in members:
                job = self._results.pop(member.rollout)
                self._gone(member.rollout)
                group.append(TrainedRollout(job.id, row, member.reward, member.version, job.result or {}))
            groups.append(group)
        return TrainingBatch(batch.number, batch.version, groups)


def _group(rollout: str) -> str:
    """Ids are ``group:member:try``."""
    return rollout.rsplit(":", 2)[0]
