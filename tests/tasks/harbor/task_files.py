# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of small tasks."""

from collections.abc import Mapping
from pathlib import Path


PLAIN: Mapping[str, str] = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Write 42 to answer.txt.\n",
    "environment/Dockerfile": "FROM debian:13\nWORKDIR /app\nCOPY data.txt .\n",
    "environment/data.txt": "41\n",
    "tests/test.sh": 'grep -qx 42 /app/answer.txt && echo 1 > "/logs/verifier/reward.txt"\n',
    "solution/solve.sh": "echo 42 > /app/answer.txt\n",
}
"""Files of a task with one step."""


def write_task(folder: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """Write :data:`PLAIN` with changed files; ``None`` leaves a file out, and a value ``-> PATH`` makes a link."""
    for name, text in {**PLAIN, **(changes or {})}.items():
        if text is None:
            continue
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            file.symlink_to(text.removeprefix("-> "))
        else:
            file.write_text(text)
    return folder
