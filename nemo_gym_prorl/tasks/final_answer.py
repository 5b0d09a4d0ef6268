# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Extraction of the final answer from a policy's last message. Pure, and linear in the text's length.

All task families share these rules:

- Only the last message counts, and only if no tool call follows. Reasoning up to ``</think>`` is ignored.
- The answer is the content of the last ``\boxed{...}``. Boxes with only commas, "and" or "or" between them are one
  list.
- Without a box, the answer follows the last ``Answer:`` at the beginning of a line or ``answer is`` in the last lines,
  and ends with the sentence. A revision ("no, wait, 6") replaces the text before.
- The line below a heading "Answer" and the content of the last ``<answer>`` tag are answers, too.
- In a multiple choice, a letter that is stated after the box counts instead, also as "option B is correct".
- A bare number elsewhere in the message is ignored.

The module also adds braces to TeX, because ``math-verify`` needs braces around most arguments, and TeX does not:
``\frac\pi2`` becomes ``\frac{\pi}{2}``. ``{a \over b}`` becomes a fraction, and ``{g}_{k}`` becomes ``g_{k}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


MAX_DEPTH = 50
"""Maximum nesting of groups that get braces: readable answers stay far below, and each level takes a stack frame."""

OPENED_BOX = re.compile(r"\\f?boxe?d?\s*\{")
r"""Beginning of ``\boxed{...}`` or a misspelling, with the opening brace."""

_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\s+|.", re.DOTALL)
_ALIASES = {"cfrac": "frac", "dfrac": "frac", "tfrac": "frac", "xfrac": "frac", "nicefrac": "frac", "sfrac": "frac",
            "flatfrac": "frac", "dbinom": "binom", "tbinom": "binom", "surd": "sqrt"}  # fmt: skip
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
_VERBATIM = re.compile(
    r"\\(?:text[a-z]*|math[a-z]+|mbox|hbox|operatorname|begin|end|color|hspace|h?phantom|boxed|fbox|tag"
    r"|(?:wide)?(?:vec|hat|bar|tilde)|d?dot|(?:over|under)[a-z]+|boldsymbol|bm)\*?"
)
_RAISED = re.compile(r"\s*(?:\{|\\(?:[a-z]*frac|[dt]?binom|sqrt|surd)(?![a-zA-Z]))")
"""Beginning of a superscript or subscript that is more than a single letter or digit."""

_INFIX = {r"\over": "frac", r"\choose": "binom"}
_ONE_SYMBOL = re.compile(r"\s*(?:[a-zA-Z]|\\[a-zA-Z]+(?:\{[^{}]*\})?)\s*")
_NOT_ONE_SIDE = re.compile(r"[=<>,;&]|\\\\|\\[lg]eq?(?![a-zA-Z])")
"""Relation or separator. In a text with one, ``\\over`` outside of braces spans one side only: not converted."""


