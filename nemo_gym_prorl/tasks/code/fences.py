# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The program in a policy's message: which of its fenced blocks counts. Pure, and linear in the text's length.

Of all blocks in Python the last counts. A block is in Python if its fence says so, or says nothing and the block looks
like code: an example of output after the program is no program.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


_OPENING = re.compile(r"(?P<before>(?:(?!`{3}|~{3}).)*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[^`]*)")
_LABEL = re.compile(r"[{\s.]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:python|py|pypy|cpython|sage)[\d.]*|ipython\d?", re.IGNORECASE)
_CODE = re.compile(
    r"^[ \t]*(?:import|from|def|class|async|for|while|if|with|try|return|print|lambda|@)\b"
    r"|^[\w.,\[\] \t]+[-+*/]?=[^=]|\b(?:print|input|int|map|sys\.std\w+|open)\s*[.(]",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        label: what stands behind the opening fence, up to the first character of no word; may be empty.
        content: its lines, without the indentation of the fence.
    """

    label: str
    content: str


def program_in(message: str) -> str:
    """The program of a message: the last block in Python, else the last block, else all of the message."""
    blocks = list(blocks_in(message))
    if not blocks:
        return message
    return next((block.content for block in reversed(blocks) if _is_python(block)), blocks[-1].content)


def blocks_in(message: str) -> list[Block]:
    """The fenced blocks of a message, of backquotes or tildes; one that is not closed ends with the message."""
    blocks, lines = list[Block](), list[str]()
    fence, label, indent = "", "", 0
    for line in message.split("\n"):
        line = line.removesuffix("\r")
        if not fence:
            if found := _OPENING.fullmatch(line):
                fence, label, indent = found["fence"], _LABEL.match(found["label"])[1], _indent(found["before"])  # type: ignore[index]
            continue
        ended = line.rstrip()
        body = ended.rstrip(fence[0])
        if len(ended) - len(body) >= len(fence):
            if body.strip():  # the fence stands behind the last line
                lines.append(_dedented(body, indent))
            blocks.append(Block(label, "\n".join([*lines, ""])))
            fence, lines = "", []
        else:
            lines.append(_dedented(line, indent))
    if fence:
        blocks.append(Block(label, "\n".join(lines)))
    return blocks


def _indent(before: str) -> int:
    """How far a fence is indented; text before a fence on its line, but for the mark of a list, is no indentation."""
    marked = re.match(r"\s*(?:[-*+]|\d+[.)])?\s*", before)
    return len(before) if marked and marked.end() == len(before) else 0


def _dedented(line: str, indent: int) -> str:
    blank = len(line) - len(line.lstrip())
    return line[min(indent, blank) :]


def _is_python(block: Block) -> bool:
    return bool(_PYTHON.fullmatch(block.label) if block.label else _CODE.search(block.content))
