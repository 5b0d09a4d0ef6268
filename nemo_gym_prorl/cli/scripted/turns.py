# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts: the turns of a policy, played back instead of a model.

Scripts test an environment end to end: a correct solution must be rewarded, and each attempt to cheat must not. A
script is JSON:
``{"turns": [{"content": str | null, "tool_calls": [{"name": str, "arguments": object}, ...]}, ...]}``. The last turn
calls no tool, which ends the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError


Turn = dict[str, Any]
Script = dict[str, list[Turn]]


def turn(content: str | None, *calls: dict[str, Any]) -> Turn:
    return {"content": content, "tool_calls": list(calls)}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def script_of[Problem](
    variants: Mapping[str, Callable[[Problem], list[Turn]]], problem: Problem, variant: str
) -> Script:
    """Return the script of one variant for a problem."""
    if variant not in variants:
        raise CallerError(f"no script {variant!r}; scripts: {', '.join(variants)}", field="variant")
    return {"turns": variants[variant](problem)}
