# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Reasoning, content and calls in every format, and calls that an engine left in a final answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.engines.engine import Misconfigured
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.turn_scanner import MALFORMED_NAME, Parsed, parse, unparsed_tool_call
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.call_texts import ARGUMENTS, TOOLS, function_element, written
from tests.policy.families import TOOLS as LOOK_TOOLS
from tests.policy.runtimes import hosted
from tests.policy.scripted_engine import answer_of, is_probe, says
from tests.policy.vllm_parser import VllmParser
from tests.rollout.serving import serve as serving


NAMES = [name for name in FORMATS if name != "plain"]
UNCLOSED = {"llama3_json", "mistral", "pythonic", "granite", "openai"}
"""Formats whose calls end with their last bracket."""


def _read(text: str, name: str, **more: Any) -> tuple[str | None, str, list[tuple[str, Any]]]:
    parsed = parse(text, FORMATS[name], TOOLS, **more)
    return (
        parsed.reasoning,
        parsed.content,
        [(call.name, call.malformed or json.loads(call.arguments)) for call in parsed.calls],
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_every_json_type_and_a_second_call(name: str) -> None:
    calls = [("edit", ARGUMENTS), ("look", {})]
    assert _read(written(name, calls), name) == (None, "", calls)
    assert _read(written(name, calls[:1]), name, cut=name not in UNCLOSED) == (None, "", calls[:1])


@pytest.mark.parametrize("name", NAMES)
def test_no_beginning_of_a_call_that_the_token_limit_cut_off_is_whole(name: str) -> None:
    call = ("edit", {"text": "rm -rf /data/old-backups", "count": 3})
    text = written(name, [call]).rstrip()
    for length in range(1, len(text)):
        _, _, read = _read(text[:length], name, cut=True)
        complete = [one for one in read if isinstance(one[1], dict)]
        assert not complete or (complete == [call] and length > text.rindex("3")), text[:length]
    two = written(name, [("look", {}), call])
    parsed = parse(two[: two.index("rm -rf") + 9], FORMATS[name], TOOLS, cut=True)
    assert [bool(one.malformed) for one in parsed.calls] in ([False, True], [True], [True, True])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai"])
def test_calls_in_thoughts_are_not_read_and_calls_behind_thoughts_are(name: str) -> None:
    opening, closing = FORMATS[name].think
    call = written(name, [("edit", ARGUMENTS)])
    if name == "pythonic":
        assert _read(f"{opening}hm{closing}{call}", name) == ("hm", "", [("edit", ARGUMENTS)])
        return
    assert _read(f"{opening}I might {call}\nor not{closing}{call}", name)[1:] == ("", [("edit", ARGUMENTS)])
    assert _read(f"hm{closing}{call}", name, in_reasoning=True) == ("hm", "", [("edit", ARGUMENTS)])
    for text in (f"{opening}I might {call}", f"Well. {opening}I might {call}"):
        assert not _read(text, name, cut=True)[2], "the token limit ended the thought"
    assert not _read(f"Well. {opening}I might {call} or", name)[2]
    ended = _read(f"{opening}I will {call}", name)
    assert ended == (("I will " + call, "", []) if FORMATS[name].unmarked else ("I will ", "", [("edit", ARGUMENTS)]))


@pytest.mark.parametrize("name", ["deepseek_v31", "kimi_k2", "solar_open", "gemma4", "hermes", "mistral"])
def test_a_call_in_an_argument_that_was_cut_off_is_not_read(name: str) -> None:
    inner = written(name, [("look", {})])
    text = written(name, [("edit", {"text": f"see {inner} and"})])
    assert _read(text, name)[2][0] == ("edit", {"text": f"see {inner} and"})
    read = _read(text[: text.index(" and")], name, cut=True)[2]
    assert [one for one in read if isinstance(one[1], dict)] == []


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm45", "hy_v3", "minimax_m2", "kimi_k3", "deepseek_v4"])
@pytest.mark.parametrize(
    "text", ["<![CDATA[x]]>", " <![CDATA[a]]> b <![CDATA[c]]>", "\u2028", "<b>&amp;</b>", "\r\n x"]
)
def test_a_text_survives_whatever_it_holds(name: str, text: str) -> None:
    assert _read(written(name, [("edit", {"text": text})]), name)[2] == [("edit", {"text": text})]


def test_the_harmony_channels() -> None:
    call = written("openai", [("edit", ARGUMENTS)])
    start = "<|start|>assistant"
    text = f"<|channel|>analysis<|message|>hm<|end|>{start}<|channel|>commentary<|message|>So:<|end|>{start}{call}"
    assert _read(text, "openai") == ("hm", "So:", [("edit", ARGUMENTS)])
    assert _read("<|channel|>final<|message|>5", "openai") == (None, "5", [])
    assert _read("<|channel|>analysis<|message|>hm", "openai", cut=True) == ("hm", "", [])
    assert _read("Hello <|message|> x", "openai") == (None, "Hello <|message|> x", [])


MARKERS = {
    "hermes": ["</tool_call>", "<tool_call>", "<think>"],
    "qwen3_coder": ["<a></parameter></a>", "</function> x", "</tool_call> x", "<tool_call>", "<think>x"],
    "glm45": ["</tool_call> x", "<a></arg_value></a>"],
    "minimax_m2": ["<a></parameter></a>", "</invoke> x"],
    "deepseek_v4": ["</｜DSML｜parameter> x"],
    "deepseek_v31": ["<｜tool▁call▁end｜>"],
    "kimi_k2": ["<|tool_call_end|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "nemotron_v2": ["</TOOLCALL>"],
    "llama3_json": ['{"name": "x", "parameters": {}}'],
}


@pytest.mark.parametrize(("name", "marker"), [(name, marker) for name, each in MARKERS.items() for marker in each])
def test_a_marker_inside_an_argument_is_part_of_it(name: str, marker: str) -> None:
    call = ("edit", {"text": f"a {marker} b", "count": 3})
    assert _read(written(name, [call, ("look", {})]), name) == (None, "", [call, ("look", {})])


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("text", "42", "42"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "  indented\n", "  indented\n"),
        ("text", "", ""),
        ("mode", "1", "1"),
        ("maybe", "5", "5"),
        ("maybe", "null", None),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("count", "3", 3),
        ("deep", "True", True),
        ("list", "[1, 'x']", [1, "x"]),
        ("map", "{'k': True}", {"k": True}),
        ("unknown", "5", 5),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss", "hy_v3", "minicpm5"])
def test_bare_parameters_have_the_types_of_their_schemas(name: str, parameter: str, text: str, value: object) -> None:
    (call,) = _read(written(name, [("edit", {parameter: text})]), name)[2]
    assert call == ("edit", {parameter: value})


LOOK, SEE = (
    '{"name": "look", "parameters": {"what": "a; {b}"}}',
    '{"type": "function", "name": "see", "parameters": {}}',
)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # Qwen3-Coder sometimes leaves the opening marker out; vLLM reads that, too.
        (
            "qwen3_coder",
            "<function=edit>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
            "",
            ["edit"],
        ),
        ("qwen3_coder", "So:\n<function=edit>\n<parameter=count>3</function>", "So:\n", ["edit"]),
        ("llama3_json", '{"name": "bob", "age": 3}', '{"name": "bob", "age": 3}', []),
        ("llama3_json", 'Well: {"name": "bob", "age": 3}', 'Well: {"name": "bob", "age": 3}', []),
        ("hermes", '{"name": "edit", "arguments": {}}', '{"name": "edit", "arguments": {}}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {}}]', "", ["look"]),
        ("hermes", f"So:{written('hermes', [('look', {})] * 2)} done", "So:\n done", ["look", "look"]),
        ("llama3_json", f"I look.\n{LOOK}", "I look.\n", ["look"]),
        ("llama3_json", f"I look.<|python_tag|>{LOOK}; {SEE}", "I look.", ["look", "see"]),
        ("llama3_json", f"{LOOK}, {SEE}\nDone.", "\nDone.", ["look", "see"]),
        ("llama3_json", f"I look. {LOOK[:30]}", "I look. ", ["look"]),
        ("pythonic", "Sure: [look(what=1)]", "Sure: [look(what=1)]", []),
        ("pythonic", "[f(a=1), 3]", "", ["f", MALFORMED_NAME]),
        ("minimax_m3", "</mm:think>5", "5", []),  # it closes a thought where it does not think
        ("glm45", "<tool_call>\n</tool_call>", "", [MALFORMED_NAME]),
    ],
)
def test_what_is_a_call_and_what_is_an_answer(name: str, text: str, content: str, calls: list[str]) -> None:
    _, said, read = _read(text, name)
    assert (said, [call[0] for call in read]) == (content, calls)


