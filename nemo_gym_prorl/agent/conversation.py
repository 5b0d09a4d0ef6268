# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Conversation of a rollout with its model server, sent in full or incrementally.

A Gym model server receives the whole history with token ids in each turn, so a rollout of n turns sends O(n²) bytes.
``prorl_model`` stores the tokens of a rollout itself. The server echoes the header ``X-Rollout-Tokens: deferred`` in
its first answer. Each later turn then carries only the new observations and the id of the previous answer.

The tokens that a trainer needs are fetched once, after the last turn. A failed or cancelled rollout fetches the tokens
of its complete turns.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import orjson
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, StrictInt, ValidationError, model_validator

from nemo_gym_prorl.agent.gym_http import (
    CookieJar,
    GymServer,
    quote_header,
    quote_segment,
    require_json,
    require_ok,
)
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.http.client import HttpAnswer
from nemo_gym_prorl.http.problem_document import field_errors
from nemo_gym_prorl.http.routed_experts import RoutedExperts
from nemo_gym_prorl.rollout.gym_rows import TurnTokens, shared_length
from nemo_gym_prorl.rollout.job import Trajectory
from nemo_gym_prorl.rollout.turn_records import TurnTiming


DEFERRAL = "X-Rollout-Tokens"
KEEPS_TOKENS = "keeps tokens"
"""Trait of a model server that has echoed the header :data:`DEFERRAL` at least once."""

_FETCH_ATTEMPTS = 3
_FETCH_PAUSE_S = 0.5  # between attempts, enough to reconnect after a dropped connection


@dataclass(slots=True)
class _Turn:
    """Turn whose tokens the model server keeps.

    Attributes:
        number: index of the turn in the rollout.
        last_item: last output item of the turn, on which Gym stores the turn's tokens.
        incomplete: whether the turn ended early, so that the server may have sampled no tokens.
    """

    number: int
    last_item: dict[str, Any]
    incomplete: bool


class _Sequence(BaseModel):
    """Token ids and log-probs of one branch of a rollout; strictly validated, since trainers train on them."""

    ids: list[Annotated[StrictInt, Field(ge=0, lt=2**31)]]
    log_probs: list[FiniteFloat]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.ids) != len(self.log_probs):
            raise ValueError(f"{len(self.ids)} ids but {len(self.log_probs)} log-probs")
        return self


class _AnswerSpan(BaseModel):
    """Position of an answer's sampled tokens, ``start`` to before ``end``, in the sequence with index ``sequence``."""

    sequence: NonNegativeInt
    start: NonNegativeInt
    end: NonNegativeInt
    weight_versions: tuple[str | None, str | None] | None = None
    routed_experts: str | None = None


class _Tokens(BaseModel):
    """All tokens of a rollout, as the model server returns them; ``answers`` is keyed by the id of the answer."""

    sequences: list[_Sequence]
    answers: dict[str, _AnswerSpan]
    run: str | None = None
    log_probs: list[str] = Field(default_factory=list, max_length=4)
    token_in_rate: FiniteFloat | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, span in self.answers.items():
            if span.sequence >= len(self.sequences):
                raise ValueError(f"answer {name!r} lies in sequence {span.sequence} of {len(self.sequences)}")
            if not 0 < span.start <= span.end <= len(self.sequences[span.sequence].ids):
                raise ValueError(f"answer {name!r} lies at {span.start} to {span.end}, not within its sequence")
            if span.routed_experts is not None:
                RoutedExperts.read(span.routed_experts)
        return self


@dataclass(frozen=True, slots=True)
class SavedTurns:
    """Turns that a model server has sampled for a rollout, enough to resume the rollout at another server.

    Attributes:
        batches: JSON lists of turns without brackets, one per checkpoint; empty if the server keeps no tokens.
        began: the server's opaque value ``began``, sent back by :meth:`Conversation.restore`.
        answers: ids of the server's answers, one per turn.
        waited_s: seconds for which turns of this attempt have waited for a backend.
    """

    batches: tuple[bytes, ...] = ()
    began: str | None = None
    answers: tuple[str, ...] = ()
    waited_s: float = 0.0

    @property
    def new(self) -> bytes:
        """Last element of :attr:`batches`: the turns since the checkpoint before; empty without batches."""
        return self.batches[-1] if self.batches else b""


