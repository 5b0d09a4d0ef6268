# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A turn of the Responses API from bytes to bytes.

What a rollout's requests have in common (tools, sampling, metadata) is checked and converted once by Gym's own
classes, and known by its bytes from then on. What differs is the input, whose items are read here. In the answer the
tokens are the text that they were all along.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import time
from types import MappingProxyType
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.host import PolicyHost
from nemo_gym_prorl.policy.http.callers import Caller
from nemo_gym_prorl.policy.http.items import messages_of
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.messages import Message
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest
from nemo_gym_prorl.serving.problems import invalid_body


_REMEMBERED = 512
"""Kinds of requests that are known by their bytes."""
_STAND_INS = {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}
"""Tokens that are shown to Gym's converter in the place of the turn's, which are text already."""


@dataclass(frozen=True, slots=True)
class Terms:
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
        host: PolicyHost,
        terms: Callable[[dict[str, Any], Mapping[str, Any]], Terms],
        items: Callable[[Message], list[dict[str, Any]]],
        *,
        tokens: bool,
    ) -> None:
        self._host = host
        self._read, self._items = terms, items
        self._with_tokens = tokens
        self._terms: OrderedDict[bytes, Terms] = OrderedDict()

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
        raw, turns = service.without_tokens(caller.rollout, body) or (body, [])
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

    def _known(self, params: dict[str, Any], more: Mapping[str, Any]) -> Terms:
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
