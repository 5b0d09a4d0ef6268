# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym rows: strict JSON, the mask, and the tokens of a rollout apart from its text.

Invariant: a row that is accepted can be written again, everywhere, exactly as it came. A row goes from server to
server and into a log that others follow, and a part that one of them cannot write would fail there for every reader.
So lone surrogates (``"\\ud800"`` is no text), ``NaN``, numbers that no double or 64-bit integer holds and nesting
beyond what writers follow are refused here, with the path of the field.

A verifier masks a rollout, which then gets no loss, in one of two places: Gym ≥ 0.7 has ``mask_sample`` at the top
level, NeMo RL reads ``instance_config``. Either counts, and what leaves the service has both.

Gym has tokens on the output items, with each turn's prompt in full: 50 turns hold the conversation 50 times. A
:class:`TurnTokens` holds what it adds to the turn before; tokens are kept, sent to a trainer and held there in that form.
:func:`put_tokens` makes the same items again that :func:`take_tokens` took them off. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import Any, NoReturn

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym_prorl.failures import CallerError, is_text
from nemo_gym_prorl.http.problem_document import field_errors
from nemo_gym_prorl.http.routed_experts import RoutedExperts, continued
from nemo_gym_prorl.rollout.turns import ROLLOUT_OPTIONS_KEY


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
    if isinstance(about := bare.get(ROLLOUT_OPTIONS_KEY), Mapping) and "state" in about:
        bare[ROLLOUT_OPTIONS_KEY] = {
            name: value for name, value in about.items() if name in _WISHES_AGAIN and value is not None
        }
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


def row_digest(row: Mapping[str, Any]) -> bytes:
    """What tells two rows apart; equal for rows that are equal as JSON.

    Raises:
        CallerError: the row cannot be written as JSON.
    """
    try:
        return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS)).digest()
    except TypeError as error:
        raise CallerError(f"cannot be written as JSON: {error}", field="row") from error


def compact_json_bytes(value: Any) -> bytes:
    """JSON in no more memory than it is long: orjson 3.13 leaves what it has written in a buffer of up to ten times
    that.

    Raises:
        TypeError: it cannot be written.
    """
    return bytes(memoryview(orjson.dumps(value)))


_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
NO_TOKENS = b"[]"


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """One turn of the policy. Its prompt is the first ``kept`` tokens of the turn before (the last one that sampled
    any), with that turn's own, and what was observed since.

    Attributes:
        item: which of the response's output items has the turn's tokens.
        kept: all that the turn before had, unless the history was rewritten.
        observed: ids that the policy was shown (int32).
        sampled: ids that it sampled (int32).
        log_probs: of each sampled id (float64).
        routed_experts: of at least its own ids and the last one that was kept, as text
            (:mod:`~nemo_gym_prorl.http.routed_experts`); ``None`` where nobody tells.
    """

    item: int
    kept: int
    observed: array[int]
    sampled: array[int]
    log_probs: array[float]
    routed_experts: str | None = None

    @classmethod
    def unpack(cls, told: Mapping[str, Any]) -> TurnTokens:
        """The turn that :func:`pack_turns` wrote.

        Raises:
            ValueError: its numbers are none, or there is not a log-prob for each sampled id.
        """
        observed, sampled, log_probs = array("i"), array("i"), array("d")
        for numbers, name in ((observed, "observed"), (sampled, "sampled"), (log_probs, "log_probs")):
            numbers.frombytes(b64decode(told[name], validate=True))
        if len(sampled) != len(log_probs):
            raise ValueError(f"{len(sampled)} ids were sampled but {len(log_probs)} log-probs came with them")
        return cls(told["item"], told["kept"], observed, sampled, log_probs, told.get("routed_experts"))


