# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Command socket, status socket and terminal of a persistent bash.

Bash reads commands from a stream socket, its standard input. Bash's own standard error is a packet socket, the *status
socket*. Standard input, output and error of a command are the terminal. Each command is one line::

    <&0 _prorl=(); if ((1)) <"/NONCE/begin"; then :; fi; \eval -- 'COMMAND' <TTY 2>TTY; if ((1)) <"/NONCE/$?/"; then …

``((1)) <"/NONCE/…"`` redirects from a file that does not exist. Bash's error message names the file, and so reports
the begin or the end of the command on the status socket. The agent cannot define an alias or function for any word of
these lines. A failed redirection runs no ``DEBUG`` or ``ERR`` trap, and the condition of an ``if`` is exempt from
``set -e``. (The line begins with a redirection without effect, because after some syntax errors bash misparses the
first parenthesis of the next line.)

The command is an argument of ``eval``, so unfinished quotes are a syntax error of that command only. After Ctrl-C, or
an error in an expansion, bash discards the rest of the line and prints its prompt to the status socket. The server
then sends another line that reports the end.

``$?``, ``PIPESTATUS`` and ``$_`` persist from the end of a command to the beginning of the next (:class:`Outcome`).
Since ``eval`` overwrites these parameters, the command saves their values at its end (:data:`_SAVE`).

A program that writes the nonce to the status socket ends its own command early. So graders do not use a shell session:
they use ``exec``, whose exit code comes from the kernel.

The terminal (:class:`ContainerTerminal`) belongs to the sandbox's own ``devpts``, so that programs can open the
terminal by path. The supervisor creates the terminal, starts bash, and passes the controlling end to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import secrets
import select
import shlex
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass

from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.sessions.commands import HeadTail
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken


PROMPT = "$ "
"""Bash's prompt, which appears on the status socket after a discarded line; any text but an empty one works."""

_PACKET_BYTES = 16 << 10  # read per packet; bash writes 1 KiB at a time
_MAX_END_REQUESTS = 50  # per command: each unexpected packet causes one, and a command may flood the status socket
# Longest $_ (characters) and PIPESTATUS (entries) that are restored: a report must fit into one packet of bash.
_MAX_WORD_CHARS = 512
_MAX_PIPES = 64

_REPORT = re.compile(rb"/([0-9a-f]{32})/(?:begin|(\d+)/(?:([\d ]*)/(.*)/\1/)?|discarded(\d+)|over)")
"""Bash's report on the status socket about the command with a nonce: begun, ended or discarded."""

_NO_TERMINAL = re.compile(rb"/dev/pts/\d+: \w")
"""Bash's error message if a command cannot open the terminal, such as at the limit of open files."""

_DELETED = " (deleted)"
"""Suffix that the kernel appends to the path of a deleted folder."""

_SAVE = (
    f'\nif ((1)) 2>/dev/null <"/-/${{_prorl[0]:=$?}}${{_prorl[1]:=${{PIPESTATUS[@]:0:{_MAX_PIPES + 1}}}}}'
    f'${{_prorl[2]:=${{_:0:{_MAX_WORD_CHARS + 1}}}}}"; then :; fi'
)
"""Appended to a command: saves the :class:`Outcome` for the next command, and makes ``eval`` succeed, so that a failed
command runs the ``ERR`` trap only once."""

_HEREDOC = re.compile(r"(?<!<)<<(-?)(?!<)[ \t]*(?:\\?([\w.-]+)|'([^'\n]+)'|\"([^\"\n]+)\")?")
_UNFINISHED = re.compile(r"(?:[|\\]|&&|\bin|\( ?\)?|\bfunction \S+)\Z")
"""Matches the last two words of a command that continues on the next line."""

PREPARE = b"exec 2>&4 4>&-; set +o history +H; unset HISTFILE; history -c\n"
"""First line that bash gets: sends bash's own errors and prompts to the status socket, and disables the history."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shell parameters that a command leaves for the next command.

    Attributes:
        status: ``$?``.
        pipes: ``PIPESTATUS``; empty if unknown or too long.
        word: ``$_``; empty if unknown or too long.
    """

    status: int = 0
    pipes: tuple[int, ...] = ()
    word: str = ""


