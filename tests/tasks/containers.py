# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Real sandboxes for tests through Gym's sandbox API."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.supervisor.state_dir import PID_NAMESPACE_FILE, state_root
from nemo_gym_prorl.servers.task_sandboxes import SandboxFactory, SandboxWithSessions, StartedSandbox


CONFIG_FILE = "resources_servers/prorl_code/configs/prorl_code.yaml"
ROOT = "/sandbox"


@cache
def image() -> str:
    """Return the image with a kernel, built if missing."""
    require_runtime().activate()
    return str(ensure_image(KERNEL, print))


@cache
def shipped_config() -> dict[str, Any]:
    """Return the shipped configuration of ``prorl_code``."""
    config: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FILE))
    assert isinstance(config, dict)
    return config


async def start_with_sessions(image_path: str | None = None, **options: Any) -> StartedSandbox:
    """Start a sandbox like the server, with changed provider options."""
    [(provider, shipped)] = shipped_config()["sandbox"].items()
    starter = SandboxFactory({provider: shipped | options})
    return await starter.start(SandboxSpec(image=image_path or image(), workdir="/"))


async def start(kind: type[AsyncSandbox] = AsyncSandbox) -> AsyncSandbox:
    """Start a sandbox with the shipped provider settings but without sessions."""
    spec = SandboxSpec(image=image())
    return await kind(shipped_config()["sandbox"]).start(spec)


@asynccontextmanager
async def running(kind: type[AsyncSandbox] = AsyncSandbox) -> AsyncIterator[AsyncSandbox]:
    """Yield a sandbox without sessions."""
    sandbox = await start(kind)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


@asynccontextmanager
async def running_ours(**options: Any) -> AsyncIterator[SandboxWithSessions]:
    """Yield a sandbox with sessions."""
    sandbox = await start_with_sessions(**options)
    assert isinstance(sandbox, SandboxWithSessions)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


def instances() -> set[str]:
    """Return the names of this test run's live sandboxes."""
    return {note.parent.name for note in _spaces()}


def first_processes() -> set[int]:
    """Return the host's process ids of the first processes of these sandboxes. A recreated sandbox keeps its name
    only.
    """
    found = set()
    for note in _spaces():
        with suppress(FileNotFoundError):
            found.add(int(note.read_text().split()[0]))
    return found


def kill_instance(name: str) -> None:
    """Kill a sandbox from outside, like a machine failure."""
    [note] = [note for note in _spaces() if note.parent.name == name]
    os.kill(int(note.read_text().split()[0]), signal.SIGKILL)


def _spaces() -> list[Path]:
    return list(state_root().glob(f"*/*/{PID_NAMESPACE_FILE}"))
