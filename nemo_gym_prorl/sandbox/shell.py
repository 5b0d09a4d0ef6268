# SPDX-License-Identifier: Apache-2.0
"""A persistent bash on a terminal inside a sandbox.

Three channels, kept apart so that none can be taken for another:

- *commands* go to bash through a pipe that no program it runs has: nothing is typed, so nothing is echoed, cut at
  4,096 characters or read by a program that reads its input;
- *input* for programs, and Ctrl-C, go through the terminal;
- *output* comes from the terminal; each action ends with a mark made of 128 random bits, drawn for that action and
  read by bash only after the command has ended, so no output can hold it.

A command is handed over quoted, as an argument of ``eval``: unfinished quotes are a syntax error of that command and
swallow nothing. The end mark is a line of its own: bash gets to it also after Ctrl-C. It is written to ``/dev/tty``,
wherever the command may have sent the shell's own output.

Nothing polls: the loop wakes when the terminal has output, and latency is bash's own, some tenths of a millisecond.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.link import Process, SandboxLost, writable
from nemo_gym_prorl.sandbox.output import HeadTail


OUTPUT_LIMIT = 64 << 10
"""Bytes of an action's output that are kept, half from its beginning and half from its end."""

HARD_TIMEOUT_S = 180.0
SOFT_TIMEOUT_S = 60.0

INTERRUPT_GRACE_S = 1.0
"""How long a command may take to end after Ctrl-C; then its processes are killed, and at last bash."""

START_TIMEOUT_S = 20.0

ROWS, COLUMNS = 50, 200
"""Size of the terminal: wide, since what is folded is harder to read for a model."""