def closed_from(text: str, start: int, end: int | None = None) -> str | None:
    """Return the text from ``start`` to the brace that closes the TeX group; ``None`` if not closed before ``end``."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start, len(text) if end is None else end):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return text[start : found.start()]
    return None


def with_braces(text: str, depth: int = 0) -> str:
    r"""Return TeX with braces around arguments of fractions, binomials and roots, and around longer powers and indices
    (``x^2`` stays). Converts ``\over`` and ``\choose``, and removes the braces around a base of one symbol."""
    parts: list[str] = []
    at = 0
    while (found := _TOKEN.match(text, at)) is not None:
        token, at = found[0], found.end()
        name = _ALIASES.get(token[1:], token[1:]) if token[0] == "\\" else ""
        if token in _INFIX and (depth or not _NOT_ONE_SIDE.search(text)):
            above, below = "".join(parts).strip(), with_braces(text[at:], depth).strip()
            return rf"\{_INFIX[token]}{{{above}}}{{{below}}}"
        if name in _ARGUMENTS:
            made = _command(name, text, at, depth)
            part, at = made if made is not None else (token, at)
        elif _VERBATIM.fullmatch(token) and (group := _group(text, at)) is not None:
            part, at = token + text[at : group[1]], group[1]
        elif token in "^_" and _RAISED.match(text, at) and (made := _argument(text, at, depth)) is not None:
            part, at = f"{token}{{{made[0]}}}", made[1]
        elif token == "{" and depth < MAX_DEPTH and (group := _group(text, at - 1)) is not None:
            inner, at = with_braces(group[0], depth + 1), group[1]
            base = _ONE_SYMBOL.fullmatch(inner) and text[at : at + 1] in ("^", "_")
            part = inner if base else f"{{{inner}}}"
        else:
            part = token
        parts.append(part)
    return "".join(parts)


def _command(name: str, text: str, at: int, depth: int) -> tuple[str, int] | None:
    """Return a command with its arguments in braces, and the end index; ``None`` if an argument is missing."""
    written = f"\\{name}"
    if name == "sqrt" and (degree := re.compile(r"\s*\[([^][]*)\]").match(text, at)):
        written, at = f"{written}[{with_braces(degree[1], depth + 1)}]", degree.end()
    for _ in range(_ARGUMENTS[name]):
        argument = _argument(text, at, depth)
        if argument is None:
            return None
        written, at = f"{written}{{{argument[0]}}}", argument[1]
    return written, at


def _argument(text: str, at: int, depth: int) -> tuple[str, int] | None:
    """Return the TeX argument at ``at``, with braces added, and the end index; ``None`` without an argument."""
    if depth >= MAX_DEPTH:
        return None
    if (group := _group(text, at)) is not None:
        return with_braces(group[0], depth + 1), group[1]
    found = re.compile(r"\s*(\\[a-zA-Z]+|[^\W_])").match(text, at)
    if found is None:
        return None
    name = _ALIASES.get(found[1][1:], found[1][1:]) if found[1][0] == "\\" else ""
    if name in _ARGUMENTS:
        return _command(name, text, found.end(), depth + 1)
    if _VERBATIM.fullmatch(found[1]) and (group := _group(text, found.end())) is not None:
        return found[1] + text[found.end() : group[1]], group[1]
    return found[1], found.end()


def _group(text: str, at: int) -> tuple[str, int] | None:
    """Return the content of the TeX group at ``at`` or after spaces, and its end index; ``None`` without a group."""
    opened = re.compile(r"\s*\{").match(text, at)
    content = None if opened is None else closed_from(text, opened.end())
    return None if opened is None or content is None else (content, opened.end() + len(content) + 1)


MAX_ANSWER_CHARS = 1000
"""Maximum characters of an answer; published answers are far shorter."""

SEEN_CHARS = 20_000
"""Number of last characters of a message that are searched, to bound the time for a long message."""

LAST_LINES = 3
"""Number of last non-empty lines in which "answer is" and its revisions are recognised."""

_BOX = re.compile(
    r"\\f?boxe?d?(?![a-zA-Z])\s*(?:(?P<brace>\{)|(?P<bare>-?\d[\d.,]*(?<=\d)|[a-zA-Z](?![a-zA-Z])|\\(?=[a-z])))"
)
_JOINED = re.compile(r"(?:\s|[$,;]|\\[()\[\],;:! ]|\\q?quad|\\(?:text|mathrm)\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
_KIND = r"(?:answers?|(?:correct|right|best)\s+(?:option|choice))"
_IS = r"(?:(?:\s+(?:is|are))?\s*[:：=]|\s+(?P<is>is|are|should\s+be)\b)"
_TRANSLATED = (
    r"(?:(?:答案|答え|解答|正解|정답|답|答)\s*(?:[:：=]|是|[为為]|は|[은는])"
    r"|\b(?:antwort|r[ée]ponse|respuesta|ответ|risposta|resposta)(?:\s*[:：=]|\s+(?:ist|est|es|è|é)\b))"
)
_SAID = re.compile(
    rf"(?i)^.*(?:\b{_KIND}(?:\s+(?:to|for|of)\b[^.:=]{{0,60}}?)?{_IS}|{_TRANSLATED})[\s:：]*(?P<said>.*)$"
)
_LABELLED = re.compile(
    r"(?i)^[\s>#*_-]*(?:(?:the\s+)?(?:(?:final|correct|my)\s+)?answer(?:\s+is)?\s*[:：=]"
    rf"|(?:最[终終]|正[确確])?{_TRANSLATED})\s*(?P<said>.*)$"
)
_HEADING = re.compile(r"(?i)^(?:[\s>#-]*(?:the\s+|my\s+)?(?:final|correct)\s+|[\s#]*)answer\s*$")
_CHOSEN = re.compile(r"(?i)\b(?:option|choice)\s+[(\[]?([A-Z])[)\]]?\s+is\s+(?:the\s+)?(?:correct|right)\b")
_DISPLAY = re.compile(r"\s*(?:\$\$|\\\[|\\\])?\s*")
"""Empty line, or line with only a delimiter of displayed mathematics."""

_EMPHASIS = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`|</?(?:b|strong|i|em|u)>|[✅✔☑🎉]\ufe0f?")
_PAIRED = re.compile(
    r"(?i)(?<![^\s(])(?:\*(?=[^\s*])(?P<star>[^*\n]+)(?<=\S)\*(?![\w(*])|_(?=\w)(?P<bar>[^_\n]+)_(?![\w{]))"
    r"|\\text(?:bf|it)?\s*\{(?P<label>[^{}\n]*\banswer\s*:?)\s*\}"
)
"""Emphasis with one star or underscore on each side, or a label in TeX."""

_BEHIND_NUMBER = re.compile(r"(?is)(?<=[\d$}])[\s,;]+(?:since|because)\b.*$|。.*$")
_EXCLAIMED = re.compile(r"(-?\d[\d,.]*)!")
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


def extract_final_answer(message: str, letters: str = "") -> str | None:
    """Return the final answer of a message, without a lead-in; ``None`` if there is none.

    Args:
        message: last message of the policy.
        letters: letters of the options in a multiple choice, else empty; a letter stated after the last box
            overrides the box.
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
    """Return an answer without "The correct answer is" before it and "is the correct answer" after it."""
    text = _LEAD_IN.sub(lambda found: found["kept"] or "", answer, count=1)
    return _CLOSING.sub(lambda found: found["kept"] or "", text)


