# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Build images from definition files, among them the images that ship with this package.

A build works in a temporary folder that is renamed at the end, so a build that fails or is killed leaves no image.
:mod:`..dockerfile` builds Dockerfiles.

The shipped images are *default*, for tasks without an image of their own; *kernel*, which adds IPython and numpy; and
*math*, which adds scipy and sympy to *kernel*. The default image consists of packages of the machine's own
distribution where apt exists, and is based on a public image elsewhere. All are root folders. A changed definition
changes the hash in the name of the image's entry, so another image is built. If several versions of this package share
a cache, the version that was set up last determines which images the short names denote.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import uv

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.entries import Progress, free_bytes, machine
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import RegistryImage, parse
from nemo_gym_prorl.sandbox.images.rootfs import check_usable
from nemo_gym_prorl.sandbox.images.store import ROOT, ImageInfo, ImageStore, config_of
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime


APT_BASE = "apt:"
"""Base that consists of packages of the machine's own distribution, without a registry."""

BUILD_TIMEOUT_S = 3600.0  # per image or stage, which may compile packages

WHEELS_TIMEOUT_S = 600.0  # wheels are downloaded and not compiled

MIN_FREE_BYTES = 1 << 30
"""Free bytes that a build's disk must have at the start; a build on less would fail later."""

COMPILE_PYTHON = (
    "python3 -c 'import compileall, os, sys; "
    "[compileall.compile_dir(folder, quiet=2, workers=0) for folder in filter(os.path.isdir, sys.path)]'"
)
"""Shell command that replaces ``COMPILE_PYTHON`` in definitions: compiles all importable Python files of an image.

Python checks the compiled files by modification time, so an agent's edit of a library takes effect. Errors are
ignored, since some packages contain invalid Python on purpose.
"""

KEY_LENGTH = 12  # hexadecimal digits of the hash in an entry's name; 48 bits make collisions unlikely


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Request to build a root folder from a definition file.

    Attributes:
        definition: sections of the definition file, without its header.
        base: ``docker://`` address, path or name of an image, or :data:`APT_BASE`.
        name: short name of the built image.
        apt: packages of the distribution besides :data:`.debian.PACKAGES`, for :data:`APT_BASE`.
        wheels: Python packages for an image whose Python has no pip; ``%files`` finds them in the folder ``wheels``.
    """

    definition: str
    base: str
    name: str
    apt: Sequence[str] = ()
    wheels: Sequence[str] = ()

    def entry(self, store: ImageStore) -> str:
        """Return the name of the image's entry in the store, with a hash of all inputs of the build."""
        parts = [_identity(self.base, store), machine(), self.definition, COMPILE_PYTHON, self.apt, self.wheels]
        return f"{self.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:KEY_LENGTH]}"


def build(request: BuildRequest, store: ImageStore, runtime: Runtime, progress: Progress) -> Path:
    """Build an image unless the store has it; return its path.

    Raises:
        CallerError: the base does not exist or cannot be used.
        InfrastructureError: the image can't be built here; quotes the failed program.
    """
    entry = request.entry(store)
    with store.images.making(entry, progress) as work, ExitStack() as held:
        if work is not None:
            check_space(work)
            root, config = _base_root(request, store, runtime, work, held, progress)
            progress(f"building {request.name}")
            if request.wheels:
                unpack_wheels(request.wheels, root, work / "wheels")
            text = f"Bootstrap: localimage\nFrom: {root}\n\n{request.definition}"
            definition = work / "image.def"
            definition.write_text(text.replace("COMPILE_PYTHON", COMPILE_PYTHON))
            made = build_tools.build(
                runtime, work, str(definition), timeout_s=BUILD_TIMEOUT_S, unpacked=True, base=root
            )
            check_usable(made)
            info = ImageInfo("image", f"{request.name} on {request.base}", "folder", 0, time.time(), config=config)
            store.publish(work, made, entry, info)
    path = store.payload(entry)
    if path is None:
        raise InfrastructureError(f"{entry} was removed right after the build: build it again")
    store.name(request.name, entry)
    return path


def _base_root(
    request: BuildRequest, store: ImageStore, runtime: Runtime, work: Path, held: ExitStack, progress: Progress
) -> tuple[Path, OciConfig | None]:
    if request.base == APT_BASE:
        return debian.make_root(sorted(request.apt), work, progress), None
    reference = parse(request.base, "base")
    base = store.locate(reference)
    if base is None:
        assert isinstance(reference, RegistryImage)
        pulled, pulled_config = Puller(store, runtime).fetch(reference, work, "folder", progress)
        return pulled.rename(work / "base"), pulled_config
    return open_base_root(base, store, runtime, held, progress), config_of(base)


def open_base_root(base: Path, store: ImageStore, runtime: Runtime, held: ExitStack, progress: Progress) -> Path:
    """Return the root folder of an image to build on, which is locked against removal until ``held`` closes.

    Raises:
        CallerError: the image belongs to another user, or has device nodes, which cannot be copied; names the first.
        InfrastructureError: the image cannot be unpacked here.
    """
    for path in base.glob("dev/*"):
        if not path.is_symlink() and (path.is_char_device() or path.is_block_device()):
            raise CallerError(f"{path} is a device, which cannot be copied; empty {path.parent}", field="base")
    start = store.open(base, runtime, progress=progress)
    held.callback(start.release)
    return start.path


