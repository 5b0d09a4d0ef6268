# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Job: one rollout with an id, its states, and the allowed transitions between the states.

Invariants:

- :meth:`Job.move` makes every transition and checks it against :data:`TRANSITIONS`. So each job ends in exactly one
  outcome.
- A stage's clock runs only while the stage works on the job; time in a queue is not charged to a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

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
from nemo_gym_prorl.rollout.scheduling.fair_queue import Member
from nemo_gym_prorl.rollout.settings import Budgets
from nemo_gym_prorl.rollout.turn_records import NO_STEPS, TurnTiming


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.storage.checkpoints import CheckpointStore


class JobState(StrEnum):
    """States of a job. ``READY`` holds a session and waits for RUN; ``EVALUATING`` includes the wait for EVAL."""

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
        return self in _TERMINAL


_BOOKKEEPING = 4_096
"""Estimated bytes of a job besides its row, result and failures."""

_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})
FAILED_STATES = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.INITIALIZING}) | FAILED_STATES,
    # Back to QUEUED is a retry: the session of the failed attempt is released.
    JobState.INITIALIZING: frozenset({JobState.READY, JobState.QUEUED}) | FAILED_STATES,
    JobState.READY: frozenset({JobState.RUNNING, JobState.QUEUED}) | FAILED_STATES,
    # RUNNING to SUCCEEDED: the handler accepts the time-out as a result and skips scoring.
    JobState.RUNNING: frozenset({JobState.EVALUATING, JobState.QUEUED, JobState.SUCCEEDED}) | FAILED_STATES,
    # A retry of EVAL keeps the trajectory and the state. If the session is lost, the job needs a new attempt.
    JobState.EVALUATING: frozenset({JobState.SUCCEEDED, JobState.QUEUED}) | FAILED_STATES,
    **{state: frozenset() for state in _TERMINAL},
}


class IllegalTransition(RuntimeError):
    """Bug in the service: a transition that :data:`TRANSITIONS` does not allow."""


_STAGES = tuple(Stage)
"""Precomputed, because iterating an enumeration would dominate the creation of a job."""


@dataclass(slots=True)
class StageTime:
    """Seconds that a job waited for one stage and spent in the stage, and number of attempts; summed over all
    attempts."""

    waited_s: float = 0.0
    worked_s: float = 0.0
    attempts: int = 0


@dataclass(slots=True)
class Progress:
    """Progress of the agent; kept after the trajectory is dropped.

    Attributes:
        turns: policy turns taken.
        tool_calls: tool calls executed.
        finish_reason: why the tool loop ended: ``stop``, ``max_steps``, ``max_total_sequence_length``, ``length``,
            ``context_overflow``, or ``timeout`` for a rollout that counts despite its time-out; for a program that
            failed, ``harness_exit`` or a reason of its harness. ``None`` while the loop runs, or if the loop was cut
            short.
        weight_versions: per turn, the labels of the weights that sampled the turn, if the model server reports them:
            ``{"turn": 0, "first": …, "last": …}``.
        steps: per turn, its timing (:class:`~.turn_records.TurnTiming`).
        log_probs: modes of the turns' log-probs, if the model server reports them.
        token_in_rate: share of turns after the first whose prompt continued the rollout's tokens; ``None`` if unknown.
        harness: report of the program that took the policy's turns; empty without a program.
    """

    turns: int = 0
    tool_calls: int = 0
    finish_reason: str | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    steps: list[TurnTiming] = field(default_factory=list)
    log_probs: list[str] = field(default_factory=list)
    token_in_rate: float | None = None
    harness: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> list[str | None]:
        """Labels in :attr:`weight_versions`, without duplicates."""
        found = [turn.get(end) for turn in self.weight_versions if isinstance(turn, dict) for end in ("first", "last")]
        return [*dict.fromkeys(clean_text(label, 200) if isinstance(label, str) else None for label in found)]

    def without_steps(self) -> Self:
        """Return a copy for listings of jobs: without steps, and with a reason that UTF-8 can encode."""
        reason = None if self.finish_reason is None else clean_text(self.finish_reason, 200)
        return replace(self, finish_reason=reason, steps=[])


@dataclass(slots=True)
class Trajectory:
    """Result of RUN and input of EVAL.

    Attributes:
        response: a Responses API response object whose ``output`` holds all turns, tool outputs and token fields.
            After RUN the token fields are removed.
        evidence: further input of the handler's EVAL, such as cookies; never leaves the service.
        tokens: the removed token fields.
    """

    response: dict[str, Any]
    evidence: Any = None
    tokens: list[TurnTokens] = field(default_factory=list)

    def take_tokens(self) -> None:
        """Move the tokens from :attr:`response` to :attr:`tokens`, unless that was done before."""
        self.tokens = self.tokens or take_tokens(self.response)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of EVAL: the reward (``None`` if there was nothing to score), and the verifier's whole answer."""

    reward: float | None
    result: dict[str, Any]


