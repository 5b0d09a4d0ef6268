# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Carrying out a recipe: from a template and a base to an image in the store.

Every step happens in a folder beside the image's place, and nothing of it is seen before it is complete: a build that
fails, is interrupted or killed leaves no image. The runtime always builds from a root folder or a registry, never from
a SIF, which some machines let it read by mounting only.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images.building import apt_base, runtime_build, wheels
from nemo_gym_prorl.sandbox.images.building.recipe import (
    LAYER_TEMPLATE,
    Format,
    Recipe,
    Reuse,
    check,
    decide,
    render,
    template_text,
)
from nemo_gym_prorl.sandbox.images.cache import Progress, machine
from nemo_gym_prorl.sandbox.images.entries import free_bytes
from nemo_gym_prorl.sandbox.images.info import ROOT, SIF, Info, config_of
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import Local, Named, Registry, check_name, parse
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.images.validate import check_made
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


APT_BASE = "apt:"
"""The base that is made of packages of this machine's own distribution, without a registry."""

DEBOOTSTRAP_BASE = "debootstrap:"
"""Before ``SUITE`` or ``SUITE=MIRROR``: a base made by the program ``debootstrap``, of any Debian or Ubuntu."""

DEBIAN_MIRROR = "http://deb.debian.org/debian"

BUILD_TIMEOUT_S = 3600.0

LEAST_FREE = 1 << 30
"""Bytes that must be free before a build begins; less is never enough."""