BAD = {
    "hermes": [
        ('<tool_call>{"name": "look", "arguments": {"what": </tool_call>', "look"),
        ("<tool_call>look at it</tool_call>", MALFORMED_NAME),
        ('<tool_call>{"arguments": {}}</tool_call>', MALFORMED_NAME),
        ('<tool_call>{"name": "look", "arguments": "x"}</tool_call>', "look"),
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
        ("[look(what=open('/etc/passwd'))]", "look"),
        ("[look(what=1, what=2)]", "look"),
        ("[look(what=1)] and more", "look"),
        ("[look-at(what=1)]", MALFORMED_NAME),
    ],
}


@pytest.mark.parametrize(("name", "text", "function"), [(n, *case) for n, cases in BAD.items() for case in cases])
def test_a_malformed_call_is_a_call_with_a_reason_and_the_policys(name: str, text: str, function: str) -> None:
    parsed = parse(text, FORMATS[name])
    (call,) = parsed.calls
    assert call.name == function
    assert call.malformed
    assert unparsed_tool_call(text, FORMATS[name], {"look"}) is None


def test_ids_that_a_template_wants_back_are_kept() -> None:
    calls = parse(written("kimi_k2", [("edit", {}), ("look", {})]), FORMATS["kimi_k2"]).calls
    assert [call.id for call in calls] == ["functions.edit:0", "functions.look:1"]
    assert parse(written("solar_open", [("look", {})]), FORMATS["solar_open"]).calls[0].id is None
    odd = [{"name": "a", "id": one} for one in ("abcdefgh1", "abcdefgh1", "abcdefghgh1", "日本語日本語日本語", 9)]
    ids = [call.id for call in parse(f"[TOOL_CALLS]{json.dumps(odd)}", FORMATS["mistral"]).calls]
    assert ids == ["abcdefgh1", None, None, None, None], "Mistral's templates take nothing else"
    later = ["look[CALL_ID]abcdefgh1[ARGS]{}", "see[CALL_ID]abcdefgh1[ARGS]{}", "f[CALL_ID]1[ARGS]{"]
    calls = parse("[TOOL_CALLS]".join(["So ", *later]), FORMATS["mistral"]).calls
    assert [(call.name, call.id, bool(call.malformed)) for call in calls] == [
        ("look", "abcdefgh1", False),
        ("see", None, False),
        ("f", None, True),
    ]


