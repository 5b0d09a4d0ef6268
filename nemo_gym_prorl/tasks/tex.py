# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Braces around the arguments of TeX commands: ``\frac\pi2`` becomes ``\frac{\pi}{2}``. Pure.

TeX takes the next token as an argument where there is no brace, and ``math-verify`` mostly needs the brace. Besides,
``{a \over b}`` becomes a fraction, and a symbol in braces of its own (``{g}_{k}``) loses them.
"""

from __future__ import annotations

import re


MAX_DEPTH = 50
"""Groups nested deeper stay as they are: no answer that can be read has so many, and each takes a stack frame."""

OPENED_BOX = re.compile(r"\\f?boxe?d?\s*\{")
"""Up to the brace."""

_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\s+|.", re.DOTALL)
_ALIASES = {"cfrac": "frac", "dfrac": "frac", "tfrac": "frac", "xfrac": "frac", "nicefrac": "frac", "sfrac": "frac",
            "flatfrac": "frac", "dbinom": "binom", "tbinom": "binom", "surd": "sqrt"}  # fmt: skip
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
_VERBATIM = re.compile(
    r"\\(?:text[a-z]*|math[a-z]+|mbox|hbox|operatorname|begin|end|color|hspace|h?phantom|boxed|fbox|tag"
    r"|(?:wide)?(?:vec|hat|bar|tilde)|d?dot|(?:over|under)[a-z]+|boldsymbol|bm)\*?"
)
_RAISED = re.compile(r"\s*(?:\{|\\(?:[a-z]*frac|[dt]?binom|sqrt|surd)(?![a-zA-Z]))")
"""Arguments of a power or an index that need a look; a single letter or digit is read without braces."""

_INFIX = {r"\over": "frac", r"\choose": "binom"}
_ONE_SYMBOL = re.compile(r"\s*(?:[a-zA-Z]|\\[a-zA-Z]+(?:\{[^{}]*\})?)\s*")
_NOT_ONE_SIDE = re.compile(r"[=<>,;&]|\\\\|\\[lg]eq?(?![a-zA-Z])")
"""Text outside all braces with one of these has several sides, of which ``\\over`` would be meant for one."""


def with_braces(text: str) -> str:
    """A text with braces around each argument of a fraction, root, binomial, power or index."""
    return _written(text, 0)


def closed_from(text: str, start: int, end: int | None = None) -> str | None:
    """What stands from ``start`` to the brace that closes the one before it, up to ``end`` of the text."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start, len(text) if end is None else end):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return text[start : found.start()]
    return None


def argument_from(text: str, start: int) -> tuple[str, int] | None:
    """The argument that TeX reads at a place, with braces around its own arguments, and where it ends."""
    return _argument(text, start, 0)


def _written(text: str, depth: int) -> str:
    parts: list[str] = []
    at = 0
    while (found := _TOKEN.match(text, at)) is not None:
        token, at = found[0], found.end()
        name = _ALIASES.get(token[1:], token[1:]) if token[0] == "\\" else ""
        if token in _INFIX and (depth or not _NOT_ONE_SIDE.search(text)):
            above, below = "".join(parts).strip(), _written(text[at:], depth).strip()
            return rf"\{_INFIX[token]}{{{above}}}{{{below}}}"
        if name in _ARGUMENTS:
            made = _command(name, text, at, depth)
            part, at = made if made is not None else (token, at)
        elif _VERBATIM.fullmatch(token) and (group := _group(text, at)) is not None:
            part, at = token + text[at : group[1]], group[1]
        elif token in "^_" and _RAISED.match(text, at) and (made := _argument(text, at, depth)) is not None:
            part, at = f"{token}{{{made[0]}}}", made[1]
        elif token == "{" and depth < MAX_DEPTH and (group := _group(text, at - 1)) is not None:
            inner, at = _written(group[0], depth + 1), group[1]
            base = _ONE_SYMBOL.fullmatch(inner) and text[at : at + 1] in ("^", "_")
            part = inner if base else f"{{{inner}}}"
        else:
            part = token
        parts.append(part)
    return "".join(parts)


def _command(name: str, text: str, at: int, depth: int) -> tuple[str, int] | None:
    """A command with its arguments in braces, and where they end; ``None`` if one is missing."""
    written = f"\\{name}"
    if name == "sqrt" and (degree := re.compile(r"\s*\[([^][]*)\]").match(text, at)):
        written, at = f"{written}[{_written(degree[1], depth + 1)}]", degree.end()
    for _ in range(_ARGUMENTS[name]):
        argument = _argument(text, at, depth)
        if argument is None:
            return None
        written, at = f"{written}{{{argument[0]}}}", argument[1]
    return written, at


def _argument(text: str, at: int, depth: int) -> tuple[str, int] | None:
    if depth >= MAX_DEPTH:
        return None
    if (group := _group(text, at)) is not None:
        return _written(group[0], depth + 1), group[1]
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
    """The content of the braces that begin at a place, after spaces, and where they end."""
    opened = re.compile(r"\s*\{").match(text, at)
    content = None if opened is None else closed_from(text, opened.end())
    return None if opened is None or content is None else (content, opened.end() + len(content) + 1)
