# SPDX-License-Identifier: Apache-2.0
"""An ordinary turn of the Responses API from bytes to bytes.

What a rollout's requests have in common (tools, sampling, metadata) is checked and converted once by those who know
all of it, and known by its bytes from then on. What differs is the input, of which only the usual items are read here.
In the answer the tokens are the text that they were all along.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any

import orjson

from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.header_text import header_text
from nemo_gym_prorl.policy.host import PolicyHost
from nemo_gym_prorl.policy.http.items import Forms, messages_of
from nemo_gym_prorl.policy.http.turn_route import Answer
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.messages import Message
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest


_REMEMBERED = 512
"""Kinds of requests that are known by their bytes."""

DEFERRAL = "X-Rollout-Tokens"
_DEFERRED = (DEFERRAL.lower().encode(), b"deferred")


@dataclass(frozen=True, slots=True)
class Terms:
    """What requests have in common that differ in their input alone.

    Attributes:
        asked: the turn, but for its rollout and messages.
        envelope: what the answers say of that, all fields of an answer among them.
    """

    asked: TurnRequest
    envelope: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server reads requests and writes answers.

    Attributes:
        terms: reads a request without its input; ``None`` if something is wrong with it.
        roles: messages with the roles that the policy knows.
        forms: the items of answers.
        tokens: whether items carry tokens.
        thoughts: whether thoughts are items of their own.
    """

    terms: Callable[[dict[str, Any]], Terms | None]
    roles: Callable[[Sequence[Message]], Sequence[Message]]
    forms: Forms
    tokens: bool
    thoughts: bool


class ShortTurns:
    """Answers ordinary turns.

    Args:
        host: the policy.
        dialect: see there.
    """

    def __init__(self, host: PolicyHost, dialect: Dialect) -> None:
        self._host = host
        self._dialect = dialect
        self._terms: OrderedDict[bytes, Terms] = OrderedDict()

    async def answer(self, rollout: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        """The answer to a turn of a rollout; ``None`` for a request that is not an ordinary one.

        Raises:
            RolloutError: the turn failed.
        """
        service, dialect = self._host.ready, self._dialect
        if service is None or (found := service.without_tokens(rollout, body)) is None:
            return None
        raw, turns = found
        try:
            params = orjson.loads(raw)
            messages = messages_of(params.pop("input"), turns)
            after = params.pop("previous_response_id", None)
            key = orjson.dumps(params)  # fails where it is nested without end
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        terms = self._known(key, params)
        if terms is None or not (after is None or isinstance(after, str)):
            return None
        asked = replace(
            terms.asked,
            rollout=rollout,
            group=None if (group := headers.get("x-rollout-group")) is None else header_text(group),
            run=header_text(headers.get("x-rollout-run", "")) or None,
            messages=dialect.roles(messages),
            after=after,
        )
        answer = await service.turn(asked)
        items = dialect.forms.items(answer.message, answer.parsed, thoughts=dialect.thoughts)
        deferred = headers.get(DEFERRAL.lower()) == "deferred"
        if dialect.tokens and not deferred and answer.turn is not None:
            items[-1] |= self._tokens(service, rollout, answer)
        said = {**terms.envelope, **about(answer, after), "output": items}
        return Answer(orjson.dumps(said), (_DEFERRED,) if deferred else ())

    def _known(self, key: bytes, params: dict[str, Any]) -> Terms | None:
        if (terms := self._terms.get(key)) is not None:
            self._terms.move_to_end(key)
            return terms
        if (terms := self._dialect.terms(params)) is not None:
            self._terms[key] = terms
            if len(self._terms) > _REMEMBERED:
                self._terms.popitem(last=False)
        return terms

    def _tokens(self, service: PolicyService, rollout: str, answer: PolicyAnswer) -> dict[str, Any]:
        """The token fields: all that follows the name of the first is written as one piece."""
        assert answer.turn is not None
        prompt, rest = service.token_fields(rollout, answer.turn)
        return {"prompt_token_ids": orjson.Fragment(prompt + rest), **self._dialect.forms.tokens}


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
