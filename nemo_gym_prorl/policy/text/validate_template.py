# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a chat template can be followed turn by turn, tried out with a few conversations before the first rollout.

A template is an arbitrary program, and tokenizers differ in what they do to white space. What goes wrong does so in
silence: results that are not shown, an end of turn written twice, a space that nobody wrote. So each turn boundary of
some made-up conversations is rendered as it will be, and compared with the template's rendering of the whole. A
template whose rollouts would differ in a token is refused at the start, with the difference. Pure: no task, socket,
clock or thread.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.formats import FORMATS, THOUGHT_MARKERS, format_named
from nemo_gym_prorl.policy.text.parsers import Format, ToolCall, parse
from nemo_gym_prorl.policy.text.renderer import PROBE, PROBE_NAME, Renderer
from nemo_gym_prorl.policy.text.template import Message, Tools
from nemo_gym_prorl.policy.text.turn_boundary import end_of_turn


_NOW = datetime(2000, 1, 1)
"""As in a rollout, it does not get later from turn to turn."""


class CannotFollow(CallerError):
    """A chat template or tokenizer whose conversations would not be what the model was trained on."""

    problem = "template-not-followed"


def validate_template(renderer: Renderer, tool_format: str | None = None, *, thoughts: bool = True) -> Format:
    """Try conversations out, without tools and with those that the template shows; return how the model writes turns.

    The markers of a thought are those that the template itself names.

    Args:
        renderer: the template and the tokenizer; its ``thought_marker`` is set.
        tool_format: name of the format of calls; with ``plain`` nobody calls, and ``None`` takes the first format that
            reads what the template writes.
        thoughts: whether a leading thought is taken as one.

    Raises:
        CannotFollow: it says what goes wrong.
    """
    try:
        return _validate(renderer, tool_format, thoughts=thoughts)
    except CannotFollow:
        raise
    except (CallerError, TypeError, ValueError, MemoryError) as error:
        raise _cannot_follow(str(error)) from error


def _validate(renderer: Renderer, tool_format: str | None, *, thoughts: bool) -> Format:
    plays_calls = tool_format != "plain" and renderer.shows_tools
    source = renderer.template.source + renderer.example
    markers = [pair for pair in THOUGHT_MARKERS if any(marker.strip() in source for marker in pair)]
    think = (markers or [THOUGHT_MARKERS[-1]])[0]
    renderer.thought_marker = think[0]
    name = tool_format or (_found(renderer, think) if plays_calls else "plain")
    form = replace(format_named(name) or FORMATS["plain"], think=think)
    if name == "plain" and renderer.shows_tools:
        # Calls are not read, and answers are as the family writes them.
        with contextlib.suppress(CannotFollow):
            family = FORMATS[_found(renderer, think)]
            form = replace(form, sheds=family.sheds, split=family.split)
    always: Tools = PROBE if tool_format != "plain" and renderer.wants_tools else ()
    for conversation in _answers():
        _play(renderer, conversation, always, form, "plain", thoughts=thoughts)
    for conversation in _calls() if plays_calls else ():
        _play(renderer, conversation, PROBE, form, name, thoughts=thoughts)
    return form


def _found(renderer: Renderer, think: tuple[str, str]) -> str:
    """The name of the first format that reads the call that the template writes; formats with markers come first.

    Raises:
        CannotFollow: there is none, or the template takes no call.
    """
    conversation = next(_calls())
    try:
        prompt = renderer.template.render(conversation[:1], PROBE, prompt=True, now=_NOW)
        full = renderer.template.render(conversation[:3], PROBE, prompt=True, now=_NOW)
    except CallerError as error:
        raise _cannot_follow(f"it does not take a call and its result: {error.reason}") from error
    boundary = _Boundary(renderer, conversation[:2], conversation[2:3], PROBE, prompt, full)
    boundary.holds_turn()
    for name in sorted(FORMATS, key=lambda name: FORMATS[name].unmarked):
        if boundary.call_end(replace(FORMATS[name], think=think)) is not None:
            return name
    raise _cannot_follow(f"no tool_call_parser reads its calls, such as {boundary.written().strip()[:200]!r}")


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
    renderer: Renderer, conversation: Sequence[Message], tools: Tools, form: Format, name: str, *, thoughts: bool
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
        _Boundary(renderer, history, new, tools, prompt, full).check(form, name, thoughts=thoughts)