VARIABLES = {"PS1": "", "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}

_PREPARE = r"""exec 2>/dev/null; set +o history +H; unset HISTFILE
_prorl_end() { local code=$?; builtin printf '\036%s %d %s\0' "$1" "$code" "$PWD" >/dev/tty; return "$code"; }
"""
"""Defines the end mark, which leaves ``$?`` to the next command as it found it. Bash's own errors go nowhere: they are
its prompts, which programs set as they like. Those of commands go to the terminal."""

_BEGIN = b"\x1e"
_READ = 1 << 16
_READS_A_TURN = 16
"""Reads before other tasks of the loop get a turn while a command floods the terminal."""


@dataclass(frozen=True, slots=True)
class Action:
    """What became of one command.

    Attributes:
        output: what the terminal showed, at most the limit, with one line in place of what is left out.
        exit_code: its exit code; ``None`` if the command goes on running, or the shell ended without one.
        cwd: the shell's working folder afterwards.
        waiting: it was silent for the soft time-out and goes on running: it may wait for input.
        timed_out: its hard time-out was up and it was ended.
        exited: the shell has ended (``exit``, ``exec``, ``set -e``, or killed); :meth:`Shell.restart` starts another.
        omitted: bytes of output that were left out.
        seconds: how long it took.
    """

    output: str
    exit_code: int | None
    cwd: str
    waiting: bool = False
    timed_out: bool = False
    exited: bool = False
    omitted: int = 0
    seconds: float = 0.0


class ShellBusy(CallerError):
    """A command still runs in the shell."""


class Shell:
    """One bash session. Belongs to one event loop; one command at a time."""

    def __init__(self, container: Container, env: Mapping[str, str], cwd: str | None) -> None:
        self._container = container
        self._env = env
        self._start_cwd = cwd
        self._loop = asyncio.get_running_loop()
        self._terminal = -1
        self._commands = -1
        self._bash: Process | None = None
        self._mark = b""
        self._tail = b""
        self._limit = OUTPUT_LIMIT
        self._kept = HeadTail(OUTPUT_LIMIT)
        self._result: tuple[int, str] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._heard = 0.0
        self.cwd = ""

    @classmethod
    async def start(
        cls, container: Container, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Shell:
        """Start bash in a sandbox; a few milliseconds.

        Raises:
            InfrastructureError: the image has no bash, or it does not answer.
        """
        shell = cls(container, {**VARIABLES, **(env or {})}, cwd)
        await shell.restart()
        return shell

    @property
    def running(self) -> bool:
        """Whether a command has not ended yet."""
        return bool(self._mark)

    @property
    def exited(self) -> bool:
        """Whether bash has ended."""
        return self._bash is None or self._bash.ended.done()

    async def restart(self) -> None:
        """End bash, if it lives, with everything that runs in its session, and start a fresh one."""
        await self.close()
        self._kept = HeadTail(self._limit)
        reader, self._commands = os.pipe()
        try:
            self._bash = await self._container.spawn(
                ["/bin/sh", "-c", "exec bash --noprofile --norc -i <&3 3<&-"],
                [reader],
                cwd=self._start_cwd,
                env=self._env,
                terminal=(ROWS, COLUMNS),
            )
        except BaseException:
            os.close(self._commands)
            self._commands = -1
            raise
        finally:
            os.close(reader)
        self._terminal = self._bash.terminal or -1
        os.set_blocking(self._terminal, False)
        os.set_blocking(self._commands, False)
        self._bash.ended.add_done_callback(lambda _future: self._notify())
        self._loop.add_reader(self._terminal, self._read)
        try:
            await self._write(self._commands, _PREPARE.encode())
            first = await self.run("command -v bash", timeout_s=START_TIMEOUT_S, silence_s=None)
            trouble = first.output or "no answer" if first.exit_code else ""
        except SandboxLost:
            if not self._container.alive:
                raise
            trouble = "it ended at once"
        if trouble:
            await self.close()
            raise InfrastructureError(
                f"a shell session needs bash in the image: {trouble.strip()[-400:]}",
                kind=FailureKind.PROVIDER_UNAVAILABLE,
            )

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
            timeout_s: hard limit. Then the command gets Ctrl-C, after a second SIGKILL, and the shell is usable again;
                if bash itself can't be interrupted, it is ended (``exited``).
            silence_s: soft limit: give back control when there was no output for so long; the command goes on, and
                :meth:`wait`, :meth:`send` or :meth:`interrupt` follow. ``None`` to wait for the hard limit only.
            output_limit: bytes of output to keep.

        Raises:
            ShellBusy: the command before has not ended.
            CallerError: there is a NUL in the command.
            SandboxLost: the shell or the sandbox ended before.
        """
        if self.running:
            raise ShellBusy("a command still runs in this shell: wait for it, interrupt it or restart the shell")
        if "\0" in command:
            raise CallerError("must not hold a NUL character", field="command")
        if self.exited:
            raise SandboxLost("the shell has ended; restart it")
        nonce = secrets.token_hex(16)
        self._mark = _BEGIN + nonce.encode()
        if output_limit != self._limit:
            earlier, self._limit = self._kept.text(), output_limit
            self._kept = HeadTail(output_limit)
            self._kept.add(earlier.encode())
        self._tail = b""
        self._result = None
        source = f"eval -- {shlex.quote(command)} </dev/tty 2>&1\n_prorl_end {nonce}\n"
        await self._write(self._commands, source.encode("utf-8", "surrogateescape"))
        return await self.wait(timeout_s=timeout_s, silence_s=silence_s)

    async def wait(self, *, timeout_s: float = HARD_TIMEOUT_S, silence_s: float | None = SOFT_TIMEOUT_S) -> Action:
        """Wait for the command that runs; as :meth:`run` otherwise, with all of its output so far."""
        begin = self._heard = self._loop.time()
        while self._result is None and not self.exited:
            now = self._loop.time()
            if now - begin >= timeout_s:
                return await self._time_out(begin)
            if silence_s is not None and now - self._heard >= silence_s:
                return self._action(begin, waiting=True)
            until = begin + timeout_s if silence_s is None else min(begin + timeout_s, self._heard + silence_s)
            await self._change(until)
        return self._action(begin)

    async def send(self, text: str) -> None:
        """Type ``text`` at the terminal, for the program that runs to read; end a line with a newline."""
        await self._write(self._terminal, text.encode("utf-8", "surrogateescape"))

    async def interrupt(self) -> None:
        """Press Ctrl-C."""
        await self._write(self._terminal, b"\x03")

    async def close(self) -> None:
        """End bash and what runs in the foreground. Harmless when it has ended."""
        if self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
            # Closing the terminal hangs up on everything in the session.
            os.close(self._terminal)
            self._terminal = -1
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1
        if self._bash is not None and not self._bash.ended.done() and self._container.alive:
            await self._container.signal(self._bash, signal.SIGKILL)
            await asyncio.wait([self._bash.ended])
        self._bash = None
        self._mark = b""

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _time_out(self, begin: float) -> Action:
        """End the command by and by more forcefully, until the shell answers or is gone."""
        for force in (self.interrupt, self._kill_foreground, self._kill_shell):
            await force()
            deadline = self._loop.time() + INTERRUPT_GRACE_S
            while self._result is None and not self.exited and self._loop.time() < deadline:
                await self._change(deadline)
            if self._result is not None or self.exited:
                break
        return self._action(begin, timed_out=True)

    async def _kill_foreground(self) -> None:
        try:
            group = os.tcgetpgrp(self._terminal)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EIO):
                raise
            return
        if group > 0 and self._bash and group != self._bash.pid:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def _kill_shell(self) -> None:
        if self._bash:
            await self._container.signal(self._bash, signal.SIGKILL)

    def _action(self, begin: float, *, waiting: bool = False, timed_out: bool = False) -> Action:
        code: int | None = None
        if self._result is not None:
            code, self.cwd = self._result
        elif self._bash is not None and self._bash.ended.done():
            # Raises if the whole sandbox was lost.
            status = self._bash.ended.result()
            code = status if status >= 0 else 128 - status
        kept = self._kept
        if not waiting:
            self._mark = b""
            kept.add(self._tail)
            self._tail = b""
            self._kept = HeadTail(self._limit)
        return Action(
            output=kept.text(),
            exit_code=code,
            cwd=self.cwd,
            waiting=waiting,
            timed_out=timed_out,
            exited=self.exited,
            omitted=kept.omitted,
            seconds=self._loop.time() - begin,
        )

    def _read(self) -> None:
        """Take what the terminal has. What comes between actions, from the background, goes to the next one."""
        for _ in range(_READS_A_TURN):
            try:
                data = os.read(self._terminal, _READ)
            except BlockingIOError:
                break
            except OSError as error:
                # A terminal whose last user is gone.
                if error.errno != errno.EIO:
                    raise
                data = b""
            if not data:
                self._loop.remove_reader(self._terminal)
                break
            self._take(data)
        self._heard = self._loop.time()
        self._notify()

    def _take(self, data: bytes) -> None:
        if not self._mark or self._result is not None:
            self._kept.add(data)
            return
        data = self._tail + data
        at = data.find(self._mark)
        if at < 0:
            # The mark may have come in part.
            keep = len(self._mark) - 1
            begin = data.rfind(_BEGIN, max(0, len(data) - keep))
            self._tail = data[begin:] if begin >= 0 else b""
            self._kept.add(data[: len(data) - len(self._tail)])
            return
        end = data.find(b"\0", at)
        if end < 0:
            self._tail = data
            return
        self._kept.add(data[:at])
        self._tail = b""
        status, _, cwd = data[at + len(self._mark) + 1 : end].partition(b" ")
        self._result = int(status), cwd.decode("utf-8", "surrogateescape")

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _change(self, until: float) -> None:
        """Wait for output, for the shell's end, or until a time of the loop's clock."""
        self._changed = self._loop.create_future()
        timer = self._loop.call_at(until, self._notify)
        try:
            await self._changed
        finally:
            timer.cancel()
            self._changed = None

    async def _write(self, descriptor: int, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                await writable(descriptor)
            except OSError as error:
                raise SandboxLost("the shell has ended; restart it") from error
