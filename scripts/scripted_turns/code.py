# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted turns for programming problems, in the format of :mod:`nemo_gym_prorl.cli.scripted.text`."""

from __future__ import annotations

from nemo_gym_prorl.cli.scripted.text import Turn, call, turn
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE


def oracle(source: str) -> dict[str, list[Turn]]:
    """Return a script that writes a known solution, compiles and submits it."""
    write = call("str_replace_editor", command="create", path=SOLUTION_FILE, file_text=source)
    compiles = call("bash", command=f"python3 -m py_compile {SOLUTION_FILE} && echo yes")
    return {
        "turns": [
            turn("I write the whole solution at once.", write),
            turn("Does it compile?", compiles),
            turn("It does.", call("submit")),
            turn("The solution is submitted."),
        ]
    }


def null() -> dict[str, list[Turn]]:
    """Return a script that submits the workspace unchanged."""
    return {"turns": [turn("I submit it as it is.", call("submit")), turn("Submitted.")]}
