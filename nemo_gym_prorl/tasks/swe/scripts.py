# SPDX-License-Identifier: Apache-2.0
"""Scripted turns for issues of repositories: what a policy would say, for machines that have no model.

The format is that of :mod:`nemo_gym_prorl.tasks.humaneval.scripts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.swe.instance import row_of


Turn = dict[str, Any]

PATCH_FILE = "/tmp/fix.patch"


def scripted_row(row: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """A row of ``prorl_swe`` with a script that plays ``variant``, one of :data:`VARIANTS`.

    Raises:
        CallerError: the row is wrong; or there is no such variant.
    """
    if variant not in VARIANTS:
        raise CallerError(f"no script {variant!r}; there are {', '.join(VARIANTS)}", field="variant")
    return with_turns(row, VARIANTS[variant](row_of(row).swe.patch))


def with_turns(row: Mapping[str, Any], turns: list[Turn]) -> dict[str, Any]:
    """A row with turns for a model server that plays back scripts."""
    params = {**row["responses_create_params"], "metadata": {"script": json.dumps({"turns": turns}, sort_keys=True)}}
    return {**row, "responses_create_params": params}


def patching(patch: str) -> list[Turn]:
    """Looks around, brings in a patch with the tools, looks at what it did, and hands in."""
    return [
        _turn("I look around.", _bash("git status --short && git log --oneline -3 && ls")),
        _turn("I write down the change.", _create(patch)),
        _turn("Then I make it.", _bash(f"git apply {PATCH_FILE} && git diff --stat")),
        _turn("That is all.", {"name": "submit", "arguments": {}}),
        _turn("The repository is handed in."),
    ]


def _null(_patch: str) -> list[Turn]:
    return [_turn("I submit it as it is.", {"name": "submit", "arguments": {}}), _turn("Submitted.")]


VARIANTS: Mapping[str, Callable[[str], list[Turn]]] = {"oracle": patching, "null": _null}
"""Turns by name of the script, of the real fix: ``oracle`` resolves the issue, ``null`` changes nothing."""


def _turn(content: str, *calls: dict[str, Any]) -> Turn:
    return {"content": content, "tool_calls": list(calls)}


def _bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


def _create(patch: str) -> dict[str, Any]:
    return {"name": "str_replace_editor", "arguments": {"command": "create", "path": PATCH_FILE, "file_text": patch}}
