# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Validate a chat template and tokenizer before the first rollout, with a few made-up conversations.

A template is an arbitrary program, and tokenizers differ in their treatment of white space. Defects are silent:
results that are not shown, an end of turn written twice, an added space. The validation therefore renders each turn
boundary of made-up conversations as a rollout would, and compares it with the template's rendering of the whole
conversation. A template whose rollouts would differ in one token is refused at the start, with the difference. Pure:
no task, socket, clock or thread.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.formats import FORMATS, REASONING_MARKERS, format_named
from nemo_gym_prorl.policy.text.renderer import PROBE_TOOL_NAME, PROBE_TOOLS, Renderer
from nemo_gym_prorl.policy.text.template import Message, Tools
from nemo_gym_prorl.policy.text.turn_boundary import end_of_turn
from nemo_gym_prorl.policy.text.turn_scanner import ToolCall, TurnFormat, parse


_NOW = datetime(2000, 1, 1)
"""Fixed time of day, so that two renderings do not differ by the time that a template writes."""


class UnsupportedTemplate(CallerError):
    """The chat template or tokenizer would produce conversations that differ from the model's training format."""

    problem = "template-not-followed"


def validate_template(
    renderer: Renderer, tool_format: str | None = None, *, reads_reasoning: bool = True
) -> TurnFormat:
    """Check conversations without tools, and with tools if the template shows them; return the model's turn format.

    The reasoning markers are those that the template itself contains.

    Args:
        renderer: the template and the tokenizer; sets its ``reasoning_marker``.
        tool_format: name of the call format; ``plain`` reads no calls, and ``None`` takes the first format that reads
            the template's calls.
        reads_reasoning: whether leading reasoning is separated from the content.

    Raises:
        UnsupportedTemplate: a rollout's tokens would differ from the template's, or no format reads its calls.
    """
    try:
        return _validate(renderer, tool_format, reads_reasoning=reads_reasoning)
    except UnsupportedTemplate:
        raise
    except (CallerError, TypeError, ValueError, MemoryError) as error:
        raise _unsupported(str(error)) from error


def _validate(renderer: Renderer, tool_format: str | None, *, reads_reasoning: bool) -> TurnFormat:
    plays_calls = tool_format != "plain" and renderer.shows_tools
    source = renderer.template.source + renderer.sample_prompt
    markers = [pair for pair in REASONING_MARKERS if any(marker.strip() in source for marker in pair)]
    think = (markers or [REASONING_MARKERS[-1]])[0]
    renderer.reasoning_marker = think[0]
    name = tool_format or (_detect_format(renderer, think) if plays_calls else "plain")
    form = replace(format_named(name) or FORMATS["plain"], think=think)
    if name == "plain" and renderer.shows_tools:
        # Calls are not parsed, but answers still have the markers of the model family's format.
        with contextlib.suppress(UnsupportedTemplate):
            family = FORMATS[_detect_format(renderer, think)]
            form = replace(form, dropped_markers=family.dropped_markers, split=family.split)
    always: Tools = PROBE_TOOLS if plays_calls and not renderer.sample_prompt else ()  # some require tools
    for conversation in _answer_conversations():
        _check_conversation(renderer, conversation, always, form, "plain", reads_reasoning=reads_reasoning)
    for conversation in _call_conversations() if plays_calls else ():
        _check_conversation(renderer, conversation, PROBE_TOOLS, form, name, reads_reasoning=reads_reasoning)
    return form


def _detect_format(renderer: Renderer, think: tuple[str, str]) -> str:
    """Return the name of the first format that reads the template's call; formats with markers come first."""
    conversation = next(_call_conversations())
    try:
        prompt = renderer.template.render(conversation[:1], PROBE_TOOLS, prompt=True, now=_NOW)
        full = renderer.template.render(conversation[:3], PROBE_TOOLS, prompt=True, now=_NOW)
    except CallerError as error:
        raise _unsupported(f"the template refuses a call and its result: {error.reason}") from error
    boundary = _RenderedTurn(renderer, conversation[:2], conversation[2:3], PROBE_TOOLS, prompt, full)
    boundary.holds_turn()
    for name in sorted(FORMATS, key=lambda name: FORMATS[name].unmarked):
        if boundary.call_end(replace(FORMATS[name], think=think)) is not None:
            return name
    example = boundary.turn_text().strip()[:200]
    raise _unsupported(f"no tool_call_parser reads the template's calls, such as {example!r}")


def _answer_conversations() -> Iterator[list[Message]]:
    yield [_user("Askone"), _assistant("Sayone"), _user("Asktwo"), _assistant("Saytwo"), _user("Askthree")]
    yield [{"role": "system", "content": "Rules"}, _user("Askone"), _assistant("Sayone"), _user("Asktwo")]


