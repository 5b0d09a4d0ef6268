# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the logs of trainings say: a table, and curves as a PNG."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.tiny_dapo.learning import Arm


COLOURS = {Arm.FULL: "#76b900", Arm.RETOKENISED: "#d97706", Arm.SHUFFLED: "#7a7a7a"}
LABELS = {Arm.FULL: "as sampled", Arm.RETOKENISED: "text tokenised anew", Arm.SHUFFLED: "rewards shuffled"}


def logs(folder: Path) -> dict[Arm, list[dict[str, Any]]]:
    """By arm, those of each seed.

    Raises:
        ValueError: a file is none.
    """
    found: dict[Arm, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(folder.glob("seed*-*.json")):
        try:
            log = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is damaged, remove it: {error}") from error
        found[Arm(log["arm"])].append(log)
    return found


def table(folder: Path) -> Table:
    """A line for each training."""
    columns = ("trained on", "seed", "warm start", "after", "batches", "imitation, min", "training, min", "drifted")
    told = Table(*columns, box=None)
    for arm, of_arm in logs(folder).items():
        for log in of_arm:
            first, last = log["evaluations"][0], log["evaluations"][-1]
            drifted = sum(step["drifted"] for step in log["steps"]) / max(1, len(log["steps"]))
            success = f"{first['success']:.0%}", f"{last['success']:.0%}"
            minutes = f"{log['imitation_s'] / 60:.1f}", f"{log['training_s'] / 60:.1f}"
            told.add_row(LABELS[arm], str(log["seed"]), *success, str(len(log["steps"])), *minutes, f"{drifted:.0%}")
    return told


def draw(folder: Path, file: Path) -> None:
    """Success on held-out riddles by batch, and by minute."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for arm, of_arm in logs(folder).items():
        for number, log in enumerate(of_arm):
            evaluations = log["evaluations"]
            success = [100 * told["success"] for told in evaluations]
            style = {"color": COLOURS[arm], "alpha": 0.85, "label": LABELS[arm] if not number else None}
            axes[0].plot([told["step"] for told in evaluations], success, **style)
            axes[1].plot([told["at_s"] / 60 for told in evaluations], success, **style)
    axes[0].set(xlabel="batches of 8 groups of 8", ylabel="held-out riddles solved, %", ylim=(0, 100))
    axes[1].set(xlabel="minutes of training, evaluations included")
    for axis in axes:
        axis.axhline(90, color="black", linewidth=0.6, linestyle=":")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="center right")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
