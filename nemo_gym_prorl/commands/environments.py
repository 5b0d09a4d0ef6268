# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the files of environments say, read without Gym and without our servers, which take seconds to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.gym.config_files import merged_files
from nemo_gym_prorl.tasks.extras import require_extras


def check_extras(environments: Sequence[str]) -> None:
    """Refuse environments of which a server lacks packages that it needs.

    Raises:
        InfrastructureError: some are not installed; has the command that installs those of all servers.
    """
    servers = [name for block in blocks_of(environments).values() for name in block.get("resources_servers", ())]
    require_extras(*(name.removeprefix("prorl_") for name in servers if name.startswith("prorl_")))


def blocks_of(environments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The blocks of environments' files by name; none, if one can't be read: Gym says what is wrong with it."""
    try:
        files = merged_files(f"environments/{name}/config.yaml" for name in environments)
    except (OSError, YAMLError, OmegaConfBaseException):
        return {}
    found = OmegaConf.to_container(files, resolve=False)
    assert isinstance(found, dict)
    return {str(name): block for name, block in found.items() if isinstance(block, dict)}
