# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Turn boundaries of any template: transitions of many conversations, each with the correct text.

The correct text comes from the template alone: its rendering of the whole conversation, cut after the policy's text.
If that rendering does not begin with the turn's prompt, the template rewrites history, and there is no correct text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from tests.policy.families import TOOLS
from tests.policy.tokenizers import tokenizer_of


SHAPES = ["aa", "ac", "ca", "cc", "ta", "tc"]
"""Turns before the last answer: ``a`` is an answer, ``c`` a call, ``t`` two calls at once."""
SETTINGS = [(False, 1, False), (True, 1, True), (False, 3, True), (True, 3, False)]
"""System message or none, number of questions, and short or long texts; every pair of values occurs."""


@dataclass(frozen=True)
class Transition:
    """A turn, the messages after it, and the correct text between them.

    Attributes:
        history: the conversation up to and including the turn.
        new: the messages after it.
        tools: the offered tools.
        before: the turn's prompt as the template renders it.
        sampled: the sampled text.
        finish: why sampling ended.
        right: the template's text after that; ``None`` if it rewrites history.
    """

    history: Sequence[dict[str, Any]]
    new: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    before: str
    sampled: str
    finish: Finish
    right: str | None


def conversation(shape: str, system: bool, questions: int, long: bool) -> list[dict[str, Any]]:
    """Return a conversation of the shape, with numbered texts so that all turns differ."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}] if system else []
    number = itertools.count()

    def words(what: str) -> str:
        return f"{what} {next(number)} zürich" + " and so on, line by line\n" * 20 * long + "!"

    def ask() -> None:
        messages.append({"role": "user", "content": words("question")})

    def answer() -> None:
        messages.append({"role": "assistant", "content": words("answer")})

    def call(count: int) -> None:
        ids = [f"callid{next(number):03}" for _ in range(count)]
        calls = [
            {"id": one, "type": "function", "function": {"name": "look", "arguments": json.dumps({"what": f"w{one}"})}}
            for one in ids
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.extend(
            {"role": "tool", "tool_call_id": one, "name": "look", "content": words("result")} for one in ids
        )

    for _ in range(questions - 1):
        ask()
        answer()
    ask()
    for turn in shape:
        if turn == "a":
            answer()
            ask()
        else:
            call(1 if turn == "c" else 2)
    answer()
    ask()
    return messages


def transitions(template: ChatTemplate, stops: Sequence[str], shapes: Sequence[str]) -> Iterator[Transition]:
    """Yield the last two turns of every conversation that the template accepts.

    Each turn is stopped or cut, and written as by the template or with one more space.
    """
    for shape, setting, tools in itertools.product(shapes, SETTINGS, ((), TOOLS)):
        messages = conversation(shape, *setting)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index in turns[-2:]:
            end = next((at for at in turns if at > index), len(messages))
            history, new = messages[: index + 1], messages[index + 1 : end]
            for finish, verbatim in itertools.product((Finish.STOP, Finish.LENGTH), (True, False)):
                found = _transition(template, stops, history, new, tools, finish, verbatim)
                if found is not None:
                    yield found


def _transition(
    template: ChatTemplate,
    stops: Sequence[str],
    history: list[dict[str, Any]],
    new: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    finish: Finish,
    verbatim: bool,
) -> Transition | None:
    try:
        before = template.render(history[:-1], tools, prompt=True)
        full = template.render([*history, *new], tools, prompt=True)
    except CallerError:
        return None
    turn = history[-1]
    marks = [json.loads(call["function"]["arguments"])["what"] for call in turn.get("tool_calls", ())]
    written = marks[-1] if marks else turn["content"]
    at = full.find(written)
    if at < 0:
        # A template that knows no calls: the turn is empty in it, and there is nowhere to look.
        return None
    ends = sorted((full.find(one, at + len(written)), one) for one in stops if one in full[at + len(written) :])
    if not ends:
        return None
    end, stop = ends[0]
    sampled = full[len(before) : end] + (stop if finish is Finish.STOP else "")
    right = full[len(before) + len(sampled) :] if full.startswith(before) else None
    if not verbatim:
        sampled = sampled.replace(written, f" {written}")
    return Transition(history, new, tools, before, sampled, finish, right)


@dataclass
class Tally:
    """Counts of one template's transitions.

    Attributes:
        right: exact matches.
        wrong: mismatches.
        false_rewrites: rewrites reported without cause.
        rewritten: transitions at which the template rewrites history.
        differences: boundaries corrected by the rendering of the real conversation.
    """

    right: int = 0
    wrong: int = 0
    false_rewrites: int = 0
    rewritten: int = 0
    differences: int = 0


def ids_of(tokenizer: Tokenizer, *parts: str) -> list[list[int]]:
    """Return the ids of each part of a text as they are in the whole text."""
    texts = [""]
    for part in parts:
        texts.append(texts[-1] + part)
    whole = [tokenizer.encode(text) for text in texts]
    assert all(more[: len(less)] == less for less, more in itertools.pairwise(whole)), "a token lies across a seam"
    return [more[len(less) :] for less, more in itertools.pairwise(whole)]


def tally(source: str, *stops: str, kind: str = "bytes", shapes: Sequence[str] = SHAPES) -> Tally:
    """Tally the transitions of a template; ``stops`` are the end-of-turn tokens of its models."""
    tokenizer, counted = tokenizer_of(kind, source, *stops), Tally()
    renderer = Renderer(tokenizer, ChatTemplate(source))
    for one in transitions(renderer.template, stops, shapes):
        prompt, ids, right = ids_of(tokenizer, one.before[-60:], one.sampled, one.right or "")
        got = renderer.render_continuation(
            one.history, one.new, one.tools, sampled=ids, finish=one.finish, previous_id=prompt[-1]
        )
        counted.differences += got.corrected
        if one.right is None:
            counted.rewritten += 1
        else:
            same = got.ids == right
            counted.right += same
            counted.wrong += not same
            counted.false_rewrites += got.rewrites_history
    return counted
