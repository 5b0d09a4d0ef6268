# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by the tests of tasks."""

from collections.abc import AsyncIterator, Iterator

import pytest
from nemo_gym.sandbox import AsyncSandbox

from tests.tasks import containers


@pytest.fixture(autouse=True, scope="session")
def _own_list_of_instances() -> Iterator[None]:
    with containers.listed_apart():
        yield


@pytest.fixture
async def sandbox() -> AsyncIterator[AsyncSandbox]:
    """A running container."""
    async with containers.running() as started:
        yield started
