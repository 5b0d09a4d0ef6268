# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What every server of ours answers with where it refuses. No routes here: clients read it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field


TYPE_PREFIX = "urn:nemo-gym-prorl:problem:"

_MOST_ERRORS = 20
"""Fields that one document names; whoever sends ten thousand wrong ones learns enough from the first."""

_NO_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""What pydantic tells with the name of a class of ours."""


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
        problem: the RFC 9457 document that it answered with.
        retry_after_s: when it asked to come back; ``None`` if it did not.
    """

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {problem.status}: {problem.detail}")
        self.problem = problem
        self.retry_after_s = retry_after_s


def problem_of_answer(status: int, content: bytes) -> Problem:
    """Return the problem document of an answer, also if something in front of the service wrote the answer."""
    try:
        return Problem.model_validate_json(content)
    except ValueError:
        text = content.decode(errors="replace").strip()[:500]
        told = f"HTTP {status}" if text.startswith("<") or not text else text  # a page for people says no more
        return Problem(type="about:blank", title="HTTP error", status=status, detail=told)


def field_errors(errors: Sequence[Mapping[str, Any]], *, outer: int = 0) -> list[dict[str, Any]]:
    """The first fields that are wrong, and why.

    Args:
        errors: as pydantic tells them.
        outer: so many steps of a field's place are none of the caller's.
    """
    return [
        {
            "field": ".".join(str(part) for part in error["loc"][outer:]) or "body",
            "message": "must be an object" if error["type"] in _NO_OBJECT else error["msg"],
        }
        for error in errors[:_MOST_ERRORS]
    ]


def in_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """Fields that are wrong, as :func:`field_errors` tells them, in a line."""
    return readable("; ".join(f"{entry['field']}: {entry['message']}" for entry in errors))


def readable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
