# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The turns of a rollout as JSON, so that another model server, or another rollout, can go on from one of them.

Each turn is what it adds to the turn before: messages, observed ids, sampled ids with their log-probs and labels. So
who saves a rollout turn by turn is sent each token once, and what was sampled is never tokenised again. What the chat
template once wrote is not in it, since a process knows that by hashes of its own; it is written again when needed.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.tokens.history import History, Point
from nemo_gym_prorl.policy.tokens.ledger import TokenMismatch


class SavedTurn(BaseModel):
    """One turn. ``continues``: its prompt begins with the whole sequence of the turn before."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(max_length=200, pattern=r"^[!-~]+$")]
    continues: bool
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]]
    observed: list[int]
    sampled: list[int]
    log_probs: list[float]
    weight_versions: tuple[str | None, str | None]
    finish: Finish
    routed_experts: str | None = None


def saved_turns(answers: Mapping[str, Point], after: str | None) -> Iterator[dict[str, Any]]:
    """The turns that follow an answer, or all of them, for orjson; each continues the one before.

    Raises:
        CallerError: they do not: the agent has sampled twice, or edited its past.
    """
    before: Point | None = None
    behind = after is None
    for name, point in answers.items():
        if behind:
            length = len(before.messages) if before else 0
            if before is not None and point.messages[:length] != before.messages:
                raise CallerError(f"answer {name!r} does not continue the one before: only one line can be saved")
            turn = point.turn
            yield {
                "id": name,
                "continues": before is not None and turn.parent is before.turn,
                "messages": point.messages[length:],
                "tools": point.tools,
                "observed": turn.observed.tolist(),
                "sampled": turn.sampled.tolist(),
                "log_probs": turn.log_probs.tolist(),
                "weight_versions": (turn.weight_version, turn.last_version),
                "finish": turn.finish,
                "routed_experts": turn.routed_experts,
            }
        before, behind = point, behind or name == after


def restored(history: History, turns: list[SavedTurn]) -> dict[str, Point]:
    """Have an empty history go on from these turns; the answers by their ids.

    Raises:
        CallerError: what should be their tokens or messages is none.
    """
    answers: dict[str, Point] = {}
    point: Point | None = None
    for saved in turns:
        experts = saved.routed_experts
        generation = Generation(saved.sampled, saved.log_probs, saved.finish, routed_experts=experts)
        parent = point.turn if point is not None and saved.continues else None
        *new, message = saved.messages
        try:
            if message["role"] != "assistant":
                raise ValueError(f"{message['role']!r} is not the policy")
            turn = history.ledger.append(parent, saved.observed, generation, *saved.weight_versions)
            point = answers[saved.id] = history.record(point, new, message, turn, saved.tools)
        except TokenMismatch as error:
            raise CallerError(f"{saved.id!r}: {error.reason}", field="turns") from error
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CallerError(f"{saved.id!r} has what is no message: {error!r:.200}", field="turns") from error
    return answers
