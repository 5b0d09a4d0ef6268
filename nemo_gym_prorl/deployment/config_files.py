# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's configuration files, found and merged as Gym does it, in milliseconds: Gym itself takes seconds to import."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym_prorl.deployment.venvs import SERVER_TYPES, running_installation


ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"
"""Further folders in which Gym (0.5 and later) looks for servers and files."""


def merged_files(paths: Iterable[str]) -> DictConfig:
    """What files say, and those that they name, each over those before it. References stay references.

    Raises:
        FileNotFoundError: there is none of that name.
        OSError, YAMLError, OmegaConfBaseException: one can't be read.
    """
    files, waiting = [OmegaConf.create({})], [*map(str, paths)]
    for path in waiting:  # grows: a file may name further ones
        content = OmegaConf.load(place_of(path))
        if not isinstance(content, DictConfig):
            raise OmegaConfBaseException(f"{path} is a list")
        files.append(content)
        waiting += [further for further in content.get("config_paths") or () if further not in waiting]
    merged = OmegaConf.merge(*files)
    assert isinstance(merged, DictConfig)
    return merged


def environments() -> set[str]:
    """The names of those that there are."""
    return {path.parent.name for root in _roots() for path in root.glob("environments/*/config.yaml")}


def has_servers(folder: Path) -> bool:
    """Whether servers or environments of a user's own are there: Gym's and ours are found without the folder."""
    here = running_installation()
    ours = (here.gym_root, here.our_root)
    return folder not in ours and any((folder / kind).is_dir() for kind in (*SERVER_TYPES, "environments"))


def joined(folder: Path, roots: Sequence[Path]) -> Path:
    """Make ``folder`` anew, with links to all that Gym looks for in several roots, since nemo-gym 0.4 looks in one
    only. What the first one has of a name is taken; of the others servers and environments count, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    kinds = (*SERVER_TYPES, "environments")
    own = {entry for entry in roots[0].iterdir() if entry.name not in kinds and entry.name[0] != "."}
    for entry in [*own, *(entry for root in roots for kind in kinds for entry in (root / kind).glob("*"))]:
        link = folder / (entry.name if entry in own else f"{entry.parent.name}/{entry.name}")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(entry.absolute())
    return folder


def _roots() -> list[Path]:
    here = running_installation()
    extra = filter(None, os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep))
    return [*map(Path, extra), Path.cwd(), *filter(None, (here.gym_root, here.our_root))]


def place_of(path: str) -> Path:
    """A file by the name under which Gym's commands find it: below the working folder, Gym's own or ours.

    Raises:
        FileNotFoundError: there is none; says where it was looked for.
    """
    roots = _roots()
    for root in roots:
        if (root / path).is_file():
            return root / path
    tried = ", ".join(str(root) for root in dict.fromkeys(roots))
    raise FileNotFoundError(f"there is no {path}; looked in {tried}")
