# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of agent programs: permissions of a rollout's capability key, and the outcomes of the calls."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problems import ProblemError
from nemo_gym_prorl.policy.engines.engine import Sampling


KEY_PREFIX = "rk-"
"""Prefix of capability keys, so that middlewares, scanners and people recognise them."""
MAX_BYTES_PER_TOKEN = 32  # a token of text has about 4 bytes; tokens of long spaces or dashes have more
DEAD_KEY = 401, "key-revoked", "the capability key is unknown or revoked"

CONTEXT_FULL = "context_length_exceeded"
"""Error code of a prompt that is longer than the context, as in OpenAI's API."""

_MAX_UNANSWERED = 1_000
"""Maximum of remembered requests without an answer per rollout; a program may disconnect from any number of calls."""

LEFT_OUT: ContextVar[set[str] | None] = ContextVar("left_out", default=None)
"""Names of fields left out of the current request; ``None`` if the request is not a program's and loses no field."""


def refuse(field: str, why: str, part: str | None = None) -> None:
    """Refuse a field of a request; if an agent program sent the request, record the field as left out instead.

    The recorded name is ``part``, or by default the field's path without indices.

    Raises:
        CallerError: the request is not a program's.
    """
    left_out = LEFT_OUT.get()
    if left_out is None:
        raise CallerError(why, field=field)
    left_out.add(part or re.sub(r"\.\d+", "", field))


@dataclass(frozen=True, slots=True, eq=False)
class CallGrant:
    """Permissions of a capability key: turns of one rollout, until it has ``max_turns`` turns or a sequence of
    ``max_total_tokens`` (``None``: no limit). ``sampling`` and ``template_variables`` override those of the calls.
    """

    rollout: str
    group: str | None = None
    run: str | None = None
    max_turns: int | None = None
    max_total_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    contexts: Mapping[str, int | None] = field(default_factory=dict)
    """Context length in tokens by engine URL, as far as known; the engine client's own mapping, so always current."""

    def check_length(self, *prompt: object) -> None:
        """Refuse (status 400) a prompt far longer than the context, because its rendering would block the server."""
        context = max((length or math.inf for length in self.contexts.values()), default=math.inf)
        if len(orjson.dumps(prompt)) > context * MAX_BYTES_PER_TOKEN:
            raise ProblemError(400, CONTEXT_FULL, f"prompt is too long: the context has {context} tokens")


class SharedCall[T]:
    """A call that several requests await. Cancelling the last of these requests cancels the call."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(work)
        self._requests = 0
        self.is_cancelled = False

    async def answer(self) -> T:
        self._requests += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._requests -= 1
            if not self._requests:
                self.is_cancelled = self._task.cancel()


@dataclass(slots=True)
class RolloutCalls:
    """Counters and latest calls of a rollout.

    Attributes:
        limit: name of the limit that the rollout has reached; ``None`` for none.
        refused: number of refused calls by HTTP status.
        dropped: number of calls by name of a field, or type of a tool or content part, that the server removed.
        in_flight: numbers of the calls in flight.
        context_full: whether the latest call had a prompt that is longer than the context.
        unanswered: number of the latest call by the digest of its request, for requests without an answer. A request
            that was cut off or failed stays until the same request is sent again and answered.
        begun: number of calls so far; the calls are numbered from 1.
        kept: latest calls by digest of the request and its idempotency key; a repeated request awaits the same call.
    """

    limit: str | None = None
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    in_flight: set[int] = field(default_factory=set)
    context_full: bool = False
    unanswered: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    begun: int = 0
    kept: OrderedDict[bytes, SharedCall[Any]] = field(default_factory=OrderedDict)

    def begin(self, request: bytes) -> int:
        """Count a call of the request with this digest, and return the call's number."""
        self.begun += 1
        self.in_flight.add(self.begun)
        self.unanswered[request] = self.begun
        if len(self.unanswered) > _MAX_UNANSWERED:
            self.unanswered.popitem(last=False)
        return self.begun

    def end(self, request: bytes, number: int, *, answered: bool) -> None:
        """Count the end of a call. An answer also answers all earlier calls of the request."""
        self.in_flight.discard(number)
        if answered and self.unanswered.get(request, self.begun + 1) <= number:
            del self.unanswered[request]

    def close(self) -> None:
        """Stop counting requests in flight as unanswered, because the program has ended and its key is revoked."""
        waiting = self.in_flight
        self.unanswered = OrderedDict(one for one in self.unanswered.items() if one[1] not in waiting)

    def check(self, grant: CallGrant, turns: int, tokens: int) -> None:
        """Refuse a call beyond a limit of the key with status 403, which clients do not retry.

        Calls in flight count as turns. ``limit``, which ends the program, is set only once answered turns, or the
        longest sequence's ``tokens``, reach the limit.
        """
        if grant.max_turns is not None and turns + len(self.in_flight) > grant.max_turns:
            limit, reached = "max_turns", turns >= grant.max_turns
        elif grant.max_total_tokens is not None and tokens >= grant.max_total_tokens:
            limit, reached = "max_total_sequence_length", True
        else:
            return
        if reached:
            self.limit = limit
        why = f"the rollout {'has reached' if reached else 'would exceed, with its calls in flight,'} its {limit}"
        raise ProblemError(403, "limit-reached", why)
