# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the sandbox tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nemo_gym_prorl.sandbox import container as containers
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.spec import ImageDefaults
from nemo_gym_prorl.sandbox.supervisor import client
from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest
from tests.sandbox.tiny import make_tiny_root
from tests.sandbox.ways import is_long
from tests.sandbox.without import Off, Supervisors, Without


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See :mod:`tests.sandbox.ways`."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("way") == "runtime" and is_long(item.path.stem, item.name):
            item.add_marker(pytest.mark.long("from its first process on a sandbox is the same by both ways"))


@pytest.fixture(scope="session")
def tiny_root(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder of a few megabytes, with a shell and a few programs, without bash and Python."""
    root = tmp_path_factory.mktemp("tiny") / "root"
    make_tiny_root(image, root)
    return root


@pytest.fixture(scope="session")
def tiny_sif(tiny_root: Path, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SIF image of :func:`tiny_root`."""
    work = tmp_path_factory.mktemp("tiny-sif")  # another one with each try
    made = build_tools.build(runtime, work, str(tiny_root), timeout_s=60, unpacked=False)
    return made.rename(tiny_root.parent / "tiny.sif")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """An image store of this test's own."""
    return ImageStore(tmp_path / "images", tmp_path / "unpacked")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder of the host that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="prorl-h-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def kernel_image(image: Path) -> Path:
    return ensure_image(KERNEL, ignore_progress)


@pytest.fixture(params=["direct", "runtime"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the sandboxes of a test are made that leave it open. For tests that are to pass in both ways."""
    create_request = containers.create_request
    chosen: Any = request.param

    def by_it(*arguments: Any) -> tuple[CreateRequest, ImageDefaults]:
        made, defaults = create_request(*arguments)
        return replace(made, start=chosen if made.start == "auto" else made.start), defaults

    monkeypatch.setattr(containers, "create_request", by_it)
    return chosen


@pytest.fixture(scope="module")
def changed_supervisors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisors]:
    """Those of a file of tests that lack something."""
    made = Supervisors(tmp_path_factory.mktemp("changed"))
    yield made
    made.end()


@pytest.fixture
def without(changed_supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch) -> Without:
    """Has the next sandboxes of the test be those of a supervisor that lacks something."""

    def switch(*offs: Off) -> None:
        monkeypatch.setattr(client, "own_supervisor", changed_supervisors.lacking(offs))

    return switch


@pytest_asyncio.fixture
async def container(image: Path, runtime: Runtime) -> AsyncIterator[Container]:
    async with await Container.start(ContainerSpec(image=image), runtime) as live:
        yield live


@pytest_asyncio.fixture
async def shell(container: Container) -> AsyncIterator[Shell]:
    async with await Shell.start(container) as live:
        yield live
