# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Where a sampled turn ends in what the chat template writes, and what the template puts after it.

A template is an arbitrary program over the whole conversation: it may count messages, number tool results, repeat the
tools, append a token of its own at the end. So the boundary is looked for in its rendering of the *real* conversation:

1. As it stands. Where the conversation is rendered as the prompt before the turn, then exactly the text that was
   sampled, all that follows is what comes after the turn. That is the template's own word, and there is nothing to
   guess or to check. Most turns are like this.
2. By stand-ins, where the template writes the turn otherwise than the policy did (a call's JSON in another notation, a
   malformed call, no thoughts) or rewrites what was before it. The turn's content and arguments are replaced by a
   made-up word, and what follows the last such word is what follows the turn: after quotes and brackets that close a
   call, which the policy wrote itself and which are told by a second stand-in without calls. The *end* of the turn is
   what is written after the turn both with and without messages behind it, so a token that a template appends to a
   whole conversation is none. What comes out is held against the rendering of the real conversation; if that says
   otherwise, it is right, and the difference is counted.

Cost: one rendering of the conversation as text in the first case, since the prompt before the turn is known again
(:class:`RenderedPrompt`), and up to six in the second. Only new messages are tokenised, which for the same text takes
many times as long as rendering.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.template import THOUGHT, Conversation, Render


