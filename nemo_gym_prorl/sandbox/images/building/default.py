# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The images that come with the package: *default*, for tasks that bring no image of their own; *kernel*, which is
that one with IPython and numpy in it; *math*, which is *kernel* with scipy and sympy. They are recipes as any
other; only who builds them when is said here.

The default image is made of the machine's own distribution's packages where apt is at hand, in seconds and with no
container registry, and of a public image elsewhere. All are always root folders: those start fastest, and need
no FUSE, which many machines keep from ordinary users. A changed recipe has another key, so it makes a new image and
never a half-changed old one; and no image has a name before its own test has passed. Where several versions of this
package share a cache, the names ``default``, ``kernel`` and ``math`` are those of the version that was set up last.
"""

from __future__ import annotations

import os
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.building import programs
from nemo_gym_prorl.sandbox.images.building.builder import APT_BASE, Order, build, place
from nemo_gym_prorl.sandbox.images.cache import Progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime


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
