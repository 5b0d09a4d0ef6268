# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Find where a sampled turn ends in a chat template's rendering, and the text that the template puts after the turn.

A template is an arbitrary program over the whole conversation. A template may count messages, number tool results,
repeat the tools, or append a token at the end. The boundary is therefore located in the rendering of the *real*
conversation:

1. Exact match. If the rendering is the prompt before the turn followed by exactly the sampled text, the rest comes
   after the turn. This case needs no guess and no check, and covers most turns.
2. Placeholders. A template may write the turn differently from the policy (a call's JSON in another notation, a
   malformed call, no reasoning), or rewrite earlier text. A placeholder word then replaces the arguments of the turn's
   calls, or the content of a turn without calls. The text after the word's last occurrence is the text after the turn.

With placeholders, the quotes and brackets that close a call count as text after the turn, although the policy wrote
them. A second rendering without calls identifies these characters. The *end* of the turn is the part of the text after
the turn that does not depend on later messages, so a token at the end of a whole conversation does not count. The
rendering of the real conversation overrides the result, and a difference is counted.

Cost: one rendering of the conversation as text in the first case, because the prompt before the turn is recognised by
its hash (:class:`RenderedPrompt`), and several in the second. Only new messages are tokenised.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.template import REASONING_BLOCK, Conversation, Render


_MAX_OVERLAP_CHARS = 200
"""Bound of :func:`overlap` in characters; texts that end a turn are far shorter."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Length and hash of a prompt as the template rendered it, to recognise the prompt at the next turn.

    The text itself is not stored, because texts would dominate a rollout's memory. The text is not rendered again
    either, because tools and variables may have changed.

    Attributes:
        length: length of the text in characters.
        digest: hash of the text.
        opened: white space after the reasoning marker at the prompt's end; ``None`` if the prompt opens no reasoning.
    """

    length: int
    digest: int
    opened: str | None = None

    @classmethod
    def of(cls, text: str, reasoning: str = "<think>") -> RenderedPrompt:
        """Return the record of a rendered text for a model whose reasoning starts with the marker ``reasoning``."""
        bare = text.rstrip()
        opened = text[len(bare) :] if bare.endswith(reasoning.rstrip()) else None
        return cls(len(text), hash(text), opened)

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and hash(text[: self.length]) == self.digest


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The turn before the boundary, as sampled.

    Attributes:
        text: the whole text, ``end`` included.
        end: name of the special token at the text's end; empty for none.
        stopped: whether the policy ended the turn, not a limit of tokens.
        plain: whether the turn has no malformed call, so the template may render the turn exactly as sampled.
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
    """Text between a sampled turn and the next turn.

    Attributes:
        text: the text to append after the sampled text.
        full: the template's rendering of the whole conversation, up to the next turn.
        rewrites: whether the template now renders text before the boundary differently.
        corrected: whether ``text`` differs from the text that the placeholders located.
    """

    text: str
    full: str
    rewrites: bool = False
    corrected: bool = False


def find_turn_boundary(
    render: Render,
    history: Conversation,
    new: Conversation,
    sampled_turn: SampledTurn,
    special: re.Pattern[str],
    before: RenderedPrompt | None = None,
) -> TurnBoundary:
    """Return the boundary after the last message of ``history``, a sampled turn.

    ``special`` is the pattern of any special token, ``before`` the prompt of the turn, which is rendered again if
    ``None``.

    Raises:
        CallerError: the template refuses the messages, or drops the sampled message.
    """
    full = render([*history, *new], True)
    before = before or RenderedPrompt.of(render(history[:-1], True))
    keeps_prompt, start = before.begins(full), before.length
    if keeps_prompt and sampled_turn.plain:
        if sampled_turn.text.strip() and full.startswith(sampled_turn.text, start):
            return TurnBoundary(full[start + len(sampled_turn.text) :], full)
        if sampled_turn.body.strip() and full.startswith(sampled_turn.body, start):
            tail = full[start + len(sampled_turn.body) :]
            ending = _ending(render, history, new, full, tail, special) if sampled_turn.stopped else ""
            return TurnBoundary(
                _strip_sampled_end(
                    tail, ending, _before_next(render, history, new, full, tail), sampled_turn, special
                ),
                full,
            )
    tail, ending = _find_by_placeholders(render, history, new, full, sampled_turn, special)
    rewrites = not keeps_prompt or _drops_content(full[start:] if keeps_prompt else full, history[-1])
    right = tail if not keeps_prompt else _corrected(tail, full, start, history[-1], sampled_turn, special)
    ending = right.removesuffix(tail) + ending if right.endswith(tail) else ""
    before_next = _before_next(render, history, new, full, right)
    return TurnBoundary(
        _strip_sampled_end(right, ending, before_next, sampled_turn, special), full, rewrites, right != tail
    )


def end_of_turn(render: Render, special: re.Pattern[str]) -> str:
    """Return the text that ends each assistant turn; empty if the template has none, or refuses a made-up turn."""
    user, assistant = {"role": "user", "content": "u"}, {"role": "assistant", "content": "Sentinel"}
    try:
        full = render([user, assistant, user], True)
    except CallerError:
        return ""
    return _ending(render, [user, assistant], [user], full, full.rpartition("Sentinel")[2], special)


def overlap(text: str, following: str) -> int:
    """Return how many characters at the end of a text begin the following text."""
    longest = min(len(text), len(following), _MAX_OVERLAP_CHARS)
    return next((length for length in range(longest, 0, -1) if text.endswith(following[:length])), 0)