def _boxed(message: str, boxes: list[re.Match[str]]) -> str | None:
    if boxes[-1]["bare"] == "\\":
        argument = _argument(message, boxes[-1].start("bare"), 0)
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
    if (tagged := _tagged(message)) is not None:
        return tagged
    plain = _PAIRED.sub(lambda found: next(filter(None, found.groups())), _EMPHASIS.sub("", message))
    lines = [line for line in plain.splitlines() if not _DISPLAY.fullmatch(line)]
    for index in range(len(lines) - 1, -1, -1):
        line, near_end = lines[index][-MAX_ANSWER_CHARS:], index >= len(lines) - LAST_LINES
        if found := (_SAID if near_end else _LABELLED).search(line):
            below = lines[index + 1 :] if near_end else lines[index + 1 : index + 2]
            said = found["said"].strip(" :$") and found["said"]
            said = _last_said("\n".join([said, *(below if near_end else [])] if said else below))
            said = _BEHIND_NUMBER.sub("", said)
            if near_end and found["is"] and (exclaimed := _EXCLAIMED.fullmatch(said)):
                return exclaimed[1]
            # The full stop in "J. Watson" ends no sentence, but the one after an option's letter does.
            is_name = not letters and _NAME_WITH_INITIALS.fullmatch(said)
            return (said if is_name else _SENTENCE.sub("", said).strip()) or None
        if _HEADING.search(line):
            return _last_said("\n".join(lines[index + 1 :])) or None
        chosen: set[str] = set(_CHOSEN.findall(line)) if letters and near_end else set()
        if len(chosen) == 1 and not _REVISION.search("\n".join(lines[index:])):
            return chosen.pop()
    return None


def _tagged(message: str) -> str | None:
    """Return the content of the last closed ``<answer>`` tag; ``None`` if missing, empty or too long."""
    before, closed, _ = message.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    if not (closed and opened) or len(content) > MAX_ANSWER_CHARS:
        return None
    return without_lead_in(content.strip().strip("$.")) or None


def _last_said(said: str) -> str:
    """Return the first line of a statement, or of the text after its last revision ("no, wait, 6")."""
    if revisions := list(_REVISION.finditer(said)):
        said = _IT_IS.sub("", said[revisions[-1].end() :])
    return said.strip().partition("\n")[0].strip()


_TOOL_ITEMS = ("function_call", "function_call_output")


def last_message_text(response: Mapping[str, Any]) -> str:
    """Return the last assistant message of a Responses object, without reasoning up to ``</think>``.

    The text is empty without a message, or if a tool call follows the last message.
    """
    text = ""
    for item in response.get("output") or ():
        if not isinstance(item, Mapping):
            continue
        if item.get("type") in _TOOL_ITEMS:
            text = ""
        elif item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            text = _text_of(item.get("content"))
    return text.rpartition("</think>")[2]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = (part for part in content or () if isinstance(part, Mapping) and part.get("type") == "output_text")
    return "".join(text for part in parts if isinstance(text := part.get("text"), str))
