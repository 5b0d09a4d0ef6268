# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What every part of the suite shares."""

import asyncio
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from tests import watchdog


LONG = bool(os.environ.get("PRORL_TEST_LONG"))

# How fast a machine is, is no property of the code.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=400 if LONG else 40,
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(watchdog)


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
        left = [entry.name for entry in owner.iterdir() if entry.is_dir()]
        assert left == [], "a test left a sandbox"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Some tests send Ctrl-C to what they start, which ignores it if a shell started this run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return ensure_runtime(ignore_progress)


@pytest.fixture(scope="session")
def image(runtime: Runtime) -> Path:
    return ensure_image(DEFAULT, ignore_progress)


@pytest.fixture(scope="session")
def wheel_python() -> Iterator[str]:
    """Python of an environment with our wheel beside the Gym that the tests run on; every user may read it."""
    from tests.deployment import journey

    folder = Path(tempfile.mkdtemp(prefix="prorl-wheel-"))
    folder.chmod(0o755)
    yield asyncio.run(journey.install(sys.executable, importlib.metadata.version("nemo-gym"), folder))
    shutil.rmtree(folder)


@pytest.fixture
async def scripted_policy() -> AsyncIterator[str]:
    """Base URL of a scripted policy that lives as long as the test."""
    async with serve_scripted(ScriptedConfig()) as base_url:
        yield base_url


ENGINES = "files whose tests share an engine"
"""Two cores do not carry more than one at a time."""

GYMS = "tests/deployment/"
"""These tests start Gym's servers on a Ray that they share, which two cores do not carry several times either."""

WHOLE_GYMS = (
    "tests/deployment/test_journey.py",
    "tests/deployment/test_init.py",
    "tests/deployment/test_fleet.py",
    "tests/deployment/test_serve.py",
    "tests/setup/test_readme.py",
)
"""These start all that a user starts, Ray included: one at a time, too, but beside the others."""

AS_ORDINARY_USER = "tests/sandbox/test_as_ordinary_user.py"

LONGEST_FIRST = (
    *(WHOLE_GYMS[0], ENGINES, GYMS, AS_ORDINARY_USER, "tests/setup/test_install.py"),
    *("tests/rollout/", "tests/prorl_code/"),
)
"""What begins first where the suite runs in several processes, so that none waits for another at the end."""


def scope_of(nodeid: str) -> str:
    """Tests of one scope run in one process one after another: those of a file, mostly, since they share fixtures."""
    path = nodeid.partition("::")[0]
    if _asks_for_an_engine(path):
        return ENGINES
    if path in WHOLE_GYMS:
        return WHOLE_GYMS[0]
    if path.startswith(GYMS):
        return GYMS
    return nodeid if path == AS_ORDINARY_USER else path


@cache
def _asks_for_an_engine(path: str) -> bool:
    """By its text, since the process that schedules has no fixtures to look at."""
    return "engine_url" in (Path(__file__).parents[1] / path).read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order, see :data:`LONGEST_FIRST`, and what ``make test`` leaves to ``make test-long``."""
    for item in items:
        if getattr(getattr(item, "function", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.longer("ten times the examples"))
        if (mark := item.get_closest_marker("long")) and not LONG:
            item.add_marker(pytest.mark.skip(f"{mark.args[0]}: make test-long runs it"))

    def turn(item: pytest.Item) -> int:
        starts = [scope_of(item.nodeid).startswith(prefix) for prefix in LONGEST_FIRST]
        return starts.index(True) if any(starts) else len(starts)

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See :func:`scope_of`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByScope(config, log)
