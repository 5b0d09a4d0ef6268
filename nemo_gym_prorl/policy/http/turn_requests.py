# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A turn of the Responses API from bytes to bytes.

What a rollout's requests have in common (tools, sampling, metadata) is checked and converted once by Gym's own
classes, and known by its bytes from then on. What differs is the input, whose items are read here. In the answer the
tokens are the text that they were all along.

Agents send texts, calls and their results, thoughts, and turns of ours, with their tokens or without. Items are read
as Gym 0.7's converter reads them, but each sampled turn stays a message of its own, also where the converter would
join it to its neighbours. Any other item or field is refused by its name. Items of an answer are Gym's converter's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import time
from types import MappingProxyType
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problems import invalid_body
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.host import PolicyRuntime
from nemo_gym_prorl.policy.http.callers import Caller
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.template import Message
from nemo_gym_prorl.policy.tokens.history import CARRIED
from nemo_gym_prorl.policy.tokens.ledger import Turn
from nemo_gym_prorl.policy.tokens.prompt import MARK
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest


_STATUSES = ("in_progress", "completed", "incomplete", None)
_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_STATE = ("id", "status")


def messages_of(items: object, turns: Sequence[Turn] = ()) -> list[Message]:
    """The chat messages of input items; a sampled turn is one of its own.

    Args:
        items: the input.
        turns: those that have marks in their last items.

    Raises:
        CallerError: they have other forms than these; names the field.
    """
    messages: list[Message] = []
    said, marks = _Said(), 0
    if isinstance(items, str):
        messages.append({"content": items, "role": "user"})
    elif not isinstance(items, list):
        raise CallerError("must be a text or a list of items", field="input")
    for index, given in enumerate(items if isinstance(items, list) else ()):
        at = f"input.{index}"
        if not isinstance(given, dict):
            raise CallerError("must be an object", field=at)
        item = dict(given)
        kind, tokens = item.pop("type", "message"), _tokens(item, turns, at)
        marks += CARRIED in tokens
        if kind == "function_call_output":
            new: Message | None = _result(item, at)
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            new = _text(item, at)
        else:
            new = None
            said.add(kind, item, at)
        if new is not None:
            if tokens:
                raise CallerError("only what the policy said has tokens", field=at)
            messages += [*said.message(), new]
            said = _Said()
        elif tokens:
            messages += said.message()
            messages[-1] = {**messages[-1], **tokens}
            said = _Said()
    if marks != len(turns):
        raise CallerError("token ids stand where they are no item's", field="input")
    return [*messages, *said.message()]


class _Said:
    """What the policy said since the last message of others, or since its last turn."""

    def __init__(self) -> None:
        self._anything = False
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def add(self, kind: object, item: dict[str, Any], at: str) -> None:
        self._anything = True
        match kind:
            case "message" if item.get("role") == "assistant":
                self._content += _own_text(item, at)
            case "reasoning":
                self._content += "".join(f"<think>{text}</think>" for text in _thoughts(item, at) if text)
            case "function_call":
                self._calls.append(_call(item, at))
            case "message":
                raise CallerError("must be user, system, developer or assistant", field=f"{at}.role")
            case _:
                known = "message, reasoning, function_call or function_call_output"
                raise CallerError(f"{kind!r:.100} is none of {known}", field=f"{at}.type")

    def message(self) -> list[Message]:
        if not self._anything:
            return []
        calls = {"tool_calls": self._calls} if self._calls else {}
        return [{"content": self._content or None, "role": "assistant", **calls}]


def _tokens(item: dict[str, Any], turns: Sequence[Turn], at: str) -> dict[str, Any]:
    """What an item says of the turn that ends with it, taken out of it: a turn of ours, or one's tokens."""
    mark, given = item.pop(MARK, None), {name: item.pop(name, None) for name in _TOKENS}
    if item.pop("routed_experts", None) is not None:
        raise CallerError("no engine here can be told: leave it out", field=f"{at}.routed_experts")
    if mark is not None:
        return {CARRIED: turns[mark]}
    for name, kinds in zip(_TOKENS, ((int,), (int,), (int, float)), strict=True):
        numbers = given[name]
        if numbers is not None and not (isinstance(numbers, list) and all(type(one) in kinds for one in numbers)):
            raise CallerError("must be a list of numbers", field=f"{at}.{name}")
    return {name: numbers for name, numbers in given.items() if numbers}


def _only(item: Mapping[str, Any], at: str, texts: Sequence[str], free: Sequence[str] = ()) -> None:
    """Its fields are these texts, all of them, and perhaps the others; of any other nothing is asked.

    Raises:
        CallerError: names the field.
    """
    for name in texts:
        if not isinstance(item.get(name), str):
            raise CallerError("must be a text", field=f"{at}.{name}")
    for name, value in item.items():
        if value is not None and name not in texts and name not in free:
            raise CallerError("cannot be shown to the policy: leave it out", field=f"{at}.{name}")
    if not isinstance(item.get("id"), str | None):
        raise CallerError("must be a text", field=f"{at}.id")
    if item.get("status") not in _STATUSES:
        raise CallerError("must be in_progress, completed or incomplete", field=f"{at}.status")


def _parts(parts: object, at: str, kinds: Sequence[str]) -> list[str]:
    """The texts of a list of parts."""
    if not isinstance(parts, list):
        raise CallerError("must be a text or a list of parts", field=at)
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            wanted = " or ".join(kinds)
            raise CallerError(f"only text is supported ({wanted}), not {kind!r:.100}", field=f"{at}.{index}.type")
        _only(part, f"{at}.{index}", ("text", "type"), () if part.get("annotations") else ("annotations",))
    return [part["text"] for part in parts]


