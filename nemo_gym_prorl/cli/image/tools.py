# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Offline tools folders for verifiers: ``prorl image tools`` builds one, ``prorl doctor`` checks which tasks need one.

A tools folder contains uv, Python installations and wheels. It is built once, on a machine with a network: uv installs
Python, and pip selects wheels with this machine's settings (index, proxy, certificates). No package code runs on this
machine. Finally, each requirement set is installed from the folder alone, as a check.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from nemo_gym_prorl.cli.doctor import Check, Level
from nemo_gym_prorl.cli.image.images import progress_step
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.harness.bundles import install_python, run_step
from nemo_gym_prorl.tasks.harbor.verifier_tools import (
    APT_CONFIG,
    APT_SETTINGS,
    BIN,
    PYTHON,
    WHEELS,
    RequirementSet,
    VerifierNeeds,
    needs_of,
    verifier_environment,
)


DEFAULT_PYTHON = "3.13"
"""Python version of a tools folder if neither the user nor a requirement set names one."""


def needs_of_tasks(folder: Path) -> dict[str, VerifierNeeds]:
    """Return the downloads of test scripts by path of the task, for all tasks below a folder.

    Raises:
        CallerError: the folder contains no task with a test script.
    """
    scripts = sorted(folder.rglob("tests/test.sh"))
    if not scripts:
        raise CallerError(f"{folder} has no task with tests/test.sh", field="--tasks")
    return {str(path.parents[1].relative_to(folder)): needs_of(path.read_text(errors="replace")) for path in scripts}


def build_tools_folder(folder: Path, tasks: Sequence[Path], pythons: Sequence[str]) -> list[str]:
    """Build a tools folder for the tasks below folders and print the progress; returns and prints the lines of
    :func:`make_tools`."""
    needs = [needed for path in tasks for needed in needs_of_tasks(path).values()]
    sets = dict.fromkeys(one for needed in needs for one in needed.sets if one.packages)
    console = Console(highlight=False)
    with progress_step(console, "tools") as say:
        problems = make_tools(folder, [*sets], pythons, say)
        say(str(folder))
    for problem in problems:
        console.print(problem, markup=False, soft_wrap=True)
    return problems


def check_tasks(folder: Path, tools: Path | None) -> list[Check]:
    """Check whether the verifiers of the Harbor tasks below a folder work without a network, with a tools folder."""
    needs = needs_of_tasks(folder)
    checks = [_check_packages(needs, folder, tools)]
    for name, problem, fix in (
        ("apt", "install packages of the distribution", "add them to the Dockerfile, or give the verifier a network"),
        ("urls", "download files", "give the verifier a network"),
    ):
        found = {task: getattr(one, name) for task, one in needs.items() if getattr(one, name)}
        listed = "; ".join(f"{task}: {', '.join(values)}" for task, values in found.items())
        if found:
            checks.append(Check("Verifiers", Level.WARN, f"{len(found)} {problem}: {listed}", fix))
    return checks


def _check_packages(needs: Mapping[str, VerifierNeeds], folder: Path, tools: Path | None) -> Check:
    name = "Verifiers"
    sets = list(dict.fromkeys(one for needed in needs.values() for one in needed.sets if one.packages))
    count = sum(bool(needed.sets) for needed in needs.values())
    found = f"{count} of {len(needs)} install Python packages"
    if not sets:
        return Check(name, Level.OK, found)
    fix = f"prorl image tools {tools or 'FOLDER'} --tasks {folder}, and set verifier_tools to that folder"
    if tools is None:
        return Check(name, Level.WARN, f"{found}, which needs a network", fix)
    if missing := dict.fromkeys(what for one in sets for what in _missing_parts(one, tools)):
        return Check(name, Level.WARN, f"{found}; {tools} lacks {'; '.join(missing)}", fix)
    return Check(name, Level.OK, f"{found}; {tools} has them")


def _missing_parts(one: RequirementSet, tools: Path) -> list[str]:
    """Return what a tools folder lacks for a requirement set: Python, packages, or the whole set if they conflict."""

    def installs(*packages: str) -> bool:
        with suppress(InfrastructureError):
            _check(replace(one, packages=packages, project=one.project and bool(packages)), tools)
            return True
        return False

    if installs(*one.packages):
        return []
    if not installs():
        return [f"Python {one.python}".rstrip()]
    return [package for package in one.packages if not installs(package)] or [", ".join(one.packages)]


