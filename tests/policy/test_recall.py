# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A template that recalls what it wrote writes the same as one that does not."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stand_in_engine import TEMPLATE
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.recall import Recall
from nemo_gym_prorl.policy.text.template import ChatTemplate
from tests.policy.families import TEMPLATES


NOW = datetime(2026, 1, 1)
BODY = """{% set text = m.content | trim %}{{ m.role }}: {{ text }}{{ flag }}{{ loop.index }}
{% if loop.index0 > ns.last and loop.last %}!{% elif loop.index0 > ns.last %}?{% endif %}
{% if messages[0].role == 'user' and add_generation_prompt %}>{% endif %}{% set inner = namespace(n=0) %}
{% for call in m.tool_calls or [] %}{% if not loop.first %},{% endif %}{% set inner.n = inner.n + 1 %}
{{ call.function.name }}{{ inner.n }}{% if loop.last %}{% break %}{% endif %}{% endfor %}
{{ (messages[loop.index0 + 1] or {}).role }}{{ (messages[loop.index - 3] or {}).role }}
{{ (loop.previtem or {}).role }}"""
LATEST = """{% set ns = namespace(last=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}BODY{% endfor %}{{ messages | length }}""".replace("BODY", BODY)

SOURCES = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
SOURCES |= {"stand-in": TEMPLATE, "latest": LATEST}

UNDERSTOOD = {
    "name": "{{ m.content }}",
    "neighbour": "{{ m.content }}{{ (messages[loop.index0 - 1] or {}).role }}",
    "first": "{{ m.content }}{{ loop.first }}{{ loop.last }}{{ (loop.nextitem or {}).role }}",
    "latest": BODY,
}
NOT_UNDERSTOOD = {
    "macro": "{{ shout(m.content) }}",
    "space": "{% set ns.last = m.content %}{{ ns.last }}",
    "length": "{{ loop.length }}",
    "revindex": "{{ loop.revindex }}",
    "cycle": "{{ loop.cycle('a', 'b') }}",
    "changed": "{{ loop.changed(m.role) }}",
    "loop": "{% set mine = loop %}{{ mine.length }}",
    "all": "{{ messages | length }}",
    "last": "{{ messages[-1].content }}",
    "far": "{{ messages[loop.index0 // 2].content }}",
    "inner": "{% for x in [0, 0] %}{{ messages[loop.index0].content }}{% endfor %}",
    "random": "{{ [1, 2, 3, 4] | random }}",
    "joiner": "{{ j() }}{{ m.content }}",
    "clock": "{{ strftime_now('%f') }}",
    "break": "{{ m.content }}{% if m.role == 'tool' %}{% break %}{% endif %}",
    "set again": "{{ kept }}{% set kept = m.content %}{{ kept }}",
    "messages": "{% set messages = [m] %}{{ messages[0].role }}",
    "its own space": "{% if m.role == 'tool' %}{% set ns = namespace(last=1) %}{% endif %}{% set ns.last = m.role %}",
}
HEAD = (
    "{% macro shout(x) %}{{ x }}{{ messages | length }}{% endmacro %}"
    "{% set ns = namespace(last=0) %}{% set j = joiner('/') %}{% set kept = '-' %}"
)


def written_in(body: str) -> str:
    return HEAD + "{% for m in messages %}" + body + "{% endfor %}"


def message(role: str, text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": role, "content": text}
    if role == "assistant" and text:
        made["tool_calls"] = [
            {"id": "c", "type": "function", "function": {"name": name, "arguments": {"a": text}}} for name in text[:2]
        ]
    return made


ROLES = st.sampled_from(["user", "assistant", "tool"])

steps = st.lists(
    st.tuples(
        st.integers(0, 6),  # messages that are kept of those before, from the end
        st.lists(
            st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.sampled_from(["", "a", "bc"])), max_size=4
        ),
        st.booleans(),
        st.sampled_from([0, 1, True, 0.0, -0.0, "x"]),
        st.sampled_from([(), ("one",), ("one", "two")]),
    ),
    min_size=2,
    max_size=8,
)


def held_together(source: str, played: list[Any], *, refuses: bool = True) -> None:
    """Plays a conversation that grows, shrinks and forks."""
    template, recall = ChatTemplate(source, bos_token="<s>", eos_token="</s>"), Recall()
    conversation: list[dict[str, Any]] = [message("system", "s"), message("user", "q")]
    for dropped, more, prompt, flag, names in played:
        conversation = conversation[: max(0, len(conversation) - dropped)] + [message(*one) for one in more]
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        variables = {"flag": flag}
        try:
            plain = template.writer(tools, NOW, variables)(conversation, prompt)
        except CallerError:
            assert refuses
            plain = None
        try:
            kept = template.writer(tools, NOW, variables, recall)(conversation, prompt)
        except CallerError:
            kept = None
        assert kept == plain


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=25, deadline=None)
@given(played=steps)
def test_what_is_recalled_is_what_would_be_written(name: str, played: list[Any]) -> None:
    held_together(SOURCES[name], played)


@pytest.mark.parametrize("name", [*UNDERSTOOD, *(name for name in NOT_UNDERSTOOD if name not in ("random", "clock"))])
@settings(max_examples=25, deadline=None)
@given(played=steps)
def test_whatever_a_loop_reads(name: str, played: list[Any]) -> None:
    held_together(written_in((UNDERSTOOD | NOT_UNDERSTOOD)[name]), played, refuses=name not in UNDERSTOOD)


class Counted(dict[str, Any]):
    """A message that counts how often its content is read."""

    reads = 0

    def __getitem__(self, name: str) -> Any:
        self.reads += name == "content"
        return super().__getitem__(name)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_only_what_is_new_is_written(name: str) -> None:
    template, recall = ChatTemplate(written_in(UNDERSTOOD[name])), Recall()
    conversation = [Counted(message("user", "q"))]
    for _ in range(3):
        conversation += [Counted(message("assistant", "ab")), Counted(message("tool", "r"))]
        template.writer((), NOW, {}, recall)(conversation, True)
    read = conversation[3].reads
    conversation += [Counted(message("assistant", "ab"))]
    template.writer((), NOW, {}, recall)(conversation, True)
    assert conversation[-1].reads
    assert conversation[3].reads == read > 0


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_a_loop_that_keeps_or_reads_more_is_left_as_it_is(name: str) -> None:
    template, recall = ChatTemplate(written_in(NOT_UNDERSTOOD[name])), Recall()
    for _ in range(2):
        template.writer((), NOW, {}, recall)([message("user", "q"), message("assistant", "ab")], True)
    assert not recall.loops


def test_another_shorter_conversation_is_not_what_is_recalled() -> None:
    template, recall = ChatTemplate(written_in("{{ m.content }}")), Recall()
    conversation = [message("user", "q"), message("assistant", "a"), message("tool", "b")]
    template.writer((), NOW, {}, recall)(conversation, True)
    assert template.writer((), NOW, {}, recall)([message("user", "u")], True) == "u"
    assert list(recall.loops[0].messages) == conversation
