# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout's conversation with its model server, sent in full or only by what is new.

To any Gym model server each turn is the whole history again, token ids and all: a rollout of n turns sends O(n²). A
server that keeps a rollout's tokens itself (``prorl_model``) says so in its first answer, by echoing the header
``X-Rollout-Tokens: deferred``. From then on a turn carries the new observations and the id of the answer before them;
the token fields that a trainer needs are fetched once, at the end, and put where Gym has them: on the last output item
of each turn. The end may also be a cut: the tokens of the turns that were complete are there all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import orjson
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, StrictInt, ValidationError, model_validator

from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, HttpAnswer, in_header, in_path, json_of, require_ok
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.http.problem_document import field_errors
from nemo_gym_prorl.rollout.turns import TurnTiming


DEFERRAL = "X-Rollout-Tokens"
KEEPS_TOKENS = "keeps tokens"
"""Trait of a model server that once echoed the deferral."""

_FETCHES = 3
_FETCH_AGAIN_S = 0.5


@dataclass(slots=True)
class _Turn:
    """A turn whose tokens are at the server."""

    number: int
    last_item: dict[str, Any]
    cut: bool
    """Nothing may have been sampled for it, for lack of context."""


class _Sequence(BaseModel):
    """A branch of a rollout; what is wrong with it would be trained on."""

    ids: list[StrictInt]
    log_probs: list[FiniteFloat]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.ids) != len(self.log_probs):
            raise ValueError(f"{len(self.ids)} ids but {len(self.log_probs)} log-probs")
        return self


class _Place(BaseModel):
    """Where in a sequence an answer lies."""

    sequence: NonNegativeInt
    start: NonNegativeInt
    end: NonNegativeInt
    weight_versions: tuple[str | None, str | None] | None = None
    routed_experts: str | None = None


class _Tokens(BaseModel):
    """All tokens of a rollout, as the server keeps them."""

    sequences: list[_Sequence]
    answers: dict[str, _Place]
    run: str | None = None
    log_probs: list[str] = Field(default_factory=list, max_length=4)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, place in self.answers.items():
            if place.sequence >= len(self.sequences):
                raise ValueError(f"answer {name!r} lies in sequence {place.sequence} of {len(self.sequences)}")
            if not 0 < place.start <= place.end <= len(self.sequences[place.sequence].ids):
                raise ValueError(f"answer {name!r} lies at {place.start} to {place.end}, not within its sequence")
        return self


@dataclass(frozen=True, slots=True)
class SavedTurns:
    """What a model server keeps of a rollout, as it told it bit by bit.

    Attributes:
        told: lists of turns in JSON; none where the server keeps no tokens, which are on the items then.
        began: what it says besides.
        answers: the ids of the turns.
        waited_s: how long they have waited for a backend so far.
    """

    told: tuple[bytes, ...] = ()
    began: str | None = None
    answers: tuple[str, ...] = ()
    waited_s: float = 0.0

    @property
    def new(self) -> bytes:
        """What was told last."""
        return self.told[-1] if self.told else b""


