# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of a module share an event loop and a grader, since the log parser starts slowly."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from pytest_asyncio import is_async_test

from tests.tasks.swe import tally


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_async_test(item) and item.path.parent == HERE and "base_url" not in item.fixturenames:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def end_of_the_shared_task() -> AsyncIterator[None]:
    yield
    await tally.shared_task().aclose()
