# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An IPython shell in a sandbox that takes cells over pipes.

The sandbox's ``python3`` runs :mod:`.kernel_driver`, :class:`.kernel_pipes.KernelPipes` is the server's end. Nothing
listens anywhere and no file of the sandbox is involved, so a sandbox without network can have a kernel.

Every wait ends with the kernel: a dead one is reported, not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from nemo_gym_prorl.background import run_uncancellable
from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.sessions.commands import DEATH_S, HeadTail
from nemo_gym_prorl.sandbox.sessions.kernel_pipes import OUTPUT_LIMIT, CellOutput, KernelPipes
from nemo_gym_prorl.sandbox.sessions.session_errors import blame_agent, session_end_error
from nemo_gym_prorl.sandbox.supervisor.client import Process
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxLost
from nemo_gym_prorl.session_results import Cell


START_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 180.0
INTERRUPT_GRACE_S = 2.0
"""How long a cell may take to end after it was interrupted; then the kernel is killed."""

DRIVER = ("python3", "-c", Path(__file__).with_name("kernel_driver.py").read_text())
"""Command that starts a kernel."""

PROGRAM = "IPython"

_LOG_CHARS = 2000


class KernelBroken(AgentError):
    """What speaks as the kernel does not speak as one, and was ended: what runs in the sandbox has taken its place."""


class Kernel:
    """One kernel. Belongs to one event loop. Cells run one after the other, as they were asked for."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._pipes: KernelPipes | None = None
        self._broken = ""
        self._killed = False

    @classmethod
    async def start(cls, container: Container, *, timeout_s: float = START_TIMEOUT_S) -> Kernel:
        """Start a kernel and wait until it takes cells; best done while the job waits for something else.

        Raises:
            InfrastructureError: the image has no IPython, or it does not start; says what it said.
            KernelBroken: what answers is no kernel.
            SandboxBroken: there was one in that sandbox, and what ran there broke it.
        """
        kernel = cls(container)
        await kernel.restart(timeout_s=timeout_s)
        return kernel

    async def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """End the kernel, if it lives, and start a fresh one."""
        await self.close()
        self._broken, self._killed = "", False
        pipes = self._pipes = KernelPipes(self._on_lost)
        try:
            async with asyncio.timeout(timeout_s):
                self._container.give(pipes.driver_ends[0])
                null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._process = await self._container.spawn(DRIVER, [null, *pipes.driver_ends])
                finally:
                    os.close(null)
                pipes.handed_over()
                if self._broken:
                    self._container.kill(self._process)
                ends: list[asyncio.Future[Any]] = [pipes.over, self._process.ended]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not pipes.over.done():
                    raise SandboxLost("the kernel has ended")
        except (TimeoutError, SandboxLost, CallerError) as error:
            process, said = self._process, pipes.drain().text.text().strip()[-_LOG_CHARS:] or str(error)
            await self.close()
            await self._judge(error, process, said)
            raise InfrastructureError(
                f"no kernel answers in the sandbox; it needs python3 with IPython in the image: {said}",
                kind=FailureKind.PROVIDER_UNAVAILABLE,
            ) from error
        except BaseException:
            await self.close()
            raise
        self._container.sessions_started.add(PROGRAM)

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
            process, pipes = self._process, self._pipes
            if self._broken:
                raise KernelBroken(self._broken)
            if process is None or pipes is None or self._killed or process.ended.done():
                raise session_end_error(self._container, "kernel", process, ours=self._killed)
            over = pipes.begin(code, output_limit)
            try:
                timed_out = await self._ends_within(over, process, timeout_s)
            except asyncio.CancelledError:
                # The turn ends with the cell, else the next cell would wait inside the kernel.
                await run_uncancellable(self._ends_within(over, process, 0.0))
                raise
            output = over.result() if over.done() else pipes.drain()
            died = bool(self._broken) or not over.done()
            if died and not timed_out and not self._broken and process.ended.result() == -signal.SIGKILL:
                # It may have gone with its sandbox.
                await self._container.check_living()
            return _cell(output, output_limit, timed_out=timed_out, died=died, broken=self._broken)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does."""
        if self._process is not None:
            await self._container.signal(self._process, signal.SIGINT)

    async def close(self) -> None:
        """End the kernel. Harmless when it has ended."""
        if self._pipes is not None:
            self._pipes.close()
        if self._process is not None:
            await self._container.end(self._process)
        self._process = self._pipes = None

    async def __aenter__(self) -> Kernel:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _ends_within(self, over: asyncio.Future[CellOutput], process: Process, timeout_s: float) -> bool:
        """Wait for a cell's end, or for the kernel's; whether the cell had to be stopped."""
        ends: list[asyncio.Future[Any]] = [over, process.ended]
        # First it is asked to stop, then it is made to.
        for number, limit in ((signal.SIGINT, timeout_s), (signal.SIGKILL, INTERRUPT_GRACE_S)):
            await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if over.done() or process.ended.done():
                return number == signal.SIGKILL
            self._killed = number == signal.SIGKILL
            await self._container.signal(process, number)
        await asyncio.wait(ends, timeout=DEATH_S, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _judge(self, error: Exception, process: Process | None, said: str) -> None:
        """Raise what it is if a kernel does not start for another reason than its image."""
        if self._broken:
            raise KernelBroken(self._broken) from error
        if not self._container.alive:
            with contextlib.suppress(SandboxLost):
                self._container.check_alive()
            raise SandboxLost(f"the sandbox ended while its kernel started: {said}") from error
        # What is late is no agent's for sure: the machine may be busy.
        if not isinstance(error, TimeoutError):
            await blame_agent(self._container, PROGRAM, process, said)

    def _on_lost(self, reason: str) -> None:
        process = self._process
        if process is None or not process.ended.done():
            self._broken = f"the kernel was ended, since it does not speak as one: {reason}"
            if process is not None:
                self._container.kill(process)


def _cell(output: CellOutput, limit: int, *, timed_out: bool, died: bool, broken: str) -> Cell:
    """Return the result."""
    trouble = HeadTail(limit)
    trouble.add(output.shown.error)
    omitted = output.text.omitted + output.shown.omitted + trouble.omitted
    error = broken or trouble.text() or None
    return Cell(output.text.text(), output.shown.data, error, timed_out, died, omitted)
