# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the shipped Harbor tasks, with scripted turns for machines without a model.

``python -m scripts.scripted_turns.harbor`` writes ``resources_servers/prorl_harbor/data/example.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.cli.scripted.text import Turn, call, script_of, turn
from nemo_gym_prorl.sandbox.images.builder import DEFAULT
from nemo_gym_prorl.tasks.harbor.task_folder import make_row


SERVER = Path("resources_servers/prorl_harbor")
TASKS = ("word_count", "disk_report", "two_steps")


def example_row(name: str, variant: str = "oracle") -> dict[str, Any]:
    """Return the row of a shipped task, on the default sandbox image instead of the task's own.

    Raises:
        CallerError: the variant is unknown.
    """
    folder = SERVER / "data/tasks" / name
    row = make_row(folder, "prorl-examples")
    turns = script_of(VARIANTS, folder, variant)["turns"]
    row["responses_create_params"]["metadata"] = {"script": json.dumps({"turns": turns}, sort_keys=True)}
    harbor = {**row["harbor"], "folder": str(folder.relative_to(SERVER))}
    if images := harbor.get("verifier_images"):
        harbor["verifier_images"] = {step: {**image, "image": DEFAULT} for step, image in images.items()}
    return {**row, "image": DEFAULT, "harbor": harbor}


def _oracle(folder: Path) -> list[Turn]:
    solutions = [folder / "steps/sort/solution", folder / "steps/merge/solution", folder / "solution"]
    turns = []
    for path in [one / "solve.sh" for one in solutions if one.is_dir()]:
        command = path.read_text().partition("\n")[2].strip()
        turns += [turn("I do it.", call("bash", command=command)), turn("That is all.", call("submit"))]
    return [turn("I look around.", call("bash", command="pwd; ls")), *turns, turn("It is handed in.")]


def _null(_folder: Path) -> list[Turn]:
    return [turn("I submit it as it is.", call("submit")), turn("Submitted.")]


VARIANTS: Mapping[str, Callable[[Path], list[Turn]]] = {"oracle": _oracle, "null": _null}
"""Turns by variant; only ``oracle`` may earn a reward."""


if __name__ == "__main__":
    lines = [json.dumps(example_row(name), sort_keys=True) for name in TASKS]
    (SERVER / "data/example.jsonl").write_text("".join(f"{line}\n" for line in lines))
