# SPDX-License-Identifier: Apache-2.0
"""A rollout's conversation with its model server, sent in full or only by what is new.

To any Gym model server each turn is the whole history again, token ids and all: a rollout of n turns sends O(n²). A
server that keeps a rollout's tokens itself (``prorl_model``) says so in its first answer, by echoing the header
``X-Rollout-Tokens: deferred``. From then on a turn carries the new observations and the id of the answer before them;
the token fields that a trainer needs are fetched once, at the end, and put where Gym has them: on the last output item
of each turn.
"""

from __future__ import annotations

from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.handlers.gym_http import CookieJar, GymServer, require_ok


DEFERRAL = "X-Rollout-Tokens"


class Conversation:
    """One rollout at one model server.

    Args:
        model: the server.
        rollout_id: unique per attempt, since each attempt samples anew.
        group: siblings of a group are placed together where that costs nothing.
    """

    def __init__(self, model: GymServer, rollout_id: str, group: str | None = None) -> None:
        self._model = model
        self._rollout_id = rollout_id
        self._jar = CookieJar()
        self._headers = {"X-Rollout-Id": rollout_id, DEFERRAL: "deferred"}
        if group is not None:
            self._headers["X-Rollout-Group"] = group
        self._items: list[dict[str, Any]] = []
        self._previous: str | None = None
        self._last_items: dict[str, dict[str, Any]] = {}

    async def turn(self, params: dict[str, Any], new: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The policy's next turn.

        Args:
            params: the row's request, without its input.
            new: input items since the last turn; at first, the prompt.

        Returns:
            a Responses API response, or ``None`` if the prompt no longer fits the policy's context.

        Raises:
            CallerError: the server refuses the request.
            InfrastructureError: it fails, or answers with something else.
        """
        self._items += new
        if self._previous is None:
            request = {**params, "input": self._items}
        else:
            request = {**params, "input": new, "previous_response_id": self._previous}
        name = self._model.name
        answer = await self._model.call("POST", "/v1/responses", request, self._jar, self._headers)
        if answer.status == 400 and b"context length" in answer.body:
            return None
        if 400 <= answer.status < 500:
            raise CallerError(f"{name} refused the request: HTTP {answer.status}: {answer.text(2000)}")
        require_ok(answer, f"{name} /v1/responses", FailureKind.AGENT_REQUEST_FAILED)
        turn = answer.json()
        if not isinstance(turn, dict) or not isinstance(turn.get("output"), list):
            raise InfrastructureError(
                f"{name} answered no Responses API object: {answer.text(500)}", kind=FailureKind.AGENT_REQUEST_FAILED
            )
        self._items += turn["output"]
        if answer.headers.get(DEFERRAL) == "deferred":
            self._previous = turn["id"]
            if turn["output"]:
                self._last_items[turn["id"]] = turn["output"][-1]
        return turn

    async def settle(self) -> None:
        """Where tokens were deferred: fetch them into the turns' items, and let the server forget the rollout."""
        if self._previous is None:
            return
        path = f"/v1/rollouts/{self._rollout_id}"
        answer = await self._model.call("GET", f"{path}/tokens", None, self._jar)
        require_ok(answer, f"tokens of the rollout at {self._model.name}", FailureKind.AGENT_REQUEST_FAILED)
        kept = answer.json()
        for answer_id, item in self._last_items.items():
            if (place := kept["answers"].get(answer_id)) is None:
                continue  # nothing was sampled for this turn
            sequence = kept["sequences"][place["sequence"]]
            start, end = place["start"], place["end"]
            item["prompt_token_ids"] = sequence["ids"][:start]
            item["generation_token_ids"] = sequence["ids"][start:end]
            item["generation_log_probs"] = sequence["log_probs"][start:end]
        await self._model.call("DELETE", path, None, self._jar)