def _identity(base: str, store: ImageStore) -> str:
    """Return a text that identifies the content of a base image, as far as possible without reading the image."""
    if base == APT_BASE:
        return debian.base_identity()
    reference = parse(base, "base")
    if isinstance(reference, RegistryImage):
        return reference.uri
    path = store.locate(reference)
    assert path is not None
    return store.identity(path)


def unpack_wheels(packages: Iterable[str], root: Path, target: Path) -> None:
    """Download wheels of Python packages and their dependencies, for the Python of the image ``root``, and unpack
    them into the new folder ``target``.

    pip, else uv, selects wheels with the host's settings (mirrors, proxies, certificates), which an image does not
    have. No package code runs on the host.

    Raises:
        InfrastructureError: the image has no Python, or no wheels match; quotes pip or uv.
    """
    libraries = [*root.glob("usr/local/lib/python3.*/os.py"), *root.glob("usr/lib/python3.*/os.py")]
    if not libraries:
        raise InfrastructureError(f"{root} has no Python to choose wheels for: use a base with python3")
    version = libraries[0].parent.name.removeprefix("python")
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    else:  # without --python, uv would download a Python where no other is on PATH
        command = [uv.find_uv_bin(), "pip", "install", f"--python={sys.executable}"]
    command += ["--quiet", "--only-binary=:all:", f"--python-version={version}", f"--target={target}"]
    command += sorted(packages)
    try:
        build_tools.run(command, None, WHEELS_TIMEOUT_S)
    except InfrastructureError as error:
        raise InfrastructureError(f"the wheels can't be downloaded: {error.reason}") from error
    (target / ".lock").unlink(missing_ok=True)


def check_space(work: Path) -> None:
    """Raise :class:`.InfrastructureError` if the disk of ``work`` has less than :data:`MIN_FREE_BYTES` free."""
    free = free_bytes(work)
    if free < MIN_FREE_BYTES:
        raise InfrastructureError(
            f"only {free >> 20} MiB are free on the disk of {work.parent}: run 'prorl image gc', or set "
            "PRORL_CACHE to another folder"
        )


REGISTRY_BASE = "docker://docker.io/library/python:3.12-slim"

DEFAULT, KERNEL, MATH = "default", "kernel", "math"
BUILTIN_IMAGES = (DEFAULT, KERNEL, MATH)

DERIVED_IMAGES = {
    KERNEL: (DEFAULT, ("ipython>=8.18,<10", "numpy>=2,<3")),
    MATH: (KERNEL, ("numpy>=2,<3", "scipy>=1.14,<2", "sympy>=1.13,<2")),
}
"""Base, another shipped image, and additional wheels, by name of a shipped image."""

SELF_TEST_TIMEOUT_S = 120.0  # starts a container and imports packages, possibly from a slow disk


def default_image_path() -> Path:
    store = ImageStore()
    # The image may have been built on another machine, with or without apt.
    candidates = [_path(_request(DEFAULT, base), store) for base in (APT_BASE, REGISTRY_BASE)]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def image_path(name: str) -> Path | None:
    """Return the path of the shipped image ``name``; ``None`` if the image is not built."""
    if name == DEFAULT:
        path = default_image_path()
    elif base := image_path(DERIVED_IMAGES[name][0]):
        path = _path(_request(name, str(base)), ImageStore())
    else:
        return None
    return path if path.is_dir() else None


def ensure_image(name: str, progress: Progress) -> Path:
    """Build the shipped image ``name``, and the images on which it is based, unless they exist; return its path.

    Raises:
        InfrastructureError: there is no runtime, or the build fails with every base; quotes the reason for each base.
    """
    if path := image_path(name):
        # Another version of this package may have bound the name. A cache that another user maintains is not writable.
        with suppress(OSError):
            ImageStore().name(name, path.parent.name)
        return path
    if name == DEFAULT:
        bases = [REGISTRY_BASE] if debian.missing_tools() else [APT_BASE, REGISTRY_BASE]
    else:
        bases = [str(ensure_image(DERIVED_IMAGES[name][0], progress))]
    runtime = require_runtime()
    reasons = []
    for base in bases:
        try:
            return build(_request(name, base), ImageStore(), runtime, progress)
        except InfrastructureError as error:
            reasons.append(f"from {base}: {error.reason}")
    raise InfrastructureError(f"the {name} sandbox image could not be built; " + "; ".join(reasons))


def run_self_test(image: Path, runtime: Runtime) -> str:
    """Run the ``%test`` section of an image in a container, and return its output.

    Raises:
        InfrastructureError: the container does not start, or the test fails.
    """
    return build_tools.run(
        [str(runtime.path), "test", "--containall", str(image)], runtime.environ(), SELF_TEST_TIMEOUT_S
    )


def _path(request: BuildRequest, store: ImageStore) -> Path:
    return store.images.path(request.entry(store)) / ROOT


def _request(name: str, base: str) -> BuildRequest:
    definition = resources.files("nemo_gym_prorl.sandbox.images") / "definitions" / f"{name}.def"
    wheels = DERIVED_IMAGES[name][1] if name in DERIVED_IMAGES else ()
    return BuildRequest(definition.read_text(), base, name, wheels=wheels)
