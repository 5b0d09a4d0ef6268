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
from collections.abc import AsyncIterator, Container, Iterable, Iterator
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


def tiered(
    cases: Iterable[Any], first: Container[Any], reason: str = "one of its kind is in the first tier"
) -> list[Any]:
    """Return the cases as parameters of a test, of which ``make test`` runs those that are in ``first``."""
    return [pytest.param(case, marks=[] if case in first else [pytest.mark.long(reason)]) for case in cases]


# Deadlines would make results depend on the speed of the machine.
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
    """State folder of this run's sandboxes; fails at the end if a sandbox is left.

    All tests share one folder, because a process has one supervisor. The folder is outside of pytest's, because paths
    of Unix sockets must be short.
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
    """Restore the handler of SIGINT: a shell that starts this run in the background makes processes ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return ensure_runtime(ignore_progress)


@pytest.fixture(scope="session")
def image(runtime: Runtime) -> Path:
    return ensure_image(DEFAULT, ignore_progress)


@pytest.fixture(scope="session")
def wheel_python() -> Iterator[str]:
    """Python of an environment with this project's wheel and the tests' Gym, readable by every user."""
    from tests.deployment import journey

    folder = Path(tempfile.mkdtemp(prefix="prorl-wheel-"))
    folder.chmod(0o755)
    yield asyncio.run(journey.install(sys.executable, importlib.metadata.version("nemo-gym"), folder))
    shutil.rmtree(folder)


@pytest.fixture
async def scripted_policy() -> AsyncIterator[str]:
    """Base URL of a scripted policy that runs during the test."""
    async with serve_scripted(ScriptedConfig()) as base_url:
        yield base_url


ENGINES = "files whose tests share an engine"
"""Scope of tests that use an engine: two cores run one engine at a time."""

GYMS = "tests/deployment/"
"""Scope of tests that start Gym's servers on a shared Ray: two cores run one Ray at a time."""

WHOLE_GYMS = (
    "tests/deployment/test_journey.py",
    "tests/deployment/test_init.py",
    "tests/deployment/test_fleet.py",
    "tests/deployment/test_serve.py",
    "tests/setup/test_readme.py",
)
"""Tests that start everything that a user starts, with their own Ray: one scope, parallel to the other scopes."""

AS_ORDINARY_USER = "tests/sandbox/test_as_ordinary_user.py"

LONGEST_FIRST = (
    *(WHOLE_GYMS[0], ENGINES, GYMS, AS_ORDINARY_USER, "tests/setup/test_install.py"),
    *("tests/rollout/", "tests/prorl_code/"),
)
"""Scopes that start first when the suite runs in several processes, because they take longest."""


def scope_of(nodeid: str) -> str:
    """Return the scope of a test, mostly its file; the tests of a scope run in one process and share fixtures."""
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
    """Whether a file uses the engine fixture, judged by its text: the scheduling process has no fixtures."""
    return "engine_url" in (Path(__file__).parents[1] / path).read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by :data:`LONGEST_FIRST`, and skip long tests unless ``make test-long`` runs."""
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
    """Schedule tests by :func:`scope_of`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByScope(config, log)
