# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Roles of branches, owners of sampled tokens, Gym's training traces, and the share of turns that continue tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.tokens.branches import Branch, branches_of, token_in_rate, training_traces
from nemo_gym_prorl.policy.tokens.conversations import ConversationIndex, ConversationNode
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn
from nemo_gym_prorl.rollout.gym_rows import trace_turns


SHELL = ({"type": "function", "function": {"name": "shell"}},)
LOOK = ({"type": "function", "function": {"name": "look"}},)


class Rollout:
    """A rollout whose turns each sample one token, which is the number of the turn."""

    def __init__(self) -> None:
        self.history = ConversationIndex()
        self.nodes: list[ConversationNode] = []

    def turn(
        self,
        before: int | None = None,
        asked: str = "go",
        *,
        system: str = "agent",
        tools: tuple[Any, ...] = SHELL,
        sampled: int = 1,
        experts: str | None = None,
        repeats: str | None = None,
        rewritten: bool = False,
    ) -> int:
        """Sample a turn after the turn ``before``, and return its number.

        Args:
            before: the continued turn; ``None`` starts a conversation.
            asked: the new user message.
            system: system prompt of a new conversation.
            tools: tools of the turn.
            sampled: number of sampled tokens.
            experts: routed experts of the turn.
            repeats: an assistant message that the agent sends again as text.
            rewritten: the prompt is rendered anew although the conversation goes on.
        """
        number = len(self.nodes)
        node = None if before is None else self.nodes[before]
        new: list[dict[str, Any]] = [] if node else [{"role": "system", "content": system}]
        if repeats is not None:
            new.append({"role": "assistant", "content": repeats})
        new.append({"role": "user", "content": asked})
        parent = None if node is None or rewritten else node.turn
        observed = [1000 + number if asked == "go" else sum(asked.encode())]
        generation = Generation([number] * sampled, [-1.0 - number] * sampled, Finish.STOP)
        turn = self.history.ledger.append(parent, observed, generation)
        if experts is not None:
            object.__setattr__(turn, "routed_experts", experts)
        said = {"role": "assistant", "content": f"answer {number}"}
        self.nodes.append(self.history.record(node, new, said, turn, tools))
        return number

    def branches(self) -> list[Branch]:
        return branches_of(self.history)

    def roles(self) -> dict[str, list[list[int]]]:
        """Return the branches as lists of turn numbers, by role."""
        numbers = {node.turn: number for number, node in enumerate(self.nodes)}
        found: dict[str, list[list[int]]] = {}
        for branch in self.branches():
            found.setdefault(branch.role, []).append([numbers[node.turn] for node in branch.nodes])
        return found

    def traces(self) -> Any:
        ids: dict[LedgerTurn, str] = {node.turn: f"call {number}" for number, node in enumerate(self.nodes)}
        return training_traces("r", self.branches(), ids)


TITLE: dict[str, Any] = {"system": "titles", "tools": ()}
HELPER: dict[str, Any] = {"system": "helper", "tools": LOOK}
NEW: dict[str, Any] = {}