class _Boundary:
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

    def holds_turn(self) -> str:
        """The word of the turn that no other message has, once it is known that the template writes it."""
        turn, mark = self._history[-1], _marks(self._history[-1])
        said = "the policy's calls" if turn.get("tool_calls") else "what the policy said"
        self._holds(mark in self._full, f"it drops {said}")
        return mark

    def check(self, form: Format, name: str, *, thoughts: bool) -> None:
        full, turn, mark = self._full, self._history[-1], self.holds_turn()
        for message in self._new:
            what = "results of tools" if message["role"] == "tool" else "what users say"
            self._holds(_marks(message) in full, f"it drops {what}")
        at = full.rindex(mark) + len(mark)
        self._holds(_marks(self._new[0]) in full[at:], "it writes what follows a turn before it")
        gap = full[at : full.index(_marks(self._new[0]), at)]
        if turn.get("tool_calls"):
            found = self.call_end(form)
            others = (other for other in FORMATS if self.call_end(replace(FORMATS[other], think=form.think)))
            if found is None:
                named = "".join(f", {other!r} does" for other in others)
                self._holds(False, f"tool_call_parser {name!r} does not read its calls{named}")
            closed, end = found or (at, "")
        else:
            end = self._end(gap)
            closed = at + gap.index(end) if end else at
        whole, start = self._whole, self._start
        body = full[start:closed]
        if whole and not turn.get("tool_calls"):
            opened = thoughts and self._prompt.rstrip().endswith(form.think[0].rstrip())
            said = parse(body.rpartition(form.think[1])[2] if opened else body, form, calls=False).content
            text = self._tokenizer.without_special(said).strip()
            self._holds(text == turn["content"], f"an answer would be read as {text!r}")
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
            # The token at which some models end a call opens the result, and is still due behind another end.
            self._follows(body + eos, right, or_else=end + right)

    def _end(self, gap: str) -> str:
        """The token at which the turn ends, if the template has one for that."""
        special = self._tokenizer.special_pattern
        own = special.findall(end_of_turn(self._renderer.template.writer(self._tools), special))
        known = [self._renderer.template.eos_token, *own[:1]]
        return next((end for end in known if end and end in gap), "")

    @property
    def _whole(self) -> bool:
        """Whether the prompt of the turn stands unchanged before what follows."""
        return self._full.startswith(self._prompt)

    @property
    def _start(self) -> int:
        return len(self._prompt) if self._whole else self._parting()

    def written(self) -> str:
        """What the template writes of a turn that calls, and of what follows up to the next message's content."""
        at = self._full.rindex(_marks(self._history[-1]))
        return self._full[self._start : self._full.index(_marks(self._new[0]), at)]

    def call_end(self, form: Format) -> tuple[int, str] | None:
        """Where a turn that calls ends, and the token at which it does, if the format reads its calls up to there.

        Tried are the template's end of turn, each special token behind the call, and the end of turn in plain text.
        """
        full, special = self._full, self._tokenizer.special_pattern
        at = full.rindex(_marks(self._history[-1])) + len(_marks(self._history[-1]))
        gap = full[at : full.index(_marks(self._new[0]), at)]
        plain = end_of_turn(self._renderer.template.writer(self._tools), special).strip()
        known = [end for end in (self._end(gap),) if end]
        places = [(gap.index(end), end) for end in known]
        places += [(token.start(), token[0]) for token in special.finditer(gap)]
        places += [(gap.index(plain), "")] if plain and plain in gap else []
        places += [(len(gap.rstrip()), ""), (0, "")]
        for closed in (True, False):
            for place, end in places:
                if self._reads(full[self._start : at + place], form, closed=closed):
                    return at + place, end
        return None

    def _parting(self) -> int:
        """Where the template begins to write the turn otherwise than its prompt did: behind a token or a line."""
        pairs = enumerate(zip(self._prompt, self._full, strict=False))
        alike = self._full[: next((place for place, (one, other) in pairs if one != other), None)]
        tokens = [token.end() for token in self._tokenizer.special_pattern.finditer(alike)]
        return max([0, alike.rfind("\n") + 1, *tokens])

    def _reads(self, body: str, form: Format, *, closed: bool) -> bool:
        """Whether a format reads the turn's calls, which it must find closed, and leaves nothing of their markers."""
        parsed = parse(body.rpartition(form.think[1])[2], form, self._tools, cut=closed)
        left = self._whole and self._tokenizer.without_special(parsed.content).strip()
        return _named(parsed.calls) == _wanted(self._history[-1]) and not left

    def _follows(
        self, sampled: str, right: str, *, finish: Finish = Finish.STOP, returned: bool = False, or_else: str = ""
    ) -> None:
        """What is put after a sampled text is what the template puts there, to the token.

        With ``returned``, the text is also what its tokens are read as.
        """
        encode, texts = self._tokenizer.encode, (self._prompt, self._prompt + sampled, self._prompt + sampled + right)
        prompt, turn, whole = map(encode, texts)
        if turn[: len(prompt)] != prompt or whole[: len(turn)] != turn:
            return  # A token lies across the boundary, as none does that is sampled.
        ids, behind = turn[len(prompt) :], prompt[-1]
        self._holds(bool(ids), f"the tokenizer has no ids for {sampled!r}")
        got = self._renderer.next(
            self._history, self._new, self._tools, sampled=ids, finish=finish, behind=behind, now=_NOW
        )
        text = self._tokenizer.decode(got.ids, ids[-1])
        same = got.ids == whole[len(turn) :] or text == or_else
        self._holds(same, f"after {sampled!r} there would be {text!r} and not {right!r}")
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
