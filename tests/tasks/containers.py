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

from nemo_gym.sandbox import SandboxSpec
from nemo_gym.sandbox.providers import create_provider
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.supervisor.state_dir import PID_NAMESPACE_FILE, state_root
from nemo_gym_prorl.tasks.sandbox import Sandbox


CONFIG_FILE = "resources_servers/prorl_code/configs/prorl_code.yaml"
ROOT = "/sandbox"


@cache
def image() -> str:
    """Return the image with a kernel, built if missing."""
    require_runtime().activate()
    return str(ensure_image(KERNEL, print))


@cache
def shipped_config() -> dict[str, Any]:
    config: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FILE))
    assert isinstance(config, dict)
    return config


async def start(image_path: str | None = None, **options: Any) -> Sandbox:
    """Start a sandbox like the server, with changed provider options."""
    [(name, shipped)] = shipped_config()["sandbox"].items()
    provider = create_provider({name: shipped | options})
    return Sandbox(provider, await provider.create(SandboxSpec(image=image_path or image(), workdir="/")))


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Sandbox]:
    sandbox = await start(**options)
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
