# SPDX-License-Identifier: Apache-2.0
"""Real containers for tests, through Gym's own sandbox API."""

import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.image import ensure_default_image
from nemo_gym_prorl.sandbox.runtime import require_runtime


CONFIG_FILE = "resources_servers/prorl_code/configs/prorl_code.yaml"
ROOT = "/sandbox"


@cache
def image() -> str:
    """The default image, built if it is not there."""
    require_runtime().activate()
    return str(ensure_default_image(print))


@cache
def shipped_config() -> dict[str, Any]:
    """The configuration that ships with the server."""
    config = OmegaConf.to_container(OmegaConf.load(CONFIG_FILE))
    assert isinstance(config, dict)
    return config


async def start(kind: type[AsyncSandbox] = AsyncSandbox) -> AsyncSandbox:
    """Start a container with the provider settings that ship with the server."""
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


@contextmanager
def listed_apart() -> Iterator[None]:
    """Keep the instances of these tests in a list of their own, whatever else runs on the machine.

    The folder's path is short because sockets lie in it.
    """
    names = ("APPTAINER_CONFIGDIR", "SINGULARITY_CONFIGDIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def instances() -> set[str]:
    """Names of the container instances that run on this machine."""
    runtime = require_runtime()
    listing = subprocess.run(
        [runtime.path, "instance", "list", "--json"], env=runtime.environ(), capture_output=True, check=True
    )
    return {entry["instance"] for entry in json.loads(listing.stdout)["instances"]}


def kill_instance(name: str) -> None:
    """Kill an instance as the machine's trouble would: at once and from outside."""
    runtime = require_runtime()
    subprocess.run(
        [runtime.path, "instance", "stop", "--signal", "KILL", name],
        env=runtime.environ(),
        capture_output=True,
        check=True,
    )
