# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Copy files into and out of a sandbox: regular files only, within size limits, and atomically.

Uploads from memory and downloads to memory are never written to a temporary file of the host. A wrong path or file is
a :class:`.CallerError`; a full disk of the machine is a :class:`.SandboxRefused`.

``launcher/files.c`` opens the paths inside the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import MACHINE_ERRNOS, CallerError
from nemo_gym_prorl.sandbox.strict_types import SandboxPath, checked
from nemo_gym_prorl.sandbox.supervisor.connection import Message
from nemo_gym_prorl.sandbox.supervisor.protocol import GetRequest, PutRequest, Request, SandboxRefused


FILE_LIMIT = 1 << 30
"""Size limit of uploads and downloads in bytes; larger data belongs in a bind or an image."""

Ask = Callable[[Request, Sequence[int]], Awaitable[tuple[Message, list[int]]]]
"""Sends a request and file descriptors to the sandbox's supervisor; returns the reply and its file descriptors."""


class FileTransfer:
    """File copies between the host and one sandbox.

    Args:
        disk_mib: disk limit of the sandbox in MiB; 0 for none.
    """

    def __init__(self, sandbox: str, disk_mib: int, ask: Ask) -> None:
        self._sandbox = sandbox
        self._disk_mib = disk_mib
        self._ask = ask

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file of the host to the absolute path ``target`` in the sandbox; create missing folders.

        Raises:
            CallerError: ``source`` is not a regular file or is too large, or ``target`` cannot be written.
            SandboxRefused: the machine's disk is full.
        """
        checked(target, SandboxPath, "target_path")
        descriptor = await asyncio.to_thread(_open_source, source, self._disk_mib)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            await self._transfer(PutRequest(self._sandbox, target, mode), descriptor, "target_path")
        finally:
            os.close(descriptor)

    async def download(self, source: str, target: Path) -> None:
        """Copy the regular file at the absolute path ``source`` in the sandbox to the host, atomically.

        Raises:
            CallerError: ``source`` is missing, not a regular file or too large, or ``target`` cannot be written.
            SandboxRefused, OSError: the machine's disk is full, or has no file descriptors left.
        """
        checked(source, SandboxPath, "source_path")
        descriptor, fresh = await asyncio.to_thread(_open_target, target)
        try:
            await self._transfer(GetRequest(self._sandbox, source, FILE_LIMIT), descriptor, "source_path")
            await asyncio.to_thread(fresh.replace, target)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    async def read_file(self, path: str, limit: int) -> bytes:
        """Return the contents of the regular file at an absolute path in the sandbox.

        Raises:
            OSError: the file cannot be read; ``EFBIG`` if it has more than ``limit`` bytes.
            AgentError, SandboxLost: the sandbox has ended.
        """
        contents = os.memfd_create("read", os.MFD_CLOEXEC)
        try:
            await self._ask_file(GetRequest(self._sandbox, path, limit), contents)
            return os.pread(contents, limit, 0)
        finally:
            os.close(contents)

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a file in the sandbox; return whether the file existed. An existing file keeps its permissions.

        Raises:
            OSError: the file cannot be written; ``EFBIG`` if ``data`` exceeds the sandbox's disk limit.
            AgentError, SandboxLost: the sandbox has ended.
        """
        if trouble := _over_disk_limit(len(data), self._disk_mib):
            raise OSError(errno.EFBIG, f"{path} would be {trouble}")
        contents = os.memfd_create("write", os.MFD_CLOEXEC)
        try:
            os.pwrite(contents, data, 0)
            return bool((await self._ask_file(PutRequest(self._sandbox, path), contents))["number"])
        finally:
            os.close(contents)

    async def _transfer(self, request: Request, descriptor: int, field: str) -> None:
        try:
            await self._ask(request, [descriptor])
        except SandboxRefused as error:
            if error.number and error.number not in MACHINE_ERRNOS:
                raise CallerError(error.reason, field=field) from error
            raise

    async def _ask_file(self, request: Request, file: int) -> Message:
        try:
            reply, _files = await self._ask(request, [file])
        except SandboxRefused as error:
            if error.number:
                raise OSError(error.number, os.strerror(error.number)) from error
            raise
        return reply


def _open_source(source: Path, disk_mib: int) -> int:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CallerError(f"{source}: {error.strerror}", field="source_path") from error
    found = os.fstat(descriptor)
    trouble = ""
    if not stat.S_ISREG(found.st_mode):
        trouble = "not an ordinary file; upload the files of a folder one by one, or as an archive"
    elif found.st_size > FILE_LIMIT:
        trouble = f"larger than {FILE_LIMIT} bytes: it has {found.st_size}"
    else:
        trouble = _over_disk_limit(found.st_size, disk_mib)
    if trouble:
        os.close(descriptor)
        raise CallerError(f"{source} is {trouble}", field="source_path")
    return descriptor


def _over_disk_limit(size: int, disk_mib: int) -> str:
    if disk_mib and size > disk_mib << 20:
        return f"larger than the sandbox's disk limit: {size} bytes, and disk_mib is {disk_mib}; raise disk_mib"
    return ""


def _open_target(target: Path) -> tuple[int, Path]:
    """Open a temporary file in the folder of ``target``, which the caller renames to ``target``."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(target.stat().st_mode):
                raise CallerError(f"{target} is a folder; name the file", field="target_path")
        target.parent.mkdir(parents=True, exist_ok=True)
        # The temporary name does not contain the target's name, which may have the maximum length.
        descriptor, name = tempfile.mkstemp(prefix=".download-", dir=target.parent)
    except OSError as error:
        if error.errno in MACHINE_ERRNOS:
            raise
        raise CallerError(f"{target} can't be written: {error.strerror}", field="target_path") from error
    os.fchmod(descriptor, 0o644)
    return descriptor, Path(name)
