# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Matching conversations to sampled turns, however agents change the messages."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.tokens.conversations import (
    ConversationFingerprint,
    ConversationIndex,
    ConversationMatch,
    ConversationNode,
)


type Messages = list[dict[str, Any]]
USER = {"role": "user", "content": "q"}
IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def said(thought: str | None, content: str, *calls: str) -> dict[str, Any]:
    """Return an assistant message as the service sends it; calls by their ids."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought is not None:
        message["content"] = f"<think>{thought}</think>{content}"
    if calls:
        function = {"name": "f", "arguments": '{"x": 1}'}
        message["tool_calls"] = [{"id": call, "type": "function", "function": function} for call in calls]
    return message


def sample(
    history: ConversationIndex, match: ConversationMatch, message: dict[str, Any], ids: list[int]
) -> ConversationNode:
    """Record a sampled turn after a match, as the service does."""
    parent = match.node.turn if match.node else None
    observed = [crc32(json.dumps(match.new).encode())]
    turn = history.ledger.append(parent, observed, Generation(ids, [-1.0] * len(ids), Finish.STOP))
    return history.record(match.node, match.new, message, turn)


def carried(node: ConversationNode) -> dict[str, Any]:
    turn = node.turn
    return dict(zip(IDS, (turn.prompt(), list(turn.sampled), list(turn.log_probs)), strict=True))


def merged(messages: Messages) -> Messages:
    """Merge neighbouring assistant messages and drop empty ones, as Gym's converter does."""
    result: Messages = []
    for is_assistant, run in itertools.groupby(messages, lambda message: message["role"] == "assistant"):
        if not is_assistant:
            result += run
            continue
        parts = list(run)
        whole = {k: v for part in parts for k, v in part.items()}
        whole["content"] = "".join(part["content"] for part in parts).replace("<think></think>", "")
        whole["tool_calls"] = [call for part in parts for call in part.get("tool_calls", [])]
        if whole["content"] or whole["tool_calls"]:
            result.append(whole)
    return result


@dataclass
class Node:
    """A sampled turn, and the agent's record of the conversation up to it, with the tokens of each turn."""

    node: ConversationNode
    conversation: Messages


CONTENT = st.sampled_from(["", "a", " a", "b", "a b"])
THOUGHTS = st.sampled_from([None, "", "t", "u"])
CALLS = st.sampled_from([(), ("new",), ("same",), ("new", "new")])
OTHERS = st.lists(
    st.sampled_from([USER, {"role": "user", "content": "on"}, {"role": "tool", "content": "r"}]), max_size=2
)


def test_a_turn_with_nothing_to_see_is_gone_on_from_when_its_message_was_dropped() -> None:
    history = ConversationIndex()
    empty = sample(history, history.find([USER]), said("hm", ""), [1])
    again = {"role": "user", "content": "go on"}
    match = history.find([USER, again])
    assert (match.node, match.new, match.ambiguous) == (empty, (again,), True)
    follow = sample(history, match, said(None, "yes"), [2])
    assert history.find([USER, again, said(None, "yes"), USER]).node is follow
    assert history.find([USER]).node is None, "asked once more, it is sampled once more"
    assert history.ledger.branches == 1


@st.composite
def manners(draw: st.DrawFn) -> dict[str, bool]:
    return {name: draw(st.booleans()) for name in ("carries", "thoughts", "tidies", "renames", "merges")}


def echo(conversation: Messages, manner: dict[str, bool]) -> Messages:
    """Return a conversation as an agent of the given manners sends it."""
    result: Messages = []
    for index, message in enumerate(conversation):
        kept = {k: v for k, v in message.items() if manner["carries"] or k not in IDS}
        if kept["role"] == "assistant":
            if not manner["thoughts"]:
                kept["content"] = kept["content"].rpartition("</think>")[2]
            if manner["tidies"]:
                kept["content"] = f"{kept['content'].strip()}\n"
            if manner["renames"] and kept.get("tool_calls"):
                kept["tool_calls"] = [{**call, "id": f"mine{index}"} for call in kept["tool_calls"]]
        result.append(kept)
    return merged(result) if manner["merges"] else result


def looks(messages: Messages) -> ConversationFingerprint:
    visible = ConversationFingerprint()
    for message in messages:
        visible = visible.with_message(message)
    return visible


