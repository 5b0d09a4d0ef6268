# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which changes of a policy count. Pure.

Tests, what configures their runner, and what would stand in the way of the runner's own modules are the dataset's to
say: a policy's changes there are shown in its patch and never applied. The rule goes by names, as the datasets' own
split of a fix into ``patch`` and ``test_patch`` does; a file that the real fix changes is never kept from anybody.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from nemo_gym_prorl.tasks.swe.instance import SweInstance


JUNK = (
    "__pycache__/",
    "*.py[cod]",
    ".pytest_cache/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    ".ipynb_checkpoints/",
    ".coverage",
    ".coverage.*",
    "*.egg-info/",
    ".eggs/",
    ".tox/",
    ".nox/",
    ".venv/",
    "node_modules/",
    "*.orig",
    "*.rej",
    "*.swp",
    "*~",
    "nohup.out",
    ".DS_Store",
)
"""Patterns, as in ``.gitignore``, of new files that are nobody's work."""

_TEST_FOLDERS = frozenset({"tests", "r2e_tests"})
_TEST_ROOTS = frozenset({"test", "testing", "e2e"})
_TEST_FILE = re.compile(r"(test_.*|.*_tests?|tests)\.py|conftest\.py")
RUNNER_FILES = frozenset({"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "noxfile.py"})
_STARTUP = frozenset({"sitecustomize", "usercustomize"})
RUNNERS = frozenset(
    {
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "py",
        "attr",
        "attrs",
        "tomli",
        "toml",
        "exceptiongroup",
        "pygments",
        "argcomplete",
        "pexpect",
        "colorama",
        "importlib_metadata",
        "zipp",
        "more_itertools",
        "atomicwrites",
        "wcwidth",
        "six",
        "mock",
        "numpy",
        "zope",
        "twisted",
        "nose",
        "setuptools",
        "pkg_resources",
    }
)
"""What pytest's versions import, some of it only if it is there."""

_METADATA = (".egg-info", ".dist-info", ".pth")
_HELPERS = re.compile(
    r"test|_?testing(\.py)?|runtests\.py|_?test(s|ing)?_?(utils?|helpers?|lib|support|tools?|common|cases?)(\.py)?"
)
"""Folders and files; ``test.py`` may be a command."""

_ODD_LINES = re.compile(r"\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029\ufeff]")
_MODULE_FILES = (".py", ".so")

SETTINGS_FILES = frozenset({"setup.cfg", "pyproject.toml"})
"""Files that configure a test runner among other things: only a change of that part does not count."""


def files_of_patch(patch: str) -> frozenset[str]:
    """Paths that a patch in git's format touches, before and after."""
    found = re.findall(r"^(?:---|\+\+\+) (?:\"?)[ab]/(.+?)\"?\s*$", patch, re.MULTILINE)
    found += [path for pair in re.findall(r"^diff --git a/(.+) b/(.+)$", patch, re.MULTILINE) for path in pair]
    return frozenset(found)


def files_of_tests(names: Iterable[str]) -> frozenset[str]:
    """Files in which tests lie that have pytest's names."""
    return frozenset(name.partition("::")[0] for name in names if "::" in name)


@dataclass(frozen=True, slots=True)
class Places:
    """What the image's Python can import.

    Attributes:
        folders: of the repository, in which modules are found.
        own: modules that the base has there.
        installed: modules outside of the repository.
    """

    folders: frozenset[str] = frozenset({"", "src"})
    own: frozenset[str] = frozenset()
    installed: frozenset[str] = frozenset()

    def shadowed_by(self, path: str) -> bool:
        """A new file would be imported instead of a module that was there before it, outside of the repository."""
        names = {_module(path, folder) for folder in self.folders} - {None, *self.own}
        return bool(names & (self.installed | RUNNERS | sys.stdlib_module_names))


def places(paths: Iterable[str], told: str) -> Places:
    """Of a base.

    Args:
        paths: its files.
        told: what the image's Python said: ``folder NAME`` of the repository, ``module NAME`` outside of it, in lines.
    """
    said = [line.split(" ", 1) for line in told.splitlines() if " " in line]
    folders = frozenset({"", "src"} | {name for kind, name in said if kind == "folder"})
    modules = [path for path in paths if path.endswith(_MODULE_FILES)]
    own = frozenset(name for path in modules for folder in folders if (name := _module(path, folder)))
    return Places(folders, own, frozenset(name for kind, name in said if kind == "module"))


class Protection:
    """Whose changes count.

    Args:
        instance: the task.

    Attributes:
        fix: files that the real fix changes.
        tests: files that hold the row's tests, or that its patch of tests changes.
    """

    def __init__(self, instance: SweInstance) -> None:
        hidden = files_of_patch(instance.test_patch)
        self.fix = files_of_patch(instance.patch) - hidden
        self.tests = files_of_tests((*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS)) | hidden
        inside = [
            path.removeprefix(instance.repo_folder + "/")
            for path in instance.hidden
            if path.startswith(instance.repo_folder + "/")
        ]
        self._folders = tuple(inside)
        self._commanded = {word.removeprefix("./") for word in re.findall(r"[\w./+-]+", instance.test_command)}

    def why(self, path: str, base: Places | None = None) -> str | None:
        """Why a change of this path does not count; ``None`` if it does, or if only the content can tell.

        Args:
            path: in the repository.
            base: if the path is new, what can be imported without it.
        """
        if path in self.tests:
            return "a test"
        if any(name.startswith(path + "/") for name in self.tests):
            return "in the place of a folder with tests"
        if any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in self._folders):
            return "protected by the task"
        if path in self.fix:
            return None
        pure = PurePosixPath(path)
        if _TEST_FOLDERS & set(pure.parts) or (len(pure.parts) > 1 and pure.parts[0] in _TEST_ROOTS):
            return "in a folder of tests"
        if _TEST_FILE.fullmatch(pure.name):
            return "a test"
        if (helps := _helpers(pure)) and not any(f"{name}/".startswith(f"{helps}/") for name in self.fix):
            return "helps tests"
        if pure.name in RUNNER_FILES:
            return "configures a test runner"
        if path in self._commanded:
            return "named by the test command"
        if pure.name.partition(".")[0] in _STARTUP:
            return "read when Python starts"
        if any(part.endswith(_METADATA) for part in pure.parts):
            return "what was installed, to Python"
        if base is not None and base.shadowed_by(path):
            return "in the place of an installed module"
        return None

    def by_content(self, path: str) -> bool:
        """Whether its content decides: see :func:`same_settings`. pytest looks for settings in any folder."""
        return PurePosixPath(path).name in SETTINGS_FILES and path not in self.fix


def same_settings(path: str, before: bytes | None, after: bytes | None) -> bool:
    """Whether two versions of such a file tell pytest the same; what can't be read differs."""
    try:
        return bool(pytest_settings(path, before) == pytest_settings(path, after))
    except (ValueError, RecursionError):
        return False


def pytest_settings(path: str, content: bytes | None) -> Any:
    """What such a file tells pytest.

    Raises:
        ValueError, RecursionError: it can't be read.
    """
    text = (content or b"").decode()
    if path.endswith(".toml"):
        return tomllib.loads(text).get("tool", {}).get("pytest")
    # Parsers differ, of pytest's versions and Python's; none finds a section but in such lines.
    if _ODD_LINES.search(text):
        raise ValueError("lines end in ways on which parsers differ")
    sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return [section.rstrip() for section in sections if "pytest" in section.partition("\n")[0].lower()]


def _helpers(path: PurePosixPath) -> str | None:
    """The folder of helpers that it lies in, or itself if it is a file of such; a fix of one may be in any of them."""
    for number, part in enumerate(path.parts, start=1):
        if _HELPERS.fullmatch(part):
            return "/".join(path.parts[:number])
    return None


def _module(path: str, folder: str) -> str | None:
    """The module that a file makes, alone or as a link, if one looks in that folder."""
    if folder and not path.startswith(folder + "/"):
        return None
    name, slash, rest = path[len(folder) + 1 if folder else 0 :].partition("/")
    if not slash:
        return name.partition(".")[0]
    return name if rest.partition(".")[0] == "__init__" else None
