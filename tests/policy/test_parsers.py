# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tool calls and thoughts in every format, good and bad."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.text.formats import FORMATS, format_named
from nemo_gym_prorl.policy.text.parsers import MALFORMED_NAME, Parsed, parsed_by_engine
from nemo_gym_prorl.policy.text.parsers import parse as parse_turn


def parse(text: str, name: str, tools: Sequence[Mapping[str, Any]] = (), **more: Any) -> Parsed:
    form = format_named(name)
    assert form is not None
    return parse_turn(text, form, tools, **more)


TEXT = st.text(st.characters(codec="utf-8"))
GOOD = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"what": "é"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=what>\né\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "look", "parameters": {"what": "é"}}',
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"what": "é"}}]',
    "pythonic": '[look(what="é")]',
}
BAD = {
    "hermes": [
        ('<tool_call>{"name": "look", "arguments": {"what": </tool_call>', "look"),
        ("<tool_call>look at it</tool_call>", MALFORMED_NAME),
        ('<tool_call>{"arguments": {}}</tool_call>', MALFORMED_NAME),
        ('<tool_call>{"name": "look", "arguments": "x"}</tool_call>', "look"),
        ('<tool_call>{"name": "look", "arguments": [1]}', "look"),
        ("<tool_call>[1]</tool_call>", MALFORMED_NAME),
    ],
    "qwen3_coder": [
        ("<tool_call>look</tool_call>", MALFORMED_NAME),
        ("<tool_call><function=look>what</function></tool_call>", "look"),
    ],
    "llama3_json": [('{"name": "look", "parameters": ', "look"), ("<|python_tag|>look()", MALFORMED_NAME)],
    "mistral": [("[TOOL_CALLS] [{", MALFORMED_NAME), ("[TOOL_CALLS]look[ARGS]{", "look")],
    "pythonic": [
        ("[look(what=", "look"),
        ('[look("é")]', "look"),
        ("[look(**{'what': 1})]", "look"),
        ("[look(what=open('/etc/passwd'))]", "look"),
        ("[look(what=f'{1}')]", "look"),
        ("[look(what=x)]", "look"),
        ("[look(what=1, what=2)]", "look"),
        ("[look(what={1: 2})]", "look"),
        ("[look(what={**x})]", "look"),
        ("[look(what=b'x')]", "look"),
        ("[look(what=-'x')]", "look"),
        ("[look(what=1)] and more", "look"),
        ("[look(what=1)][0]", "look"),
        ("[look-at(what=1)]", MALFORMED_NAME),
        ("[look(what=1)()]", MALFORMED_NAME),
        ("[look(what=0x" + "f" * 50_000 + ")]", "look"),
        ("[look(what='" + "x" * 200_000 + "')]", "look"),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_call(name: str) -> None:
    parsed = parse(GOOD[name], name)
    (call,) = parsed.calls
    assert (call.name, json.loads(call.arguments), call.malformed) == ("look", {"what": "é"}, None)
    assert parsed.content == ""


@pytest.mark.parametrize(("name", "text", "function"), [(n, *case) for n, cases in BAD.items() for case in cases])
def test_a_malformed_call_is_a_call_with_a_reason(name: str, text: str, function: str) -> None:
    parsed = parse(text, name)
    (call,) = parsed.calls
    assert call.name == function
    assert call.malformed
    assert parsed.malformed


def test_several_calls_and_content_around_them() -> None:
    parsed = parse(f"So:{GOOD['hermes']}{GOOD['hermes']} done", "hermes")
    assert [call.name for call in parsed.calls] == ["look", "look"]
    assert parsed.content == "So: done"
    both = '[{"name": "a", "arguments": {}, "id": "123456789"}, {"name": "b", "arguments": {}}]'
    calls = parse(f"[TOOL_CALLS]{both}", "mistral").calls
    assert [(call.name, call.id) for call in calls] == [("a", "123456789"), ("b", None)]
    odd = [
        {"name": "a", "id": call_id} for call_id in ("abcdefgh1", "abcdefgh1", "abcdefghgh1", "日本語日本語日本語", 9)
    ]
    ids = [call.id for call in parse(f"[TOOL_CALLS]{json.dumps(odd)}", "mistral").calls]
    assert ids == ["abcdefgh1", None, None, None, None], "Mistral's templates take nothing else"
    later = parse('[TOOL_CALLS]look[ARGS]{"what": "x"}', "mistral").calls
    assert (later[0].name, later[0].arguments) == ("look", '{"what": "x"}')


def test_later_mistral_calls_have_an_id_between_name_and_arguments() -> None:
    written = ["look[CALL_ID]abcdefgh1[ARGS]{}", "see[CALL_ID]abcdefgh1[ARGS]{}", "f[CALL_ID]1[ARGS]{"]
    calls = parse("[TOOL_CALLS]".join(["So ", *written]), "mistral").calls
    assert [(call.name, call.id, bool(call.malformed)) for call in calls] == [
        ("look", "abcdefgh1", False),
        ("see", None, False),
        ("f", None, True),
    ]


LOOK, SEE = (
    '{"name": "look", "parameters": {"what": "a; {b}"}}',
    '{"type": "function", "name": "see", "parameters": {}}',
)


@pytest.mark.parametrize("between", ["; ", ";", "\n", ", ", " "])
def test_several_calls_of_llama(between: str) -> None:
    parsed = parse(f"{LOOK}{between}{SEE}", "llama3_json")
    assert [(call.name, call.malformed) for call in parsed.calls] == [("look", None), ("see", None)]
    assert json.loads(parsed.calls[0].arguments) == {"what": "a; {b}"}
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look.\n{LOOK}", "I look.\n", 1),
        (f"I look.<|python_tag|>{LOOK}; {SEE}", "I look.", 2),
        (f"{LOOK}\nDone.", "\nDone.", 1),
        (f"I look. {LOOK[:30]}", "I look. ", 1),
        ('The owner is {"name": "Bob", "age": 3}.', 'The owner is {"name": "Bob", "age": 3}.', 0),
    ],
)
def test_a_call_of_llama_may_have_text_around_it(text: str, content: str, calls: int) -> None:
    parsed = parse(text, "llama3_json")
    assert (parsed.content, len(parsed.calls)) == (content, calls)


