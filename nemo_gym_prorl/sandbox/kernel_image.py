# SPDX-License-Identifier: Apache-2.0
"""The kernel image: the default image with IPython's kernel in it, for :mod:`.kernel`.

The kernel comes from wheels, chosen for the *image's* Python and unpacked into it from outside: the host's Python
needs not be of the same version. Then the image's own Python compiles all that is in it: otherwise each fresh sandbox
would, which costs a kernel seconds to start, and its overlay a thousand files to delete.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import debian
from nemo_gym_prorl.sandbox.cache import Progress
from nemo_gym_prorl.sandbox.image import ensure_default_image
from nemo_gym_prorl.sandbox.runtime import require_runtime
from nemo_gym_prorl.sandbox.store.shelf import Shelf


REQUIREMENTS = ("ipykernel>=6.29,<8",)

CPP_LIBRARY = ("libstdc++6", "libgcc-s1")

WHEELS_TIMEOUT_S = 600.0
COMPILE_TIMEOUT_S = 300.0

COMPILE = """
import compileall, os, sys
for folder in filter(os.path.isdir, sys.path):
    compileall.compile_dir(folder, quiet=2, workers=0)
"""
"""By times of change, not by hashes: an agent that edits a library must see its edit. Files that are no Python stay as
they are."""

_RECIPE_VERSION = 2


def kernel_image_path(base: Path) -> Path:
    """Where the kernel image made from ``base`` lies, or would lie."""
    key = hashlib.sha256(
        "\0".join([base.name, str(_RECIPE_VERSION), *REQUIREMENTS, *CPP_LIBRARY]).encode()
    ).hexdigest()[:12]
    return base.parent / f"kernel-{key}"


def ensure_kernel_image(progress: Progress) -> Path:
    """Build the kernel image unless it is there; some 20 s, and at once afterwards.

    Raises:
        InfrastructureError: the default image or the wheels can't be had; the message says why.
    """
    base = ensure_default_image(progress)
    image = kernel_image_path(base)
    if image.is_dir():
        return image
    shelf = Shelf(image.parent)
    with shelf.making(image.name, progress) as work:
        if work is not None:
            progress("copying the default image")
            root = work / "root"
            shutil.copytree(base, root, symlinks=True)
            progress("adding IPython's kernel")
            _add_wheels(root)
            if not any((root / "usr" / "lib").rglob("libstdc++.so.6")):
                _add_cpp_library(root, work, progress)
            progress("compiling Python's libraries")
            _compile(root)
            shelf.publish(root, image.name)
    return image


def _add_cpp_library(root: Path, work: Path, progress: Progress) -> None:
    """Unpack the C++ library that ZeroMQ's wheel needs, from the distribution that the default image is made of."""
    (work / "apt").mkdir()
    archives = debian.fetch(CPP_LIBRARY[:1], debian.host_sources(), work / "apt", progress)
    # The rest of what it depends on is in the image.
    debian.unpack([archive for archive in archives if archive.name.startswith(CPP_LIBRARY)], root)


def _add_wheels(root: Path) -> None:
    """Unpack the kernel and what it needs into ``root``, where its Python looks."""
    libraries = sorted((root / "usr" / "lib").glob("python3.*"))
    if not libraries:
        raise InfrastructureError(f"there is no Python in {root} to run a kernel with")
    version = libraries[-1].name.removeprefix("python")
    target = root / "usr" / "local" / "lib" / f"python{version}" / "dist-packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--only-binary=:all:", f"--python-version={version}", f"--target={target}", *REQUIREMENTS]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WHEELS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"the wheels of the kernel were not there after {WHEELS_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise InfrastructureError(f"the wheels of the kernel can't be had: {done.stderr.strip()[-600:]}")


def _compile(root: Path) -> None:
    """Have the image's Python compile every library that it can import."""
    runtime = require_runtime()
    command = [str(runtime.path), "exec", "--containall", "--no-home", "--writable", str(root)]
    try:
        done = subprocess.run(
            [*command, "python3", "-c", COMPILE],
            env=runtime.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"Python's libraries were not compiled after {COMPILE_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise InfrastructureError(f"Python's libraries can't be compiled: {done.stderr.strip()[-600:]}")
