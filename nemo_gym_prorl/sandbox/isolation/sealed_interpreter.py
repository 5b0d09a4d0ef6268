# SPDX-License-Identifier: Apache-2.0
"""The Python that supervisors run from: a copy that nobody can change, in place of the machine's own.

A program of an image may be a script whose interpreter is ``/proc/self/exe``. The kernel then runs, inside, what the
process that was to become that program had been until then: a child of the supervisor, hence Python, with libraries of
the image in it. Such a process may open its own executable; where that is the user's own file, as with uv, conda or
pyenv, it could change the host's Python (known from CVE-2019-5736). A sealed copy in memory leaves nothing to change.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import syscalls


LIBRARY_PATH = "LD_LIBRARY_PATH"

_COPY_CHUNK = 1 << 24


@contextlib.contextmanager
def sealed_interpreter(folder: Path) -> Iterator[int]:
    """A copy of this process's Python, as a descriptor to execute; with the original's path as its first argument it
    finds its standard library.

    Args:
        folder: where a private file may be made for a moment, on a machine that executes no memory files.
    """
    source = os.open(os.path.realpath(sys.executable), os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy = _in_memory(source)
    except PermissionError:
        copy = _in_file(source, folder)
    finally:
        os.close(source)
    try:
        yield copy
    finally:
        os.close(copy)


def library_path() -> dict[str, str]:
    """The variable by which the copy finds the libraries that the original finds, by its own place or by ours."""
    prefix = f"{os.path.realpath(sys.base_prefix)}/"
    folders = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[1:]
            folder, _, name = "".join(path).rpartition("/")
            # Its own library may lie elsewhere, behind a link that it follows from where it is itself.
            ours = folder.startswith(prefix) or name.startswith("libpython")
            if ours and name.startswith("lib") and ".so" in name:
                folders[folder] = True
    given = os.environ.get(LIBRARY_PATH)
    found = [*folders, *([given] if given else [])]
    return {LIBRARY_PATH: os.pathsep.join(found)} if found else {}


def _in_memory(source: int) -> int:
    copy = syscalls.executable_memory("python")
    _copy(source, copy)
    os.fchmod(copy, 0o555)
    syscalls.seal(copy)
    return copy


def _in_file(source: int, folder: Path) -> int:
    """A file without a name. As long as it runs the kernel lets nobody write to it."""
    descriptor, path = tempfile.mkstemp(dir=folder)
    try:
        _copy(source, descriptor)
        os.fchmod(descriptor, 0o500)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _copy(source: int, target: int) -> None:
    offset = 0
    while copied := os.sendfile(target, source, offset, _COPY_CHUNK):
        offset += copied
