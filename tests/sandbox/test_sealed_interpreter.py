# SPDX-License-Identifier: Apache-2.0
"""A program of a sandbox that has itself run as the host's Python can't change that: known from CVE-2019-5736.

The kernel runs a script's interpreter, and ``/proc/self/exe`` is, for the process that is about to become the script,
what it is now: the supervisor's Python. With a loader of its own in the image it is the attacker's program that runs,
and its executable is that Python.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.sealed_interpreter import library_path, sealed_interpreter
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor.rpc import own_supervisor


pytestmark = pytest.mark.sandbox

LOADER = "/lib64/ld-linux-x86-64.so.2"

ATTACK = bytes.fromhex(
    # chmod("/proc/self/exe", 0777); exit(42)
    "488d3d18000000 beff010000 b85a000000 0f05 bf2a000000 b83c000000 0f05"
)


def evil_loader() -> bytes:
    """A dynamic loader that does nothing but change the mode of the program that it is to load."""
    body = ATTACK + b"/proc/self/exe\0"
    size = 64 + 56 + len(body)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, size - len(body), 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 0x1000) + body


def python_of_ones_own(folder: Path) -> Path:
    """A Python that belongs to this user: an executable of its own, with the library and modules of the real one."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(Path(sys.base_prefix) / "lib")
    program = folder / "bin" / Path(sys.executable).resolve().name
    shutil.copyfile(Path(sys.executable).resolve(), program)
    program.chmod(0o755)
    return program


async def attack(image: Path, loader: Path, script: Path) -> None:
    """In a process of its own, whose Python is the victim."""
    for start in ("mould", "runtime"):
        async with await Container.start(ContainerSpec(image=image, start=start)) as container:  # type: ignore[arg-type]
            await container.upload(loader, LOADER)
            await container.upload(script, "/bin/sh")
            done = await container.run("true", user="root")
            assert done.exit_code == 42, "the attacker's program did not run"
            if start == "mould":
                # What starts most commands there is no Python, has no loader, and without its channel does nothing.
                assert (await container.run("true")).exit_code == 127
    print("attacked")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the attack is in machine code")
def test_the_hosts_python_stays_as_it_is(image: Path, runtime: Runtime, tmp_path: Path) -> None:
    """Of an ordinary user it is his own file; root's belongs to nobody inside in any case."""
    program = python_of_ones_own(tmp_path / "python")
    before = program.read_bytes()
    (tmp_path / "loader").write_bytes(evil_loader())
    (tmp_path / "script").write_text("#!/proc/self/exe\n")
    for name in ("loader", "script"):
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [program, __file__, str(image), str(tmp_path / "loader"), str(tmp_path / "script")],
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
    assert stat.S_IMODE(program.stat().st_mode) == 0o755
    assert program.read_bytes() == before


def test_the_copy_is_sealed(tmp_path: Path) -> None:
    with sealed_interpreter(tmp_path) as copy:
        assert os.pread(copy, 1 << 26, 0) == Path(sys.executable).resolve().read_bytes()
        with pytest.raises(PermissionError):
            os.pwrite(copy, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(copy, 0)


def test_without_memory_files_it_is_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_arguments: object) -> int:
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with sealed_interpreter(tmp_path) as copy:
        assert list(tmp_path.iterdir()) == []
        said = subprocess.check_output(
            [sys.executable, "-c", "print(40 + 2)"],
            executable=f"/proc/self/fd/{copy}",
            pass_fds=[copy],
            text=True,
            env={**os.environ, **library_path()},
        )
    assert said == "42\n"


async def test_the_supervisor_runs_from_it(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image), runtime):
        assert own_supervisor._current
        # Even its own user may not look, where its path is not his.
        program = await asyncio.to_thread(os.readlink, f"/proc/{own_supervisor._current.popen.pid}/exe")
    assert program.startswith("/memfd:python")


if __name__ == "__main__":
    asyncio.run(attack(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
