# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's ``/aggregate_metrics`` where one agent serves several environments: each server judges its own rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.rollout.rows import WISHES


def environment_of(rollout: Mapping[str, Any]) -> str | None:
    """The environment that a row of ``/run`` says it is from; ``None`` where it does not."""
    about = rollout.get(WISHES)
    name = about.get("environment") if isinstance(about, Mapping) else None
    return name if isinstance(name, str) else None


def merged(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of several environments as one answer: those of one server as they are, of several each below its
    environment's name, ``swe/mean/reward``; groups one after the other.

    Args:
        metrics: environment → what its server answered.
    """
    if len(metrics) == 1:
        return dict(next(iter(metrics.values())))
    together: dict[str, Any] = {"group_level_metrics": []}
    for name, answer in metrics.items():
        together["group_level_metrics"] += answer.get("group_level_metrics") or []
        for part in ("agent_metrics", "key_metrics"):
            ours = together.setdefault(part, {})
            ours.update({f"{name}/{key}": value for key, value in (answer.get(part) or {}).items()})
    return together
