# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's ``/v1/responses`` of an agent: the tool loop alone, in a session that the caller has seeded and will score.

It is a job like any other, so it has what jobs have: a place in the RUN pool, a budget, an end when its caller hangs
up, an entry in the job API. Its INIT and EVAL do nothing, since the session is the caller's; for the same reason it is
tried once only: what its tools did stays done.
"""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError, Failure, InfrastructureError, Origin, Stage
from nemo_gym_prorl.handlers.failure_rows import empty_response, failure_problem, failure_status
from nemo_gym_prorl.handlers.gym_environment import GymEnvironmentHandler, GymSession
from nemo_gym_prorl.handlers.gym_http import CookieJar
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.rows import check_row


_COOKIES = "session_cookies"
_PARAMS = "responses_create_params"


class SeededSessionHandler(GymEnvironmentHandler):
    """Runs the tool loop in a session that it neither made nor ends."""

    name = "seeded_session"

    async def init(self, job: Job) -> GymSession:
        """The caller's session."""
        cookies = job.row.get(_COOKIES)
        if not isinstance(cookies, dict):
            raise CallerError("is for POST /v1/responses, which brings a session along", field="environment")
        return GymSession(CookieJar(dict(cookies)), closed=True)

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """The tool loop. A connection that is lost ends it, whichever server it was to: the job must not be held until
        that server is back and then begun again, in a session in which things have happened."""
        try:
            return await super().run(job, session)
        except InfrastructureError as error:
            raise InfrastructureError(error.reason, kind=error.kind) from error

    async def release(self, job: Job, session: GymSession) -> None:
        """Nothing: the caller goes on with its session."""

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Nothing to score: the answer is the response, and the cookies that the session has by now."""
        return Verdict(None, {"response": trajectory.response, _COOKIES: trajectory.evidence.cookies.values})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """No answer but the failure; the response so far, for whoever looks into the job."""
        response = job.trajectory.response if job.trajectory else empty_response(job.row[_PARAMS])
        return Outcome(failure_state(failure), {"response": response}, failure=failure)


def responses_request(params: Any, cookies: dict[str, str]) -> JobRequest:
    """The job of a call.

    Raises:
        CallerError: the body is no Responses API request; names the field.
    """
    try:
        check_row({_PARAMS: params})
    except CallerError as error:
        field = (error.field or "").removeprefix(_PARAMS).removeprefix(".")
        raise CallerError(error.complaint, field=field or "body") from None
    row = {_PARAMS: params, _COOKIES: cookies}
    return JobRequest(row, id=f"responses-{uuid.uuid4().hex}", environment=SeededSessionHandler.name, max_attempts=1)


def responses_answer(job: Job) -> bytes:
    """What the session's cookies are by now, and on a line of its own the response.

    Raises:
        ProblemError: the job failed: 422 if the request is to blame, 504 if the agent used up its time, else 503.
    """
    assert job.outcome is not None, "only a job with its outcome has an answer"
    failure, result = job.outcome.failure, job.gym_result()
    if failure is None:
        return orjson.dumps(result[_COOKIES]) + b"\n" + orjson.dumps(result["response"])
    slow = failure.timed_out and failure.origin is Origin.AGENT
    raise failure_problem(504 if slow else failure_status(failure), failure, job.id)
