# SPDX-License-Identifier: Apache-2.0
"""What every part of the suite shares."""

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

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


LONGEST_FIRST = (
    "tests/policy/",
    "tests/gym/",
    "tests/sandbox/test_as_ordinary_user.py",
    "tests/rollout/test_schemathesis.py",
)
"""What begins first where the suite runs on several cores, so that none waits for another at the end."""

SHARED_ENGINE = "tests/policy/"
"""The tests of this folder share real engines, and two cores do not carry more than one of them at a time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order, see :data:`LONGEST_FIRST`."""

    def turn(item: pytest.Item) -> int:
        starts = [item.nodeid.startswith(prefix) for prefix in LONGEST_FIRST]
        return starts.index(True) if any(starts) else len(starts)

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file run in one process, since they share fixtures; so do those that share an engine."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARED_ENGINE if nodeid.startswith(SHARED_ENGINE) else nodeid.partition("::")[0]

    return ByFile(config, log)
