# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's ``/run``: its row as a job, and a failed rollout as a row and a status.

Gym's client can send nothing but the row, so options for a rollout stand in its optional field ``rollout``:
``{"rollout": {"id": "step-7:12:3", "group": "step-7:12"}, "responses_create_params": …}``. The field is taken off
before an environment sees the row, and comes back in the answer with how the rollout went.

There are two kinds of callers, and they want opposite things of a failure:

- *Gym's collector.* One HTTP error aborts its whole collection in Gym 0.4, so it always gets 200 with a masked row.
  It is told by the indices that it puts on each row.
- *A trainer.* It sends rows without those two indices and reads the tokens. A row without any ends its stream with an
  error that it takes for bad data, whatever the row says; only the HTTP status tells it whose fault a failure is.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError

from nemo_gym_prorl.failures import FAILURE_KIND_HEADER, CallerError, Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.http.problems import ProblemError
from nemo_gym_prorl.rollout.api.attached_callers import row_key
from nemo_gym_prorl.rollout.api.schemas import SubmitRequest
from nemo_gym_prorl.rollout.gym_rows import FAILURE_CLASS, as_submitted, check_row, masked
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.turns import ROLLOUT_OPTIONS_KEY


COLLECTOR_FIELDS = ("_ng_task_index", "_ng_rollout_index")
"""What Gym's own collector puts on a row; NeMo RL sets at most the first."""

_NEVER_HAPPENED = frozenset({FailureKind.CANCELLED, FailureKind.KILL_SHAPED, FailureKind.SHUTDOWN})
_TRY_AGAIN_S = 5


NOTHING_SAMPLED = Failure(
    FailureKind.BAD_ROW,
    Origin.CALLER,
    Stage.RUN,
    "the prompt leaves the policy no room in its context, so nothing was sampled that could be trained on",
)
"""What a trainer is told of a rollout that was scored though it has no tokens: the row is to blame."""


def failure_row(row: Mapping[str, Any], response: dict[str, Any], failure: Failure) -> dict[str, Any]:
    """A failed rollout as a Gym row.

    Gym writes it to the failures file next to the results and tries it again, unless it says otherwise: a bad row
    stays bad (``_ng_failure_terminal``), and a rollout that was taken back never happened (``_ng_no_persist``).
    """
    marks: dict[str, Any] = {}
    if failure.kind in _NEVER_HAPPENED:
        marks["_ng_no_persist"] = True
    elif failure.origin in (Origin.CALLER, Origin.TASK):
        marks["_ng_failure_terminal"] = True
    return {
        **masked(as_submitted(row)),
        "response": response,
        "reward": 0.0,  # the row's schema needs a number; the mask says that it is none
        "failure_kind": failure.kind.value,
        "failure_reason": failure.reason,
        FAILURE_CLASS: failure.kind.value,
        **marks,
    }


def run_status(row: Mapping[str, Any], failure: Failure | None, response: Any) -> int:
    """The HTTP status with which ``/run`` answers.

    NeMo RL sorts statuses into two classes: 5xx is INFRA (that row is dispatched again, three times, and its prompt
    five times), any other error is DATA (two tries, then the run ends). An answer of 200 without tokens is DATA too.

    ============== ================= ======================================================================
    failure        trained tokens    for a trainer
    ============== ================= ======================================================================
    infrastructure with or without   503: another try may succeed. With tokens as well, since NeMo RL's
                                     SingleController does not read the mask and would train a reward of 0
    caller, task   with or without   422: this row fails in the same way for everybody
    agent          with              200, masked: a slow policy is a finding about the policy
    agent          without           503: nothing was sampled that could be judged; a new try is a new sample
    taken back     with or without   503: whoever still waits for it wants it done, so it is dispatched again
    ============== ================= ======================================================================

    A scored row is 200, but see :data:`NOTHING_SAMPLED`.
    """
    if failure is None or from_collector(row) or (failure.origin is Origin.AGENT and has_tokens(response)):
        return 200
    return failure_status(failure)


def failure_status(failure: Failure) -> int:
    """422 for what another try only repeats, 503 for everything else."""
    blamed = failure.origin in (Origin.CALLER, Origin.TASK)
    return 422 if blamed and failure.kind not in _NEVER_HAPPENED else 503


