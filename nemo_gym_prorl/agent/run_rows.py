# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion between rows of Gym's ``/run`` and rollout jobs, and the HTTP status of a failed rollout.

Gym's client can send only the row, so rollout options are in the row's optional field ``rollout``:
``{"rollout": {"id": "step-7:12:3", "group": "step-7:12"}, "responses_create_params": …}``. The service removes the
field before the environment receives the row. In the answer the field holds a report of the rollout.

The two kinds of callers need different answers to a failure:

- *Gym's collector.* In Gym 0.4 an HTTP error aborts the whole collection, so the collector always gets 200 with a
  masked row. Rows of the collector have two indices (:data:`COLLECTOR_FIELDS`).
- *A trainer.* NeMo RL treats a row without tokens as bad data: two attempts, then the training run ends. Only the HTTP
  status tells NeMo RL an infrastructure failure from a bad row.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson
from pydantic import ValidationError

from nemo_gym_prorl.failures import FAILURE_KIND_HEADER, CallerError, Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.http.problems import ProblemError
from nemo_gym_prorl.rollout.api.attached_callers import row_key
from nemo_gym_prorl.rollout.api.schemas import SubmitRequest
from nemo_gym_prorl.rollout.gym_rows import FAILURE_CLASS, as_submitted, check_row, masked
from nemo_gym_prorl.rollout.job import Trajectory
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY


COLLECTOR_FIELDS = ("_ng_task_index", "_ng_rollout_index")
"""Fields that Gym's own collector sets on each row; NeMo RL sets at most the first."""

_CANCELLED_KINDS = frozenset({FailureKind.CANCELLED, FailureKind.KILL_SHAPED, FailureKind.SHUTDOWN})
_RETRY_AFTER_S = 5  # header of a 503: an agent server restarts in a few seconds


NOTHING_SAMPLED = Failure(
    FailureKind.BAD_ROW,
    Origin.CALLER,
    Stage.RUN,
    "the prompt fills the policy's context, so no tokens were sampled: shorten the row's input",
)
"""Failure reported to a trainer for a scored rollout without tokens: the row is at fault."""


def failure_row(row: Mapping[str, Any], response: dict[str, Any], failure: Failure) -> dict[str, Any]:
    """Return a failed rollout as a masked Gym row.

    Gym writes the row to its failures file and retries it. ``_ng_failure_terminal`` prevents the retry of a bad row;
    ``_ng_no_persist`` keeps a cancelled rollout out of the file.
    """
    marks: dict[str, Any] = {}
    if failure.kind in _CANCELLED_KINDS:
        marks["_ng_no_persist"] = True
    elif failure.origin in (Origin.CALLER, Origin.TASK):
        marks["_ng_failure_terminal"] = True
    return {
        **masked(as_submitted(row)),
        "response": response,
        "reward": 0.0,  # the row's schema requires a number; `mask_sample` excludes it from training
        "failure_kind": failure.kind.value,
        "failure_reason": failure.reason,
        FAILURE_CLASS: failure.kind.value,
        **marks,
    }


def run_status(row: Mapping[str, Any], failure: Failure | None, response: Any) -> int:
    """Return the HTTP status of the answer of ``/run``; always 200 for Gym's collector.

    NeMo RL has two classes of errors. A 5xx is INFRA: NeMo RL dispatches the row again, up to three times per row and
    five times per prompt. Any other error, and a 200 without tokens, is DATA: two attempts, then the training run
    ends.

    ============== ================= ======================================================================
    failure        sampled tokens    status for a trainer
    ============== ================= ======================================================================
    infrastructure any               503: another attempt may succeed. Also with tokens, because NeMo RL's
                                     SingleController ignores the mask and would train on reward 0
    caller, task   any               422: every attempt at this row fails in the same way
    agent          yes               200, masked: the failure is a property of the policy
    agent          no                503: there is nothing to train on; another attempt samples anew
    cancelled      any               503: a caller that still waits wants the row dispatched again
    ============== ================= ======================================================================

    A scored row gets 200. The caller passes :data:`NOTHING_SAMPLED` for a scored row whose prompt fills the context.

    Args:
        failure: failure of the rollout; ``None`` for a scored rollout.
        response: the Responses API response so far, of any type.
    """
    if failure is None or from_collector(row) or (failure.origin is Origin.AGENT and has_tokens(response)):
        return 200
    return failure_status(failure)


def failure_status(failure: Failure) -> int:
    """Return 422 for a failure that every attempt would repeat, else 503."""
    bad_row = failure.origin in (Origin.CALLER, Origin.TASK)
    return 422 if bad_row and failure.kind not in _CANCELLED_KINDS else 503