def _find_by_placeholders(
    render: Render,
    history: Conversation,
    new: Conversation,
    full: str,
    sampled_turn: SampledTurn,
    special: re.Pattern[str],
) -> tuple[str, str]:
    """Return the text after the turn, and the part of this text that ends the turn."""
    word = "Sentinel"
    while word in full:
        word += "Z"
    content, calls = str(history[-1].get("content") or ""), history[-1].get("tool_calls") or []
    reasoning, _, _ = content.rpartition("</think>")
    plain = {"role": "assistant", "content": f"{reasoning}</think>\n\n{word}" if reasoning else word}
    stub: dict[str, Any] = dict(plain)
    if calls:
        # Some templates write the content after the calls' results, so only the arguments get the placeholder.
        stub["content"] = content
        stub["tool_calls"] = [call | {"function": call["function"] | {"arguments": {"a": word}}} for call in calls]
    joined = render([*history[:-1], stub, *new], True)
    tail = joined.rpartition(word)[2]
    if word not in joined:
        raise CallerError("the chat template drops the assistant message that was just sampled", field="messages")
    if (
        sampled_turn.stopped
        and sampled_turn.end
        and _end_at(tail, _before_next(render, history, new, joined, tail), sampled_turn.end) >= 0
    ):
        return tail, ""
    ending = _ending(render, [*history[:-1], stub], new, joined, tail, special)
    if calls:
        closing = _closing(render, [*history[:-1], plain], new, word, tail, ending, special)
        tail, ending = tail[len(closing) :], ending.removeprefix(closing)
    return tail, ending


def _drops_content(rendered: str, message: Mapping[str, Any]) -> bool:
    """Return whether the rendering lacks the message's reasoning, or its text besides calls."""
    content, squeezed = str(message.get("content") or ""), "".join(rendered.split())
    parts = [
        *REASONING_BLOCK.findall(content),
        REASONING_BLOCK.sub("", content),
        str(message.get("reasoning_content") or ""),
    ]
    return any("".join(part.split()) not in squeezed for part in parts)


def _ending(
    render: Render, history: Conversation, new: Conversation, full: str, tail: str, special: re.Pattern[str]
) -> str:
    """Return the end of a turn: the text that is the same for every next speaker, without the header that all speakers
    share.

    Without a next speaker some templates write another end, or none.
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
    """Return the beginning of ``tail`` that closes a call: all text before the end of a turn, or before the text after
    a turn without calls.
    """
    end = end_of_turn(render, special)
    if end and end in ending:
        return ending.rpartition(end)[0]
    try:
        uncalled = render([*history, *new], True).rpartition(word)[2]
    except CallerError:
        uncalled = ""  # the template refuses a tool result without a call
    if uncalled and tail.endswith(uncalled):
        return tail.removesuffix(uncalled)
    ends = list(special.finditer(ending))
    return ending[: ends[-1].start()] if ends else ending


def _corrected(
    tail: str, full: str, start: int, message: Mapping[str, Any], sampled: SampledTurn, special: re.Pattern[str]
) -> str:
    """Return the text after the turn in the rendering of the real conversation, where the turn begins at ``start``."""
    if not full.endswith(tail):
        content = REASONING_BLOCK.sub("", str(message.get("content") or "")).strip()
        at = full.find(content, start) if content and not message.get("tool_calls") else -1
        return tail if at < 0 else full[at + len(content) :]
    turn = full[start : len(full) - len(tail)]
    while (ends := list(special.finditer(turn))) and not turn[ends[-1].end() :].strip():
        if ends[-1][0] in sampled.text:
            break
        turn = turn[: ends[-1].start()]
    return full[start + len(turn) :]


def _strip_sampled_end(
    tail: str, ending: str, before_next: int, sampled_turn: SampledTurn, special: re.Pattern[str]
) -> str:
    """Return the text after the turn without the part that the policy sampled already."""
    if sampled_turn.end and sampled_turn.stopped:
        at = _end_at(tail, before_next, sampled_turn.end)
        if at < 0:
            at = ending.find(sampled_turn.end)
        if at >= 0:
            return tail[at + len(sampled_turn.end) :]
        # The policy ended the turn with another token than the template writes.
        ends = list(special.finditer(ending))
        return tail[ends[-1].end() :] if ends else tail
    shared = overlap(sampled_turn.text, tail)
    known = tail[:shared]
    return tail[shared:] if sampled_turn.stopped or not known.strip() or special.search(known) else tail


def _end_at(tail: str, before_next: int, end: str) -> int:
    """Return the index of ``end`` in the text after the turn; -1 unless it precedes the next message's content."""
    at = tail.find(end)
    return at if at <= 0 or at < before_next else -1


def _before_next(render: Render, history: Conversation, new: Conversation, full: str, tail: str) -> int:
    """Return the index of the next message's content in the text after the turn; -1 if ``tail`` lacks this content."""
    if not new:
        return len(tail)
    if first_line := str(new[0].get("content") or "").strip().partition("\n")[0]:
        return tail.find(first_line)
    # Empty content cannot be searched for: compare with a rendering that has a placeholder as the content.
    try:
        other = render([*history, {**new[0], "content": "Sentinel"}, *new[1:]], True)
    except CallerError:
        return len(tail)
    start = len(full) - len(tail)
    pairs = zip(full[start:], other[start:], strict=False)
    return next((at for at, (one, another) in enumerate(pairs) if one != another), len(tail))


def _shared(one: str, other: str, special: re.Pattern[str]) -> str:
    """Return the common beginning of two texts, never ending within a special token."""
    length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(one, other, key=len) if length is None else one[:length]
    for text in (one, other):
        for token in special.finditer(text):
            if token.start() < len(common) < token.end():
                common = text[: token.start()]
    return common


def _after(text: str, beginning: str) -> str:
    return text[len(beginning) :] if text.startswith(beginning) else ""
