# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Files that go into a sandbox and come out of it: only ordinary files, within bounds, never half of one.

What comes from memory, or stays there, never touches the host's disk. What is wrong with a path or a file is the
caller's, who named it; that the machine has no room is the machine's.

The other side is ``launcher/files.c``, where names are looked up inside of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym_prorl.failures import OF_THE_MACHINE, CallerError
from nemo_gym_prorl.sandbox.fields import SandboxPath, checked
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.protocol import GetRequest, PutRequest, Request, SandboxRefused


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.container import Container


FILE_LIMIT = 1 << 30
"""Largest file that is uploaded or downloaded."""


async def upload(container: Container, source: Path, target: str, limit: int = FILE_LIMIT) -> None:
    """Copy a file of the host to the absolute path ``target`` inside; missing folders are made.

    Raises:
        CallerError: not a file, too large for the ``limit`` or the sandbox, or the path inside is not one for a file.
        SandboxRefused: the machine has no room for it.
    """
    checked(target, SandboxPath, "target_path")
    descriptor = await asyncio.to_thread(_open_source, source, limit, container.spec.disk_mib)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        await _transfer(container, PutRequest(container.name, target, mode), descriptor, "target_path")
    finally:
        os.close(descriptor)


async def download(container: Container, source: str, target: Path, limit: int = FILE_LIMIT) -> None:
    """Copy the ordinary file at the absolute path ``source`` inside to the host. ``target`` is whole or untouched.

    Raises:
        CallerError: there is no such file, it is not an ordinary one, or it is too large; or nothing can be written at
            ``target``.
        SandboxRefused: the machine has no room for it.
    """
    checked(source, SandboxPath, "source_path")
    descriptor, fresh = await asyncio.to_thread(_open_target, target)
    try:
        await _transfer(container, GetRequest(container.name, source, limit), descriptor, "source_path")
        await asyncio.to_thread(fresh.replace, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


async def _transfer(container: Container, request: Request, descriptor: int, field: str) -> None:
    try:
        await container.ask(request, [descriptor])
    except SandboxRefused as error:
        if error.number and error.number not in OF_THE_MACHINE:
            raise CallerError(error.reason, field=field) from error
        raise


def _open_source(source: Path, limit: int, disk_mib: int) -> int:
    """Open an ordinary file of the host of at most ``limit`` bytes, which a sandbox may have."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CallerError(f"{source}: {error.strerror}", field="source_path") from error
    except ValueError as error:
        raise CallerError(f"{str(source)!r} can't be a path: {error}", field="source_path") from error
    found = os.fstat(descriptor)
    trouble = ""
    if not stat.S_ISREG(found.st_mode):
        trouble = "not an ordinary file; upload the files of a folder one by one, or as an archive"
    elif found.st_size > limit:
        trouble = f"larger than {limit} bytes: it has {found.st_size}"
    else:
        trouble = too_large(found.st_size, disk_mib)
    if trouble:
        os.close(descriptor)
        raise CallerError(f"{source} is {trouble}", field="source_path")
    return descriptor


def too_large(size: int, disk_mib: int) -> str:
    """Why a file of that size is none for a sandbox, which would be ended for it; empty if it may be."""
    if disk_mib and size > disk_mib << 20:
        return f"larger than all that the sandbox may write: {size} bytes, and disk_mib is {disk_mib}; raise that"
    return ""


def _open_target(target: Path) -> tuple[int, Path]:
    """Open a fresh file beside ``target``, to be renamed to it once it is whole."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(target.stat().st_mode):
                raise CallerError(f"{target} is a folder; name the file", field="target_path")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Its own name may be as long as names can be.
        descriptor, name = tempfile.mkstemp(prefix=".download-", dir=target.parent)
    except OSError as error:
        if error.errno in OF_THE_MACHINE:
            raise
        raise CallerError(f"{target} can't be written: {error.strerror}", field="target_path") from error
    except ValueError as error:
        raise CallerError(f"{str(target)!r} can't be a path: {error}", field="target_path") from error
    os.fchmod(descriptor, 0o644)
    return descriptor, Path(name)


async def read_file(container: Container, path: str, limit: int) -> bytes:
    """An ordinary file of the sandbox.

    Raises:
        OSError: what stands in the way inside; ``EFBIG`` if it has more than ``limit`` bytes.
        SandboxLost: the sandbox has ended.
    """
    kept = os.memfd_create("read", os.MFD_CLOEXEC)
    try:
        await _ask(container, GetRequest(container.name, path, limit), kept)
        return os.pread(kept, limit, 0)
    finally:
        os.close(kept)


async def write_file(container: Container, path: str, data: bytes) -> bool:
    """Write a file of the sandbox; one that is there keeps its permissions. Says whether there was one.

    Raises:
        OSError: what stands in the way inside; ``EFBIG`` if the sandbox may not write as much.
        SandboxLost: the sandbox has ended.
    """
    if trouble := too_large(len(data), container.spec.disk_mib):
        raise OSError(errno.EFBIG, f"{path} would be {trouble}")
    source = os.memfd_create("write", os.MFD_CLOEXEC)
    try:
        os.pwrite(source, data, 0)
        return bool((await _ask(container, PutRequest(container.name, path), source))["number"])
    finally:
        os.close(source)


async def _ask(container: Container, request: Request, file: int) -> Message:
    try:
        answer, _files = await container.ask(request, [file])
    except SandboxRefused as error:
        if error.number:
            raise OSError(error.number, os.strerror(error.number)) from error
        raise
    return answer
