# SPDX-License-Identifier: Apache-2.0
"""A record's own script, as SWE-bench's newer editions have one, taken apart into what we run of it. Pure.

What stands before the mark of the tests' output (exports, installations, builds) is run before the tests, as it is
written and with the options of the shell that swebench sets. Left out are git's commands by which the script lays the
hidden tests and shows what was changed: the environment lays them itself, and its repository has another history.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from nemo_gym_prorl.failures import CallerError


OPTIONS = "set -uxo pipefail"
"""Under which swebench runs every such script."""

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"

_OPENED = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
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


def _without_gits_part(lines: Iterable[str]) -> Iterator[str]:
    rest = iter(lines)
    for line in rest:
        kept = not _GIT.fullmatch(line)
        opened = _OPENED.search(line)
        inside = [line]
        if opened:
            for line in rest:
                inside.append(line)
                if line.strip() == opened[2]:
                    break
        if kept:
            yield from inside
