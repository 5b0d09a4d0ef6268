# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a training starts: every finding at once, in seconds, instead of a crash after an hour.

Pure: a resolved configuration in, findings out. But for two: ``gym_files`` reads the files of Gym's servers, and
``surroundings`` looks at what else there is: data, environments, services, versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from nemo_gym_prorl.nemo_rl.checks import runtimes, servers, training
from nemo_gym_prorl.nemo_rl.checks.finding import Finding, of_validation
from nemo_gym_prorl.nemo_rl.checks.gym_files import GymBlocks
from nemo_gym_prorl.nemo_rl.checks.keys import Keys, unknown_keys
from nemo_gym_prorl.nemo_rl.settings import settings_of


def check(
    config: Mapping[str, Any], gym: GymBlocks, known: Keys, mentioned: Callable[[str], bool] = lambda key: False
) -> list[Finding]:
    """All findings that need nothing but the configuration.

    Args:
        config: the resolved configuration.
        gym: what Gym will make of ``env.nemo_gym``.
        known: the settings that NeMo RL declares.
        mentioned: whether its sources have a key somewhere.
    """
    findings = [*unknown_keys(config, known, mentioned), *training.missing(config)]
    try:
        settings = settings_of(config)
    except ValidationError as error:
        # What the others look for depends on it.
        return [*findings, *of_validation("prorl", error)]
    return [
        *findings,
        *training.check(config, settings),
        *runtimes.check(config, settings),
        *gym.findings,
        *servers.check(config, settings, gym),
    ]


__all__ = ["Finding", "check"]
