# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens apart from their items: the same comes back, whatever a history did, and nothing is there twice."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.rollout.rows import Turn, packed, put_tokens, take_tokens
from nemo_gym_prorl.rollout.schemas import TurnView


ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
log_prob = st.floats(allow_nan=False, allow_infinity=False, width=64)


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Any]:
    """Output items of rollouts that went on from any of their turns, rewrote some of it, or began anew."""
    output: list[dict[str, Any]] = []
    sequences: list[list[int]] = [[]]
    for _ in range(draw(st.integers(0, 6))):
        output += [{"type": "function_call_output", "output": "42"}] * draw(st.integers(0, 2))
        before = draw(st.sampled_from([sequences[-1], *sequences]))
        before = before[: draw(st.sampled_from([len(before), draw(st.integers(0, len(before)))]))]
        prompt, sampled = before + draw(ids), draw(ids)
        log_probs = draw(st.lists(log_prob, min_size=len(sampled), max_size=len(sampled)))
        fields = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": log_probs}
        output.append({"type": "message", **fields})
        sequences.append(prompt + sampled)
    return {"id": "any", "output": output}


def over_the_wire(turns: list[Turn]) -> list[Turn]:
    return [Turn.unpacked(told) for told in orjson.loads(packed(turns))]


@given(responses())
def test_what_was_taken_comes_back_as_it_was(response: dict[str, Any]) -> None:
    before = copy.deepcopy(response)
    turns = take_tokens(response)
    assert not any(key.endswith(("_ids", "_probs")) for item in response["output"] for key in item)
    assert over_the_wire(turns) == turns
    assert [TurnView(**told).length for told in orjson.loads(packed(turns))] == [len(turn.sampled) for turn in turns]
    put_tokens(response, over_the_wire(turns))
    assert orjson.loads(orjson.dumps(response)) == before


def test_a_conversation_is_there_once() -> None:
    sequence, output = list(range(100)), []
    for turn in range(50):
        sampled = [1000 + turn] * 20
        tokens = {"prompt_token_ids": sequence, "generation_token_ids": sampled, "generation_log_probs": [-0.5] * 20}
        output.append({"type": "message", **tokens})
        sequence = sequence + sampled + [7] * 30
    turns = take_tokens({"output": output})
    assert sum(len(turn.observed) + len(turn.sampled) for turn in turns) == len(sequence) - 30


GOOD = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"generation_token_ids": ["2"]},
        {"generation_token_ids": [True]},
        {"generation_token_ids": [-1]},
        {"generation_token_ids": [2**31]},
        {"generation_token_ids": None},
        {"prompt_token_ids": [9.0]},
        {"generation_log_probs": []},
        {"generation_log_probs": [None]},
        {"generation_log_probs": [float("nan")]},
        {"generation_log_probs": [10**400]},
        {"routed_experts": "nrlre1:int16:1x1x2:AAABAA=="},
        {"routed_experts": [[[0, 1]], [[2, 3]]]},
    ],
)
def test_tokens_that_cannot_be_packed_stay_with_all_others_of_their_rollout(change: dict[str, Any]) -> None:
    response = {"output": [dict(GOOD), GOOD | change]}
    before = copy.deepcopy(response)
    assert take_tokens(response) == []
    assert repr(response) == repr(before)


@pytest.mark.parametrize("response", [None, [], {}, {"output": None}, {"output": ["x", None]}])
def test_what_is_no_response_has_no_tokens(response: Any) -> None:
    assert take_tokens(response) == []
    put_tokens(response, take_tokens({"output": [dict(GOOD)]}))


def test_what_came_broken_is_told() -> None:
    [told] = orjson.loads(packed(take_tokens({"output": [dict(GOOD)]})))
    for broken in ({"sampled": "AAA="}, {"sampled": "%"}, {"log_probs": ""}):
        with pytest.raises(ValueError, match=r"bytes|base64|log-probs"):
            Turn.unpacked(told | broken)
