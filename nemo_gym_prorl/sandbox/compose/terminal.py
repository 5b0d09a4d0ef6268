# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An interactive terminal in a sandbox, as NeMo Gym 0.7's ``SandboxPtySession`` wants it: bytes in, bytes out.

The session itself is the supervisor's (:mod:`.pty_server`): it lives until its program ends, somebody who opened it
closes it, or the sandbox goes. So another process can take it over by its id, and what it said meanwhile is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping

from nemo_gym.sandbox.providers import base

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.supervisor.pty_server import PACKET, SIZE, WORD
from nemo_gym_prorl.sandbox.supervisor.rpc.client import SandboxLost, SandboxRefused


BUFFERED = 1 << 20
"""Output that is taken ahead of who reads it; beyond that the program waits."""

DETACHED_LIMIT = 16 << 20
"""Bytes of output that a detached command may have."""

WORD_S = 3.0
"""How long the word of a session's shell, that a command has ended, may take once the end of its output is there."""

_GymError: type[Exception] = getattr(base, "SandboxPtyError", InfrastructureError)


class SessionEnded(SandboxLost, _GymError):  # type: ignore[misc,valid-type]  # Gym has no types
    """The session was taken over, closed, or lost with its sandbox: Gym's error, where it has one, and ours."""


class Terminal:
    """One session: a shell or a command, on a terminal (``mode`` ``pty``) or with three pipes (``pipe``)."""

    def __init__(
        self, container: Container, session_id: str, mode: str, group: int, holder: int, *, own: bool
    ) -> None:
        self.session_id = session_id
        self.mode: str | None = mode
        self.closed = False
        self._container = container
        self._group = group
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=holder)
        self._socket.setblocking(False)
        self._waiting: dict[str, deque[bytes]] = {"o": deque(), "e": deque()}
        self._buffered = 0
        self._code: int | None = None
        self._word: tuple[bytes, int] = (b"", 0)
        """The last that the program itself has said of a command: its mark and its status."""
        self._why = ""
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._taker = asyncio.create_task(self._take())

    @classmethod
    async def open(
        cls,
        container: Container,
        command: str | None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        size: tuple[int, int] | None = (24, 80),
        user: str | int | None = None,
    ) -> Terminal:
        """Start ``command``, or an interactive shell, on a terminal of ``size`` (rows, columns) or on pipes."""
        shell = "command -v bash >/dev/null && exec bash || exec sh"
        session_id = uuid.uuid4().hex
        argv = ["/bin/sh", "-c", shell if command is None else command]
        program = container.program(argv, cwd=cwd, env=env, user=user)
        try:
            await container.ask("open", **program, session=session_id, tty=size, echo=True)
            return await cls.attach(container, session_id, own=True)
        except SandboxRefused as error:
            if error.number:
                raise CallerError(error.reason, field="cwd" if cwd else None) from error
            raise
        except asyncio.CancelledError:
            container.post("hang_up", session=session_id)
            raise

    @classmethod
    async def attach(
        cls,
        container: Container,
        session_id: str,
        *,
        takeover: bool = True,
        since: int | None = None,
        own: bool = False,
    ) -> Terminal:
        """Hold an open session.

        Args:
            container: where it runs.
            session_id: of who opened it.
            takeover: if somebody holds it, take it from them; otherwise that is an error.
            since: read again from this byte of its output on, or from the first that is still kept; ``None`` to go on
                where the last holder was.
            own: end the session when this is closed, rather than let it live on.

        Raises:
            SessionEnded: there is no such session, or it is held.
        """
        try:
            answer, files = await container.ask("attach", session=session_id, takeover=takeover, since=since)
        except (SandboxRefused, SandboxLost) as error:
            raise SessionEnded(error.reason) from error
        return cls(container, session_id, answer["mode"], answer["group"], files[0], own=own)

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """The next output; ``b""`` at its end, when the process has ended.

        Raises:
            TimeoutError: there was none for so long.
            SessionEnded: it was taken over, or lost.
        """
        return await self._next("o", timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """As :meth:`read`, for the errors of a session on pipes; of one on a terminal nothing until its end."""
        return await self._next("e", timeout_s)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data

    async def write(self, data: bytes) -> None:
        """Type ``data``."""
        async with self._writing:
            for begin in range(0, len(data), PACKET):
                await self._send(b"i" + data[begin : begin + PACKET])

    async def resize(self, rows: int, cols: int) -> None:
        """Change the terminal's size."""
        await self._send(b"r" + SIZE.pack(rows, cols))

    async def send_signal(self, signal_name: str) -> None:
        """Send a signal, e.g. ``"SIGTERM"``, to the session's process group.

        Raises:
            CallerError: there is no such signal.
        """
        number = getattr(signal, signal_name, None)
        if not isinstance(number, signal.Signals):
            raise CallerError(f"there is no signal {signal_name!r}", field="signal")
        await self._container.ask("signal", spawn=self.session_id, signal=int(number))

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Wait for the process's end; its exit code, 128 + N after signal N. Output is kept for who reads."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self._code is not None or self._why)
            return self._exit_code()

    async def run_detached(self, command: str, *, poll_interval_s: float = 15.0) -> tuple[bytes, int | None]:
        """Run one command in the session's shell; its output and exit code. Nothing polls here.

        The output ends where the shell says so among what it writes, which a program may say as well if it finds out
        how. The exit code is the shell's own word, by a way of its own (:mod:`.pty_server`): in place of the name of a
        file that it can't open. It is ``None`` where the shell does not say it, since its file 3 was changed, say.

        Raises:
            InfrastructureError: its output was larger than what is kept.
            SessionEnded: the shell ended first.
        """
        # Nobody can know the mark, and a shell's echo of what is typed shows it in another form.
        mark = secrets.token_hex(16)
        begin, end = b"\x1e%s\n" % mark.encode(), b"\x1e%s " % mark.encode()
        # What can't be read can't be run: neither is there a program in it, nor what could stand for one.
        told = f"{{ :; }} 2>&3 <\"/{mark}/$?\" || printf '\\036%s \\n' {mark}"
        await self.write(
            f"printf '\\036%s\\n' {mark}; eval \"$(printf %b '{_typed(command)}')\" </dev/null 3>&-; {told}\n".encode()
        )
        seen = bytearray()
        while (at := seen.find(end)) < 0 or b"\n" not in seen[at:]:
            data = await self.read()
            if not data:
                raise SessionEnded("the shell ended before the command did")
            seen += data.replace(b"\r\n", b"\n") if self.mode == "pty" else data
            if len(seen) > DETACHED_LIMIT:
                raise InfrastructureError(f"a detached command's output is limited to {DETACHED_LIMIT} bytes")
        output = bytes(seen[:at])
        output = output[output.find(begin) + len(begin) :]
        return output, await self._status_of(mark.encode())

    async def _status_of(self, mark: bytes) -> int | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_S), self._changed:
                await self._changed.wait_for(lambda: self._word[0] == mark or self._code is not None or self._why)
        return self._word[1] if self._word[0] == mark else None

    async def close(self) -> None:
        """Let go of the session, and end it if it is this object's own. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._taker.cancel()
        await asyncio.wait([self._taker])
        self._socket.close()
        await self._note(why="the session is closed")
        if self._own and self._container.alive:
            await self._container.ask("hang_up", session=self.session_id)

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _send(self, packet: bytes) -> None:
        if self.closed or self._why or self._code is not None:
            raise SessionEnded(self._why or "the session has ended")
        try:
            await self._loop.sock_sendall(self._socket, packet)
        except OSError as error:
            raise SessionEnded("the session has ended") from error

    async def _take(self) -> None:
        """Take packets as they come, as long as somebody reads what came before."""
        while self._code is None and not self._why:
            async with self._changed:
                await self._changed.wait_for(lambda: self._buffered < BUFFERED)
            try:
                packet = await self._loop.sock_recv(self._socket, PACKET + 1)
            except OSError:
                packet = b""
            match packet[:1]:
                case b"o" | b"e":
                    await self._note(stream=packet[:1].decode(), data=packet[1:])
                case b"w" if word := WORD.fullmatch(packet[1:]):
                    await self._note(word=(word[1], int(word[2])))
                case b"x":
                    await self._note(code=int(packet[1:]))
                case b"t":
                    await self._note(why="the session was taken over by somebody else")
                case _:
                    await self._note(why="the session is lost, and its sandbox with it")

    async def _note(
        self,
        stream: str = "o",
        data: bytes = b"",
        code: int | None = None,
        why: str = "",
        word: tuple[bytes, int] | None = None,
    ) -> None:
        async with self._changed:
            self._word = word or self._word
            if data:
                self._waiting[stream].append(data)
                self._buffered += len(data)
            self._code = code if code is not None else self._code
            self._why = self._why or why
            self._changed.notify_all()

    async def _next(self, stream: str, timeout_s: float | None) -> bytes:
        waiting = self._waiting[stream]
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: waiting or self._code is not None or self._why)
            if not waiting:
                self._exit_code()
                return b""
            data = waiting.popleft()
            self._buffered -= len(data)
            self._changed.notify_all()
            return data

    def _exit_code(self) -> int:
        if self._code is None:
            raise SessionEnded(self._why)
        return self._code if self._code >= 0 else 128 - self._code


def _typed(command: str) -> str:
    """A command as an argument of ``printf %b`` between single quotes: no key that a line editor knows is in it."""
    plain = bytes(range(32, 127)).translate(None, b"'\\")
    return "".join(
        chr(byte) if byte in plain else f"\\0{byte:03o}" for byte in command.encode("utf-8", "surrogateescape")
    )
