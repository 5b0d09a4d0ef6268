# SPDX-License-Identifier: Apache-2.0
"""What every part of the suite shares."""

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.policy.scripted import ScriptedConfig
from nemo_gym_prorl.policy.scripted import serve as serve_scripted
from nemo_gym_prorl.sandbox.cache import silent
from nemo_gym_prorl.sandbox.image import ensure_default_image
from nemo_gym_prorl.sandbox.install import ensure_runtime
from nemo_gym_prorl.sandbox.runtime import Runtime


@pytest.fixture(scope="session", autouse=True)
def state() -> Iterator[Path]:
    """Where this run's sandboxes live, whatever else runs on the machine; at the end none may be left.

    One folder for all tests, since a process has one supervisor. Not pytest's own: a Unix socket's path must be short.
    """
    before = os.environ.get("PRORL_STATE")
    folder = Path(tempfile.mkdtemp(prefix="prorl-t-", dir=None if os.geteuid() else "/tmp"))
    os.environ["PRORL_STATE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PRORL_STATE"]
    else:
        os.environ["PRORL_STATE"] = before
    for owner in folder.iterdir():
        assert [entry.name for entry in owner.iterdir() if entry.is_dir()] == [], "a test left a sandbox"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Some tests send Ctrl-C to what they start, which ignores it if a shell started this run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return ensure_runtime(silent)


@pytest.fixture(scope="session")
def image(runtime: Runtime) -> Path:
    return ensure_default_image(silent)


@pytest.fixture
async def scripted_policy() -> AsyncIterator[str]:
    """Base URL of a scripted policy that lives as long as the test."""
    async with serve_scripted(ScriptedConfig()) as base_url:
        yield base_url
