# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Can a chat template be followed? Tried out with a few conversations before the first rollout.

A template is an arbitrary program, and a tokenizer has its own ideas of white space. What neither is known to do is
what goes wrong in silence: results that are not shown, an end of turn written twice, a space that nobody wrote.
So each seam of some made-up conversations is rendered as it will be, and held against the template's rendering of the
whole. What a rollout's tokens would differ in is refused by its name, at the start.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.messages import Message, Tools
from nemo_gym_prorl.policy.text.parsers import FORMATS, ToolCall, parse
from nemo_gym_prorl.policy.text.renderer import PROBE, PROBE_NAME, Renderer
from nemo_gym_prorl.policy.text.seam import end_of_turn


_NOW = datetime(2000, 1, 1)
"""As in a rollout, it does not get later from turn to turn."""


class CannotFollow(CallerError):
    """A chat template or tokenizer whose conversations would not be what the model was trained on."""

    problem = "template-not-followed"


def rehearse(renderer: Renderer, tool_format: str, *, thoughts: bool = True) -> None:
    """Try conversations out: without tools, and with those that the template shows.

    Args:
        renderer: the template and the tokenizer.
        tool_format: how calls are read; with ``plain`` nobody calls.
        thoughts: whether a leading ``<think>`` block is taken as one.

    Raises:
        CannotFollow: it says what goes wrong.
    """
    always: Tools = PROBE if tool_format != "plain" and renderer.wants_tools else ()
    for conversation in _answers():
        _play(renderer, conversation, always, "plain", thoughts=thoughts)
    if tool_format == "plain" or not renderer.shows_tools:
        return
    for conversation in _calls():
        _play(renderer, conversation, PROBE, tool_format, thoughts=thoughts)


def _answers() -> Iterator[list[Message]]:
    yield [_user("Askone"), _said("Sayone"), _user("Asktwo"), _said("Saytwo"), _user("Askthree")]
    yield [{"role": "system", "content": "Rules"}, _user("Askone"), _said("Sayone"), _user("Asktwo")]


def _calls() -> Iterator[list[Message]]:
    begun = [_user("Askone"), _call("Partone"), _result("Seenone", "Partone")]
    yield [*begun, _call("Parttwo"), _result("Seentwo", "Parttwo"), _said("Sayone"), _user("Asktwo")]
    yield [{"role": "system", "content": "Rules"}, *begun]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(part: str) -> Message:
    function = {"name": PROBE_NAME, "arguments": json.dumps({"part": part})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _id(part), "type": "function", "function": function}],
    }


def _result(text: str, part: str) -> Message:
    return {"role": "tool", "tool_call_id": _id(part), "name": PROBE_NAME, "content": text}


def _id(part: str) -> str:
    return f"call{part[4:]}00"


def _marks(message: Message) -> str:
    """The word of a message that no other has."""
    calls = message.get("tool_calls")
    return str(json.loads(calls[-1]["function"]["arguments"])["part"] if calls else message["content"])


def _play(
    renderer: Renderer, conversation: Sequence[Message], tools: Tools, tool_format: str, *, thoughts: bool
) -> None:
    turns = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
    for at, end in zip(turns, [*turns[1:], len(conversation)], strict=True):
        history, new = conversation[: at + 1], conversation[at + 1 : end]
        try:
            prompt = renderer.template.render(history[:-1], tools, prompt=True, now=_NOW)
            full = renderer.template.render([*history, *new], tools, prompt=True, now=_NOW)
        except CallerError as error:
            if conversation[0]["role"] == "system":
                return  # It says itself, and by name, that it takes no system's messages.
            called = any("tool_calls" in message for message in conversation)
            said = "a call and its result" if called else "an answer and another question"
            raise _cannot_follow(f"it does not take {said}: {error.reason}") from error
        _Seam(renderer, history, new, tools, prompt, full).check(tool_format, thoughts=thoughts)


