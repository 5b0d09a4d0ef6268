# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Create the repository of a bug with one commit, and its patches in SWE-bench's format.

The repository has the bug and lacks the tests that detect it. ``test_patch`` adds these tests; ``patch`` fixes the
bug.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from scripts.swe_tasks import hiding
from scripts.swe_tasks.trials import Bug, mistaken


_WHO = {
    f"GIT_{whose}_{what}": value
    for whose in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "prorl"), ("EMAIL", "prorl@localhost"), ("DATE", "2025-01-01T00:00:00Z"))
}
"""Fixed identity and date, so that commits are reproducible."""

_EXCLUDED = "__pycache__/\n*.pyc\n.pytest_cache/\n"


@dataclass(frozen=True, slots=True)
class Made:
    """Repository of a bug.

    Attributes:
        base_commit: the only commit.
        patch: fixes the bug.
        test_patch: adds the hidden tests.
        partial: patches that fix only a part of the bug.
    """

    base_commit: str
    patch: str
    test_patch: str
    partial: tuple[str, ...]


def make(tree: Path, bug: Bug, parts: tuple[Bug, ...], target: Path) -> Made:
    """Create the repository of a bug.

    Args:
        tree: the package without the bug.
        bug: the bug.
        parts: parts of a bug that consists of several.
        target: new folder of the repository.

    Raises:
        InfrastructureError: git failed; contains its output.
    """
    shutil.copytree(tree, target, symlinks=True)
    right = {file: (tree / file).read_bytes() for file in bug.edits}
    tests = {file: (tree / file).read_bytes() for file in hiding.by_file(bug.effect.broken)}
    _write(target, {file: text.encode() for file, text in mistaken(tree, bug.edits).items()})
    for file, functions in hiding.by_file(bug.effect.broken).items():
        (target / file).write_bytes(hiding.without(tests[file].decode(), functions).encode())
    _git(target, "init", "--quiet", "--initial-branch=main")
    (target / ".git/info/exclude").write_text(_EXCLUDED)
    shutil.rmtree(target / ".git/hooks")
    # --force: files matched by the package's .gitignore belong to the base.
    _git(target, "add", "--all", "--force")
    _git(target, "commit", "--quiet", "--message=The package as it is")
    base = _git(target, "rev-parse", "HEAD").strip()
    patch = _patch(target, right)
    test_patch = _patch(target, tests)
    # Fixing one part keeps the mistakes of the others.
    left = [{file: text.encode() for file, text in mistaken(tree, part.edits).items()} for part in parts]
    return Made(base, patch, test_patch, tuple(_patch(target, {**right, **wrong}) for wrong in left))


def _patch(repository: Path, files: Mapping[str, bytes]) -> str:
    """Return the patch to the contents ``files``, and restore the repository."""
    _write(repository, files)
    patch = _git(repository, "diff", "--no-color", "--no-ext-diff")
    _git(repository, "checkout", "--quiet", "--", ".")
    return patch


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for file, data in files.items():
        (folder / file).write_bytes(data)


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "-c", "core.fileMode=true", *arguments],
        cwd=repository,
        env={"PATH": os.environ.get("PATH", ""), "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", **_WHO},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise InfrastructureError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()[-600:]}")
    return done.stdout.decode()
