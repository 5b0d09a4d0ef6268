# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Builds of definitions on folders, SIFs and packages; what is reused, and what a failed build leaves."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images import builder as build_module
from nemo_gym_prorl.sandbox.images.builder import BuildRequest, build
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.reference import parse
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.running import created


pytestmark = pytest.mark.sandbox

REPOSITORY = Path(__file__).parents[2]

LONG = bool(os.environ.get("PRORL_TEST_LONG"))

DEFINITION = """\
%post
    mkdir -p /made
    echo hello > /made/word

%environment
    export WORD=hello
"""


@pytest.fixture
def order(tiny_root: Path) -> BuildRequest:
    return BuildRequest(DEFINITION, str(tiny_root), "mine")


async def test_a_definition_becomes_an_image_that_starts_by_its_name(
    order: BuildRequest, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.activate()
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    path = build(order, ImageStore(), runtime, ignore_progress)
    assert path.is_dir()
    provider = SingularityProvider()
    async with created(provider, image="mine") as handle:
        done = await provider.exec(handle, "cat /made/word; echo $WORD")
        assert done.stdout == "hello\nhello\n"


def test_commands_of_a_definition_find_the_images_temporary_folders(
    order: BuildRequest, store: ImageStore, runtime: Runtime, tmp_path: Path
) -> None:
    ours = [Path(tempfile.mkdtemp(dir=folder)) for folder in ("/tmp", "/var/tmp")]
    hidden = " && ".join(f"test ! -e {path}" for path in ours)
    script = f"    {hidden} && : > /tmp/a && : > /var/tmp/b\n"
    definition = f"%setup\n    mkdir $APPTAINER_ROOTFS/own\n\n%post\n{script}"
    try:
        built = build(replace(order, definition=definition), store, runtime, ignore_progress)
    finally:
        for path in ours:
            path.rmdir()
    assert [(built / name).exists() for name in ("own", "tmp/a", "var/tmp/b")] == [True, True, True]


def test_the_same_definition_is_built_once_and_a_changed_one_again(
    order: BuildRequest, store: ImageStore, runtime: Runtime
) -> None:
    said: list[str] = []
    first = build(order, store, runtime, said.append)
    assert build(order, store, runtime, said.append) == first
    assert said == ["building mine"]
    assert store.all()[0].names == ("mine",)
    changed = build(replace(order, definition=f"{DEFINITION}\n# changed\n"), store, runtime, said.append)
    assert changed != first
    assert store.locate(parse("mine")) == changed
    assert said.count("building mine") == 2
    removed, _ = store.collect(older_than_s=-10.0)
    assert len(removed) == 2
    with pytest.raises(CallerError, match="no image is named 'mine'; names are: none"):
        store.locate(parse("mine"))


def test_a_sif_is_a_base(order: BuildRequest, store: ImageStore, tiny_sif: Path, runtime: Runtime) -> None:
    built = build(replace(order, base=str(tiny_sif)), store, runtime, ignore_progress)
    assert (built / "made" / "word").read_text() == "hello\n"
    assert len(store.all_copies()) == 1


@pytest.mark.skipif(bool(debian.missing_tools()), reason="needs apt")
@pytest.mark.skipif(is_machine_root() and not LONG, reason="slow; by root in make test-long, and as it is set up")
def test_packages_of_the_machines_distribution_are_a_base(
    order: BuildRequest, store: ImageStore, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian, "PACKAGES", ("base-files", "base-passwd", "dash", "coreutils"))
    said: list[str] = []
    built = build(replace(order, base="apt:", apt=["make"]), store, runtime, said.append)
    assert (built / "usr/bin/make").exists()
    assert (built / "made" / "word").read_text() == "hello\n"
    assert "downloading packages" in said


def test_a_failed_build_says_why_and_leaves_nothing(
    order: BuildRequest, store: ImageStore, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InfrastructureError, match="apptainer build failed"):
        build(replace(order, definition="%post\n    exit 3\n"), store, runtime, ignore_progress)
    assert store.all() == []
    monkeypatch.setattr(build_module, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(InfrastructureError, match=r"MiB are free.*prorl image gc"):
        build(order, store, runtime, ignore_progress)
    assert [path.name for path in store.images.folder.iterdir()] == [".locks"]


@pytest.mark.parametrize("pip", [True, False], ids=["by pip", "by uv"])
def test_wheels_leave_nothing_but_packages(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: bool
) -> None:
    """Recipes move all visible entries. No other Python is on PATH, or can be downloaded."""
    monkeypatch.setattr(build_module.importlib.util, "find_spec", lambda _name: pip or None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.chdir(tmp_path)
    build_module.unpack_wheels(["six>=1.16"], image, tmp_path / "new")
    there = {path.name for path in (tmp_path / "new").iterdir()}
    assert "six.py" in there
    assert not [name for name in there if name.startswith(".")]