class Conversation:
    """Conversation of one attempt of a rollout with one model server.

    Args:
        rollout_id: id of the attempt; each attempt samples its own tokens.
        group: group of the rollout, for which the server prefers one backend, since siblings share a prompt; ``None``
            without a group.
        run: training run whose backends sample the rollout; ``None`` for the server's own backends.

    Attributes:
        weight_versions: after :meth:`fetch_tokens`, the labels of the weights that sampled the first and last token
            of each turn: ``{"turn": 0, "first": "step-7", "last": "step-8"}``; ``None`` for a backend without a label.
        log_probs: after :meth:`fetch_tokens`, the modes of the log-probs that the server reports.
        token_in_rate: after :meth:`fetch_tokens`, the share of turns after the first whose prompt continued tokens of
            the rollout; ``None`` if the server does not report the share.
    """

    def __init__(self, model: GymServer, rollout_id: str, group: str | None = None, run: str | None = None) -> None:
        self._model = model
        self._run = run
        self._path = rollout_path(rollout_id)
        self._jar = CookieJar()
        self._headers = {"X-Rollout-Id": quote_header(rollout_id), DEFERRAL: "deferred"}
        if group is not None:
            self._headers["X-Rollout-Group"] = quote_header(group)
        if run is not None:
            self._headers["X-Rollout-Run"] = quote_header(run)
        self._items: list[dict[str, Any]] = []
        self._previous: str | None = None
        self._requests = 0
        self._turns: dict[str, _Turn] = {}
        self.weight_versions: list[dict[str, Any]] = []
        self.log_probs: list[str] = []
        self.token_in_rate: float | None = None
        self._saved = SavedTurns()

    async def save(self) -> SavedTurns:
        """Fetch the turns that were sampled since the last call, and return all turns so far.

        Raises:
            CallerError: the server cannot export turns, or refuses to.
            InfrastructureError: the server fails, or has lost the rollout.
        """
        if self._previous is None:
            return self._saved
        what = f"turns of the rollout at {self._model.name}"
        after = f"?after={quote_segment(self._saved.answers[-1])}" if self._saved.answers else ""
        answer = await self._model.call("GET", f"{self._path}/turns{after}", None, self._jar)
        if answer.status in (404, 405):
            raise CallerError(f"{self._model.name} cannot export the turns of a rollout: upgrade prorl_model")
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        export = require_json(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        ids = (turn["id"] for turn in export["turns"])
        new = orjson.dumps(export["turns"])[1:-1]
        self._saved = SavedTurns(
            (*self._saved.batches, new), export["began"], (*self._saved.answers, *ids), export["waited_s"]
        )
        return self._saved

    async def restore(
        self, saved: SavedTurns, prompt: Any, output: list[dict[str, Any]], steps: Sequence[TurnTiming]
    ) -> None:
        """Import saved turns into the model server under this attempt's id.

        Args:
            saved: result of :meth:`save`, possibly of another conversation.
            prompt: the row's input.
            output: output items of the trajectory that the policy has received.
            steps: timings of the saved turns, one per turn.

        Raises:
            InfrastructureError: the server fails or refuses the turns.
        """
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._items = [*prompt, *output]
        if not saved.batches:
            return
        what = f"{self._model.name} importing the turns of a rollout"
        about = {"run": self._run, "began": saved.began}
        body = orjson.dumps({**about, "turns": orjson.Fragment(b"[%b]" % b",".join(filter(None, saved.batches)))})
        answer = await self._model.call("PUT", f"{self._path}/turns", body, self._jar)
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED, InfrastructureError)
        self._model.traits.add(KEEPS_TOKENS)
        start = 0
        for number, (answer_id, step) in enumerate(zip(saved.answers, steps, strict=True)):
            wrote = output[start : start + step["items"]]
            self._turns[answer_id] = _Turn(number, wrote[-1], incomplete=False)
            start += len(wrote) + sum(item.get("type") == "function_call" for item in wrote)
        self._requests, self._previous = len(saved.answers), saved.answers[-1]
        self._saved = replace(saved, waited_s=0.0)

    async def turn(self, params: dict[str, Any], new: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Sample the policy's next turn.

        Args:
            params: the row's request, without its input.
            new: input items since the last turn; before the first turn, the prompt.

        Returns:
            A Responses API response, or ``None`` if the prompt no longer fits the policy's context.

        Raises:
            CallerError: the server refuses the row's request.
            InfrastructureError: the server fails, has lost the rollout, or does not return a response object.
        """
        self._items += new
        if self._previous is None:
            request = {**params, "input": self._items}
        else:
            request = {**params, "input": new, "previous_response_id": self._previous}
        what = f"{self._model.name} /v1/responses"
        number, self._requests = self._requests, self._requests + 1
        answer = await self._model.call("POST", "/v1/responses", request, self._jar, self._headers)
        if answer.status == 400 and b"context length" in answer.body:
            return None
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        turn = require_json(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        if not isinstance(turn, dict) or not isinstance(turn.get("output"), list):
            raise InfrastructureError(
                f"{what} did not return a Responses API object: {answer.text(500)}",
                kind=FailureKind.AGENT_REQUEST_FAILED,
            )
        self._items += turn["output"]
        if answer.headers.get(DEFERRAL) == "deferred":
            self._model.traits.add(KEEPS_TOKENS)
            self._add_turn(turn, number, what)
        elif self._run is not None:
            raise self._runs_unsupported()
        elif self._previous is not None:
            # The request had only the new items, so a server without the earlier turns answered out of context.
            raise InfrastructureError(
                f"{what} no longer keeps the tokens of the rollout: the model server was replaced",
                kind=FailureKind.SESSION_LOST,
            )
        return turn

    def _add_turn(self, turn: dict[str, Any], number: int, what: str) -> None:
        answer_id = turn.get("id")
        if not isinstance(answer_id, str) or answer_id in self._turns:
            raise InfrastructureError(
                f"{what} answered with id {answer_id!r:.200}, but each turn needs a unique string id",
                kind=FailureKind.AGENT_REQUEST_FAILED,
            )
        self._previous = answer_id
        if turn["output"]:
            self._turns[answer_id] = _Turn(number, turn["output"][-1], bool(turn.get("incomplete_details")))

    async def fetch_tokens(self, trajectory: Trajectory) -> None:
        """Fetch deferred tokens into the trajectory; no-op if the server defers none. Idempotent; tried 3 times.

        Raises:
            InfrastructureError: the server fails, has lost the rollout, or lacks the tokens of one of its answers.
        """
        if self._previous is None:
            return
        tokens = await self._fetch()
        if tokens.run != self._run and self._run is not None:
            raise self._runs_unsupported()
        self.weight_versions, self.log_probs = [], tokens.log_probs
        self.token_in_rate = tokens.token_in_rate
        index_of = {id(item): index for index, item in enumerate(trajectory.response["output"])}
        turns, before, end = list[TurnTokens](), list[int](), 0
        for answer_id, turn in self._turns.items():
            if (span := tokens.answers.get(answer_id)) is None:
                if turn.incomplete:
                    continue
                raise InfrastructureError(
                    f"{self._model.name} keeps no tokens of its answer {answer_id!r:.200}",
                    kind=FailureKind.AGENT_REQUEST_FAILED,
                )
            sequence = tokens.sequences[span.sequence]
            ids, log_probs = sequence.ids, sequence.log_probs
            start, stop, experts = span.start, span.end, span.routed_experts
            kept = min(end, start)
            if ids is not before:
                kept = shared_length(before[:kept], ids)
            if experts is not None and RoutedExperts.read(experts).rows < stop - kept + bool(kept):
                raise InfrastructureError(
                    f"{self._model.name} keeps too few routed experts of its answer {answer_id!r:.200}",
                    kind=FailureKind.AGENT_REQUEST_FAILED,
                )
            numbers = array("i", ids[kept:start]), array("i", ids[start:stop]), array("d", log_probs[start:stop])
            turns.append(TurnTokens(index_of[id(turn.last_item)], kept, *numbers, experts))
            if stop > start:
                before, end = ids, stop
            first, last = span.weight_versions or (None, None)
            self.weight_versions.append({"turn": turn.number, "first": first, "last": last})
        trajectory.tokens = turns

    def _runs_unsupported(self) -> InfrastructureError:
        return InfrastructureError(
            f"{self._model.name} does not support runs (the row names {self._run!r}): use a current prorl_model",
            kind=FailureKind.AGENT_REQUEST_FAILED,
        )

    async def forget(self) -> None:
        """Delete the rollout at the server: its token ledger and its slot at a backend.

        A rollout that is cancelled in its first turn cannot know whether the server keeps its tokens. The trait of the
        server (:data:`KEEPS_TOKENS`) then decides whether deletion is needed.

        Raises:
            InfrastructureError: the server cannot be reached, or reports a failure.
        """
        if self._requests and (self._previous is not None or KEEPS_TOKENS in self._model.traits):
            await self._model.call("DELETE", self._path, None, self._jar)

    async def _fetch(self) -> _Tokens:
        what = f"tokens of the rollout at {self._model.name}"
        for left in reversed(range(_FETCH_ATTEMPTS)):
            try:
                answer = await self._model.call("GET", f"{self._path}/tokens", None, self._jar)
                require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED, InfrastructureError)
                return _tokens(answer, what)
            except InfrastructureError as error:
                if not left or error.kind is FailureKind.SESSION_LOST:
                    raise
            await asyncio.sleep(_FETCH_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")


def _tokens(answer: HttpAnswer, what: str) -> _Tokens:
    try:
        return _Tokens.model_validate_json(answer.body)
    except ValidationError as error:
        wrong = field_errors(error.errors())[0]
        raise InfrastructureError(
            f"{what} are invalid: {wrong['field']}: {wrong['message']}", kind=FailureKind.AGENT_REQUEST_FAILED
        ) from error


async def fetch_waited_s(model: GymServer, rollout_id: str) -> float:
    """Return the seconds for which turns of a rollout have waited for a backend; 0.0 if the server reports none.

    Raises:
        InfrastructureError: the server cannot be reached, or reports a failure.
    """
    answer = await model.call("GET", f"{rollout_path(rollout_id)}/waited", None, CookieJar())
    if not answer.ok:  # Gym's own model servers have no such route
        return 0.0
    waited = require_json(answer, f"{model.name} /waited", FailureKind.AGENT_REQUEST_FAILED)
    return float(waited.get("waited_s", 0.0))


def rollout_path(rollout_id: str) -> str:
    """Return the URL path of a rollout at ``prorl_model``."""
    return f"/v1/rollouts/{quote_segment(rollout_id)}"
