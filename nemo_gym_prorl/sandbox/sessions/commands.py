# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run a command without a terminal, with a time limit, and collect its output up to a size limit.

:class:`HeadTail` keeps the beginning and the end of an output stream and counts the omitted bytes. Shell and kernel
sessions also use this class.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.strict_types import AnyText, checked
from nemo_gym_prorl.sandbox.supervisor.client import SandboxProcess


class HeadTail:
    """Buffer of the first and last bytes of a stream, up to ``limit // 2`` each; ``total`` counts all bytes added."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._half = max(1, limit // 2)
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            # Keep a slice: a reference to large data would keep all of it in memory.
            self._tail.append(data[-self._half :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def omitted(self) -> int:
        """Number of bytes that :meth:`text` omits, including the remaining bytes of characters cut in two."""
        head, tail = self._ends()
        return self.total - len(head) - len(tail)

    def text(self) -> str:
        """Return the kept bytes decoded, with U+FFFD for invalid UTF-8 and one line in place of omitted bytes."""
        head, tail = self._ends()
        omitted = self.total - len(head) - len(tail)
        if not omitted:
            return (head + tail).decode("utf-8", "replace")
        between = f"\n[... {omitted} bytes omitted ...]\n"
        return head.decode("utf-8", "replace") + between + tail.decode("utf-8", "replace")

    def _ends(self) -> tuple[bytes, bytes]:
        """Return the first and the last bytes; if bytes between them are omitted, without characters cut in two."""
        head, tail = bytes(self._head), b"".join(self._tail)[-self._half :]
        if len(head) + len(tail) == self.total:
            return head, tail
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(head)
        cut = len(decoder.getstate()[0])
        begin = next((i for i, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), min(3, len(tail)))
        return head[: len(head) - cut], tail[begin:]


OUTPUT_LIMIT = 1 << 20
"""Default limit in bytes of each output stream of a command: bounds the server's memory per command."""

DEFAULT_EXEC_TIMEOUT_S = 180.0  # Gym's default for a command

DEATH_S = 1.0
"""Seconds to wait for the exit of a killed process, which takes milliseconds unless it is in I/O or traced."""

MAX_ARGUMENT_BYTES = 100_000
"""Commands of this size or more are passed as a file; the kernel's limit for one argument is 128 KiB."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Result of a command.

    Attributes:
        stdout: standard output within the limit, with one line in place of omitted bytes.
        stderr: standard error, likewise.
        exit_code: exit code as a shell reports it: 128 + N after signal N.
        timed_out: whether the command was killed at its time limit.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool


@contextlib.contextmanager
def shell_command(command: str) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the argument list that runs a command with ``/bin/sh``, and the descriptors to pass as files from 3 on.

    The descriptors are closed at the end of the block.

    Raises:
        CallerError: the command is not valid text.
    """
    checked(command, AnyText, "command")
    encoded = command.encode("utf-8", "surrogateescape")
    if len(encoded) < MAX_ARGUMENT_BYTES:
        yield ["/bin/sh", "-c", command], []
        return
    script = os.memfd_create("command", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(script), "wb") as file:
            file.write(encoded)
        os.lseek(script, 0, os.SEEK_SET)
        yield ["/bin/sh", "/dev/fd/3"], [script]
    finally:
        os.close(script)


async def complete(
    spawn: Callable[[Sequence[int]], Awaitable[SandboxProcess]],
    kill: Callable[[SandboxProcess], None],
    timeout_s: float | None,
    output_limit: int,
) -> Completed:
    """Start a process and wait for its exit. The process is killed at its time limit or if the call is cancelled.

    The time limit includes the start, which running programs of the sandbox can delay.

    Args:
        spawn: starts the process, given descriptors for its standard input (empty), output and error. Cancelling
            ``spawn`` must leave no process.
        output_limit: bytes to keep of each output stream.
    """
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    streams = [_Stream(output_limit), _Stream(output_limit)]
    passed = [null, *(stream.writer for stream in streams)]
    code, timed_out = -signal.SIGKILL, False
    process: SandboxProcess | None = None
    try:
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    process = await spawn(passed)
                finally:
                    for descriptor in passed:
                        os.close(descriptor)
                code = await asyncio.shield(process.ended)
        except TimeoutError:
            timed_out = True
            if process:
                kill(process)
                # Bounded: a process in uninterruptible I/O survives SIGKILL.
                await asyncio.wait([process.ended], timeout=DEATH_S)
        except asyncio.CancelledError:
            if process:
                kill(process)
            raise
    finally:
        for stream in streams:
            stream.finish()
    stdout, stderr = (stream.kept.text() for stream in streams)
    return Completed(
        stdout,
        stderr,
        exit_code=code if code >= 0 else 128 - code,
        timed_out=timed_out,
    )


class _Stream:
    """One output stream of a command: a pipe whose reading end the event loop drains."""

    def __init__(self, limit: int) -> None:
        self.kept = HeadTail(limit)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._reader)
        self.kept.add(data)
        return bool(data)

    def finish(self) -> None:
        """Read the output that is already in the pipe, and close the pipe."""
        for _ in range(64):  # bounded, since background processes may write for ever
            if not self._read():
                break
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
