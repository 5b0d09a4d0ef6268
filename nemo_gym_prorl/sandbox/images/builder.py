# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Building of images from recipes: a template and a base become an image in the store; and the package's own images.

Every step happens in a folder beside the image's place, and nothing of it is seen before it is complete: a build that
fails, is interrupted or killed leaves no image. The runtime always builds from a root folder or a registry, never from
a SIF, which some machines let it read by mounting only.

The package's own images are *default*, for tasks that bring no image of their own; *kernel*, which is that one with
IPython and numpy in it; and *math*, which is *kernel* with scipy and sympy. The default image is made of the machine's
own distribution's packages where apt is at hand, and of a public image elsewhere. All are root folders: those start
fastest, and need no FUSE. A changed recipe has another key, so it makes a new image. Where several versions of this
package share a cache, the names are those of the version that was set up last.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import uv

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images import programs, rootfs
from nemo_gym_prorl.sandbox.images.entries import Progress, free_bytes, machine
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.recipe import (
    PACKAGES_TEMPLATE,
    Format,
    Recipe,
    check,
    render,
    template_text,
)
from nemo_gym_prorl.sandbox.images.reference import Registry, check_name, parse
from nemo_gym_prorl.sandbox.images.rootfs import check_made
from nemo_gym_prorl.sandbox.images.store import ROOT, SIF, ImageStore, Info, config_of
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime


APT_BASE = "apt:"
"""The base that is made of packages of this machine's own distribution, without a registry."""

BUILD_TIMEOUT_S = 3600.0
WHEELS_TIMEOUT_S = 600.0

LEAST_FREE = 1 << 30
"""Bytes that must be free before a build begins; less is never enough."""

_LARGEST_LOCK = 16 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """What a user wants built.

    Attributes:
        template: name of one that comes with the package, or path of a file.
        base: ``docker://`` address, path, name of an image, or :data:`APT_BASE`.
        name: what the image is to be called.
        apt: packages of the distribution.
        pip: Python packages.
        locks: lock files.
        wheels: Python packages for an image whose Python has no pip; the template finds them in ``wheels``.
        variables: for the template.
        fresh: build again although an image of the same recipe exists, and pull its base again.
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
    fresh: bool = False
    format: Format | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """The root folder that a template is built on, and the configuration of the registry's image that it is from."""

    root: Path
    config: OciConfig | None = None


