# SPDX-License-Identifier: Apache-2.0
"""An interactive terminal in a sandbox, as NeMo Gym 0.7's ``SandboxPtySession`` wants it: bytes in, bytes out."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import struct
import termios
import time
import uuid
from collections.abc import AsyncIterator, Mapping

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.link import Process, SandboxLost, writable


CHUNK = 1 << 16


class Terminal:
    """One session: a shell or a command, on a terminal (``mode`` ``pty``) or with three pipes (``pipe``)."""

    def __init__(self, container: Container, process: Process, files: tuple[int, int, int | None]) -> None:
        self.session_id = uuid.uuid4().hex
        self.mode: str | None = "pipe" if process.terminal is None else "pty"
        self.closed = False
        self._container = container
        self._process = process
        self._stdin, self._stdout, self._stderr = files
        for descriptor in {descriptor for descriptor in files if descriptor is not None}:
            os.set_blocking(descriptor, False)

    @classmethod
    async def open(
        cls,
        container: Container,
        command: str | None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        size: tuple[int, int] | None = (24, 80),
    ) -> Terminal:
        """Start ``command``, or an interactive shell, on a terminal of ``size`` (rows, columns) or on pipes."""
        argv = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash || exec sh"] if command is None else None
        argv = argv or ["/bin/sh", "-c", command or ""]
        if size:
            process = await container.spawn(argv, cwd=cwd, env=env, terminal=size, echo=True)
            assert process.terminal is not None
            return cls(container, process, (process.terminal, process.terminal, None))
        inward, outward, errors = os.pipe(), os.pipe(), os.pipe()
        theirs, ours = (inward[0], outward[1], errors[1]), (inward[1], outward[0], errors[0])
        try:
            process = await container.spawn(argv, [container.give(end) for end in theirs], cwd=cwd, env=env)
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return cls(container, process, ours)

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """The next output; ``b""`` at its end.

        Raises:
            TimeoutError: there was none for so long.
            SandboxLost: the sandbox is gone.
        """
        return await self._read(self._stdout, timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """As :meth:`read`, for the errors of a session on pipes; of one on a terminal nothing until its end."""
        if self._stderr is None:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._process.ended)
            return b""
        return await self._read(self._stderr, timeout_s)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data

    async def write(self, data: bytes) -> None:
        """Type ``data``."""
        self._check_open()
        while data:
            try:
                data = data[os.write(self._stdin, data) :]
            except BlockingIOError:
                await writable(self._stdin)
            except OSError as error:
                raise SandboxLost("the session has ended") from error

    async def resize(self, rows: int, cols: int) -> None:
        """Change the terminal's size."""
        self._check_open()
        if self.mode == "pty":
            fcntl.ioctl(self._stdout, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    async def send_signal(self, signal_name: str) -> None:
        """Send a signal, e.g. ``"SIGTERM"``, to the session's process group.

        Raises:
            CallerError: there is no such signal.
        """
        number = getattr(signal, signal_name, None)
        if not isinstance(number, signal.Signals):
            raise CallerError(f"there is no signal {signal_name!r}", field="signal")
        await self._container.signal(self._process, number)

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Wait for the process's end; its exit code, 128 + N after signal N."""
        async with asyncio.timeout(timeout_s):
            code = await asyncio.shield(self._process.ended)
        return code if code >= 0 else 128 - code

    async def run_detached(self, command: str, *, poll_interval_s: float = 15.0) -> tuple[bytes, int | None]:
        """Run one command beside the session; its output and exit code. Nothing polls here.

        Raises:
            InfrastructureError: its output was larger than what is kept.
        """
        done = await self._container.run(f"{{ {command}\n}} 2>&1", timeout_s=None)
        if done.omitted:
            raise InfrastructureError(f"{done.omitted} bytes of output are too many to return")
        return done.stdout.encode(), done.exit_code

    async def close(self) -> None:
        """End the session. May be called again."""
        if self.closed:
            return
        self.closed = True
        loop = asyncio.get_running_loop()
        for descriptor in {self._stdin, self._stdout, self._stderr} - {None}:
            assert descriptor is not None
            loop.remove_reader(descriptor)
            os.close(descriptor)
        if self._container.alive and not self._process.ended.done():
            await self._container.signal(self._process, signal.SIGKILL)

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxLost("the session is closed")

    async def _read(self, descriptor: int, timeout_s: float | None) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check_open()
            try:
                return os.read(descriptor, CHUNK)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno == errno.EIO:
                    return b""
                raise
            ready = asyncio.Event()
            loop.add_reader(descriptor, ready.set)
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    await ready.wait()
            finally:
                loop.remove_reader(descriptor)
