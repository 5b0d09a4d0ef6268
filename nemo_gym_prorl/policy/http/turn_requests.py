# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Turns of the Responses API, from request bytes to answer bytes.

Tools, sampling and metadata are the same in all requests of a rollout. Gym's own classes check and convert these
fields once, and later requests are recognised by their bytes. This module reads the input's items. Tokens are copied
into the answer as JSON text of the cache.

Agents send texts, calls and their results, reasoning, and earlier turns, with or without tokens. Items are read as Gym
0.7's converter reads them, except that each sampled turn stays a message of its own. All other items and fields are
refused by name; a program's request loses them. Gym's converter makes the items of an answer.
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
from nemo_gym_prorl.policy.calls import refuse
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.http.callers import RolloutCaller
from nemo_gym_prorl.policy.http.programs import SEPARATOR, adapt_responses
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.template import Message
from nemo_gym_prorl.policy.tokens.conversations import KNOWN_TURN, TOKEN_FIELDS
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn
from nemo_gym_prorl.policy.tokens.prompt import TURN_MARKER
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest


_STATUSES = ("in_progress", "completed", "incomplete", None)
_STATE = ("id", "status")
_KINDS = ("message", "reasoning", "function_call", "function_call_output")


def messages_of(items: object, turns: Sequence[LedgerTurn] = ()) -> list[Message]:
    """Convert input items to chat messages; each sampled turn becomes one message.

    Args:
        items: value of the request's ``input``: a text or a list of items.
        turns: known turns, to which a :data:`TURN_MARKER` in an item refers by index.

    Raises:
        CallerError: the input or an item is invalid or unsupported, or token fields are not on items of the policy;
            names the field.
    """
    messages: list[Message] = []
    assistant, marks = _AssistantMessage(), 0
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
        marks += KNOWN_TURN in tokens
        if kind == "function_call_output":
            new: Message | None = _result(item, at)
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            new = _text(item, at)
        elif kind not in _KINDS:
            refuse(f"{at}.type", f"{kind!r:.100} is none of {', '.join(_KINDS)}", str(kind))
            continue
        else:
            new = None
            assistant.add(kind, item, at)
        if new is not None:
            if tokens:
                raise CallerError("only items of the policy have tokens: leave the token fields out", field=at)
            messages += [*assistant.message(), new]
            assistant = _AssistantMessage()
        elif tokens:
            messages += assistant.message()
            messages[-1] = {**messages[-1], **tokens}
            assistant = _AssistantMessage()
    if marks != len(turns):
        raise CallerError("token fields must be fields of items", field="input")
    return [*messages, *assistant.message()]


class _AssistantMessage:
    """The policy's items since the last message of another role, or since the last sampled turn."""

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
                self._content += "".join(f"<think>{text}</think>" for text in _reasoning_texts(item, at) if text)
            case "function_call":
                self._calls.append(_call(item, at))
            case _:
                raise CallerError("must be user, system, developer or assistant", field=f"{at}.role")

    def message(self) -> list[Message]:
        if not self._anything:
            return []
        calls = {"tool_calls": self._calls} if self._calls else {}
        return [{"content": self._content or None, "role": "assistant", **calls}]


def _tokens(item: dict[str, Any], turns: Sequence[LedgerTurn], at: str) -> dict[str, Any]:
    """Remove an item's token fields; return the known turn under :data:`KNOWN_TURN`, or the non-empty fields."""
    mark, given = item.pop(TURN_MARKER, None), {name: item.pop(name, None) for name in TOKEN_FIELDS}
    if item.pop("routed_experts", None) is not None:
        raise CallerError("engines do not accept routed_experts: leave it out", field=f"{at}.routed_experts")
    if mark is not None:
        return {KNOWN_TURN: turns[mark]}
    for name, kinds in zip(TOKEN_FIELDS, ((int,), (int,), (int, float)), strict=True):
        numbers = given[name]
        if numbers is not None and not (isinstance(numbers, list) and all(type(one) in kinds for one in numbers)):
            raise CallerError("must be a list of numbers", field=f"{at}.{name}")
    return {name: numbers for name, numbers in given.items() if numbers}


def _check_item(item: Mapping[str, Any], at: str, texts: Sequence[str], free: Sequence[str] = ()) -> None:
    """Refuse an item that lacks one of the text fields ``texts``, or has fields besides ``texts`` and ``free``."""
    for name in texts:
        if not isinstance(item.get(name), str):
            raise CallerError("must be a text", field=f"{at}.{name}")
    for name, value in item.items():
        if value is not None and name not in texts and name not in free:
            refuse(f"{at}.{name}", "is not supported: leave it out")
    if not isinstance(item.get("id"), str | None):
        raise CallerError("must be a text", field=f"{at}.id")
    if item.get("status") not in _STATUSES:
        raise CallerError("must be in_progress, completed or incomplete", field=f"{at}.status")


def _parts(parts: object, at: str, kinds: Sequence[str]) -> list[str]:
    texts: list[str] = []
    if not isinstance(parts, list):
        raise CallerError("must be a text or a list of parts", field=at)
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            wanted = " or ".join(kinds)
            refuse(f"{at}.{index}.type", f"only text is supported ({wanted}), not {kind!r:.100}", str(kind))
            continue
        _check_item(part, f"{at}.{index}", ("text", "type"), () if part.get("annotations") else ("annotations",))
        texts.append(part["text"])
    return texts


def _text(item: Mapping[str, Any], at: str) -> Message:
    content = item.get("content")
    _check_item(item, at, ("role",), ("content", *_STATE))
    if not isinstance(content, str):
        texts = _parts(content, f"{at}.content", ("input_text",))
        content = [{"text": text, "type": "text"} for text in texts]
    return {"content": content, "role": item["role"]}


