# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a training starts: what would be wrong in silence, every finding at once.

A training that starts, goes on, and is not what one believes costs a cluster for days: its gradients are wrong, its
samples are of the short or of the lucky, no tool is ever called, it waits for ever. Nobody else says so. What stops a
start by itself is for those to say whom it stops: NeMo RL, Gym, Hydra, and the parts of ours that meet it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl.checks import rows, servers, silent
from nemo_gym_prorl.nemo_rl.checks.finding import Finding
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts


def check(config: Mapping[str, Any], settings: ProrlSettings) -> list[Finding]:
    """All findings.

    Args:
        config: the resolved configuration.
        settings: its block ``prorl:``.
    """
    findings = [*silent.check(config, settings), *rows.check(config)]
    if settings.rollouts is Rollouts.SERVICE:
        return findings
    try:
        gym = servers.gym_blocks(config)
    except CallerError as error:
        return [*findings, Finding(error.field or "env.nemo_gym", error.complaint, "Correct it")]
    return [*findings, *servers.check(config, settings, gym)]


__all__ = ["Finding", "check"]
