# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The scripts that run before any Python of this package: bootstrap and the CI entry, on small projects."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "small"
version = "0"
requires-python = ">=3.12"
[project.optional-dependencies]
dev = []
[tool.setuptools]
packages = ["small"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project with a space"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", root / "scripts")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "small").mkdir()
    (root / "small" / "__init__.py").touch()
    server = root / "resources_servers" / "prorl_small"
    server.mkdir(parents=True)
    (server / "app.py").write_text("VALUE = 1\n")
    return root


def bootstrap(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHON": sys.executable, **environ}
    command = [str(root / "scripts" / "bootstrap.sh"), *arguments]
    return subprocess.run(
        command, cwd="/", env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@pytest.mark.long("it installs packages")
def test_environment_is_made_once_and_again_when_the_project_changes(project: Path) -> None:
    first = bootstrap(project, "dev")
    assert first.returncode == 0, first.stderr
    assert "Creating .venv" in first.stdout
    python = project / ".venv" / "bin" / "python"
    code = "import small, resources_servers.prorl_small.app as app; print(app.__file__)"
    where = subprocess.check_output([python, "-c", code], cwd="/", text=True)
    assert "site-packages/resources_servers/prorl_small" in where, "found from anywhere, beside Gym's own"

    for arguments in ((), ("dev",)):
        again = bootstrap(project, *arguments)
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    shutil.rmtree(project / "resources_servers")
    assert bootstrap(project).stdout == ""
    assert subprocess.run([python, "-c", code], cwd="/", capture_output=True, check=False).returncode != 0

    launcher = project / "nemo_gym_prorl" / "sandbox" / "launcher" / "launcher.c"
    launcher.parent.mkdir(parents=True)
    for file, text in (
        (project / "pyproject.toml", PROJECT.replace('version = "0"', 'version = "1"')),
        (launcher, "/* compiled by the build */"),
    ):
        file.write_text(text)
        changed = bootstrap(project)
        assert changed.returncode == 0, changed.stderr
        assert "Making" not in changed.stdout
        assert "Installing" in changed.stdout
        assert bootstrap(project).stdout == ""


def test_a_wrong_python_is_refused_by_name(project: Path) -> None:
    refused = bootstrap(project, PYTHON="/bin/false")
    assert refused.returncode != 0
    assert "PYTHON=/bin/false is not a Python 3.12 or newer" in refused.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("outcome", [("2 passed", 0), ("1 failed, 1 passed", 2)])
def test_ci_ends_with_pytests_own_line_and_makes_exit_status(tmp_path: Path, outcome: tuple[str, int]) -> None:
    summary, status = outcome
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    closing = f"===== {summary} in 0.01s ====="
    (tmp_path / "Makefile").write_text(f"test:\n\t@echo '{closing}'; exit {status}\n")
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == closing
