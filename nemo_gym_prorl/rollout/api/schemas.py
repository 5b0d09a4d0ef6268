# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Request and reply models of the job API, versioned by the path prefix ``/v1``."""

from __future__ import annotations

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
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY


MAX_WAIT_S = 60.0
"""Longest long-poll in seconds. Clients that wait longer poll again, so that dead connections are noticed."""


def _identifier(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable text")
    if value in (".", ".."):
        raise ValueError("must not be . or ..")
    return value


MAX_ID = 200
"""Characters of the longest id, which is a path segment of URLs."""

Identifier = Annotated[
    str, Field(min_length=1, max_length=MAX_ID, pattern=r"^[^/?#\x00-\x1f\x7f]+$"), AfterValidator(_identifier)
]
"""Printable text that can be a path segment, percent-encoded."""


class BudgetsModel(BaseModel):
    """Seconds that each stage may work on a rollout, per attempt; by default the environment's, else the service's."""

    model_config = ConfigDict(extra="forbid")

    init: Seconds | None = None
    run: Seconds | None = None
    eval: Seconds | None = None

    def given(self) -> dict[Stage, float]:
        """Return the budgets that are set, by stage."""
        return {Stage(name): seconds for name, seconds in self.model_dump(exclude_none=True).items()}


class SubmitRequest(BaseModel):
    """Rollout to run: a row and its options."""

    model_config = ConfigDict(extra="forbid")

    row: Row
    id: Identifier | None = Field(
        default=None, description="Chosen by the caller; submissions with one id are idempotent."
    )
    environment: str | None = Field(default=None, description="By default the environment of the row's `data_source`.")
    group: Identifier | None = Field(default=None, description="The rollouts of one prompt share a group.")
    client: Identifier = Field(default=NO_CLIENT, description="Name for fair sharing between callers.")
    run: Identifier | None = Field(
        default=None, description="Training run whose backends sample the rollout; by default the model server's own."
    )
    priority: int = Field(default=0, ge=-1000, le=1000, description="Higher goes first, in every queue.")
    budgets: BudgetsModel | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=100)
    begin: ResumePoint | None = Field(default=None, description="For administrators: resume point of the rollout.")

    @model_validator(mode="before")
    @classmethod
    def _merge_row_options(cls, given: Any) -> Any:
        """Merge the options in the row's field ``rollout``, as with ``/run``; explicit fields take precedence."""
        row = given.get("row") if isinstance(given, dict) else None
        if not isinstance(row, dict):
            return given
        row = as_submitted(row)
        if ROLLOUT_OPTIONS_KEY not in row:
            return {**given, "row": row}
        options = row[ROLLOUT_OPTIONS_KEY]
        if not isinstance(options, dict):
            wrong = InitErrorDetails(type="dict_type", loc=("row", ROLLOUT_OPTIONS_KEY), input=options)
            raise ValidationError.from_exception_data(cls.__name__, [wrong])
        explicit = {name: value for name, value in given.items() if value is not None}
        return {
            **options,
            **explicit,
            "row": {name: value for name, value in row.items() if name != ROLLOUT_OPTIONS_KEY},
        }

    def to_request(self) -> JobRequest:
        """Return the request in the pipeline's form."""
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
            resume_point=self.begin,
        )


