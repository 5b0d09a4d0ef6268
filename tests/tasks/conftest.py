# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by the tests of tasks."""

from collections.abc import AsyncIterator

import pytest

from nemo_gym_prorl.tasks.sandbox import Sandbox
from tests.tasks import containers


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A running container."""
    async with containers.running() as started:
        yield started
