# SPDX-License-Identifier: Apache-2.0
"""What sandbox tests share: a sandbox, and a shell in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime import Runtime
from nemo_gym_prorl.sandbox.shell import Shell


@pytest_asyncio.fixture
async def container(image: Path, runtime: Runtime) -> AsyncIterator[Container]:
    async with await Container.start(ContainerSpec(image=image), runtime) as live:
        yield live


@pytest_asyncio.fixture
async def shell(container: Container) -> AsyncIterator[Shell]:
    async with await Shell.start(container) as live:
        yield live
