# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A persistent bash on a terminal inside a sandbox.

Three channels:

- *commands* and *exit codes* travel through two private sockets (:mod:`.bash_channel`): nothing is typed, so nothing
  is echoed, cut at 4,096 characters or read by a program that reads its input;
- *input* for programs, and Ctrl-C, go through the terminal;
- *output* comes from the terminal unchanged.

The output of a command is complete before its end is reported: a read that finds a terminal empty makes the kernel
first hand over all that was written to the other side. The folder is read from the kernel.

Only the interruption of a command polls, until the command has begun or, after its time limit, until it has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox.container import SIGKILL_EXIT_CODE, Container
from nemo_gym_prorl.sandbox.sessions.bash_channel import (
    PROMPT,
    BashChannel,
    ContainerTerminal,
    Outcome,
    TerminalOutput,
)
from nemo_gym_prorl.sandbox.sessions.session_errors import blame_agent, session_end_error
from nemo_gym_prorl.sandbox.supervisor.client import Process
from nemo_gym_prorl.sandbox.supervisor.connection import ready
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost
from nemo_gym_prorl.session_results import Action


OUTPUT_LIMIT = 64 << 10
"""Bytes of an action's output that are kept, half from its beginning and half from its end."""

HARD_TIMEOUT_S = 180.0
SOFT_TIMEOUT_S = 60.0

INTERRUPT_GRACE_S = 1.0
"""How long a program may take to end after Ctrl-C; then it is killed."""

ENDING_S = 3.0
"""How long it may take until nothing of a command comes any more; then bash is killed."""

ARRIVAL_S = 1.0
"""How long bash may read nothing of a command before it counts as busy with something else."""

_LOOK_S = 0.002
"""Between two looks whether a command that is to be interrupted has begun."""

_AGAIN_S = 0.02
"""Between two looks whether a command that was interrupted goes on with another program."""

START_TIMEOUT_S = 20.0

ROWS, COLUMNS = 50, 200
"""Size of the terminal: wide, since what is folded is harder to read for a model."""

