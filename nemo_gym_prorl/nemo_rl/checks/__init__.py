# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a training starts: what would be wrong in silence, every finding at once.

Pure: a resolved configuration in, findings out. But for two: ``gym_files`` reads the files of Gym's servers, and
``around`` looks at rows and services. What stops a start by itself is for those to say whom it stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from nemo_gym_prorl.nemo_rl.checks import silent
from nemo_gym_prorl.nemo_rl.checks.finding import MISSING, Finding, of_validation
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
    findings = [*unknown_keys(config, known, mentioned), *_missing(config)]
    try:
        settings = settings_of(config)
    except ValidationError as error:
        # What the others look for depends on it.
        return [*findings, *of_validation("prorl", error)]
    return [*findings, *gym.findings, *silent.check(config, settings, gym)]


def _missing(config: Mapping[str, Any], path: str = "") -> Iterator[Finding]:
    """Values that somebody must give, and nobody gave."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if value == MISSING:
            yield Finding(here, "it has no value", f"Give one, e.g. ++{here}=… on the command line")
        elif isinstance(value, Mapping):
            yield from _missing(value, here)


__all__ = ["Finding", "check"]