def _text(item: Mapping[str, Any], at: str) -> Message:
    content = item.get("content")
    _only(item, at, ("role",), ("content", *_STATE))
    if not isinstance(content, str):
        texts = _parts(content, f"{at}.content", ("input_text",))
        content = [{"text": text, "type": "text"} for text in texts]
    return {"content": content, "role": item["role"]}


def _result(item: Mapping[str, Any], at: str) -> Message:
    _only(item, at, ("call_id", "output"), _STATE)
    return {"content": item["output"], "role": "tool", "tool_call_id": item["call_id"]}


def _call(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    _only(item, at, ("arguments", "call_id", "name"), _STATE)
    function = {"arguments": item["arguments"], "name": item["name"]}
    return {"id": item["call_id"], "function": function, "type": "function"}


def _own_text(item: Mapping[str, Any], at: str) -> str:
    content = item.get("content")
    _only(item, at, ("role",), ("content", *_STATE))
    if isinstance(content, str):
        return content
    return "".join(_parts(content, f"{at}.content", ("output_text", "input_text")))


def _thoughts(item: Mapping[str, Any], at: str) -> list[str]:
    # Gym's converter turns the empty signature of a thinking block of ours into an empty text.
    _only(
        {name: value for name, value in item.items() if value or name != "encrypted_content"},
        at,
        (),
        ("summary", *_STATE),
    )
    return _parts(item.get("summary"), f"{at}.summary", ("summary_text",))


_REMEMBERED = 512
"""Kinds of requests that are known by their bytes."""
_STAND_INS = {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}
"""Tokens that are shown to Gym's converter in the place of the turn's, which are text already."""


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What requests have in common that differ in their input alone.

    Attributes:
        asked: the turn, but for its rollout and messages.
        envelope: what the answers say of that, all fields of an answer among them.
    """

    asked: TurnRequest
    envelope: Mapping[str, Any]


class TurnRequests:
    """Answers turns.

    Args:
        host: the policy.
        terms: reads a request without its input, and what else it asks for in the fields of chat completions; raises
            where something is wrong.
        items: a turn in chat form as items of an answer.
        tokens: whether items carry tokens.
    """

    def __init__(
        self,
        host: PolicyRuntime,
        terms: Callable[[dict[str, Any], Mapping[str, Any]], RequestTemplate],
        items: Callable[[Message], list[dict[str, Any]]],
        *,
        tokens: bool,
    ) -> None:
        self._host = host
        self._read, self._items = terms, items
        self._with_tokens = tokens
        self._terms: OrderedDict[bytes, RequestTemplate] = OrderedDict()

    async def answer(self, caller: Caller, body: bytes, more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """The answer to a request.

        Args:
            caller: whose.
            body: of it.
            more: what else it asks for, which this API has no words for.

        Raises:
            RolloutError: the turn failed, or something is wrong with the request; names the field.
            ProblemError: it is no JSON, or Gym's classes do not take a field.
        """
        service = self._host.service
        raw, turns = service.strip_known_tokens(caller.rollout, body) or (body, [])
        params = read_object(raw)
        if "input" not in params:
            raise CallerError("Field required", field="input")
        messages = messages_of(params.pop("input"), turns)
        after = params.pop("previous_response_id", None)
        if not (after is None or isinstance(after, str)):
            raise CallerError("must be a text", field="previous_response_id")
        terms = self._known(params, more)
        answer = await service.turn(caller.asking(terms.asked, messages=messages, after=after))
        output = self._output(service, caller, answer)
        return orjson.dumps({**terms.envelope, **about(answer, after), "output": output})

    def _output(self, service: PolicyService, caller: Caller, answer: PolicyAnswer) -> list[dict[str, Any]]:
        """A turn's items, with its tokens if the caller wants them."""
        turn = answer.turn if self._with_tokens and not caller.deferred else None
        items = self._items({**answer.message, **_STAND_INS} if turn is not None else answer.message)
        calls = (item for item in items if item["type"] == "function_call")
        for item, read in zip(calls, answer.parsed.calls, strict=True):
            if read.malformed:
                item["status"] = "incomplete"
        if turn is not None:
            # All that follows the name of the first token field is written as one piece.
            items[-1] = {name: value for name, value in items[-1].items() if name not in _STAND_INS}
            items[-1]["prompt_token_ids"] = orjson.Fragment(b"".join(service.token_fields(caller.rollout, turn)))
        return items

    def _known(self, params: dict[str, Any], more: Mapping[str, Any]) -> RequestTemplate:
        try:
            key = orjson.dumps((params, {**more}))
        except orjson.JSONEncodeError as error:
            raise invalid_body(ValueError(f"it is nested too deep: {error}")) from error
        if (terms := self._terms.get(key)) is not None:
            self._terms.move_to_end(key)
            return terms
        terms = self._terms[key] = self._read(params, more)
        if len(self._terms) > _REMEMBERED:
            self._terms.popitem(last=False)
        return terms


def read_object(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object.

    Raises:
        ProblemError: it is no JSON.
        CallerError: it is no object.
    """
    try:
        params = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_body(error) from error
    if not isinstance(params, dict):
        raise CallerError("must be a JSON object", field="body")
    return params


def about(answer: PolicyAnswer, after: str | None) -> dict[str, Any]:
    """What an answer of the Responses API says of its turn, besides its items."""
    sampled = len(answer.turn.sampled) if answer.turn else 0
    return {
        "id": answer.id,
        "created_at": float(int(time())),
        "previous_response_id": after,
        "incomplete_details": None if answer.finish is Finish.STOP else {"reason": "max_output_tokens"},
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + sampled,
        },
    }
