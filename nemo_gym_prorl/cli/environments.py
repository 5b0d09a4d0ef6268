# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environments' configuration files: checks before a start, and ``prorl init``.

Configuration files are read without importing Gym or server modules, which are slow to import. The folder
``new_environment`` is the template of ``prorl init``: a working environment named ``my_environment``, so that linter,
type checker and tests cover the template.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.cli.new_environment import rows
from nemo_gym_prorl.deployment import gym_cli
from nemo_gym_prorl.deployment.gym_cli import load_merged
from nemo_gym_prorl.deployment.venvs import SERVER_TYPES
from nemo_gym_prorl.failures import CallerError, InfrastructureError, suggest
from nemo_gym_prorl.tasks import require_extras


def check_extras(environments: Sequence[str]) -> None:
    """Check that the pip extras of the environments' resources servers are installed.

    Raises:
        InfrastructureError: a package is missing; the error has one install command for all servers.
    """
    servers = [name for block in server_blocks(environments).values() for name in block.get("resources_servers", ())]
    require_extras(*(name.removeprefix("prorl_") for name in servers if name.startswith("prorl_")))


def check_overrides(environments: Sequence[str], model_type: str, overrides: Sequence[str]) -> None:
    """Check the syntax of Hydra overrides and the names of servers before a start.

    Gym silently adds a new block for a misspelled server. Overrides may add a server if one override sets the server's
    ``entrypoint``, and a sandbox block that an override of ``sandbox_provider`` names. Servers check their settings.
    Only the syntax is checked if a configuration file of :func:`server_blocks` cannot be read or an override sets
    ``config_paths``.

    Raises:
        CallerError: an override is wrong; names the setting.
    """
    try:
        parsed = OverridesParser.create().parse_overrides([*overrides])
    except HydraException as error:
        raise CallerError(f"Hydra cannot read it: {' '.join(str(error).split())}", field="override") from None
    kinds = {*SERVER_TYPES, "singularity"}
    servers = {name: block for name, block in server_blocks(environments, model_type).items() if block.keys() & kinds}
    paths = [override.key_or_group.split(".") for override in parsed]
    if not servers or any(path[0] == "config_paths" for path in paths):
        return  # Gym reports unreadable files, and the files of `config_paths` may add any server
    added = {path[0] for path in paths if path[-1] == "entrypoint"}
    added |= {str(one.value()) for one in parsed if one.key_or_group.endswith(".sandbox_provider")}
    for path, override in zip(paths, parsed, strict=True):
        if len(path) > 1 and path[0] not in added and (path[0] in servers or path[1] in kinds):
            known: Any = servers
            for name in path[: 2 if path[1] == "singularity" else 3]:
                if name not in known:
                    raise CallerError(f"no setting or server {name!r}{suggest(name, known)}", field=".".join(path))
                known = known[name]
        if not (override.is_add() or override.is_force_add() or path[0] in _KEYS_KNOWN_TO_HYDRA):
            raise CallerError("must begin with ++", field=override.key_or_group)


_KEYS_KNOWN_TO_HYDRA = ("head_server", "hydra", "skip_venv_if_present", "uv_venv_dir")
"""Keys whose overrides need no ``++``: Hydra's own, and those that GymCli has added before."""


def server_blocks(environments: Sequence[str], model_type: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the top-level mappings in the configuration files of environments and a model server, by key. A server's
    key is its instance name. Empty if a file cannot be read, because Gym reports the reason.

    ``model_type``: the model server, as ``IMPLEMENTATION`` or ``IMPLEMENTATION/CONFIG``; ``None`` for none."""
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


_TEMPLATE = Path(__file__).parent / "new_environment"
_NAME = "my_environment"


def create(name: str, folder: Path) -> list[Path]:
    """Create an environment from the template; return the paths of the new files, relative to ``folder``.

    Raises:
        CallerError: the name is invalid, in use, or the name of a standard library module.
        InfrastructureError: a file cannot be written; files written before remain.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", name):
        raise CallerError(f"must start with a letter and contain only a-z, 0-9 and _, not {name!r}", field="NAME")
    if name in sys.stdlib_module_names:
        raise CallerError(f"{name!r} is a module of Python; choose another name", field="NAME")
    server = Path("resources_servers", name)
    taken = name in gym_cli.environment_names() or (folder / server).exists()
    if taken or (folder / "environments" / name).exists():
        raise CallerError(f"an environment {name!r} exists already; choose another name", field="NAME")
    files = {Path("environments", name, "config.yaml"): (_TEMPLATE / "config.yaml").read_text()}
    for file in ("app.py", "rows.py", "test_app.py", "pyproject.toml", "README.md"):
        files[server / file] = (_TEMPLATE / file).read_text()
    files[server / "data" / "example.jsonl"] = "".join(f"{row}\n" for row in rows.example())
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(re.sub("^# SPDX.*\n", "", text, flags=re.M).replace(_NAME, name))
    except OSError as error:
        raise InfrastructureError(f"cannot write {error.filename}: {error.strerror}") from error
    return [*files]