def failure_problem(status: int, failure: Failure, job_id: str | None = None) -> ProblemError:
    """Return a failed rollout as a problem document. A header holds the failure kind, which agent servers that called
    this service read. With 503 the header ``Retry-After`` is set."""
    headers = {FAILURE_KIND_HEADER: failure.kind.value}
    if status == 503:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    about = f"rollout {job_id}: " if job_id else ""
    stage = f" in {failure.stage}" if failure.stage else ""
    detail = f"{about}{failure.kind}{stage}: {failure.reason}"
    return ProblemError(status, failure.kind.value, detail, headers=headers)


def from_collector(row: Mapping[str, Any]) -> bool:
    """Return whether Gym's own collector sent the row."""
    return all(name in row for name in COLLECTOR_FIELDS)


def has_tokens(response: Any) -> bool:
    """Return whether an output item of a response has generated token ids, so that there is something to train on."""
    output = response.get("output") if isinstance(response, dict) else None
    return isinstance(output, list) and any(
        isinstance(item, dict) and bool(item.get("generation_token_ids")) for item in output
    )


def has_items(response: Any, trajectory: Trajectory) -> bool:
    """Return whether a verifier's response is a dict with as many items as the trajectory, and with items of the same
    type where the trajectory has tokens. Without tokens, any dict suffices."""
    if not isinstance(response, dict) or not trajectory.tokens:
        return isinstance(response, dict)
    sent, output = trajectory.response["output"], response.get("output")
    return (
        isinstance(output, list)
        and len(output) == len(sent)
        and all(_kind(output[turn.item]) == _kind(sent[turn.item]) for turn in trajectory.tokens)
    )


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


def empty_response(params: Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Return a Responses API response without output, the state of a rollout before its first turn."""
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


def run_request(row: Any, body: bytes) -> tuple[JobRequest, bytes | None]:
    """Return the job of a call of ``/run``, and its idempotency key: calls with equal keys attach to one rollout
    (:class:`~nemo_gym_prorl.rollout.api.attached_callers.AttachedCallers`).

    Raises:
        CallerError: a field is invalid; names the field, such as ``rollout.group``.
    """
    check_row(row)
    row = as_submitted(row)
    options = row.get(ROLLOUT_OPTIONS_KEY, {})
    if not isinstance(options, dict):
        raise CallerError("must be an object", field=ROLLOUT_OPTIONS_KEY)
    if "row" in options:
        raise CallerError("unknown field: the body is the row", field=f"{ROLLOUT_OPTIONS_KEY}.row")
    row = {name: value for name, value in row.items() if name != ROLLOUT_OPTIONS_KEY}
    if not options:
        return JobRequest(row, group=group_of(row)), row_key(row, body)
    try:
        submitted = SubmitRequest.model_validate({"row": {"responses_create_params": {"input": ""}}, **options})
    except ValidationError as error:
        first = error.errors()[0]
        raise CallerError(first["msg"], field=".".join(map(str, (ROLLOUT_OPTIONS_KEY, *first["loc"])))) from None
    job = replace(submitted.to_request(), row=row, group=submitted.group or group_of(row))
    key = row_key(row, body) if job.id is None else b"run:" + job.id.encode()
    return job, key


def group_of(row: dict[str, Any]) -> str:
    """Return the default group of a row: rollouts of the same prompt form a group."""
    prompt = orjson.dumps(row["responses_create_params"]["input"], option=orjson.OPT_SORT_KEYS)
    return f"prompt-{hashlib.sha256(prompt).hexdigest()[:16]}"


def environment_of(rollout: Mapping[str, Any]) -> str | None:
    """Return the environment that a row of ``/run`` names in its options; ``None`` if the row names none."""
    about = rollout.get(ROLLOUT_OPTIONS_KEY)
    name = about.get("environment") if isinstance(about, Mapping) else None
    return name if isinstance(name, str) else None


def merge_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the answers of ``/aggregate_metrics`` by environment.

    The metrics of a single environment stay unchanged. Metrics of several environments get the environment's name as a
    prefix, as in ``swe/mean/reward``, and the lists of groups are concatenated.
    """
    if len(metrics) == 1:
        return dict(next(iter(metrics.values())))
    merged: dict[str, Any] = {"group_level_metrics": []}
    for name, answer in metrics.items():
        merged["group_level_metrics"] += answer.get("group_level_metrics") or []
        for part in ("agent_metrics", "key_metrics"):
            target = merged.setdefault(part, {})
            target.update({f"{name}/{key}": value for key, value in (answer.get(part) or {}).items()})
    return merged
