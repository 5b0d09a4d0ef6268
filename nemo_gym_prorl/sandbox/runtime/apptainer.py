# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Find the container runtime, Apptainer.

``apptainer`` on PATH is preferred to the private copy that ``prorl setup`` installs into the cache.

In a container, root often lacks some capabilities. Apptainer's mode for root then fails ("Requesting capability set
..."), but its rootless mode works. ``APPTAINER_USERNS`` makes Apptainer use the rootless mode.

:mod:`.launch` starts containers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.images.entries import cache_dir, machine


PREFIX_RECIPE = 2
"""Version of the steps by which :mod:`.install` builds the private copy; part of the copy's folder name."""

ROOT_CACHE = Path("/var/cache/nemo-gym-prorl")

MARKER = "prorl-runtime.json"
"""Name of the file in a complete private copy, with version, and the path for which the copy was built."""

INSTALL_HINT = (
    "install it with the machine's package manager (package 'apptainer'), or without root with "
    "the Apptainer project's tools/install-unprivileged.sh, or load your cluster's module (module load apptainer)"
)

_VERSION = re.compile(r"apptainer version (\d+(?:\.\d+)*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A working Apptainer.

    Attributes:
        path: absolute path of the program.
        version: e.g. ``(1, 4, 5)``.
        origin: ``path`` if found on PATH, ``cache`` for the private copy.
        env: environment variables that Apptainer needs for this user; usually none.
    """

    path: Path
    version: tuple[int, ...]
    origin: Literal["path", "cache"]
    env: dict[str, str] = field(hash=False)

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def environ(self) -> dict[str, str]:
        """Return this process's environment with :attr:`env` added."""
        return {**os.environ, **self.env}

    def activate(self) -> None:
        """Put this runtime on PATH as ``apptainer``, for NeMo Gym's own provider and all programs that it starts. PATH
        stays unchanged if it already leads to this runtime, since a system folder at the front would hide the programs
        of a virtual environment."""
        os.environ.update(self.env)
        if shutil.which("apptainer") == str(self.path):
            return
        os.environ["PATH"] = os.pathsep.join([str(self.path.parent), os.environ.get("PATH", os.defpath)])


def find_runtime() -> Runtime | None:
    """Return the Apptainer on PATH, else the private copy; ``None`` if neither exists and works."""
    found = shutil.which("apptainer")
    return (_probe(Path(found)) if found else None) or _private_copy()


def require_runtime() -> Runtime:
    """Return the runtime.

    Raises:
        InfrastructureError: there is none; the message names the ways to get one.
    """
    if runtime := find_runtime():
        return runtime
    raise InfrastructureError(
        f"no Apptainer on PATH or in {cache_dir()}: run 'prorl setup' on Debian; elsewhere, {INSTALL_HINT}",
        kind=FailureKind.PROVIDER_UNAVAILABLE,
    )


def private_prefix() -> Path:
    """Return the folder of the private copy of Apptainer, whether or not the folder exists. For root the folder is in
    :data:`ROOT_CACHE` unless ``$PRORL_CACHE`` is set: sandboxes of root run under unassigned user ids, which can't
    enter root's home folder."""
    folder = ROOT_CACHE if os.geteuid() == 0 and "PRORL_CACHE" not in os.environ else cache_dir()
    return folder / f"apptainer-{machine()}-{PREFIX_RECIPE}"


def parse_version(text: str) -> tuple[int, ...] | None:
    """Parse the output of ``--version``, such as ``apptainer version 1.4.5``; return ``None`` for other text."""
    match = _VERSION.search(text)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def lacks_capabilities(status: str, last_capability: int) -> bool:
    """Return whether a process with this ``/proc/PID/status`` lacks a capability in its effective or bounding set."""
    everything = (1 << (last_capability + 1)) - 1
    sets = dict(re.findall(r"^(CapEff|CapBnd):\s*([0-9a-fA-F]+)$", status, re.MULTILINE))
    return any(int(sets.get(name, "0"), 16) & everything != everything for name in ("CapEff", "CapBnd"))


def runtime_env() -> dict[str, str]:
    """Return the environment variables that Apptainer needs for this process's user and capabilities; usually none."""
    if os.geteuid() != 0:
        return {}
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    if not lacks_capabilities(Path("/proc/self/status").read_text(), last):
        return {}
    return {"APPTAINER_USERNS": "1"}


def _probe(path: Path) -> Runtime | None:
    """Return the runtime at a path; ``None`` if the program fails or prints no version of Apptainer."""
    path = path.absolute()
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = parse_version(answer.stdout) if answer.returncode == 0 else None
    if version is None:
        return None
    origin: Literal["path", "cache"] = "cache" if path.is_relative_to(private_prefix()) else "path"
    return Runtime(path, version, origin, runtime_env())


def _private_copy() -> Runtime | None:
    prefix = private_prefix()
    try:
        marker = json.loads((prefix / MARKER).read_text())
    except OSError:  # missing or not readable
        return None
    if marker["prefix"] != str(prefix):
        return None
    return Runtime(prefix / "usr" / "bin" / "apptainer", tuple(marker["version"]), "cache", runtime_env())
