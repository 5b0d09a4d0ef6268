# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
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
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson

from nemo_gym_prorl.dapo.contract import Batch, Decision, Submission
from nemo_gym_prorl.dapo.outcome import Outcome, RolloutMetrics, inherited, outcome_of, usage_of
from nemo_gym_prorl.dapo.prefixes import Kept
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import CallerError, InfrastructureError, Origin
from nemo_gym_prorl.fleet.dispatcher import FleetDispatcher
from nemo_gym_prorl.fleet.forwarder import FORK, LossReason
from nemo_gym_prorl.fleet.nodes import NodeList
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.gym_rows import TurnTokens
from nemo_gym_prorl.rollout.job import JobState


LOG = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long to wait for the sandboxes of what is cancelled at the end."""
STALL_S = 900.0  # as long as the servers of a rollout wait for one that does not answer (unreachable_s)


class StalledError(InfrastructureError):
    """Nothing that a batch waits for has moved for too long."""


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """A rollout to train on.

    Attributes:
        id: of the rollout.
        prompt: its row.
        reward: raw.
        version: weights it began under.
        masked: whether it gets no loss, and does not enter the baseline of its group.
        tokens: of each turn of the policy.
        inherited: so many turns, the first ones, are those of the rollout from whose prefix it began, and get no loss.
        body: the result as JSON: thousands are held, and as objects they would take several times the memory.
    """

    id: str
    prompt: Mapping[str, Any]
    reward: float
    version: int
    masked: bool
    tokens: Sequence[TurnTokens] = ()
    inherited: int = 0
    body: bytes = b"{}"

    @property
    def result(self) -> dict[str, Any]:
        """What the environment's ``/verify`` answered, without the tokens; parsed anew with each call."""
        return dict(orjson.loads(self.body))


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
        services: clients that are not open yet; the runner opens and closes them.
        client: under which the services share their slots among callers.
        options: more for each submission: ``environment``, ``budgets``, ``max_attempts``, ``run``. A rollout of a run
            is data only if each span of it was sampled by weights of that run, whose labels are versions as numbers.
        state: what :meth:`state` of an earlier runner gave. What ran at services that are gone is sampled again.
        stall_s: how long :meth:`batch` waits while no rollout moves and no service takes any. Where one does, or the
            next weights are awaited, the longest budget of a stage is added: a stage may work for that long.
    """

    def __init__(
        self,
        sampler: DynamicSampler,
        prompts: Epochs,
        services: Sequence[RolloutClient],
        *,
        client: str = "dapo",
        options: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self.sampler = sampler
        self.rollout_metrics = RolloutMetrics()
        self._prompts = prompts
        self._client = client
        self._options = dict(options or {})
        self._state = state
        self._services = FleetDispatcher(
            NodeList(services),
            tokens=TokenForm.PACKED,
            on_ended=self._ended,
            on_lost=self._lost,
            on_error=self._broke,
            report=LOG.warning,
            on_state=lambda rollout, state: self._note_progress(),
            on_placed=self._placed,
        )
        self._stall_s = stall_s
        self._moved_at = -math.inf
        """When a rollout moved, or weights were announced, by the event loop's clock."""
        self._out: set[str] = set()
        """Services that refuse us."""
        self._at: dict[str, str | None] = {}
        """Services by rollout, while it is in flight or its result is kept here; ``None`` where it waits for one."""
        self._resumed: set[str] = set()
        """Rollouts that were in flight when the state was saved from which this runner goes on."""
        self._results: dict[str, tuple[list[TurnTokens], int, bytes]] = {}
        """Tokens, inherited turns, and body of those that may be trained on."""
        self._batches: asyncio.Queue[TrainingBatch | None] = asyncio.Queue()
        self._handed_over = sampler.emitted
        self._broken: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        try:
            await self._services.start()
            if self._state is not None:
                await self._resume(self._state)
        except BaseException:
            await self._services.close()
            raise
        self._pump()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._carry_out(self.sampler.close())
            async with asyncio.timeout(CLOSE_S):
                while any(node not in self._out for node in self._at.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            LOG.warning("%d rollouts are not known to have ended", self.sampler.in_flight)
        finally:
            await self._services.close()

    async def batch(self) -> TrainingBatch | None:
        """The next batch, as soon as it is complete; ``None`` if there are not prompts enough for another one.

        Raises:
            NothingToLearn: groups have no variance, for long, or cannot be run.
            ApiError: a service refuses this runner, not just a row.
            StalledError: no rollout moves. A further call waits again.
        """
        started = asyncio.get_running_loop().time()
        if self.sampler.asked <= self._handed_over:
            self.sampler.ask()
            self._pump()
        while self._batches.empty():
            if self._broken is not None:
                raise self._broken
            if self.sampler.finished:
                return None
            await self._change(started)
        self._handed_over += 1
        return self._batches.get_nowait()

    def weights(self, version: int) -> None:
        """The engines sample from these weights now."""
        self.sampler.weights(version)
        self._note_progress()
        self._pump()

    def state(self) -> dict[str, Any]:
        """What a new runner goes on from, as JSON; for a checkpoint that is written between two batches.

        Raises:
            CallerError: a batch is complete that nobody has taken, as after a call of :meth:`batch` was given up. It
                would be lost.
        """
        if not self._batches.empty():
            raise CallerError("a batch waits to be taken: call batch() first", field="state")
        return {"sampler": self.sampler.state(), "services": dict(self._at)}

    async def _change(self, started: float) -> None:
        """Wait for something to happen, unless nothing has for too long since a batch was first waited for."""
        troubles, now = self._services.unusable_nodes(), asyncio.get_running_loop().time()
        stuck = not self.sampler.awaits_weights and len(troubles) == len(self._services.nodes)
        bound = self._stall_s + (0.0 if stuck else self._longest_stage())
        left = max(started, self._moved_at) + bound - now
        if left <= 0:
            raise StalledError(f"no rollout has moved for {bound:g} s: {self._stall_reason(troubles)}")
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left, self._stall_s / 10)):  # since the bound may be another one by then
                await self._changed.wait()

    def _note_progress(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()

    def _longest_stage(self) -> float:
        """The longest budget of a stage, seconds: no rollout may be expected to move sooner."""
        environments = [it for status in self._services.statuses.values() for it in status.environments.values()]
        said = [budget for environment in environments for budget in environment.budgets.values()]
        return max([*said, *(self._options.get("budgets") or {}).values()], default=0.0)

    def _stall_reason(self, troubles: Mapping[str, str]) -> str:
        if self.sampler.awaits_weights:
            return f"weights {self.sampler.version + 1} are awaited; announce them by weights()"
        places = Counter(node or "no service" for rollout, node in self._at.items() if rollout not in self._results)
        told = [f"{self.sampler.in_flight} rollouts are in flight"]
        told += [f"{count} at {node}" for node, count in places.items()]
        return "; ".join([*told, *(f"{node}: {why}" for node, why in troubles.items())])

    async def _resume(self, state: Mapping[str, Any]) -> None:
        again = self.sampler.restore(state["sampler"])
        self._handed_over = self.sampler.emitted
        places = {rollout: node for rollout, node in state["services"].items() if node in self._services.nodes}
        await asyncio.gather(*(self._fetch_result(rollout, places.get(rollout)) for rollout in self.sampler.results()))
        for rollout in again.cancel:
            if rollout in places:
                self._at[rollout] = places[rollout]
                self._services.cancel_unknown(rollout, places[rollout])
            else:
                self.sampler.cancelled(rollout)
        self._resumed = {submission.rollout for submission in again.submit}
        for submission in again.submit:
            self._submit(submission, places.get(submission.rollout))

    async def _fetch_result(self, rollout: str, node: str | None) -> None:
        try:
            self._results[rollout] = _kept(await self._services.result(rollout, node))
            self._at[rollout] = node
        except InfrastructureError as error:
            LOG.warning("%s is sampled again, its result is lost: %s", rollout, error)
            self.sampler.lost(rollout)

    # What services tell

    def _ended(self, job: JobView) -> None:
        self._note_progress()
        self.rollout_metrics.add(job)
        usage = usage_of(job)
        if job.state is JobState.CANCELLED and job.id in self._resumed:
            LOG.warning("%s was ended since the state was saved: all that no batch has had begins again", job.id)
            self.sampler.interrupted(job.id, usage)
            self._gone(job.id)
            self._pump()
            return
        try:
            outcome = outcome_of(job, self.sampler.config.filter_on)
        except CallerError as error:
            self._broken = self._broken or error
            outcome = Origin.CALLER
        why = job.failure.reason if job.failure else ""
        counts = isinstance(outcome, Outcome) or outcome is Origin.AGENT
        if counts and (foreign := self._foreign(job)) is not None:
            LOG.warning("%s is sampled again: %s", job.id, foreign)
            outcome, why, counts = Origin.INFRASTRUCTURE, foreign, False
        if self.sampler.wants(job.id) and counts:
            self._results[job.id] = _kept(job)
        if isinstance(outcome, Outcome):
            kept = Kept(self._at[job.id], () if job.forked_from else job.checkpoints)
            accuracy, masked = outcome.accuracy, outcome.masked
            self.sampler.scored(job.id, outcome.reward, usage, accuracy=accuracy, masked=masked, kept=kept)
        else:
            self.sampler.failed(job.id, outcome, usage, why=why)
        if job.id not in self._results:
            self._gone(job.id)
        self._pump()

    def _foreign(self, job: JobView) -> str | None:
        """Why a rollout of a run is no data: who sampled it is not known, or was not this run's policy."""
        run = self._options.get("run")
        if run is None:
            return None
        if job.run != run:
            return f"it is of run {job.run!r}, not of {run!r}"
        # The next version is labelled a moment before it is announced here.
        newest = self.sampler.version + 1
        for label in job.weight_versions or ([None] if job.turns and job.state is JobState.SUCCEEDED else []):
            if label is None or not label.isdecimal() or int(label) > newest:
                return f"weights {label!r} sampled it, which are none of run {run!r}"
        return None

    def _lost(self, rollout: str, loss: LossReason, why: str) -> None:
        # An id that is another run's is that of an earlier life of this one, which other weights sampled.
        refused = loss in (LossReason.REFUSED, LossReason.CANCELLED, LossReason.UNFORKABLE)
        origin = Origin.CALLER if refused else Origin.INFRASTRUCTURE
        LOG.warning("%s has no outcome: %s", rollout, why)
        if rollout in self._resumed and origin is Origin.INFRASTRUCTURE:
            self.sampler.interrupted(rollout)
        else:
            self.sampler.failed(rollout, origin, why=why)
        self._gone(rollout)
        self._pump()

    def _broke(self, node: str, error: BaseException) -> None:
        self._out.add(node)
        LOG.error("the runner can't go on: %s", error)
        self._broken = self._broken or error
        self._changed.set()

    # What the sampler decides

    def _pump(self) -> None:
        try:
            while (decision := self.sampler.decide()) != Decision():
                self._carry_out(decision)
        except CallerError as error:
            self._broken = self._broken or error
        self._changed.set()

    def _carry_out(self, decision: Decision) -> None:
        for batch in decision.batches:
            self._batches.put_nowait(self._training_batch(batch))
        for rollout in decision.forget:
            self._results.pop(rollout, None)
            self._gone(rollout)
        for rollout in decision.cancel:
            self._services.cancel(rollout)
        for submission in decision.submit:
            self._submit(submission)

    def _submit(self, submission: Submission, node: str | None = None) -> None:
        prompt = self._prompts[submission.prompt]
        if prompt is None:
            raise AssertionError(f"there is no prompt {submission.prompt}")
        options = self._options
        if (prefix := submission.prefix) is not None:
            # Environment and run are those of the rollout that is forked.
            options = {name: value for name, value in options.items() if name not in ("environment", "run")}
            options[FORK] = {"rollout_id": prefix.rollout, "turn": prefix.turn}
            node = prefix.node
        body = {"row": prompt.row, "group": submission.group, "client": self._client, **options}
        self._at[submission.rollout] = None
        self._services.submit(submission.rollout, body | {"priority": int(submission.urgent)}, node=node)

    def _placed(self, rollout: str, node: str) -> None:
        self._at[rollout] = node

    def _gone(self, rollout: str) -> None:
        """A rollout left: it has no outcome to come, and no result to keep."""
        del self._at[rollout]

    def _training_batch(self, batch: Batch) -> TrainingBatch:
        groups = []
        for number, members in batch.groups.items():
            prompt = self._prompts[batch.prompts[number]]
            row = prompt.row if prompt else {}
            group = []
            for member in members:
                kept = self._results.pop(member.rollout)
                self._gone(member.rollout)
                group.append(TrainedRollout(member.rollout, row, member.reward, member.version, member.masked, *kept))
            groups.append(group)
        return TrainingBatch(batch.number, batch.version, groups)


def _kept(job: JobView) -> tuple[list[TurnTokens], int, bytes]:
    turns = [TurnTokens.unpack(turn.model_dump()) for turn in job.tokens or ()]
    return turns, inherited(job), orjson.dumps(job.result or {})
