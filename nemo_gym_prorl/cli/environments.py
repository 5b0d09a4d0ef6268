# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environments' configuration files: checks before a start, and ``prorl init``.

Files are read without Gym and without server modules, whose imports take seconds. The folder ``new_environment`` is
the template of ``prorl init``: a working environment under the name ``my_environment``, so the linter, the type
checker and the tests cover the template.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.cli.new_environment import rows
from nemo_gym_prorl.deployment import config_files
from nemo_gym_prorl.deployment.config_files import load_merged
from nemo_gym_prorl.deployment.venvs import SERVER_TYPES
from nemo_gym_prorl.failures import CallerError, InfrastructureError, suggest
from nemo_gym_prorl.tasks.extras import require_extras


def check_extras(environments: Sequence[str]) -> None:
    """Check that the packages of the environments' servers are installed.

    Raises:
        InfrastructureError: a package is missing; the error has the install command for all servers.
    """
    servers = [name for block in server_blocks(environments).values() for name in block.get("resources_servers", ())]
    require_extras(*(name.removeprefix("prorl_") for name in servers if name.startswith("prorl_")))


def check_overrides(environments: Sequence[str], model_type: str, overrides: Sequence[str]) -> None:
    """Check that overrides name existing servers. Gym silently adds a new block for a misspelled server.

    Overrides may add a server if one of them sets its ``entrypoint``.

    Raises:
        CallerError: an override names an unknown server; suggests the closest name.
    """
    blocks = server_blocks(environments, model_type)
    servers = {name: block for name, block in blocks.items() if block.keys() & {*SERVER_TYPES}}
    paths = [override.partition("=")[0].lstrip("+~").split(".") for override in overrides]
    if not servers or any(path[0] == "config_paths" for path in paths):
        return  # Gym reports unreadable files, and `config_paths` may add servers
    added = {path[0] for path in paths if path[-1] == "entrypoint"}
    for path in paths:
        if len(path) < 2 or path[0] in added or (path[0] not in servers and path[1] not in SERVER_TYPES):
            continue  # a setting of Gym itself, such as head_server.port
        known: Any = servers
        for name in path[:3]:
            if name not in known:
                raise CallerError(f"no setting or server {name!r}{suggest(name, known)}", field=".".join(path))
            known = known[name]


def server_blocks(environments: Sequence[str], model_type: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the server blocks of environments and of a model server, by instance name.

    Empty if a file cannot be read, because Gym reports the reason.
    """
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
    """Create an environment from the template below ``folder``.

    Returns:
        The paths of the new files, relative to ``folder``.

    Raises:
        CallerError: the name is invalid or in use.
        InfrastructureError: a file cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", name):
        raise CallerError(f"must start with a letter and contain only a-z, 0-9 and _, not {name!r}", field="NAME")
    if name in sys.stdlib_module_names:
        raise CallerError(f"{name!r} is a module of Python; choose another name", field="NAME")
    server = Path("resources_servers", name)
    taken = name in config_files.environment_names() or (folder / server).exists()
    if taken or (folder / "environments" / name).exists():
        raise CallerError(f"an environment {name!r} exists already; choose another name", field="NAME")
    files = {Path("environments", name, "config.yaml"): (_TEMPLATE / "config.yaml").read_text()}
    for file in ("app.py", "rows.py", "test_app.py", "pyproject.toml", "README.md"):
        files[server / file] = (_TEMPLATE / file).read_text()
    files[server / "data" / "example.jsonl"] = "".join(f"{row}\n" for row in rows.example())
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.replace(_NAME, name))
    except OSError as error:
        raise InfrastructureError(f"cannot write {error.filename}: {error.strerror}") from error
    return [*files]