def failure_problem(status: int, failure: Failure, job_id: str | None = None) -> ProblemError:
    """A failed rollout as a problem document, with the kind in a header for callers that are agents themselves."""
    headers = {FAILURE_KIND_HEADER: failure.kind.value}
    if status == 503:
        headers["Retry-After"] = str(_TRY_AGAIN_S)
    about = f"rollout {job_id}: " if job_id else ""
    stage = f" in {failure.stage}" if failure.stage else ""
    detail = f"{about}{failure.kind}{stage}: {failure.reason}"
    return ProblemError(status, failure.kind.value, detail, headers=headers)


def from_collector(row: Mapping[str, Any]) -> bool:
    """Whether Gym's own collector sent the row."""
    return all(name in row for name in COLLECTOR_FIELDS)


def has_tokens(response: Any) -> bool:
    """Whether a trainer finds anything to train on in a response."""
    output = response.get("output") if isinstance(response, dict) else None
    return isinstance(output, list) and any(
        isinstance(item, dict) and bool(item.get("generation_token_ids")) for item in output
    )


def empty_response(params: Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """A Responses API response without output: what a rollout has before its first turn."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": int(clock()),
        "model": params.get("model") or "none",
        "object": "response",
        "output": [],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tools": params.get("tools") or [],
    }


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A call of ``/run``.

    Attributes:
        job: what the pipeline is asked for.
        key: equal keys are the same rollout, posted again (see ``rollout.api.attached_callers``).
    """

    job: JobRequest
    key: bytes | None


def run_request(row: Any, body: bytes) -> RunRequest:
    """Read a call of ``/run``.

    Args:
        row: the parsed body.
        body: the bytes it was parsed from.

    Raises:
        CallerError: names the field that is wrong, ``rollout.group`` say.
    """
    check_row(row)
    row = as_submitted(row)
    wishes = row.get(ROLLOUT_OPTIONS_KEY, {})
    if not isinstance(wishes, dict):
        raise CallerError("must be an object", field=ROLLOUT_OPTIONS_KEY)
    if "row" in wishes:
        raise CallerError("is no field of a rollout: it stands in the row", field=f"{ROLLOUT_OPTIONS_KEY}.row")
    row = {name: value for name, value in row.items() if name != ROLLOUT_OPTIONS_KEY}
    if not wishes:
        return RunRequest(JobRequest(row, group=group_of(row)), row_key(row, body))
    try:
        asked = SubmitRequest.model_validate({"row": {"responses_create_params": {"input": ""}}, **wishes})
    except ValidationError as error:
        first = error.errors()[0]
        raise CallerError(first["msg"], field=".".join(map(str, (ROLLOUT_OPTIONS_KEY, *first["loc"])))) from None
    job = replace(asked.to_request(), row=row, group=asked.group or group_of(row))
    key = row_key(row, body) if job.id is None else b"run:" + job.id.encode()
    return RunRequest(job, key)


def group_of(row: dict[str, Any]) -> str:
    """The group of a row that names none: the rollouts of the same prompt are siblings."""
    prompt = orjson.dumps(row["responses_create_params"]["input"], option=orjson.OPT_SORT_KEYS)
    return f"prompt-{hashlib.sha256(prompt).hexdigest()[:16]}"


def environment_of(rollout: Mapping[str, Any]) -> str | None:
    """The environment that a row of ``/run`` says it is from; ``None`` where it does not."""
    about = rollout.get(ROLLOUT_OPTIONS_KEY)
    name = about.get("environment") if isinstance(about, Mapping) else None
    return name if isinstance(name, str) else None


def merged(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of several environments as one answer: those of one server as they are, of several each below its
    environment's name, ``swe/mean/reward``; groups one after the other.

    Args:
        metrics: environment → what its server answered.
    """
    if len(metrics) == 1:
        return dict(next(iter(metrics.values())))
    together: dict[str, Any] = {"group_level_metrics": []}
    for name, answer in metrics.items():
        together["group_level_metrics"] += answer.get("group_level_metrics") or []
        for part in ("agent_metrics", "key_metrics"):
            ours = together.setdefault(part, {})
            ours.update({f"{name}/{key}": value for key, value in (answer.get(part) or {}).items()})
    return together
