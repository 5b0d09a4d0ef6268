# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An IPython kernel in a sandbox that receives cells over pipes.

The sandbox's ``python3`` runs :mod:`.kernel_driver`; :class:`.kernel_pipes.KernelPipes` has the server's ends of the
pipes. The kernel needs no port and no file of the sandbox, so a sandbox without network can have a kernel.

Each wait for a kernel also ends when the kernel's process exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from nemo_gym_prorl.async_tasks import run_uncancellable
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.sessions import blame_agent, session_end_error
from nemo_gym_prorl.sandbox.sessions.commands import DEATH_S, HeadTail
from nemo_gym_prorl.sandbox.sessions.kernel_pipes import OUTPUT_LIMIT, CellOutput, KernelPipes
from nemo_gym_prorl.sandbox.supervisor.client import SandboxProcess
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost
from nemo_gym_prorl.sandbox_results import CellResult


START_TIMEOUT_S = 60.0  # importing IPython takes seconds on a busy machine
CELL_TIMEOUT_S = 180.0  # Gym's default for a command
INTERRUPT_GRACE_S = 2.0
"""Seconds from SIGINT to a cell until its kernel is killed; compiled code in the cell may delay the handling."""

DRIVER = ("python3", "-c", Path(__file__).with_name("kernel_driver.py").read_text())
"""Command that starts a kernel."""

PROGRAM = "IPython"
"""Name of a kernel in :attr:`.Container.sessions_started`."""

_LOG_CHARS = 2000  # of a failed start's output; enough for a traceback


class Kernel:
    """One kernel session. Belongs to one event loop. Cells run one at a time (FIFO)."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._lock = asyncio.Lock()
        self._process: SandboxProcess | None = None
        self._pipes: KernelPipes | None = None
        self._broken = ""
        self._killed = False

    @classmethod
    async def start(cls, container: Container, *, timeout_s: float = START_TIMEOUT_S) -> Kernel:
        """Start a kernel and wait until it accepts cells.

        Raises:
            InfrastructureError: the image has no IPython, or the kernel does not start; the message has its output.
            SandboxBroken: the started process violates the protocol, or programs broke IPython, which has worked in
                the sandbox before or is in the image.
            SandboxLost: the sandbox ended.
        """
        kernel = cls(container)
        await kernel.restart(timeout_s=timeout_s)
        return kernel

    async def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Kill the kernel's process, if it runs, and start a new one, with the errors of :meth:`start`."""
        await self.close()
        self._broken, self._killed = "", False
        pipes = self._pipes = KernelPipes(self._on_unusable)
        try:
            async with asyncio.timeout(timeout_s):
                self._container.give(pipes.driver_ends[0])
                null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._process = await self._container.spawn(DRIVER, [null, *pipes.driver_ends])
                finally:
                    os.close(null)
                pipes.close_driver_ends()
                if self._broken:
                    self._container.kill(self._process)
                ends: list[asyncio.Future[Any]] = [pipes.over, self._process.ended]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not pipes.over.done():
                    raise SandboxLost("the kernel has ended")
        except (TimeoutError, SandboxLost, CallerError) as error:
            process, output = self._process, pipes.drain().text.text().strip()[-_LOG_CHARS:] or str(error)
            await self.close()
            await self._raise_cause(error, process, output)
            raise InfrastructureError(
                f"no kernel answers in the sandbox; it needs python3 with IPython in the image: {output}",
                kind=FailureKind.PROVIDER_UNAVAILABLE,
            ) from error
        except BaseException:
            await self.close()
            raise
        self._container.sessions_started.add(PROGRAM)

    async def run(
        self, code: str, *, timeout_s: float = CELL_TIMEOUT_S, output_limit: int = OUTPUT_LIMIT
    ) -> CellResult:
        """Run one cell. A cancelled call interrupts the cell.

        Args:
            code: Python source with IPython's extensions.
            timeout_s: time limit, after which the cell is interrupted; the kernel is killed
                :data:`INTERRUPT_GRACE_S` later if the cell has not ended.
            output_limit: bytes to keep of the cell's text, and of its traceback.

        Raises:
            SandboxBroken: an earlier cell ended the kernel, or the kernel violated the protocol and was killed;
                :meth:`restart` starts a new one.
            SandboxLost: the sandbox ended, or the kernel was killed.
            CallerError: the kernel is closed.
        """
        async with self._lock:
            process, pipes = self._process, self._pipes
            if self._broken:
                raise SandboxBroken(self._broken)
            if process is None or pipes is None or self._killed or process.ended.done():
                raise session_end_error(self._container, "kernel", process, killed_here=self._killed)
            over = pipes.begin(code, output_limit)
            try:
                timed_out = await self._ends_within(over, process, timeout_s)
            except asyncio.CancelledError:
                # Hold the lock until the cell has ended, so that the next cell's time limit excludes this cell.
                await run_uncancellable(self._ends_within(over, process, 0.0))
                raise
            output = over.result() if over.done() else pipes.drain()
            died = bool(self._broken) or not over.done()
            if died and not timed_out and not self._broken and process.ended.result() == -signal.SIGKILL:
                # The end of the sandbox may have killed the kernel; then raise the end's error.
                await self._container.check_living()
            return _cell(output, output_limit, timed_out=timed_out, died=died, broken=self._broken)

    async def interrupt(self) -> None:
        if self._process is not None:
            await self._container.signal(self._process, signal.SIGINT)

    async def close(self) -> None:
        """Kill the kernel's process and close its pipes. Idempotent."""
        if self._pipes is not None:
            self._pipes.close()
        if self._process is not None:
            await self._container.end(self._process)
        self._process = self._pipes = None

    async def __aenter__(self) -> Kernel:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _ends_within(self, over: asyncio.Future[CellOutput], process: SandboxProcess, timeout_s: float) -> bool:
        """Wait until a cell or its kernel ends; return whether a signal was sent. The cell gets SIGINT after
        ``timeout_s`` seconds, and SIGKILL :data:`INTERRUPT_GRACE_S` later."""
        ends: list[asyncio.Future[Any]] = [over, process.ended]
        for number, limit in ((signal.SIGINT, timeout_s), (signal.SIGKILL, INTERRUPT_GRACE_S)):
            await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if over.done() or process.ended.done():
                return number == signal.SIGKILL
            self._killed = number == signal.SIGKILL
            await self._container.signal(process, number)
        await asyncio.wait(ends, timeout=DEATH_S, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _raise_cause(self, error: Exception, process: SandboxProcess | None, output: str) -> None:
        """Raise the error of a failed start if the agent or the end of the sandbox caused the failure."""
        if self._broken:
            raise SandboxBroken(self._broken) from error
        if not self._container.alive:
            with contextlib.suppress(SandboxLost):
                self._container.check_alive()
            raise SandboxLost(f"the sandbox ended while its kernel started: {output}") from error
        # A busy machine may cause a timeout, so a timeout is not attributed to the agent.
        if not isinstance(error, TimeoutError):
            await blame_agent(self._container, PROGRAM, process, output)

    def _on_unusable(self, reason: str) -> None:
        process = self._process
        if process is None or not process.ended.done():
            self._broken = f"the kernel was ended because it broke its protocol: {reason}; restart it"
            if process is not None:
                self._container.kill(process)


def _cell(output: CellOutput, limit: int, *, timed_out: bool, died: bool, broken: str) -> CellResult:
    trouble = HeadTail(limit)
    trouble.add(output.results.error)
    omitted = output.text.omitted + output.results.omitted + trouble.omitted
    error = broken or trouble.text() or None
    return CellResult(output.text.text(), output.results.data, error, timed_out, died, omitted)
