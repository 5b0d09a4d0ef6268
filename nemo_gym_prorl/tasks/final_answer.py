# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""The answer in a policy's last message. Pure, and linear in the text's length.

The answer is the content of the last ``\boxed{...}``: one place, so that a message with ten boxes has one answer and
not ten. Boxes with nothing but commas, "and" or "or" between them are one list. Without a box the answer is what
follows the last ``Answer:`` at the beginning of a line, or the last ``answer is`` of the last lines, up to the end of
the sentence; where the policy then takes it back ("no, wait, 6"), what follows that. Of a multiple choice the letter
in a statement after the box counts. Nothing else is searched: a bare number elsewhere in the message is ignored.
"""

from __future__ import annotations

import re

from nemo_gym_prorl.tasks.tex import argument_from, closed_from


MAX_ANSWER_CHARS = 1000
"""A longer answer is none: no published one comes near."""

SEEN_CHARS = 20_000
"""How much of the end of a message is looked at."""

LAST_LINES = 3
"""Where "answer is" is looked for, and where it may be taken back: so many last lines that are not empty."""

_BOX = re.compile(
    r"\\f?boxe?d?(?![a-zA-Z])\s*(?:(?P<brace>\{)|(?P<bare>-?\d[\d.,]*(?<=\d)|[a-zA-Z](?![a-zA-Z])|\\(?=[a-z])))"
)
_JOINED = re.compile(r"(?:\s|[$,;]|\\[()\[\],;:! ]|\\q?quad|\\(?:text|mathrm)\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
_KIND = r"(?:answers?|(?:correct|right|best)\s+(?:option|choice))"
_IS = r"(?:(?:\s+(?:is|are))?\s*[:=]|\s+(?:is|are)\b)"
_SAID = re.compile(rf"(?i)^.*\b{_KIND}(?:\s+(?:to|for|of)\b[^.:=]{{0,60}}?)?{_IS}[\s:]*(?P<said>.*)$")
_LABELLED = re.compile(
    r"(?i)^[\s>#*_-]*(?:the\s+)?(?:(?:final|correct|my)\s+)?answer(?:\s+is)?\s*[:=]\s*(?P<said>.*)$"
)
_EMPHASIS = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`")
_SENTENCE = re.compile(r"(?<!\b[SDM][trs])\.\s+(?![A-Z](?:[.),]|$))(?=[A-Z$\\(\"'*\[]).*$")
_NAME_WITH_INITIALS = re.compile(r"(?:[A-Z]\.\s*)+[A-Z][a-z]+\.?")
_REVISION = re.compile(
    r"(?i)[.,;!?…\n—–(-]\s*(?:(?:oh|but|so|and|no)\b[\s,]*)*"
    r"(?:(?:wait|actually|oops|correction|sorry|hm+|scratch\s+that|i\s+mean(?:t)?|or\s+rather|my\s+mistake"
    r"|on\s+second\s+thoughts?|that(?:'s|\s+is|\s+was)\s+(?:wrong|incorrect|not\s+right))\b|\bno\b(?=\s*[,:.]))"
)
_IT_IS = re.compile(
    r"(?i)^[\s,.:;!?…—–-]*(?:(?:so|but|then|no)\b[\s,]*)*(?:(?:it|that|this|the\s+(?:correct\s+|right\s+|final\s+)?(?:answer|value|result))"
    r"(?:'s|\s+(?:is|was|should\s+be|must\s+be|would\s+be))|make\s+(?:it|that))?[\s:,]*"
)
_LEAD = (
    r"(?:(?:so|thus|hence|therefore)\b[\s,]*)?(?:the\s+|my\s+)?(?:(?:final|correct|right|best)\s+)?"
    r"(?:answer|option|choice)(?:\s+(?:is|would\s+be)\b|\s*:)[\s:]*"
)
_LEAD_IN = re.compile(rf"(?i)^\s*(?:\\text\s*\{{\s*{_LEAD}\}}\s*|(?P<kept>\\text\s*\{{)?\s*{_LEAD})(?=\S)")
_WHAT = r"is\s+the\s+(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)\s*\.?\s*"
_CLOSING = re.compile(rf"(?i)(?<=\S)(?:\s*\\text\s*\{{\s*{_WHAT}\}}|\s+{_WHAT}(?P<kept>\}}?))\s*$")
_LETTER = re.compile(r"\s*(?:(?:option|choice)\s+)?[$(\[]*([A-Z])[$)\].:]*(?:\s.*)?")


def final_answer(message: str, letters: str = "") -> str | None:
    """The answer that a message gives, as it is written there; ``None`` if it gives none.

    Args:
        message: the policy's last message.
        letters: of the options, where the question is a multiple choice: then a letter that is stated after the
            last box counts, and not the box.
    """
    message = message[-SEEN_CHARS:]
    boxes = list(_BOX.finditer(message))[-MAX_ANSWER_CHARS:]
    if not boxes:
        return _stated(message, letters)
    if letters and (stated := _stated(message[boxes[-1].end() :], letters)) is not None:
        found = _LETTER.fullmatch(stated)
        if found and found[1] in letters:
            return stated
    answer = _boxed(message, boxes)
    return answer and without_lead_in(answer)


def without_lead_in(answer: str) -> str:
    """An answer without "The correct answer is" before it, or "is the correct answer" behind it."""
    text = _LEAD_IN.sub(lambda found: found["kept"] or "", answer, count=1)
    return _CLOSING.sub(lambda found: found["kept"] or "", text)


def _boxed(message: str, boxes: list[re.Match[str]]) -> str | None:
    if boxes[-1]["bare"] == "\\":
        argument = argument_from(message, boxes[-1].start("bare"))
        return argument and argument[0]
    if boxes[-1]["bare"]:
        return boxes[-1]["bare"]
    content = closed_from(message, boxes[-1].end())
    listed = [] if content is None else [content.strip()]
    for box, following in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        content = closed_from(message, box.end(), following.start()) if box["brace"] else None
        if not listed or content is None:
            break
        if not _JOINED.fullmatch(message, box.end() + len(content) + 1, following.start()):
            break
        listed.insert(0, content.strip())
    return ", ".join(dict.fromkeys(filter(None, listed))) if listed else None


def _stated(message: str, letters: str) -> str | None:
    lines = [line for line in _EMPHASIS.sub("", message).splitlines() if line.strip()]
    for place in range(len(lines) - 1, -1, -1):
        line, near_end = lines[place][-MAX_ANSWER_CHARS:], place >= len(lines) - LAST_LINES
        if found := (_SAID if near_end else _LABELLED).search(line):
            below = lines[place + 1 :] if near_end else lines[place + 1 : place + 2]
            said = found["said"].strip(" :$") and found["said"]
            said = _last_said("\n".join([said, *(below if near_end else [])] if said else below))
            # Of a multiple choice the letter may be followed by a sentence, and not by a name.
            is_name = not letters and _NAME_WITH_INITIALS.fullmatch(said)
            return (said if is_name else _SENTENCE.sub("", said).strip()) or None
    return None


def _last_said(said: str) -> str:
    """The first line of it, or of what follows the words that take all before back."""
    if revisions := list(_REVISION.finditer(said)):
        said = _IT_IS.sub("", said[revisions[-1].end() :])
    return said.strip().partition("\n")[0].strip()
