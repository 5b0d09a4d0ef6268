# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One Python environment for every server that can share it, laid out as Gym wants its servers' environments.

Gym gives each server a virtual environment of its own at ``<uv_venv_dir>/<type>/<server>/.venv`` and builds it with
uv: a minute and a gigabyte each, and none of it for a package that no registry has. A server whose requirements the
running environment meets anyway gets a link to that one instead, which Gym takes with ``skip_venv_if_present``. All
others are left to Gym.

Two callers: :class:`~nemo_gym_prorl.deployment.command_line.GymCli`, with a folder per deployment, and our Hydra
plugin (``hydra_plugins/prorl_gym``), by which ``gym env start`` finds :func:`shared_folder` without a setting.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nemo_gym_prorl.sandbox.images.entries import cache_dir


SERVER_TYPES = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
"""The folders in which Gym looks for servers."""

VENVS_VARIABLE = "PRORL_GYM_VENVS"
"""Environment variable from which our configuration files take ``uv_venv_dir``."""

REUSE_VARIABLE = "PRORL_GYM_REUSE"
"""Environment variable from which our configuration files take ``skip_venv_if_present``."""

_WITHOUT_EXTRAS = frozenset({"nemo-gym", "nemo-gym-prorl"})
"""Packages whose extras are not looked at. Gym's servers ask for Gym with what its developers use (dev), and start
without. A server of ours that lacks an extra ends at once and says how to install it; an environment of its own would
take minutes and then lack this very package, which need not be in any index.
"""


def cut_at_a_space(python: str) -> str:
    """What keeps Gym from starting servers with this interpreter; empty if nothing does."""
    if not any(map(str.isspace, python)):
        return ""
    return f"Gym starts its servers by a shell line in which a path ends at a space, and {python} has one"


@dataclass(frozen=True, slots=True)
class Installation:
    """Where things lie for one interpreter.

    Attributes:
        prefix: its environment.
        bin: folder of the interpreter and of Gym's console script.
        gym_root: the folder that holds ``nemo_gym`` and Gym's server folders.
        our_root: the folder that holds ``nemo_gym_prorl`` and our server folders.
    """

    prefix: Path
    bin: Path
    gym_root: Path
    our_root: Path | None

    @property
    def checkout(self) -> Path | None:
        """Our folder where it is not next to Gym's, so that Gym has to be told about it."""
        return self.our_root if self.our_root != self.gym_root else None

    def server_folders(self, cwd: Path | None = None) -> Iterator[Path]:
        """The folder of every server that Gym or we bring, or that is where Gym is run (by default, where this is)."""
        for root in {self.gym_root, self.our_root, cwd or Path.cwd()}:
            for server_type in SERVER_TYPES:
                folder = root / server_type if root else None
                if folder is not None and folder.is_dir():
                    yield from (server for server in folder.iterdir() if server.is_dir())


def running_installation() -> Installation:
    """That of this process."""
    return Installation(
        Path(sys.prefix), Path(sys.executable).parent, _folder_of("nemo_gym"), _folder_of("nemo_gym_prorl")
    )


def shared_folder() -> Path:
    """Folder for ``uv_venv_dir`` with the environments of servers that can use the running one; kept up to date.

    Raises:
        OSError: the cache folder can't be written.
    """
    installation = running_installation()
    name = hashlib.sha256(str(installation.prefix).encode()).hexdigest()[:12]
    venvs = cache_dir() / "gym" / name
    link_environments(venvs, installation, _version_here)
    return venvs


def link_environments(
    venvs: Path,
    installation: Installation,
    version_of: Callable[[str], str | None],
    *,
    python: str | None = None,
    cwd: Path | None = None,
) -> None:
    """Give every server that can use it the one environment there is.

    Args:
        venvs: the folder that Gym is told as ``uv_venv_dir``.
        installation: the environment to share.
        version_of: the version of a package in it by its normalised name; ``None`` if it is not there.
        python: text of a program that stands for the interpreter; default: the interpreter itself.
        cwd: where Gym is run, which looks for servers there, too; default: where this is.
    """
    target = installation.prefix
    if python is not None or not (target / "bin" / "activate").exists():
        target = _stand_in(venvs / "environment", installation, python)
    for server in installation.server_folders(cwd):
        link = venvs / server.parent.name / server.name / ".venv"
        if not meets(server, version_of):
            if link.is_symlink():  # it did, before an upgrade
                link.unlink(missing_ok=True)
        elif not (link.is_symlink() and link.readlink() == target):
            link.parent.mkdir(parents=True, exist_ok=True)
            # By renaming: another deployment may be starting from it.
            fresh = link.with_name(f".venv-{os.getpid()}")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(target)
            with contextlib.suppress(IsADirectoryError):  # one that Gym has built
                fresh.replace(link)
            fresh.unlink(missing_ok=True)


def meets(server: Path, version_of: Callable[[str], str | None]) -> bool:
    """Whether an environment has all that a server asks for in its ``pyproject.toml`` or ``requirements.txt``.

    An extra of another package counts as not met, as does what can't be read for certain: Gym then builds an
    environment.
    """
    try:
        wanted = list(_requirements(server))
    except (OSError, ValueError):
        return False
    return bool(wanted) and all(_has(requirement, version_of) for requirement in wanted)


def _has(wanted: Requirement, version_of: Callable[[str], str | None]) -> bool:
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    name = canonicalize_name(wanted.name)
    version = version_of(name)
    fits = version is not None and wanted.specifier.contains(version, prereleases=True)
    return fits and (name in _WITHOUT_EXTRAS or not wanted.extras)


def _requirements(server: Path) -> Iterator[Requirement]:
    project, listing = server / "pyproject.toml", server / "requirements.txt"
    if project.exists():
        for entry in tomllib.loads(project.read_text()).get("project", {}).get("dependencies", []):
            yield Requirement(entry)
        return
    for line in listing.read_text().splitlines():
        entry = line.partition("#")[0].strip() if "://" not in line else line.strip()
        if "../.." in entry:  # Gym itself, from its checkout
            yield Requirement("nemo-gym")
        elif entry and not entry.startswith("#"):
            try:
                yield Requirement(entry)
            except InvalidRequirement as error:
                raise ValueError(f"{listing}: {line!r}") from error


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _version_here(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stand_in(folder: Path, installation: Installation, python: str | None) -> Path:
    """What has the parts of a virtual environment that Gym uses: where Python is installed without one, as in many
    containers, and where servers are to start through a program of ours."""
    bin_dir = folder / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    program = bin_dir / "python"
    program.unlink(missing_ok=True)
    if python is None:
        program.symlink_to(installation.bin / "python3")
    else:
        program.write_text(python)
        program.chmod(0o755)
    (bin_dir / "activate").write_text(f'export PATH="{bin_dir}:{installation.bin}:$PATH"\n')
    return folder
