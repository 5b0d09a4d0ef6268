# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Items and messages equal those of Gym's own converter, and known tokens are recognised by their bytes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from packaging.version import Version

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.http.turn_requests import answer_fields, messages_of
from nemo_gym_prorl.policy.text.template import as_message
from nemo_gym_prorl.policy.text.turn_scanner import Parsed, ToolCall
from nemo_gym_prorl.policy.tokens.conversations import KNOWN_TURN
from nemo_gym_prorl.policy.tokens.ledger import TokenLedger
from nemo_gym_prorl.policy.tokens.prompt import TURN_MARKER, TokenTextCache, strip_known_tokens
from nemo_gym_prorl.policy.turns import PolicyAnswer
from nemo_gym_prorl.servers.model_server import ProrlModel
from tests.policy.runtimes import server


GYM = Version(version("nemo-gym"))


@pytest.fixture(scope="module")
def model() -> ProrlModel:
    made = server("http://127.0.0.1:1", Path(), policy={})
    made.setup_webserver()
    return made


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STATUSES = st.sampled_from(["in_progress", "completed", "incomplete"])
OPTIONAL = {"id": st.one_of(st.none(), TEXTS), "status": st.one_of(st.none(), STATUSES)}
PARTS = st.fixed_dictionaries({"type": st.just("input_text"), "text": TEXTS})
ROLES = st.sampled_from(["user", "system", "developer"])
SAID = st.fixed_dictionaries(
    {"type": st.just("output_text"), "text": TEXTS, "annotations": st.just([])}, optional={"logprobs": st.none()}
)
SUMMARY = st.fixed_dictionaries({"type": st.just("summary_text"), "text": TEXTS})
CALLS = {"type": st.just("function_call"), "call_id": TEXTS, "name": TEXTS, "arguments": TEXTS}
RESULTS = {"type": st.just("function_call_output"), "call_id": TEXTS, "output": TEXTS}
MESSAGE = {
    "type": st.just("message"),
    "id": TEXTS,
    "role": st.just("assistant"),
    "content": st.lists(SAID, max_size=2),
}
THOUGHTS = {"type": st.just("reasoning"), "id": TEXTS, "summary": st.lists(SUMMARY, max_size=2)}
TYPE = {"type": st.just("message")}
ITEMS = st.one_of(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS}, optional=TYPE),
    st.fixed_dictionaries({"role": ROLES, "content": st.lists(PARTS, min_size=1, max_size=2)}, optional=TYPE),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS}, optional=TYPE),
    st.fixed_dictionaries(MESSAGE, optional={"status": STATUSES}),
    st.fixed_dictionaries(THOUGHTS, optional={"encrypted_content": st.none()}),
    st.fixed_dictionaries(CALLS, optional=OPTIONAL),
    st.fixed_dictionaries(RESULTS, optional=OPTIONAL),
)


@given(items=st.lists(ITEMS, min_size=1, max_size=6))
def test_messages_are_those_of_gyms_converter(model: ProrlModel, items: list[dict[str, Any]]) -> None:
    read = messages_of(items)
    body = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": items})
    converted = model._chat_of(body)["messages"]
    if Version("0.7") > GYM:  # it leaves out who said nothing, and writes that there are no calls
        read = [message for message in read if message != {"role": "assistant", "content": None}]
        converted = [{name: value for name, value in message.items() if value != []} for message in converted]
    assert read == converted


def test_each_sampled_turn_is_a_message_of_its_own() -> None:
    """Gym's converter would join the first two."""
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    said = {"role": "assistant", "content": "a"}
    items = [
        said | tokens,
        said,
        said | tokens | {"routed_experts": None},
        {"role": "assistant", "content": ""} | tokens,
    ]
    assert [(m["content"], "generation_token_ids" in m) for m in messages_of(items)] == [
        ("a", True),
        ("aa", True),
        (None, True),
    ]
    assert [m["content"] for m in messages_of([said | tokens, said])] == ["a", "a"]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "user", "content": 5}, "content"),
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "content.0.type"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "arguments"),
        ({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, "encrypted_content"),
        ({"type": "web_search_call", "id": "w"}, "type"),
        ({"role": "assistant", "content": "x", "generation_token_ids": ["1"]}, "generation_token_ids"),
        ({"role": "user", "content": "x", "generation_token_ids": [1]}, None),
        ("text", None),
    ],
)
def test_what_cannot_be_shown_to_the_policy_is_refused_by_its_name(item: object, field: str | None) -> None:
    with pytest.raises(CallerError) as refused:
        messages_of([{"role": "user", "content": "x"}, item])
    assert refused.value.field == (f"input.1.{field}" if field else "input.1")


PARSED = st.builds(
    Parsed,
    st.one_of(st.none(), TEXTS),
    st.one_of(TEXTS, st.just("a<think>b</think>c")),
    st.lists(st.builds(ToolCall, TEXTS, TEXTS, st.one_of(st.none(), st.just("why"))), max_size=2).map(tuple),
)


@given(parsed=PARSED)
def test_items_are_written_as_gyms_response_writes_them(model: ProrlModel, parsed: Parsed) -> None:
    fields = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    items = model._items(as_message(parsed) | fields)
    body = NeMoGymResponseCreateParamsNonStreaming(input=[])
    answer = PolicyAnswer("r", {}, parsed, None, Finish.STOP, 2)
    whole = model._envelope(body) | answer_fields(answer, None) | {"output": items}
    assert items == orjson.loads(NeMoGymResponse.model_validate(whole).model_dump_json(by_alias=True))["output"]


IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=5)
STEPS = st.lists(st.tuples(IDS, IDS, st.floats(-50, 0)), min_size=1, max_size=6)


@given(steps=STEPS, again=st.integers(0, 5), cut=st.integers(0, 400))
def test_known_tokens_are_cut_out_and_no_others(steps: list[Any], again: int, cut: int) -> None:
    ledger, texts, parent, turns = TokenLedger(), TokenTextCache(), None, []
    for observed, sampled, log_prob in steps:
        generation = Generation(sampled, [log_prob] * len(sampled), Finish.STOP)
        assert list(texts.prompt(parent, observed)) == [*(parent.sequence() if parent else ()), *observed]
        parent = ledger.append(parent, observed, generation)
        turns.append(parent)
    ledger.append(turns[min(again, len(turns) - 1)].parent, [7], Generation([8], [-1.0], Finish.STOP))
    items = [
        {
            "role": "assistant",
            "content": 'say "prompt_token_ids":[1]',
            "prompt_token_ids": turn.prompt(),
            "generation_token_ids": list(turn.sampled),
            "generation_log_probs": list(turn.log_probs),
        }
        for turn in turns
    ]
    body = orjson.dumps({"input": items})
    found = strip_known_tokens(body, ledger, texts)
    assert found is not None
    raw, known = found
    assert known == turns
    bare = [{"role": "assistant", "content": item["content"], TURN_MARKER: at} for at, item in enumerate(items)]
    assert orjson.loads(raw) == {"input": bare}
    assert [message[KNOWN_TURN] for message in messages_of(bare, known)] == turns
    for turn in turns:
        assert texts.before(turn) == orjson.dumps(turn.prompt())[:-1]
    at = cut % len(body)
    if body[at : at + 1].isdigit():
        other = body[:at] + (b"1" if body[at : at + 1] != b"1" else b"2") + body[at + 1 :]
        changed = strip_known_tokens(other, ledger, texts)
        assert changed is None or changed[0] != raw