def recipe_of(order: Order, store: ImageStore) -> Recipe:
    """The recipe for an order.

    Raises:
        CallerError: the order is wrong; names the field.
    """
    check_name(order.name)
    recipe = Recipe(
        template=_read_template(order.template),
        base=_identity(order.base, store),
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
    entry = _entry(order, recipe)
    return store.payload(entry) or store.images.path(entry) / (ROOT if recipe.format == "folder" else SIF)


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
    """The making of one image."""

    order: Order
    recipe: Recipe
    store: ImageStore
    runtime: Runtime
    progress: Progress

    def image(self) -> Path:
        """Return where the image lies: made in a folder beside its place unless it is there."""
        entry = _entry(self.order, self.recipe)
        if self.order.fresh:
            entry = f"{entry}-{time.time_ns():x}"
        with self.store.images.making(entry, self.progress) as work, ExitStack() as held:
            if work is not None:
                check_space(work)
                made, config = self._make(work, held)
                about = f"{self.order.template} on {self.order.base}"
                info = Info("image", about, self.recipe.format, 0, time.time(), config=config)
                self.store.publish(work, made, entry, info)
        path = self.store.payload(entry)
        if path is None:
            raise InfrastructureError(f"{entry} was removed as soon as it was made")
        self.store.name(self.order.name, entry)
        return path

    def _make(self, work: Path, held: ExitStack) -> tuple[Path, OciConfig | None]:
        """Carry out base, packages and template in this order."""
        source = self._base(work, held)
        apt = frozenset() if self.order.base == APT_BASE else self.recipe.apt
        if apt or self.recipe.pip:
            packages = replace(self.recipe, apt=apt, locks={}, wheels=frozenset())
            self.progress(f"installing {', '.join([*sorted(apt), *sorted(self.recipe.pip)])}")
            made = self._run(packages, template_text(PACKAGES_TEMPLATE), source, work, unpacked=True)
            source = replace(source, root=made.rename(work / "installed"))
        self.progress(f"building {self.order.name}")
        made = self._run(self.recipe, self.recipe.template, source, work, self.recipe.format == "folder")
        return made, source.config

    def _base(self, work: Path, held: ExitStack) -> _Source:
        """Return the root folder of the order's base."""
        if self.order.base == APT_BASE:
            return _Source(debian.make_root(sorted(self.recipe.apt), work, self.progress))
        reference = parse(self.order.base, "base")
        base: Path | None = None
        if not (isinstance(reference, Registry) and self.order.fresh):
            base = self.store.locate(reference)
        if base is None:
            assert isinstance(reference, Registry)
            pulled, its_config = Puller(self.store, self.runtime).fetch(reference, work, "folder", self.progress)
            return _Source(pulled.rename(work / "base"), replace(its_config, extended=True))
        config = config_of(base)
        config = config and replace(config, extended=True)
        if base.is_dir() and base.stat().st_uid != os.geteuid():
            self.progress(f"copying {base}, which is another user's")
            return _Source(rootfs.copy(base, work / "base"), config)
        start = self.store.open(base, self.runtime, progress=self.progress)
        held.callback(start.release)
        if not start.path.is_dir():
            raise InfrastructureError(f"{base} can't be unpacked here, and only a root folder can be built on")
        return _Source(start.path, config)

    def _run(self, recipe: Recipe, template: str, source: _Source, work: Path, unpacked: bool) -> Path:
        """Let the runtime build from a template in ``work``."""
        if recipe.locks:
            (work / "locks").mkdir()
            for name, data in recipe.locks.items():
                (work / "locks" / name).write_bytes(data)
        if recipe.wheels:
            _unpack_wheels(recipe.wheels, source.root, work / "wheels")
        definition = work / "image.def"
        definition.write_text(render(template, f"Bootstrap: localimage\nFrom: {source.root}", recipe))
        made = programs.build(
            self.runtime, work, str(definition), timeout_s=BUILD_TIMEOUT_S, unpacked=unpacked, base=source.root
        )
        if unpacked:
            check_made(made)
        return made


def _entry(order: Order, recipe: Recipe) -> str:
    return f"{order.name}-{recipe.key}"


def _identity(base: str, store: ImageStore) -> str:
    """Return what names the content of a base, as well as it can be known without reading the base."""
    if base == APT_BASE:
        return debian.identity()
    reference = parse(base, "base")
    if isinstance(reference, Registry):
        return reference.uri
    path = store.locate(reference)
    assert path is not None
    return store.identity(path)


def _unpack_wheels(packages: Iterable[str], root: Path, target: Path) -> None:
    """Unpack packages and what they need into the new folder ``target``, for the Python of the image ``root``.

    The host's pip or uv chooses wheels with its own settings (mirrors, proxies, certificates), which an image does not
    know. Nothing of them runs on the host.

    Raises:
        InfrastructureError: the image has no Python, or there are no such wheels; with pip's words.
    """
    libraries = [*root.glob("usr/local/lib/python3.*/os.py"), *root.glob("usr/lib/python3.*/os.py")]
    if not libraries:
        raise InfrastructureError(f"there is no Python in {root} to choose wheels for")
    version = libraries[0].parent.name.removeprefix("python")
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    else:
        command = [uv.find_uv_bin(), "pip", "install"]
    command += ["--quiet", "--only-binary=:all:", f"--python-version={version}", f"--target={target}"]
    command += sorted(packages)
    try:
        programs.run(command, None, WHEELS_TIMEOUT_S)
    except InfrastructureError as error:
        raise InfrastructureError(f"the wheels can't be had: {error.reason}") from error
    # uv leaves a lock file, which is no package.
    (target / ".lock").unlink(missing_ok=True)


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


def check_space(work: Path) -> None:
    free = free_bytes(work)
    if free < LEAST_FREE:
        raise InfrastructureError(
            f"only {free >> 20} MiB are free on the disk of {work.parent}: 'prorl image gc' makes room, and "
            "PRORL_CACHE names another folder"
        )


REGISTRY_BASE = "docker://docker.io/library/python:3.12-slim"

DEFAULT, KERNEL, MATH = "default", "kernel", "math"

SHIPPED = (DEFAULT, KERNEL, MATH)

ON_OTHERS = {
    KERNEL: (DEFAULT, ("ipython>=8.18,<10", "numpy>=2,<3")),
    MATH: (KERNEL, ("numpy>=2,<3", "scipy>=1.14,<2", "sympy>=1.13,<2")),
}
"""Those that are made of another one, and the wheels that are added."""

TRIAL_TIMEOUT_S = 120.0


def default_image_path() -> Path:
    """Where the default image lies, or would lie: the path to give as the image of a sandbox."""
    store = ImageStore()
    # Built on another machine, with tools that this one may lack.
    places = [place(_default_order(base), store) for base in (APT_BASE, REGISTRY_BASE)]
    return next((path for path in places if path.is_dir()), places[0])


def image_path(name: str) -> Path | None:
    """Where the image of that name lies; ``None`` if it is not built."""
    if name == DEFAULT:
        path = default_image_path()
    elif base := image_path(ON_OTHERS[name][0]):
        path = place(_order_on(base, name), ImageStore())
    else:
        return None
    return path if path.is_dir() else None


def ensure_image(name: str, progress: Progress) -> Path:
    """Build the image of that name unless it is there, and those that it is made of, and give it its name. Takes about
    10 s with apt, and 10 s for each that is made of it; at once afterwards.

    Raises:
        InfrastructureError: no runtime, no wheels, or no way to build worked; the message says why for each way tried.
    """
    if path := image_path(name):
        return _named(name, path)
    orders = _default_orders() if name == DEFAULT else [_order_on(ensure_image(ON_OTHERS[name][0], progress), name)]
    runtime = require_runtime()
    reasons = []
    for order in orders:
        try:
            return build(order, ImageStore(), runtime, progress)
        except InfrastructureError as error:
            reasons.append(f"from {order.base}: {error.reason}")
    raise InfrastructureError(f"the {name} sandbox image could not be built; " + "; ".join(reasons))


def try_image(image: Path, runtime: Runtime) -> str:
    """Start a container of an image, let it run its own test, and return what that said.

    Raises:
        InfrastructureError: the container does not start, or something is missing in it.
    """
    return programs.run([str(runtime.path), "test", "--containall", str(image)], runtime.environ(), TRIAL_TIMEOUT_S)


def _named(name: str, image: Path) -> Path:
    """The image, called ``name`` from now on: another version of this package may have taken the name since."""
    store = ImageStore()
    # A cache that others keep for us is not ours to write.
    if store.entry_named(name) != image.parent.name and os.access(store.images.folder, os.W_OK):
        store.name(name, image.parent.name)
    return image


def _default_orders() -> list[Order]:
    """Return the ways to build the default image here, the best one first."""
    bases = [REGISTRY_BASE] if debian.missing_tools() else [APT_BASE, REGISTRY_BASE]
    return [_default_order(base) for base in bases]


def _default_order(base: str) -> Order:
    return Order(DEFAULT, base, DEFAULT, format="folder")


def _order_on(base: Path, name: str) -> Order:
    return Order(name, str(base), name, wheels=ON_OTHERS[name][1], format="folder")
