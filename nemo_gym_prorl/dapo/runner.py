# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Runner between the sampler and rollout services: carries out decisions, and hands batches to the trainer.

    services = [RolloutClient(url) for url in urls]
    async with Runner(DynamicSampler(config, prompts), prompts, services) as runner:
        while (batch := await runner.batch()) is not None:
            await asyncio.to_thread(train, batch)
            runner.weights(batch.version + 1)

Rollouts run in the background between calls of :meth:`Runner.batch`, as far as ``max_staleness`` allows. The trainer
must load weights into the engines before it announces their version with :meth:`Runner.weights`.
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
from nemo_gym_prorl.dapo.group import CheckpointRef
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.dapo.scoring import RolloutMetrics, Score, inherited_turns, score_of, usage_of
from nemo_gym_prorl.failures import CallerError, InfrastructureError, Origin
from nemo_gym_prorl.fleet.dispatcher import FleetDispatcher
from nemo_gym_prorl.fleet.forwarder import FORK, LossReason
from nemo_gym_prorl.fleet.placement import NodeList
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.gym_rows import TRAINING_TRACES, TurnTokens, trace_turns
from nemo_gym_prorl.rollout.job import JobState


LOG = logging.getLogger(__name__)

CLOSE_S = 30.0  # limit for services to remove the sandboxes of cancelled rollouts when the runner closes
STALL_S = 900.0  # the agent waits as long for a server that does not answer (unreachable_s)


