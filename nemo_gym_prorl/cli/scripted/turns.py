# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts: what a policy would say, for machines that have no model. Pure.

A model server that plays back scripts makes an environment testable end to end: the right answer must earn its reward,
and each way to cheat must earn nothing. A script is JSON:
``{"turns": [{"content": str | null, "tool_calls": [{"name": str, "arguments": object}, ...]}, ...]}``; its last turn
calls no tool, which ends the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError


Turn = dict[str, Any]
Script = dict[str, list[Turn]]


def turn(content: str | None, *calls: dict[str, Any]) -> Turn:
    """What is said, and the tools that are called with it."""
    return {"content": content, "tool_calls": list(calls)}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """One call of a tool."""
    return {"name": name, "arguments": arguments}


def script_of[Problem](
    variants: Mapping[str, Callable[[Problem], list[Turn]]], problem: Problem, variant: str
) -> Script:
    """The script of one variant.

    Args:
        variants: turns by name of the script.
        problem: the problem to solve, or not.
        variant: one of the names.

    Raises:
        CallerError: there is no such variant.
    """
    if variant not in variants:
        raise CallerError(f"no script {variant!r}; there are {', '.join(variants)}", field="variant")
    return {"turns": variants[variant](problem)}
