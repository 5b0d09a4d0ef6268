# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of our HTTP servers as RFC 9457 problem documents with a stable ``type``.

Clients branch on ``type``; ``detail`` is for people and may change. Validation errors name each wrong field. Error
classes declare their own status and type (``http_status``, ``problem`` and ``retry_after_s`` of
:class:`~nemo_gym_prorl.failures.CallerError`), so this module does not import the packages that raise them.

:class:`ProblemRoute` covers one route, on any application; :func:`add_problem_handlers` covers all routes of an
application, Gym's included, and its OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from http.client import responses
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from nemo_gym_prorl.failures import FAILURE_KIND_HEADER, FINAL, CallerError, RolloutError, TaskError
from nemo_gym_prorl.http.problem_document import TYPE_PREFIX, Problem, field_errors, in_words, readable


MEDIA_TYPE = "application/problem+json"

DESCRIPTIONS: dict[int, str] = {
    400: "Not possible in the current state.",
    401: "The key is missing or wrong.",
    403: "Not allowed with this key.",
    404: "Unknown, or forgotten.",
    409: "Conflicts with existing state.",
    410: "Existed and is forgotten.",
    422: f"A field is wrong; `errors` names it. With `{FAILURE_KIND_HEADER}`: the task is broken.",
    429: "The queue is full; retry after `Retry-After` seconds.",
    500: f"Failure of the server; the header `{FAILURE_KIND_HEADER}` names its kind.",
    501: "Not supported by this deployment.",
    502: "Another server refused the request.",
    503: "Not accepted now; retry after `Retry-After` seconds.",
    504: "Not done within its budget.",
}


class ProblemError(HTTPException):
    """Exception that a route raises to respond with a problem document.

    A subclass of ``HTTPException``, so applications without :func:`add_problem_handlers` send the same status.

    Args:
        status: HTTP status.
        name: end of the stable ``type``, after :data:`.TYPE_PREFIX`.
        detail: the error and its fix.
        errors: one entry ``{"field": …, "message": …}`` for each wrong field.
        headers: headers of the response, such as ``Retry-After``.
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
        # The detail may quote caller input with a lone surrogate, which UTF-8 cannot encode.
        detail = readable(detail)
        super().__init__(status, detail, headers)
        self.problem = Problem(
            type=TYPE_PREFIX + name,
            title=_title(name),
            status=status,
            detail=detail,
            errors=[{key: readable(str(value)) for key, value in entry.items()} for entry in errors]
            if errors
            else None,
        )

    def __str__(self) -> str:
        return self.problem.detail

    def response(self) -> Response:
        return Response(
            self.problem.model_dump_json(exclude_none=True),
            status_code=self.problem.status,
            media_type=MEDIA_TYPE,
            headers=dict(self.headers) if self.headers else None,
        )


def problem_of(error: RolloutError) -> ProblemError:
    """Return the problem document of an error of this package. Errors that the caller did not cause have status 500
    and :data:`.FAILURE_KIND_HEADER`, so that clients distinguish them from observations and rewards. Gym's client
    retries 500 only a few times. A broken task has status 422, which no client retries."""
    if not isinstance(error, CallerError):
        errors = [{"field": error.field, "message": error.reason}] if error.field else None
        kind = {FAILURE_KIND_HEADER: error.kind.value + (FINAL if getattr(error, "final", False) else "")}
        status = 422 if isinstance(error, TaskError) else 500
        return ProblemError(status, error.kind.value, error.reason, errors=errors, headers=kind)
    errors = [{"field": error.field, "message": error.complaint}] if error.field else None
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return ProblemError(error.http_status, error.problem, error.reason, errors=errors, headers=headers)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's ``responses`` argument for a route with these error statuses, and with 401 and 422."""
    return {status: {"model": Problem, "description": DESCRIPTIONS[status]} for status in (401, 422, *statuses)}


def invalid_body(error: ValidationError | RequestValidationError | ValueError) -> ProblemError:
    """Return the problem (422) of an invalid request, with each wrong field; a ``ValueError`` means invalid JSON."""
    if not isinstance(error, ValidationError | RequestValidationError):
        return ProblemError(422, "invalid-request", f"the body is not JSON: {error}")
    # FastAPI's locations begin with body, query or path, which are not part of the field's name for the caller.
    errors = field_errors(error.errors(), outer=int(isinstance(error, RequestValidationError)))
    return ProblemError(422, "invalid-request", in_words(errors), errors=errors)


