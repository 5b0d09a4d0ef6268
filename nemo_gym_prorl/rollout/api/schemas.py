# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The job API's models: what goes over the wire, versioned by the path prefix ``/v1``."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from nemo_gym_prorl.failures import CallerError, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.gym_rows import NO_TOKENS, Row, as_submitted
from nemo_gym_prorl.rollout.job import Job, JobState, ResumePoint, StageTime
from nemo_gym_prorl.rollout.request import NO_CLIENT, JobRequest
from nemo_gym_prorl.rollout.settings import Seconds
from nemo_gym_prorl.rollout.turns import ROLLOUT_OPTIONS_KEY


MAX_WAIT_S = 60.0
"""Longest long-poll; a caller that waits longer polls again, so that dead connections are noticed."""


def _identifier(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable text")
    if value in (".", ".."):
        raise ValueError("must not be a step in a path")
    return value


MAX_ID = 200
"""Characters."""

Identifier = Annotated[
    str, Field(min_length=1, max_length=MAX_ID, pattern=r"^[^/?#\x00-\x1f\x7f]+$"), AfterValidator(_identifier)
]
"""Printable text that can stand in a path, percent-encoded: people name rollouts in their own words."""


class BudgetsModel(BaseModel):
    """Seconds that each stage may work per attempt; what is left out is the environment's, else the service's."""

    model_config = ConfigDict(extra="forbid")

    init: Seconds | None = None
    run: Seconds | None = None
    eval: Seconds | None = None

    def given(self) -> dict[Stage, float]:
        """Those that are not left out."""
        return {Stage(name): seconds for name, seconds in self.model_dump(exclude_none=True).items()}


class ResumePointModel(BaseModel):
    """Where a rollout is to go on that other services have had, by the folder that they share checkpoints in."""

    model_config = ConfigDict(extra="forbid")

    tries: list[Identifier] = Field(default_factory=list, description="Its ids there, the latest first.")
    parents: list[Identifier] = Field(
        default_factory=list, description="Of a fork: the ids of the rollout that it is forked from, likewise."
    )
    turn: int | None = Field(default=None, ge=1, description="After which it is.")
    parent: Identifier | None = Field(default=None, description="That rollout's id as its callers know it.")

    @model_validator(mode="after")
    def _a_fork_has_both(self) -> Self:
        if bool(self.parents) != (self.turn is not None):
            raise ValueError("a fork has `parents` and a `turn`")
        return self

    def to_resume_point(self) -> ResumePoint:
        """As the pipeline takes it."""
        return ResumePoint(tuple(self.tries), tuple(self.parents), self.turn, self.parent)


class SubmitRequest(BaseModel):
    """A rollout to run."""

    model_config = ConfigDict(extra="forbid")

    row: Row
    id: Identifier | None = Field(default=None, description="Chosen by the caller; the same id again is the same job.")
    environment: str | None = Field(default=None, description="By default that which takes the row's `data_source`.")
    group: Identifier | None = Field(default=None, description="The rollouts of one prompt share a group.")
    client: Identifier = Field(default=NO_CLIENT, description="Callers share the service fairly by this name.")
    run: Identifier | None = Field(
        default=None, description="Whose backends sample it, of those at the model server; by default its own."
    )
    priority: int = Field(default=0, ge=-1000, le=1000, description="Higher goes first, in every queue.")
    budgets: BudgetsModel | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=100)
    begin: ResumePointModel | None = Field(default=None, description="For administrators: where it goes on.")

    @model_validator(mode="before")
    @classmethod
    def _wishes_of_the_row(cls, given: Any) -> Any:
        """A row may bring all this itself, as with ``/run``; what stands beside it wins."""
        row = given.get("row") if isinstance(given, dict) else None
        if not isinstance(row, dict):
            return given
        row = as_submitted(row)
        if ROLLOUT_OPTIONS_KEY not in row:
            return {**given, "row": row}
        wishes = row[ROLLOUT_OPTIONS_KEY]
        if not isinstance(wishes, dict):
            wrong = InitErrorDetails(type="dict_type", loc=("row", ROLLOUT_OPTIONS_KEY), input=wishes)
            raise ValidationError.from_exception_data(cls.__name__, [wrong])
        beside = {name: value for name, value in given.items() if value is not None}
        return {**wishes, **beside, "row": {name: value for name, value in row.items() if name != ROLLOUT_OPTIONS_KEY}}

    def to_request(self) -> JobRequest:
        """As the pipeline takes it."""
        return JobRequest(
            row=self.row.model_dump(),
            id=self.id,
            environment=self.environment,
            group=self.group,
            client=self.client,
            run=self.run,
            priority=self.priority,
            budgets=self.budgets.given() if self.budgets else {},
            max_attempts=self.max_attempts,
            resume_point=self.begin.to_resume_point() if self.begin else None,
        )


