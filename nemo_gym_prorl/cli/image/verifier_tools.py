# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tools for verifiers that have no network: ``prorl image tools`` makes a folder, ``prorl doctor`` checks tasks.

The folder is made once, where the network is. uv brings the Pythons, and pip chooses wheels with the settings of this
machine (index, proxy, certificates). Only wheels are taken unless asked otherwise, so no code of a package runs here.
At the end each set of packages is installed from the folder alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import uv
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
"""Python of a folder for which no other is asked."""


def needs_of_tasks(folder: Path) -> dict[str, VerifierNeeds]:
    """Return what the test script of each task below a folder downloads.

    Raises:
        CallerError: there is no test script.
    """
    scripts = sorted(folder.rglob("tests/test.sh"))
    if not scripts:
        raise CallerError(f"{folder} has no task with tests/test.sh", field="--tasks")
    return {str(path.parents[1].relative_to(folder)): needs_of(path.read_text(errors="replace")) for path in scripts}


def sets_of_tasks(folder: Path) -> list[RequirementSet]:
    """Return the packages that the test scripts of all tasks below a folder install."""
    found = [one for needs in needs_of_tasks(folder).values() for one in needs.sets if one.packages]
    return list(dict.fromkeys(found))


def show_tools(
    folder: Path, tasks: Sequence[Path], packages: Sequence[str], pythons: Sequence[str], build: bool
) -> list[str]:
    """Make a tools folder, show its steps, and return and print what can't be held; see :func:`make_tools`."""
    sets = [one for path in tasks for one in sets_of_tasks(path)]
    sets += [RequirementSet("", tuple(sorted(words.split()))) for words in packages]
    console = Console(highlight=False)
    with progress_step(console, "tools") as say:
        problems = make_tools(folder, list(dict.fromkeys(sets)), pythons, say, build=build)
        say(str(folder))
    for problem in problems:
        console.print(problem, markup=False, soft_wrap=True)
    return problems


def check_tasks(folder: Path, tools: Path | None) -> list[Check]:
    """Check whether the verifiers of the tasks below a folder work without a network.

    Args:
        folder: folder of tasks.
        tools: folder of tools; ``None`` if there is none.
    """
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
    lacking = []
    for one in sets:
        try:
            _check(one, tools)
        except InfrastructureError:
            lacking.append(", ".join(one.packages))
    if lacking:
        return Check(name, Level.WARN, f"{found}; {tools} lacks {'; '.join(lacking)}", fix)
    return Check(name, Level.OK, f"{found}; {tools} has them")


def make_tools(
    target: Path,
    sets: Sequence[RequirementSet],
    pythons: Sequence[str],
    progress: Callable[[str], None],
    *,
    build: bool = False,
) -> list[str]:
    """Make or complete a tools folder.

    Args:
        target: the folder.
        sets: packages to hold.
        pythons: versions that uv installs, or folders of relocatable installations that are copied. Versions that
            ``sets`` name are installed besides; the first one serves sets that name none.
        progress: takes a line for each step.
        build: whether to build packages that have no wheel, which runs their code with the user's rights.

    Returns:
        One line for each set that can't be held, with the reason.

    Raises:
        InfrastructureError: uv or a Python can't be had.
    """
    for name in (BIN, PYTHON, WHEELS):
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in ("uv", "uvx"):
        # A program that runs cannot be written to, but replaced.
        copy = Path(shutil.copy2(Path(uv.find_uv_bin()).with_name(name), target / BIN / f"{name}.new"))
        copy.rename(target / BIN / name)
    (target / APT_CONFIG).write_text(APT_SETTINGS)
    have: dict[str, Path] = {}
    for python in pythons:
        progress(f"adding Python {python}")
        version, program = install_python(python, target / PYTHON)
        have[version] = program
    for version in dict.fromkeys(one.python for one in sets if one.python):
        if _serving(have, version) is None:
            progress(f"adding Python {version}")
            version, program = install_python(version, target / PYTHON)
            have[version] = program
    if not have:
        version, program = install_python(DEFAULT_PYTHON, target / PYTHON)
        have[version] = program
    problems = []
    for one in sets:
        progress(f"downloading {', '.join(one.packages)}")
        program = _serving(have, one.python) or next(iter(have.values()))
        try:
            _download(program, one, target, build)
            _check(one, target)
        except InfrastructureError as error:
            problems.append(f"{', '.join(one.packages)}: {error.reason}")
    return problems


def _serving(have: Mapping[str, Path], wanted: str) -> Path | None:
    return next((path for version, path in have.items() if f"{version}.".startswith(f"{wanted}.")), None)


def _download(program: Path, one: RequirementSet, target: Path, build: bool) -> None:
    step = ["wheel", "--wheel-dir"] if build else ["download", "--only-binary=:all:", "--dest"]
    pip: list[str | Path] = [program, "-I", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run_step([*pip, *step, target / WHEELS, *one.packages], "the wheels can't be downloaded")


def _check(one: RequirementSet, target: Path) -> None:
    """Install a set from the folder alone, as a verifier does."""
    with tempfile.TemporaryDirectory() as scratch:
        environ = verifier_environment(str(target.resolve()), scratch) | {"HOME": scratch, "PATH": os.defpath}
        python = ["--python", one.python] if one.python else []
        options = [word for package in one.packages for word in ("--with", package)]
        command = [str(target / BIN / "uv"), "tool", "run", "--isolated", *python, *options, "python", "-c", ""]
        run_step(command, "the set can't be installed from the folder", environ)
