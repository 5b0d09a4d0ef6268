# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands without a terminal: their output collected up to a limit, their time limit kept.

:class:`HeadTail` holds output of any size in bounded memory: the beginning and the end are kept, what is between is
counted. Shells and kernels use it too.
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

from nemo_gym_prorl.sandbox.fields import Command, checked
from nemo_gym_prorl.sandbox.supervisor.client import Process


class HeadTail:
    """Keeps the first and the last bytes of a stream, half of ``limit`` each, and knows how many there were."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._half = max(1, limit // 2)
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            # Not what can't be among the last bytes: it would be held with them.
            self._tail.append(data[-self._half :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def omitted(self) -> int:
        """Bytes that were not kept, or of which a part was not kept."""
        head, tail = self._ends()
        return self.total - len(head) - len(tail)

    def text(self) -> str:
        """What was kept, invalid UTF-8 replaced, with one line that says how many bytes are left out."""
        head, tail = self._ends()
        omitted = self.total - len(head) - len(tail)
        if not omitted:
            return (head + tail).decode("utf-8", "replace")
        between = f"\n[... {omitted} bytes omitted ...]\n"
        return head.decode("utf-8", "replace") + between + tail.decode("utf-8", "replace")

    def _ends(self) -> tuple[bytes, bytes]:
        """Beginning and end; if something is missing between them, without the halves of a character that was cut."""
        head, tail = bytes(self._head), b"".join(self._tail)[-self._half :]
        if len(head) + len(tail) == self.total:
            return head, tail
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(head)
        cut = len(decoder.getstate()[0])
        begin = next((i for i, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), min(3, len(tail)))
        return head[: len(head) - cut], tail[begin:]


OUTPUT_LIMIT = 1 << 20
"""Bytes kept of each output stream of a command, half from its beginning and half from its end."""

DEFAULT_EXEC_TIMEOUT_S = 180.0

DEATH_S = 1.0
"""How long a killed process is waited for."""

LARGEST_ARGUMENT = 100_000
"""Bytes. A longer command travels as a file; the kernel takes no argument beyond 128 KiB."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of a command.

    Attributes:
        stdout: its output, at most the limit, with one line in place of what is left out.
        stderr: the same of its errors.
        exit_code: as a shell would say: 128 + N after signal N.
        timed_out: it was killed because its time was up.
        omitted: bytes of output left out.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    omitted: int


@contextlib.contextmanager
def shell_command(command: str) -> Iterator[tuple[list[str], list[int]]]:
    """What to execute for a command of ``/bin/sh`` of any length: arguments, and open files from 3 on.

    Raises:
        CallerError: it can't be one.
    """
    checked(command, Command, "command")
    encoded = command.encode("utf-8", "surrogateescape")
    if len(encoded) < LARGEST_ARGUMENT:
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
    spawn: Callable[[Sequence[int]], Awaitable[Process]],
    kill: Callable[[Process], None],
    timeout_s: float | None,
    output_limit: int,
) -> Completed:
    """Start a process and wait for its end, or make it end when its time is up or the caller goes away.

    Its time begins before it is asked for: what runs inside already can hold up those who come.

    Args:
        spawn: starts it with these open files from 0 on: empty input, and its two output streams. Cancelled, it sees
            to it that nothing runs.
        kill: kills its process group.
        timeout_s: how long it may run.
        output_limit: bytes to keep of each stream.
    """
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    streams = [_Stream(output_limit), _Stream(output_limit)]
    passed = [null, *(stream.writer for stream in streams)]
    code, timed_out = -signal.SIGKILL, False
    process: Process | None = None
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
                # One that waits for a device does not even die then; its caller need not wait for that.
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
        omitted=sum(stream.kept.omitted for stream in streams),
    )


class _Stream:
    """One output stream of a command: the writing end is the command's, the reading end is drained by the loop."""

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
        """Take what is there, and close. Bounded, since what runs on in the background may write for ever."""
        for _ in range(64):
            if not self._read():
                break
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
