# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A job: one rollout with an id, its states, and the only transitions between them.

Everything that happens to a rollout is a transition of its job, and :meth:`Job.move` is the only way to make one. So
"each job ends in exactly one outcome" is not a promise that many places keep, but a table that one method checks.

Time is booked here too: a stage's clock runs while the stage works on the job and at no other time, so that waiting in
a queue costs a job nothing (DESIGN §5, invariant 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

import orjson

from nemo_gym_prorl.failures import Failure, FailureKind, Stage, clean_text
from nemo_gym_prorl.rollout.gym_rows import (
    NO_TOKENS,
    TurnTokens,
    compact_json_bytes,
    pack_turns,
    put_tokens,
    take_tokens,
)
from nemo_gym_prorl.rollout.queues import Member
from nemo_gym_prorl.rollout.settings import Budgets
from nemo_gym_prorl.rollout.turns import NO_STEPS, TurnTiming


class JobState(StrEnum):
    """Where a job is. ``READY`` holds a session and waits for RUN; ``EVALUATING`` includes the wait for EVAL."""

    QUEUED = "queued"
    INITIALIZING = "initializing"
    READY = "ready"
    RUNNING = "running"
    EVALUATING = "evaluating"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"

    @property
    def terminal(self) -> bool:
        """Nothing happens to a job after this."""
        return self in _TERMINAL


_BOOKKEEPING = 4_096
"""What a job takes besides its row, result and failures."""

_MOST = 2**63 - 1
"""What readers of JSON take for an integer."""

_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})
FAILED_STATES = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.INITIALIZING}) | FAILED_STATES,
    # Back to QUEUED is a retry: the attempt's session is gone and the next one starts afresh.
    JobState.INITIALIZING: frozenset({JobState.READY, JobState.QUEUED}) | FAILED_STATES,
    JobState.READY: frozenset({JobState.RUNNING, JobState.QUEUED}) | FAILED_STATES,
    # Straight to the end: a time-out that counts as it is, with nothing to score.
    JobState.RUNNING: frozenset({JobState.EVALUATING, JobState.QUEUED, JobState.SUCCEEDED}) | FAILED_STATES,
    # A retry of EVAL keeps the trajectory and stays here; where its session is lost only a new attempt can help.
    JobState.EVALUATING: frozenset({JobState.SUCCEEDED, JobState.QUEUED}) | FAILED_STATES,
    **{state: frozenset() for state in _TERMINAL},
}


class IllegalTransition(RuntimeError):
    """A defect of the service, never of a caller: a job was about to be moved where it cannot go."""


_STAGES = tuple(Stage)
"""To go through an enumeration costs more than all else in making a job."""


@dataclass(slots=True)
class StageTime:
    """What a job spent in one stage, summed over its attempts, in seconds."""

    waited_s: float = 0.0
    worked_s: float = 0.0
    attempts: int = 0


@dataclass(slots=True)
class Progress:
    """How far the agent got; kept when the trajectory itself is gone.

    Attributes:
        turns: policy turns taken.
        tool_calls: tool calls executed.
        finish_reason: why the loop ended: ``stop``, ``max_steps``, ``max_total_sequence_length``, ``length``,
            ``context_overflow``, or ``timeout`` where a rollout without RUN budget counts all the same; ``None`` while
            it goes on, or if it was cut short.
        weight_versions: per turn, the labels of the weights that sampled it, where the model server tells:
            ``{"turn": 0, "first": …, "last": …}``.
        steps: per turn, what is to be told of it.
        log_probs: the modes of the log-probs of the turns, where the model server tells.
    """

    turns: int = 0
    tool_calls: int = 0
    finish_reason: str | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    steps: list[TurnTiming] = field(default_factory=list)
    log_probs: list[str] = field(default_factory=list)

    @property
    def labels(self) -> list[str | None]:
        """Those in :attr:`weight_versions`, each once."""
        told = [turn.get(end) for turn in self.weight_versions if isinstance(turn, dict) for end in ("first", "last")]
        return [*dict.fromkeys(clean_text(label, 200) if isinstance(label, str) else None for label in told)]

    @classmethod
    def of(cls, told: Any) -> Self:
        """What a handler made of it, as what it must be: others list and follow every job."""
        turns, tool_calls, reason = (getattr(told, name, None) for name in ("turns", "tool_calls", "finish_reason"))
        return cls(
            _count(turns),
            _count(tool_calls),
            None if reason is None else clean_text(reason, 200),
            versions if isinstance(versions := getattr(told, "weight_versions", None), list) else [],
            log_probs=[mode for mode in getattr(told, "log_probs", ()) if isinstance(mode, str)][:4],
        )


