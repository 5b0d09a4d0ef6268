# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""RFC 9457 problem documents, for servers and clients. Imports no web framework."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field


TYPE_PREFIX = "urn:nemo-gym-prorl:problem:"

_MOST_ERRORS = 20
"""Maximum number of fields that one document names, to keep documents short."""

_ALTERNATIVE = re.compile(r"[A-Z]\w*[a-z]\w*|str|int|float|bool|[\w-]+\[.*\]", re.DOTALL)
"""Pydantic's names for alternatives of a union: a class or a type. Few fields have such names."""

_OF_FIELDS = frozenset({"missing", "extra_forbidden"})
"""Error types that concern a field, never an alternative of a union."""

_NO_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""Error types whose message contains an internal class name."""


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
        retry_after_s: seconds until a retry, if the service named them.
    """

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {problem.status}: {problem.detail}")
        self.problem = problem
        self.retry_after_s = retry_after_s


def problem_of_answer(url: str, status: int, content: bytes) -> Problem:
    """Return the problem document of an answer; built from status and text if a gateway wrote the answer."""
    try:
        return Problem.model_validate_json(content)
    except ValueError:
        text = content.decode(errors="replace").strip()[:500]
        told = f"HTTP {status}" if text.startswith("<") or not text else text  # an HTML page has no details
        if status in (404, 405):  # a service answers with a problem document
            told = f"the server at {url} is no rollout service; prorl serve prints the URL of its prorl_agent"
        return Problem(type="about:blank", title="HTTP error", status=status, detail=told)


def field_errors(errors: Sequence[Mapping[str, Any]], *, outer: int = 0) -> list[dict[str, Any]]:
    """Return the first wrong fields, each with its error.

    Args:
        outer: number of leading path parts that the caller does not know.
    """
    return [
        {
            "field": ".".join(str(part) for part in error["loc"][outer:]) or "body",
            "message": "must be an object" if error["type"] in _NO_OBJECT else error["msg"],
        }
        for error in _of_one_alternative(errors, outer)[:_MOST_ERRORS]
    ]


def _of_one_alternative(errors: Sequence[Mapping[str, Any]], depth: int) -> list[Mapping[str, Any]]:
    """Reduce the errors of each union to those of the most similar alternative.

    Pydantic reports the errors of every alternative, with its name in the path: ``tools.0.FunctionTool.name``.
    """
    branches: dict[Any, list[Mapping[str, Any]]] = {}
    for error in errors:
        branches.setdefault(error["loc"][depth] if len(error["loc"]) > depth else None, []).append(error)
    fields = any(len(error["loc"]) == depth + 1 and error["type"] in _OF_FIELDS for error in errors)
    named = all(isinstance(name, str) and _ALTERNATIVE.fullmatch(name) for name in branches)
    if len(branches) < 2 or fields or not named:
        parts = (part if name is None else _of_one_alternative(part, depth + 1) for name, part in branches.items())
        return [error for part in parts for error in part]
    shorter = [
        [{**error, "loc": (*error["loc"][:depth], *error["loc"][depth + 1 :])} for error in part]
        for part in branches.values()
    ]
    like = [part for part in shorter if not any(_is_of_another_kind(error, depth) for error in part)]
    if like:
        return _of_one_alternative(min(like, key=len), depth)
    direct = {error["msg"]: error for part in shorter for error in part if len(error["loc"]) == depth}
    return [*direct.values()] or _of_one_alternative(shorter[0], depth)


def _is_of_another_kind(error: Mapping[str, Any], depth: int) -> bool:
    rest: tuple[Any, ...] = error["loc"][depth:]
    return not rest or (rest == ("type",) and bool(error["type"] == "literal_error"))


def in_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return errors of :func:`field_errors` as one line."""
    return readable("; ".join(f"{entry['field']}: {entry['message']}" for entry in errors))


def readable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
