# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A record's own script, as SWE-bench's newer editions have one, taken apart into what we run of it. Pure.

What stands before the mark of the tests' output (exports, installations, builds) is run before the tests, as it is
written and with the options of the shell that swebench sets. Left out are git's commands by which the script lays the
hidden tests and shows what was changed: the environment lays them itself, and its repository has another history.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nemo_gym_prorl.failures import CallerError


OPTIONS = "set -uxo pipefail"
"""Under which swebench runs every such script."""

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"

_OPENED = re.compile(r"(?<!<)<<(?P<tabs>-?)[ \t]*(?:\\?(?P<bare>[\w.-]+)|(['\"])(?P<quoted>[\w. -]+)\3)")
_GIT = re.compile(r"\s*git (?:-c \S+ )*(?:apply|checkout|status|show|diff)\b[^&|;]*(?:<<.*)?")
_DOWNLOADS = re.compile(
    r"\b(?:pip3?|uv|conda|mamba|apt-get|apt|npm|npx|yarn|pnpm|bun|go|cargo|mvnw?|gradlew?|ant|bundle|gem|composer|curl|"
    r"wget|make|tox)\b"
)


def read(script: str) -> tuple[str, str]:
    """What is run before the tests, and the tests' command.

    Raises:
        CallerError: it has no marks, or nothing between them.
    """
    lines = [line for line in script.strip().split("\n") if line not in ("#!/bin/bash", OPTIONS)]
    start = next((number for number, line in enumerate(lines) if START in line), len(lines))
    end = next((number for number, line in enumerate(lines) if END in line and number > start), start)
    if not (command := "\n".join(lines[start + 1 : end]).strip()):
        raise CallerError("runs nothing between the marks of the tests' output", field="eval_script")
    return "\n".join([OPTIONS, *_without_gits_part(lines[:start])]), command


def may_download(before: str) -> bool:
    """Whether lines of a shell call what fetches packages."""
    return bool(_DOWNLOADS.search(before))


def _without_gits_part(lines: Sequence[str]) -> Iterator[str]:
    rest = list(lines)
    while rest:
        end = _end_of_command(rest)
        command, rest = rest[:end], rest[end:]
        if _GIT.fullmatch(re.sub(r"\\\n", " ", "\n".join(command)).partition("\n")[0]):
            yield ":"  # it may be all that a branch or a function has
        else:
            yield from command


def _end_of_command(lines: Sequence[str]) -> int:
    """How many lines the first command has, with its continuations and its here-document."""
    head = next((number for number, line in enumerate(lines) if not line.endswith("\\")), len(lines) - 1) + 1
    if opened := _OPENED.search("\n".join(lines[:head])):
        word = opened["bare"] or opened["quoted"]
        for number, line in enumerate(lines[head:], head + 1):
            if (line.lstrip("\t") if opened["tabs"] else line) == word:
                return number
    return head  # what has no end is a shift of bits
