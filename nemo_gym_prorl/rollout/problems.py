# SPDX-License-Identifier: Apache-2.0
"""Errors of the job API as RFC 9457 problem documents with a stable ``type``.

A client branches on ``type``; ``detail`` is for people and may change. Validation errors name the field and what is
wrong with it, for each field at once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.request import Draining, JobConflict, QueueFull
from nemo_gym_prorl.rollout.store import CursorExpired


TYPE_PREFIX = "urn:nemo-gym-prorl:problem:"


class Problem(BaseModel):
    """An RFC 9457 problem document."""

    type: str = Field(description="Stable identifier, `urn:nemo-gym-prorl:problem:<name>`.")
    title: str
    status: int
    detail: str
    errors: list[dict[str, Any]] | None = Field(default=None, description="One entry per offending field.")


class ProblemError(Exception):
    """Raised in a route to answer with a problem document.

    Args:
        status: HTTP status.
        name: the stable part of ``type``.
        detail: what is wrong and how to mend it.
        errors: per field, ``{"field": …, "message": …}``.
        headers: e.g. ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        name: str,
        detail: str,
        *,
        errors: list[dict[str, Any]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.headers = headers
        self.problem = Problem(
            type=TYPE_PREFIX + name,
            title=name.replace("-", " ").capitalize(),
            status=status,
            detail=detail,
            errors=errors,
        )

    def response(self) -> Response:
        """As an HTTP response."""
        return Response(
            self.problem.model_dump_json(exclude_none=True),
            status_code=self.problem.status,
            media_type="application/problem+json",
            headers=self.headers,
        )


def problem_of(error: CallerError) -> ProblemError:
    """The problem document of a caller's error."""
    if isinstance(error, QueueFull):
        return ProblemError(429, "queue-full", error.reason, headers={"Retry-After": "5"})
    if isinstance(error, Draining):
        return ProblemError(503, "draining", error.reason, headers={"Retry-After": "30"})
    errors = [{"field": error.field, "message": error.reason}] if error.field else None
    if isinstance(error, JobConflict):
        return ProblemError(409, "id-conflict", error.reason, errors=errors)
    if isinstance(error, CursorExpired):
        return ProblemError(410, "cursor-expired", error.reason, errors=errors)
    return ProblemError(422, "invalid-request", error.reason, errors=errors)


def invalid_body(error: ValidationError | RequestValidationError | ValueError) -> ProblemError:
    """What is wrong with a request, field by field."""
    if not isinstance(error, ValidationError | RequestValidationError):
        return ProblemError(422, "invalid-request", f"the body is not JSON: {error}")
    errors = []
    for entry in error.errors():
        # FastAPI's locations begin with body, query or path; the caller knows a field by the rest.
        location = entry["loc"][1:] if isinstance(error, RequestValidationError) else entry["loc"]
        field = ".".join(str(part) for part in location) or "body"
        errors.append({"field": field, "message": entry["msg"]})
    detail = "; ".join(f"{entry['field']}: {entry['message']}" for entry in errors)
    return ProblemError(422, "invalid-request", detail, errors=errors)


class ProblemRoute(APIRoute):
    """A route whose errors are problem documents, wherever it is mounted: Gym owns the application's handlers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, with errors turned into answers."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except ProblemError as error:
                return error.response()
            except CallerError as error:
                return problem_of(error).response()
            except RequestValidationError as error:
                return invalid_body(error).response()

        return handle
