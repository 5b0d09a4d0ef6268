# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Owners of binds of a server that runs as root: the sandbox owns them, unless that could harm the host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.usefixtures("way"),
    pytest.mark.skipif(not is_machine_root(), reason="an ordinary user's binds are his own"),
]

OWN, NOBODY = "0:0", "65534:65534"

BINDS: dict[str, tuple[int, int, str, str, bool]] = {
    # User and group on the host, option, owner inside, whether it is writable.
    "a user's": (4711, 4712, "", OWN, True),
    "a user's, read-only": (4711, 4712, ":ro", OWN, False),
    "root's, read-only": (0, 0, ":ro", OWN, False),
    "root's": (0, 0, "", NOBODY, False),
    "a user's, of root's group": (4711, 0, "", NOBODY, False),
    "of root's group, read-only": (4711, 0, ":ro", OWN, False),
}


def _repository(folder: Path, uid: int, gid: int) -> Path:
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "file").write_text("text")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, gid)
    folder.chmod(0o755)
    return folder


@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
async def test_a_bind_is_the_sandboxs_own(root: bool, image: Path, runtime: Runtime, open_folder: Path) -> None:
    folders = {what: f"b{number}" for number, what in enumerate(BINDS)}
    for what, (uid, gid, *_) in BINDS.items():
        _repository(open_folder / folders[what], uid, gid)
    binds = [f"{open_folder}/{folders[what]}:/mnt/{folders[what]}{BINDS[what][2]}" for what in BINDS]
    async with await Container.start(ContainerSpec(image=image, root=root, binds=binds), runtime) as container:
        for what, (uid, gid, _option, owner, writable) in BINDS.items():
            name, own = folders[what], owner if root or owner == NOBODY else "1000:1000"
            said = await container.run(f"cd /mnt/{name}; stat -c %u:%g . file; git status --short")
            assert said.stdout.splitlines()[:2] == [own, own], what
            assert ("dubious" not in said.stderr) == (owner == OWN), (what, said.stderr)
            assert ((await container.run(f"echo new > /mnt/{name}/new")).exit_code == 0) == writable, what
            if writable:
                found = (open_folder / name / "new").stat()
                assert (found.st_uid, found.st_gid) == (uid, gid)


async def test_files_and_folders_of_several_owners(image: Path, runtime: Runtime, open_folder: Path) -> None:
    for name, owner in (("one", 4711), ("two", 4713)):
        (open_folder / name).write_text(name)
        os.chown(open_folder / name, owner, owner)
    binds = [f"{open_folder}/one:/mnt/one", f"{open_folder}/two:/mnt/two:ro", f"{open_folder}:/srv:ro"]
    async with await Container.start(ContainerSpec(image=image, binds=binds), runtime) as container:
        said = await container.run("cat /mnt/one /mnt/two; echo; stat -c %u /mnt/one /mnt/two /srv /srv/one")
        assert said.stdout.split() == ["onetwo", "0", "0", "0", "65534"]
        assert (await container.run("echo 1 > /mnt/one")).exit_code == 0
        assert (await container.run("echo 1 > /mnt/two")).exit_code != 0


async def test_with_several_users_a_bind_is_roots(image: Path, runtime: Runtime, open_folder: Path, way: str) -> None:
    if way == "runtime":
        pytest.skip("several users need the direct way")
    host = _repository(open_folder / "repository", 4711, 4711)
    spec = ContainerSpec(image=image, users=True, binds=[f"{host}:/repository"])
    async with await Container.start(spec, runtime) as container:
        said = await container.run("cd /repository; stat -c %u:%g .; touch new; git status --short")
        assert said.stdout.splitlines()[0] == OWN
        assert said.exit_code == 0, said.stderr
    assert (host / "new").stat().st_uid == 4711