def _call_conversations() -> Iterator[list[Message]]:
    begun = [_user("Askone"), _call("Partone"), _result("Seenone", "Partone")]
    yield [*begun, _call("Parttwo"), _result("Seentwo", "Parttwo"), _assistant("Sayone"), _user("Asktwo")]
    yield [{"role": "system", "content": "Rules"}, *begun]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(part: str) -> Message:
    function = {"name": PROBE_TOOL_NAME, "arguments": json.dumps({"part": part})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _id(part), "type": "function", "function": function}],
    }


def _result(text: str, part: str) -> Message:
    return {"role": "tool", "tool_call_id": _id(part), "name": PROBE_TOOL_NAME, "content": text}


def _id(part: str) -> str:
    return f"call{part[4:]}00"


def _unique_word(message: Message) -> str:
    calls = message.get("tool_calls")
    return str(json.loads(calls[-1]["function"]["arguments"])["part"] if calls else message["content"])


def _check_conversation(
    renderer: Renderer,
    conversation: Sequence[Message],
    tools: Tools,
    form: TurnFormat,
    name: str,
    *,
    reads_reasoning: bool,
) -> None:
    turns = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
    for at, end in zip(turns, [*turns[1:], len(conversation)], strict=True):
        history, new = conversation[: at + 1], conversation[at + 1 : end]
        try:
            prompt = renderer.template.render(history[:-1], tools, prompt=True, now=_NOW)
            full = renderer.template.render([*history, *new], tools, prompt=True, now=_NOW)
        except CallerError as error:
            if conversation[0]["role"] == "system":
                return  # some templates refuse system messages, which is no defect
            called = any("tool_calls" in message for message in conversation)
            said = "a call and its result" if called else "an answer and another question"
            raise _unsupported(f"the template refuses {said}: {error.reason}") from error
        _RenderedTurn(renderer, history, new, tools, prompt, full).check(form, name, reads_reasoning=reads_reasoning)