def _result(item: Mapping[str, Any], at: str) -> Message:
    if isinstance(item.get("output"), list):
        item = {**item, "output": "\n".join(_parts(item["output"], f"{at}.output", ("input_text",)))}
    _check_item(item, at, ("call_id", "output"), _STATE)
    return {"content": item["output"], "role": "tool", "tool_call_id": item["call_id"]}


def _call(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    if isinstance(space := item.get("namespace"), str):
        item = {**item, "namespace": None, "name": f"{space}{SEPARATOR}{item.get('name')}"}
    _check_item(item, at, ("arguments", "call_id", "name"), _STATE)
    function = {"arguments": item["arguments"], "name": item["name"]}
    return {"id": item["call_id"], "function": function, "type": "function"}


def _own_text(item: Mapping[str, Any], at: str) -> str:
    content = item.get("content")
    _check_item(item, at, ("role",), ("content", *_STATE))
    if isinstance(content, str):
        return content
    return "".join(_parts(content, f"{at}.content", ("output_text", "input_text")))


def _reasoning_texts(item: Mapping[str, Any], at: str) -> list[str]:
    # Gym's converter of the Messages API writes an empty encrypted_content for a thinking block without a signature.
    _check_item(
        {name: value for name, value in item.items() if value or name != "encrypted_content"},
        at,
        (),
        ("summary", *_STATE),
    )
    return _parts(item.get("summary"), f"{at}.summary", ("summary_text",))


_MAX_TEMPLATES = 512
"""Maximum of cached request templates (LRU), to bound memory."""
_PLACEHOLDER_TOKENS = {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}
"""Placeholders for Gym's converter; the turn's own tokens are already JSON text and are inserted afterwards."""


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Part that all requests of a rollout have in common: every field except the input.

    Attributes:
        turn_request: the turn without rollout and messages.
        envelope: the fields of the answer that depend on the request only.
    """

    turn_request: TurnRequest
    envelope: Mapping[str, Any]


class TurnRequests:
    """Handler that checks a turn request, has the policy sample the turn, and encodes the answer.

    Args:
        runtime: the policy.
        template: validates a request without its input, together with further fields of chat completions.
        items: converts a turn in chat form to items of an answer.
        tokens: whether items carry token fields, unless the caller defers tokens.
    """

    def __init__(
        self,
        runtime: PolicyRuntime,
        template: Callable[[dict[str, Any], Mapping[str, Any]], RequestTemplate],
        items: Callable[[Message], list[dict[str, Any]]],
        *,
        tokens: bool,
    ) -> None:
        self._runtime = runtime
        self._read, self._items = template, items
        self._with_tokens = tokens
        self._templates: OrderedDict[bytes, RequestTemplate] = OrderedDict()

    async def answer(
        self, caller: RolloutCaller, body: bytes, more: Mapping[str, Any] = MappingProxyType({})
    ) -> bytes:
        """Answer a request; ``more`` are fields of chat completions that the Responses API lacks.

        Raises:
            RolloutError: the turn failed, or a field is invalid.
            ProblemError: the body is not JSON, or Gym's classes refuse a field.
        """
        service = self._runtime.service
        raw, turns = service.strip_known_tokens(caller.rollout, body) or (body, [])
        params = read_object(raw)
        if "input" not in params:
            raise CallerError("Field required", field="input")
        spaces = adapt_responses(params)
        messages = messages_of(params.pop("input"), turns)
        after = params.pop("previous_response_id", None)
        if not (after is None or isinstance(after, str)):
            raise CallerError("must be a text", field="previous_response_id")
        template = self._template_of(params, more)
        answer = await service.turn(caller.complete(template.turn_request, messages=messages, after=after))
        output = [{**item, **spaces.get(item.get("name"), {})} for item in self._output(service, caller, answer)]
        return orjson.dumps({**template.envelope, **answer_fields(answer, after), "output": output})

    def _output(self, service: PolicyService, caller: RolloutCaller, answer: PolicyAnswer) -> list[dict[str, Any]]:
        """Return a turn's items, with token fields unless the caller defers tokens."""
        turn = answer.turn if self._with_tokens and not caller.deferred else None
        items = self._items({**answer.message, **_PLACEHOLDER_TOKENS} if turn is not None else answer.message)
        calls = (item for item in items if item["type"] == "function_call")
        for item, read in zip(calls, answer.parsed.calls, strict=True):
            if read.malformed:
                item["status"] = "incomplete"
        if turn is not None:
            # The fragment also adds the two other token fields (PolicyService.token_fields).
            items[-1] = {name: value for name, value in items[-1].items() if name not in _PLACEHOLDER_TOKENS}
            items[-1]["prompt_token_ids"] = orjson.Fragment(b"".join(service.token_fields(caller.rollout, turn)))
        return items

    def _template_of(self, params: dict[str, Any], more: Mapping[str, Any]) -> RequestTemplate:
        try:
            key = orjson.dumps((params, {**more}))
        except orjson.JSONEncodeError as error:
            raise invalid_body(ValueError(f"the request is nested too deep: {error}")) from error
        if (template := self._templates.get(key)) is not None:
            self._templates.move_to_end(key)
            return template
        template = self._templates[key] = self._read(params, more)
        if len(self._templates) > _MAX_TEMPLATES:
            self._templates.popitem(last=False)
        return template


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        ProblemError: the body is not JSON.
        CallerError: the body is not an object.
    """
    try:
        params = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_body(error) from error
    if not isinstance(params, dict):
        raise CallerError("must be a JSON object", field="body")
    return params


def answer_fields(answer: PolicyAnswer, after: str | None) -> dict[str, Any]:
    """Return the fields of a Responses API answer that describe its turn, besides the items."""
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
