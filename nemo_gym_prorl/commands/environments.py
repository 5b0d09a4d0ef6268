# SPDX-License-Identifier: Apache-2.0
"""What the files of environments say, read without Gym and without our servers, which take seconds to import."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym_prorl.tasks.extras import require_extras


def check_extras(environments: Sequence[str]) -> None:
    """Refuse environments of which a server lacks packages that it needs.

    Raises:
        InfrastructureError: some are not installed; has the command that installs those of all servers.
    """
    known = configuration([f"environments/{name}/config.yaml" for name in environments])
    servers = [name for value in known.values() for name in value.get("resources_servers", ())]
    require_extras(*(name.removeprefix("prorl_") for name in servers if name.startswith("prorl_")))


def configuration(paths: Sequence[str]) -> dict[str, Any]:
    """What files say that Gym finds from here, and those that they name; nothing of one that is not found."""
    known: dict[str, Any] = {}
    for path in paths:
        place = next((root / path for root in _roots() if (root / path).is_file()), None)
        if place is None:
            return {}
        loaded = OmegaConf.load(place)
        if not isinstance(loaded, DictConfig):
            return {}
        content = OmegaConf.to_container(loaded, resolve=False)
        assert isinstance(content, dict)
        inner = content.pop("config_paths", [])
        if inner and not (below := configuration(inner)):
            return {}
        known |= (below if inner else {}) | {
            str(name): value for name, value in content.items() if isinstance(value, dict)
        }
    return known


def _roots() -> list[Path]:
    places = [find_spec(name) for name in ("nemo_gym_prorl", "nemo_gym")]
    found = [Path(next(iter(place.submodule_search_locations or []))).parent for place in places if place]
    return [Path.cwd(), *found]
