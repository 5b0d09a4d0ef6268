# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An image with a service of the distribution's in it: the database that everybody knows."""

from pathlib import Path

from nemo_gym_prorl.sandbox.images.building.builder import APT_BASE, Order, build
from nemo_gym_prorl.sandbox.images.cache import cache_dir, silent
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


def ensure_database_image(runtime: Runtime) -> Path:
    """What ``prorl image build plain --base apt: --apt postgresql`` makes; made once for this machine.

    Raises:
        InfrastructureError: the packages can't be had.
    """
    order = Order("plain", APT_BASE, "database", apt=("postgresql",), format="folder")
    return build(order, ImageStore(cache_dir() / "test-images"), runtime, silent)
