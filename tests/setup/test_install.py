# SPDX-License-Identifier: Apache-2.0
"""A private Apptainer from nothing: by root or an ordinary user, twice at once, after an interruption."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import debian
from nemo_gym_prorl.sandbox.cache import publish, silent, staging
from nemo_gym_prorl.sandbox.image import ensure_default_image, try_image
from nemo_gym_prorl.sandbox.install import ensure_runtime
from nemo_gym_prorl.sandbox.runtime import find_runtime, private_prefix


needs_debian = pytest.mark.skipif(
    debian.distribution() != "debian" or bool(debian.missing_tools()), reason="a private Apptainer is for Debian"
)


@pytest.mark.sandbox
@needs_debian
def test_two_setups_at_once_install_it_once_and_replace_a_torso(empty_cache: Path, image: Path) -> None:
    torso = private_prefix() / "usr/bin/apptainer"
    torso.parent.mkdir(parents=True)
    torso.write_text("half a program")
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ensure_runtime, [said.append, said.append])
    assert first == second == find_runtime()
    assert first.origin == "cache"
    assert said.count("downloading packages") == 1
    assert sorted(entry.name for entry in first.path.parent.iterdir()) == ["apptainer"], "PATH gets nothing else"
    assert {entry.name for entry in empty_cache.iterdir()} == {private_prefix().name, "locks"}, "no leavings"
    privileged = [path for path in private_prefix().rglob("*") if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)]
    assert not privileged
    assert "Python" in try_image(image, first)


@pytest.mark.sandbox
@needs_debian
def test_an_ordinary_user_sets_up_from_nothing_and_runs_containers(
    as_ordinary_user: Callable[[Callable[[Path], Any]], Any],
) -> None:
    def set_up(home: Path) -> tuple[int, str, str, str]:
        runtime = ensure_runtime(silent)
        image = ensure_default_image(silent)
        runtime.activate()
        script = "id -u; cut -d: -f1 -s /proc/net/dev; touch /made-here && echo writable"
        options = ["--containall", "--fakeroot", "--net", "--network", "none", "--writable-tmpfs"]
        said = subprocess.check_output(
            ["apptainer", "exec", *options, image, "sh", "-c", script], text=True, stderr=subprocess.STDOUT
        )
        return os.getuid(), str(image), try_image(image, runtime), said

    uid, image, tools, said = as_ordinary_user(set_up)
    assert uid != 0
    assert "/.cache/nemo-gym-prorl/images/" in image
    assert "git version" in tools
    lines = said.split()
    assert "lo" in lines
    assert not any(line.startswith(("eth", "en")) for line in lines), "the host's network is not there"
    assert lines[-1] == "writable"


def test_a_machine_that_is_not_debian_gets_the_other_ways_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache / "nothing"))
    with pytest.raises(InfrastructureError, match=r"package manager.*install-unprivileged.*module load"):
        ensure_runtime(silent)


@needs_debian
def test_an_unknown_package_fails_with_apts_own_words(tmp_path: Path) -> None:
    sources = debian.host_sources()
    with pytest.raises(InfrastructureError, match=r"Unable to locate package no-such-package-anywhere"):
        debian.fetch(["no-such-package-anywhere"], sources, tmp_path, silent)


@needs_debian
def test_a_dead_mirror_is_an_error_and_not_an_empty_result(tmp_path: Path) -> None:
    dead = [debian.Source("http://127.0.0.1:9/debian", "sid")]
    with pytest.raises(InfrastructureError, match=r"apt-get update failed: .*127\.0\.0\.1"):
        debian.fetch(["apptainer"], dead, tmp_path, silent)


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
        debian.Source("http://mirror.example/debian", "bookworm"),
        debian.Source("http://mirror.example/debian-security", "bookworm-security"),
    ]
    assert debian.parse_sources("https://odd.example/archive stable main") == [
        debian.Source("https://odd.example/archive", "stable")
    ]
    with pytest.raises(InfrastructureError, match=r"sources\.list"):
        debian.parse_sources("")


def test_what_was_interrupted_leaves_nothing_and_what_is_published_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "thing"

    def interrupted() -> None:
        with staging(target) as work:
            (work / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(target.parent.iterdir()) == []
    target.mkdir()
    (target / "torso").touch()
    with staging(target) as work:
        built = work / "built"
        built.mkdir()
        (built / "whole").touch()
        publish(built, target)
    assert [entry.name for entry in target.iterdir()] == ["whole"]
    assert [entry.name for entry in target.parent.iterdir()] == ["thing"]
