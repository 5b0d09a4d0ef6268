# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests with a real Gym share."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from nemo_gym_prorl.rollout.api.client import RolloutClient
from tests.deployment.families import MIXTURE, Families, deployed
from tests.deployment.ray_cluster import ray_cluster


@pytest.fixture(scope="package")
def shared_ray() -> Iterator[str]:
    """An override for Gym, see :mod:`tests.deployment.ray_cluster`."""
    with ray_cluster() as override:
        yield override


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def families(shared_ray: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Families]:
    """The one deployment of :mod:`tests.deployment.families`; its tests run on the event loop of this folder."""
    async with deployed(shared_ray, tmp_path_factory.mktemp("families")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def client(families: Families) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(families.gym.url(MIXTURE)) as client:
        yield client