def test_calls_in_python_have_literals_of_python_and_of_json() -> None:
    text = """<|python_start|>[a.b(n=-1.5, t=true, o={"k": [None, null, (1, 'x')]}, s='it''s'), g()]<|python_end|>"""
    calls = parse(text, FORMATS["pythonic"]).calls
    assert [(call.name, call.malformed) for call in calls] == [("a.b", None), ("g", None)]
    assert json.loads(calls[0].arguments) == {"n": -1.5, "t": True, "o": {"k": [None, None, [1, "x"]]}, "s": "its"}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000, "NaN", r'"\ud800"'], ids=range(4))
def test_values_that_not_every_reader_takes_break_no_parser(name: str, value: str) -> None:
    text = written(name, [("look", {"what": "é"})]).replace('"é"', value).replace("'é'", value).replace("é", value)
    (call,) = parse(text, FORMATS[name]).calls
    call.arguments.encode()
    assert call.malformed or (name == "qwen3_coder" and json.loads(call.arguments) == {"what": value})


@given(thought=st.text().filter(lambda text: "</think>" not in text), content=st.text())
def test_thoughts_are_kept_character_for_character(thought: str, content: str) -> None:
    parsed = parse(f"<think>{thought}</think>{content}", FORMATS["plain"])
    assert (parsed.reasoning, parsed.content) == (thought, content)
    unfinished = parse(f"<think>{thought}", FORMATS["plain"])
    assert (unfinished.reasoning, unfinished.content) == (thought, "")
    if not thought.startswith("<think>"):
        opened = parse(f"{thought}</think>{content}", FORMATS["plain"], in_reasoning=True)
        assert (opened.reasoning, opened.content) == (thought, content)


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[f(", "a=", "'", ")", ",", "-", '{"name": "f"']
PIECES += ["<function=f>", "}", "]", "<think>", "x"]


@given(text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join), name=st.sampled_from(sorted(FORMATS)))
def test_no_text_breaks_a_parser_and_text_without_calls_is_content(text: str, name: str) -> None:
    parsed = parse(text, FORMATS[name], reads_reasoning=False)
    assert all(call.malformed or isinstance(json.loads(call.arguments), dict) for call in parsed.calls)
    if not parsed.calls and not any(piece in text for piece in PIECES[:6]):
        assert parsed.content == text
    parse(text, FORMATS[name])
    unparsed_tool_call(text, FORMATS[name], {"f"})


@pytest.mark.parametrize("name", NAMES)
def test_long_texts_take_linear_time(name: str) -> None:
    """Quadratic patterns would take minutes and exceed the test's time limit."""
    pieces = [" " * 200_000, "<" * 100_000, written(name, [("look", {})])[:12] * 20_000, "<parameter=a>" * 10_000]
    pieces += ["<arg_key>a</arg_key>" * 10_000, '{"' * 50_000, "[" * 100_000, "<tool_call>" * 20_000]
    pieces += ["<function=" * 10_000, "<invoke name=" * 10_000, "<|tool_call>call:1{<tool_call|>" * 3_000]
    call = written(name, [("look", {})])
    for piece in pieces:
        for text in (piece, written(name, [("edit", {"text": piece})]), f"<tool_call>{piece}"):
            parse(text, FORMATS[name], TOOLS)
    for at in range(0, len(call), 9):
        parse(f"{call[:at]}{' ' * 50_000}x{call[at:]}", FORMATS[name], TOOLS)
    parse(call * (200_000 // len(call)), FORMATS[name], TOOLS)


# Calls that an engine without its tool parser left in a final answer


CALL = written("hermes", [("look", {"what": "é"})])
NOT_LEFT = [
    "42",
    f"I could write {CALL} and then wait.",
    f"This is how one looks:\n```xml\n{CALL}\n```",
    f"This is how one looks:\n```\n{CALL}",
    f"`{CALL.replace(chr(10), '')}`",
    CALL.replace("look", "submit"),
    f"{CALL}\n<tool_call>\nlook again\n</tool_call>",
    '<tool_call>{"name": "look"}</tool_call>',
    '<tool_call>{"name": "look", "parameters": {"what": "é"}}</tool_call>',
]
LEFT = [CALL, f"Let me see.\n{CALL}", f"`ls` and ```sh\nls\n``` first. {CALL}\n{CALL}\n"]


@pytest.mark.parametrize(
    ("content", "name"), [*((text, "look") for text in LEFT), *((text, None) for text in NOT_LEFT)]
)
def test_a_call_at_the_end_is_left_over_and_talk_about_calls_is_not(content: str, name: str | None) -> None:
    assert unparsed_tool_call(content, FORMATS["hermes"], {"look"}) == name
    assert unparsed_tool_call(content, FORMATS["plain"], {"look"}) is None


def engine(*turns: dict[str, Any]) -> FastAPI:
    """Return an engine that parses turns itself, with these turns."""
    left = iter(turns)

    def answer(body: dict[str, Any]) -> Any:
        if is_probe(body):
            return answer_of(body)
        turn = {"role": "assistant", "prompt_token_ids": [len(body["messages"])], **next(left)}
        reason = turn.pop("finish", "stop")
        logged = {"content": [{"token": "token_id:3", "logprob": -0.5}]}
        return {"choices": [{"message": turn, "logprobs": logged, "finish_reason": reason}]}

    return says("/v1/chat/completions", answer, published=False)


async def ask(host: PolicyRuntime, name: str = "r", **fields: Any) -> Parsed:
    return (await host.service.turn(TurnRequest(name, [{"role": "user", "content": "?"}], **fields))).parsed


FUNCTION = {"name": "look", "arguments": "{}"}
PARSED = {
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
    "finish": "tool_calls",
}


@pytest.mark.parametrize(
    ("kind", "name"), [("nemo_rl", "hermes"), ("vllm_chat", "qwen3_coder"), ("nemo_rl", "mistral")]
)
async def test_an_engine_without_its_parser_is_an_error_of_the_deployment(kind: str, name: str) -> None:
    """`tool_call_parser` names the format to look for; `plain` looks for none."""
    said = {"content": written(name, [("look", {"what": "é"})])}
    async with (
        serving(engine(said, said)) as url,
        hosted(url, engine=kind, tool_call_parser=name) as host,
        hosted(url, engine=kind, tool_call_parser="plain") as plain,
    ):
        with pytest.raises(Misconfigured, match=r"tool_parser: .*call of look.*chat_kwargs\.tool_parser"):
            await ask(host, tools=LOOK_TOOLS)
        assert (await ask(plain, tools=LOOK_TOOLS)).content == said["content"]


@pytest.mark.parametrize(
    ("turn", "fields"),
    [
        ({"content": CALL}, {}),
        ({"content": CALL}, {"tools": LOOK_TOOLS, "tool_choice": "none"}),
        ({"content": CALL, "finish": "length"}, {"tools": LOOK_TOOLS}),
        ({"content": f"<think>{CALL}"}, {"tools": LOOK_TOOLS}),
        ({"content": "see", "reasoning_content": CALL}, {"tools": LOOK_TOOLS}),
    ],
)
async def test_where_nothing_was_to_be_parsed_nothing_is_left_over(
    turn: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with serving(engine(turn)) as url, hosted(url, engine="nemo_rl") as host:
        assert not (await ask(host, **fields)).calls


async def test_what_an_engine_with_a_parser_leaves_is_the_policys() -> None:
    async with serving(engine(PARSED, {"content": CALL})) as url, hosted(url, engine="nemo_rl") as host:
        assert (await ask(host, "one", tools=LOOK_TOOLS)).calls
        assert not (await ask(host, "two", tools=LOOK_TOOLS)).calls


ORACLE = [
    *("hermes", "qwen3_coder", "mistral", "pythonic", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v41", "glm45", "kimi_k2", "kimi_k3", "minimax_m2", "minimax_m3", "minicpm5", "gemma4", "granite"),
    *("apertus", "lfm2"),
]
"""Formats that vLLM's parser of the same name reads alike; its parser trims Seed-OSS's values, its template does not.

"""


@pytest.mark.engine
def test_calls_are_read_as_by_vllms_own_parsers() -> None:
    conversations: list[list[tuple[str, dict[str, Any]]]] = [
        [("edit", ARGUMENTS), ("look", {})],
        *([("edit", {"text": text})] for text in ("  42\n", "5", "true", '{"a": 1}', "null", "é\n\n  x")),
        [("edit", {"count": 3, "deep": False})],
    ]
    cases = [(name, written(name, calls), calls) for name in ORACLE for calls in conversations]
    cases.append(("qwen3_coder", function_element("edit", {"count": 3}) + "\n</tool_call>", [("edit", {"count": 3})]))
    pattern = r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|｜DSML｜|\[[A-Z_]{3,}\]|</?(?:tool_call|arg_\w+|minimax:\w+)>"
    pattern += r"|\]<\]minimax\[>\["
    markers = {one for _, text, _ in cases for one in re.findall(pattern, text)}
    markers |= {*("<think>", "</think>", "<mm:think>", "</mm:think>"), *('<|"|>', "<|tool_call>", "<tool_call|>")}
    with VllmParser(*sorted(markers), "<|channel>", "<channel|>") as parser:
        for name, text, calls in cases:
            theirs = [one["function"] for one in parser(name, text, TOOLS)[1]]
            assert [(one["name"], json.loads(one["arguments"])) for one in theirs] == calls, (name, text)
            assert _read(text, name)[2] == calls
