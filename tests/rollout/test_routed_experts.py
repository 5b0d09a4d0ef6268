# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture's experts: kept by turn, each token's once, and put together again to what the engine said."""

from __future__ import annotations

import copy
import math
from base64 import b64encode
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.generation import Finish, Generation, checked
from nemo_gym_prorl.policy.tokens.ledger import TokenLedger, TokenMismatch, Turn
from nemo_gym_prorl.rollout.rows import Turn as PackedTurn
from nemo_gym_prorl.rollout.rows import packed, put_tokens, take_tokens
from nemo_gym_prorl.serving.routed_experts import continued, last_rows


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
        parent = ledger.append(parent, observed, checked(said))
        kept = parent.routed_experts
        assert kept is not None
        assert kept == last_rows(experts(seen, *shape), own)
        assert kept.split(":")[2].startswith(f"{own}x")
        tokens = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": [-1.0]}
        output.append({**tokens, "generation_log_probs": [-1.0] * len(sampled), "routed_experts": kept})
    response = {"output": output}
    over_the_wire = [PackedTurn.unpacked(told) for told in orjson.loads(packed(take_tokens(response)))]
    assert not any(response["output"])
    put_tokens(response, over_the_wire)
    rows, length = orjson.loads(orjson.dumps(response))["output"], 0
    for item, (observed, sampled) in zip(rows, pieces, strict=True):
        length += len(observed) + len(sampled)
        # Where a turn went on, the token before has been read: by the time of the last turn all have but its last.
        assert item["routed_experts"] == experts(seen[:length], *shape)


def test_a_history_that_was_rewritten_has_those_of_its_own() -> None:
    ledger = TokenLedger()
    first = ledger.append(None, [1, 2], Generation([3], [-1.0], Finish.STOP, routed_experts=experts([1, 2, 3])))
    again = ledger.append(None, [1, 9], Generation([4], [-1.0], Finish.STOP, routed_experts=experts([1, 9, 4])))
    items = [_item([1, 2], [3], first), _item([1, 9], [4], again)]
    response = {"output": copy.deepcopy(items)}
    put_tokens(response, take_tokens(response))
    assert orjson.loads(orjson.dumps(response))["output"] == items


def _item(prompt: list[int], sampled: list[int], turn: Turn) -> dict[str, Any]:
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": [-1.0]}
    return {**tokens, "routed_experts": turn.routed_experts}


def test_what_no_turn_has_is_not_made_up() -> None:
    """A turn of an engine that told nothing in the middle: those after it lack its rows."""
    told = experts([1, 2, 3, 4, 5])
    assert continued(None, last_rows(told, 2), 5) is None
    assert continued(experts([1, 2]), last_rows(told, 2), 5) is None
    assert continued(experts([1, 2, 3], unread=False), last_rows(told, 2), 5) == told
    assert continued(experts([1, 2, 3], layers=4), last_rows(told, 2), 5) is None
    assert continued(told, None, 7) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[1]]", "NeMo RL's form"),
        ("nrlre2:int8:3x1x1:AAAA", "NeMo RL's form"),
        ("nrlre1:int64:3x1x1:AAAA", "NeMo RL's form"),
        ("nrlre1:int8:3x1x2:AAAA", "no 3 rows of 2 bytes"),
        (experts([1, 2]), "2 rows for 3 tokens"),
        (experts([1, 2, 3, 4]), "4 rows for 3 tokens"),
    ],
)
def test_what_an_engine_tells_wrongly_is_refused(text: str, why: str) -> None:
    said = Generation([3], [-1.0], Finish.STOP, prompt_ids=[1, 2], routed_experts=text)
    with pytest.raises(ValueError, match=why):
        checked(said)


def test_rows_that_are_no_base64_are_refused() -> None:
    said = Generation([3], [-1.0], Finish.STOP, prompt_ids=[1, 2], routed_experts="nrlre1:int8:3x1x1:A%AA")
    with pytest.raises(TokenMismatch):
        TokenLedger().append(None, [1, 2], checked(said))


def test_half_a_kib_a_token_is_what_they_cost() -> None:
    """Of Qwen3-30B-A3B: 48 layers, 8 of 128 experts."""
    text = experts([7] * 100, 48, 8)
    assert math.isclose(len(text) / 100, 512, rel_tol=0.01)