def after(before: int, **more: Any) -> dict[str, Any]:
    return {"before": before, **more}


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, list[list[int]]], float | None]] = {
    "one line": ([NEW, after(0), after(1)], {"main": [[0, 1, 2]]}, 1.0),
    "a title first": ([TITLE, NEW, after(1)], {"main": [[1, 2]], "side": [[0]]}, 1.0),
    "a title last": ([NEW, after(0), TITLE], {"main": [[0, 1]], "side": [[2]]}, 1.0),
    "no tools at all": ([TITLE, {"tools": ()}], {"main": [[1]], "side": [[0]]}, None),
    "compacted twice": ([NEW, after(0), NEW, after(2), NEW], {"main": [[4]], "earlier": [[2, 3], [0, 1]]}, 1.0),
    "compacted by a call without tools": (
        [NEW, after(0), {"system": "summaries", "tools": ()}, NEW],
        {"main": [[3]], "earlier": [[0, 1]], "side": [[2]]},
        1.0,
    ),
    "a sub-agent": ([NEW, HELPER, after(1), after(0)], {"main": [[0, 3]], "subagent": [[1, 2]]}, 1.0),
    "a sub-agent like the agent, then a compaction": (
        [NEW, NEW, after(1), after(0), NEW],
        {"main": [[4]], "earlier": [[0, 3]], "subagent": [[1, 2]]},
        1.0,
    ),
    "a retry": (
        [NEW, after(0, asked="on"), after(0, asked="on"), after(2)],
        {"main": [[0, 2, 3]], "retry": [[0, 1]]},
        1.0,
    ),
    "a retry of the first turn": ([{"asked": "on"}, {"asked": "on"}], {"main": [[1]], "retry": [[0]]}, None),
    "an edit of the past": (
        [NEW, after(0), after(1), after(0, asked="edited", repeats="answer 1")],
        {"main": [[0, 3]], "earlier": [[0, 1, 2]]},
        2 / 3,
    ),
    "a template that rewrites": (
        [NEW, after(0, rewritten=True), after(1, rewritten=True)],
        {"main": [[2]], "earlier": [[1], [0]]},
        0.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_branch_is_follows_from_when_and_how_it_was_sampled(case: str) -> None:
    rollout, (turns, roles, rate) = Rollout(), CASES[case]
    for turn in turns:
        rollout.turn(**turn)
    assert rollout.roles() == roles
    assert token_in_rate(rollout.history) == rate


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    rollout = Rollout()
    for number in range(draw(st.integers(1, 9))):
        rollout.turn(
            draw(st.sampled_from([None, *range(number)])),
            draw(st.sampled_from(["go", "on"])),
            system=draw(st.sampled_from(["agent", "helper"])),
            tools=draw(st.sampled_from([SHELL, LOOK, ()])),
            sampled=draw(st.integers(0, 2)),
            rewritten=draw(st.booleans()),
        )
    return rollout


@given(rollout=rollouts())
def test_each_sampled_token_has_exactly_one_owner(rollout: Rollout) -> None:
    branches = rollout.branches()
    owned = [turn for branch in branches for turn in branch.owned]
    assert len(owned) == len(set(owned)) == len(rollout.nodes)
    assert set(owned) == {node.turn for node in rollout.nodes}
    main, *others = branches
    assert main.role == "main"
    assert main.owned == {node.turn for node in main.nodes}
    assert all(branch.role != "main" and branch.owned for branch in others)
    trained = {turn for branch in branches if branch.trained for turn in branch.owned}
    for branch in branches:
        assert {node.turn for node in branch.nodes} <= trained or not branch.trained


@given(rollout=rollouts())
def test_traces_have_the_tokens_of_each_trained_turn_once(rollout: Rollout) -> None:
    """The rules are those of Gym's validator."""
    trained = {turn for branch in rollout.branches() if branch.trained for turn in branch.owned}
    sampled = {f"call {n}": node.turn for n, node in enumerate(rollout.nodes) if node.turn.sampled}
    wanted = {call for call, turn in sampled.items() if turn in trained}
    envelope = rollout.traces()
    if envelope is None:
        assert sum(branch.trained and any(t.sampled for t in branch.owned) for branch in rollout.branches()) < 2
        return
    owners = []
    for trace in envelope["traces"]:
        tokens, log_probs, mask = trace["token_ids"], trace["generation_logprobs"], trace["loss_mask"]
        own = [[*pair] for *pair, on in zip(tokens, log_probs, mask, strict=True) if on]
        runs = [[*pair] for turn in trace_turns(trace) for pair in zip(turn.sampled, turn.log_probs, strict=True)]
        assert runs == own
        assert runs
        for span in trace["sampled_spans"]:
            owners.append(span["model_call_id"])
            turn = sampled[owners[-1]]
            assert tokens[: span["end"]] == turn.sequence()
            assert log_probs[span["start"] : span["end"]] == list(turn.log_probs)
        assert sum(mask) == sum(len(sampled[span["model_call_id"]].sampled) for span in trace["sampled_spans"])
        assert set(trace["model_call_ids"]) <= wanted
    assert len(owners) == len(set(owners))
    assert set(owners) == wanted
    assert len({trace["trace_id"] for trace in envelope["traces"]}) == len(envelope["traces"])


def test_version_1_has_no_field_for_experts() -> None:
    rollout = Rollout()
    rollout.turn()
    rollout.turn(experts="nrlre1:int8:1x1x1:AAAA")
    assert rollout.roles() == {"main": [[1]], "earlier": [[0]]}
    assert rollout.traces() is None
