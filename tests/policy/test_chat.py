# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Incremental rendering against full rendering, over every template family."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.parsers import parse
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate, Message, as_message
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from tests.policy.engines import tiny_model
from tests.policy.families import FAMILIES, TOOLS, Family, call_message


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(FastTokenizer.from_file(str(tiny_model() / "tokenizer.json")))


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30).filter(
    lambda text: text == text.strip() and "<" not in text and "[" not in text and '"' not in text and "\\" not in text
)


def written(family: Family, message: Message) -> str:
    """What a model would have sampled to be understood as the message."""
    if message.get("tool_calls"):
        what = json.loads(message["tool_calls"][0]["function"]["arguments"])["what"]
        return family.call % what
    space = " " if family.name == "brackets" else ""
    return space + message["content"]


def chained(renderer: Renderer, family: Family, conversation: list[Message]) -> str:
    """The text of a conversation that was sampled and rendered turn by turn."""
    ids: list[int] = []
    rewritten = False
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        history = conversation[:index]
        if not ids:
            ids = renderer.first(history, TOOLS).ids
        stop = family.call_stop or family.stop if message.get("tool_calls") else family.stop
        sampled = renderer.tokenizer.encode(written(family, message) + stop)
        ids += sampled
        after = conversation[index + 1 :]
        new = after[: next((i for i, m in enumerate(after) if m["role"] == "assistant"), len(after))]
        if new:
            more = renderer.next([*history, message], new, TOOLS, sampled=sampled, finish=Finish.STOP)
            ids += more.ids
            rewritten |= more.rewrites_history
    assert not rewritten
    return renderer.tokenizer.decode(ids)


@st.composite
def conversations(draw: st.DrawFn, questions: int = 3) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    for _ in range(draw(st.integers(1, questions))):
        messages.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            messages.append(call_message(draw(TEXT)))
            messages.append({"role": "tool", "tool_call_id": "abcdefgh1", "content": draw(TEXT)})
        messages.append({"role": "assistant", "content": draw(TEXT)})
    messages.append({"role": "user", "content": draw(TEXT)})
    return messages


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("brackets", "opened")])
@given(data=st.data())
@settings(max_examples=40)
def test_turn_by_turn_is_what_the_template_renders_at_once(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    renderer = family.renderer(tokenizer())
    conversation = data.draw(conversations())
    expected = renderer.template.render(conversation, TOOLS, prompt=True)
    assert chained(renderer, family, conversation) == expected


@given(conversation=conversations(questions=1))
@settings(max_examples=40)
def test_a_template_that_moves_its_tools_is_exact_within_one_question(conversation: list[Message]) -> None:
    family = FAMILIES["brackets"]
    renderer = family.renderer(tokenizer())
    conversation = conversation[:-2]
    if conversation[-1]["role"] == "tool":
        expected = renderer.template.render(conversation, TOOLS, prompt=True)
        assert chained(renderer, family, conversation) == expected


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=look>", "<parameter=what>", "</parameter>", "</function>"),
    *("[TOOL_CALLS]", "[ARGS]", '"[1]"', "[", "]", "{", "}", ",", '"', "<think>", "</think>", "</s>", "<|im_end|>"),
]


@pytest.mark.parametrize("name", FAMILIES)
@given(where=st.integers(0, 100), to=st.integers(0, 100), what=st.sampled_from(PIECES) | st.text(max_size=3))
def test_the_conversation_goes_on_whatever_the_policy_wrote(name: str, where: int, to: int, what: str) -> None:
    family = FAMILIES[name]
    renderer = family.renderer(tokenizer())
    call = family.call % "日本"
    text = call[:where] + what + call[max(where, to) :]
    parsed = parse(text, FORMATS[family.tool_format])
    message = as_message(replace(parsed, calls=parsed.calls[:1]) if renderer.one_call else parsed)
    calls = message.get("tool_calls", [])
    new: list[Message] = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls] or [USER]
    history = [USER, message]
    sampled = renderer.tokenizer.encode(text + family.stop)
    renderer.next(history, new, TOOLS, sampled=sampled, finish=Finish.STOP)
    renderer.first([*history, *new], TOOLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_that_takes_one_call_at_a_time_is_known(name: str) -> None:
    assert FAMILIES[name].renderer(tokenizer()).one_call == (name == "headers")


def rewrites(name: str, history: list[Message], new: list[Message], *, thoughts: bool = False) -> bool:
    renderer = FAMILIES[name].renderer(tokenizer())
    if thoughts:
        thought = f"<think>\nhm\n</think>\n\n{history[-1]['content']}"
        history = [*history[:-1], history[-1] | {"content": thought}]
    return renderer.next(history, new, TOOLS, sampled=[1], finish=Finish.STOP).rewrites_history


USER: Message = {"role": "user", "content": "q"}
AND: Message = {"role": "user", "content": "and?"}
SAID: Message = {"role": "assistant", "content": "a"}
RESULT: Message = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "r"}


