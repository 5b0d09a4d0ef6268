# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Route for a program's rollout: its main branch as a Gym response, and all branches.

A program writes no trajectory that this service could read, so both come from the ledger
(:mod:`~nemo_gym_prorl.policy.tokens.branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import orjson
from fastapi import APIRouter, Depends, Response

from nemo_gym_prorl.http.problems import no_other_parameters, problem_responses
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.http.turn_requests import answer_fields
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.text.template import Message, is_malformed, text_of
from nemo_gym_prorl.policy.text.turn_scanner import Parsed
from nemo_gym_prorl.policy.tokens.branches import branches_of, token_in_rate, training_traces
from nemo_gym_prorl.policy.tokens.conversations import TOKEN_FIELDS, ConversationNode
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn
from nemo_gym_prorl.policy.turns import PolicyAnswer


type Items = Callable[[Message], list[dict[str, Any]]]
"""Function that converts an assistant message in chat form to items of a response, as Gym's converter writes items."""


def traces_router(runtime: PolicyRuntime, items: Items) -> APIRouter:
    """Return the route ``/v1/rollouts/{rollout}/traces``."""
    router = APIRouter(dependencies=[Depends(no_other_parameters)])

    @router.get("/v1/rollouts/{rollout}/traces", response_model=dict[str, Any], responses=problem_responses(410))
    async def traces(rollout: str) -> Response:
        """Return the rollout's main branch as a response with tokens, all branches, and Gym's `training_traces`."""
        return Response(orjson.dumps(_traces(runtime, rollout, items)), media_type="application/json")

    return router


def _traces(runtime: PolicyRuntime, rollout: str, items: Items) -> dict[str, Any]:
    """Return the route's answer; ``weight_versions`` has the labels of all trained turns in the order of sampling."""
    state = runtime.service.rollout(rollout)
    turns, branches = state.history.ledger.turns, branches_of(state.history)
    nodes = branches[0].nodes if branches else ()
    # A turn that another server sampled has no answer id here, so its number replaces the id.
    call_ids = {turn: f"turn-{number}" for number, turn in enumerate(turns)}
    call_ids |= {node.turn: answer_id for answer_id, node in state.answers.items()}
    trained = frozenset[LedgerTurn]().union(*(branch.owned for branch in branches if branch.trained))
    labels = [(turn.weight_version, turn.last_version) for turn in turns if turn in trained]
    sampled = [state.history.node_of(turn).messages[-1] for turn in turns]
    response, sizes = _response(runtime, rollout, nodes, items)
    return {
        "response": response,
        "steps": [_step(node.turn, size, *state.timings[node.turn]) for node, size in zip(nodes, sizes, strict=True)]
        if state.timings.keys() >= {node.turn for node in nodes}
        else [],
        "tool_calls": sum(len(message.get("tool_calls") or ()) for message in sampled),
        "input": [*_items(nodes[0].messages[:-1], items)] if nodes else [],
        "branches": [branch.summary() for branch in branches],
        "training_traces": training_traces(rollout, branches, call_ids),
        "token_in_rate": token_in_rate(state.history),
        "log_probs": sorted(state.log_prob_modes),
        "weight_versions": [{"turn": n, "first": first, "last": last} for n, (first, last) in enumerate(labels)],
    }


def _step(turn: LedgerTurn, size: int, started_at: float, seconds: float) -> dict[str, Any]:
    """Return a turn in the form of ``rollout.steps``, without tools: a program does not report when it ran tools."""
    about = {"started_at": started_at, "seconds": round(seconds, 6), "items": size, "tools": []}
    tokens = {"input_tokens": turn.start, "output_tokens": len(turn.sampled)}
    return about | tokens | {"weights": (turn.weight_version, turn.last_version)}


def _response(
    runtime: PolicyRuntime, rollout: str, nodes: Sequence[ConversationNode], items: Items
) -> tuple[dict[str, Any], list[int]]:
    """Return a branch's turns as a response, and the number of items that each turn added to the policy's output."""
    output: list[dict[str, Any]] = []
    sizes: list[int] = []
    seen = len(nodes[0].messages) - 1 if nodes else 0
    for node in nodes:
        *new, message = node.messages[seen:]
        output += _items(new, items)
        own_items = [*_items((*(one for one in new if one["role"] == "assistant"), message), items)]
        sizes.append(len(own_items))
        output += _items([message], items)
        # The fragment also adds the two other token fields (PolicyService.token_fields).
        tokens = runtime.service.token_fields(rollout, node.turn)
        output[-1]["prompt_token_ids"] = orjson.Fragment(b"".join(tokens))
        if node.turn.routed_experts is not None:
            output[-1]["routed_experts"] = node.turn.routed_experts
        seen = len(node.messages)
    tools = [{"type": "function", "strict": None, **tool["function"]} for node in nodes[:1] for tool in node.tools]
    last = nodes[-1].turn if nodes else None
    finish = last.finish if last else Finish.STOP
    fields = answer_fields(PolicyAnswer(f"resp_{uuid4().hex}", {}, Parsed(None, "", ()), last, finish, 0), None)
    read, written = sum(node.turn.start for node in nodes), sum(len(node.turn.sampled) for node in nodes)
    fields["usage"] |= {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    fixed = {"object": "response", "parallel_tool_calls": True, "tool_choice": "auto"}
    return fields | fixed | {"model": runtime.config.model, "output": output, "tools": tools}, sizes


def _items(messages: Iterable[Message], items: Items) -> Iterator[dict[str, Any]]:
    for message in messages:
        text = message.get("content") or ""
        match message["role"]:
            case "assistant":
                plain = {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
                written = items({**plain, "content": text_of(text)})
                calls = (item for item in written if item["type"] == "function_call")
                for item, call in zip(calls, message.get("tool_calls") or (), strict=True):
                    if is_malformed(call["function"]):
                        item["status"] = "incomplete"
                yield from written
            case "tool":
                call_id = str(message.get("tool_call_id", ""))
                yield {"type": "function_call_output", "call_id": call_id, "output": text_of(text)}
            case role:
                if isinstance(text, list):
                    text = [{"type": "input_text", "text": part["text"]} for part in text]
                yield {"type": "message", "role": role, "content": text}