class ForkRequest(BaseModel):
    """What is wished for the rollouts that begin at a checkpoint of another one; all else is that one's own."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Identifier] | None = Field(default=None, description="One for each; chosen by the service by default.")
    group: Identifier | None = Field(default=None, description="By default the group of the rollout that is forked.")
    client: Identifier | None = None
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    budgets: BudgetsModel | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=100)

    def to_requests(self, parent: Job, count: int) -> list[JobRequest]:
        """Return the requests of the forks, as the pipeline takes them.

        Raises:
            CallerError: there are more or fewer ids than rollouts, or one of them twice.
        """
        if self.ids is not None and (len(self.ids) != count or len({*self.ids}) != count):
            raise CallerError(f"must be {count} different ones, as many as `n` says", field="ids")
        budgets = {stage: parent.budgets.of(stage) for stage in Stage}
        return [
            JobRequest(
                row={},
                id=self.ids[number] if self.ids else None,
                group=self.group or parent.group,
                client=self.client or parent.client,
                priority=parent.priority if self.priority is None else self.priority,
                budgets=budgets | (self.budgets.given() if self.budgets else {}),
                max_attempts=self.max_attempts or parent.max_attempts,
            )
            for number in range(count)
        ]


class CheckpointsView(BaseModel):
    """Where a rollout can be forked."""

    turns: list[int] = Field(description="After each of these.")


class ForkAnswer(BaseModel):
    """The rollouts that were taken on."""

    rollouts: list[JobView]


class FailureView(BaseModel):
    """Why a job, or one of its attempts, failed."""

    model_config = ConfigDict(from_attributes=True)

    kind: FailureKind
    origin: Origin
    stage: Stage | None
    reason: str
    traceback: str | None = Field(default=None, description="Its end, where a handler raised what nobody foresaw.")


class ResumedView(BaseModel):
    """Where a rollout went on."""

    turn: int = Field(description="Turns that were taken then.")
    lost: list[str] = Field(description="What of its environment was not carried over, beyond open connections.")


class ForkedView(ResumedView):
    """Where it began."""

    id: str


class TokenForm(StrEnum):
    """Where the tokens of a result are."""

    ITEMS = "items"
    """On the response's output items, as Gym has them: each turn's prompt in full."""
    PACKED = "packed"
    """In ``tokens``, each once."""


class TurnView(BaseModel):
    """The tokens of one turn. Its prompt is the first `kept` tokens of the turn before (of those with `sampled`), that
    one's own among them, then `observed`. Numbers are little-endian, in base64."""

    item: int = Field(ge=0, description="Which item of `result.response.output` the turn ends with.")
    kept: int = Field(ge=0)
    observed: str = Field(description="int32")
    sampled: str = Field(description="int32")
    log_probs: str = Field(description="float64, of each of `sampled`")
    routed_experts: str | None = Field(
        default=None, description="Of its last tokens, those that are new and the one before, in NeMo RL's form."
    )

    @property
    def length(self) -> int:
        """Ids that were sampled, of four bytes each; base64 makes four characters of three bytes, the last padded."""
        return len(self.sampled) // 4 * 3 // 4