@dataclass(frozen=True, slots=True, init=False)
class Outcome:
    """Terminal state of a job. ``reward`` is ``None`` unless the job was scored: a failure has no reward.

    The constructor serialises the result, which is kept and served as bytes: objects would take several times the
    memory.

    Attributes:
        body: answer of ``/run`` without the tokens, as JSON: the verifier's answer, or a masked failure row.
        masked: whether a trainer must skip the rollout: its verdict says so, or it has no verdict.

    Args:
        state: the job's terminal state.
        result: the body as an object, or as JSON bytes of an object.
        reward: reward of a scored job.
        failure: failure of a job that was not scored.
        masked: whether the verdict has a mask (:func:`~.gym_rows.is_masked`).

    Raises:
        TypeError: the result cannot be written as JSON, for example because of a lone surrogate.
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
        """The result as an object; parsed on each access."""
        return dict(orjson.loads(self.body))


def failure_state(failure: Failure) -> JobState:
    """Return the terminal state of a job that ends with this failure."""
    if failure.timed_out:
        return JobState.TIMED_OUT
    if failure.kind in (FailureKind.CANCELLED, FailureKind.SHUTDOWN):
        return JobState.CANCELLED
    return JobState.FAILED


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Checkpoints in the shared folder from which a job may start.

    Attributes:
        tries: ids of the job's earlier tries, the latest first. If no try has a checkpoint, the job starts from its
            row.
        parents: for a fork, the ids of its parent rollout.
        turn: for a fork, the turn of the parent after which the fork starts.
        parent: for a fork, the parent's id as clients know it; by default the first of ``parents``.
        client: client that must own all these rollouts; ``None`` for any owner, because an administrator submitted the
            job or the owner was checked before.
    """

    tries: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    turn: int | None = None
    parent: str | None = None
    client: str | None = None

    @property
    def fork(self) -> dict[str, Any] | None:
        """Parent and turn of the fork, as clients see them; ``None`` for a job that is not a fork."""
        return {"id": self.parent or self.parents[0], "turn": self.turn, "lost": []} if self.parents else None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """State of a rollout after one turn.

    Attributes:
        turn: number of turns taken.
        state: state from which the handler resumes; opaque to the pipeline, and never in an answer to a client.
        size: bytes that are stored for the checkpoint.
        spent_s: seconds of RUN's budget that the rollout had used.
        lost: short names of parts of the environment that cannot be restored.
        borrowed: id under which another service stored the checkpoint and will erase it; empty for an own checkpoint.
    """

    turn: int
    state: Any
    size: int
    spent_s: float = 0.0
    lost: tuple[str, ...] = ()
    borrowed: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """One rollout. Only its service changes a job, except that handlers set ``trajectory``, ``progress`` and budgets.

    Attributes:
        id: unique; chosen by the caller or by the service.
        stored_row: the dataset row as sent; as JSON once the job has its outcome. Read the row through :attr:`row`.
        digest: digest of the request. A request with the same id and another digest is refused.
        environment: name of the job's environment (:mod:`~nemo_gym_prorl.rollout.handler`).
        handler: name of the handler that runs the job.
        group: group of the rollouts of one prompt; ``None`` without a group.
        client: submitter, for fair share between callers.
        scope: the client, if the client had a key of its own when the job was accepted; else ``None``. Groups of
            different scopes are distinct.
        run: training run whose backends sample the job; ``None`` for the model server's own backends.
        priority: jobs with a higher priority go first, in every queue.
        max_attempts: maximum number of tries of INIT and RUN together, and of EVAL for one trajectory.
        submitted_at: wall-clock time, seconds since the epoch.
        session: session that INIT acquired, until release.
        trajectory: result of RUN. A handler sets the trajectory early and fills it, so that an interrupted rollout
            keeps its samples.
        number: position in the order of submission; set by the store.
        member: cohort of the job, and index in the cohort, while the cohort is scored; else ``None``.
        attached: whether the caller waits on a connection and takes the result; no other caller can join.
        delivered: whether the attached caller took the answer, so that the id is free again.
        tokens: tokens of a job with its outcome, as JSON (:func:`~.gym_rows.pack_turns`).
        steps: turn timings of a job with its outcome, as JSON.
        checkpoints: checkpoints by number of turns; ``checkpoint_store`` stores them.
        kept_turns: turns after which the job's node has a checkpoint, in a fleet.
        spent_s: seconds of RUN's budget that earlier attempts used before the turn where this attempt resumed.
        resumed: per resumed attempt, the ``turn`` and the ``lost`` parts of the environment.
        forked_from: ``id`` of the parent rollout, ``turn`` of the fork, and ``lost`` parts of the environment.
        resume_point: checkpoints in the shared folder that INIT looks for; ``None`` if there are none to look for.
        tries: ids at nodes so far, for a job of a fleet gateway.
        working: returns the stage that works on the job, and the seconds of work so far; ``None`` between stages.
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
    checkpoint_store: CheckpointStore | None = None
    resume_point: ResumePoint | None = None
    tries: list[str] = field(default_factory=list)
    scope: str | None = None
    working: Callable[[], tuple[Stage, float]] | None = None

    def timings(self) -> dict[Stage, StageTime]:
        """Return a copy of :attr:`times` that includes the work of the current attempt so far."""
        times = {stage: replace(time) for stage, time in self.times.items()}
        if self.working is not None:
            stage, seconds = self.working()
            times[stage].worked_s += seconds
        return times

    def fits(self, state: JobState | None, group: str | None, after: int) -> bool:
        """Return whether the job matches the given state and group and has a number above ``after``."""
        return self.number > after and state in (None, self.state) and group in (None, self.group)

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """Checkpoint from which the next attempt resumes; ``None`` if the job holds none."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    async def keep_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint that a handler has taken, best-effort also in the folder that services share."""
        assert self.checkpoint_store is not None, "the pipeline keeps them"
        await self.checkpoint_store.keep(self, checkpoint)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Erase a checkpoint that the handler cannot use."""
        assert self.checkpoint_store is not None, "the pipeline keeps them"
        self.checkpoint_store.drop(self, checkpoint)

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Record that this attempt starts from a checkpoint, with the RUN budget that was spent by then."""
        self.spent_s = checkpoint.spent_s
        begun_at = self.forked_from["turn"] if self.forked_from else 0
        if self.times[Stage.INIT].attempts > 1 or checkpoint.turn > begun_at:
            self.resumed.append({"turn": checkpoint.turn, "lost": [*checkpoint.lost]})

    @property
    def row(self) -> dict[str, Any]:
        """The dataset row; parsed on each access once the job has its outcome."""
        return self.stored_row if isinstance(self.stored_row, dict) else dict(orjson.loads(self.stored_row))

    def pack(self) -> None:
        """Serialise row, tokens and steps of a job that has ended, and drop its session and trajectory."""
        if self.trajectory is not None:
            self.tokens = pack_turns(self.trajectory.tokens)
        self.session = self.trajectory = None
        try:
            self.steps = compact_json_bytes(self.progress.steps)
        except (AttributeError, TypeError):  # a handler may have stored any value
            self.steps = NO_STEPS
        self.progress = self.progress.without_steps()
        if isinstance(self.stored_row, dict):
            try:
                self.stored_row = compact_json_bytes(self.stored_row)
            except TypeError:  # a handler may have put an unserialisable value into the row
                self.stored_row = b"{}"

    def deliver(self) -> None:
        """Drop the row and the result, and free the id, because the attached caller has the answer."""
        assert self.outcome is not None, "only an outcome can be delivered"
        self.delivered = True
        self.stored_row, self.tokens, self.steps = b"{}", NO_TOKENS, NO_STEPS
        was = self.outcome
        self.outcome = Outcome(was.state, b"{}", was.reward, was.failure, was.masked)

    @property
    def size(self) -> int:
        """Bytes of memory of a job with its outcome; those of the Python objects are estimated."""
        body = len(self.outcome.body) if self.outcome else 0
        failures = sum(len(failure.reason) + len(failure.traceback or "") for failure in self.failures)
        return _BOOKKEEPING + body + len(self.tokens) + len(self.steps) + len(self.stored_row) + failures

    def gym_result(self) -> dict[str, Any]:
        """Return the result in Gym's form, with all tokens on the output items as JSON fragments, which only orjson
        can serialise. Built on each call."""
        assert self.outcome is not None, "only a job with its outcome has a result"
        result = self.outcome.result
        put_tokens(result.get("response"), map(TurnTokens.unpack, orjson.loads(self.tokens)))
        return result

    def move(self, state: JobState) -> None:
        """Move the job to another state; raise :class:`IllegalTransition` unless :data:`TRANSITIONS` allows this."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"job {self.id}: {self.state} -> {state}")
        self.state = state
