# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher's executable as a sealed copy that can be executed, but neither read nor changed.

A process that executes an unreadable file is non-dumpable. So no program of a sandbox can trace a process of the
launcher, although both have the same user id. The copy is sealed because a sandboxed process can reach the executable
as ``/proc/PID/exe`` and could overwrite it (CVE-2019-5736).
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import syscalls


MACHINES = ("x86_64", "aarch64")
"""Architectures for which the build compiles a launcher (``setup.py``)."""

LAUNCHER, FIRST_PROCESS, ERASER = "launcher", "sandbox", "eraser"
"""First arguments (``argv[0]``) of the executable, which select its role."""

_COPY_CHUNK = 1 << 20  # bytes per sendfile call: more than the launcher's size


def launcher_path() -> Path:
    return Path(__file__).with_name(f"launcher-{os.uname().machine}")


def load_launcher(folder: Path) -> int:
    """Return a descriptor of a copy of the launcher that can only be executed.

    Args:
        folder: private folder for the copy, on machines that refuse to execute a memfd.

    Raises:
        OSError: this architecture has no launcher, or the launcher was not built.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"sandboxes run on {' and '.join(MACHINES)}, not on {machine}")
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
    """Return a descriptor of an unlinked copy in ``folder``; not sealed, but the kernel refuses writes to a file while
    it is executed."""
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