@pytest.mark.parametrize(
    ("name", "history", "new", "thoughts", "expected"),
    [
        ("chatml", [USER, SAID], [AND], False, False),
        ("chatml", [USER, SAID], [AND], True, False),
        ("thinking", [USER, SAID], [AND], False, False),
        ("thinking", [USER, SAID], [AND], True, True),
        ("thinking", [USER, call_message("x")], [RESULT], True, False),
        ("headers", [USER, call_message("x")], [RESULT], False, False),
        ("brackets", [USER, call_message("x")], [RESULT], False, False),
        ("brackets", [USER, SAID], [AND], False, True),
        ("opened", [USER, SAID], [AND], True, True),
        ("turns", [USER, SAID], [AND], False, False),
        ("xml", [USER, call_message("x")], [RESULT], False, False),
    ],
)
def test_rewritten_history_is_noticed(
    name: str, history: list[Message], new: list[Message], thoughts: bool, expected: bool
) -> None:
    assert rewrites(name, history, new, thoughts=thoughts) is expected


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_turn_is_there_once_however_sampling_ended(name: str) -> None:
    family = FAMILIES[name]
    renderer = family.renderer(tokenizer())
    history = [USER, call_message("x")]
    stop = tokenizer().encode(family.stop)[0]
    ended = renderer.next(history, [RESULT], TOOLS, sampled=[5, stop], finish=Finish.STOP).ids
    cut = renderer.next(history, [RESULT], TOOLS, sampled=[5], finish=Finish.LENGTH).ids
    assert cut[1:] == ended
    assert cut[0] in tokenizer().special


@pytest.mark.parametrize("turns", [1, 40])
def test_only_what_is_new_is_tokenised_late_in_a_conversation(turns: int) -> None:
    """Rendering all of it as text is what tells the seam, and is cheap; tokens are not."""
    renderer = FAMILIES["thinking"].renderer(tokenizer())
    history = [USER, *[call_message("x" * 1000), {**RESULT, "content": "y" * 1000}] * turns, call_message("z")]
    encoded: list[str] = []
    original = renderer.tokenizer.encode_observed

    def counting(text: str, places: Sequence[tuple[int, int]], behind: int | None = None) -> tuple[list[int], int]:
        encoded.append(text)
        return original(text, places, behind)

    rendered: list[str] = []
    write = renderer.template.writer

    def writer(*arguments: Any) -> Callable[..., str]:
        def counted(messages: Sequence[Message], prompt: bool) -> str:
            rendered.append(write(*arguments)(messages, prompt))
            return rendered[-1]

        return counted

    renderer.tokenizer.encode_observed, renderer.template.writer = counting, writer
    before = renderer.first(history[:-1], TOOLS).written
    encoded.clear()
    rendered.clear()
    sampled = renderer.tokenizer.encode((FAMILIES["thinking"].call % "z").lstrip() + "<|im_end|>")
    for sent in (sampled, renderer.tokenizer.encode("\n") + sampled):
        more = renderer.next(history, [RESULT], TOOLS, sampled=sent, finish=Finish.STOP, before=before)
        assert not more.rewrites_history
    assert sum(map(len, encoded)) < 200
    assert len(rendered) <= 8


def test_what_is_wrong_with_a_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="chat_template: not a Jinja template"):
        ChatTemplate("{% for %}")
    refusing = ChatTemplate("{{ raise_exception('no such role') }}")
    with pytest.raises(CallerError, match="no such role"):
        refusing.render([USER], prompt=True)
    with pytest.raises(CallerError, match=r"no tokenizer\.json"):
        Renderer.load(str(tmp_path))
    forgetful = Renderer(tokenizer(), ChatTemplate("{{ messages[-1].content }}"))
    with pytest.raises(CallerError, match="drops the assistant message"):
        forgetful.next([USER, SAID], [USER], sampled=[1], finish=Finish.STOP)
