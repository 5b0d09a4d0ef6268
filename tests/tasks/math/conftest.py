# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Server on a real socket with real sandboxes, and a checker with real workers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker
from tests.prorl_code.conftest import Client, serving


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving("prorl_math", checking_cpu_s=1) as base_url, Client(base_url) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[MathChecker]:
    """Checker that the tests of a module share, because its workers take seconds to start."""
    made = MathChecker(CheckLimits(cpu_s=1))
    yield made
    await made.aclose()