def test_calls_in_python_have_literals_of_python_and_of_json() -> None:
    text = """<|python_start|>[a.b(n=-1.5, t=true, o={"k": [None, null, (1, 'x')]}, s='it''s'), g()]<|python_end|>"""
    calls = parse(text, "pythonic").calls
    assert [(call.name, call.malformed) for call in calls] == [("a.b", None), ("g", None)]
    assert json.loads(calls[0].arguments) == {"n": -1.5, "t": True, "o": {"k": [None, None, [1, "x"]]}, "s": "its"}
    for content in ("[1, 2]", "look(what=1)", "Sure: [look(what=1)]", "[look]", "see [1] (there)"):
        assert parse(content, "pythonic") == parse(content, "plain")
    mixed = parse("[f(a=1), 3]", "pythonic").calls
    assert [call.name for call in mixed] == ["f", MALFORMED_NAME]


_LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


@given(arguments=st.dictionaries(st.from_regex("[a-z]{3,8}x", fullmatch=True), _LITERALS))
def test_what_python_writes_is_read_as_it_was_meant(arguments: dict[str, object]) -> None:
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    (call,) = parse(f"[f({written})]", "pythonic").calls
    assert (call.malformed, json.loads(call.arguments)) == (None, arguments)


def test_xml_parameters_are_json_where_they_can_be() -> None:
    text = "<tool_call><function=f><parameter=n>3</parameter><parameter=s>a b</parameter></function></tool_call>"
    (call,) = parse(text, "qwen3_coder").calls
    assert json.loads(call.arguments) == {"n": 3, "s": "a b"}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    "value", ["1" * 5000, "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "NaN", "1e999", r'"\ud800"'], ids=range(6)
)
def test_numbers_nests_and_characters_that_not_everybody_can_read(name: str, value: str) -> None:
    text = GOOD[name].replace('"é"', value).replace("\né\n", value)
    (call,) = parse(text, name).calls
    call.arguments.encode()
    assert call.malformed or (name == "qwen3_coder" and json.loads(call.arguments) == {"what": value})


@given(thought=st.text(), content=st.text())
def test_thoughts_are_kept_character_for_character(thought: str, content: str) -> None:
    if "</think>" in thought:
        return
    text = f"<think>{thought}</think>{content}"
    parsed = parse(text, "plain")
    assert (parsed.thought, parsed.content) == (thought, content)
    opened = parse(f"{thought}</think>{content}", "plain", in_thought=True)
    if not thought.startswith("<think>"):
        assert (opened.thought, opened.content) == (thought, content)
    unfinished = parse(f"<think>{thought}", "plain")
    assert (unfinished.thought, unfinished.content) == (thought, "")


@given(text=st.text(), name=st.sampled_from(sorted(FORMATS)))
def test_no_text_breaks_a_parser_and_text_without_markers_is_content(text: str, name: str) -> None:
    parsed = parse(text, name, thoughts=False)
    if not parsed.calls:
        assert parsed.content == text


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[f(",
    "a=",
    "'",
    ")",
    ",",
    "-",
    '{"name": "f"',
    "<function=f>",
    "}",
    "]",
    "<think>",
    "x",
]


@given(pieces=st.lists(st.sampled_from(PIECES)), name=st.sampled_from(sorted(FORMATS)))
def test_no_heap_of_markers_breaks_a_parser(pieces: list[str], name: str) -> None:
    for call in parse("".join(pieces), name).calls:
        assert call.malformed or isinstance(json.loads(call.arguments), dict)


def test_what_an_engine_parsed() -> None:
    function = {"name": "look", "arguments": "{"}
    message = {"content": "<think>hm</think>so", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    parsed = parsed_by_engine(message)
    assert (parsed.thought, parsed.content, parsed.malformed) == ("hm", "so", True)