class ProblemRoute(APIRoute):
    """Route whose errors are problem documents on any application, Gym's included."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler, with :data:`KNOWN_ERRORS` converted into responses."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except KNOWN_ERRORS as error:
                return answer_to(error)

        return handle


async def no_other_parameters(request: Request) -> None:
    """FastAPI dependency that refuses unknown query parameters, and a body for a ``DELETE`` route that reads none.

    A misspelt filter would otherwise be ignored, and the request would affect other rollouts than intended.

    Raises:
        CallerError: the request has a parameter, or a body, that its route does not read.
    """
    route = request.scope["route"]
    known = [param.alias for param in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise CallerError(f"unknown parameter; known: {', '.join(known) or 'none'}", field=name)
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if request.method == "DELETE" and route.body_field is None and not empty:
        raise CallerError("this route reads no body; send parameters in the query", field="body")


class Declared(NamedTuple):
    """OpenAPI declarations for a route that declares none, such as Gym's routes that take the bare request.

    Attributes:
        statuses: error statuses of the route, besides 401 and 422.
        body: model of the request's body; ``None`` declares no body.
    """

    statuses: tuple[int, ...]
    body: type[BaseModel] | None = None


def add_problem_handlers(
    app: FastAPI,
    declared: Mapping[str, Declared] | None = None,
    needs: Callable[[str, str], str | None] | None = None,
) -> None:
    """Convert every error of an application, Gym's routes included, into a problem document; declare problem
    documents in the application's OpenAPI document.

    Args:
        declared: declarations by path, for routes that declare nothing.
        needs: returns the scope that a method and path require, ``None`` for open routes; omit for servers without
            keys.
    """

    async def answer(request: Request, error: Exception) -> Response:
        return answer_to(error)

    build_stack, describe = app.build_middleware_stack, app.openapi

    def build_with_ours() -> Any:
        # Gym adds its own handlers later, so ours are added when the stack is built, at the first request.
        for kind in KNOWN_ERRORS:
            app.add_exception_handler(kind, answer)
        return build_stack()

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(describe(), declared or {})
            if needs is not None:
                _with_keys(app.openapi_schema, needs)
        return app.openapi_schema

    app.build_middleware_stack = build_with_ours  # type: ignore[method-assign]
    app.openapi = described  # type: ignore[method-assign]


KNOWN_ERRORS = (RolloutError, RequestValidationError, HTTPException)
"""Errors that :func:`answer_to` converts into responses."""


def answer_to(error: Exception) -> Response:
    """Return the response for one of :data:`KNOWN_ERRORS`; re-raise any other error."""
    match error:
        case ProblemError():
            return error.response()
        case RolloutError():
            return problem_of(error).response()
        case RequestValidationError():
            return invalid_body(error).response()
        case HTTPException(status_code=400, detail="There was an error parsing the body"):
            # FastAPI raises this error for a body that is not UTF-8, or nested too deep.
            return invalid_body(ValueError("not UTF-8, or nested too deep")).response()
        case HTTPException():
            headers = dict(error.headers) if error.headers else None
            return ProblemError(
                error.status_code, f"http-{error.status_code}", str(error.detail), headers=headers
            ).response()
    raise error


def _with_problems(document: dict[str, Any], declared: Mapping[str, Declared]) -> dict[str, Any]:
    """Replace FastAPI's error schemas in an OpenAPI document by problem documents, and add ``declared``; in place."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    content = {MEDIA_TYPE: {"schema": _referenced(Problem, schemas)}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            if (about := declared.get(path)) is not None:
                if about.body is not None:
                    body = {"application/json": {"schema": _referenced(about.body, schemas)}}
                    operation.setdefault("requestBody", {"required": True, "content": body})
                for status in (401, 422, *about.statuses):
                    answers.setdefault(str(status), {"description": ""})
            for status in [status for status in answers if status[0] in "45"]:
                answers[status] = {"description": _described(status, answers[status]), "content": content}
    return document


def _with_keys(document: dict[str, Any], needs: Callable[[str, str], str | None]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if (scope := needs(method.upper(), path)) is not None:
                operation["security"] = [{"key": [scope]}]


def _referenced(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, part in {**schema.pop("$defs", {}), model.__name__: schema}.items():
        schemas.setdefault(name, part)
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _described(status: str, answer: dict[str, Any]) -> str:
    return DESCRIPTIONS.get(int(status)) or str(answer["description"])


def _title(name: str) -> str:
    if name.startswith("http-"):
        return responses.get(int(name.removeprefix("http-")), "HTTP error")
    return name.replace("-", " ").replace("_", " ").capitalize()