class Conversation:
    """One rollout at one model server.

    Args:
        model: the server.
        rollout_id: unique per attempt, since each attempt samples anew.
        group: siblings of a group are placed together where that costs nothing.
        run: whose backends are to sample it; ``None`` for the server's own.

    Attributes:
        weight_versions: after :meth:`settle`, per turn the labels of the weights that sampled its first and its last
            token: ``{"turn": 0, "first": "step-7", "last": "step-8"}``; ``None`` where the server has no label.
        log_probs: after :meth:`settle`, the modes of the log-probs, where the server tells.
    """

    def __init__(self, model: GymServer, rollout_id: str, group: str | None = None, run: str | None = None) -> None:
        self._model = model
        self._run = run
        self._path = rollout_path(rollout_id)
        self._jar = CookieJar()
        self._headers = {"X-Rollout-Id": in_header(rollout_id), DEFERRAL: "deferred"}
        if group is not None:
            self._headers["X-Rollout-Group"] = in_header(group)
        if run is not None:
            self._headers["X-Rollout-Run"] = in_header(run)
        self._items: list[dict[str, Any]] = []
        self._previous: str | None = None
        self._asked = 0
        self._turns: dict[str, _Turn] = {}
        self.weight_versions: list[dict[str, Any]] = []
        self.log_probs: list[str] = []
        self._saved = SavedTurns()

    async def save(self) -> SavedTurns:
        """What the server keeps of the rollout so far: it tells what is new since the last time.

        Raises:
            CallerError: it can't tell.
            InfrastructureError: it fails, or does not know the rollout any more.
        """
        if self._previous is None:
            return self._saved
        what = f"turns of the rollout at {self._model.name}"
        after = f"?after={in_path(self._saved.answers[-1])}" if self._saved.answers else ""
        answer = await self._model.call("GET", f"{self._path}/turns{after}", None, self._jar)
        if answer.status in (404, 405):
            raise CallerError(f"{self._model.name} tells nobody the turns of a rollout: a newer prorl_model is needed")
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        told = json_of(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        ids = (turn["id"] for turn in told["turns"])
        new = orjson.dumps(told["turns"])[1:-1]
        self._saved = SavedTurns(
            (*self._saved.told, new), told["began"], (*self._saved.answers, *ids), told["waited_s"]
        )
        return self._saved

    async def restore(
        self, saved: SavedTurns, prompt: Any, output: list[dict[str, Any]], steps: Sequence[TurnTiming]
    ) -> None:
        """Go on from what was saved, at this server, under this rollout's name.

        Args:
            saved: by :meth:`save`, perhaps of another conversation.
            prompt: the row's input.
            output: the items since then that the policy knows; they get their tokens in the end.
            steps: of the turns that wrote them.

        Raises:
            InfrastructureError: the server fails.
        """
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._items = [*prompt, *output]
        if not saved.told:
            return
        what = f"{self._model.name} taking a rollout over"
        about = {"run": self._run, "began": saved.began}
        body = orjson.dumps({**about, "turns": orjson.Fragment(b"[%b]" % b",".join(filter(None, saved.told)))})
        answer = await self._model.call("PUT", f"{self._path}/turns", body, self._jar)
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED, InfrastructureError)
        self._model.traits.add(KEEPS_TOKENS)
        place = 0
        for number, (answer_id, step) in enumerate(zip(saved.answers, steps, strict=True)):
            wrote = output[place : place + step["items"]]
            self._turns[answer_id] = _Turn(number, wrote[-1], cut=False)
            place += len(wrote) + sum(item.get("type") == "function_call" for item in wrote)
        self._asked, self._previous = len(saved.answers), saved.answers[-1]
        self._saved = replace(saved, waited_s=0.0)

    async def turn(self, params: dict[str, Any], new: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The policy's next turn.

        Args:
            params: the row's request, without its input.
            new: input items since the last turn; at first, the prompt.

        Returns:
            a Responses API response, or ``None`` if the prompt no longer fits the policy's context.

        Raises:
            CallerError: the server refuses what the row asks for.
            InfrastructureError: it fails, does not know the rollout any more, or answers with something else.
        """
        self._items += new
        if self._previous is None:
            request = {**params, "input": self._items}
        else:
            request = {**params, "input": new, "previous_response_id": self._previous}
        what = f"{self._model.name} /v1/responses"
        number, self._asked = self._asked, self._asked + 1
        answer = await self._model.call("POST", "/v1/responses", request, self._jar, self._headers)
        if answer.status == 400 and b"context length" in answer.body:
            return None
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        turn = json_of(answer, what, FailureKind.AGENT_REQUEST_FAILED)
        if not isinstance(turn, dict) or not isinstance(turn.get("output"), list):
            raise InfrastructureError(
                f"{what} is no Responses API object: {answer.text(500)}", kind=FailureKind.AGENT_REQUEST_FAILED
            )
        self._items += turn["output"]
        if answer.headers.get(DEFERRAL) == "deferred":
            self._model.traits.add(KEEPS_TOKENS)
            self._keep(turn, number, what)
        elif self._run is not None:
            raise self._knows_no_runs()
        elif self._previous is not None:
            # It was asked with what is new alone, and whoever answers now has not seen the rest.
            raise InfrastructureError(
                f"{what} has kept the rollout so far and does not any more: it was replaced",
                kind=FailureKind.SESSION_LOST,
            )
        return turn

    def _keep(self, turn: dict[str, Any], number: int, what: str) -> None:
        answer_id = turn.get("id")
        if not isinstance(answer_id, str) or answer_id in self._turns:
            raise InfrastructureError(
                f"{what} answered with id {answer_id!r:.200}, by which its tokens cannot be told from others",
                kind=FailureKind.AGENT_REQUEST_FAILED,
            )
        self._previous = answer_id
        if turn["output"]:
            self._turns[answer_id] = _Turn(number, turn["output"][-1], bool(turn.get("incomplete_details")))

    async def settle(self) -> None:
        """Where tokens were deferred: fetch them into the turns' items. A fetch is tried again, for it repeats nothing
        and what hangs on it is the whole rollout.

        Raises:
            InfrastructureError: the server fails, does not know the rollout any more, or has others than those
                that it sampled.
        """
        if self._previous is None:
            return
        kept = await self._fetch()
        if kept.run != self._run and self._run is not None:
            raise self._knows_no_runs()
        self.weight_versions, self.log_probs = [], kept.log_probs
        for answer_id, turn in self._turns.items():
            if (place := kept.answers.get(answer_id)) is None:
                if turn.cut:
                    continue
                raise InfrastructureError(
                    f"{self._model.name} keeps no tokens of its answer {answer_id!r:.200}",
                    kind=FailureKind.AGENT_REQUEST_FAILED,
                )
            sequence = kept.sequences[place.sequence]
            turn.last_item["prompt_token_ids"] = sequence.ids[: place.start]
            turn.last_item["generation_token_ids"] = sequence.ids[place.start : place.end]
            turn.last_item["generation_log_probs"] = sequence.log_probs[place.start : place.end]
            if place.routed_experts is not None:
                turn.last_item["routed_experts"] = place.routed_experts
            first, last = place.weight_versions or (None, None)
            self.weight_versions.append({"turn": turn.number, "first": first, "last": last})

    def _knows_no_runs(self) -> InfrastructureError:
        return InfrastructureError(
            f"{self._model.name} knows nothing of run {self._run!r}: a prorl_model is needed, and not an older one",
            kind=FailureKind.AGENT_REQUEST_FAILED,
        )

    async def forget(self) -> None:
        """Have the server drop what it keeps of the rollout: the ledger, and the place at its backend. Also after a
        cut in the first turn, when only other rollouts can tell that it keeps anything.

        Raises:
            InfrastructureError: it cannot be reached.
        """
        if self._asked and (self._previous is not None or KEEPS_TOKENS in self._model.traits):
            await self._model.call("DELETE", self._path, None, self._jar)

    async def _fetch(self) -> _Tokens:
        what = f"tokens of the rollout at {self._model.name}"
        for left in reversed(range(_FETCHES)):
            try:
                answer = await self._model.call("GET", f"{self._path}/tokens", None, self._jar)
                require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED, InfrastructureError)
                return _tokens(answer, what)
            except InfrastructureError as error:
                if not left or error.kind is FailureKind.SESSION_LOST:
                    raise
            await asyncio.sleep(_FETCH_AGAIN_S)
        raise AssertionError("the last try returns or raises")


def _tokens(answer: HttpAnswer, what: str) -> _Tokens:
    try:
        return _Tokens.model_validate_json(answer.body)
    except ValidationError as error:
        wrong = field_errors(error.errors())[0]
        raise InfrastructureError(
            f"{what} are none that fit: {wrong['field']}: {wrong['message']}", kind=FailureKind.AGENT_REQUEST_FAILED
        ) from error


async def waited(model: GymServer, rollout_id: str) -> float:
    """Seconds that turns of a rollout have waited so far because the policy could not act: for a backend, or through
    a pause. 0.0 where the server does not say.

    Raises:
        InfrastructureError: it cannot be reached.
    """
    answer = await model.call("GET", f"{rollout_path(rollout_id)}/waited", None, CookieJar())
    said = None
    if answer.ok:
        with contextlib.suppress(ValueError):
            said = answer.json()
    seconds = said.get("waited_s") if isinstance(said, dict) else None
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return 0.0
    return max(0.0, float(seconds))


def rollout_path(rollout_id: str) -> str:
    """Where a model server that keeps tokens has a rollout."""
    return f"/v1/rollouts/{in_path(rollout_id)}"