class _Seam:
    """One turn of a conversation, and what the template writes of it."""

    def __init__(
        self,
        renderer: Renderer,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools,
        prompt: str,
        full: str,
    ) -> None:
        self._renderer, self._tokenizer = renderer, renderer.tokenizer
        self._history, self._new, self._tools = history, new, tools
        self._prompt, self._full = prompt, full

    def check(self, tool_format: str, *, thoughts: bool) -> None:
        full, turn, mark = self._full, self._history[-1], _marks(self._history[-1])
        said = "the policy's calls" if turn.get("tool_calls") else "what the policy said"
        self._holds(mark in full, f"it drops {said}")
        for message in self._new:
            what = "results of tools" if message["role"] == "tool" else "what users say"
            self._holds(_marks(message) in full, f"it drops {what}")
        at = full.rindex(mark) + len(mark)
        self._holds(_marks(self._new[0]) in full[at:], "it writes what follows a turn before it")
        gap = full[at : full.index(_marks(self._new[0]), at)]
        end = self._end(gap, calls=bool(turn.get("tool_calls")))
        closed = at + gap.index(end) if end else at
        whole = full.startswith(self._prompt)
        start = len(self._prompt) if whole else self._parting()
        opened = thoughts and self._prompt.rstrip().endswith("<think>")
        self._read(full[start:closed], turn, tool_format, whole=whole, opened=opened)
        right = full[closed + len(end) :]
        if whole:
            body, cut = full[start:closed], full[closed:]
            self._follows(body + end, right, returned=True)
        elif not turn.get("tool_calls"):
            body, cut = mark, full[at:]
        else:
            return
        self._follows(f" {body}{end}", right)
        self._follows(body, cut, finish=Finish.LENGTH)
        eos = self._renderer.template.eos_token
        if end and eos not in gap and eos in self._tokenizer.special.values():
            self._follows(body + eos, right)

    def _end(self, gap: str, *, calls: bool) -> str:
        """The token at which the turn ends, if the template has one for that."""
        special = self._tokenizer.special_pattern
        own = special.findall(end_of_turn(self._renderer.template.writer(self._tools), special))
        known = [self._renderer.template.eos_token, *own[:1], *(special.findall(gap)[:1] if calls else ())]
        return next((end for end in known if end and end in gap), "")

    def _parting(self) -> int:
        """Where the template begins to write the turn otherwise than its prompt did: behind a token or a line."""
        pairs = enumerate(zip(self._prompt, self._full, strict=False))
        alike = self._full[: next((place for place, (one, other) in pairs if one != other), None)]
        tokens = [token.end() for token in self._tokenizer.special_pattern.finditer(alike)]
        return max([0, alike.rfind("\n") + 1, *tokens])

    def _read(self, body: str, turn: Message, tool_format: str, *, whole: bool, opened: bool) -> None:
        """What the template writes of a turn is what a policy writes: it must be read as what it says."""
        if opened:
            body = body.rpartition("</think>")[2]
        parsed = parse(body, tool_format)
        if not turn.get("tool_calls"):
            if not whole:
                return
            text = self._tokenizer.without_special(parsed.content).strip()
            self._holds(text == turn["content"], f"an answer would be read as {text!r}")
            return
        self._holds(
            self._reads(parsed.content, parsed.calls, whole=whole),
            f"tool_call_parser {tool_format!r} does not read its calls"
            + "".join(f", {name!r} does" for name in FORMATS if self._reads(*FORMATS[name](body), whole=whole)),
        )

    def _reads(self, content: str, calls: Sequence[ToolCall], *, whole: bool) -> bool:
        """Whether the turn's calls are read, and nothing is left of what they are written in."""
        left = whole and self._tokenizer.without_special(content).strip()
        return _named(calls) == _wanted(self._history[-1]) and not left

    def _follows(self, sampled: str, right: str, *, finish: Finish = Finish.STOP, returned: bool = False) -> None:
        """What is put after a sampled text is what the template puts there, to the token.

        With ``returned``, the text is also what its tokens are read as.
        """
        encode, texts = self._tokenizer.encode, (self._prompt, self._prompt + sampled, self._prompt + sampled + right)
        prompt, turn, whole = map(encode, texts)
        if turn[: len(prompt)] != prompt or whole[: len(turn)] != turn:
            return  # A token lies across the seam, as none does that is sampled.
        ids, behind = turn[len(prompt) :], prompt[-1]
        got = self._renderer.next(
            self._history, self._new, self._tools, sampled=ids, finish=finish, behind=behind, now=_NOW
        )
        text = self._tokenizer.decode(got.ids, ids[-1])
        self._holds(got.ids == whole[len(turn) :], f"after {sampled!r} there would be {text!r} and not {right!r}")
        text = self._tokenizer.decode(ids, behind)
        same = text.split() == sampled.split()  # Spaces beside special tokens may be the tokenizer's own.
        self._holds(not returned or same, f"the tokenizer gives {sampled!r} back as {text!r}")

    def _holds(self, true: bool, otherwise: str) -> None:
        if not true:
            raise _cannot_follow(otherwise)


def _cannot_follow(why: str) -> CannotFollow:
    return CannotFollow(
        f"it cannot be followed turn by turn: {why}. Give another template or another tool_call_parser "
        "(plain where no tools are offered), or let the engine render and read its turns (engine: vllm_chat)",
        field="chat_template",
    )


def _named(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls if not call.malformed]


def _wanted(turn: Message) -> list[tuple[str, object]]:
    functions = [call["function"] for call in turn["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
