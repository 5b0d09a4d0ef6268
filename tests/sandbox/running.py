# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Running sandboxes and their supervisor, and waits for what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxSpec

from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.supervisor import client, state_dir


HANG_S = 60.0
"""Only a hang takes longer, however busy the machine is."""


async def until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def gone_within_s() -> float:
    """Seconds in which nothing of a dead owner may be left.

    Invariant 4 of the architecture names 5 s of an idle machine. A busy one is given four times that, or its load.
    """
    return 5.0 * max(4.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def supervisor_pid() -> int:
    """Process number of this process's supervisor."""
    assert client.own_supervisor
    return client.own_supervisor.popen.pid


def kill_supervisor() -> None:
    os.kill(supervisor_pid(), signal.SIGKILL)


def child_pids(pid: int) -> set[int]:
    return {int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def open_files(pid: int | str = "self") -> int:
    """Number of open files of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * usage.PAGE_BYTES


def running_with(text: str) -> list[int]:
    """Processes, inside of containers or outside, that have a text among their arguments or variables."""
    found = []
    for pid, name in product(state_dir.process_ids(), ("cmdline", "environ")):
        # It may have ended just now, or be somebody else's.
        with suppress(OSError):
            found += [pid] if text.encode() in Path(f"/proc/{pid}/{name}").read_bytes() else []
    return found


@asynccontextmanager
async def created(provider: SingularityProvider, **spec: Any) -> AsyncIterator[SandboxHandle]:
    """A sandbox of a provider for the length of a block."""
    handle = await provider.create(SandboxSpec(**spec))
    try:
        yield handle
    finally:
        await provider.close(handle)
