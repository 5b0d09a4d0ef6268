# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym rows as they come in: strict JSON, the service's own field in them, and the mask.

Invariant: a row that is accepted can be written again, everywhere, exactly as it came. A row goes from server to
server and into a log that others follow, and a part that one of them cannot write would fail there for every reader.
So lone surrogates (``"\\ud800"`` is no text), ``NaN``, numbers that no double or 64-bit integer holds and nesting
beyond what writers follow are refused here, with the path of the field.

A verifier masks a rollout, which then gets no loss, in one of two places: Gym ≥ 0.7 has ``mask_sample`` at the top
level, NeMo RL reads ``instance_config``. Either counts, and what leaves the service has both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym_prorl.failures import CallerError, is_text
from nemo_gym_prorl.rollout.steps import WISHES
from nemo_gym_prorl.serving.problem_document import field_errors


FAILURE_CLASS = "_ng_failure_class"
"""The field by which Gym knows the row of a failed rollout."""
_OF_FAILURES = frozenset(
    {FAILURE_CLASS, "_ng_no_persist", "_ng_failure_terminal", "failure_kind", "failure_reason", "response", "reward"}
    | {"ng_trajectory"}
)
_WISHES_AGAIN = frozenset({"environment", "group", "client", "run", "priority"})
"""What an answer says of a rollout, and a submission may say as well. Not its id, which is that of the failed one."""

MAX_DEPTH = 200
"""Nesting that is taken; orjson writes 254 levels, and a row is wrapped a few times on its way."""

_LEAST_INT, _MOST_INT = -(2**63), 2**64 - 1
_FIELD_CHARS = 300
"""A field's path in a message; keys come from the caller and have any length."""


class CreateParams(BaseModel):
    """The part of a row that the service itself needs; the rest of it belongs to model and environment."""

    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]] = Field(description="Responses API input: a prompt, or a list of items.")


class Row(BaseModel):
    """A Gym dataset row. Every field is passed on to the environment unchanged."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: CreateParams


def as_submitted(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row out of a failures file as it was before it failed: without verdict, marks and mask, and of how the rollout
    went only what was wished of it. Any other row as it is."""
    if FAILURE_CLASS not in row:
        return dict(row)
    bare = {name: value for name, value in unmasked(row).items() if name not in _OF_FAILURES}
    if isinstance(about := bare.get(WISHES), Mapping) and "state" in about:
        bare[WISHES] = {name: value for name, value in about.items() if name in _WISHES_AGAIN and value is not None}
    return bare


def read_json(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        CallerError: it is no JSON in UTF-8, or nothing that can be written again; names the field.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise CallerError(f"is not UTF-8: {error.reason} at byte {error.start}", field="body") from None
    except RecursionError:
        raise CallerError(f"is nested deeper than {MAX_DEPTH} levels", field="body") from None
    except ValueError as error:  # also an integer with more digits than Python converts
        raise CallerError(f"is not JSON: {error}", field="body") from None
    require_writable(value)
    return value


def require_writable(value: Any) -> None:
    """Refuse a value that cannot be written as JSON again.

    Raises:
        CallerError: names the first field that cannot.
    """
    for path, reason in _unwritable(value):
        raise CallerError(reason, field=path)


def check_row(row: Any) -> None:
    """Refuse what is no Gym row.

    Raises:
        CallerError: names the first field that is wrong, and describes all of them.
    """
    try:
        Row.model_validate(row)
    except ValidationError as error:
        first, *others = field_errors(error.errors())
        more = "".join(f"; {entry['field']}: {entry['message']}" for entry in others)
        raise CallerError(first["message"] + more, field=first["field"]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unwritable(value: Any) -> Iterator[tuple[str, str]]:
    """Path and complaint for each thing in ``value`` that cannot be written. Without recursion, since depth is one."""
    stack: list[tuple[Any, tuple[Any, ...], int]] = [(value, (), 1)]
    while stack:
        item, where, depth = stack.pop()
        match item:
            case str():
                if not is_text(item):
                    yield _path(where), "holds half a surrogate pair, which is no character"
            case float():
                if not math.isfinite(item):
                    yield _path(where), "is a number beyond what a double holds"
            case bool() | None:
                pass
            case int():
                if not _LEAST_INT <= item <= _MOST_INT:
                    yield _path(where), "is an integer beyond 64 bits"
            case dict() | list() if depth > MAX_DEPTH:
                yield _path(where), f"is nested deeper than {MAX_DEPTH} levels"
            case dict():
                for key, member in item.items():
                    if not is_text(key):
                        yield _path((where, key)), "the name holds half a surrogate pair, which is no character"
                    if not _is_ascii(member):
                        stack.append((member, (where, key), depth + 1))
            case list():
                stack.extend(
                    (member, (where, index), depth + 1) for index, member in enumerate(item) if not _is_ascii(member)
                )


def _is_ascii(item: Any) -> bool:
    """Text that needs no look: of a row of tests there are thousands."""
    return isinstance(item, str) and item.isascii()


def _path(where: tuple[Any, ...]) -> str:
    """``row.tools.0.name`` of the linked parts that lead to a value."""
    parts: list[str] = []
    while where:
        where, part = where
        parts.append(str(part))
    path = ".".join(reversed(parts)) or "body"
    readable = path.encode(errors="backslashreplace").decode()
    return readable if len(readable) <= _FIELD_CHARS else readable[:_FIELD_CHARS] + "…"


_FLAG = "mask_sample"
_NESTED = "instance_config"


def is_masked(result: Mapping[str, Any]) -> bool:
    """Whether a row with its verdict says, in either place, that nobody is to train on it."""
    nested = result.get(_NESTED)
    return bool(result.get(_FLAG)) or (isinstance(nested, Mapping) and bool(nested.get(_FLAG)))


def masked(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the mask in both places."""
    nested = result.get(_NESTED)
    return {**result, _FLAG: True, _NESTED: {**(nested if isinstance(nested, Mapping) else {}), _FLAG: True}}


def unmasked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without it in either place."""
    bare = {name: value for name, value in row.items() if name != _FLAG}
    if isinstance(nested := row.get(_NESTED), Mapping):
        bare[_NESTED] = {name: value for name, value in nested.items() if name != _FLAG}
        if not bare[_NESTED]:
            del bare[_NESTED]
    return bare


def lasting_json(value: Any) -> bytes:
    """JSON in no more memory than it is long: orjson 3.13 leaves what it has written in a buffer of up to ten times
    that.

    Raises:
        TypeError: it cannot be written.
    """
    return bytes(memoryview(orjson.dumps(value)))
