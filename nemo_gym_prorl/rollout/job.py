# SPDX-License-Identifier: Apache-2.0
"""A job: one rollout with an id, its states, and the only transitions between them.

Everything that happens to a rollout is a transition of its job, and :meth:`Job.move` is the only way to make one. So
"each job ends in exactly one outcome" is not a promise that many places keep, but a table that one method checks.

Time is booked here too: a stage's clock runs while the stage works on the job and at no other time, so that waiting in
a queue costs a job nothing (DESIGN §5, invariant 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.failures import Failure, FailureKind, Stage


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


_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})
_FAILURES = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.INITIALIZING}) | _FAILURES,
    # Back to QUEUED is a retry: the attempt's session is gone and the next one starts afresh.
    JobState.INITIALIZING: frozenset({JobState.READY, JobState.QUEUED}) | _FAILURES,
    JobState.READY: frozenset({JobState.RUNNING}) | _FAILURES,
    JobState.RUNNING: frozenset({JobState.EVALUATING, JobState.QUEUED}) | _FAILURES,
    # A retry of EVAL keeps the trajectory and stays here.
    JobState.EVALUATING: frozenset({JobState.SUCCEEDED}) | _FAILURES,
    **{state: frozenset() for state in _TERMINAL},
}


class IllegalTransition(RuntimeError):
    """A defect of the service, never of a caller: a job was about to be moved where it cannot go."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long each stage may work on a job, in seconds per attempt. Queue time is free."""

    init: float = 600.0
    run: float = 3600.0
    eval: float = 900.0

    def of(self, stage: Stage) -> float:
        """The budget of one stage, seconds."""
        return float(getattr(self, stage.value))


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
        finish_reason: why the loop ended: ``stop``, ``max_turns``, ``max_tokens``, ``length`` or
            ``context_overflow``; ``None`` while it goes on, or if it was cut short.
        weight_versions: per turn, the labels of the weights that sampled it, where the model server tells:
            ``{"turn": 0, "first": …, "last": …}``.
    """

    turns: int = 0
    tool_calls: int = 0
    finish_reason: str | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Trajectory:
    """What RUN hands to EVAL.

    Attributes:
        response: a Responses API response object whose ``output`` holds every turn, tool output and token field.
        evidence: whatever the handler's EVAL needs besides, e.g. cookies; never leaves the service.
    """

    response: dict[str, Any]
    evidence: Any = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What EVAL found: the reward (``None`` if there was nothing to score), and the full answer of the verifier."""

    reward: float | None
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. ``reward`` is ``None`` unless the job was scored: a failure has no reward.

    Attributes:
        result: what ``/run`` answers: the verifier's JSON, or a masked failure row with whatever was gathered.
    """

    state: JobState
    result: dict[str, Any]
    reward: float | None = None
    failure: Failure | None = None


def failure_state(failure: Failure) -> JobState:
    """The terminal state that belongs to a failure."""
    if failure.timed_out:
        return JobState.TIMED_OUT
    if failure.kind in (FailureKind.CANCELLED, FailureKind.SHUTDOWN):
        return JobState.CANCELLED
    return JobState.FAILED


@dataclass(slots=True, eq=False)
class Job:
    """One rollout. Only the pipeline changes it; handlers read it.

    Attributes:
        id: unique; chosen by the caller or by the service.
        row: the dataset row, as sent.
        handler: name of the handler that knows how to run it.
        group: the rollouts of one prompt share a group; ``None`` if the caller has none.
        client: whose job it is, for fair share between callers.
        priority: higher goes first, in every queue.
        max_attempts: how often INIT+RUN, and EVAL, may each be tried.
        submitted_at: wall-clock time, seconds since the epoch.
        session: what INIT acquired, until it is released.
        trajectory: what RUN produced; a handler sets it early and fills it as it goes, so that a rollout that is cut
            short keeps what was sampled.
        number: its place in the order of submission; given by the store.
        held: its caller holds a connection for it and takes its result away; nobody else joins it.
    """

    id: str
    row: dict[str, Any]
    handler: str
    submitted_at: float
    group: str | None = None
    client: str = "default"
    priority: int = 0
    budgets: Budgets = field(default_factory=Budgets)
    max_attempts: int = 3
    held: bool = False
    number: int = 0
    state: JobState = JobState.QUEUED
    times: dict[Stage, StageTime] = field(default_factory=lambda: {stage: StageTime() for stage in Stage})
    failures: list[Failure] = field(default_factory=list)
    outcome: Outcome | None = None
    finished_at: float | None = None
    session: Any = None
    trajectory: Trajectory | None = None
    progress: Progress = field(default_factory=Progress)

    def move(self, state: JobState) -> None:
        """Make one transition.

        Raises:
            IllegalTransition: the table does not have it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"job {self.id}: {self.state} -> {state}")
        self.state = state
