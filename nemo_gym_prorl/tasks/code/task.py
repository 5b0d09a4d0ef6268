# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programming problems as a :class:`~nemo_gym_prorl.tasks.task.Task`.

The policy writes its solution to a file if the row offers tools. Otherwise the policy answers in text, as in NeMo
Gym's ``code_gen``: :func:`program_in` chooses a fenced block of the last message. A block is Python if its label names
Python, or if it has no label and looks like code. So sample output after the program is ignored.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_gym_prorl.tasks.code.code_rows import (
    SOLUTION_FILE,
    SUBMIT_DESCRIPTION,
    TOOLS,
    find_tests_file,
    read_metadata,
    read_problem,
)
from nemo_gym_prorl.tasks.code.grading import CodeLimits, CodeVerdict, RewardRule, failed, grade
from nemo_gym_prorl.tasks.final_answer import last_message_text
from nemo_gym_prorl.tasks.task import ExtractedFile, Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


_OPENING = re.compile(r"(?P<before>(?:(?!`{3}|~{3}).)*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[^`]*)")
_LABEL = re.compile(r"[{\s.]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:python|py|pypy|cpython|sage)[\d.]*|ipython\d?", re.IGNORECASE)
_CODE = re.compile(
    r"^[ \t]*(?:import|from|def|class|async|for|while|if|with|try|return|print|lambda|@)\b"
    r"|^[\w.,\[\] \t]+[-+*/]?=[^=]|\b(?:print|input|int|map|sys\.std\w+|open)\s*[.(]",
    re.MULTILINE,
)
_READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bfileinput\b|\b(?:open|read|fdopen)\(\s*(?:0|['\"]/dev/stdin)")

Block = tuple[str, str]
"""Label of a fenced block and its lines without the fence's indentation."""


def program_in(message: str, function: str | None = None) -> str:
    """Return the program in a message.

    The program is the last Python block that defines ``function`` or, if ``None``, reads standard input; else the last
    Python block, else the last block, else the whole message.
    """
    blocks = blocks_in(message)
    if not blocks:
        return message
    programs = [code for label, code in reversed(blocks) if _is_python(label, code)] or [blocks[-1][1]]
    defines = rf"^[ \t]*(?:async +)?def +{function}\b|^{function}[ \t]*(?::[^=\n]*)?=(?!=)"
    fits = _READS_INPUT if function is None else re.compile(defines, re.MULTILINE)
    return next(filter(fits.search, programs), programs[0])


def blocks_in(message: str) -> list[Block]:
    """Return the fenced blocks (backquotes or tildes) of a message. An unclosed block ends with the message."""
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
            if body.strip():  # the closing fence is on the last line of code
                lines.append(_dedented(body, indent))
            blocks.append((label, "\n".join([*lines, ""])))
            fence, lines = "", []
        else:
            lines.append(_dedented(line, indent))
    if fence:
        blocks.append((label, "\n".join(lines)))
    return blocks


def _indent(before: str) -> int:
    """Return the number of columns before a fence; 0 if the text before is more than spaces and a list marker."""
    marked = re.match(r"\s*(?:[-*+]|\d+[.)])?\s*", before)
    return len(before) if marked and marked.end() == len(before) else 0


def _dedented(line: str, indent: int) -> str:
    blank = len(line) - len(line.lstrip())
    return line[min(indent, blank) :]


def _is_python(label: str, code: str) -> bool:
    return bool(_PYTHON.fullmatch(label) if label else _CODE.search(code))


MAX_SOLUTION_BYTES = 256 * 1024
"""Larger solutions are not graded; bounds transfer and grading time."""

MAX_SOLUTION_FIELD_CHARS = 64 * 1024
"""Maximum characters of the solution in the rollout's row, to bound the row's size."""

SUBMIT_REPLY = f"Submitted. {SOLUTION_FILE} is tested as it is now. The task is over: answer without calling a tool."


class ProgrammingProblems:
    """Programming problems graded by their tests.

    Args:
        root: folder in each sandbox for uploads; the agent works in ``<root>/workspace``.
        rule: reward rule; see :func:`.grading.grade`.
        tests_folder: folder of the files that rows name in ``tests_file``; ``None`` refuses such rows.
    """

    resumes = True

    def __init__(
        self,
        root: str,
        tools: ToolLimits,
        limits: CodeLimits,
        rule: RewardRule = "all",
        tests_folder: Path | None = None,
    ) -> None:
        self._root = root.rstrip("/")
        self._limits = limits
        self._rule: RewardRule = rule
        self._tests_folder = tests_folder
        self.tools = Workbench(
            TOOLS, f"{self._root}/workspace", tools, submit_description=SUBMIT_DESCRIPTION, submit_reply=SUBMIT_REPLY
        )

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """Validate the row's tests, and return default requirements. A ``tests_file`` is not read, but must exist."""
        if (metadata := read_metadata(row)).tests_file is None:
            read_problem(metadata, None)
        else:
            find_tests_file(metadata, self._tests_folder)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        await tools.write({SOLUTION_FILE: ""})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> ExtractedFile:
        return await tools.extract_file(SOLUTION_FILE, limit=MAX_SOLUTION_BYTES)

    async def grade(
        self, row: Mapping[str, Any], artefacts: ExtractedFile, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        try:
            source = (artefacts.content or b"").decode()
        except UnicodeDecodeError:
            return failed(CodeVerdict.NO_SOLUTION, f"{SOLUTION_FILE} is not UTF-8 text")
        problem = await asyncio.to_thread(read_problem, read_metadata(row), self._tests_folder)
        if not _has_tools(row) and not source.strip():  # an agent program writes the file even if the row has no tools
            source = program_in(last_message_text(response), problem.function)
        if not source.strip():
            empty = (
                f"{SOLUTION_FILE} is empty, as it was at the start" if _has_tools(row) else "the answer has no Python"
            )
            return failed(CodeVerdict.NO_SOLUTION, artefacts.problem or empty)
        graded = await grade(open_sandbox, problem, source, self._limits, self._root, self._rule)
        return replace(graded, fields={**graded.fields, "solution": source[:MAX_SOLUTION_FIELD_CHARS]})


def _has_tools(row: Mapping[str, Any]) -> bool:
    return bool((row.get("responses_create_params") or {}).get("tools"))
