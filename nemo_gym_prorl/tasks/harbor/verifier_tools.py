# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tools for verifiers without a network: downloads that test scripts need, and their offline replacement. Pure.

A tools folder, created by ``prorl image tools``, contains::

    bin/      uv and uvx
    python/   installations of Python, in uv's layout
    wheels/   packages and their dependencies
    apt.conf  makes apt fail at once, instead of retrying for seconds

The folder is mounted read-only, and ``bin`` is first on ``PATH``. ``bin`` contains no ``python3``, so tests still find
the image's Python. uv installs into a new scratch folder: in a cache that the agent can write to, the agent could
replace packages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass


BIN, PYTHON, WHEELS, APT_CONFIG = "bin", "python", "wheels", "apt.conf"
"""Names of the files in a tools folder."""

APT_SETTINGS = 'Acquire::Retries "0";\n'
"""Contents of :data:`APT_CONFIG`."""

MAX_LINE = 16 << 10
"""Maximum characters of a script's line; longer lines are skipped, since ``shlex`` takes quadratic time."""

_KEYWORDS = frozenset({"!", "do", "elif", "else", "exec", "if", "sudo", "then", "time", "until", "while", "{"})
_SEPARATORS = frozenset({"&&", "||", ";", "|", "&", "(", ")"})
_PYTHON_OPTIONS = frozenset({"-p", "--python"})
_WITH_OPTIONS = frozenset({"-w", "--with", "--from"})
_VALUE_OPTIONS = (
    _PYTHON_OPTIONS
    | _WITH_OPTIONS
    | {
        "-i",
        "--index",
        "--index-url",
        "--default-index",
        "--extra-index-url",
        "--index-strategy",
        "-f",
        "--find-links",
    }
    | {"-r", "--requirement", "--with-requirements", "-c", "--constraint", "-t", "--target", "--prefix", "--root"}
    | {"--directory", "--project", "--with-editable", "--group", "--extra", "--python-version", "--torch-backend"}
)
"""Options of uv and pip whose value is the next word."""

_ONLY_FETCH_UV = frozenset({"ca-certificates", "curl", "wget"})
_UV_INSTALLER = re.compile(r"https?://(astral\.sh/uv|github\.com/astral-sh/uv)/")
_URL = re.compile(r"(?:git\+)?https?://\S+")
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, order=True)
class RequirementSet:
    """Packages that one command installs together.

    Attributes:
        python: requested version of Python, e.g. ``3.13``; empty for the image's Python.
        packages: requirements, e.g. ``pytest==8.4.1``, sorted.
        project: whether ``uv add`` installs the packages, which resolves them for every platform.
    """

    python: str
    packages: tuple[str, ...]
    project: bool = False


@dataclass(frozen=True, slots=True)
class VerifierNeeds:
    """Downloads of a test script.

    Attributes:
        sets: requirement sets of ``uvx``, ``uv`` and ``pip``, which a tools folder can contain.
        apt: packages of the distribution, which the image must contain; without those that only serve to fetch uv.
        urls: other addresses than uv's installer, which need a network.
    """

    sets: tuple[RequirementSet, ...] = ()
    apt: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()


def verifier_environment(tools: str, scratch: str) -> dict[str, str]:
    """Return the environment variables with which tests find the tools, besides ``bin`` first on ``PATH``.

    Args:
        tools: path of the tools folder in the verifier's sandbox.
        scratch: folder that uv creates; the agent must not be able to predict the name.
    """
    wheels = f"{tools}/{WHEELS}"
    return {
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": wheels,
        "UV_PYTHON_INSTALL_DIR": f"{tools}/{PYTHON}",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_CACHE_DIR": f"{scratch}/uv",
        "UV_TOOL_DIR": f"{scratch}/uv-tools",
        "UV_NO_CONFIG": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels,
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "APT_CONFIG": f"{tools}/{APT_CONFIG}",
    }


def needs_of(script: str) -> VerifierNeeds:
    """Return the downloads that the text of a test script names; shell variables are not expanded."""
    sets: list[RequirementSet] = []
    apt: list[str] = []
    urls: list[str] = []
    python, project_python = "", ""
    project: list[str] = []
    for words in _commands(script):
        match words:
            case ["uv", "venv", *rest]:
                python = dict(_options(rest)).get("python", "")
            case ["uv", "init", *rest]:
                project_python = dict(_options(rest)).get("python", "")
            case ["uv", "add", *rest]:
                project += _packages(rest)
            case ["uvx", *rest] | ["uv", "run", *rest] | ["uv", "tool", "run", *rest]:
                packages = [one for name, value in _options(rest) if name == "with" for one in value.split(",")]
                if words[0] == "uvx" or packages:
                    sets.append(RequirementSet(dict(_options(rest)).get("python", ""), tuple(sorted(packages))))
                urls += [one for one in packages if _URL.search(one)]
            case [_, "-m", "pip", "install", *rest] | ["pip" | "pip3", "install", *rest]:
                sets.append(RequirementSet("", tuple(sorted(_packages(rest)))))
            case ["uv", "pip", "install", *rest]:
                sets.append(RequirementSet(python, tuple(sorted(_packages(rest)))))
            case ["apt" | "apt-get", *rest] if "install" in rest:
                named = rest[rest.index("install") + 1 :]
                apt += [word for word in named if not word.startswith("-") and word not in _ONLY_FETCH_UV]
            case ["curl" | "wget" | "git", *rest]:
                urls += [word for word in rest if _URL.match(word) and not _UV_INSTALLER.match(word)]
    if project:
        sets.append(RequirementSet(project_python, tuple(sorted(project)), project=True))
    return VerifierNeeds(tuple(dict.fromkeys(sets)), tuple(dict.fromkeys(apt)), tuple(dict.fromkeys(urls)))


def _commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple shell command; lines with unbalanced quotes are skipped."""
    for line in script.replace("\\\n", " ").splitlines():
        if len(line) > MAX_LINE:
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word in _SEPARATORS:
                if command:
                    yield command
                command = []
            # Assignments (``CI=1``) and keywords (``if``) precede the command.
            elif command or ("=" not in word and word not in _KEYWORDS):
                command.append(word)


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (``python`` or ``with``, value) for the leading options among a command's arguments."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return
        name, equals, value = word.partition("=")
        if name in _VALUE_OPTIONS and not equals:
            value = next(rest, "")
        if name in _PYTHON_OPTIONS and _VERSION.fullmatch(value):
            yield "python", value
        elif name in _WITH_OPTIONS:
            yield "with", value


def _packages(words: list[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in _VALUE_OPTIONS:
            next(rest, "")
        elif not word.startswith(("-", ".", "/", "$")):
            yield word