def _is_finished(command: str) -> bool:
    """Return whether text appended on a further line would be a statement of its own; ``False`` if unsure."""
    for found in _HEREDOC.finditer(command):
        tabs, *names = found.groups()
        name = next((name for name in names if name), None)
        indent = r"\t*" if tabs else ""
        if name is None or not re.search(f"^{indent}{re.escape(name)}$", command[found.end() :], re.MULTILINE):
            return False
    return not _UNFINISHED.search(" ".join(command.rsplit(None, 2)[-2:]))


class BashChannel:
    """The command and status sockets of one bash. Belongs to one event loop.

    Args:
        on_end: called once per command, with the exit code.
        on_unusable: called when a command could not open the terminal, so that bash cannot run commands.
    """

    def __init__(self, on_end: Callable[[int], None], on_unusable: Callable[[], None]) -> None:
        self._on_end = on_end
        self._on_unusable = on_unusable
        self._loop = asyncio.get_running_loop()
        self._commands, self.bash_commands = socket.socketpair()
        self._status, self.bash_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._commands.setblocking(False)
        self._status.setblocking(False)
        self._unsent = b""
        self._process = -1
        """Descriptor of bash's ``/proc/PID``, which never refers to a later process with the same pid; -1 before."""
        self._terminal = 0
        self._nonce = ""
        self._mark = b""
        """``/NONCE/``, with which reports about the running command begin; empty if no command runs."""
        self._discarded: int | None = None
        """Exit code of a line that bash has discarded, until bash reports that the line is over."""
        self._end_requests = 0
        self.begun = False
        """Whether bash has begun the last command, and so has read its complete line."""
        self.last = Outcome()
        self._loop.add_reader(self._status, self._read)

    def connect(self, pid: int, terminal: int) -> None:
        """Send :data:`PREPARE` to a new bash, whose terminal in the sandbox is ``/dev/pts/TERMINAL``, and close this
        process's copies of bash's socket ends."""
        self._terminal = terminal
        self.bash_commands.close()
        self.bash_status.close()
        with contextlib.suppress(FileNotFoundError):
            self._process = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._send(PREPARE)

    def run(self, command: str) -> None:
        """Send a command to bash, which first restores the :class:`Outcome` of the last command.

        Raises:
            SandboxBroken: bash has ended.
        """
        self._nonce = secrets.token_hex(16)
        self._mark = f"/{self._nonce}/".encode()
        self._discarded, self._end_requests, self.begun = None, 0, False
        last, pipes = self.last, ""
        if last.pipes != (last.status,):
            pipes = "".join(f"PIPESTATUS[{index}]={status}," for index, status in enumerate(last.pipes))
        # Expansions restore $_ and PIPESTATUS, since an assignment command would run the agent's DEBUG trap.
        code = shlex.quote(command + _SAVE if _is_finished(command) else command)
        self._send(
            f"<&0 _prorl=(); if ((1)) </{self._nonce}/begin${{_:={shlex.quote(last.word)}}}; then :; fi; "
            f"{f'(exit {last.status}) && ((0)) || ' if last.status else ''}\\eval -- {code} "
            f'</dev/pts/{self._terminal} 2>"/dev/pts/$(({pipes}{self._terminal}))"; '
            f"{self._report_command(f'${{_prorl[0]:-$?}}/${{_prorl[1]-}}/${{_prorl[2]-}}/{self._nonce}/')}\n".encode(
                "utf-8", "surrogateescape"
            )
        )

    def ask_end(self) -> None:
        """Send a line that reports the end of the running command, in case bash has discarded the command's line."""
        self._end_requests += 1
        if self.begun and self._mark and self._end_requests <= _MAX_END_REQUESTS:
            # "<&0" is a simple command, at which bash waits for a program that it was starting when interrupted. The
            # quote in the comment closes an open quote, if a further interrupt makes bash drop the line's beginning.
            with contextlib.suppress(SandboxBroken):
                self._send(f'{self._report_command("discarded$?")}; <&0; {self._report_command("over")} #"\n'.encode())

    @property
    def unread_bytes(self) -> int:
        """Bytes of commands that bash has not read, including the kernel's overhead per buffer; 0 once closed."""
        if self._commands.fileno() < 0:
            return 0
        queued = fcntl.ioctl(self._commands, termios.TIOCOUTQ, bytes(4))
        return len(self._unsent) + int(struct.unpack("i", queued)[0])

    def folder(self) -> str | None:
        """Return bash's working directory; ``None`` if bash has ended, or is not dumpable and so cannot be read."""
        try:
            folder = os.readlink("cwd", dir_fd=self._process)
            gone = folder.endswith(_DELETED) and not os.stat("cwd", dir_fd=self._process).st_nlink
        except OSError:
            return None
        return folder.removesuffix(_DELETED) if gone else folder

    def close(self) -> None:
        """Close all sockets and descriptors; bash then reads the end of its input."""
        for ours in (self._commands, self._status):
            if ours.fileno() >= 0:
                self._loop.remove_reader(ours)
                self._loop.remove_writer(ours)
        for end in (self._commands, self.bash_commands, self._status, self.bash_status):
            end.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _report_command(self, what: str) -> str:
        return f'if ((1)) <"/{self._nonce}/{what}"; then :; fi'

    def _send(self, line: bytes) -> None:
        self._unsent += line
        self._write()

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[self._commands.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._loop.remove_writer(self._commands)
            raise SandboxBroken("the shell has ended; restart it") from error
        if self._unsent:
            self._loop.add_writer(self._commands, self._write_rest)
        else:
            self._loop.remove_writer(self._commands)

    def _write_rest(self) -> None:
        # The end of bash is reported by its process, not by this callback.
        with contextlib.suppress(SandboxBroken):
            self._write()

    def _read(self) -> None:
        """Read one packet of the status socket per callback, so that a flood of packets does not block the loop."""
        try:
            data = self._status.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._status)
        elif self._mark and self.begun:
            self._take(data, self._find_report(data))
        elif self._mark:
            self.begun = self._find_report(data) is not None

    def _find_report(self, data: bytes) -> re.Match[bytes] | None:
        at = -1
        while (at := data.find(self._mark, at + 1)) >= 0:
            if report := _REPORT.match(data, at):
                return report
        return None

    def _take(self, data: bytes, report: re.Match[bytes] | None) -> None:
        if report and report[2]:
            pipes = tuple(min(int(status), 255) for status in (report[3] or b"").split())
            word = (report[4] or b"").decode("utf-8", "surrogateescape")
            fitting = (pipes if len(pipes) <= _MAX_PIPES else (), word if len(word) <= _MAX_WORD_CHARS else "")
            self._end(Outcome(int(report[2]), *fitting))
        elif report and report[5]:
            self._discarded = int(report[5]) if self._discarded is None else self._discarded
        elif self._discarded is not None:
            # The packet is the report "over", or the prompt after another Ctrl-C: in both cases the command has ended.
            self._end(Outcome(self._discarded))
        elif _NO_TERMINAL.search(data):
            self._mark = b""
            self._on_unusable()
        else:
            self.ask_end()

    def _end(self, outcome: Outcome) -> None:
        self._mark, self.last = b"", outcome
        self._on_end(outcome.status)


