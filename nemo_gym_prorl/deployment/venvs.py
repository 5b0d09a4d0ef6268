# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Share one Python environment among servers, through symlinks where Gym expects a virtual environment per server.

Gym builds a virtual environment for each server with uv at ``<uv_venv_dir>/<type>/<server>/.venv``. A build takes
about a minute and a gigabyte, and fails for a package that is on no index. If the running environment satisfies the
requirements of a server, the server gets a symlink to this environment, which Gym accepts with
``skip_venv_if_present``. Gym builds the environments of all other servers.

:class:`~nemo_gym_prorl.deployment.gym_cli.GymCli` uses a folder per deployment. The Hydra plug-in
(``hydra_plugins/prorl_gym``) makes ``gym env start`` use the folder of :func:`shared_venvs` without a setting.
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
"""The folders in which Gym searches servers."""

VENVS_VARIABLE = "PRORL_GYM_VENVS"
"""Environment variable that this project's configuration files use for ``uv_venv_dir``."""

REUSE_VARIABLE = "PRORL_GYM_REUSE"
"""Environment variable that this project's configuration files use for ``skip_venv_if_present``."""

_IGNORED_EXTRAS = frozenset({"nemo-gym", "nemo-gym-prorl"})
"""Packages whose extras need not be installed. Gym's servers require ``nemo-gym[dev]`` but run without ``dev``. A
server of this project that lacks an extra ends at start and names the package to install. An environment built by Gym
would lack nemo-gym-prorl itself, which may be on no index.
"""


def python_path_error(python: str) -> str:
    """Return why Gym cannot start servers with this interpreter; empty if it can."""
    if not any(map(str.isspace, python)):
        return ""
    return f"Gym cannot start servers with {python}: the path contains a space"


@dataclass(frozen=True, slots=True)
class Installation:
    """Folders of one interpreter's installation.

    Attributes:
        prefix: ``sys.prefix``.
        bin: folder of the interpreter and of Gym's console script.
        gym_root: folder with ``nemo_gym`` and Gym's server folders.
        our_root: folder with ``nemo_gym_prorl`` and this project's server folders; ``None`` if not installed.
    """

    prefix: Path
    bin: Path
    gym_root: Path
    our_root: Path | None

    @property
    def checkout(self) -> Path | None:
        """This project's folder, which Gym must search too; ``None`` if it is also Gym's folder."""
        return self.our_root if self.our_root != self.gym_root else None

    def server_folders(self, cwd: Path | None = None) -> Iterator[Path]:
        """Yield the folders of all servers of Gym, of this project and of ``cwd`` (default: the current directory)."""
        for root in {self.gym_root, self.our_root, cwd or Path.cwd()}:
            for server_type in SERVER_TYPES:
                folder = root / server_type if root else None
                if folder is not None and folder.is_dir():
                    yield from (server for server in folder.iterdir() if server.is_dir())


def running_installation() -> Installation:
    return Installation(
        Path(sys.prefix), Path(sys.executable).parent, _folder_of("nemo_gym"), _folder_of("nemo_gym_prorl")
    )


def shared_venvs() -> Path:
    """Update and return the user's folder for ``uv_venv_dir``, with links to the running environment.

    Raises:
        OSError: the cache folder cannot be written.
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
    """Link every server to the shared environment if the environment satisfies the server's requirements.

    Args:
        venvs: the folder for ``uv_venv_dir``.
        installation: the environment to share.
        version_of: returns a package's version in the environment by normalized name; ``None`` if not installed.
        python: text of a program that replaces the interpreter. Default: the interpreter itself.
        cwd: Gym's working directory, in which Gym also searches servers. Default: the current directory.
    """
    target = installation.prefix
    if python is not None or not (target / "bin" / "activate").exists():
        target = _create_minimal_venv(venvs / "environment", installation, python)
    for server in installation.server_folders(cwd):
        link = venvs / server.parent.name / server.name / ".venv"
        if not satisfies_requirements(server, version_of):
            if link.is_symlink():  # the environment satisfied the server before an upgrade
                link.unlink(missing_ok=True)
        elif not (link.is_symlink() and link.readlink() == target):
            link.parent.mkdir(parents=True, exist_ok=True)
            # Replace atomically: another deployment may use the symlink.
            new_link = link.with_name(f".venv-{os.getpid()}")
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(target)
            with contextlib.suppress(IsADirectoryError):  # a folder is an environment that Gym has built: keep it
                new_link.replace(link)
            new_link.unlink(missing_ok=True)


def satisfies_requirements(server: Path, version_of: Callable[[str], str | None]) -> bool:
    """Return whether an environment satisfies a server's ``pyproject.toml`` or ``requirements.txt``.

    Missing or unreadable requirements count as unsatisfied, and so do extras, except those of :data:`_IGNORED_EXTRAS`.
    """
    try:
        requirements = list(_requirements(server))
    except (OSError, ValueError):
        return False
    return bool(requirements) and all(_is_satisfied(requirement, version_of) for requirement in requirements)


def _is_satisfied(requirement: Requirement, version_of: Callable[[str], str | None]) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    name = canonicalize_name(requirement.name)
    version = version_of(name)
    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
    return fits and (name in _IGNORED_EXTRAS or not requirement.extras)


def _requirements(server: Path) -> Iterator[Requirement]:
    project, listing = server / "pyproject.toml", server / "requirements.txt"
    if project.exists():
        for entry in tomllib.loads(project.read_text()).get("project", {}).get("dependencies", []):
            yield Requirement(entry)
        return
    for line in listing.read_text().splitlines():
        entry = line.partition("#")[0].strip() if "://" not in line else line.strip()
        if "../.." in entry:  # servers in Gym's checkout require Gym by relative path
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


def _create_minimal_venv(folder: Path, installation: Installation, python: str | None) -> Path:
    """Create a folder with the files of a virtual environment that Gym uses: ``bin/python`` and ``bin/activate``.

    A Python outside of a virtual environment, as in many containers, needs such a folder, and so does a program that
    replaces the interpreter.
    """
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
