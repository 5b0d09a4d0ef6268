# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An IPython kernel in a sandbox, spoken to directly: ZeroMQ's protocol on Unix sockets in a folder of that sandbox.

No port is open and no gateway stands between, so a sandbox without network can have one. The sockets lie outside of
the sandbox's own ``/tmp``, which agents like to empty. Requests are signed with a key that travels in a file that only
the sandbox's user can read; nothing is on a command line.

Every wait ends with the kernel: a dead one is reported, not waited for. A program of the agent's can speak in its
place; what no kernel says ends the kernel (:class:`KernelBroken`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import stat
import struct
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.background import run_uncancellable
from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.container import SHARED_FOLDER, Container
from nemo_gym_prorl.sandbox.sessions.broken import check_agents, why_over
from nemo_gym_prorl.sandbox.sessions.commands import DEATH_S
from nemo_gym_prorl.sandbox.sessions.jupyter import channel as jupyter_channel
from nemo_gym_prorl.sandbox.sessions.jupyter.channel import Channel
from nemo_gym_prorl.sandbox.sessions.jupyter.messages import SIGNED_WITH, Message, MessageReader, Requests
from nemo_gym_prorl.sandbox.sessions.jupyter.zmtp import Violation
from nemo_gym_prorl.sandbox.sessions.output import HeadTail
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxBroken
from nemo_gym_prorl.sandbox.supervisor.rpc.client import Process, SandboxLost
from nemo_gym_prorl.session_results import Cell


OUTPUT_LIMIT = 64 << 10
"""Bytes of a cell's text, and of its traceback, that are kept."""

DATA_LIMIT = 16 << 20
"""Bytes of a cell's rich results that are kept: some large images."""

RESULT_COST = 1 << 10
"""Bytes that a result takes, and each MIME type of it, however short it is."""

START_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 180.0
INTERRUPT_GRACE_S = 2.0
"""How long a cell may take to end after it was interrupted; then the kernel is killed."""

IDLE_GRACE_S = 1.0
"""How long the last output may take to come after the kernel's answer. In a flood the kernel drops what we do not take
in time, and the word that it is idle may be among that."""

KERNEL = ("python3", "-c", Path(__file__).with_name("kernel_program.py").read_text())
"""Command that starts a kernel, without its last argument: the path of the connection file."""

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_POLL_S = 0.003
_HEARD_S = 0.01
"""How long an answer may take on the output channel before it is asked for again."""

_LOG_KEPT = 2000
_CREDENTIALS = struct.Struct("3i")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class KernelBroken(AgentError):
    """What speaks as the kernel does not speak as one, and was ended: what runs in the sandbox has taken its place."""


class _Running:
    """Collects the output of one cell. ``over`` is done once the kernel has answered and is idle again."""

    KINDS = frozenset(
        {"stream", "execute_result", "display_data", "update_display_data", "clear_output", "error", "status"}
    )

    def __init__(self, request: str, limit: int) -> None:
        self.request = request
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._answered = self.idle = False
        self._failure: str | None = None
        self._error: str | None = None
        self._omitted = 0
        self._clears = False
        self._clear()

    def print(self, text: bytes) -> None:
        """Add printed text."""
        if self._clears:
            self._clear()
        self._kept.add(text)

    def take(self, message: Message) -> None:
        """Add a message of the output channel."""
        content = message.content
        self._omitted += message.unread
        match message.kind:
            case "stream":
                self.print(_bytes(content.get("text", "")))
            case "execute_result" | "display_data" | "update_display_data" if isinstance(content.get("data"), Mapping):
                if self._clears:
                    self._clear()
                transient = content.get("transient")
                shown = transient.get("display_id") if isinstance(transient, Mapping) else None
                data = {kind: _text(value) for kind, value in content["data"].items()}
                self._take_data(data, shown, update=message.kind == "update_display_data")
            case "clear_output" if content.get("wait"):
                self._clears = True
            case "clear_output":
                self._clear()
            case "error":
                self._error = self._traceback(content)
            case "status" if content.get("execution_state") == "idle":
                self.idle = True
                self._end_if_complete()

    def answer(self, content: Mapping[str, Any]) -> None:
        """Take the kernel's reply: it says that a cell failed whose traceback was printed or not shown at all."""
        payload = content.get("payload")
        for page in payload if isinstance(payload, list) else ():  # as of ``len?``
            data = page.get("data") if isinstance(page, Mapping) else None
            if isinstance(data, Mapping) and "text/plain" in data:
                self.print(_COLOURS.sub("", _text(data["text/plain"])).encode() + b"\n")
        if content.get("status") in ("error", "aborted"):
            self._failure = self._traceback(content)
        self._answered = True
        self._end_if_complete()

    def end(self) -> None:
        """End the cell, whatever is still to come."""
        if not self.over.done():
            self.over.set_result(None)

    def cell(self, *, timed_out: bool, died: bool, broken: str | None) -> Cell:
        """Return the result."""
        omitted = self._kept.omitted + self._omitted
        error = broken or self._error or self._failure
        return Cell(self._kept.text(), self._data, error, timed_out, died, omitted)

    def _end_if_complete(self) -> None:
        if self._answered and self.idle:
            self.end()

    def _clear(self) -> None:
        self._kept = HeadTail(self._limit)
        self._data: list[dict[str, str]] = []
        self._data_left = DATA_LIMIT
        self._shown: dict[str, int] = {}
        self._clears = False

    def _traceback(self, content: Mapping[str, Any]) -> str:
        lines = content.get("traceback")
        if not lines or not isinstance(lines, list):
            lines = [f"{content.get('ename') or content.get('status')}: {content.get('evalue') or ''}"]
        kept = HeadTail(self._limit)
        kept.add(_bytes(_COLOURS.sub("", "\n".join(map(str, lines)))))
        self._omitted += kept.omitted
        return kept.text()

    def _take_data(self, data: dict[str, str], shown: object, *, update: bool) -> None:
        size = sum(len(kind) + len(text) for kind, text in data.items())
        cost = size + RESULT_COST * (1 + len(data))
        if cost > self._data_left:
            self._omitted += size
            return
        self._data_left -= cost
        if update and isinstance(shown, str) and shown in self._shown:
            self._data[self._shown[shown]] = data
            return
        if isinstance(shown, str):
            self._shown[shown] = len(self._data)
        self._data.append(data)


class Kernel:
    """One kernel. Belongs to one event loop. Cells run one after the other, as they were asked for."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._requests = Requests()
        self._process: Process | None = None
        self._channels: list[Channel] = []
        self._broken: str | None = None
        self._listeners: set[int] = set()
        """Who listens at its sockets, by the kernel's word."""
        self._killed = False
        self._answered = asyncio.Event()
        self._heard = asyncio.Event()
        self._running: _Running | None = None
        self._late = HeadTail(OUTPUT_LIMIT)
        """What threads of earlier cells printed since the last cell."""

    @classmethod
    async def start(cls, container: Container, *, timeout_s: float = START_TIMEOUT_S) -> Kernel:
        """Start a kernel and wait until it answers; best done while the job waits for something else.

        Raises:
            InfrastructureError: the image has no ipykernel, or it does not answer; says what it said.
            KernelBroken: what answers is no kernel.
            SandboxBroken: there was one in that sandbox, and what ran there broke it.
        """
        kernel = cls(container)
        await kernel.restart(timeout_s=timeout_s)
        return kernel

    async def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """End the kernel, if it lives, and start a fresh one."""
        await self.close()
        name = f"k{secrets.token_hex(4)}"
        self._broken, self._killed = None, False
        self._listeners = set()
        self._requests = Requests()
        self._late = HeadTail(OUTPUT_LIMIT)
        facts: dict[str, Any] = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, 1)}
        facts |= {"transport": "ipc", "ip": f"{SHARED_FOLDER}/{name}"}
        facts |= {"key": self._requests.key, "signature_scheme": SIGNED_WITH}
        try:
            await asyncio.to_thread(self._write_facts, name, json.dumps(facts))
        except FileNotFoundError as error:
            raise SandboxLost("the sandbox has ended, its folder is gone") from error
        except PermissionError as error:
            raise SandboxBroken(f"{SHARED_FOLDER} is closed") from error
        log = os.memfd_create("kernel", os.MFD_CLOEXEC)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(timeout_s):
                self._process = await self._container.spawn(
                    [*KERNEL, f"{SHARED_FOLDER}/{name}.json"], [null, log, log]
                )
                await self._connect(name)
                await self._until_it_answers()
        except (TimeoutError, SandboxLost, CallerError, Violation) as error:
            begin = max(0, os.fstat(log).st_size - _LOG_KEPT)
            said = os.pread(log, _LOG_KEPT, begin).decode("utf-8", "replace").strip() or str(error)
            process = self._process
            if isinstance(error, Violation):
                self._broken = str(error)
            elif process and self._listeners - {process.pid}:
                self._broken = "another program listens in the kernel's place"
            await self.close()
            if self._broken:
                raise KernelBroken(self._broken) from error
            if not self._container.alive:
                with contextlib.suppress(SandboxLost):
                    self._container.check_alive()
                raise SandboxLost(f"the sandbox ended while its kernel started: {said}") from error
            if self._is_closed():
                raise SandboxBroken(f"{SHARED_FOLDER} is closed: {said}") from error
            # What is late is no agent's for sure: the machine may be busy.
            if not isinstance(error, TimeoutError):
                await check_agents(self._container, "ipykernel", process, said)
            raise InfrastructureError(
                f"no kernel answers in the sandbox; it needs python3 with ipykernel in the image: {said}",
                kind=FailureKind.PROVIDER_UNAVAILABLE,
            ) from error
        except BaseException:
            await self.close()
            raise
        finally:
            os.close(null)
            os.close(log)
        self._container.worked.add("ipykernel")

    async def run(self, code: str, *, timeout_s: float = CELL_TIMEOUT_S, output_limit: int = OUTPUT_LIMIT) -> Cell:
        """Run one cell. If the caller goes away meanwhile, the cell is interrupted.

        Args:
            code: the source.
            timeout_s: then it is interrupted, and if it goes on all the same, the kernel is killed.
            output_limit: bytes of text to keep.

        Raises:
            SandboxBroken: what ran in the kernel has ended it, and :meth:`restart` starts another.
            SandboxLost: the sandbox ended, or the kernel was killed.
            CallerError: it is closed.
            KernelBroken: it was ended before, since it did not speak as one.
        """
        async with self._turn:
            process = self._process
            if self._broken:
                raise KernelBroken(self._broken)
            if process is None or self._killed or process.ended.done():
                raise why_over(self._container, "kernel", process, ours=self._killed)
            request = self._ask("execute_request", code=code, allow_stdin=False, stop_on_error=False)
            running = self._running = _Running(request, output_limit)
            late, self._late = self._late, HeadTail(OUTPUT_LIMIT)
            if late.total:
                running.print(late.text().encode())
            try:
                timed_out = await self._ends_within(running, process, timeout_s)
            except asyncio.CancelledError:
                # The turn ends with the cell, else the next cell would wait inside the kernel.
                await run_uncancellable(self._ends_within(running, process, 0.0))
                raise
            finally:
                self._running = None
            died = self._broken is not None or not running.over.done()
            if died and not timed_out and self._broken is None and process.ended.result() == -signal.SIGKILL:
                # It may have gone with its sandbox.
                await self._container.check_living()
            return running.cell(timed_out=timed_out, died=died, broken=self._broken)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does."""
        if self._process is not None:
            await self._container.signal(self._process, signal.SIGINT)

    async def close(self) -> None:
        """End the kernel. Harmless when it has ended."""
        self._hang_up()
        if self._process is not None:
            await self._container.end(self._process)
        self._process = None

    async def __aenter__(self) -> Kernel:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _ends_within(self, running: _Running, process: Process, timeout_s: float) -> bool:
        """Wait for a cell's end, or for the kernel's; whether the cell had to be stopped."""
        ends: list[asyncio.Future[Any]] = [running.over, process.ended]
        # First it is asked to stop, then it is made to.
        for number, limit in ((signal.SIGINT, timeout_s), (signal.SIGKILL, INTERRUPT_GRACE_S)):
            await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if running.over.done() or process.ended.done():
                return number == signal.SIGKILL
            self._killed = number == signal.SIGKILL
            await self._container.signal(process, number)
        await asyncio.wait(ends, timeout=DEATH_S, return_when=asyncio.FIRST_COMPLETED)
        return True

    def _ask(self, kind: str, **content: Any) -> str:
        request, frames = self._requests.make(kind, **content)
        if self._channels:
            self._channels[0].send(frames)
        return request

    def _is_answer(self, kind: str, request: str) -> bool:
        return kind == "execute_reply" and self._running is not None and request == self._running.request

    def _on_answer(self, message: Message) -> None:
        self._answered.set()
        if self._running and message.request == self._running.request:
            self._running.answer(message.content)
            self._loop.call_later(IDLE_GRACE_S, self._end_if_idle, self._running)

    def _end_if_idle(self, running: _Running) -> None:
        """End a cell that was answered a while ago, unless there is more of it to read."""
        if any(channel.behind for channel in self._channels):
            self._loop.call_later(IDLE_GRACE_S, self._end_if_idle, running)
        else:
            running.end()

    def _on_output(self, message: Message) -> None:
        self._heard.set()
        if self._running and message.request == self._running.request:
            self._running.take(message)
            if self._running.idle and message.kind == "status":  # the answer may be lost
                self._loop.call_later(IDLE_GRACE_S, self._end_if_idle, self._running)
        elif message.kind == "stream":
            text = _bytes(message.content.get("text", ""))
            if self._running:
                self._running.print(text)
            else:
                self._late.add(text)

    def _is_waited_for(self, kind: str, request: str) -> bool:
        """Whether to read an output: all of the cell that runs, and what threads of earlier cells print."""
        if self._running is not None and request == self._running.request:
            return kind in _Running.KINDS
        return kind == "stream" and self._requests.made(request)

    def _on_lost(self, violation: Violation | None) -> None:
        """A connection is of no use any more, and neither is a kernel without it."""
        if violation:
            self._broken = f"the kernel was ended, since it does not speak as one: {violation}"
        self._hang_up()
        if self._process is not None:
            self._container.kill(self._process)

    def _hang_up(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []

    def _is_closed(self) -> bool:
        """Whether somebody inside took permissions from the folder that we made."""
        with contextlib.suppress(FileNotFoundError):
            return bool(~self._container.shared_folder.stat().st_mode & stat.S_IRWXU)
        return False

    def _write_facts(self, name: str, text: str) -> None:
        path = self._container.shared_folder / f"{name}.json"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            self._container.give(descriptor)

    async def _connect(self, name: str) -> None:
        """Connect to its sockets as they come up. No heartbeat: the end of its process says all."""
        answers = MessageReader(self._is_answer, self._on_answer)
        output = MessageReader(self._is_waited_for, self._on_output)
        for number, kind, reader in ((1, "DEALER", answers), (2, "SUB", output)):
            path = self._container.shared_folder / f"{name}-{number}"
            while (connection := jupyter_channel.connect(path)) is None:
                await self._or_death(asyncio.sleep(_POLL_S))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self._listeners.add(_CREDENTIALS.unpack(credentials)[0])
            self._channels.append(Channel(connection, kind, reader, self._on_lost))

    async def _until_it_answers(self) -> None:
        """Ask who it is until it is heard on both channels.

        A subscription takes effect some time after it was asked for, and what is published before is lost.
        """
        self._heard.clear()
        while not self._heard.is_set():
            self._answered.clear()
            self._ask("kernel_info_request")
            await self._or_death(self._answered.wait())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARD_S):
                    await self._heard.wait()

    async def _or_death(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for ``waiting``, or raise if the kernel ends before."""
        assert self._process is not None
        task: asyncio.Future[Any] = asyncio.ensure_future(waiting)
        ends: list[asyncio.Future[Any]] = [task, self._process.ended]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SandboxLost("the kernel has ended")
        finally:
            task.cancel()


def _text(value: object) -> str:
    """Text; what is none, as JSON. Bytes that are no UTF-8 are replaced."""
    return _bytes(value).decode("utf-8", "replace")


def _bytes(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair that is no byte
        return text.encode("utf-8", "replace")