class ForkRequest(BaseModel):
    """Options of forks; unset options and the row are the parent's."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Identifier] | None = Field(default=None, description="One per fork; by default generated.")
    group: Identifier | None = Field(default=None, description="By default the parent's group.")
    client: Identifier | None = None
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    budgets: BudgetsModel | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=100)

    def to_requests(self, parent: Job, count: int) -> list[JobRequest]:
        """Return the requests of ``count`` forks in the pipeline's form, without the row.

        Raises:
            CallerError: the number of ids differs from the number of forks, or an id is repeated.
        """
        if self.ids is not None and (len(self.ids) != count or len({*self.ids}) != count):
            raise CallerError(f"must be {count} different ids, as `n` says", field="ids")
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
    """Turns of a rollout with a checkpoint."""

    turns: list[int] = Field(description="Turns after which the rollout can be forked.")


class ForkAnswer(BaseModel):
    """Accepted forks."""

    rollouts: list[JobView]


class FailureView(BaseModel):
    """Failure of a rollout, or of one of its attempts."""

    model_config = ConfigDict(from_attributes=True)

    kind: FailureKind
    origin: Origin
    stage: Stage | None
    reason: str
    traceback: str | None = Field(default=None, description="End of the traceback of an unexpected exception.")


class ResumedView(BaseModel):
    """Checkpoint from which an attempt resumed."""

    turn: int = Field(description="Number of turns taken before.")
    lost: list[str] = Field(description="Parts of the environment that were not restored, besides open connections.")


class ForkedView(ResumedView):
    """Checkpoint from which a fork started; ``id`` is that of the parent rollout."""

    id: str


class TokenForm(StrEnum):
    """Form of the tokens of a result."""

    ITEMS = "items"
    """On the response's output items, as in Gym: each turn's whole prompt."""
    PACKED = "packed"
    """In ``tokens``, each token once."""


class TurnView(BaseModel):
    """Tokens of one turn. The prompt is the first `kept` tokens of the previous turn that sampled any (prompt and
    sampled tokens), followed by `observed`. Arrays are little-endian numbers in base64."""

    item: int = Field(ge=0, description="Index in `result.response.output` of the turn's last item.")
    kept: int = Field(ge=0)
    observed: str = Field(description="int32")
    sampled: str = Field(description="int32")
    log_probs: str = Field(description="float64, one per id in `sampled`")
    routed_experts: str | None = Field(
        default=None, description="Experts of the new tokens and the one before, in NeMo RL's form."
    )

    @property
    def length(self) -> int:
        """Number of sampled ids, from the length of the base64 text: four bytes per id."""
        return len(self.sampled) // 4 * 3 // 4


class JobView(BaseModel):
    """Rollout as clients see it."""

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
        default_factory=list,
        description="Distinct labels of the weights that sampled it; null for weights without one.",
    )
    token_in_rate: float | None = Field(
        default=None, description="Share of turns whose prompt continued tokens of the rollout, first turns aside."
    )
    harness: dict[str, Any] = Field(
        default_factory=dict, description="Report of the program that took the policy's turns, if there was one."
    )
    reward: float | None = Field(description="Null unless the rollout was scored: a failure has no reward.")
    masked: bool = Field(default=False, description="A trainer must skip it: its verdict says so, or it has none.")
    failure: FailureView | None
    failed_attempts: list[FailureView] = Field(description="Failures of earlier attempts, oldest first.")
    resumed: list[ResumedView] = Field(default_factory=list, description="Checkpoints from which attempts resumed.")
    forked_from: ForkedView | None = Field(
        default=None, description="Parent whose first turns it shares without sampling them again."
    )
    checkpoints: list[int] = Field(default_factory=list, description="Turns after which it can be forked.")
    result: dict[str, Any] | None = Field(default=None, description="Answer of the environment's /verify.")
    tokens: list[TurnView] | None = Field(default=None, description="With `tokens=packed`, the tokens of the result.")
    steps: list[dict[str, Any]] | None = Field(
        default=None,
        description="With the result: start and duration of each turn and of its tool calls.",
    )

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the view of a job without its result; see :func:`job_json`."""
        outcome = job.outcome if job.state.terminal else None  # an outcome is hidden until it is on disk
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
            timings=job.timings(),
            turns=job.progress.turns,
            tool_calls=job.progress.tool_calls,
            finish_reason=job.progress.finish_reason,
            weight_versions=job.progress.labels,
            harness=job.progress.harness,
            token_in_rate=job.progress.token_in_rate,
            reward=outcome.reward if outcome else None,
            masked=outcome.masked if outcome else False,
            failure=FailureView.model_validate(outcome.failure) if outcome and outcome.failure else None,
            failed_attempts=[FailureView.model_validate(failure) for failure in job.failures],
            resumed=[ResumedView(**point) for point in job.resumed],
            forked_from=ForkedView(**job.forked_from) if job.forked_from else None,
            checkpoints=sorted(job.checkpoints) or job.kept_turns,
        )


def job_json(job: Job, *, with_result: bool, tokens: TokenForm = TokenForm.ITEMS) -> dict[str, Any]:
    """Return the :class:`JobView` of a job as a dict for orjson, which embeds the job's stored JSON unparsed."""
    view = JobView.of(job).model_dump(mode="json")
    if with_result and job.outcome is not None and job.state.terminal:
        apart = tokens is TokenForm.PACKED
        view["result"] = orjson.Fragment(job.outcome.body) if apart or job.tokens == NO_TOKENS else job.gym_result()
        view["tokens"] = orjson.Fragment(job.tokens) if apart else None
        view["steps"] = orjson.Fragment(job.steps)
    return view


class Listing(BaseModel):
    """Page of rollouts, and the cursors to continue from."""

    rollouts: list[JobView]
    cursor: str = Field(description="Pass as `after` to follow later terminal outcomes.")
    next: str | None = Field(default=None, description="Pass as `from` for the next page; null on the last one.")


class CancelRequest(BaseModel):
    """Rollouts to cancel: by id, or all of a group."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Identifier] | None = None
    group: Identifier | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.ids is None) == (self.group is None):
            raise ValueError("give either `ids` or `group`")
        return self


class CancelAnswer(BaseModel):
    """Cancelled rollouts, each with its outcome, and the ids that are unknown."""

    rollouts: list[JobView]
    unknown: list[str]


class DrainRequest(BaseModel):
    """Options of a drain."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: float = Field(
        default=0.0, ge=0, le=60, description="Seconds until the answer, at most; repeat the call to wait longer."
    )


class DrainAnswer(BaseModel):
    """Drain state: whether new rollouts are refused, and the number of rollouts without an outcome."""

    draining: bool
    live: int
