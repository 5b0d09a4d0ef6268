# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The body of Gym's ``/run`` as a job: a dataset row, and in its optional field ``rollout`` what the job API takes.

Gym's client can send nothing but the row, so whoever wants to name, group or cancel rollouts that come by ``/run``
says so there: ``{"rollout": {"id": "step-7:12:3", "group": "step-7:12"}, "responses_create_params": …}``. The field is
taken off before an environment sees the row, and comes back in the answer with how the rollout went.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.callers import row_key
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.rows import WISHES, as_submitted, check_row
from nemo_gym_prorl.rollout.schemas import SubmitRequest


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A call of ``/run``.

    Attributes:
        job: what the pipeline is asked for.
        key: equal keys are the same rollout, posted again (:class:`~nemo_gym_prorl.rollout.callers.CallerWatch`).
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
    wishes = row.get(WISHES, {})
    if not isinstance(wishes, dict):
        raise CallerError("must be an object", field=WISHES)
    if "row" in wishes:
        raise CallerError("is no field of a rollout: it stands in the row", field=f"{WISHES}.row")
    row = {name: value for name, value in row.items() if name != WISHES}
    if not wishes:
        return RunRequest(JobRequest(row, group=group_of(row)), row_key(row, body))
    try:
        asked = SubmitRequest.model_validate({"row": {"responses_create_params": {"input": ""}}, **wishes})
    except ValidationError as error:
        first = error.errors()[0]
        raise CallerError(first["msg"], field=".".join(map(str, (WISHES, *first["loc"])))) from None
    job = replace(asked.to_request(), row=row, group=asked.group or group_of(row))
    key = row_key(row, body) if job.id is None else b"run:" + job.id.encode()
    return RunRequest(job, key)


def group_of(row: dict[str, Any]) -> str:
    """The group of a row that names none: the rollouts of the same prompt are siblings."""
    prompt = orjson.dumps(row["responses_create_params"]["input"], option=orjson.OPT_SORT_KEYS)
    return f"prompt-{hashlib.sha256(prompt).hexdigest()[:16]}"