_LONGEST_END = 200
"""Characters that a sampled text and what follows it may share at most."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the template wrote it, to know it again when its turn goes on.

    Its text would be most of what a rollout keeps. Length and hash are enough to tell whether another text begins with
    it; written again to find out, it would be written with the tools and variables of today.

    Attributes:
        length: of the text.
        digest: its hash.
        opened: the white space behind the marker that starts a thought, where the opening of the turn ends with that.
        plain: the messages that it was written of, in the form in which templates get them.
    """

    length: int
    digest: int
    opened: str | None = None
    plain: Conversation = field(default=(), compare=False)

    @classmethod
    def of(cls, text: str, plain: Conversation = (), thought: str = "<think>") -> RenderedPrompt:
        """A whole text, for a model that opens its thoughts with this marker."""
        bare = text.rstrip()
        opened = text[len(bare) :] if bare.endswith(thought.rstrip()) else None
        return cls(len(text), hash(text), opened, plain)

    def begins(self, text: str) -> bool:
        """Whether a text begins with what was written then."""
        return len(text) >= self.length and hash(text[: self.length]) == self.digest


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the policy sampled in the turn before the boundary.

    Attributes:
        text: all of it.
        end: the special token that it ends with; empty for none.
        stopped: sampling ended because the turn did.
        plain: the template need not write the turn otherwise: no call in it is malformed.
    """

    text: str
    end: str
    stopped: bool
    plain: bool

    @property
    def body(self) -> str:
        return self.text.removesuffix(self.end)


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """What stands between a sampled turn and the next one.

    Attributes:
        text: what to append after the sampled text.
        full: the whole conversation as the template writes it, up to the next turn.
        rewrites: the template would now write something before the boundary otherwise than it did.
        differs: the stand-ins showed another text than the real conversation, which was taken then.
    """

    text: str
    full: str
    rewrites: bool = False
    differs: bool = False


def find_turn_boundary(
    render: Render,
    history: Conversation,
    new: Conversation,
    said: SampledTurn,
    special: re.Pattern[str],
    before: RenderedPrompt | None = None,
) -> TurnBoundary:
    """What follows a sampled turn.

    Args:
        render: the template.
        history: the conversation up to and including the sampled message.
        new: the messages after it.
        said: what was sampled.
        special: matches any special token.
        before: the prompt of the turn as the template wrote it; rendered again where it is not known.

    Raises:
        CallerError: the template refuses the messages, or drops the one that was sampled.
    """
    full = render([*history, *new], True)
    before = before or RenderedPrompt.of(render(history[:-1], True))
    kept, start = before.begins(full), before.length
    if kept and said.plain:
        if said.text.strip() and full.startswith(said.text, start):
            return TurnBoundary(full[start + len(said.text) :], full)
        if said.body.strip() and full.startswith(said.body, start):
            tail = full[start + len(said.body) :]
            ending = _ending(render, history, new, full, tail, special) if said.stopped else ""
            return TurnBoundary(
                _unsaid(tail, ending, _before_next(render, history, new, full, tail), said, special), full
            )
    tail, ending = _by_stand_ins(render, history, new, full, said, special)
    rewrites = not kept or _drops(full[start:] if kept else full, history[-1])
    right = tail if not kept else _corrected(tail, full, start, history[-1], said, special)
    ending = right.removesuffix(tail) + ending if right.endswith(tail) else ""
    before_next = _before_next(render, history, new, full, right)
    return TurnBoundary(_unsaid(right, ending, before_next, said, special), full, rewrites, right != tail)


def end_of_turn(render: Render, special: re.Pattern[str]) -> str:
    """What the template writes at the end of an assistant turn, whatever follows it."""
    asked, said = {"role": "user", "content": "u"}, {"role": "assistant", "content": "Sentinel"}
    try:
        full = render([asked, said, asked], True)
    except CallerError:
        return ""
    return _ending(render, [asked, said], [asked], full, full.rpartition("Sentinel")[2], special)


def overlap(text: str, following: str) -> int:
    """How many characters at the end of a text are the beginning of what follows it."""
    longest = min(len(text), len(following), _LONGEST_END)
    return next((length for length in range(longest, 0, -1) if text.endswith(following[:length])), 0)


def _by_stand_ins(
    render: Render, history: Conversation, new: Conversation, full: str, said: SampledTurn, special: re.Pattern[str]
) -> tuple[str, str]:
    """What follows the turn, and the end of turn in that."""
    word = "Sentinel"
    while word in full:
        word += "Z"
    content, calls = str(history[-1].get("content") or ""), history[-1].get("tool_calls") or []
    thoughts, _, _ = content.rpartition("</think>")
    plain = {"role": "assistant", "content": f"{thoughts}</think>\n\n{word}" if thoughts else word}
    stub: dict[str, Any] = dict(plain)
    if calls:
        # Some templates write the content behind the calls and their results.
        stub["content"] = content
        stub["tool_calls"] = [call | {"function": call["function"] | {"arguments": {"a": word}}} for call in calls]
    joined = render([*history[:-1], stub, *new], True)
    tail = joined.rpartition(word)[2]
    if word not in joined:
        raise CallerError("the chat template drops the assistant message that was just sampled", field="messages")
    if said.stopped and said.end and _end_at(tail, _before_next(render, history, new, joined, tail), said.end) >= 0:
        return tail, ""
    ending = _ending(render, [*history[:-1], stub], new, joined, tail, special)
    if calls:
        closing = _closing(render, [*history[:-1], plain], new, word, tail, ending, special)
        tail, ending = tail[len(closing) :], ending.removeprefix(closing)
    return tail, ending


def _drops(written: str, message: Mapping[str, Any]) -> bool:
    """Whether a thought of the message, or what it says besides calls, is nowhere in what was written of it."""
    content, squeezed = str(message.get("content") or ""), "".join(written.split())
    said = [*THOUGHT.findall(content), THOUGHT.sub("", content), str(message.get("reasoning_content") or "")]
    return any("".join(part.split()) not in squeezed for part in said)


def _ending(
    render: Render, history: Conversation, new: Conversation, full: str, tail: str, special: re.Pattern[str]
) -> str:
    """The end of a turn: what stands there whoever speaks next, without the header that all speakers share.

    Nobody may be next, too; some templates write another end then, or none.
    """
    before = full[: len(full) - len(tail)]
    opening = _after(full, render([*history, *new], False))
    found = []
    for role in ("", "assistant", "user", "tool"):
        if new and role == new[0]["role"]:
            continue
        other: Conversation = [{"role": role, "tool_call_id": "sentinel0", "content": "o"}] if role else []
        try:
            followed = _after(render([*history, *other], False), before)
        except CallerError:
            continue
        shared = _shared(followed, tail, special)
        header = next((at for at in range(len(shared)) if opening and opening.startswith(shared[at:])), None)
        if shared[:header].strip():
            found.append(shared[:header])
    return min(found, key=len, default="")


def _closing(
    render: Render,
    history: Conversation,
    new: Conversation,
    word: str,
    tail: str,
    ending: str,
    special: re.Pattern[str],
) -> str:
    """What closes a call: all that is written before what follows a turn without calls, or before its end."""
    end = end_of_turn(render, special)
    if end and end in ending:
        return ending.rpartition(end)[0]
    try:
        uncalled = render([*history, *new], True).rpartition(word)[2]
    except CallerError:
        uncalled = ""  # No result without a call, says this template.
    if uncalled and tail.endswith(uncalled):
        return tail.removesuffix(uncalled)
    ends = list(special.finditer(ending))
    return ending[: ends[-1].start()] if ends else ending


def _corrected(
    tail: str, full: str, start: int, said: Mapping[str, Any], sampled: SampledTurn, special: re.Pattern[str]
) -> str:
    """What follows the turn in the rendering of the real conversation, where it begins at ``start``."""
    if not full.endswith(tail):
        content = THOUGHT.sub("", str(said.get("content") or "")).strip()
        at = full.find(content, start) if content and not said.get("tool_calls") else -1
        return tail if at < 0 else full[at + len(content) :]
    turn = full[start : len(full) - len(tail)]
    while (ends := list(special.finditer(turn))) and not turn[ends[-1].end() :].strip():
        if ends[-1][0] in sampled.text:
            break
        turn = turn[: ends[-1].start()]
    return full[start + len(turn) :]


def _unsaid(tail: str, ending: str, before_next: int, said: SampledTurn, special: re.Pattern[str]) -> str:
    """What follows the turn, without the part of it that the policy sampled already."""
    if said.end and said.stopped:
        at = _end_at(tail, before_next, said.end)
        if at < 0:
            at = ending.find(said.end)
        if at >= 0:
            return tail[at + len(said.end) :]
        # The turn has its end, only another one than the template would write.
        ends = list(special.finditer(ending))
        return tail[ends[-1].end() :] if ends else tail
    shared = overlap(said.text, tail)
    known = tail[:shared]
    return tail[shared:] if said.stopped or not known.strip() or special.search(known) else tail


def _end_at(tail: str, before_next: int, end: str) -> int:
    """Where the turn's end is in what follows it, before anything that the next message says."""
    at = tail.find(end)
    return at if at <= 0 or at < before_next else -1


def _before_next(render: Render, history: Conversation, new: Conversation, full: str, tail: str) -> int:
    """How much of what follows the turn stands before the content of the next message."""
    if not new:
        return len(tail)
    if said := str(new[0].get("content") or "").strip().partition("\n")[0]:
        return tail.find(said)
    # An empty content is found by another one in its place.
    try:
        other = render([*history, {**new[0], "content": "Sentinel"}, *new[1:]], True)
    except CallerError:
        return len(tail)
    start = len(full) - len(tail)
    pairs = zip(full[start:], other[start:], strict=False)
    return next((at for at, (one, another) in enumerate(pairs) if one != another), len(tail))


def _shared(one: str, other: str, special: re.Pattern[str]) -> str:
    """The beginning that two texts have in common, in which no special token is cut."""
    length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(one, other, key=len) if length is None else one[:length]
    for text in (one, other):
        for token in special.finditer(text):
            if token.start() < len(common) < token.end():
                common = text[: token.start()]
    return common


def _after(text: str, beginning: str) -> str:
    return text[len(beginning) :] if text.startswith(beginning) else ""