class JobView(BaseModel):
    """A job as callers see it."""

    id: str
    state: JobState
    environment: str
    handler: str
    group: str | None
    client: str
    run: str | None = None
    priority: int
    submitted_at: float = Field(description="Seconds since the epoch.")
    finished_at: float | None
    timings: dict[Stage, StageTime]
    turns: int
    tool_calls: int
    finish_reason: str | None
    weight_versions: list[str | None] = Field(
        default_factory=list, description="Labels of the weights that sampled it, each once; null where one had none."
    )
    reward: float | None = Field(description="Null unless the rollout was scored: a failure has no reward.")
    masked: bool = Field(default=False, description="Nobody is to train on it: its verdict says so, or it has none.")
    failure: FailureView | None
    failed_attempts: list[FailureView] = Field(description="What went wrong before, oldest first.")
    resumed: list[ResumedView] = Field(
        default_factory=list, description="Where attempts went on from a checkpoint, instead of anew."
    )
    forked_from: ForkedView | None = Field(
        default=None, description="The rollout whose first turns are its own, which it has not sampled."
    )
    checkpoints: list[int] = Field(default_factory=list, description="Turns after which it can be forked.")
    result: dict[str, Any] | None = Field(default=None, description="What the environment's /verify answered.")
    tokens: list[TurnView] | None = Field(default=None, description="With `tokens=packed`, those of the result.")
    steps: list[dict[str, Any]] | None = Field(
        default=None,
        description="With the result, per turn: when it began, how long it took, its calls likewise.",
    )

    @classmethod
    def of(cls, job: Job) -> Self:
        """The view of a job, without its result: see :func:`job_json`."""
        outcome = job.outcome if job.state.terminal else None  # else it is on its way to the disk
        return cls(
            id=job.id,
            state=job.state,
            environment=job.environment,
            handler=job.handler,
            group=job.group,
            client=job.client,
            run=job.run,
            priority=job.priority,
            submitted_at=job.submitted_at,
            finished_at=job.finished_at,
            timings={stage: replace(time) for stage, time in job.times.items()},
            turns=job.progress.turns,
            tool_calls=job.progress.tool_calls,
            finish_reason=job.progress.finish_reason,
            weight_versions=job.progress.labels,
            reward=outcome.reward if outcome else None,
            masked=outcome.masked if outcome else False,
            failure=FailureView.model_validate(outcome.failure) if outcome and outcome.failure else None,
            failed_attempts=[FailureView.model_validate(failure) for failure in job.failures],
            resumed=[ResumedView(**place) for place in job.resumed],
            forked_from=ForkedView(**job.forked_from) if job.forked_from else None,
            checkpoints=sorted(job.checkpoints) or job.kept_turns,
        )


def job_json(job: Job, *, with_result: bool, tokens: TokenForm = TokenForm.ITEMS) -> dict[str, Any]:
    """A :class:`JobView` for orjson, which copies bytes as they are kept."""
    view = JobView.of(job).model_dump(mode="json")
    if with_result and job.outcome is not None and job.state.terminal:
        apart = tokens is TokenForm.PACKED
        view["result"] = orjson.Fragment(job.outcome.body) if apart or job.tokens == NO_TOKENS else job.gym_result()
        view["tokens"] = orjson.Fragment(job.tokens) if apart else None
        view["steps"] = orjson.Fragment(job.steps)
    return view


class Listing(BaseModel):
    """Jobs, and where to go on."""

    rollouts: list[JobView]
    cursor: str = Field(description="Pass as `after` to get the terminal outcomes that come behind these.")
    next: str | None = Field(default=None, description="Pass as `from` for the next page; null on the last one.")


class CancelRequest(BaseModel):
    """Which jobs to cancel: by id, or all of a group."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Identifier] | None = None
    group: Identifier | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.ids is None) == (self.group is None):
            raise ValueError("give either `ids` or `group`")
        return self


class CancelAnswer(BaseModel):
    """The jobs after the cancellation, each with its outcome; ids that the service does not know."""

    rollouts: list[JobView]
    unknown: list[str]


class DrainRequest(BaseModel):
    """How long to wait for what still runs."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: float = Field(
        default=0.0, ge=0, le=60, description="Seconds until the answer, at most; ask again to wait on."
    )


class DrainAnswer(BaseModel):
    """Whether new rollouts are taken, and how many have no outcome yet."""

    draining: bool
    live: int
