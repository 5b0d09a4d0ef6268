# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What an image is made of, when a former one can be used instead, and the definition file that makes it. Pure.

An image is built in two steps: its *layer*, which is the base with packages installed, takes the time and is the same
for many images; what the template says comes on top. Two hashes tell what may be reused:

- the **version key** is that of the base and the set of packages with their versions: of the layer;
- the **lock key** is that of everything: the version key, the template, its variables, the lock files' contents.

How much is reused is the caller's choice, :class:`Reuse`. Nothing is ever built on an image that another template had
a hand in: a layer knows no template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any, Literal

import jinja2

from nemo_gym_prorl.failures import CallerError


Format = Literal["folder", "sif"]

LAYER_TEMPLATE = "packages"
"""The template of layers."""

LOCKS_FOLDER = "/opt/prorl/locks"
"""Where an image has the lock files of its recipe."""

COMPILE_PYTHON = (
    "python3 -c 'import compileall, os, sys; "
    "[compileall.compile_dir(folder, quiet=2, workers=0) for folder in filter(os.path.isdir, sys.path)]'"
)
"""For templates: has an image's Python compile all that it can import, as each fresh sandbox would otherwise.

By times of change and not by hashes: who edits a library in a sandbox must see the edit. Some files are no Python, on
purpose, and stay as they are."""

_KEY_LENGTH = 12
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]*(?:=[A-Za-z0-9.+:~-]+)?")
_PIP = re.compile(r"[A-Za-z0-9][^\s'\\]*")


class Reuse(StrEnum):
    """How much of what was built before may be used."""

    SCRATCH = "scratch"
    """Nothing: built again from the upstream base."""
    VERSIONED = "versioned"
    """An image of the same recipe, else the layer of the same base and package versions."""
    LOCK = "lock"
    """An image of exactly the same recipe, lock files included; else everything is built from the base."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is made of.

    Attributes:
        template: text of a Jinja2 template of a definition file; it finds ``base``, ``apt``, ``pip``, ``locks``,
            ``compile_python`` and its own variables.
        base: identity of what it is made from: names its content as well as can be known.
        machine: the processor, as ``uname -m`` says it.
        format: what comes out.
        apt: packages of the distribution, ``NAME`` or ``NAME=VERSION``.
        pip: Python packages, as pip is told.
        locks: file name to contents, of lock files and whatever else decides what is installed.
        wheels: Python packages that are unpacked for the image's Python from outside, where it has no pip.
        variables: for the template.
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
    def version_key(self) -> str:
        """See the module."""
        return _key(template_text(LAYER_TEMPLATE), self.base, self.machine, sorted(self.apt), sorted(self.pip))

    @property
    def lock_key(self) -> str:
        """See the module."""
        locks = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.locks.items())
        variables = sorted(self.variables.items())
        steps = [self.template, COMPILE_PYTHON]
        return _key(self.version_key, steps, self.format, locks, variables, sorted(self.wheels))

    @property
    def layered(self) -> bool:
        """Whether it has packages, and so a layer."""
        return bool(self.apt or self.pip)


@dataclass(frozen=True, slots=True)
class Built:
    """An image or layer that is there.

    Attributes:
        entry: its name among the images.
        kind: ``image``, ``layer`` or ``pulled``.
        key: the lock key of an image, the version key of a layer.
        made: when; the newest is taken.
    """

    entry: str
    kind: str
    key: str
    made: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: use the entry ``image``, else build from the entry ``layer``, else from the base."""

    image: str | None = None
    layer: str | None = None


def decide(reuse: Reuse, recipe: Recipe, built: Iterable[Built]) -> Plan:
    """What of the things that are there the recipe is to use."""
    if reuse is Reuse.SCRATCH:
        return Plan()
    newest = {(one.kind, one.key): one.entry for one in sorted(built, key=lambda one: (one.made, one.entry))}
    if image := newest.get(("image", recipe.lock_key)):
        return Plan(image=image)
    if reuse is Reuse.VERSIONED and recipe.layered:
        return Plan(layer=newest.get(("layer", recipe.version_key)))
    return Plan()


def check(recipe: Recipe) -> None:
    """Refuse what can't be put into a definition file.

    Raises:
        CallerError: names the field.
    """
    for name, pattern, values in (
        ("apt", _APT, recipe.apt),
        ("pip", _PIP, recipe.pip),
        ("wheels", _PIP, recipe.wheels),
    ):
        for value in sorted(values):
            if not pattern.fullmatch(value):
                raise CallerError(f"{value!r} is no package", field=name)
    for name in recipe.locks:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise CallerError(
                f"{name!r}: letters, digits, '.', '_' and '-' make the name of a lock file", field="locks"
            )


def render(template: str, header: str, recipe: Recipe) -> str:
    """The definition file.

    Args:
        template: the template's text.
        header: its first lines, ``Bootstrap:`` and what follows; the variable ``base``.
        recipe: for all other variables.

    Raises:
        CallerError: the template is wrong or wants a variable that is not there; names the line.
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
        raise CallerError("it has no 'Bootstrap:' line: begin it with {{ base }}", field="template")
    return text


def template_text(name: str) -> str:
    """A template that comes with this package.

    Raises:
        CallerError: there is none of that name.
    """
    folder = resources.files("nemo_gym_prorl.sandbox.images.building") / "templates"
    file = folder / f"{name}.def.j2"
    if not file.is_file():
        known = sorted(entry.name.removesuffix(".def.j2") for entry in folder.iterdir())
        raise CallerError(f"there is no {name!r}, only {', '.join(known)} and files of yours", field="template")
    return file.read_text()


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_KEY_LENGTH]
