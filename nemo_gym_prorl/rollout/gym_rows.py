# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym rows: strict JSON, the mask, and the separation of a rollout's tokens from its text. Pure.

Invariant: an accepted row can be serialised again anywhere, unchanged. Rows pass through several servers and into a
log that clients follow, and one unserialisable value would break the log for every reader. So this module refuses lone
surrogates such as ``"\\ud800"``, ``NaN``, numbers beyond a double or 64 bits, and excessive nesting.

A verifier masks a rollout, so that a trainer skips the rollout, by the field ``mask_sample`` of the row (Gym ≥ 0.7) or
of the row's ``instance_config`` (NeMo RL). Either field counts, and rows that leave the service have both.

Gym stores tokens on the output items, with each turn's whole prompt: a row of 50 turns has the conversation 50 times.
A :class:`TurnTokens` has only the tokens that a turn adds; tokens are kept and sent to trainers in that form.
:func:`put_tokens` is the inverse of :func:`take_tokens`.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problem_document import field_errors, readable
from nemo_gym_prorl.http.routed_experts import RoutedExperts, continued
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY


FAILURE_CLASS = "_ng_failure_class"
"""Field that marks the row of a failed rollout in Gym."""
_FAILURE_FIELDS = frozenset(
    {FAILURE_CLASS, "_ng_no_persist", "_ng_failure_terminal", "failure_kind", "failure_reason", "response", "reward"}
    | {"ng_trajectory"}
)
_RESUBMITTED_OPTIONS = frozenset({"environment", "group", "client", "run", "priority"})
"""Fields of a rollout's report that are also options of a submission; not the id, which is the failed rollout's."""

_WRAPPED_LEVELS = 50
"""Levels of nesting that servers may add to a row; orjson writes 254 levels in all."""


class CreateParams(BaseModel):
    """Part of a row that the service needs; the rest belongs to the model and the environment."""

    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]] = Field(description="Responses API input: a prompt, or a list of items.")


class Row(BaseModel):
    """A Gym dataset row. Every field is passed to the environment unchanged."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: CreateParams


def as_submitted(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a row; for a row of Gym's failures file, without the verdict, failure fields and mask."""
    if FAILURE_CLASS not in row:
        return dict(row)
    bare = {name: value for name, value in unmasked(row).items() if name not in _FAILURE_FIELDS}
    if isinstance(about := bare.get(ROLLOUT_OPTIONS_KEY), Mapping) and "state" in about:
        bare[ROLLOUT_OPTIONS_KEY] = {
            name: value for name, value in about.items() if name in _RESUBMITTED_OPTIONS and value is not None
        }
    return bare


def read_json(body: bytes) -> Any:
    """Return the value of a JSON body.

    Raises:
        CallerError: the body is not JSON in UTF-8, or a value could not be serialised again; names the field.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # also an integer with more digits than Python converts
        raise CallerError(f"is not JSON: {error}", field="body") from None
    require_writable(value)
    return value


def require_writable(value: Any, *path: str) -> None:
    """Refuse a value that cannot be serialised as JSON, also within a few more objects.

    Args:
        value: the value.
        path: names and indices that lead to the value, for the error.

    Raises:
        CallerError: names the first field with half a surrogate pair, an integer beyond 64 bits, or too many levels.
    """
    wrapped = value
    for _ in range(_WRAPPED_LEVELS):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except TypeError as error:
        if "Recursion" not in str(error):
            members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for name, member in members:
                require_writable(member, *path, str(name))
        field = readable(".".join(path)) or "body"
        raise CallerError(f"cannot be written as JSON: {error}", field=field) from None


def check_row(row: Any) -> None:
    """Refuse a value that is not a Gym row.

    Raises:
        CallerError: names the first invalid field, and describes all invalid fields.
    """
    try:
        Row.model_validate(row)
    except ValidationError as error:
        first, *others = field_errors(error.errors())
        more = "".join(f"; {entry['field']}: {entry['message']}" for entry in others)
        raise CallerError(first["message"] + more, field=first["field"]) from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _no_number(number[:40])


_FLAG = "mask_sample"
_NESTED = "instance_config"


def is_masked(result: Mapping[str, Any]) -> bool:
    """Return whether either mask field of a row with its verdict is set."""
    nested = result.get(_NESTED)
    return bool(result.get(_FLAG)) or (isinstance(nested, Mapping) and bool(nested.get(_FLAG)))


def masked(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the row with both mask fields set."""
    nested = result.get(_NESTED)
    return {**result, _FLAG: True, _NESTED: {**(nested if isinstance(nested, Mapping) else {}), _FLAG: True}}


