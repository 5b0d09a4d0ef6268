# SPDX-License-Identifier: Apache-2.0
"""The images that come with the package: *default*, for tasks that bring no image of their own; *kernel*, which is
that one with IPython's kernel and numpy in it; *math*, which is *kernel* with scipy and sympy. They are recipes as any
other; only who builds them when is said here.

The default image is made of the machine's own distribution's packages where apt is at hand, in seconds and with no
container registry, and of a public image elsewhere. All are always root folders: those start fastest, and need
no FUSE, which many machines keep from ordinary users. A changed recipe has another key, so it makes a new image and
never a half-changed old one; and no image has a name before its own test has passed. Where several versions of this
package share a cache, the names ``default``, ``kernel`` and ``math`` are those of the version that was set up last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.building import tool
from nemo_gym_prorl.sandbox.images.building.builder import APT_BASE, Order, build, place
from nemo_gym_prorl.sandbox.images.cache import Progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime


REGISTRY_BASE = "docker://docker.io/library/python:3.12-slim"

DEFAULT, KERNEL, MATH = "default", "kernel", "math"

KERNEL_WHEELS = ("ipykernel>=6.29,<8", "numpy>=2,<3")

MATH_WHEELS = ("numpy>=2,<3", "scipy>=1.14,<2", "sympy>=1.13,<2")

TRIAL_TIMEOUT_S = 120.0


def default_image_path() -> Path:
    """Where the default image lies, or would lie: the path to give as the image of a sandbox."""
    store = ImageStore()
    places = [place(order, store) for order in _default_orders()]
    return next((path for path in places if path.is_dir()), places[0])


def ensure_default_image(progress: Progress) -> Path:
    """Build the default image unless it is there, and give it its name. About 10 s with apt; at once afterwards.

    Raises:
        InfrastructureError: no runtime, or no way to build worked; the message says why for each way tried.
    """
    path = default_image_path()
    if path.is_dir():
        return _named(DEFAULT, path)
    runtime = require_runtime()
    reasons = []
    for order in _default_orders():
        try:
            return build(order, ImageStore(), runtime, progress)
        except InfrastructureError as error:
            reasons.append(f"from {order.base}: {error.reason}")
    raise InfrastructureError("the default sandbox image could not be built; " + "; ".join(reasons))


def kernel_image_path() -> Path | None:
    """Where the kernel image lies; ``None`` if it is not built."""
    base = default_image_path()
    path = place(_kernel_order(base), ImageStore()) if base.is_dir() else base
    return path if path.is_dir() else None


def ensure_kernel_image(progress: Progress) -> Path:
    """Build the kernel image unless it is there, and give it its name; some 20 s, and at once afterwards.

    Raises:
        InfrastructureError: the default image or the wheels can't be had; the message says why.
    """
    if path := kernel_image_path():
        return _named(KERNEL, path)
    base = ensure_default_image(progress)
    return build(_kernel_order(base), ImageStore(), require_runtime(), progress)


def math_image_path() -> Path | None:
    """Where the math image lies; ``None`` if it is not built."""
    base = kernel_image_path()
    path = place(_math_order(base), ImageStore()) if base else None
    return path if path and path.is_dir() else None


def ensure_math_image(progress: Progress) -> Path:
    """Build the math image unless it is there, and give it its name; some 30 s, and at once afterwards.

    Raises:
        InfrastructureError: the kernel image or the wheels can't be had; the message says why.
    """
    if path := math_image_path():
        return _named(MATH, path)
    base = ensure_kernel_image(progress)
    return build(_math_order(base), ImageStore(), require_runtime(), progress)


ENSURE: Mapping[str, Callable[[Progress], Path]] = {
    DEFAULT: ensure_default_image,
    KERNEL: ensure_kernel_image,
    MATH: ensure_math_image,
}
"""How to have each of them, by name."""


def try_image(image: Path, runtime: Runtime) -> str:
    """Start a container of an image, let it run its own test, and return what that said.

    Raises:
        InfrastructureError: the container does not start, or something is missing in it.
    """
    return tool.run([str(runtime.path), "test", "--containall", str(image)], runtime.environ(), TRIAL_TIMEOUT_S)


def _named(name: str, image: Path) -> Path:
    """The image, called ``name`` from now on: another version of this package may have taken the name since."""
    store = ImageStore()
    # A cache that others keep for us is not ours to write.
    if store.entry_named(name) != image.parent.name and os.access(store.images.folder, os.W_OK):
        store.name(name, image.parent.name)
    return image


def _default_orders() -> list[Order]:
    """The ways to make it, the best one first."""
    bases = [REGISTRY_BASE] if debian.missing_tools() else [APT_BASE, REGISTRY_BASE]
    return [Order("default", base, "default", format="folder") for base in bases]


def _kernel_order(base: Path) -> Order:
    return Order("kernel", str(base), KERNEL, wheels=KERNEL_WHEELS, format="folder")


def _math_order(base: Path) -> Order:
    return Order("math", str(base), MATH, wheels=MATH_WHEELS, format="folder")
