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
            found.setdefault(branch.role.value, []).append([numbers[node.turn] for node in branch.nodes])
        return found

    def traces(self) -> Any:
        ids: dict[LedgerTurn, str] = {node.turn: f"call {number}" for number, node in enumerate(self.nodes)}
        return training_traces("r", self.branches(), ids)


def one_line(rollout: Rollout) -> None:
    rollout.turn(rollout.turn(rollout.turn()))


def a_title_first(rollout: Rollout) -> None:
    rollout.turn(system="titles", tools=())
    rollout.turn(rollout.turn())


def a_title_last(rollout: Rollout) -> None:
    rollout.turn(rollout.turn())
    rollout.turn(system="titles", tools=())


def no_tools_at_all(rollout: Rollout) -> None:
    rollout.turn(system="titles", tools=())
    rollout.turn(tools=())


def compacted_twice(rollout: Rollout) -> None:
    rollout.turn(rollout.turn())
    rollout.turn(rollout.turn())
    rollout.turn()


def compacted_by_a_call_without_tools(rollout: Rollout) -> None:
    first = rollout.turn()
    rollout.turn(first)
    rollout.turn(system="summaries", tools=())
    rollout.turn()


def a_sub_agent_of_its_own_kind(rollout: Rollout) -> None:
    first = rollout.turn()
    rollout.turn(rollout.turn(system="helper", tools=LOOK))
    rollout.turn(first)


def a_sub_agent_like_the_agent_before_a_compaction(rollout: Rollout) -> None:
    first = rollout.turn()
    rollout.turn(rollout.turn())
    rollout.turn(first)
    rollout.turn()


def a_retry(rollout: Rollout) -> None:
    first = rollout.turn()
    rollout.turn(first, "on")
    rollout.turn(rollout.turn(first, "on"))


def a_retry_of_the_first_turn(rollout: Rollout) -> None:
    rollout.turn(asked="on")
    rollout.turn(asked="on")


def an_edit_of_the_past(rollout: Rollout) -> None:
    first = rollout.turn()
    rollout.turn(rollout.turn(first))
    rollout.turn(first, "edited", repeats="answer 1")


def a_template_that_rewrites(rollout: Rollout) -> None:
    rollout.turn(rollout.turn(rollout.turn(), rewritten=True), rewritten=True)


CASES = [
    (one_line, {"main": [[0, 1, 2]]}, 1.0),
    (a_title_first, {"main": [[1, 2]], "side": [[0]]}, 1.0),
    (a_title_last, {"main": [[0, 1]], "side": [[2]]}, 1.0),
    (no_tools_at_all, {"main": [[1]], "side": [[0]]}, None),
    (compacted_twice, {"main": [[4]], "earlier": [[2, 3], [0, 1]]}, 1.0),
    (compacted_by_a_call_without_tools, {"main": [[3]], "earlier": [[0, 1]], "side": [[2]]}, 1.0),
    (a_sub_agent_of_its_own_kind, {"main": [[0, 3]], "subagent": [[1, 2]]}, 1.0),
    (a_sub_agent_like_the_agent_before_a_compaction, {"main": [[4]], "earlier": [[0, 3]], "subagent": [[1, 2]]}, 1.0),
    (a_retry, {"main": [[0, 2, 3]], "retry": [[0, 1]]}, 1.0),
    (a_retry_of_the_first_turn, {"main": [[1]], "retry": [[0]]}, None),
    (an_edit_of_the_past, {"main": [[0, 3]], "earlier": [[0, 1, 2]]}, 2 / 3),
    (a_template_that_rewrites, {"main": [[2]], "earlier": [[1], [0]]}, 0.0),
]


@pytest.mark.parametrize(("happens", "roles", "rate"), CASES, ids=[case[0].__name__ for case in CASES])
def test_what_a_branch_is_follows_from_when_and_how_it_was_sampled(
    happens: Any, roles: dict[str, list[list[int]]], rate: float | None
) -> None:
    rollout = Rollout()
    happens(rollout)
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
    trained = {turn for branch in branches if branch.role.trained for turn in branch.owned}
    for branch in branches:
        assert {node.turn for node in branch.nodes} <= trained or not branch.role.trained


@given(rollout=rollouts())
def test_traces_have_the_tokens_of_each_trained_turn_once(rollout: Rollout) -> None:
    trained = [branch for branch in rollout.branches() if branch.role.trained]
    sampled = {f"call {n}": node.turn for n, node in enumerate(rollout.nodes) if node.turn.sampled}
    wanted = {call for call, turn in sampled.items() if any(turn in branch.owned for branch in trained)}
    traces = rollout.traces()
    if traces is None:
        assert sum(any(turn.sampled for turn in branch.owned) for branch in trained) < 2
        return
    assert (traces["schema_version"], traces["rollout_id"], traces["builder"]) == (1, "r", "prefix_merging")
    owners = []
    for trace in traces["traces"]:
        size = len(trace["token_ids"])
        assert len(trace["generation_logprobs"]) == len(trace["loss_mask"]) == size
        covered = [0] * size
        for span in trace["sampled_spans"]:
            owners.append(span["model_call_id"])
            turn = sampled[owners[-1]]
            place = slice(span["start"], span["end"])
            covered[place] = [1] * len(turn.sampled)
            assert trace["token_ids"][place] == list(turn.sampled)
            assert trace["generation_logprobs"][place] == list(turn.log_probs)
            assert trace["token_ids"][: span["end"]] == turn.sequence()
        assert covered == trace["loss_mask"]
        assert set(trace["model_call_ids"]) <= wanted
    assert len(owners) == len(set(owners))
    assert set(owners) == wanted
    assert len({trace["trace_id"] for trace in traces["traces"]}) == len(traces["traces"])


def test_version_1_has_no_field_for_experts() -> None:
    rollout = Rollout()
    rollout.turn()
    rollout.turn(experts="nrlre1:int8:1x1x1:AAAA")
    assert rollout.roles() == {"main": [[1]], "earlier": [[0]]}
    assert rollout.traces() is None