_LARGEST_LOCK = 16 << 20
_SUITE = re.compile(r"[a-z][a-z0-9.-]*")
_MIRROR = re.compile(r"(https?|file)://[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Order:
    """What a user wants built.

    Attributes:
        template: name of one that comes with the package, or path of a file.
        base: ``docker://`` address, path, name of an image, :data:`APT_BASE`, :data:`DEBOOTSTRAP_BASE` with a suite.
        name: what the image is to be called.
        apt: packages of the distribution.
        pip: Python packages.
        locks: lock files.
        wheels: Python packages for an image whose Python has no pip; the template finds them in ``wheels``.
        variables: for the template.
        reuse: how much of what was built before may be used.
        format: what comes out; what suits the cache's disk if not given.
    """

    template: str
    base: str
    name: str
    apt: Sequence[str] = ()
    pip: Sequence[str] = ()
    locks: Sequence[Path] = ()
    wheels: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    reuse: Reuse = Reuse.VERSIONED
    format: Format | None = None


@dataclass(frozen=True, slots=True)
class _Base:
    """What to build on, and what names its content: an image of a registry, one that lies here, the first lines of a
    definition file, or packages where there is nothing."""

    identity: str
    what: Registry | Path | str | None


@dataclass(frozen=True, slots=True)
class _Source:
    """What a template is built on: the first lines of a definition file, the root folder that they name if they do,
    and the configuration of a registry's image that it is or was made from."""

    header: str
    root: Path | None = None
    config: OciConfig | None = None

    @classmethod
    def folder(cls, root: Path, config: OciConfig | None = None) -> _Source:
        return cls(f"Bootstrap: localimage\nFrom: {root}", root, config and replace(config, extended=True))


def recipe_of(order: Order, store: ImageStore) -> Recipe:
    """The recipe for an order.

    Raises:
        CallerError: the order is wrong; names the field.
    """
    check_name(order.name)
    recipe = Recipe(
        template=_read_template(order.template),
        base=_resolve(order.base, store).identity,
        machine=machine(),
        format=order.format or store.default_format(),
        apt=frozenset(order.apt),
        pip=frozenset(order.pip),
        locks={path.name: _read_lock(path) for path in order.locks},
        wheels=frozenset(order.wheels),
        variables=dict(order.variables),
    )
    check(recipe)
    return recipe


def place(order: Order, store: ImageStore) -> Path:
    """Where the image lies that :func:`build` would find there, or where it would be put.

    Raises:
        CallerError: the order is wrong; names the field.
    """
    recipe = recipe_of(order, store)
    entry = f"{order.name}-{recipe.lock_key}"
    # Under its own name as a rule; all others are looked through for want of it.
    if path := store.payload(entry):
        return path
    image = decide(order.reuse, recipe, store.built()).image
    return store.payload(image or entry) or store.images.path(entry) / (ROOT if recipe.format == "folder" else SIF)


def build(order: Order, store: ImageStore, runtime: Runtime, progress: Progress) -> Path:
    """Build an image, or find that it is there; gives where it lies.

    Raises:
        CallerError: the order is wrong; names the field.
        InfrastructureError: it can't be built here; with the words of what failed.
    """
    recipe = recipe_of(order, store)
    # What is wrong with the template is better known now than after the packages.
    render(recipe.template, "Bootstrap: none", recipe)
    return _Build(order, recipe, store, runtime, progress).image()


@dataclass(frozen=True, slots=True)
class _Build:
    """The making of one image, and of its layer."""

    order: Order
    recipe: Recipe
    store: ImageStore
    runtime: Runtime
    progress: Progress

    def image(self) -> Path:
        plan = decide(self.order.reuse, self.recipe, self.store.built())
        entry = plan.image or f"{self.order.name}-{self._entry_key(self.recipe.lock_key)}"

        def make(work: Path, held: ExitStack) -> tuple[Path, OciConfig | None]:
            _check_space(work)
            layered = self.recipe.layered
            source = self._layer(plan.layer, held) if layered else self._base(work, (), held)
            self.progress(f"building {self.order.name}")
            made = self._run(self.recipe, self.recipe.template, source, work, self.recipe.format == "folder")
            return made, source.config

        about = f"{self.order.template} on {self.order.base}"
        path = self._ensure(entry, Info("image", about, self.recipe.format, 0, 0.0, self.recipe.lock_key), make)
        self.store.name(self.order.name, entry)
        return path

    def _layer(self, entry: str | None, held: ExitStack) -> _Source:
        """The base with packages, made unless it is there as ``entry``."""
        recipe, apt, pip = self.recipe, sorted(self.recipe.apt), sorted(self.recipe.pip)

        def make(work: Path, held: ExitStack) -> tuple[Path, OciConfig | None]:
            source = self._base(work, apt, held)
            # There they are in it already.
            rest = frozenset[str]() if self.order.base == APT_BASE else recipe.apt
            only = replace(recipe, apt=rest, locks={}, wheels=frozenset())
            self.progress(f"installing {', '.join([*apt, *pip])}")
            return self._run(only, template_text(LAYER_TEMPLATE), source, work, True), source.config

        about = " ".join([self.order.base, "+", *apt, *pip])
        entry = entry or f"layer-{self._entry_key(recipe.version_key)}"
        path = self._ensure(entry, Info("layer", about, "folder", 0, 0.0, recipe.version_key), make)
        return self._open(path, held)

    def _ensure(
        self, entry: str, info: Info, make: Callable[[Path, ExitStack], tuple[Path, OciConfig | None]]
    ) -> Path:
        """Where an entry lies: made in a folder, with what has to stay meanwhile held, unless it is there."""
        with self.store.images.making(entry, self.progress) as work, ExitStack() as held:
            if work is not None:
                made, config = make(work, held)
                self.store.publish(work, made, entry, replace(info, made=time.time(), config=config))
        path = self.store.payload(entry)
        if path is None:
            raise InfrastructureError(f"{entry} was removed as soon as it was made")
        return path

    def _base(self, work: Path, apt: Sequence[str], held: ExitStack) -> _Source:
        """What the order names as the base; with packages, where it is made of those."""
        base = _resolve(self.order.base, self.store).what
        if isinstance(base, Registry) and self.order.reuse is not Reuse.SCRATCH:
            base = self.store.locate(base) or base
        match base:
            case Path() if base.is_dir() and base.stat().st_uid != os.geteuid():
                self.progress(f"copying {base}, which is another user's")
                return _Source.folder(rootfs.copy(base, work / "base"), config_of(base))
            case Path():
                return self._open(base, held)
            case Registry():
                pulled, config = Puller(self.store, self.runtime).fetch(base, work, "folder", self.progress)
                return _Source.folder(pulled.rename(work / "base"), config)
            case str():
                return _Source(base)
            case None:
                return _Source.folder(apt_base.make_root(apt, work, self.progress))

    def _open(self, path: Path, held: ExitStack) -> _Source:
        start = self.store.open(path, self.runtime, progress=self.progress)
        held.callback(start.release)
        if not start.path.is_dir():
            raise InfrastructureError(f"{path} can't be unpacked here, and only a root folder can be built on")
        return _Source.folder(start.path, config_of(path))

    def _run(self, recipe: Recipe, template: str, source: _Source, work: Path, unpacked: bool) -> Path:
        """Let the runtime build from a template in ``work``."""
        if recipe.locks:
            (work / "locks").mkdir()
            for name, data in recipe.locks.items():
                (work / "locks" / name).write_bytes(data)
        if recipe.wheels:
            if source.root is None:
                raise CallerError("it takes a root folder to know for which Python", field="base")
            wheels.unpack(recipe.wheels, source.root, work / "wheels")
        definition = work / "image.def"
        definition.write_text(render(template, source.header, recipe))
        made = runtime_build.build(
            self.runtime, work, str(definition), timeout_s=BUILD_TIMEOUT_S, unpacked=unpacked, base=source.root
        )
        if unpacked:
            check_made(made)
        return made

    def _entry_key(self, key: str) -> str:
        """From scratch is another one each time; else all who build the same at the same time meet at one name."""
        return f"{key}-{time.time_ns():x}" if self.order.reuse is Reuse.SCRATCH else key


def _resolve(base: str, store: ImageStore) -> _Base:
    """Understand what a user gave as the base, and name its content as well as can be known."""
    if base == APT_BASE:
        return _Base(apt_base.identity(), None)
    if base.startswith(DEBOOTSTRAP_BASE):
        return _debootstrap(base.removeprefix(DEBOOTSTRAP_BASE))
    reference = parse(base, "base")
    match reference:
        case Registry():
            return _Base(reference.uri, reference)
        case Local() | Named():
            path = store.locate(reference)
            assert path is not None
            return _Base(store.identity(path), path)


def _debootstrap(wanted: str) -> _Base:
    suite, _, mirror = wanted.partition("=")
    mirror = mirror or DEBIAN_MIRROR
    if not _SUITE.fullmatch(suite) or not _MIRROR.fullmatch(mirror):
        raise CallerError(f"{wanted!r} is not SUITE or SUITE=URL, such as bookworm", field="base")
    if shutil.which("debootstrap") is None:
        raise CallerError("the program debootstrap is not installed (package 'debootstrap')", field="base")
    bootstrap = f"Bootstrap: debootstrap\nOSVersion: {suite}\nMirrorURL: {mirror}"
    return _Base(bootstrap, bootstrap)


def _read_template(template: str) -> str:
    if "/" not in template and not template.endswith((".j2", ".def")):
        return template_text(template)
    try:
        return Path(template).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"{template}: {error}", field="template") from error


def _read_lock(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST_LOCK:
            raise CallerError(f"{path} has more than {_LARGEST_LOCK >> 20} MiB", field="lock")
        return path.read_bytes()
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}", field="lock") from error


def _check_space(work: Path) -> None:
    free = free_bytes(work)
    if free < LEAST_FREE:
        raise InfrastructureError(
            f"only {free >> 20} MiB are free on the disk of {work.parent}: 'prorl image gc' makes room, and "
            "PRORL_CACHE names another folder"
        )
