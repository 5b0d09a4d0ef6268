# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A sandboxed program can't change the launcher by executing it as ``/proc/self/exe`` (CVE-2019-5736).

For a process that is about to become a script, ``/proc/self/exe`` is the launcher. The launcher has no dynamic loader
that an image could replace, does nothing without its socket, and is a sealed copy.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox import launcher
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.elf import executable
from tests.sandbox.without import Off, Without


pytestmark = pytest.mark.sandbox

LOADER = "/lib64/ld-linux-x86-64.so.2"

ATTACK = bytes.fromhex(
    # chmod("/proc/self/exe", 0777); exit(42)
    "488d3d18000000 beff010000 b85a000000 0f05 bf2a000000 b83c000000 0f05"
)


def evil_loader() -> bytes:
    """Return a dynamic loader that changes the mode of the program that it loads."""
    return executable(ATTACK + b"/proc/self/exe\0")


def python_of_ones_own(folder: Path) -> Path:
    """Return a copy of the Python executable that belongs to this user."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(Path(sys.base_prefix) / "lib")
    python = folder / "bin" / Path(sys.executable).resolve().name
    shutil.copyfile(Path(sys.executable).resolve(), python)
    python.chmod(0o755)
    return python


async def attack(image: Path, loader: Path, script: Path) -> None:
    """Start the attack in sandboxes of both ways; runs in a process whose Python is the victim."""
    for start in ("direct", "runtime"):
        async with await Container.start(ContainerSpec(image=image, start=start)) as container:  # type: ignore[arg-type]
            await container.files.upload(loader, LOADER)
            await container.files.upload(script, "/bin/sh")
            # The launcher starts commands there; without its socket it exits with 127.
            assert (await container.run("true")).exit_code == 127
    print("attacked")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the attack is in machine code")
def test_the_hosts_python_stays_as_it_is(image: Path, runtime: Runtime, tmp_path: Path) -> None:
    """The victim belongs to an ordinary user; a sandbox of root has no such file."""
    python = python_of_ones_own(tmp_path / "python")
    before = python.read_bytes()
    (tmp_path / "loader").write_bytes(evil_loader())
    (tmp_path / "script").write_text("#!/proc/self/exe\n")
    for name in ("loader", "script"):
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [python, __file__, str(image), str(tmp_path / "loader"), str(tmp_path / "script")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
            "PATH": f"{runtime.path.parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("attacked\n"), done.stderr[-3000:]
    assert stat.S_IMODE(python.stat().st_mode) == 0o755
    assert python.read_bytes() == before


def test_the_copy_is_sealed_and_closed(tmp_path: Path) -> None:
    copy = launcher.load_launcher(tmp_path)
    with pytest.raises(PermissionError):
        os.pwrite(copy, b"x", 0)
    with pytest.raises(PermissionError):
        os.truncate(copy, 0)
    assert os.pread(copy, 1 << 20, 0) == launcher.launcher_path().read_bytes()
    assert stat.S_IMODE(os.fstat(copy).st_mode) == 0o111
    os.close(copy)


async def test_sandboxes_start_without_memory_files(image: Path, runtime: Runtime, without: Without) -> None:
    without(Off("def forbidden(*_):\n    raise PermissionError\nsyscalls.create_executable_memfd = forbidden"))
    async with await Container.start(ContainerSpec(image=image, start="direct"), runtime) as container:
        assert (await container.run("echo works")).stdout == "works\n"


if __name__ == "__main__":
    asyncio.run(attack(*map(Path, sys.argv[1:])))
