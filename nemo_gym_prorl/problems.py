# SPDX-License-Identifier: Apache-2.0
"""Errors of our HTTP servers as RFC 9457 problem documents with a stable ``type``.

A client branches on ``type``; ``detail`` is for people and may change. Validation errors name the field and what is
wrong with it, for each field at once. An error class says itself which status and type it has (``http_status``,
``problem`` and ``retry_after_s`` of :class:`~nemo_gym_prorl.failures.CallerError`), so that this module knows no wing.

:class:`ProblemRoute` covers one route, on whatever application it is mounted; :func:`add_problem_handlers` covers all
routes of an application, Gym's among them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from nemo_gym_prorl.failures import FAILURE_KIND_HEADER, CallerError, RolloutError


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


def problem_of(error: RolloutError) -> ProblemError:
    """The problem document of an error of ours. One that is not the caller's is 500 and says so in a header, so that
    nobody takes it for an observation or a reward (500 is what Gym's client repeats a few times only)."""
    if not isinstance(error, CallerError):
        return ProblemError(500, error.kind.value, error.reason, headers={FAILURE_KIND_HEADER: error.kind.value})
    errors = [{"field": error.field, "message": error.reason}] if error.field else None
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return ProblemError(error.http_status, error.problem, error.reason, errors=errors, headers=headers)


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


def add_problem_handlers(app: FastAPI) -> None:
    """Have every error of an application be a problem document, also where Gym owns the route."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, RolloutError)
        return problem_of(error).response()

    async def raised(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return error.response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return invalid_body(error).response()

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers) if error.headers else None
        return ProblemError(
            error.status_code, f"http-{error.status_code}", str(error.detail), headers=headers
        ).response()

    app.add_exception_handler(RolloutError, ours)
    app.add_exception_handler(ProblemError, raised)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
