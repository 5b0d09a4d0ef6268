# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Real containers for tests, through Gym's own sandbox API."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.factory import SandboxFactory, SandboxWithSessions, StartedSandbox
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.supervisor.state_dir import PID_NAMESPACE_FILE, state_root


CONFIG_FILE = "resources_servers/prorl_code/configs/prorl_code.yaml"
ROOT = "/sandbox"


@cache
def image() -> str:
    """The image with a kernel, built if it is not there."""
    require_runtime().activate()
    return str(ensure_image(KERNEL, print))


@cache
def shipped_config() -> dict[str, Any]:
    """The configuration that ships with the server."""
    config: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FILE))
    assert isinstance(config, dict)
    return config


async def start_with_sessions(image_path: str | None = None, **options: Any) -> StartedSandbox:
    """Start a container as the server does, with other options of its provider."""
    [(provider, shipped)] = shipped_config()["sandbox"].items()
    starter = SandboxFactory({provider: shipped | options})
    return await starter.start(SandboxSpec(image=image_path or image(), workdir="/"))


async def start(kind: type[AsyncSandbox] = AsyncSandbox) -> AsyncSandbox:
    """Start a container with the provider settings that ship with the server, but without sessions."""
    spec = SandboxSpec(image=image())
    return await kind(shipped_config()["sandbox"]).start(spec)


@asynccontextmanager
async def running(kind: type[AsyncSandbox] = AsyncSandbox) -> AsyncIterator[AsyncSandbox]:
    """A container for the length of a block."""
    sandbox = await start(kind)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


@asynccontextmanager
async def running_ours(**options: Any) -> AsyncIterator[SandboxWithSessions]:
    """As :func:`running`, as the server does it."""
    sandbox = await start_with_sessions(**options)
    assert isinstance(sandbox, SandboxWithSessions)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


def instances() -> set[str]:
    """Names of the sandboxes that live in the test run's folder."""
    return {note.parent.name for note in _spaces()}


def first_processes() -> set[int]:
    """Those of these sandboxes, as the host numbers them. One that is made once more keeps its name, not these."""
    found = set()
    for note in _spaces():
        with suppress(FileNotFoundError):
            found.add(int(note.read_text().split()[0]))
    return found


def kill_instance(name: str) -> None:
    """Kill a sandbox as the machine's trouble would: at once and from outside."""
    [note] = [note for note in _spaces() if note.parent.name == name]
    os.kill(int(note.read_text().split()[0]), signal.SIGKILL)


def _spaces() -> list[Path]:
    return list(state_root().glob(f"*/*/{PID_NAMESPACE_FILE}"))
