# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows at the border, and their tokens apart from their items: what is taken comes back as it was."""

from __future__ import annotations

import copy
import json
from base64 import b64encode
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.routed_experts import last_rows
from nemo_gym_prorl.policy.generation import Finish, Generation, validate_generation
from nemo_gym_prorl.policy.tokens.ledger import TokenLedger
from nemo_gym_prorl.rollout.api.schemas import TurnView
from nemo_gym_prorl.rollout.gym_rows import (
    TurnTokens,
    pack_turns,
    put_tokens,
    read_json,
    take_tokens,
)


TEXT = st.text(st.characters(codec=None, categories=None))  # surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def refusal(body: bytes) -> CallerError | None:
    """Why a body is not taken; checks that what is taken can be written."""
    try:
        taken = read_json(body)
    except CallerError as error:
        return error
    assert orjson.loads(orjson.dumps(taken)) == taken == json.loads(body)
    return None


@given(JSON)
def test_what_is_taken_is_what_was_sent_and_what_is_refused_cannot_be_written(value: Any) -> None:
    body = json.dumps(value).encode()
    refused = refusal(body)
    if refused is None:
        return
    assert refused.field
    refused.reason.encode()  # the complaint itself can be written
    try:
        written = orjson.loads(orjson.dumps(json.loads(body)))
    except TypeError:
        return
    assert written != json.loads(body), "NaN comes out as null"


@pytest.mark.parametrize("levels", [200, 250, 100_000])
def test_the_depth_is_bounded(levels: int) -> None:
    body = b"[" * levels + b"]" * levels
    if levels == 200:
        assert orjson.dumps(read_json(body)) == body
    else:
        with pytest.raises(CallerError, match="ecursion"):
            read_json(body)


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


def over_the_wire(turns: list[TurnTokens]) -> list[TurnTokens]:
    return [TurnTokens.unpack(told) for told in orjson.loads(pack_turns(turns))]


@given(responses())
def test_what_was_taken_comes_back_as_it_was(response: dict[str, Any]) -> None:
    before = copy.deepcopy(response)
    turns = take_tokens(response)
    assert not any(key.endswith(("_ids", "_probs")) for item in response["output"] for key in item)
    assert over_the_wire(turns) == turns
    assert [TurnView(**told).length for told in orjson.loads(pack_turns(turns))] == [
        len(turn.sampled) for turn in turns
    ]
    put_tokens(response, over_the_wire(turns))
    assert orjson.loads(orjson.dumps(response)) == before


GOOD = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"generation_token_ids": ["2"]},
        {"generation_token_ids": [2**31]},
        {"generation_token_ids": None},
        {"prompt_token_ids": [9.0]},
        {"generation_log_probs": []},
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


KINDS = {"int8": 1, "int16": 2, "int32": 4}


def experts(ids: list[int], layers: int = 3, top: int = 2, kind: str = "int8", *, unread: bool = True) -> str:
    """As NeMo RL's server writes them: of each token by all that it had read by then, the last one's made up."""
    rows, seen = [], 0
    for place, token in enumerate(ids):
        seen = (seen * 31 + token) % 127
        made_up = unread and place == len(ids) - 1
        rows += [0 if made_up else (seen + number) % 127 for number in range(layers * top)]
    raw = b"".join(number.to_bytes(KINDS[kind], "little") for number in rows)
    return f"nrlre1:{kind}:{len(ids)}x{layers}x{top}:{b64encode(raw).decode()}"


turns = st.lists(st.tuples(*[st.lists(st.integers(0, 999), min_size=1, max_size=4)] * 2), min_size=1, max_size=5)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from(sorted(KINDS)))


@given(turns, shapes)
def test_turns_keep_what_is_new_and_give_back_all_of_it(
    pieces: list[tuple[list[int], list[int]]], shape: tuple[int, int, str]
) -> None:
    ledger, parent, seen = TokenLedger(), None, list[int]()
    output: list[dict[str, Any]] = []
    for observed, sampled in pieces:
        prompt = seen + observed
        seen = prompt + sampled
        said = Generation(
            sampled, [-1.0] * len(sampled), Finish.STOP, prompt_ids=prompt, routed_experts=experts(seen, *shape)
        )
        own = len(observed) + len(sampled) + (parent is not None)
        parent = ledger.append(parent, observed, validate_generation(said))
        kept = parent.routed_experts
        assert kept is not None
        assert kept == last_rows(experts(seen, *shape), own)
        assert kept.split(":")[2].startswith(f"{own}x")
        tokens = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": [-1.0]}
        output.append({**tokens, "generation_log_probs": [-1.0] * len(sampled), "routed_experts": kept})
    response = {"output": output}
    over_the_wire = [TurnTokens.unpack(told) for told in orjson.loads(pack_turns(take_tokens(response)))]
    assert not any(response["output"])
    put_tokens(response, over_the_wire)
    rows, length = orjson.loads(orjson.dumps(response))["output"], 0
    for item, (observed, sampled) in zip(rows, pieces, strict=True):
        length += len(observed) + len(sampled)
        # Where a turn went on, the token before has been read: by the time of the last turn all have but its last.
        assert item["routed_experts"] == experts(seen[:length], *shape)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[1]]", "NeMo RL's form"),
        ("nrlre1:int8:3x1x2:AAAA", "no 3 rows of 2 bytes"),
        (experts([1, 2]), "2 rows for 3 tokens"),
    ],
)
def test_what_an_engine_tells_wrongly_is_refused(text: str, why: str) -> None:
    said = Generation([3], [-1.0], Finish.STOP, prompt_ids=[1, 2], routed_experts=text)
    with pytest.raises(ValueError, match=why):
        validate_generation(said)
