# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
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
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.storage.state_dir import SPACE_FILE, state_root
from nemo_gym_prorl.sandbox.warm_pool import WarmPool, WarmPools


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


def waiting() -> int:
    """Sandboxes of this process that live."""
    return len(list(state_root().glob(f"*/*/{SPACE_FILE}")))


async def none_waits() -> None:
    while waiting():
        await asyncio.sleep(0.05)


async def test_pools_are_bounded_and_the_one_asked_for_longest_ago_ends(image: Path, runtime: Runtime) -> None:
    pools = WarmPools(most=2)
    asked = []

    async def start(spec: ContainerSpec) -> Container:
        asked.append(spec.processes)
        return await Container.start(spec, runtime)

    async def use(processes: int) -> None:
        async with await pools.take(ContainerSpec(image=image, processes=processes), 1, start) as container:
            assert (await container.run("echo hello")).stdout == "hello\n"
        await asyncio.wait_for(list(pools._pools.values())[-1].filled(), 30)

    for processes in (100, 200, 100, 300):
        await use(processes)
    assert len(pools) == 2
    assert [pool._spec.processes for pool in pools._pools.values()] == [100, 300]
    asked.clear()
    await use(100)
    assert asked == [100]  # one was ready, and is replaced
    await pools.close()
    await asyncio.wait_for(none_waits(), 30)


async def test_a_pool_that_nobody_asks_for_ends(image: Path, runtime: Runtime) -> None:
    pools = WarmPools(idle_s=1.0)
    async with await pools.take(ContainerSpec(image=image), 1, lambda spec: Container.start(spec, runtime)):
        pass
    while len(pools):
        await asyncio.sleep(0.05)
    await asyncio.wait_for(none_waits(), 30)
    async with await pools.take(ContainerSpec(image=image), 1, lambda spec: Container.start(spec, runtime)) as again:
        assert (await again.run("echo hello")).stdout == "hello\n"
    await pools.close()
