# SPDX-License-Identifier: Apache-2.0
"""Sandboxes started ahead: live, fresh, and as good as those started on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.pool import WarmPool
from nemo_gym_prorl.sandbox.runtime import Runtime


pytestmark = pytest.mark.sandbox


@pytest_asyncio.fixture
async def pool(image: Path, runtime: Runtime) -> AsyncIterator[WarmPool]:
    made = WarmPool(ContainerSpec(image=image), 2, lambda spec: Container.start(spec, runtime))
    yield made
    await made.close()


async def test_what_is_handed_out_is_fresh_and_as_ordered(pool: WarmPool) -> None:
    await asyncio.wait_for(pool.filled(), 30)
    seen = set()
    for number in range(4):
        async with await pool.take({"N": str(number)}, "/srv/task") as container:
            seen.add(container.name)
            done = await container.run("echo $N; pwd; ls -A /srv/task; touch /srv/task/used")
            assert done.stdout == f"{number}\n/srv/task\n"
    assert len(seen) == 4
    await asyncio.wait_for(pool.filled(), 30)


async def test_the_dead_are_not_handed_out(pool: WarmPool) -> None:
    await asyncio.wait_for(pool.filled(), 30)
    dead = pool._ready[0]
    await dead.close()
    async with await pool.take({}, None) as container:
        assert container.name != dead.name
        assert (await container.run("echo alive")).stdout == "alive\n"


async def test_a_wrong_order_costs_no_sandbox(pool: WarmPool) -> None:
    with pytest.raises(CallerError, match="workdir"):
        await pool.take({}, "/etc/passwd")
    await asyncio.wait_for(pool.filled(), 30)
