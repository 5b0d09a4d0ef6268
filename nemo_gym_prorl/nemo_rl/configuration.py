# SPDX-License-Identifier: Apache-2.0
"""A recipe: found by its name, read by NeMo RL's own loader, with variants and overrides over it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_gym_prorl.failures import CallerError


RECIPES = Path(__file__).parent / "recipes"
"""Those that ship with the package."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A recipe that was read.

    Attributes:
        files: of the recipe and its variants.
        resolved: everything, without references.
        inherited: what it has from files that are not ours, as they are.
    """

    files: tuple[Path, ...]
    resolved: dict[str, Any]
    inherited: dict[str, Any]


def read(recipe: str, variants: Sequence[str] = (), overrides: Sequence[str] = ()) -> Configuration:
    """Read a recipe.

    Args:
        recipe: its name, or the path of a file.
        variants: names or paths of files whose settings go over it, each over those before.
        overrides: Hydra's, e.g. ``++grpo.max_num_steps=10``; they go over all.

    Raises:
        CallerError: there is no such recipe, a file can't be read, or an override can't be applied.
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
        inherited = OmegaConf.create({})
        for parent in dict.fromkeys(parent for file in files for parent in _foreign(file)):
            inherited = merge_with_override(inherited, load_config(parent))
        # Keys are added with ++ or +, as with Hydra; one that is changed must be there.
        config = parse_hydra_overrides(config, list(overrides))
        resolved = OmegaConf.to_container(config, resolve=True)
    except OverridesError as error:
        raise CallerError(str(error).removeprefix("Failed to parse Hydra overrides: "), field="overrides") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AssertionError, RecursionError) as error:
        raise CallerError(f"{type(error).__name__}: {error}", field=f"--config {recipe}") from error
    return Configuration(files, _texts(resolved), _texts(OmegaConf.to_container(inherited)))


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


def _foreign(file: Path) -> Iterator[Path]:
    """The nearest ancestors of a file that are not in its own folder tree: NeMo RL's, whichever they are."""
    content = OmegaConf.load(file)
    defaults = content.get("defaults") if isinstance(content, DictConfig) else None
    for parent in defaults if isinstance(defaults, ListConfig) else [defaults] if defaults else []:
        path = Path(str(parent)) if str(parent).startswith("/") else file.parent / str(parent)
        if str(parent).startswith("/") and not path.is_relative_to(RECIPES):
            yield path
        else:
            yield from _foreign(path)


def _texts(config: Any) -> dict[str, Any]:
    return {str(key): value for key, value in config.items()}
