# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher as an executable that nobody may read or change.

That nobody may read it makes the kernel treat its processes as such whose memory and paths are nobody's but their
owner's: no program of a sandbox can trace one, though all have the same user id. That it is a copy, and sealed, leaves
nothing to change for who might have it executed inside as ``/proc/self/exe`` (known from CVE-2019-5736).
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import syscalls


MACHINES = ("x86_64", "aarch64")
"""Those for which the build makes one (``setup.py``)."""

LAUNCHER, FIRST_PROCESS, ERASER = "launcher", "sandbox", "eraser"
"""What it is to be is told by its name."""

_COPY_CHUNK = 1 << 20


def launcher_path() -> Path:
    """Where this machine's lies."""
    return Path(__file__).with_name(f"launcher-{os.uname().machine}")


def load_launcher(folder: Path) -> int:
    """The program, as a descriptor to be executed.

    Args:
        folder: where a private file may be made for a moment, on a machine that executes no memory files.

    Raises:
        OSError: there is none for this architecture, or it was not built.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"there is no launcher for {machine}")
    try:
        source = os.open(launcher_path(), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise OSError(
            errno.ENOENT,
            "the launcher was not built: install the package again (in a clone: make setup)",
            str(launcher_path()),
        ) from error
    try:
        return _in_memory(source)
    except PermissionError:
        return _in_file(source, folder)
    finally:
        os.close(source)


def _in_memory(source: int) -> int:
    copy = syscalls.create_executable_memfd(LAUNCHER)
    _copy(source, copy)
    os.fchmod(copy, 0o111)
    syscalls.seal_memfd(copy)
    return copy


def _in_file(source: int, folder: Path) -> int:
    """A file without a name, where memory is not executed. As long as it runs the kernel lets nobody write to it."""
    descriptor, path = tempfile.mkstemp(dir=folder)
    try:
        _copy(source, descriptor)
        os.fchmod(descriptor, 0o111)
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _copy(source: int, target: int) -> None:
    offset = 0
    while copied := os.sendfile(target, source, offset, _COPY_CHUNK):
        offset += copied
