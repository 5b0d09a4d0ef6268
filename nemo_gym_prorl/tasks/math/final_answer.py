# SPDX-License-Identifier: Apache-2.0
r"""Where the answer stands in a policy's last message. Pure, and linear in the text's length.

The answer is the content of the last ``\boxed{...}``: one place, so that a message with ten boxes has one answer and
not ten. Boxes with nothing but commas, "and" or "or" between them are one list. Where there is no box, it is what
follows the last ``answer is`` or ``answer:`` of the last lines, up to the end of the sentence or line; where the
policy then takes it back ("no, wait, 6"), what follows that. Nothing else in a message is searched: a number that only
stands somewhere is no answer.
"""

from __future__ import annotations

import re


MAX_ANSWER_CHARS = 1000
"""A longer answer is none: no published one comes near."""

SEEN_CHARS = 20_000
"""How much of the end of a message is looked at."""

LAST_LINES = 3
"""Where an answer without a box is looked for: so many last lines that are not empty."""

BOX = re.compile(r"\\f?boxe?d?\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s*(\w)")
_JOINED = re.compile(r"(?:\s|[$,;]|\\[()\[\],;:! ]|\\q?quad|\\(?:text|mathrm)\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
_SAID = re.compile(r"(?i)^.*\banswer(?:\s+is)?\s*(?:is|[:=])\s*(?P<said>.*)$")
_SENTENCE = re.compile(r"\.\s.*$")
_REVISION = re.compile(
    r"(?i)\b(?:wait|actually|oops|correction|sorry|hm+|scratch\s+that|i\s+mean(?:t)?|or\s+rather|my\s+mistake"
    r"|on\s+second\s+thoughts?|that(?:'s|\s+is|\s+was)\s+(?:wrong|incorrect|not\s+right))\b|(?<=[.,;!?…\n—–-])\s*no\b(?=\s*[,:.])"
)
_IT_IS = re.compile(
    r"(?i)^[\s,.:;!?…—–-]*(?:(?:so|but|then|no)\b[\s,]*)*(?:(?:it|that|this|the\s+(?:correct\s+|right\s+|final\s+)?(?:answer|value|result))"
    r"(?:'s|\s+(?:is|was|should\s+be|must\s+be|would\s+be))|make\s+(?:it|that))?[\s:,]*"
)


def final_answer(message: str) -> str | None:
    """The answer that a message gives, as it is written there; ``None`` if it gives none."""
    message = message[-SEEN_CHARS:]
    boxes = list(BOX.finditer(message))[-MAX_ANSWER_CHARS:]
    if boxes:
        content = closed_from(message, boxes[-1].end())
        listed = [] if content is None else [content.strip()]
        for box, following in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
            content = closed_from(message, box.end(), following.start())
            if not listed or content is None:
                break
            if not _JOINED.fullmatch(message, box.end() + len(content) + 1, following.start()):
                break
            listed.insert(0, content.strip())
        return ", ".join(dict.fromkeys(filter(None, listed))) if listed else None
    if unbraced := list(_BARE_BOX.finditer(message)):
        return str(unbraced[-1][1])
    lines = [line for line in message.splitlines() if line.strip()][-LAST_LINES:]
    for place in range(len(lines) - 1, -1, -1):
        if found := _SAID.search(lines[place][-MAX_ANSWER_CHARS:].replace("**", "")):
            below = lines[place + 1 :]
            said = found["said"].strip(" :$") and found["said"]
            return _last_said("\n".join([said, *below] if said else below)) or None
    return None


def _last_said(said: str) -> str:
    """The first sentence of it, or the first after what takes all before back."""
    if revisions := list(_REVISION.finditer(said)):
        said = _IT_IS.sub("", said[revisions[-1].end() :])
    return _SENTENCE.sub("", said.strip().partition("\n")[0]).strip()


def closed_from(text: str, start: int, end: int | None = None) -> str | None:
    """What stands from ``start`` to the brace that closes the one before it, up to ``end`` of the text."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start, len(text) if end is None else end):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return text[start : found.start()]
    return None
