# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A recipe: found by its name, read by NeMo RL's own loader, with variants and overrides over it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.failures import CallerError


RECIPES = Path(__file__).parent / "recipes"
"""Those that ship with the package."""


def read(recipe: str, variants: Sequence[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe: everything that it says, without references.

    Args:
        recipe: its name, or the path of a file.
        variants: names or paths of files whose settings go over it, each over those before.
        overrides: Hydra's, e.g. ``grpo.max_num_steps=10``; they go over all. A setting that no file has is refused, so
            that none is misspelt; with ``++`` it is added.

    Raises:
        CallerError: there is no such recipe, a file can't be read, an override can't be applied, or somebody must give
            a value that nobody gave.
    """
    from nemo_rl.utils.config import (
        OverridesError,
        load_config,
        merge_with_override,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )

    register_omegaconf_resolvers()
    files = (file_of(recipe), *(file_of(variant, "variants") for variant in variants))
    try:
        config = load_config(files[0])
        for file in files[1:]:
            config = merge_with_override(config, load_config(file))
        config = parse_hydra_overrides(config, list(overrides))
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise CallerError("nobody has given a value; give one on the command line", field=", ".join(missing))
        resolved = OmegaConf.to_container(config, resolve=True)
    except OverridesError as error:
        raise CallerError(str(error).removeprefix("Failed to parse Hydra overrides: "), field="overrides") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AssertionError, RecursionError) as error:
        raise CallerError(f"{type(error).__name__}: {error}", field=f"--config {recipe}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def file_of(name: str, folder: str = "") -> Path:
    """A file by its path, or by its name among those that ship with the package.

    Raises:
        CallerError: there is none.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise CallerError(f"there is no {path}", field="--config" if not folder else "--with")
        return path.resolve()
    shipped = RECIPES / folder / f"{name}.yaml"
    names = names_of(folder)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"the nearest that there is: {near[0]}" if near else f"there are {', '.join(names)}"
        raise CallerError(f"there is no {name}; {hint}", field="--config" if not folder else "--with")
    return shipped


def names_of(folder: str = "") -> list[str]:
    """What ships with the package."""
    return sorted(file.stem for file in (RECIPES / folder).glob("*.yaml") if file.stem != "base")


ROOT_VARIABLE = "NRL_ROOT"
"""Environment variable with the folder of the NeMo RL checkout; the recipes inherit from its files."""


def checkout() -> Path | None:
    """The NeMo RL checkout, where the variable names one."""
    root = os.environ.get(ROOT_VARIABLE)
    return Path(root) if root and Path(root, "nemo_rl", "__init__.py").is_file() else None
