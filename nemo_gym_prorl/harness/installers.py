# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Runs package managers, and installs relocatable Pythons: with uv, or as copies of the user's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import uv

from nemo_gym_prorl.failures import CallerError, InfrastructureError


STEP_TIMEOUT_S = 1800.0
"""For one call of a package manager; the largest packages have a GB."""

MAX_ERROR_CHARS = 600

_DESCRIBE = (
    "import json, platform; print(json.dumps([platform.python_implementation().lower(), "
    "platform.python_version(), platform.machine()]))"
)


def run_step(
    command: Sequence[str | Path], problem: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run one step of an installation and return its output.

    Raises:
        InfrastructureError: the step failed; begins with ``problem`` and ends with what the program printed.
    """
    try:
        done = subprocess.run(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{problem}: {error}") from error
    if done.returncode:
        said = " / ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise InfrastructureError(f"{problem}: {said[-MAX_ERROR_CHARS:] or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def install_python(python: str, folder: Path) -> tuple[str, Path]:
    """Install a relocatable Python below a folder; returns its version and program.

    Args:
        python: version that uv installs, or the folder of a relocatable installation, which is copied.
        folder: receives the installation in a folder of its own.

    Raises:
        CallerError: the folder holds no Python.
        InfrastructureError: uv can't install the version.
    """
    if "/" in python:
        return _copy(Path(python), folder)
    command: list[str | Path] = [uv.find_uv_bin(), "python"]
    install: list[str | Path] = ["install", "--no-bin", "--install-dir", folder, python]
    run_step([*command, *install], f"Python {python} can't be installed; give the folder of a relocatable one instead")
    environ = {**os.environ, "UV_PYTHON_INSTALL_DIR": str(folder)}
    find = ["find", "--managed-python", "--no-project", python]
    program = Path(run_step([*command, *find], f"Python {python} is not there", environ))
    return _describe(program)[1], program


def _copy(source: Path, folder: Path) -> tuple[str, Path]:
    program = source / "bin" / "python3"
    if not program.exists():
        raise CallerError(f"{source} is no installation of Python: it has no bin/python3", field="--python")
    implementation, version, machine = _describe(program)
    copy = folder / f"{implementation}-{version}-linux-{machine}-gnu"
    if not copy.exists():
        shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return version, copy / "bin" / "python3"


def _describe(program: Path) -> list[str]:
    found: list[str] = json.loads(run_step([program, "-I", "-c", _DESCRIBE], f"{program} does not start"))
    return found
