# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The prefix chain and the choice of the turn, over arbitrary scripts and conversations."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.scripted import text
from nemo_gym_prorl.scripted.text import ScriptError


words = st.text(st.characters(codec="utf-8"), max_size=30)
tool_calls = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["bash", "submit"]), "arguments": st.dictionaries(words, words)}),
    max_size=3,
)
turns = st.fixed_dictionaries({"content": st.none() | words, "tool_calls": tool_calls})


def assistant_message(turn: text.ScriptTurn, index: int) -> dict:
    """A turn as a client sends it back."""
    calls = [
        {
            "id": text.call_id(index, i),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(turn.tool_calls)
    ]
    return {"role": "assistant", "content": turn.content, "tool_calls": calls}


def observations(message: dict, content: str) -> list[dict]:
    """What follows a turn: tool results, or a user's word where there were no calls."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in message["tool_calls"]]
    return results or [{"role": "user", "content": content}]


@given(st.lists(turns, max_size=4), st.lists(words, min_size=5, max_size=5), words)
def test_each_prompt_starts_with_the_previous_prompt_and_its_generation(script_turns, replies, question):
    script = text.parse_script(orjson.dumps({"turns": script_turns}).decode())
    messages = [{"role": "system", "content": "Be useful."}, {"role": "user", "content": question}]
    so_far = b""
    for index in range(len(script_turns) + 1):
        assert text.next_turn(messages) == index
        prompt = text.render_prompt(messages, [{"type": "function", "function": {"name": "bash"}}])
        assert prompt.startswith(so_far)
        assert text.generated_turns(prompt) == index
        turn = script.turn(index)
        generated, whole = text.finish(turn.body, 10_000)
        assert whole
        assert generated[-1] == text.END_OF_TURN
        so_far = prompt + generated
        message = assistant_message(turn, index)
        messages += [message, *observations(message, replies[index])]
    assert text.render_prompt(messages, [{"type": "function", "function": {"name": "bash"}}]).startswith(so_far)


@given(turns, words, st.integers(min_value=1, max_value=60))
def test_a_cut_turn_comes_back_as_the_same_tokens(turn, question, max_tokens):
    body = text.parse_script(orjson.dumps({"turns": [turn]}).decode()).turn(0).body
    generated, whole = text.finish(body, max_tokens)
    assert len(generated) <= max_tokens
    assert whole == (len(body) < max_tokens)
    if not whole:
        messages = [{"role": "user", "content": question}]
        before = text.render_prompt(messages)
        messages.append({"role": "assistant", "content": generated.decode()})
        assert text.render_prompt(messages).startswith(before + generated)


@given(words)
def test_ids_and_bytes_are_one_to_one(content):
    rendered = text.render_prompt([{"role": "user", "content": content}])
    assert text.decode_ids(text.encode_ids(rendered)) == rendered


def test_reasoning_that_the_client_took_out_is_put_back_in_place():
    turn = text.ScriptTurn("<think>look first</think>Here.")
    parsed = {"role": "assistant", "content": "Here.", "reasoning": "look first", "reasoning_content": "look first"}
    prompt = text.render_prompt([{"role": "user", "content": "?"}])
    assert text.render_prompt([{"role": "user", "content": "?"}, parsed]).startswith(prompt + turn.body)


def test_parallel_calls_split_into_two_messages_are_still_one_turn():
    first = assistant_message(text.ScriptTurn(None, (text.ToolCall("bash", "{}"), text.ToolCall("bash", "{}"))), 0)
    split = []
    for call in first["tool_calls"]:
        split += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    assert text.next_turn([{"role": "user", "content": "?"}, *split]) == 1
    assert text.next_turn([*split, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "?"}]) == 2


def test_after_the_last_turn_the_policy_says_that_its_script_ended():
    closing = text.parse_script('{"turns": [{"content": "only"}]}').turn(1)
    assert not closing.tool_calls
    assert text.MODEL_NAME in closing.content
    assert "1 turn(s) has ended" in closing.content


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ("nonsense", "metadata.script"),
        ("[]", "metadata.script"),
        ('{"turns": [3]}', "metadata.script.turns[0]"),
        ('{"turns": [{"content": 5}]}', "metadata.script.turns[0].content"),
        ('{"turns": [{}, {"tool_calls": [{}]}]}', "metadata.script.turns[1].tool_calls[0].name"),
        (
            '{"turns": [{"tool_calls": [{"name": "a", "arguments": 1}]}]}',
            "metadata.script.turns[0].tool_calls[0].arguments",
        ),
        ('{"turns": [{"latency_s": -1}]}', "metadata.script.turns[0].latency_s"),
        ('{"turns": [{"text": "x"}]}', "metadata.script.turns[0]"),
    ],
)
def test_a_malformed_script_is_refused_by_field(script, field):
    with pytest.raises(ScriptError) as error:
        text.parse_script(script)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls"),
    ],
)
def test_a_malformed_message_is_refused_by_field(message, field):
    with pytest.raises(ScriptError) as error:
        text.render_prompt([message])
    assert error.value.field == field