_TIOCGPTN = 0x80045430
"""ioctl that returns the number of a terminal, on x86 and ARM."""

_TIOCGPTPEER = 0x5441
"""ioctl that opens a terminal by its controlling end's descriptor (Linux 4.13); Python 3.12 lacks the constant."""

_READ_BYTES = 1 << 16  # more than the kernel buffers per terminal
_READS_PER_CALLBACK = 16
"""Reads of a terminal per callback, so that a flood of output does not block the event loop."""

_LAST_READS = 64
"""Reads after a command's end: enough for all that the kernel buffers per terminal."""


class ContainerTerminal:
    """Controlling end ``fd`` of a sandbox's terminal, non-blocking. The terminal's process ``pid`` is a child of the
    supervisor."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.fd = fd
        os.set_blocking(fd, False)
        self.number = int.from_bytes(fcntl.ioctl(fd, _TIOCGPTN, bytes(4)), sys.byteorder)
        """Number of the terminal: its path in the sandbox is ``/dev/pts/NUMBER``."""

    def press_interrupt(self) -> None:
        """Type Ctrl-C; the signal is sent to the foreground process group before this call returns. The key is lost if
        the terminal's input buffer is full."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.fd, b"\x03")
            self._take_typed()

    def _take_typed(self) -> None:
        """Make the kernel process typed input now, by polling the terminal for input. The kernel processes input
        asynchronously, but a poll flushes its work queue. A late Ctrl-C would interrupt bash between two commands, or
        while bash reads the next command."""
        with contextlib.suppress(OSError):  # no process has the terminal open, or the kernel lacks the ioctl
            other_end = fcntl.ioctl(self.fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                poll = select.poll()
                poll.register(other_end, select.POLLIN)
                poll.poll(0)
            finally:
                os.close(other_end)

    def foreground(self) -> int | None:
        """Return the id of the foreground process group; ``None`` if that is bash's own, or there is none."""
        # tcgetpgrp returns 0 without a foreground group, and fails once the terminal is closed.
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self.fd)
            return group if group not in (0, self.pid) else None
        return None

    def kill_foreground(self) -> None:
        """Kill the foreground process group, unless it is bash's. A child of bash must be in the group: its id is
        not reused while a member lives."""
        with contextlib.suppress(OSError):
            group = self.foreground()
            if group is not None and any(os.getpgid(child) == group for child in usage.child_pids(self.pid)):
                os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        """Close the controlling end, which sends SIGHUP to the terminal's session. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class TerminalOutput:
    """Collector of the output of one shell's terminal. Belongs to one event loop.

    Output of background jobs between two commands counts as output of the next command, of which ``limit`` bytes are
    kept.
    """

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._terminal = -1
        self._limit = limit
        self._changed: asyncio.Future[None] | None = None
        self.kept = HeadTail(limit)
        self.last_output = 0.0
        """Event loop time of the last output."""

    def listen_to(self, terminal: int) -> None:
        """Start reading from the controlling end ``terminal``, and drop the output of an earlier terminal."""
        self._terminal = terminal
        self.kept = HeadTail(self._limit)
        self._loop.add_reader(terminal, self._read)

    def stop(self) -> None:
        """Stop reading; call this before the terminal's descriptor is closed."""
        if self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
            self._terminal = -1

    def limit_to(self, limit: int) -> None:
        if limit != self._limit:
            earlier, self._limit = self.kept.text(), limit
            self.kept = HeadTail(limit)
            self.kept.add(earlier.encode())

    def clear(self) -> None:
        self.kept = HeadTail(self._limit)

    def take_last(self) -> None:
        """Read all output that programs have written so far, up to :data:`_LAST_READS` reads."""
        self._take(_LAST_READS)

    def notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def change(self, until: float) -> None:
        """Wait for output or :meth:`notify`, at most until the event loop time ``until``."""
        self._changed = self._loop.create_future()
        timer = self._loop.call_at(until, self.notify)
        try:
            await self._changed
        finally:
            timer.cancel()
            self._changed = None

    def _read(self) -> None:
        if not self._take(_READS_PER_CALLBACK) and self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
        self.last_output = self._loop.time()
        self.notify()

    def _take(self, most: int) -> bool:
        """Read at most ``most`` times; return whether the terminal is open, so that further output may come."""
        for _ in range(most):
            if self._terminal < 0:
                return False
            try:
                data = os.read(self._terminal, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:  # EIO: no process has the terminal open
                    raise
                return False
            self.kept.add(data)
        return True