def make_tools(
    target: Path, sets: Sequence[RequirementSet], pythons: Sequence[str], progress: Callable[[str], None]
) -> list[str]:
    """Make or complete a tools folder.

    Args:
        sets: requirement sets that the folder must serve.
        pythons: versions that uv installs, or folders of relocatable installations that are copied. Versions that
            ``sets`` name are added; sets without a version use the first Python.
        progress: receives a line for each step.

    Returns:
        One line for each requirement set that cannot be installed, with the reason.

    Raises:
        InfrastructureError: uv or a Python is unavailable.
    """
    for name in (BIN, PYTHON, WHEELS):
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in ("uv", "uvx"):
        # Linux refuses to write to a running program, but not to replace its file.
        copy = Path(shutil.copy2(Path(uv.find_uv_bin()).with_name(name), target / BIN / f"{name}.new"))
        copy.rename(target / BIN / name)
    (target / APT_CONFIG).write_text(APT_SETTINGS)
    installed: dict[str, Path] = {}
    for python in pythons:
        progress(f"adding Python {python}")
        version, program = install_python(python, target / PYTHON)
        installed[version] = program
    for version in dict.fromkeys(one.python for one in sets if one.python):
        if _python_for(installed, version) is None:
            progress(f"adding Python {version}")
            version, program = install_python(version, target / PYTHON)
            installed[version] = program
    if not installed:
        version, program = install_python(DEFAULT_PYTHON, target / PYTHON)
        installed[version] = program
    problems = []
    for one in sets:
        progress(f"downloading {', '.join(one.packages)}")
        program = _python_for(installed, one.python) or next(iter(installed.values()))
        try:
            _download(program, one, target)
            _check(one, target)
        except InfrastructureError as error:
            problems.append(f"{', '.join(one.packages)}: {error.reason}")
    return problems


def _python_for(installed: Mapping[str, Path], wanted: str) -> Path | None:
    return next((path for version, path in installed.items() if f"{version}.".startswith(f"{wanted}.")), None)


def _download(program: Path, one: RequirementSet, target: Path) -> None:
    pip: list[str | Path] = [program, "-I", "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    pip += ["--only-binary=:all:", "--dest", target / WHEELS]
    run_step([*pip, *one.packages], "the wheels can't be downloaded")
    tried: set[str] = set()
    while one.project and (missing := _required_elsewhere(target / WHEELS) - tried):
        tried |= missing
        for package in missing:
            with suppress(InfrastructureError):  # `_check` reports what is missing
                run_step([*pip, "--no-deps", package], "")


def _required_elsewhere(wheels: Path) -> set[str]:
    """Return requirements of wheels for which the folder has no wheel, such as requirements on other platforms."""
    found = [one for wheel in wheels.glob("*.whl") for one in distributions(path=[str(wheel)])]
    present = {canonicalize_name(one.name) for one in found}
    needed = [Requirement(line) for one in found for line in one.requires or ()]
    return {
        f"{one.name}{one.specifier}"
        for one in needed
        if "extra" not in str(one.marker) and canonicalize_name(one.name) not in present
    }


def _check(one: RequirementSet, target: Path) -> None:
    """Install a requirement set from the folder alone, as a verifier does; raises InfrastructureError otherwise."""
    with tempfile.TemporaryDirectory() as scratch:
        environ = verifier_environment(str(target.resolve()), scratch) | {"HOME": scratch, "PATH": os.defpath}
        python = ["--python", one.python] if one.python else []
        program = str(target / BIN / "uv")
        if one.project:
            project = [program, "--directory", scratch]
            run_step([*project, "init", "--bare", "--name", "project", *python], "no project can be made", environ)
            command = [*project, "add", *one.packages]
        else:
            options = [word for package in one.packages for word in ("--with", package)]
            command = [program, "tool", "run", "--isolated", *python, *options, "python", "-c", ""]
        run_step(command, "the set can't be installed from the folder", environ)