def pack_turns(turns: Iterable[TurnTokens]) -> bytes:
    """Turns as JSON: numbers as base64 of their bytes, the lowest first."""
    return compact_json_bytes(
        [
            {
                "item": turn.item,
                "kept": turn.kept,
                "observed": b64encode(turn.observed.tobytes()).decode(),
                "sampled": b64encode(turn.sampled.tobytes()).decode(),
                "log_probs": b64encode(turn.log_probs.tobytes()).decode(),
                **({"routed_experts": turn.routed_experts} if turn.routed_experts is not None else {}),
            }
            for turn in turns
        ]
    )


def take_tokens(response: object) -> list[TurnTokens]:
    """Take the token fields off the output items of a response.

    All stay where they are if one item has others than ids, a log-prob for each that was sampled, and the experts of
    each where there are any: who trusts them must see them all.
    """
    items = _output(response)
    turns: list[TurnTokens] = []
    before: list[int] = []
    for place, item in enumerate(items):
        if not isinstance(item, dict) or not any(item.get(name) is not None for name in _FIELDS):
            continue
        turn = _turn(place, item, before)
        if turn is None:
            return []
        turns.append(turn)
        if turn.sampled:
            before = item["prompt_token_ids"] + item["generation_token_ids"]
    for turn in turns:
        for name in (*_FIELDS, "routed_experts"):
            items[turn.item].pop(name, None)
    return turns


def put_tokens(response: object, turns: Iterable[TurnTokens]) -> None:
    """Put tokens on the items that they were taken off; the result is for orjson, which copies what is written."""
    items = _output(response)
    ids, text = array("i"), b""
    experts: str | None = None
    for turn in turns:
        kept, its_text = ids, text
        if turn.kept < len(ids):
            kept = ids[: turn.kept]
            its_text = _text(kept)
        prompt = its_text + _text(turn.observed)
        if turn.item < len(items) and isinstance(items[turn.item], dict):
            items[turn.item] |= {
                "prompt_token_ids": orjson.Fragment(b"[%b]" % prompt[:-1]),
                "generation_token_ids": turn.sampled.tolist(),
                "generation_log_probs": turn.log_probs.tolist(),
            }
            tokens = len(kept) + len(turn.observed) + len(turn.sampled)
            if (its_experts := continued(experts, turn.routed_experts, tokens)) is not None:
                items[turn.item]["routed_experts"] = its_experts
            if turn.sampled:
                experts = its_experts
        if turn.sampled:
            ids, text = kept + turn.observed + turn.sampled, prompt + _text(turn.sampled)


def _output(response: object) -> list[Any]:
    output = response.get("output") if isinstance(response, dict) else None
    return output if isinstance(output, list) else []


def _turn(place: int, item: Mapping[str, Any], before: list[int]) -> TurnTokens | None:
    prompt, sampled, log_probs = (item.get(name) for name in _FIELDS)
    if not (isinstance(prompt, list) and isinstance(sampled, list) and isinstance(log_probs, list)):
        return None
    if len(sampled) != len(log_probs):
        return None
    kept = len(before)
    if prompt[:kept] != before:
        kept = next(compress(count(), map(ne, prompt, before)), min(len(prompt), kept))
    observed = prompt[kept:]
    if not set(map(type, [*observed, *sampled])) <= {int} or not set(map(type, log_probs)) <= {int, float}:
        return None
    experts = item.get("routed_experts")
    try:
        turn = TurnTokens(place, kept, array("i", observed), array("i", sampled), array("d", log_probs), experts)
        if experts is not None and RoutedExperts.read(experts).rows < len(observed) + len(sampled) + bool(kept):
            return None
    except (OverflowError, TypeError, ValueError):
        return None
    fine = min((*turn.observed, *turn.sampled), default=0) >= 0 and all(map(math.isfinite, turn.log_probs))
    return turn if fine else None


def _text(ids: Sequence[int]) -> bytes:
    """Ids as in a list in JSON, each with its comma."""
    return orjson.dumps(list(ids))[1:-1] + b"," if ids else b""
