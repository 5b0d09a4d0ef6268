# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Training groups without NeMo RL: sampled tokens, prefixes, and rollouts without valid tokens."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.dapo.runner import TrainedRollout
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.groups import rows_of, training_group, turns_of, with_loss
from nemo_gym_prorl.rollout.gym_rows import take_tokens


tokens = st.lists(st.integers(0, 999), min_size=1, max_size=5)


def result(*pieces: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Return the result of a rollout of (observed, sampled) turns, with other output items between."""
    seen: list[int] = []
    output: list[dict[str, Any]] = []
    for observed, sampled in pieces:
        prompt = seen + observed
        log_probs = [-float(token) for token in sampled]
        output.append({"type": "reasoning", "summary": []})
        output.append({"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": log_probs})
        output.append({"type": "function_call_output", "output": "42"})
        seen = prompt + sampled
    return {"response": {"output": output}}


def rollout(reward: float, content: dict[str, Any], version: int = 3, *, masked: bool = False) -> TrainedRollout:
    return TrainedRollout("dapo:0:0:0", {"task": 1}, reward, version, masked, take_tokens(content.get("response")))


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6))
def test_turns_put_together_are_the_last_prompt_and_what_it_led_to(pieces: list[tuple[list[int], list[int]]]) -> None:
    turns = turns_of(take_tokens(result(*pieces)["response"]))
    assert [([*turn.observed], [*turn.sampled]) for turn in turns] == pieces
    assert [[*turn.log_probs] for turn in turns] == [[-float(token) for token in said] for _, said in pieces]


@given(st.lists(st.tuples(tokens, tokens), min_size=2, max_size=6), st.data())
def test_what_was_taken_over_is_prompt(pieces: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    inherited = data.draw(st.integers(1, len(pieces) - 1))
    first, *others = turns_of(take_tokens(result(*pieces)["response"]), inherited)
    before = [token for observed, said in pieces[:inherited] for token in observed + said]
    assert [*first.observed] == before + pieces[inherited][0]
    own = [[*turn.sampled] for turn in (first, *others)]
    assert own == [said for _, said in pieces[inherited:]]
    assert [[*turn.observed] for turn in others] == [observed for observed, _ in pieces[inherited + 1 :]]
    assert [[*turn.log_probs] for turn in (first, *others)] == [[-float(token) for token in said] for said in own]
    fork = TrainedRollout("dapo:0:0:0", {}, 1.0, 3, False, take_tokens(result(*pieces)["response"]), inherited)
    group = training_group([fork, fork], lambda raw, length: -length)
    assert [member.sequences for member in group.members] == [((first, *others),)] * 2
    assert [*group.prompt] == [*first.observed], "by which NeMo RL tells it from a group that began elsewhere"
    assert group.members[0].reward == -sum(map(len, sum(pieces, ())))
    with pytest.raises(ValueError, match="no item"):
        turns_of(take_tokens(result(*pieces)["response"]), len(pieces))


def test_rewards_are_shaped_by_the_whole_sequence() -> None:
    long = result(([1, 2], [3, 4, 5]), ([6], [7, 8]))
    group = training_group(
        [rollout(1.0, long, 4), rollout(0.0, result(([1, 2], [9])))], lambda raw, length: raw - length / 10
    )
    assert [member.reward for member in group.members] == [pytest.approx(0.2), pytest.approx(-0.3)]
    assert [*group.prompt] == [1, 2]
    assert (group.version, group.row) == (3, {"task": 1})


def compacted(*traces: tuple[list[int], int, int], **changes: Any) -> TrainedRollout:
    """Return a rollout whose traces have these tokens, sampled from one place to another."""
    told = [
        {
            "token_ids": ids,
            "generation_logprobs": [-float(one) for one in ids],
            "sampled_spans": [{"start": at, "end": end}],
        }
        for ids, at, end in traces
    ]
    told[0] |= changes
    last = result(([1], [2]))["response"]
    return TrainedRollout(
        "r", {}, 1.0, 3, False, take_tokens(last), body=orjson.dumps({"training_traces": {"traces": told}})
    )


def test_each_trace_is_a_row_and_rows_beyond_one_per_rollout_are_filled_up() -> None:
    traces = ([7, 8, 9], 1, 3), ([7, 8, 5, 6], 3, 4), ([1, 2], 1, 2)
    several, one, masked = compacted(*traces), rollout(0.0, result(([1], [2, 3]))), rollout(0.0, {}, masked=True)
    group = training_group([several, one, masked], lambda raw, length: raw - length / 100)
    assert [member.reward for member in group.members] == [0.96, -0.03, 0.0], "by the longest sequence"
    assert [*group.prompt] == [7]
    for multiple, filled in ((1, 0), (2, 0), (3, 1), (4, 2)):
        rows = rows_of(group, multiple)
        assert [place for place, _ in rows] == [0, 0, 0, 1, 2] + [-1] * filled
        assert all(not turns for _, turns in rows[4:])
    tokens = [[(place, [*turn.observed], [*turn.sampled]) for turn in turns] for place, turns in rows_of(group)]
    assert tokens[:3] == [[(0, [7], [8, 9])], [(0, [7, 8, 5], [6])], [(0, [1], [2])]]
    assert [[*turn.log_probs] for _, turns in rows_of(group)[:2] for turn in turns] == [[-8.0, -9.0], [-6.0]]
    assert with_loss([group]) == [True, True, False]


@pytest.mark.parametrize(
    "changes", [{"generation_logprobs": [-1.0]}, {"token_ids": [1, None]}, {"sampled_spans": []}, {"sampled_spans": 7}]
)
def test_a_trace_that_cannot_be_trusted_takes_the_rollouts_loss(changes: dict[str, Any]) -> None:
    wrong, other = compacted(([1, 2], 1, 2), ([3, 4], 1, 2), **changes), rollout(0.0, result(([1], [2])))
    group = training_group([wrong, other], lambda raw, length: raw)
    assert [(member.reward, len(member.sequences)) for member in group.members] == [(1.0, 0), (0.0, 1)]


def broken(**changes: Any) -> dict[str, Any]:
    content = result(([1], [2, 3]), ([4], [5]))
    content["response"]["output"][4] |= changes
    return content


@pytest.mark.parametrize(
    "content",
    [
        broken(prompt_token_ids=[1, 9, 3, 4]),
        broken(generation_log_probs=[]),
        broken(generation_log_probs=[math.nan]),
        broken(generation_token_ids=["token_id:5"]),
        {"response": {"output": [None]}},
        {},
    ],
    ids=["retokenised", "no log-probability", "not a number", "ids as text", "no item", "no response"],
)
def test_a_rollout_whose_tokens_cannot_be_trusted_keeps_its_reward_and_gets_no_loss(content: dict[str, Any]) -> None:
    group = training_group([rollout(1.0, content), rollout(0.0, result(([1], [2])))], lambda raw, length: raw)
    assert [(member.reward, len(member.sequences)) for member in group.members] == [(1.0, 0), (0.0, 1)]
    assert [*group.prompt] == [1]


def test_a_masked_rollout_keeps_its_reward_and_gets_no_loss() -> None:
    masked, other = rollout(0.0, result(([1], [2, 3])), masked=True), rollout(1.0, result(([1], [2])))
    group = training_group([masked, other], lambda raw, length: raw - length)
    assert [(member.reward, len(member.sequences)) for member in group.members] == [(-3.0, 0), (-1.0, 1)]


def test_a_group_without_tokens_is_a_deployment_that_does_not_keep_them() -> None:
    plain = {"response": {"output": [{"type": "message", "content": "hello"}]}}
    with pytest.raises(CallerError, match="return_token_id_information: true") as error:
        training_group([rollout(1.0, plain), rollout(0.0, plain)], lambda raw, length: raw)
    assert error.value.field == "response.output"
