# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programming problems as a :class:`~nemo_gym_prorl.tasks.task.Task`: rows bring their tests.

A row with tools has its solution in a file, which the policy finds empty. A row without is answered in text, as NeMo
Gym's ``code_gen`` rows are: of all blocks in Python in the last message the last counts. A block is in Python if its
fence says so, or says nothing and the block looks like code: an example of output after the program is no program.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_gym_prorl.tasks.code.grading import CodeLimits, RewardRule, Verdict, failed, grade
from nemo_gym_prorl.tasks.code.rows import (
    HANDING_IN,
    SOLUTION_FILE,
    TOOLS,
    find_tests_file,
    read_metadata,
    read_problem,
)
from nemo_gym_prorl.tasks.final_answer import last_message_text
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import Taken, ToolLimits, Workspace


_OPENING = re.compile(r"(?P<before>(?:(?!`{3}|~{3}).)*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[^`]*)")
_LABEL = re.compile(r"[{\s.]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:python|py|pypy|cpython|sage)[\d.]*|ipython\d?", re.IGNORECASE)
_CODE = re.compile(
    r"^[ \t]*(?:import|from|def|class|async|for|while|if|with|try|return|print|lambda|@)\b"
    r"|^[\w.,\[\] \t]+[-+*/]?=[^=]|\b(?:print|input|int|map|sys\.std\w+|open)\s*[.(]",
    re.MULTILINE,
)


Block = tuple[str, str]
"""What stands behind a fence, up to the first character of no word, and the lines without the fence's indentation."""


def program_in(message: str) -> str:
    """The program of a message: the last block in Python, else the last block, else all of the message."""
    blocks = blocks_in(message)
    if not blocks:
        return message
    return next((code for label, code in reversed(blocks) if _is_python(label, code)), blocks[-1][1])


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
            blocks.append((label, "\n".join([*lines, ""])))
            fence, lines = "", []
        else:
            lines.append(_dedented(line, indent))
    if fence:
        blocks.append((label, "\n".join(lines)))
    return blocks


def _indent(before: str) -> int:
    """How far a fence is indented; text before a fence on its line, but for the mark of a list, is no indentation."""
    marked = re.match(r"\s*(?:[-*+]|\d+[.)])?\s*", before)
    return len(before) if marked and marked.end() == len(before) else 0


def _dedented(line: str, indent: int) -> str:
    blank = len(line) - len(line.lstrip())
    return line[min(indent, blank) :]


def _is_python(label: str, code: str) -> bool:
    return bool(_PYTHON.fullmatch(label) if label else _CODE.search(code))


MAX_SOLUTION_BYTES = 256 * 1024
"""Longest solution that is graded."""

MAX_SOLUTION_FIELD = 64 * 1024
"""Characters of the solution in the rollout's row."""

HANDED_IN = f"Submitted. {SOLUTION_FILE} is tested as it is now. The task is over: answer without calling a tool."


class ProgrammingProblems:
    """The task.

    Args:
        root: a folder of each sandbox that uploads reach; the agent works in ``<root>/workspace``.
        tools: bounds of one tool call.
        limits: bounds of one candidate.
        rule: what part of the tests earns what.
        tests_folder: where the files are that rows name.
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
        self.tools = Workbench(TOOLS, f"{self._root}/workspace", tools, handing_in=HANDING_IN, handed_in=HANDED_IN)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row's tests can't be used; names the field.
        """
        if (metadata := read_metadata(row)).tests_file is None:
            read_problem(metadata, None)
        else:
            find_tests_file(metadata, self._tests_folder)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Put the file there."""
        await tools.write({SOLUTION_FILE: ""})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> Taken:
        """The solution's file."""
        return await tools.take(SOLUTION_FILE, limit=MAX_SOLUTION_BYTES)

    async def grade(
        self, row: Mapping[str, Any], artefacts: Taken, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        """Run the problem's tests; see :mod:`.grading`."""
        try:
            source = (artefacts.content or b"").decode()
        except UnicodeDecodeError:
            return failed(Verdict.NO_SOLUTION, f"{SOLUTION_FILE} is not UTF-8 text")
        if not _has_tools(row):
            source = program_in(last_message_text(response))
        if not source.strip():
            return failed(Verdict.NO_SOLUTION, artefacts.problem or f"{SOLUTION_FILE} holds no Python")
        problem = await asyncio.to_thread(read_problem, read_metadata(row), self._tests_folder)
        graded = await grade(open_sandbox, problem, source, self._limits, self._root, self._rule)
        return replace(graded, fields={**graded.fields, "solution": source[:MAX_SOLUTION_FIELD]})


def _has_tools(row: Mapping[str, Any]) -> bool:
    return bool((row.get("responses_create_params") or {}).get("tools"))
