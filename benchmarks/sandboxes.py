# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes and shells that benchmarks compare; each subject yields a function that runs :data:`ECHO` in it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from nemo_gym.sandbox.providers.apptainer import ApptainerProvider
from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell


ECHO = "echo hello"
GYM = "Gym apptainer"

Action = Callable[[], Awaitable[str]]


async def our_shell(image: Path, runtime: Runtime) -> AsyncIterator[Action]:
    container = await Container.start(ContainerSpec(image=image), runtime)
    async with container, await Shell.start(container) as shell:

        async def action() -> str:
            return (await shell.run(ECHO)).output

        yield action


async def our_exec(image: Path, runtime: Runtime) -> AsyncIterator[Action]:
    async with await Container.start(ContainerSpec(image=image), runtime) as container:

        async def action() -> str:
            return (await container.run(ECHO)).stdout

        yield action


async def gym_apptainer(image: Path, _runtime: Runtime | None = None) -> AsyncIterator[Action]:
    provider = ApptainerProvider(create={"extra_start_args": ["--writable-tmpfs"]})
    handle = await provider.create(SandboxSpec(image=str(image)))

    async def action() -> str:
        return (await provider.exec(handle, ECHO)).stdout or ""

    try:
        yield action
    finally:
        await provider.close(handle)


async def latencies(action: Action, count: int) -> list[float]:
    """Return the milliseconds of each of ``count`` calls, and check each answer."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        answer = await action()
        taken.append((time.perf_counter() - begin) * 1e3)
        assert "hello" in answer
    return taken
