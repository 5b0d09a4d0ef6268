# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the files of environments say, read without Gym and without our servers, which take seconds to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.deployment.config_files import load_merged
from nemo_gym_prorl.deployment.venvs import SERVER_TYPES
from nemo_gym_prorl.failures import CallerError, suggest
from nemo_gym_prorl.tasks.extras import require_extras


def check_extras(environments: Sequence[str]) -> None:
    """Refuse environments of which a server lacks packages that it needs.

    Raises:
        InfrastructureError: some are not installed; has the command that installs those of all servers.
    """
    servers = [name for block in blocks_of(environments).values() for name in block.get("resources_servers", ())]
    require_extras(*(name.removeprefix("prorl_") for name in servers if name.startswith("prorl_")))


def check_overrides(environments: Sequence[str], model_type: str, overrides: Sequence[str]) -> None:
    """Refuse overrides of a server that the environments do not have: Gym takes them for a new block, silently.

    A server that overrides themselves add has an ``entrypoint`` among them.

    Raises:
        CallerError: names the server, and the nearest right one.
    """
    blocks = blocks_of(environments, model_type)
    servers = {name: block for name, block in blocks.items() if block.keys() & {*SERVER_TYPES}}
    paths = [override.partition("=")[0].lstrip("+~").split(".") for override in overrides]
    if not servers or any(path[0] == "config_paths" for path in paths):
        return  # Gym says which file cannot be read; further files may have further servers
    added = {path[0] for path in paths if path[-1] == "entrypoint"}
    for path in paths:
        if len(path) < 2 or path[0] in added or (path[0] not in servers and path[1] not in SERVER_TYPES):
            continue  # a setting of Gym itself, such as head_server.port
        known: Any = servers
        for name in path[:3]:
            if name not in known:
                raise CallerError(f"there is no {name}{suggest(name, known)}", field=".".join(path))
            known = known[name]


def blocks_of(environments: Sequence[str], model_type: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the blocks of environments' files, and of a model server's, by name. Empty if a file cannot be read: Gym
    says what is wrong with it."""
    paths = [f"environments/{name}/config.yaml" for name in environments]
    if model_type is not None:
        implementation, _, name = model_type.partition("/")
        paths.append(f"responses_api_models/{implementation}/configs/{name or implementation}.yaml")
    try:
        files = load_merged(paths)
    except (OSError, YAMLError, OmegaConfBaseException):
        return {}
    found = OmegaConf.to_container(files, resolve=False)
    assert isinstance(found, dict)
    return {str(name): block for name, block in found.items() if isinstance(block, dict)}