def _count(told: Any) -> int:
    return min(told, _MOST) if isinstance(told, int) and told > 0 else 0


@dataclass(slots=True)
class Trajectory:
    """What RUN hands to EVAL.

    Attributes:
        response: a Responses API response object whose ``output`` holds every turn, tool output and token field. When
            RUN is over the latter are taken off it.
        evidence: whatever the handler's EVAL needs besides, e.g. cookies; never leaves the service.
        tokens: what was taken.
    """

    response: dict[str, Any]
    evidence: Any = None
    tokens: list[TurnTokens] = field(default_factory=list)

    def take_tokens(self) -> None:
        """Have the tokens apart, before they are waited with, sent or written."""
        self.tokens = self.tokens or take_tokens(self.response)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What EVAL found: the reward (``None`` if there was nothing to score), and the full answer of the verifier."""

    reward: float | None
    result: dict[str, Any]


@dataclass(frozen=True, slots=True, init=False)
class Outcome:
    """How a job ended. ``reward`` is ``None`` unless the job was scored: a failure has no reward.

    The result is written as JSON once, here, and kept and served as those bytes: as objects it would take several
    times the memory.

    Attributes:
        body: what ``/run`` answers but for the tokens, as JSON: the verifier's answer, or a masked failure row with
            what was gathered.
        masked: nobody is to train on it: its verdict says so, or it has none.

    Args:
        state: the job's last state.
        result: the same as an object, or as JSON bytes of one.
        reward: of a scored job.
        failure: of one that was not.
        masked: what its verdict says (:func:`~.gym_rows.masked`).

    Raises:
        TypeError: the result cannot be written as JSON, e.g. since it holds a lone surrogate.
    """

    state: JobState
    body: bytes
    reward: float | None
    failure: Failure | None
    masked: bool

    def __init__(
        self,
        state: JobState,
        result: Mapping[str, Any] | bytes,
        reward: float | None = None,
        failure: Failure | None = None,
        masked: bool = False,
    ) -> None:
        body = result if isinstance(result, bytes) else compact_json_bytes(result)
        fields = {"state": state, "body": body, "reward": reward, "failure": failure}
        for name, value in (fields | {"masked": masked or failure is not None}).items():
            object.__setattr__(self, name, value)

    @property
    def result(self) -> dict[str, Any]:
        """The result as an object, parsed anew with each call."""
        return dict(orjson.loads(self.body))


def failure_state(failure: Failure) -> JobState:
    """The terminal state that belongs to a failure."""
    if failure.timed_out:
        return JobState.TIMED_OUT
    if failure.kind in (FailureKind.CANCELLED, FailureKind.SHUTDOWN):
        return JobState.CANCELLED
    return JobState.FAILED


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a job is to begin that other services have had, or had a parent of.

    Attributes:
        tries: ids of its earlier tries, the latest first; where none has left anything, the job begins anew.
        parents: of a fork, those of the rollout that it was forked from.
        turn: after which it was.
        parent: that rollout's id as callers know it.
        client: whose all of these are; ``None`` where an administrator vouches for them.
    """

    tries: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    turn: int | None = None
    parent: str | None = None
    client: str | None = None

    @property
    def fork(self) -> dict[str, Any] | None:
        """As callers are told of it."""
        return {"id": self.parent or self.parents[0], "turn": self.turn, "lost": []} if self.parents else None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One of them.

    Attributes:
        turn: the turns that were taken.
        state: what its handler goes on from; never leaves the service.
        size: of what is kept for it, in bytes.
        spent_s: what the rollout had used of RUN's budget.
        lost: in a word each, what of its environment can't be carried over.
        borrowed: the id under which another service has taken it, whose it is to erase.
    """

    turn: int
    state: Any
    size: int
    spent_s: float = 0.0
    lost: tuple[str, ...] = ()
    borrowed: str = ""


class CheckpointRecorder(Protocol):
    """Keeps the checkpoints of jobs."""

    async def keep(self, job: Job, checkpoint: Checkpoint) -> None:
        """Add a checkpoint of a job, and return once other services can find the checkpoint."""
        ...

    def drop(self, job: Job, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from a job, and erase the checkpoint once no job holds it."""
        ...

    def add(self, job: Job, checkpoint: Checkpoint) -> None:
        """Let a job hold a checkpoint."""
        ...

    def ended(self, job: Job, *, keep: bool) -> None:
        """Note that a job has its outcome; erase its checkpoints unless ``keep``."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One rollout. Only the pipeline changes it; handlers read it.

    Attributes:
        id: unique; chosen by the caller or by the service.
        stored_row: the dataset row, as sent; as JSON once the job has its outcome. Read it as :attr:`row`.
        digest: of the row (:func:`~.request.row_digest`): the same id with another row is another job.
        environment: where it belongs (:mod:`~nemo_gym_prorl.rollout.handler`).
        handler: name of the handler that knows how to run it.
        group: the rollouts of one prompt share a group; ``None`` if the caller has none.
        client: whose job it is, for fair share between callers.
        scope: the client, if it had a key of its own when the job was accepted: then its group is apart from others'
            of that name.
        run: whose backends sample it; ``None`` for the model server's own.
        priority: higher goes first, in every queue.
        max_attempts: how often INIT+RUN, and EVAL, may each be tried.
        submitted_at: wall-clock time, seconds since the epoch.
        session: what INIT acquired, until it is released.
        trajectory: what RUN produced; a handler sets it early and fills it as it goes, so that a rollout that is cut
            short keeps what was sampled.
        number: its place in the order of submission; given by the store.
        member: its part in those that are scored together, while it is scored; ``None`` if each is for itself.
        attached: its caller holds a connection for it and takes its result away; nobody else joins it.
        delivered: its caller took the answer over a connection that it held; the id is free again.
        tokens: of a job with its outcome, as JSON (:func:`~.gym_rows.pack_turns`).
        steps: of a job with its outcome, as JSON.
        checkpoints: where it can go on, by the turns that were taken; ``checkpoint_store`` keeps them.
        kept_turns: the same, as its node says, where it ran at a node of a fleet.
        spent_s: what attempts before this one have used of RUN's budget, up to the turn where this one goes on.
        resumed: where attempts went on: after which ``turn``, and what of the environment was ``lost``.
        forked_from: the ``id`` of the job at whose checkpoint it began, after which ``turn``, and what was ``lost``.
        resume_point: where it is to go on that is looked for in INIT.
        tries: of a front's job, its ids at nodes so far.
    """

    id: str
    stored_row: dict[str, Any] | bytes
    digest: bytes
    environment: str
    handler: str
    submitted_at: float
    group: str | None = None
    client: str = "default"
    run: str | None = None
    priority: int = 0
    budgets: Budgets = field(default_factory=Budgets)
    max_attempts: int = 3
    attached: bool = False
    number: int = 0
    state: JobState = JobState.QUEUED
    times: dict[Stage, StageTime] = field(default_factory=lambda: {stage: StageTime() for stage in _STAGES})
    failures: list[Failure] = field(default_factory=list)
    outcome: Outcome | None = None
    finished_at: float | None = None
    session: Any = None
    trajectory: Trajectory | None = None
    progress: Progress = field(default_factory=Progress)
    member: Member | None = None
    delivered: bool = False
    tokens: bytes = NO_TOKENS
    steps: bytes = NO_STEPS
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    kept_turns: list[int] = field(default_factory=list)
    spent_s: float = 0.0
    resumed: list[dict[str, Any]] = field(default_factory=list)
    forked_from: dict[str, Any] | None = None
    checkpoint_store: CheckpointRecorder | None = None
    resume_point: ResumePoint | None = None
    tries: list[str] = field(default_factory=list)
    scope: str | None = None

    def fits(self, state: JobState | None, group: str | None, after: int) -> bool:
        """Whether it is of this state and group, where they are given, and its number lies behind ``after``."""
        return self.number > after and state in (None, self.state) and group in (None, self.group)

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """Where an attempt goes on, if anywhere."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    async def keep_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A handler has taken one; returns when it is as safe as it gets."""
        assert self.checkpoint_store is not None, "the pipeline keeps them"
        await self.checkpoint_store.keep(self, checkpoint)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """It turned out to be of no use."""
        assert self.checkpoint_store is not None, "the pipeline keeps them"
        self.checkpoint_store.drop(self, checkpoint)

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """This attempt goes on from there; what was spent until then is spent."""
        self.spent_s = checkpoint.spent_s
        begun_at = self.forked_from["turn"] if self.forked_from else 0
        if self.times[Stage.INIT].attempts > 1 or checkpoint.turn > begun_at:
            self.resumed.append({"turn": checkpoint.turn, "lost": [*checkpoint.lost]})

    @property
    def row(self) -> dict[str, Any]:
        """The dataset row; of a job with its outcome parsed anew with each call."""
        return self.stored_row if isinstance(self.stored_row, dict) else dict(orjson.loads(self.stored_row))

    def pack(self) -> None:
        """Give back the memory of what nobody works with any more; for a job with its outcome."""
        if self.trajectory is not None:
            self.tokens = pack_turns(self.trajectory.tokens)
        self.session = self.trajectory = None
        try:
            self.steps = compact_json_bytes(self.progress.steps)
        except (AttributeError, TypeError):  # a handler may have made anything of it
            self.steps = NO_STEPS
        self.progress = Progress.of(self.progress)
        if isinstance(self.stored_row, dict):
            try:
                self.stored_row = compact_json_bytes(self.stored_row)
            except TypeError:  # whoever works on a job may have put something into its row
                self.stored_row = b"{}"

    def deliver(self) -> None:
        """Its caller has the answer and asks no more: keep neither row nor result, and let the id be used again."""
        assert self.outcome is not None, "only an outcome can be delivered"
        self.delivered = True
        self.stored_row, self.tokens, self.steps = b"{}", NO_TOKENS, NO_STEPS
        was = self.outcome
        self.outcome = Outcome(was.state, b"{}", was.reward, was.failure, was.masked)

    @property
    def size(self) -> int:
        """Bytes that a job with its outcome keeps, its own bookkeeping about."""
        body = len(self.outcome.body) if self.outcome else 0
        failures = sum(len(failure.reason) + len(failure.traceback or "") for failure in self.failures)
        return _BOOKKEEPING + body + len(self.tokens) + len(self.steps) + len(self.stored_row) + failures

    def gym_result(self) -> dict[str, Any]:
        """The result as Gym has it, with all tokens on its output items, for orjson; made anew with each call."""
        assert self.outcome is not None, "only a job with its outcome has a result"
        result = self.outcome.result
        put_tokens(result.get("response"), map(TurnTokens.unpack, orjson.loads(self.tokens)))
        return result

    def move(self, state: JobState) -> None:
        """Make one transition.

        Raises:
            IllegalTransition: the table does not have it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"job {self.id}: {self.state} -> {state}")
        self.state = state
