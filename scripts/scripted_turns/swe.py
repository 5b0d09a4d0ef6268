# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted turns for software engineering tasks, for machines without a model.

The format is that of :mod:`nemo_gym_prorl.cli.scripted.text`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.cli.scripted.text import Turn, call, script_of, turn
from nemo_gym_prorl.tasks.swe.instance import SweRow


PATCH_FILE = "/tmp/fix.patch"


def scripted_row(row: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Return a row of ``prorl_swe`` with the script of a variant.

    Raises:
        CallerError: the row is invalid, or the variant is unknown.
    """
    return with_turns(row, script_of(VARIANTS, SweRow.parse(row).swe.patch, variant)["turns"])


def with_turns(row: Mapping[str, Any], turns: list[Turn]) -> dict[str, Any]:
    """Return a row with a script of these turns for the scripted policy."""
    params = {**row["responses_create_params"], "metadata": {"script": json.dumps({"turns": turns}, sort_keys=True)}}
    return {**row, "responses_create_params": params}


def patching(patch: str) -> list[Turn]:
    """Return turns that inspect the repository, apply a patch with the tools and submit."""
    write = call("str_replace_editor", command="create", path=PATCH_FILE, file_text=patch)
    return [
        turn("I look around.", call("bash", command="git status --short && git log --oneline -3 && ls")),
        turn("I write down the change.", write),
        turn("Then I make it.", call("bash", command=f"git apply {PATCH_FILE} && git diff --stat")),
        turn("That is all.", call("submit")),
        turn("The repository is handed in."),
    ]


def _null(_patch: str) -> list[Turn]:
    return [turn("I submit it as it is.", call("submit")), turn("Submitted.")]


VARIANTS: Mapping[str, Callable[[str], list[Turn]]] = {"oracle": patching, "null": _null}
"""Turns by variant, given the reference fix: ``oracle`` applies it, ``null`` changes nothing."""
