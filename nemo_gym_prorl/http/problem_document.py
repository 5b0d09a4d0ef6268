# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""RFC 9457 problem documents, for servers and clients. Imports no web framework."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field


TYPE_PREFIX = "urn:nemo-gym-prorl:problem:"

_MAX_FIELDS = 20
"""Maximum number of wrong fields that one document names, to keep documents short."""

_UNION_MEMBER = re.compile(r"[A-Z]\w*[a-z]\w*|str|int|float|bool|[\w-]+\[.*\]", re.DOTALL)
"""Pydantic's names of union members in error locations: class and type names. Few fields have such names."""

_FIELD_ERRORS = frozenset({"missing", "extra_forbidden"})
"""Pydantic's error types whose location ends with the name of a field, never of a union member."""

_NOT_AN_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""Pydantic's error types for a value that is not an object; their messages contain an internal class name."""


class Problem(BaseModel):
    """An RFC 9457 problem document."""

    type: str = Field(description="Stable identifier, `urn:nemo-gym-prorl:problem:<name>`.")
    title: str
    status: int
    detail: str
    errors: list[dict[str, Any]] | None = Field(default=None, description="One entry per offending field.")


class ApiError(Exception):
    """The service refused a request.

    Attributes:
        problem: the problem document.
        retry_after_s: seconds to wait before a retry; ``None`` if the service did not name them.
    """

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {problem.status}: {problem.detail}")
        self.problem = problem
        self.retry_after_s = retry_after_s


def problem_of_answer(url: str, status: int, content: bytes) -> Problem:
    """Return the problem document of an error response. A response of a proxy or another server may have none: the
    document is then built from the status and the first 500 characters."""
    try:
        return Problem.model_validate_json(content)
    except ValueError:
        text = content.decode(errors="replace").strip()[:500]
        detail = f"HTTP {status}" if text.startswith("<") or not text else text  # an HTML page has no details
        if status in (404, 405):  # a rollout service would have sent a problem document
            detail = f"the server at {url} is no rollout service; prorl serve prints the URL of its prorl_agent"
        return Problem(type="about:blank", title="HTTP error", status=status, detail=detail)


def field_errors(errors: Sequence[Mapping[str, Any]], *, outer: int = 0) -> list[dict[str, Any]]:
    """Convert Pydantic's errors into entries ``{"field": …, "message": …}``, at most :data:`_MAX_FIELDS`.

    Args:
        outer: number of leading parts of each location that the caller does not know, such as FastAPI's ``body``.
    """
    return [
        {
            "field": ".".join(str(part) for part in error["loc"][outer:]) or "body",
            "message": _message(error),
        }
        for error in _of_nearest_member(errors, outer)[:_MAX_FIELDS]
    ]


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] not in _NOT_AN_OBJECT:
        return str(error["msg"])
    # FastAPI leaves a body in bytes unless its content type is JSON; curl -d sends another one.
    unread = isinstance(error.get("input"), bytes)
    return "must be JSON; send Content-Type: application/json" if unread else "must be an object"


def _of_nearest_member(errors: Sequence[Mapping[str, Any]], depth: int) -> list[Mapping[str, Any]]:
    """Keep, for each union at or below ``depth``, only the errors of the member that the value resembles most.

    Pydantic reports the errors of every member, with the member's name in the location: ``tools.0.FunctionTool.name``.
    """
    branches: dict[Any, list[Mapping[str, Any]]] = {}
    for error in errors:
        branches.setdefault(error["loc"][depth] if len(error["loc"]) > depth else None, []).append(error)
    fields = any(len(error["loc"]) == depth + 1 and error["type"] in _FIELD_ERRORS for error in errors)
    named = all(isinstance(name, str) and _UNION_MEMBER.fullmatch(name) for name in branches)
    if len(branches) < 2 or fields or not named:
        parts = (part if name is None else _of_nearest_member(part, depth + 1) for name, part in branches.items())
        return [error for part in parts for error in part]
    shorter = [
        [{**error, "loc": (*error["loc"][:depth], *error["loc"][depth + 1 :])} for error in part]
        for part in branches.values()
    ]
    like = [part for part in shorter if not any(_is_of_another_kind(error, depth) for error in part)]
    if like:
        return _of_nearest_member(min(like, key=len), depth)
    direct = {error["msg"]: error for part in shorter for error in part if len(error["loc"]) == depth}
    return [*direct.values()] or _of_nearest_member(shorter[0], depth)


def _is_of_another_kind(error: Mapping[str, Any], depth: int) -> bool:
    rest: tuple[Any, ...] = error["loc"][depth:]
    return not rest or (rest == ("type",) and bool(error["type"] == "literal_error"))


def in_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """Format the entries of :func:`field_errors` as one line."""
    return readable("; ".join(f"{entry['field']}: {entry['message']}" for entry in errors))


def readable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