class StalledError(InfrastructureError):
    """No rollout that a batch waits for has changed its state for too long."""


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """A rollout to train on.

    Attributes:
        id: id of the rollout.
        prompt: dataset row.
        reward: raw reward of the environment.
        version: weight version under which the rollout began.
        masked: whether the rollout gets no loss and does not enter the baseline of its group.
        tokens: tokens of each policy turn.
        inherited: number of first turns that were inherited from a prefix and get no loss.
        body: result as JSON bytes; thousands of parsed results would take several times the memory.
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
        """Response of the environment's ``/verify`` without tokens, parsed on each access."""
        return dict(orjson.loads(self.body))

    @property
    def traces(self) -> list[list[TurnTokens]]:
        """Sequences to train on, the oldest first; empty if :attr:`tokens` is the rollout's only sequence.

        Raises:
            ValueError: the result's ``training_traces`` are invalid.
        """
        field = self.result.get(TRAINING_TRACES) if TRAINING_TRACES.encode() in self.body else None
        return [trace_turns(trace) for trace in field.get("traces") or ()] if isinstance(field, dict) else []


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Groups with variance, of equal size.

    Attributes:
        number: batch number, from 0.
        version: weight version to train; the trainer announces the result as ``version + 1``.
        groups: rollouts of each prompt.
    """

    number: int
    version: int
    groups: list[list[TrainedRollout]]


class Runner:
    """Source of training batches; see the module.

    An async context manager. On exit the runner cancels rollouts in flight and waits until their sandboxes are gone,
    at most :data:`CLOSE_S`.

    Args:
        sampler: new sampler.
        prompts: prompts of the sampler.
        services: clients of rollout services, not yet open; the runner opens and closes these clients.
        client: client name under which services share their slots among callers.
        options: further fields of each submission: ``environment``, ``budgets``, ``max_attempts``, ``run``. With
            ``run`` a rollout is valid only if weights of that training run, labelled with numbers, sampled its turns.
        state: return value of :meth:`state` of an earlier runner. Rollouts at lost services are sampled again.
        stall_s: seconds that :meth:`batch` waits while no rollout changes its state and no service accepts rollouts.
            If a service accepts rollouts, or weights are awaited, the longest budget of a stage is added.
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
            on_error=self._service_failed,
            report=LOG.warning,
            on_state=lambda rollout, state: self._note_progress(),
            on_placed=self._placed,
        )
        self._stall_s = stall_s
        self._last_progress = -math.inf
        """Event loop time at which a rollout last changed its state or weights were last announced."""
        self._refusing: set[str] = set()
        """Services that refuse this runner's requests."""
        self._service_of: dict[str, str | None] = {}
        """Service of each rollout in flight or with a result; ``None`` until a service has accepted the rollout."""
        self._resumed: set[str] = set()
        """Rollouts that were in flight when the restored state was saved."""
        self._results: dict[str, tuple[list[TurnTokens], int, bytes]] = {}
        """Tokens, number of inherited turns, and body of rollouts that may be trained on."""
        self._batches: asyncio.Queue[TrainingBatch | None] = asyncio.Queue()
        self._handed_over = sampler.emitted
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        try:
            await self._services.start()
            if self._state is not None:
                await self._resume(self._state)
        except BaseException:
            await self._services.close()
            raise
        self._apply_decisions()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._apply(self.sampler.close())
            async with asyncio.timeout(CLOSE_S):
                while any(node not in self._refusing for node in self._service_of.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            LOG.warning(
                "%d rollouts have not ended %g s after their cancellation; services end them",
                self.sampler.in_flight,
                CLOSE_S,
            )
        finally:
            await self._services.close()

    async def batch(self) -> TrainingBatch | None:
        """Wait for the next batch and return it; ``None`` if the prompts do not suffice for another batch.

        Raises:
            NothingToLearn: too many consecutive groups have no variance or cannot be run.
            ApiError: a service refuses all requests of this runner, and not only a row.
            CallerError: a reward is no accuracy, or a setting is invalid.
            StalledError: no rollout has changed its state for too long. Another call waits again.
        """
        started = asyncio.get_running_loop().time()
        if self.sampler.asked <= self._handed_over:
            self.sampler.ask()
            self._apply_decisions()
        while self._batches.empty():
            if self._error is not None:
                raise self._error
            if self.sampler.finished:
                return None
            await self._change(started)
        self._handed_over += 1
        return self._batches.get_nowait()

    def weights(self, version: int) -> None:
        """Announce the weight version from which the engines sample now; see :meth:`.DynamicSampler.weights`."""
        self.sampler.weights(version)
        self._note_progress()
        self._apply_decisions()

    def state(self) -> dict[str, Any]:
        """Return the state for a new runner as JSON, for a checkpoint between two batches.

        Raises:
            CallerError: a complete batch was not taken, as after a cancelled call of :meth:`batch`, and would be lost.
        """
        if not self._batches.empty():
            raise CallerError("a complete batch would be lost: call batch() before state()", field="state")
        return {"sampler": self.sampler.state(), "services": dict(self._service_of)}

    async def _change(self, started: float) -> None:
        """Wait for an event of a service, at most until it is time to check again whether rollouts have stalled."""
        troubles, now = self._services.unusable_nodes(), asyncio.get_running_loop().time()
        stuck = not self.sampler.awaits_weights and len(troubles) == len(self._services.nodes)
        bound = self._stall_s + (0.0 if stuck else self._longest_stage())
        left = max(started, self._last_progress) + bound - now
        if left <= 0:
            raise StalledError(f"no rollout has changed its state for {bound:g} s: {self._stall_reason(troubles)}")
        self._changed.clear()
        with suppress(TimeoutError):
            # Services that fail or recover change the bound, so the bound is computed again during a long wait.
            async with asyncio.timeout(min(left, self._stall_s / 10)):
                await self._changed.wait()

    def _note_progress(self) -> None:
        self._last_progress = asyncio.get_running_loop().time()

    def _longest_stage(self) -> float:
        """Return the longest budget of a stage in seconds; a rollout may keep its state for that long."""
        environments = [it for status in self._services.statuses.values() for it in status.environments.values()]
        budgets = [budget for environment in environments for budget in environment.budgets.values()]
        return max([*budgets, *(self._options.get("budgets") or {}).values()], default=0.0)

    def _stall_reason(self, troubles: Mapping[str, str]) -> str:
        if self.sampler.awaits_weights:
            return f"weights {self.sampler.version + 1} are awaited; announce them by weights()"
        counts = Counter(
            node or "no service" for rollout, node in self._service_of.items() if rollout not in self._results
        )
        reasons = [f"{self.sampler.in_flight} rollouts are in flight"]
        reasons += [f"{count} at {node}" for node, count in counts.items()]
        return "; ".join([*reasons, *(f"{node}: {why}" for node, why in troubles.items())])

    async def _resume(self, state: Mapping[str, Any]) -> None:
        again = self.sampler.restore(state["sampler"])
        self._handed_over = self.sampler.emitted
        nodes = {rollout: node for rollout, node in state["services"].items() if node in self._services.nodes}
        await asyncio.gather(*(self._fetch_result(rollout, nodes.get(rollout)) for rollout in self.sampler.results()))
        for rollout in again.cancel:
            if rollout in nodes:
                self._service_of[rollout] = nodes[rollout]
                self._services.cancel_unknown(rollout, nodes[rollout])
            else:
                self.sampler.cancelled(rollout)
        self._resumed = {submission.rollout for submission in again.submit}
        for submission in again.submit:
            self._submit(submission, nodes.get(submission.rollout))

    async def _fetch_result(self, rollout: str, node: str | None) -> None:
        try:
            self._results[rollout] = _result_of(await self._services.result(rollout, node))
            self._service_of[rollout] = node
        except InfrastructureError as error:
            LOG.warning("result of rollout %s is lost, sampling it again: %s", rollout, error)
            self.sampler.lost(rollout)

    def _ended(self, job: JobView) -> None:
        self._note_progress()
        self.rollout_metrics.add(job)
        usage = usage_of(job)
        if job.state is JobState.CANCELLED and job.id in self._resumed:
            LOG.warning(
                "rollout %s was cancelled after the state was saved: all groups that are in no batch start again",
                job.id,
            )
            self.sampler.interrupted(job.id, usage)
            self._forget(job.id)
            self._apply_decisions()
            return
        try:
            score = score_of(job, self.sampler.config.filter_on)
        except CallerError as error:
            self._error = self._error or error
            score = Origin.CALLER
        why = job.failure.reason if job.failure else ""
        counts = isinstance(score, Score) or score is Origin.AGENT
        if counts and (foreign := self._foreign_weights(job)) is not None:
            LOG.warning("rollout %s is no data of this training, sampling it again: %s", job.id, foreign)
            score, why, counts = Origin.INFRASTRUCTURE, foreign, False
        if self.sampler.wants(job.id) and counts:
            self._results[job.id] = _result_of(job)
        if isinstance(score, Score):
            self.sampler.scored(
                job.id,
                score.reward,
                usage,
                accuracy=score.accuracy,
                masked=score.masked,
                checkpoints=CheckpointRef(self._service_of[job.id], () if job.forked_from else job.checkpoints),
            )
        else:
            self.sampler.failed(job.id, score, usage, why=why)
        if job.id not in self._results:
            self._forget(job.id)
        self._apply_decisions()

    def _foreign_weights(self, job: JobView) -> str | None:
        """Return why a rollout is invalid, if other weights than those of this training run (``run``) sampled it."""
        run = self._options.get("run")
        if run is None:
            return None
        if job.run != run:
            return f"the rollout belongs to training {job.run!r}, not to {run!r}"
        # Engines are labelled with the next version shortly before that version is announced to this runner.
        newest = self.sampler.version + 1
        for label in job.weight_versions or ([None] if job.turns and job.state is JobState.SUCCEEDED else []):
            if label is None or not label.isdecimal() or int(label) > newest:
                return f"weights {label!r}, which are not of training {run!r}, sampled the rollout"
        return None

    def _lost(self, rollout: str, loss: LossReason, why: str) -> None:
        # An id in use is an infrastructure failure: an earlier start of this trainer, with other weights, used the id.
        refused = loss in (LossReason.REFUSED, LossReason.CANCELLED, LossReason.UNFORKABLE)
        origin = Origin.CALLER if refused else Origin.INFRASTRUCTURE
        level = logging.DEBUG if loss is LossReason.CANCELLED else logging.WARNING
        LOG.log(level, "rollout %s has no outcome: %s", rollout, why)
        if rollout in self._resumed and origin is Origin.INFRASTRUCTURE:
            self.sampler.interrupted(rollout)
        else:
            self.sampler.failed(rollout, origin, why=why)
        self._forget(rollout)
        self._apply_decisions()

    def _service_failed(self, node: str, error: BaseException) -> None:
        self._refusing.add(node)
        LOG.error("service %s refuses the runner, which cannot go on: %s", node, error)
        self._error = self._error or error
        self._changed.set()

    def _apply_decisions(self) -> None:
        try:
            while (decision := self.sampler.decide()) != Decision():
                self._apply(decision)
        except CallerError as error:
            self._error = self._error or error
        self._changed.set()

    def _apply(self, decision: Decision) -> None:
        for batch in decision.batches:
            self._batches.put_nowait(self._training_batch(batch))
        for rollout in decision.forget:
            self._results.pop(rollout, None)
            self._forget(rollout)
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
            # A fork inherits environment and run.
            options = {name: value for name, value in options.items() if name not in ("environment", "run")}
            options[FORK] = {"rollout_id": prefix.rollout, "turn": prefix.turn}
            node = prefix.node
        body = {"row": prompt.row, "group": submission.group, "client": self._client, **options}
        self._service_of[submission.rollout] = None
        self._services.submit(submission.rollout, body | {"priority": int(submission.urgent)}, node=node)

    def _placed(self, rollout: str, node: str) -> None:
        self._service_of[rollout] = node

    def _forget(self, rollout: str) -> None:
        del self._service_of[rollout]

    def _training_batch(self, batch: Batch) -> TrainingBatch:
        groups = []
        for number, members in batch.groups.items():
            prompt = self._prompts[batch.prompts[number]]
            row = prompt.row if prompt else {}
            group = []
            for member in members:
                result = self._results.pop(member.rollout)
                self._forget(member.rollout)
                group.append(
                    TrainedRollout(member.rollout, row, member.reward, member.version, member.masked, *result)
                )
            groups.append(group)
        return TrainingBatch(batch.number, batch.version, groups)


def _result_of(job: JobView) -> tuple[list[TurnTokens], int, bytes]:
    turns = [TurnTokens.unpack(turn.model_dump()) for turn in job.tokens or ()]
    return turns, inherited_turns(job), orjson.dumps(job.result or {})