class _RenderedTurn:
    """One turn of a conversation and the template's rendering of it."""

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
        """Return the word that only this turn contains; raise UnsupportedTemplate if the rendering lacks the word."""
        turn, mark = self._history[-1], _unique_word(self._history[-1])
        said = "the policy's calls" if turn.get("tool_calls") else "the policy's text"
        self._require(mark in self._full, f"the template drops {said}")
        return mark

    def check(self, form: TurnFormat, name: str, *, reads_reasoning: bool) -> None:
        full, turn, mark = self._full, self._history[-1], self.holds_turn()
        for message in self._new:
            what = "results of tools" if message["role"] == "tool" else "messages of users"
            self._require(_unique_word(message) in full, f"the template drops {what}")
        at = full.rindex(mark) + len(mark)
        self._require(_unique_word(self._new[0]) in full[at:], "the template puts later messages before a turn")
        gap = full[at : full.index(_unique_word(self._new[0]), at)]
        if turn.get("tool_calls"):
            found = self.call_end(form)
            others = (other for other in FORMATS if self.call_end(replace(FORMATS[other], think=form.think)))
            if found is None:
                named = "".join(f", {other!r} does" for other in others)
                self._require(False, f"tool_call_parser {name!r} does not read the template's calls{named}")
            closed, end = found or (at, "")
        else:
            end = self._end(gap)
            closed = at + gap.index(end) if end else at
        whole, start = self._keeps_prompt, self._turn_start
        body = full[start:closed]
        if whole and not turn.get("tool_calls"):
            opened = reads_reasoning and self._prompt.rstrip().endswith(form.think[0].rstrip())
            said = parse(body.rpartition(form.think[1])[2] if opened else body, form, calls=False).content
            text = self._tokenizer.strip_special_tokens(said).strip()
            self._require(text == turn["content"], f"an answer would be parsed as {text!r}")
        right = full[closed + len(end) :]
        if whole:
            body, cut = full[start:closed], full[closed:]
            self._check_continuation(body + end, right, returned=True)
        elif not turn.get("tool_calls"):
            body, cut = mark, full[at:]
        else:
            return
        self._check_continuation(f" {body}{end}", right)
        self._check_continuation(body, cut, finish=Finish.LENGTH)
        eos = self._renderer.template.eos_token
        if end and eos not in gap and eos in self._tokenizer.special.values():
            # Some models end a call with the token that opens a tool result. If the policy ends a turn with EOS
            # instead, the service must append the opening token.
            self._check_continuation(body + eos, right, or_else=end + right)

    def _end(self, gap: str) -> str:
        """Return the token in the text between two messages' marker words that ends the turn; empty for none."""
        special = self._tokenizer.special_pattern
        own = special.findall(end_of_turn(self._renderer.template.writer(self._tools), special))
        known = [self._renderer.template.eos_token, *own[:1]]
        return next((end for end in known if end and end in gap), "")

    @property
    def _keeps_prompt(self) -> bool:
        return self._full.startswith(self._prompt)

    @property
    def _turn_start(self) -> int:
        return len(self._prompt) if self._keeps_prompt else self._divergence()

    def turn_text(self) -> str:
        """Return the rendering of a turn with calls, up to the next message's content."""
        at = self._full.rindex(_unique_word(self._history[-1]))
        return self._full[self._turn_start : self._full.index(_unique_word(self._new[0]), at)]

    def call_end(self, form: TurnFormat) -> tuple[int, str] | None:
        """Return index and token (empty for none) of the end of a turn with calls; ``None`` if the format does not
        read the calls.

        Candidates are the template's end of turn, each special token after the call, and the end of turn in plain
        text. The end is the first candidate up to which the format reads the calls.
        """
        full, special = self._full, self._tokenizer.special_pattern
        at = full.rindex(_unique_word(self._history[-1])) + len(_unique_word(self._history[-1]))
        gap = full[at : full.index(_unique_word(self._new[0]), at)]
        plain = end_of_turn(self._renderer.template.writer(self._tools), special).strip()
        known = [end for end in (self._end(gap),) if end]
        candidates = [(gap.index(end), end) for end in known]
        candidates += [(token.start(), token[0]) for token in special.finditer(gap)]
        candidates += [(gap.index(plain), "")] if plain and plain in gap else []
        candidates += [(len(gap.rstrip()), ""), (0, "")]
        for closed in (True, False):
            for offset, end in candidates:
                if self._reads(full[self._turn_start : at + offset], form, closed=closed):
                    return at + offset, end
        return None

    def _divergence(self) -> int:
        """Return the index where the rendering starts to differ from the prompt, rounded down to a token or a line."""
        pairs = enumerate(zip(self._prompt, self._full, strict=False))
        common = self._full[: next((index for index, (one, other) in pairs if one != other), None)]
        tokens = [token.end() for token in self._tokenizer.special_pattern.finditer(common)]
        return max([0, common.rfind("\n") + 1, *tokens])

    def _reads(self, body: str, form: TurnFormat, *, closed: bool) -> bool:
        """Return whether a format reads exactly the turn's calls and leaves no marker text in the content. With
        ``closed``, the last call's own closing marker must be in the text.
        """
        parsed = parse(body.rpartition(form.think[1])[2], form, self._tools, cut=closed)
        left = self._keeps_prompt and self._tokenizer.strip_special_tokens(parsed.content).strip()
        return _calls_of(parsed.calls) == _expected_calls(self._history[-1]) and not left

    def _check_continuation(
        self, sampled: str, right: str, *, finish: Finish = Finish.STOP, returned: bool = False, or_else: str = ""
    ) -> None:
        """Check that the renderer appends to a sampled text exactly the template's tokens, or the text ``or_else``.

        With ``returned``, the sampled ids must also decode to the text.
        """
        encode, texts = self._tokenizer.encode, (self._prompt, self._prompt + sampled, self._prompt + sampled + right)
        prompt, turn, whole = map(encode, texts)
        if turn[: len(prompt)] != prompt or whole[: len(turn)] != turn:
            return  # a token spans the boundary, at which the tokens of a rollout are always separate
        ids, previous_id = turn[len(prompt) :], prompt[-1]
        self._require(bool(ids), f"the tokenizer has no ids for {sampled!r}")
        got = self._renderer.render_continuation(
            self._history, self._new, self._tools, sampled=ids, finish=finish, previous_id=previous_id, now=_NOW
        )
        text = self._tokenizer.decode(got.ids, ids[-1])
        same = got.ids == whole[len(turn) :] or text == or_else
        self._require(same, f"after {sampled!r} the service would append {text!r}, but the template writes {right!r}")
        text = self._tokenizer.decode(ids, previous_id)
        same = text.split() == sampled.split()  # the tokenizer may add spaces beside special tokens
        self._require(not returned or same, f"the tokenizer decodes {sampled!r} to {text!r}")

    def _require(self, true: bool, otherwise: str) -> None:
        if not true:
            raise _unsupported(otherwise)


def _unsupported(why: str) -> UnsupportedTemplate:
    return UnsupportedTemplate(
        f"the chat template cannot be rendered turn by turn: {why}. Set another chat_template or tool_call_parser "
        "(plain if no tools are offered), or engine: vllm_chat, whose engine renders and parses turns itself",
        field="chat_template",
    )


def _calls_of(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls if not call.malformed]


def _expected_calls(turn: Message) -> list[tuple[str, object]]:
    functions = [call["function"] for call in turn["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
