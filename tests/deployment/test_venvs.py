# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which servers share the running environment, and what Gym is told about it."""

from pathlib import Path

import pytest

from nemo_gym_prorl.deployment.venvs import (
    Installation,
    link_environments,
    running_installation,
    satisfies_requirements,
    shared_venvs,
)


VERSIONS = {"nemo-gym": "0.4.0", "nemo-gym-prorl": "0.1.0", "aiohttp": "3.14.1"}


@pytest.mark.parametrize(
    ("file", "text", "met"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["nemo-gym", "nemo-gym-prorl"]', True),
        ("pyproject.toml", '[project]\ndependencies = ["Nemo_Gym[dev]", "aiohttp>=3.14"]', True),
        ("pyproject.toml", '[project]\ndependencies = ["nemo-gym", "aiohttp>=4"]', False),
        ("pyproject.toml", '[project]\ndependencies = ["aiohttp[speedups]"]', False),
        ("pyproject.toml", '[project]\ndependencies = ["nemo-gym", "nemo-gym-prorl[math]"]', True),
        ("pyproject.toml", "[project", False),
        ("requirements.txt", "-e nemo-gym[dev] @ ../../\n# a comment\naiohttp  # and another\n", True),
        ("requirements.txt", "-e nemo-gym[dev] @ ../../\nscipy\n", False),
        ("requirements.txt", "aiohttp; python_version < '3'\n", True),
        ("requirements.txt", "git+https://example.org/thing.git\n", False),
        ("requirements.txt", "-r other.txt\n", False),
        ("README.md", "nothing that Gym reads", False),
    ],
)
def test_a_server_shares_what_has_all_that_it_asks_for(tmp_path: Path, file: str, text: str, met: bool):
    """A server of ours without its extra starts, and says so itself."""
    (tmp_path / file).write_text(text)
    assert satisfies_requirements(tmp_path, VERSIONS.get) is met


def test_links_follow_what_the_environment_has(tmp_path: Path):
    root, venvs, prefix = tmp_path / "site", tmp_path / "venvs", tmp_path / "venv"
    server = root / "resources_servers" / "mine"
    server.mkdir(parents=True)
    (server / "requirements.txt").write_text("aiohttp>=3.14\n")
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "activate").touch()
    installation = Installation(prefix, prefix / "bin", root, None)
    link = venvs / "resources_servers" / "mine" / ".venv"
    for _ in range(2):
        link_environments(venvs, installation, VERSIONS.get)
        assert link.readlink() == prefix
    link_environments(venvs, installation, {"aiohttp": "3.13"}.get)
    assert not link.is_symlink(), "after a downgrade Gym has to build one"
    (link / "bin").mkdir(parents=True)
    link_environments(venvs, installation, VERSIONS.get)
    assert (link / "bin").is_dir(), "one that Gym has built stays"
    assert [entry.name for entry in link.parent.iterdir()] == [".venv"]


def test_servers_of_the_folder_in_which_gym_is_started_share_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, wanted in {"maths": "nemo-gym-prorl", "other": "no-such-package"}.items():
        folder = tmp_path / "resources_servers" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f'[project]\ndependencies = ["nemo-gym", "{wanted}"]\n')
    venvs = shared_venvs() / "resources_servers"
    assert (venvs / "maths" / ".venv" / "bin" / "python").exists()
    assert not (venvs / "other").exists()
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.chdir("/")
    link_environments(elsewhere, running_installation(), {"nemo-gym": "1", "nemo-gym-prorl": "1"}.get, cwd=tmp_path)
    assert (elsewhere / "resources_servers" / "maths" / ".venv").exists()
