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
from collections.abc import Mapping, Sequence
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
from nemo_gym_prorl.sandbox.images.info import ROOT, SIF, Info
from nemo_gym_prorl.sandbox.images.reference import Local, Named, Registry, check_name, parse
from nemo_gym_prorl.sandbox.images.store import ImageStore, Start
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
    """What to build on: an address of a registry, a path, what debootstrap makes, or packages where there is none."""

    identity: str
    registry: Registry | None = None
    path: Path | None = None
    bootstrap: str | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """What a template is built on: the first lines of a definition file, the root folder that they name if they do,
    and the lock that keeps it there."""

    header: str
    root: Path | None = None
    start: Start | None = None

    @classmethod
    def folder(cls, root: Path, start: Start | None = None) -> _Source:
        return cls(f"Bootstrap: localimage\nFrom: {root}", root, start)


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
    plan = decide(order.reuse, recipe, store.built())
    entry = plan.image or f"{order.name}-{_entry_key(recipe.lock_key, order.reuse)}"
    with store.images.making(entry, progress) as work:
        if work is not None:
            _check_space(work)
            source = _source(recipe, order, plan.layer, store, runtime, work, progress)
            try:
                progress(f"building {order.name}")
                made = _run_build(recipe, recipe.template, source, runtime, work, recipe.format == "folder")
            finally:
                if source.start:
                    source.start.let_go()
            about = f"{order.template} on {order.base}"
            info = Info("image", about, recipe.format, 0, time.time(), recipe.lock_key)
            store.publish(work, made, entry, info)
    store.name(order.name, entry)
    path = store.payload(entry)
    if path is None:
        raise InfrastructureError(f"{order.name} was removed as soon as it was built")
    return path


def _source(
    recipe: Recipe,
    order: Order,
    layer: str | None,
    store: ImageStore,
    runtime: Runtime,
    work: Path,
    progress: Progress,
) -> _Source:
    if recipe.layered:
        entry = layer or f"layer-{_entry_key(recipe.version_key, order.reuse)}"
        with store.images.making(entry, progress) as layer_work:
            if layer_work is not None:
                _make_layer(recipe, order, entry, store, runtime, layer_work, progress)
        path = store.payload(entry)
        if path is None:
            raise InfrastructureError(f"{entry} was removed as soon as it was made")
        return _open(path, store, runtime, progress)
    return _base_source(order, store, runtime, work, progress, ())


def _make_layer(
    recipe: Recipe, order: Order, entry: str, store: ImageStore, runtime: Runtime, work: Path, progress: Progress
) -> None:
    source = _base_source(order, store, runtime, work, progress, sorted(recipe.apt))
    # There they are in it already.
    apt = frozenset[str]() if order.base == APT_BASE else recipe.apt
    rest = replace(recipe, apt=apt, locks={}, wheels=frozenset())
    try:
        progress(f"installing {', '.join([*sorted(recipe.apt), *sorted(recipe.pip)])}")
        made = _run_build(rest, template_text(LAYER_TEMPLATE), source, runtime, work, True)
    finally:
        if source.start:
            source.start.let_go()
    about = " ".join([order.base, "+", *sorted(recipe.apt), *sorted(recipe.pip)])
    store.publish(work, made, entry, Info("layer", about, "folder", 0, time.time(), recipe.version_key))


def _base_source(
    order: Order, store: ImageStore, runtime: Runtime, work: Path, progress: Progress, apt: Sequence[str]
) -> _Source:
    base = _resolve(order.base, store)
    path = base.path
    if base.registry and order.reuse is not Reuse.SCRATCH:
        path = store.locate(base.registry)
    if path and path.is_dir() and path.stat().st_uid != os.geteuid():
        progress(f"copying {path}, which is another user's")
        return _Source.folder(rootfs.copy(path, work / "base"))
    if path:
        return _open(path, store, runtime, progress)
    if base.registry:
        return _Source(f"Bootstrap: docker\nFrom: {base.registry.uri.removeprefix('docker://')}")
    if base.bootstrap:
        return _Source(base.bootstrap)
    return _Source.folder(apt_base.make_root(apt, work, progress))


def _open(path: Path, store: ImageStore, runtime: Runtime, progress: Progress) -> _Source:
    start = store.open(path, runtime, progress=progress)
    if not start.path.is_dir():
        start.let_go()
        raise InfrastructureError(f"{path} can't be unpacked here, and only a root folder can be built on")
    return _Source.folder(start.path, start)


def _run_build(recipe: Recipe, template: str, source: _Source, runtime: Runtime, work: Path, unpacked: bool) -> Path:
    locks = work / "locks"
    if recipe.locks:
        locks.mkdir()
        for name, data in recipe.locks.items():
            (locks / name).write_bytes(data)
    if recipe.wheels:
        if source.root is None:
            raise CallerError("it takes a root folder to know for which Python", field="base")
        wheels.unpack(recipe.wheels, source.root, work / "wheels")
    definition = work / "image.def"
    definition.write_text(render(template, source.header, recipe))
    made = runtime_build.build(
        runtime, work, str(definition), timeout_s=BUILD_TIMEOUT_S, unpacked=unpacked, base=source.root
    )
    if unpacked:
        check_made(made)
    return made


def _resolve(base: str, store: ImageStore) -> _Base:
    """Understand what a user gave as the base, and name its content as well as can be known."""
    if base == APT_BASE:
        return _Base(apt_base.identity())
    if base.startswith(DEBOOTSTRAP_BASE):
        return _debootstrap(base.removeprefix(DEBOOTSTRAP_BASE))
    reference = parse(base, "base")
    match reference:
        case Registry():
            return _Base(reference.uri, registry=reference)
        case Local() | Named():
            path = store.locate(reference)
            assert path is not None
            return _Base(store.identity(path), path=path)


def _debootstrap(wanted: str) -> _Base:
    suite, _, mirror = wanted.partition("=")
    mirror = mirror or DEBIAN_MIRROR
    if not _SUITE.fullmatch(suite) or not _MIRROR.fullmatch(mirror):
        raise CallerError(f"{wanted!r} is not SUITE or SUITE=URL, such as bookworm", field="base")
    if shutil.which("debootstrap") is None:
        raise CallerError("the program debootstrap is not installed (package 'debootstrap')", field="base")
    bootstrap = f"Bootstrap: debootstrap\nOSVersion: {suite}\nMirrorURL: {mirror}"
    return _Base(bootstrap, bootstrap=bootstrap)


def _entry_key(key: str, reuse: Reuse) -> str:
    """From scratch is another one each time; otherwise all who build the same at the same time meet at one name."""
    return f"{key}-{time.time_ns():x}" if reuse is Reuse.SCRATCH else key


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
