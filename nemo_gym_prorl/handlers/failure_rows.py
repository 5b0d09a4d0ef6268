# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout without a reward, as Gym's collectors and trainers understand it: the row, and the status of ``/run``.

There are two kinds of callers, and they want opposite things of a failure:

- *Gym's collector.* One HTTP error aborts its whole collection in Gym 0.4, so it always gets 200 with a masked row.
  It is told by the indices that it puts on each row.
- *A trainer.* It sends rows without those two indices and reads the tokens. A row without any ends its stream with an
  error that it takes for bad data, whatever the row says; only the HTTP status tells it whose fault a failure is.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.failures import FAILURE_KIND_HEADER, Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.masks import masked
from nemo_gym_prorl.rollout.rows import FAILURE_CLASS, as_submitted
from nemo_gym_prorl.serving.problems import ProblemError


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
