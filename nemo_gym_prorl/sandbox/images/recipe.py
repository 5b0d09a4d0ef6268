# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes of images, and the definition files that build them. Pure.

A recipe is a base, packages and a template of a definition file. Its key is a hash of all of them, so an image whose
recipe has not changed is built once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import jinja2

from nemo_gym_prorl.failures import CallerError


Format = Literal["folder", "sif"]

PACKAGES_TEMPLATE = "packages"
"""The template that installs ``apt`` and ``pip`` packages on a base."""

LOCKS_FOLDER = "/opt/prorl/locks"
"""Folder inside an image for the lock files of its recipe."""

COMPILE_PYTHON = (
    "python3 -c 'import compileall, os, sys; "
    "[compileall.compile_dir(folder, quiet=2, workers=0) for folder in filter(os.path.isdir, sys.path)]'"
)
"""Shell command for templates: compiles all importable Python files of an image, so that sandboxes need not.

The compiled files are validated by modification time, not by hash: an agent that edits a library must see the edit.
Errors are ignored, since some packages contain invalid Python on purpose.
"""

_KEY_LENGTH = 12
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]*(?:=[A-Za-z0-9.+:~-]+)?")
_PIP = re.compile(r"[A-Za-z0-9][^\s'\\]*")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is built.

    Attributes:
        template: text of a Jinja2 template of a definition file; its variables are ``base``, ``apt``, ``pip``,
            ``locks``, ``compile_python`` and those in ``variables``.
        base: identity of the base's content, as exact as is known.
        machine: processor, as ``uname -m`` names it.
        format: format of the image.
        apt: packages of the distribution, ``NAME`` or ``NAME=VERSION``.
        pip: Python packages, as requirements for pip.
        locks: file name to contents of lock files and other files that decide what is installed.
        wheels: Python packages unpacked from outside, for images whose Python has no pip.
        variables: further variables of the template.
    """

    template: str
    base: str
    machine: str
    format: Format
    apt: frozenset[str] = frozenset()
    pip: frozenset[str] = frozenset()
    locks: Mapping[str, bytes] = field(default_factory=dict)
    wheels: frozenset[str] = frozenset()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Hash of everything that decides what is built."""
        locks = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.locks.items())
        packages = [template_text(PACKAGES_TEMPLATE), sorted(self.apt), sorted(self.pip), sorted(self.wheels)]
        steps = [self.template, COMPILE_PYTHON, sorted(self.variables.items())]
        text = json.dumps([self.base, self.machine, self.format, packages, locks, steps])
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]


def check_recipe(recipe: Recipe) -> None:
    """Refuse values that a definition file can't hold.

    Raises:
        CallerError: for the field with the invalid value.
    """
    for name, pattern, values in (
        ("apt", _APT, recipe.apt),
        ("pip", _PIP, recipe.pip),
        ("wheels", _PIP, recipe.wheels),
    ):
        for value in sorted(values):
            if not pattern.fullmatch(value):
                raise CallerError(f"{value!r} is not the name of a package", field=name)
    for name in recipe.locks:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise CallerError(
                f"{name!r} is no name for a lock file: use letters, digits, '.', '_' and '-'", field="locks"
            )


def render(template: str, header: str, recipe: Recipe) -> str:
    """Return the definition file.

    Args:
        template: text of the template.
        header: value of the variable ``base``: ``Bootstrap:`` and the lines that follow.
        recipe: values of all other variables.

    Raises:
        CallerError: the template has a syntax error or uses an unknown variable; names the line.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    values: dict[str, Any] = {
        **recipe.variables,
        "base": header,
        "compile_python": COMPILE_PYTHON,
        "apt": sorted(recipe.apt),
        "pip": sorted(recipe.pip),
        "locks": {name: f"{LOCKS_FOLDER}/{name}" for name in sorted(recipe.locks)},
    }
    try:
        text = environment.from_string(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise CallerError(f"line {error.lineno}: {error.message}", field="template") from error
    except jinja2.TemplateError as error:
        raise CallerError(f"{error.message}; give it with --set NAME=VALUE", field="template") from error
    if not re.search(r"^\s*bootstrap:", text, re.IGNORECASE | re.MULTILINE):
        raise CallerError("the template renders no 'Bootstrap:' line: begin it with {{ base }}", field="template")
    return text


def template_text(name: str) -> str:
    """Return the text of a template that ships with this package.

    Raises:
        CallerError: no template has that name.
    """
    folder = resources.files("nemo_gym_prorl.sandbox.images") / "templates"
    file = folder / f"{name}.def.j2"
    if not file.is_file():
        known = sorted(entry.name.removesuffix(".def.j2") for entry in folder.iterdir())
        raise CallerError(
            f"no template is named {name!r}: choose from {', '.join(known)}, or give a path", field="template"
        )
    return file.read_text()
