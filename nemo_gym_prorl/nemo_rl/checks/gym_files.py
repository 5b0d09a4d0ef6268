# SPDX-License-Identifier: Apache-2.0
"""What Gym will make of ``env.nemo_gym``: the files that it names, and what the block says over them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.gym.venvs import running_installation
from nemo_gym_prorl.nemo_rl.checks.finding import Finding, block_at


ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"
"""Further folders in which Gym (0.5 and later) looks for servers and files."""

_FROM_NEMO_RL = {"policy_base_url": "", "policy_api_key": "", "policy_model_name": "policy"}
"""What NeMo RL adds when its engines are up; files refer to it."""


@dataclass(slots=True)
class GymBlocks:
    """Gym's configuration.

    Attributes:
        files: what the files say.
        merged: the same with the block over it.
        findings: files that are not there or can't be read, and references that lead nowhere.
    """

    files: dict[str, Any] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_gym(config: Mapping[str, Any], roots: Sequence[Path] | None = None) -> GymBlocks:
    """Read the files of ``env.nemo_gym.config_paths``.

    Args:
        config: the resolved configuration.
        roots: where relative paths begin; default: where Gym looks.
    """
    own = block_at(config, "env.nemo_gym")
    found = GymBlocks()
    paths = own.get("config_paths")
    files = _load(paths if isinstance(paths, list) else [], gym_roots() if roots is None else roots, found.findings)
    found.files = _plain(OmegaConf.merge(*files), found.findings) if files else {}
    merged = OmegaConf.merge(*files, OmegaConf.create({str(key): value for key, value in own.items()}))
    found.merged = _plain(merged, found.findings)
    return found


def servers_of(gym: Mapping[str, Any], kind: str, implementation: str) -> dict[str, Mapping[str, Any]]:
    """Blocks of one server folder by the names of its instances."""
    blocks = {str(name): block_at(block, f"{kind}.{implementation}") for name, block in gym.items()}
    return {name: block for name, block in blocks.items() if block}


def gym_roots() -> list[Path]:
    """Folders that Gym's servers and files are below, the first one before others."""
    here = running_installation()
    extra = [Path(root) for root in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if root]
    return [*extra, Path.cwd(), here.gym_root, *([here.our_root] if here.our_root else [])]


def _load(paths: Iterable[str], roots: Sequence[Path], findings: list[Finding]) -> list[DictConfig]:
    loaded = []
    waiting = [str(path) for path in paths]
    for place, path in enumerate(waiting):  # grows: a file may name further ones
        where = f"env.nemo_gym.config_paths[{place}]"
        file = next((root / path for root in roots if (root / path).is_file()), None)
        if file is None:
            looked = ", ".join(map(str, dict.fromkeys(roots)))
            findings.append(Finding(where, f"there is no {path} in {looked}", "Correct the path, or make it absolute"))
            continue
        try:
            content = OmegaConf.load(file)
        except (OSError, YAMLError, OmegaConfBaseException) as error:
            findings.append(Finding(where, f"{path} can't be read: {error}", "Correct the file"))
            continue
        if isinstance(content, DictConfig):
            loaded.append(content)
            waiting += [further for further in content.get("config_paths") or [] if further not in waiting]
    return loaded


def _plain(config: Any, findings: list[Finding]) -> dict[str, Any]:
    """Block by block, so that a reference that leads nowhere costs only its own."""
    whole = OmegaConf.merge(OmegaConf.create(_FROM_NEMO_RL), config)
    plain: dict[str, Any] = {}
    for name in config:
        try:
            value = whole[name]
            plain[str(name)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            finding = Finding(f"env.nemo_gym.{name}", str(error).splitlines()[0], "Give what it refers to")
            if finding not in findings:
                findings.append(finding)
    return plain