VARIABLES = {"PS1": PROMPT, "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}


class ShellBusy(CallerError):
    """A command still runs in the shell."""


class Shell:
    """One bash session. Belongs to one event loop; one command at a time."""

    def __init__(self, container: Container, env: Mapping[str, str], cwd: str | None) -> None:
        self._container = container
        self._env = env
        self._start_cwd = cwd
        self._loop = asyncio.get_running_loop()
        self._terminal: ContainerTerminal | None = None
        self._channel: BashChannel | None = None
        self._bash: Process | None = None
        self._killed = False
        self._output = TerminalOutput(OUTPUT_LIMIT)
        self._code: int | None = None
        self._killing: asyncio.Future[None] | None = None
        self.running = False
        """Whether a command has not ended yet."""
        self.cwd = ""

    @classmethod
    async def start(
        cls, container: Container, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Shell:
        """Start bash in a sandbox; a few milliseconds.

        Raises:
            InfrastructureError: the image has no bash, or it does not answer.
            SandboxBroken: the image has, and what ran in the sandbox broke it.
        """
        shell = cls(container, {**VARIABLES, **(env or {})}, cwd)
        await shell.restart()
        return shell

    @property
    def exited(self) -> bool:
        """Whether bash has ended."""
        return self._bash is None or self._bash.ended.done()

    async def restart(self) -> None:
        """End bash, if it lives, with everything that runs in its session, and start a fresh one."""
        await self.close()
        self._killed = False
        self._channel = BashChannel(self._on_end, self._on_unusable)
        try:
            # Those inside may stop it on its way in, for ever.
            async with asyncio.timeout(START_TIMEOUT_S):
                self._bash = await self._container.spawn(
                    ["/bin/sh", "-c", "exec bash --noprofile --norc --noediting -i <&3 3<&-"],
                    [self._channel.bash_commands.fileno(), self._channel.bash_status.fileno()],
                    cwd=self._start_cwd,
                    env=self._env,
                    terminal=(ROWS, COLUMNS),
                )
            trouble = await self._prepare(self._bash, self._channel)
        except TimeoutError as error:
            self._let_go()
            raise InfrastructureError(
                f"no shell starts in the sandbox within {START_TIMEOUT_S:g} s", kind=FailureKind.PROVIDER_UNAVAILABLE
            ) from error
        except BaseException:
            if self._bash:
                self._container.kill(self._bash)
            self._let_go()
            raise
        if trouble:
            bash, trouble = self._bash, trouble.strip()[-400:]
            await self.close()
            await blame_agent(self._container, "bash", bash, trouble)
            raise InfrastructureError(
                f"a shell session needs bash in the image: {trouble}", kind=FailureKind.PROVIDER_UNAVAILABLE
            )
        self._container.sessions_started.add("bash")

    async def _prepare(self, bash: Process, channel: BashChannel) -> str:
        """Make a fresh bash ready for commands; return what is wrong with it, if anything is."""
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
            return "it ended at once"

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = HARD_TIMEOUT_S,
        silence_s: float | None = SOFT_TIMEOUT_S,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Action:
        """Run a command, of one line or many, in the shell.

        Args:
            command: bash source.
            timeout_s: hard limit. Then each program of the command gets Ctrl-C, after a second SIGKILL, and the shell
                is usable again; if it is not after three, bash is ended (``exited``).
            silence_s: soft limit: give back control when there was no output for so long; the command goes on, and
                :meth:`wait`, :meth:`send` or :meth:`interrupt` follow. ``None`` to wait for the hard limit only.
            output_limit: bytes of output to keep.

        Raises:
            ShellBusy: the command before has not ended.
            CallerError: there is a NUL in the command.
            SandboxBroken: what ran in the shell has ended it, and :meth:`restart` starts another.
            SandboxLost: the sandbox ended, or the shell was killed.
        """
        if self.running:
            raise ShellBusy("a command still runs in this shell: wait for it, interrupt it or restart the shell")
        if "\0" in command:
            raise CallerError("must not hold a NUL character", field="command")
        if self.exited:
            raise self._over()
        assert self._channel
        self.running, self._code = True, None
        try:
            self._channel.run(command)
        except SandboxBroken as error:
            self.running = False
            if self._bash:
                await asyncio.wait([self._bash.ended], timeout=INTERRUPT_GRACE_S)
            raise self._over() from error
        self._output.limit_to(output_limit)
        return await self.wait(timeout_s=timeout_s, silence_s=silence_s)

    async def aside(self, command: str, *, timeout_s: float, output_limit: int = OUTPUT_LIMIT) -> Action:
        """As :meth:`run`, for a command of ours, of whose outcome the next one finds nothing."""
        before = self._channel.last if self._channel else Outcome()
        try:
            return await self.run(command, timeout_s=timeout_s, silence_s=None, output_limit=output_limit)
        finally:
            if self._channel:
                self._channel.last = before

    async def wait(self, *, timeout_s: float = HARD_TIMEOUT_S, silence_s: float | None = SOFT_TIMEOUT_S) -> Action:
        """Wait for the command that runs; as :meth:`run` otherwise, with all of its output so far."""
        output = self._output
        begin = output.heard = self._loop.time()
        while not self._over_with():
            now = self._loop.time()
            if now - begin >= timeout_s:
                return await self._time_out(begin)
            if silence_s is not None and now - output.heard >= silence_s:
                return await self._action(begin, waiting=True)
            until = begin + timeout_s if silence_s is None else min(begin + timeout_s, output.heard + silence_s)
            await output.change(until)
        return await self._action(begin)

    async def send(self, text: str) -> None:
        """Type ``text`` at the terminal, for the program that runs to read; end a line with a newline."""
        descriptor, data = self.terminal.fd, text.encode("utf-8", "surrogateescape")
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                await ready(descriptor, write=True)
            except OSError as error:
                raise self._over() from error

    async def interrupt(self) -> None:
        """Press Ctrl-C, if a command runs. One that is on its way begins first, or what it says could be taken for
        commands: bash forgets what it has read of a line, and goes on with the rest."""
        await self._arrival()
        if self.running and not self._over_with():
            self._press()

    @property
    def terminal(self) -> ContainerTerminal:
        """Its terminal, for ptyprocess's ``setwinsize``, ``setecho`` and so on.

        Raises:
            CallerError: the shell is closed.
        """
        if self._terminal is None:
            raise self._over()
        return self._terminal

    async def close(self) -> None:
        """End bash and what runs in the foreground. Harmless when it has ended."""
        self._let_go()
        if self._bash is not None:
            await self._container.end(self._bash)
        self._bash = None
        self.running = False

    def _over(self) -> RolloutError:
        return session_end_error(self._container, "shell", self._bash, ours=self._killed)

    def _let_go(self) -> None:
        """Close every file."""
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

    async def _time_out(self, begin: float) -> Action:
        """End the command by and by more forcefully, until the shell answers or is gone."""
        await self._arrival()
        # One that has not begun would begin, after its time, once what holds bash up is interrupted.
        if self._channel and self._channel.begun:
            await self._end_foreground()
        if not self._over_with():
            await self._kill_shell()
            await self._settled(INTERRUPT_GRACE_S)
        return await self._action(begin, timed_out=True)

    def _over_with(self) -> bool:
        """Whether the command has ended, or bash has."""
        return self._code is not None or self.exited

    async def _settled(self, patience_s: float) -> None:
        """Wait until it is over with the command, or for so long."""
        deadline = self._loop.time() + patience_s
        while not self._over_with() and self._loop.time() < deadline:
            await self._output.change(deadline)

    async def _arrival(self) -> None:
        """Wait until the command has begun, as long as bash reads, and for a moment where it doesn't."""
        unread, until = -1, 0.0
        while self.running and self._channel and not self._channel.begun and not self.exited:
            if self._channel.unread != unread:
                unread, until = self._channel.unread, self._loop.time() + ARRIVAL_S
            elif self._loop.time() >= until:
                return
            await asyncio.sleep(_LOOK_S)

    async def _end_foreground(self) -> None:
        """Ctrl-C, SIGKILL a second later, and so on for what comes next, until bash is back, or for :data:`ENDING_S`.

        Bash goes on with a loop if the program in it ended by itself just as it was interrupted, and with a list if
        the program had to be killed. So Ctrl-C is pressed again for each program that comes after, and once for each:
        many clean up at the first, and die of a second.
        """
        until = self._loop.time() + ENDING_S
        pressed, kill_at = self._press(), self._loop.time() + INTERRUPT_GRACE_S
        while not self._over_with() and self._loop.time() < until:
            await self._settled(_AGAIN_S)
            if self._over_with():
                return
            if self.terminal.foreground() not in (None, pressed):
                pressed, kill_at = self._press(), self._loop.time() + INTERRUPT_GRACE_S
            elif self._loop.time() >= kill_at:
                await asyncio.to_thread(self.terminal.kill_foreground)
                kill_at += INTERRUPT_GRACE_S

    def _press(self) -> int | None:
        """Press Ctrl-C; return the process group that was in the foreground."""
        running = self.terminal.foreground()
        self.terminal.press_control("c")
        if self._channel:
            self._channel.ask_end()
        return running

    async def _kill_shell(self) -> None:
        if self._bash:
            self._killed = True
            await self._container.signal(self._bash, signal.SIGKILL)

    async def _action(self, begin: float, *, waiting: bool = False, timed_out: bool = False) -> Action:
        code = self._code
        if code is None and self._bash is not None and self._bash.ended.done():
            # Raises if the whole sandbox was lost.
            status = self._bash.ended.result()
            code = status if status >= 0 else 128 - status
            self._output.take_last()
        kept = self._output.kept
        if not waiting:
            self.running = False
            self._output.clear()
        if code == SIGKILL_EXIT_CODE and not timed_out:
            # It may have gone with its sandbox.
            await self._container.check_living()
        return Action(
            output=kept.text(),
            exit_code=code,
            cwd=self.cwd,
            waiting=waiting,
            timed_out=timed_out,
            # Its end may be told to nobody, where somebody inside traces it.
            exited=self.exited or self._killed,
            omitted=kept.omitted,
            seconds=self._loop.time() - begin,
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
