# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of agent programs: limits, repeated requests, keep-alive, and a record of each call.

A client that repeats a request gets the same turn, so a lost connection adds no branch. A stream begins with comments
while its turn waits or is sampled, because programs and proxies drop silent connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nemo_gym_prorl.http.problems import KNOWN_ERRORS, ProblemError
from nemo_gym_prorl.policy.calls import CONTEXT_FULL, DEAD_KEY, LEFT_OUT, RolloutCalls, SharedCall
from nemo_gym_prorl.policy.engines.engine import BackendErred
from nemo_gym_prorl.policy.http.callers import RolloutCaller
from nemo_gym_prorl.policy.http.fields import leave_out_undecided
from nemo_gym_prorl.policy.http.programs import program_error
from nemo_gym_prorl.policy.http.turn_requests import read_object
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.tokens.prompt import PROMPT_IDS


KEEP_ALIVE_S = 3.0  # some clients and proxies drop connections that are silent for 5 s
_MAX_KEPT = 8
"""Maximum of latest calls per rollout that repeated requests can share; a program makes few calls at once."""


type Answer = Callable[[Request, RolloutCaller, bytes], Awaitable[Response]]


class ProgramCalls:
    """Handler of a route's turn requests; records and limits those of programs, and answers repetitions alike."""

    def __init__(self, runtime: PolicyRuntime, answer: Answer) -> None:
        self._runtime, self._answer = runtime, answer

    async def __call__(self, request: Request, caller: RolloutCaller, body: bytes) -> Response:
        streams = _streams(body)
        if not streams and LEFT_OUT.get() is None:
            return await self._answer(request, caller, body)
        caller = replace(caller, streams=streams, deferred=caller.deferred or streams)
        calls = self._runtime.service.calls(caller.rollout, caller.run)
        digest = blake2b(body, key=blake2b(request.url.path.encode()).digest()).digest()
        key, repeats = _repetition(request, digest)
        call = calls.kept.get(key) if repeats else None
        if call is None or call.is_cancelled:
            call = SharedCall(self._call(request, caller, body, calls, digest, key))
            if key:
                calls.kept[key] = call
                if len(calls.kept) > _MAX_KEPT:
                    calls.kept.popitem(last=False)
        return await (_kept_alive(call) if streams else call.answer())

    async def _call(
        self, request: Request, caller: RolloutCaller, body: bytes, calls: RolloutCalls, digest: bytes, key: bytes
    ) -> Response:
        service, grant, answer = self._runtime.service, caller.grant, None
        LEFT_OUT.set(left_out := set[str]())
        number = calls.begin(digest)
        try:
            if grant is not None:
                if grant not in service.keys.values():
                    raise ProblemError(*DEAD_KEY)  # the key was revoked while the body arrived
                ledger = service.ledger(caller.rollout)
                calls.check(grant, len(ledger.turns), ledger.longest)
                leave_out_undecided(request.url.path.removeprefix("/v1/"), given := read_object(body))
                body = orjson.dumps(given)
            answer = await self._answer(request, caller, body)
        except KNOWN_ERRORS as error:
            # The dispatcher refuses a request on which engines err. The program gets the engine's error and may retry.
            answer = program_error(error.__cause__ if isinstance(error.__cause__, BackendErred) else error)
            calls.refused[str(answer.status_code)] += 1
            calls.context_full |= isinstance(error, ProblemError) and error.problem.type.endswith(CONTEXT_FULL)
        finally:
            calls.end(digest, number, answered=answer is not None and answer.status_code < 500)
            calls.dropped.update(left_out)
            if answer is None or answer.status_code >= 400:
                calls.kept.pop(key, None)
        return answer


def _streams(body: bytes) -> bool:
    # "stream" precedes or follows the items, so the items' tokens, which can be 20 MB, are not searched.
    if not any(b'"stream"' in part for part in (body[: body.find(PROMPT_IDS)], body[body.rfind(PROMPT_IDS) :])):
        return False
    with suppress(*KNOWN_ERRORS):  # the route refuses such a body
        return read_object(body).get("stream") is True
    return False


def _repetition(request: Request, digest: bytes) -> tuple[bytes, bool]:
    """Return a key that a request shares with its repetitions, and whether the request may be a repetition.

    Clients send an idempotency key, or a count of retries from 0. The key is empty for a request with neither.
    """
    name, count = (request.headers.get(header) for header in ("idempotency-key", "x-stainless-retry-count"))
    if name is None and count is None:
        return b"", False
    return digest + blake2b((name or "").encode()).digest(), name is not None or count != "0"


async def _kept_alive(call: SharedCall[Response]) -> Response:
    """Return the answer, or after ``KEEP_ALIVE_S`` a stream that sends comments until the call is answered."""
    waiting = asyncio.ensure_future(call.answer())
    try:
        await asyncio.wait([waiting], timeout=KEEP_ALIVE_S)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if waiting.done():
        return waiting.result()

    async def events() -> AsyncIterator[bytes]:
        try:
            while not waiting.done():
                yield b": keep-alive\n\n"
                await asyncio.wait([waiting], timeout=KEEP_ALIVE_S)
            answer = waiting.result()
            yield (
                bytes(answer.body) if answer.status_code < 400 else b"event: error\ndata: %b\n\n" % bytes(answer.body)
            )
        finally:
            waiting.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
