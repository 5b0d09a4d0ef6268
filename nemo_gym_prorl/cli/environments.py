# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environments' configuration files: checks before a start, and ``prorl init``.

Configuration files are read without importing Gym or server modules, which are slow to import; only overrides of
server settings import server modules. The folder ``new_environment`` is the template of ``prorl init``: a working
environment named ``my_environment``, so the linter, the type checker and the tests cover the template.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from nemo_gym_prorl.cli.new_environment import rows
from nemo_gym_prorl.deployment import gym_cli
from nemo_gym_prorl.deployment.gym_cli import load_merged
from nemo_gym_prorl.deployment.venvs import SERVER_TYPES
from nemo_gym_prorl.failures import CallerError, InfrastructureError, suggest
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.sandbox.spec import provider_options
from nemo_gym_prorl.tasks import require_extras


def check_extras(environments: Sequence[str]) -> None:
    """Check that the pip extras of the environments' resources servers are installed.

    Raises:
        InfrastructureError: a package is missing; the error has one install command for all servers.
    """
    servers = [name for block in server_blocks(environments).values() for name in block.get("resources_servers", ())]
    require_extras(*(name.removeprefix("prorl_") for name in servers if name.startswith("prorl_")))


def check_overrides(environments: Sequence[str], model_type: str, overrides: Sequence[str]) -> None:
    """Check Hydra overrides before a start: server names, the prefix ``++``, and settings of this project's servers.

    Gym silently adds a new block for a misspelled server, and servers read their settings only after Ray's start.
    Overrides may add a server if one override sets the server's ``entrypoint``, and a sandbox block that an override
    of ``sandbox_provider`` names. Values with interpolations (``${…}``) are left to Gym. Only the syntax is checked if
    a configuration file of :func:`server_blocks` cannot be read or an override sets ``config_paths``.

    Raises:
        CallerError: an override is wrong; names the setting.
    """
    if not overrides:
        return
    try:
        parsed = OverridesParser.create().parse_overrides([*overrides])
    except HydraException as error:
        raise CallerError(f"Hydra cannot read it: {' '.join(str(error).split())}", field="override") from None
    blocks = server_blocks(environments, model_type)
    kinds = {*SERVER_TYPES, _SANDBOXES}
    servers = {name: block for name, block in blocks.items() if block.keys() & kinds}
    paths = [override.key_or_group.split(".") for override in parsed]
    if not servers or any(path[0] == "config_paths" for path in paths):
        return  # Gym reports unreadable files, and the files of `config_paths` may add any server
    added = {path[0] for path in paths if path[-1] == "entrypoint"}
    sandboxes = {name for name, block in servers.items() if _SANDBOXES in block}
    sandboxes |= {path[0] for path in paths if path[1:2] == [_SANDBOXES]}
    for override in parsed:
        value = override.value() if override.key_or_group.endswith(".sandbox_provider") else None
        if value is not None and not isinstance(value, dict) and "${" not in (name := str(value)):
            if name not in sandboxes:
                raise CallerError(f"no sandbox block {name!r}{suggest(name, sandboxes)}", field=override.key_or_group)
            added.add(name)
    given: dict[tuple[str, ...], DictConfig] = defaultdict(lambda: OmegaConf.create({}))
    for path, override in zip(paths, parsed, strict=True):
        if override.is_sweep_override():
            raise CallerError("has several values; write a list as [a,b]", field=override.key_or_group)
        if len(path) > 1 and path[0] not in added and (path[0] in servers or path[1] in kinds):
            owner = tuple(path[: 2 if path[1] == _SANDBOXES else 3])
            known: Any = servers
            for name in owner:
                if name not in known:
                    raise CallerError(f"no setting or server {name!r}{suggest(name, known)}", field=".".join(path))
                known = known[name]
            if len(path) > len(owner) and "${" not in str(override.value()):
                OmegaConf.update(given[owner], ".".join(path[len(owner) :]), override.value(), force_add=True)
        if not (override.is_add() or override.is_force_add() or path[0] in _KEYS_KNOWN_TO_HYDRA):
            raise CallerError("must begin with ++", field=override.key_or_group)
    for owner, settings in given.items():
        _check_settings(owner, OmegaConf.to_container(settings, resolve=False))


_SANDBOXES = "singularity"  # key of a block with sandbox settings, where a server's block has its server type
_KEYS_KNOWN_TO_HYDRA = ("head_server", "hydra", "skip_venv_if_present", "uv_venv_dir")
"""Keys whose overrides need no ``++``: Hydra's own, and those that GymCli has added before."""


def _check_settings(owner: tuple[str, ...], given: Any) -> None:
    """Validate overridden settings of a server or sandbox block with the block's pydantic models. ``owner``: keys of
    the block, ``(instance, server type, implementation)`` or ``(instance, "singularity")``."""
    where = ".".join(owner)
    if owner[1] == _SANDBOXES:
        try:
            provider_options(given)
        except CallerError as error:
            raise CallerError(error.complaint, field=f"{where}.{error.field}") from None
        return
    try:
        file = gym_cli.find_file("/".join((*owner[1:], "app.py")))
        names = runpy.run_path(str(file)) if "nemo_gym_prorl" in file.read_text() else {}
    except Exception:
        return  # the same error ends the server's start, and Gym reports the error
    from nemo_gym_prorl.policy.runtime import PolicyConfig
    from nemo_gym_prorl.servers.server_base import ServerBase

    servers = [each for each in names.values() if isinstance(each, type) and issubclass(each, ServerBase)]
    checks: list[tuple[Any, Any]] = []
    if servers:
        checks.append((given, max(servers, key=lambda each: len(each.__mro__)).model_fields["config"].annotation))
    if owner[2] == "prorl_model":
        checks.append((given.get("policy", {}), PolicyConfig))
    for settings, model in checks:
        try:
            model.model_validate(settings)
        except ValidationError as error:
            # Only overrides are validated, so a missing setting may be in a configuration file.
            wrong = [each for each in error.errors() if each["type"] != "missing"]
            for each in wrong:
                if each["type"] == "extra_forbidden":
                    each["msg"] = "there is no such setting"
                    each["msg"] += suggest(str(each["loc"][0]), model.model_fields) if len(each["loc"]) == 1 else ""
            if wrong:
                raise CallerError(in_words(field_errors(wrong)), field=where) from None


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
