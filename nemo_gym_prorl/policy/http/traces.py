# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Route for the trained branch of a rollout as a Gym response, and for all its branches.

A program that runs on its own writes no trajectory that this service could read. The ledger has the conversation, so
the response is written from the main branch of :mod:`~nemo_gym_prorl.policy.tokens.branches`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Response

from nemo_gym_prorl.http.problems import no_other_parameters, problem_responses
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.template import Message, is_malformed, text_of
from nemo_gym_prorl.policy.tokens.branches import branches_of, token_in_rate, training_traces
from nemo_gym_prorl.policy.tokens.conversations import TOKEN_FIELDS, ConversationNode


type Items = Callable[[Message], list[dict[str, Any]]]
"""Converts an assistant message in chat form to items of a response, as Gym writes them."""


def traces_router(runtime: PolicyRuntime, items: Items) -> APIRouter:
    """Return the route ``/v1/rollouts/{rollout}/traces``."""
    router = APIRouter(dependencies=[Depends(no_other_parameters)])

    @router.get("/v1/rollouts/{rollout}/traces", response_model=dict[str, Any], responses=problem_responses(410))
    async def traces(rollout: str) -> Response:
        """The rollout's trained branch as a response with tokens, its branches, and Gym's `training_traces`."""
        told = rollout_traces(runtime.service, rollout, runtime.config.model, items)
        return Response(orjson.dumps(told), media_type="application/json")

    return router


def rollout_traces(service: PolicyService, rollout: str, model: str, items: Items) -> dict[str, Any]:
    """Return a rollout's response, branches and training traces, for orjson.

    ``weight_versions`` has the labels of all trained turns in the order of sampling. ``training_traces`` is ``None``
    if the response has all trained tokens.
    """
    state = service.rollout(rollout)
    branches = branches_of(state.history)
    turns = state.history.ledger.turns
    # A turn that another server sampled has no answer here.
    call_ids = {turn: f"turn-{number}" for number, turn in enumerate(turns)}
    call_ids |= {node.turn: answer_id for answer_id, node in state.answers.items()}
    trained = {turn for branch in branches if branch.role.trained for turn in branch.owned}
    nodes = branches[0].nodes if branches else ()
    return {
        "response": _response(service, rollout, model, nodes, items),
        "input": [*_items(nodes[0].messages[:-1], items)] if nodes else [],
        "branches": [branch.summary() for branch in branches],
        "training_traces": training_traces(rollout, branches, call_ids),
        "token_in_rate": token_in_rate(state.history),
        "counts": asdict(state.counts),
        "run": state.run,
        "log_probs": sorted(state.log_prob_modes),
        "weight_versions": [
            {"turn": number, "first": turn.weight_version, "last": turn.last_version}
            for number, turn in enumerate(turn for turn in turns if turn in trained)
        ],
    }


def _response(
    service: PolicyService, rollout: str, model: str, nodes: tuple[ConversationNode, ...], items: Items
) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    seen = len(nodes[0].messages) - 1 if nodes else 0
    for node in nodes:
        *new, message = node.messages[seen:]
        output += [*_items(new, items), *_turn_items(service, rollout, node, message, items)]
        seen = len(node.messages)
    prompts, sampled = sum(node.turn.start for node in nodes), sum(len(node.turn.sampled) for node in nodes)
    cut = bool(nodes) and nodes[-1].turn.finish is not Finish.STOP
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": float(int(time.time())),
        "model": model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "strict": None, **tool["function"]} for tool in (nodes[0].tools if nodes else ())
        ],
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": prompts,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompts + sampled,
        },
    }


def _turn_items(
    service: PolicyService, rollout: str, node: ConversationNode, message: Message, items: Items
) -> list[dict[str, Any]]:
    """Return a sampled turn's items with the turn's tokens on the last one."""
    written = items(dict(message))
    calls = (item for item in written if item["type"] == "function_call")
    for item, call in zip(calls, message.get("tool_calls") or (), strict=True):
        if is_malformed(call["function"]):
            item["status"] = "incomplete"
    # One JSON fragment holds the three token fields, without the first field's name.
    written[-1]["prompt_token_ids"] = orjson.Fragment(b"".join(service.token_fields(rollout, node.turn)))
    if node.turn.routed_experts is not None:
        written[-1]["routed_experts"] = node.turn.routed_experts
    return written


def _items(messages: Iterable[Message], items: Items) -> Iterator[dict[str, Any]]:
    """Yield messages that were not sampled in this branch as items."""
    for message in messages:
        content = message.get("content")
        match message["role"]:
            case "assistant":
                plain = {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
                yield from items({**plain, "content": text_of(content)})
            case "tool":
                yield {
                    "type": "function_call_output",
                    "call_id": str(message.get("tool_call_id", "")),
                    "output": text_of(content),
                }
            case role:
                if isinstance(content, list):
                    content = [{"type": "input_text", "text": part["text"]} for part in content]
                yield {"type": "message", "role": role, "content": content or ""}