def unmasked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the row without the mask fields."""
    bare = {name: value for name, value in row.items() if name != _FLAG}
    if isinstance(nested := row.get(_NESTED), Mapping):
        bare[_NESTED] = {name: value for name, value in nested.items() if name != _FLAG}
        if not bare[_NESTED]:
            del bare[_NESTED]
    return bare


def row_digest(row: Mapping[str, Any]) -> bytes:
    """Return a digest that is equal for rows that are equal as JSON.

    Raises:
        CallerError: the row cannot be written as JSON.
    """
    try:
        return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS)).digest()
    except TypeError as error:
        raise CallerError(f"cannot be written as JSON: {error}", field="row") from error


def compact_json_bytes(value: Any) -> bytes:
    """Return JSON as bytes without spare memory: orjson 3.13 keeps a buffer of up to ten times the output's length.

    Raises:
        TypeError: the value cannot be written as JSON.
    """
    return bytes(memoryview(orjson.dumps(value)))


_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
NO_TOKENS = b"[]"


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens of one turn. The prompt is the first ``kept`` tokens of the previous sampled turn (prompt and sampled
    tokens), followed by ``observed``.

    Attributes:
        item: index of the output item with the turn's tokens.
        kept: tokens of the prefix shared with the previous turn: all of them, unless the history was rewritten.
        observed: new ids in the prompt (int32).
        sampled: ids that the policy sampled (int32).
        log_probs: log-prob of each sampled id (float64).
        routed_experts: experts of at least the turn's own ids and the last kept id, as text
            (:mod:`~nemo_gym_prorl.http.routed_experts`); ``None`` if the engine does not report experts.
    """

    item: int
    kept: int
    observed: array[int]
    sampled: array[int]
    log_probs: array[float]
    routed_experts: str | None = None

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> TurnTokens:
        """Return a turn from its JSON object of :func:`pack_turns`.

        Raises:
            KeyError: a field is missing.
            ValueError: a field is not base64 of whole numbers, or the numbers of ids and log-probs differ.
        """
        observed, sampled, log_probs = array("i"), array("i"), array("d")
        for numbers, name in ((observed, "observed"), (sampled, "sampled"), (log_probs, "log_probs")):
            numbers.frombytes(b64decode(packed[name], validate=True))
        if len(sampled) != len(log_probs):
            raise ValueError(f"{len(sampled)} ids were sampled but {len(log_probs)} log-probs came with them")
        return cls(packed["item"], packed["kept"], observed, sampled, log_probs, packed.get("routed_experts"))


def pack_turns(turns: Iterable[TurnTokens]) -> bytes:
    """Return turns as a JSON list of objects, with arrays as base64 of their little-endian bytes."""
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


TRAINING_TRACES = "training_traces"
"""Gym's row field with several token sequences to train on (version 1 of the format)."""


def trace_turns(trace: Mapping[str, Any]) -> list[TurnTokens]:
    """Return the sampled spans of one of a row's :data:`TRAINING_TRACES` as turns, with the tokens between the spans.

    Raises:
        ValueError: the trace is invalid.
    """
    turns, seen = list[TurnTokens](), 0
    try:
        ids, log_probs = trace["token_ids"], trace["generation_logprobs"]
        for span in trace["sampled_spans"]:
            start, end = span["start"], span["end"]
            if not seen <= start < end <= len(ids) == len(log_probs):
                raise ValueError("sampled_spans, token_ids and generation_logprobs do not fit together")
            numbers = array("i", ids[seen:start]), array("i", ids[start:end]), array("d", log_probs[start:end])
            turns.append(TurnTokens(len(turns), seen, *numbers))
            seen = end
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"a training trace is invalid: {error!r}") from error
    return turns


def take_tokens(response: object) -> list[TurnTokens]:
    """Remove the token fields from the output items of a response, and return the tokens.

    If any item has invalid tokens (ids that are not integers, a missing log-prob, missing experts), the list is empty
    and all fields stay on their items. A trainer must not use a part of a rollout's tokens.
    """
    items = _output(response)
    turns: list[TurnTokens] = []
    before: list[int] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not any(item.get(name) is not None for name in _FIELDS):
            continue
        turn = _turn(index, item, before)
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
    """Put tokens back on the output items of a response, as JSON fragments that only orjson can serialise."""
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


def _turn(index: int, item: Mapping[str, Any], before: list[int]) -> TurnTokens | None:
    prompt, sampled, log_probs = (item.get(name) for name in _FIELDS)
    if not (isinstance(prompt, list) and isinstance(sampled, list) and isinstance(log_probs, list)):
        return None
    if len(sampled) != len(log_probs):
        return None
    kept = len(before)
    if prompt[:kept] != before:
        kept = shared_length(prompt, before)
    observed = prompt[kept:]
    if not {*map(type, observed), *map(type, sampled)} <= {int} or not {*map(type, log_probs)} <= {int, float}:
        return None
    experts = item.get("routed_experts")
    try:
        turn = TurnTokens(index, kept, array("i", observed), array("i", sampled), array("d", log_probs), experts)
        if experts is not None and RoutedExperts.read(experts).rows < len(observed) + len(sampled) + bool(kept):
            return None
    except (OverflowError, TypeError, ValueError):
        return None
    # Check the lists, not the arrays: reading a number from an array creates an object.
    fine = min(observed, default=0) >= 0 and min(sampled, default=0) >= 0 and all(map(math.isfinite, log_probs))
    return turn if fine else None


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two id sequences."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # a binary search, since Python compares slices in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _text(ids: Sequence[int]) -> bytes:
    """Return ids as text of a JSON list without brackets, each followed by a comma."""
    return orjson.dumps(list(ids))[1:-1] + b"," if ids else b""
