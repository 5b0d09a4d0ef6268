# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A persistent bash on a terminal in a sandbox.

A session has three channels:

- *Commands* and *exit codes* are sent through two private sockets (:mod:`.bash_channel`) and not typed. So no command
  is echoed, cut at the terminal's 4,096 characters, or read by a program as its input.
- *Input* for programs, and Ctrl-C, go through the terminal.
- *Output* is read from the terminal unchanged.

When bash reports the end of a command, all output of the command can be read from the terminal. The working directory
is read from ``/proc``.

To interrupt a command, the server polls until bash has begun the command and, after a time limit, until it has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox.container import SIGKILL_EXIT_CODE, Container
from nemo_gym_prorl.sandbox.sessions import blame_agent, session_end_error
from nemo_gym_prorl.sandbox.sessions.bash_channel import (
    PROMPT,
    BashChannel,
    ContainerTerminal,
    Outcome,
    TerminalOutput,
)
from nemo_gym_prorl.sandbox.supervisor.client import SandboxProcess
from nemo_gym_prorl.sandbox.supervisor.connection import ready
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost
from nemo_gym_prorl.sandbox_results import ShellResult


OUTPUT_LIMIT = 64 << 10
"""Default of the bytes kept of a command's output: about 16k tokens for a model."""

HARD_TIMEOUT_S = 180.0  # Gym's default for a command
SOFT_TIMEOUT_S = 60.0  # of silence: most commands that are silent for a minute wait for input

INTERRUPT_GRACE_S = 1.0
"""Seconds from Ctrl-C until the foreground program is killed; a program's cleanup usually takes less."""

ENDING_S = 3.0
"""Seconds from a time limit until bash is killed: time for Ctrl-C and SIGKILL to several programs of a command."""

ARRIVAL_S = 1.0
"""Seconds without progress in reading a command, after which bash counts as busy with an earlier program."""

_BEGIN_POLL_S = 0.002
"""Seconds between checks whether bash has begun a command, which usually takes about a millisecond."""

_FOREGROUND_POLL_S = 0.02
"""Seconds between checks whether an interrupted command has ended or started another program."""

START_TIMEOUT_S = 20.0  # a start takes milliseconds, but longer on a busy machine

ROWS, COLUMNS = 50, 200
"""Size of the terminal in characters: wide, because a model reads wrapped lines less reliably."""