@given(data=st.data())
@settings(max_examples=400)
def test_the_turn_that_is_meant_is_found_or_the_doubt_is_said(data: st.DataObject) -> None:
    """Parallel branches, turns sampled again, and turns that look alike, changed in every manner."""
    history = ConversationIndex()
    nodes: list[Node] = []
    numbers = itertools.count()
    for _ in range(data.draw(st.integers(1, 10))):
        base = data.draw(st.sampled_from([None, *nodes]))
        known = base.conversation if base else [{"role": "system", "content": "s"}]
        new = data.draw(OTHERS)
        manner = data.draw(manners())
        sent = [*echo(known, manner), *new]
        match = history.find(sent)
        assert looks(sent[: len(sent) - len(match.new)]) == (
            match.node.visible if match.node else ConversationFingerprint()
        )
        dropped = (
            manner["merges"] and known[-1]["role"] == "assistant" and echo(known, manner)[-1]["role"] != "assistant"
        )
        if base is None:
            assert match.node is None or match.ambiguous
        elif not dropped:
            assert match.node is not None
            if match.new != tuple(new):
                assert match.ambiguous, "a turn that is not among the messages, and nobody was told"
            elif match.node.turn.sequence() != base.node.turn.sequence():
                assert match.ambiguous, "another turn than the one that was meant, and nobody was told"
                assert not manner["carries"]
        thought, content, calls = data.draw(THOUGHTS), data.draw(CONTENT), data.draw(CALLS)
        message = said(thought, content, *(f"{call}{next(numbers)}" if call == "new" else call for call in calls))
        # One text may be many token sequences, but never the other way round.
        text = crc32(f"{thought}|{content}|{len(calls)}".encode())
        node = sample(history, match, message, [text, data.draw(st.integers(0, 1))])
        # The agent remembers what it was told, under the history that it sent.
        nodes.append(
            Node(node, [*known, *new, message | carried(node)])
            if match.node is (base and base.node)
            else Node(node, [*sent, message | carried(node)])
        )
    assert sum(sum(s.mask) for s in history.ledger.sequences()) == sum(len(n.node.turn.sampled) for n in nodes)


@given(data=st.data(), length=st.integers(1, 5))
@settings(max_examples=200)
def test_nothing_after_an_edit_is_taken_for_known(data: st.DataObject, length: int) -> None:
    history = ConversationIndex()
    conversation: Messages = []
    nodes: list[ConversationNode] = []
    for index in range(length):
        conversation += [{"role": "user", "content": f"q{index}"}]
        message = said(data.draw(THOUGHTS), data.draw(CONTENT))
        nodes.append(sample(history, history.find(conversation), message, [index]))
        conversation.append(message | carried(nodes[-1]))
    sent = echo(conversation, data.draw(manners()) | {"merges": False})
    edited = data.draw(st.integers(0, len(sent) - 1))
    if data.draw(st.booleans()):
        del sent[edited]
    else:
        sent[edited] = {**sent[edited], "content": "something else"}
    found = history.find([*sent, USER]).node
    last_question = edited // 2
    edited_turn = looks([{"role": "assistant", "content": ""}, conversation[edited]])
    invisible = bool(edited % 2) and not edited_turn.assistant_text
    if not (invisible and len(sent) < len(conversation)):
        assert found is (nodes[last_question - 1] if last_question else None)


def test_a_turn_that_is_kept_while_its_past_is_cut_away_starts_anew() -> None:
    """An agent that compacts its history keeps the last turn with its tokens, but the prompt differs."""
    history = ConversationIndex()
    first = sample(history, history.find([USER]), said(None, "long"), [1])
    long = [USER, first.messages[-1] | carried(first), USER]
    second = sample(history, history.find(long), said(None, "b"), [2])
    short = [{"role": "user", "content": "in short"}, second.messages[-1] | carried(second), USER]
    match = history.find(short)
    assert match.node is None
    assert history.retokenised(match.new) == 1
    third = sample(history, match, said(None, "c"), [3])
    assert history.find([*short, third.messages[-1] | carried(third), USER]).node is third
    assert history.ledger.branches == 2


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"generation_token_ids": [1], "prompt_token_ids": [1]}, "generation_log_probs: missing"),
        ({"generation_token_ids": [1], "generation_log_probs": [-1.0]}, "prompt_token_ids: missing"),
        (dict(zip(IDS, ([1], [2, 3], [-1.0]), strict=True)), "generation_log_probs: 1 log-probs for 2 tokens"),
    ],
)
def test_half_of_the_token_fields_is_refused(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(CallerError, match=f"messages.{wrong}"):
        ConversationIndex().find([USER, said(None, "a") | fields])


def test_tokens_that_a_converter_repeats_are_not_those_of_the_agents_own_words() -> None:
    history = ConversationIndex()
    point = sample(history, history.find([USER]), said(None, "a"), [1])
    own = said(None, "my summary") | carried(point)
    match = history.find([USER, point.messages[-1] | carried(point), USER, own, USER])
    assert match.node is point
    assert match.unsampled == (own,)