VARIABLES = {"PS1": PROMPT, "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}


class Shell:
    """One bash session. Belongs to one event loop and runs one command at a time."""

    def __init__(self, container: Container, env: Mapping[str, str], user: str | int | None) -> None:
        self._container = container
        self._user = user
        self._env = env
        self._loop = asyncio.get_running_loop()
        self._terminal: ContainerTerminal | None = None
        self._channel: BashChannel | None = None
        self._bash: SandboxProcess | None = None
        self._killed = False
        self._output = TerminalOutput(OUTPUT_LIMIT)
        self._code: int | None = None
        self._killing: asyncio.Future[None] | None = None
        self.running = False
        """Whether a command runs, or has ended without a call of :meth:`wait` that returned its result."""
        self.cwd = ""

    @classmethod
    async def start(
        cls, container: Container, *, env: Mapping[str, str] | None = None, user: str | int | None = None
    ) -> Shell:
        """Start bash in a sandbox as ``user`` (``None``: the sandbox's own), with ``env`` added.

        Raises:
            InfrastructureError: the image has no bash, or bash does not start in time.
            SandboxBroken: programs broke bash, which has worked in the sandbox before or is in the image.
            SandboxLost: the sandbox ended.
        """
        shell = cls(container, {**VARIABLES, **(env or {})}, user)
        await shell.restart()
        return shell

    @property
    def exited(self) -> bool:
        return self._bash is None or self._bash.ended.done()

    async def restart(self) -> None:
        """Close the shell, as :meth:`close`, and start a new bash, with the errors of :meth:`start`."""
        await self.close()
        self._killed = False
        self._channel = BashChannel(self._on_end, self._on_unusable)
        try:
            # Sandboxed processes can delay a start for ever with SIGSTOP.
            async with asyncio.timeout(START_TIMEOUT_S):
                self._bash = await self._container.spawn(
                    ["/bin/sh", "-c", "exec bash --noprofile --norc --noediting -i <&3 3<&-"],
                    [self._channel.bash_commands.fileno(), self._channel.bash_status.fileno()],
                    env=self._env,
                    terminal=(ROWS, COLUMNS),
                    user=self._user,
                )
            trouble = await self._prepare(self._bash, self._channel)
        except TimeoutError as error:
            self._close_files()
            raise InfrastructureError(
                f"no shell starts in the sandbox within {START_TIMEOUT_S:g} s", kind=FailureKind.PROVIDER_UNAVAILABLE
            ) from error
        except BaseException:
            if self._bash:
                self._container.kill(self._bash)
            self._close_files()
            raise
        if trouble:
            bash, trouble = self._bash, trouble.strip()[-400:]
            await self.close()
            await blame_agent(self._container, "bash", bash, trouble)
            raise InfrastructureError(
                f"a shell session needs bash in the image: {trouble}", kind=FailureKind.PROVIDER_UNAVAILABLE
            )
        self._container.sessions_started.add("bash")

    async def _prepare(self, bash: SandboxProcess, channel: BashChannel) -> str:
        """Connect to a new bash and run a first command; return the error message, empty if the command works."""
        assert bash.terminal is not None
        self._terminal = ContainerTerminal(bash.pid, bash.terminal)
        bash.ended.add_done_callback(lambda _future: self._output.notify())
        self._output.listen_to(bash.terminal)
        try:
            channel.connect(bash.pid, self._terminal.number)
            first = await self.run("command -v bash", timeout_s=START_TIMEOUT_S, silence_s=None)
            return first.output or "no answer" if first.exit_code else ""
        except (SandboxLost, SandboxBroken):
            if not self._container.alive:
                raise
            return "bash ended at once"

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = HARD_TIMEOUT_S,
        silence_s: float | None = SOFT_TIMEOUT_S,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ShellResult:
        """Run a command, of one or more lines, in the shell.

        Args:
            command: bash source.
            timeout_s: hard limit, after which each program of the command gets Ctrl-C, and SIGKILL one second later.
                If the command has not ended after three seconds, bash is killed (``exited``).
            silence_s: soft limit: return (``waiting``) after this time without output. The command keeps running;
                :meth:`wait`, :meth:`send` or :meth:`interrupt` may follow. ``None`` for the hard limit only.
            output_limit: bytes of output to keep.

        Raises:
            CallerError: the last command has not ended, the command contains a NUL character, or the shell is closed.
            SandboxBroken: programs in the shell have ended bash; :meth:`restart` starts a new bash.
            SandboxLost: the sandbox ended, or bash was killed.
        """
        if self.running:
            raise CallerError("a command still runs in this shell: wait for it, interrupt it or restart the shell")
        if "\0" in command:
            raise CallerError("must not hold a NUL character", field="command")
        if self.exited:
            raise self._ended_error()
        assert self._channel
        self.running, self._code = True, None
        try:
            self._channel.run(command)
        except SandboxBroken as error:
            self.running = False
            if self._bash:
                await asyncio.wait([self._bash.ended], timeout=INTERRUPT_GRACE_S)
            raise self._ended_error() from error
        self._output.limit_to(output_limit)
        return await self.wait(timeout_s=timeout_s, silence_s=silence_s)

    async def aside(self, command: str, *, timeout_s: float, output_limit: int = OUTPUT_LIMIT) -> ShellResult:
        """Run an internal command, as :meth:`run`, that leaves ``$?``, ``PIPESTATUS`` and ``$_`` unchanged."""
        before = self._channel.last if self._channel else Outcome()
        try:
            return await self.run(command, timeout_s=timeout_s, silence_s=None, output_limit=output_limit)
        finally:
            if self._channel:
                self._channel.last = before

    async def wait(
        self, *, timeout_s: float = HARD_TIMEOUT_S, silence_s: float | None = SOFT_TIMEOUT_S
    ) -> ShellResult:
        """Wait for the running command, with limits as in :meth:`run`; the result has all of the command's output."""
        output = self._output
        begin = output.last_output = self._loop.time()
        while not self._has_ended():
            now = self._loop.time()
            if now - begin >= timeout_s:
                return await self._time_out()
            if silence_s is not None and now - output.last_output >= silence_s:
                return await self._action(waiting=True)
            until = begin + timeout_s if silence_s is None else min(begin + timeout_s, output.last_output + silence_s)
            await output.change(until)
        return await self._action()

    async def send(self, text: str) -> None:
        """Type ``text`` at the terminal, as input of the running program; a line of input ends with a newline.

        Raises:
            RolloutError: the shell is closed or has ended, as for :meth:`run`.
        """
        descriptor, data = self.terminal.fd, text.encode("utf-8", "surrogateescape")
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                await ready(descriptor, write=True)
            except OSError as error:
                raise self._ended_error() from error

    async def interrupt(self) -> None:
        """Type Ctrl-C, if a command runs. The call first waits until bash has begun the command: an interrupted bash
        drops the part of a line that it has read, and would run the remaining part as a command."""
        await self._wait_begun()
        if self.running and not self._has_ended():
            self._press()

    @property
    def terminal(self) -> ContainerTerminal:
        """The shell's terminal.

        Raises:
            CallerError: the shell is closed.
        """
        if self._terminal is None:
            raise self._ended_error()
        return self._terminal

    async def close(self) -> None:
        """Kill bash and close the terminal, which sends SIGHUP to the foreground programs. Idempotent."""
        self._close_files()
        if self._bash is not None:
            await self._container.end(self._bash)
        self._bash = None
        self.running = False

    def _ended_error(self) -> RolloutError:
        return session_end_error(self._container, "shell", self._bash, killed_here=self._killed)

    def _close_files(self) -> None:
        self._output.stop()
        if self._terminal:
            self._terminal.close()
            self._terminal = None
        if self._channel:
            self._channel.close()
            self._channel = None

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _time_out(self) -> ShellResult:
        """End the command by Ctrl-C, by killing its programs, and finally by killing bash."""
        await self._wait_begun()
        # If bash still runs an earlier program, Ctrl-C would end that program and begin the command after its limit.
        if self._channel and self._channel.begun:
            await self._end_foreground()
        if not self._has_ended():
            await self._kill_shell()
            await self._wait_ended(INTERRUPT_GRACE_S)
        return await self._action(timed_out=True)

    def _has_ended(self) -> bool:
        return self._code is not None or self.exited

    async def _wait_ended(self, patience_s: float) -> None:
        deadline = self._loop.time() + patience_s
        while not self._has_ended() and self._loop.time() < deadline:
            await self._output.change(deadline)

    async def _wait_begun(self) -> None:
        """Wait until bash has begun the command, or has read nothing of the command for :data:`ARRIVAL_S`."""
        unread, until = -1, 0.0
        while self.running and self._channel and not self._channel.begun and not self.exited:
            if self._channel.unread_bytes != unread:
                unread, until = self._channel.unread_bytes, self._loop.time() + ARRIVAL_S
            elif self._loop.time() >= until:
                return
            await asyncio.sleep(_BEGIN_POLL_S)

    async def _end_foreground(self) -> None:
        """Send each foreground program Ctrl-C, then SIGKILL, until the command has ended or :data:`ENDING_S` is over.
        Bash may start a next program: in a loop whose program exits just before Ctrl-C, or after a killed program of a
        list. Each program gets Ctrl-C once, since a second Ctrl-C could abort the program's cleanup."""
        until = self._loop.time() + ENDING_S
        pressed, kill_at = self._press(), self._loop.time() + INTERRUPT_GRACE_S
        while not self._has_ended() and self._loop.time() < until:
            await self._wait_ended(_FOREGROUND_POLL_S)
            if self._has_ended():
                return
            if self.terminal.foreground() not in (None, pressed):
                pressed, kill_at = self._press(), self._loop.time() + INTERRUPT_GRACE_S
            elif self._loop.time() >= kill_at:
                self.terminal.kill_foreground()
                kill_at += INTERRUPT_GRACE_S

    def _press(self) -> int | None:
        """Type Ctrl-C and request a report of the end; return the id of the foreground process group."""
        running = self.terminal.foreground()
        self.terminal.press_interrupt()
        if self._channel:
            self._channel.ask_end()
        return running

    async def _kill_shell(self) -> None:
        if self._bash:
            self._killed = True
            await self._container.signal(self._bash, signal.SIGKILL)

    async def _action(self, *, waiting: bool = False, timed_out: bool = False) -> ShellResult:
        code = self._code
        if code is None and self._bash is not None and self._bash.ended.done():
            # result() raises SandboxLost if the supervisor died.
            status = self._bash.ended.result()
            code = status if status >= 0 else 128 - status
            self._output.take_last()
        kept = self._output.kept
        if not waiting:
            self.running = False
            self._output.clear()
        if code == SIGKILL_EXIT_CODE and not timed_out:
            # The end of the sandbox may have killed the program; then raise the end's error.
            await self._container.check_living()
        return ShellResult(
            output=kept.text(),
            exit_code=code,
            cwd=self.cwd,
            waiting=waiting,
            timed_out=timed_out,
            # _killed: a tracer in the sandbox can delay the report of bash's exit.
            exited=self.exited or self._killed,
            omitted=kept.omitted,
        )

    def _on_end(self, code: int) -> None:
        self._output.take_last()
        if self._channel:
            self.cwd = self._channel.folder() or self.cwd
        self._code = code
        self._output.notify()

    def _on_unusable(self) -> None:
        if self._bash and not self.exited:
            self._killing = asyncio.ensure_future(self._kill_shell())
