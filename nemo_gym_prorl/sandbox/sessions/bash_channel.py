# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""Command and status sockets of a persistent bash, and its terminal.

Bash reads commands from a stream socket, its standard input. Bash's own standard error, outside of commands, is a
packet socket, the *status socket*. The standard files of a command are the terminal. Each command is one line::

    <&0 _prorl=(); if ((1)) <"/NONCE/begin"; then :; fi; \eval -- 'COMMAND' <TTY 2>TTY; if ((1)) <"/NONCE/$?/"; then …

``((1)) <"/NONCE/…"`` redirects from a file that does not exist. Bash's complaint names the file, and so carries the
begin or the end of the command to the status socket. No word of these lines can be an alias or a function of the
agent's, and a failed redirection runs no ``DEBUG`` or ``ERR`` trap. The condition of an ``if`` is exempt from
``set -e``. (The line begins with a redirection without effect: after some syntax errors bash misreads the first
parenthesis of the next line.)

The command is an argument of ``eval``: unfinished quotes are a syntax error of that command alone. Ctrl-C, or an error
in an expansion, discards the rest of the line, and bash prints its prompt to the status socket. Then a line of its own
requests the end.

``$?``, ``PIPESTATUS`` and ``$_`` persist from the end of a command to the beginning of the next (:class:`Outcome`).
Since ``eval`` overwrites these parameters, the command saves their values at its end (:data:`_SAVE`).

A program that writes the nonce to the status socket ends its own command early. So graders never rely on a shell: they
use ``exec``, whose exit code comes from the kernel.

The terminal (:class:`ContainerTerminal`) belongs to the sandbox's own ``devpts``, so that programs can open it by
name. The supervisor makes the terminal and starts bash, and returns the controlling end. Bash is no child of this
process, which can neither wait for it nor kill it.
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
import socket
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass

from ptyprocess import PtyProcess

from nemo_gym_prorl.sandbox.sessions.commands import HeadTail
from nemo_gym_prorl.sandbox.signals import Session
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken


PROMPT = "$ "
"""Prompt by which bash reports a discarded line; any text but an empty one works."""

_PACKET_BYTES = 16 << 10  # bash writes a kilobyte at a time
_MAX_END_REQUESTS = 50  # per command; a command that floods the status socket would cause more
# The longest ``$_`` and ``PIPESTATUS`` that are restored. Of a report in several packets only the exit code is read.
_WORD_CHARS = 512
_PIPES = 64


_REPORT = re.compile(rb"/([0-9a-f]{32})/(?:begin|(\d+)/(?:([\d ]*)/(.*)/\1/)?|discarded(\d+)|over)")
"""Bash's report about a command, with the command's nonce."""

_NO_TERMINAL = re.compile(rb"/dev/pts/\d+: \w")
"""Bash's error when a command could not open its terminal, such as at the limit of open files."""

_DELETED = " (deleted)"
"""Suffix by which the kernel marks the path of a deleted folder."""

_SAVE = (
    f'\nif ((1)) 2>/dev/null <"/-/${{_prorl[0]:=$?}}${{_prorl[1]:=${{PIPESTATUS[@]:0:{_PIPES + 1}}}}}'
    f'${{_prorl[2]:=${{_:0:{_WORD_CHARS + 1}}}}}"; then :; fi'
)
"""Saves the :class:`Outcome` for the next command; also makes ``eval`` succeed, so that ``ERR`` is trapped once."""

_HEREDOC = re.compile(r"(?<!<)<<(-?)(?!<)[ \t]*(?:\\?([\w.-]+)|'([^'\n]+)'|\"([^\"\n]+)\")?")
_UNFINISHED = re.compile(r"(?:[|\\]|&&|\bin|\( ?\)?|\bfunction \S+)\Z")
"""Matches the last two words of a continued command."""

_OPTION = '-- "$@"; \\eval \'_prorl() {{ \\unset -f _prorl; {edited}; \\set {sign}o "$@"; }}; _prorl\''
_SHOPT = "\\eval '_prorl() {{ \\unset -f _prorl; {edited}; \\shopt \"$@\"; }}; _prorl'"
_EDITED = '\\set -- "${@/#vi/nolog}"; \\set -- "${@/#emacs/nolog}"'
_ALIASES = {
    "set": "set ",
    **{f"{sign}o": _OPTION.format(edited=_EDITED, sign=sign) for sign in "-+"},
    "shopt": _SHOPT.format(edited=_EDITED),
}
"""Aliases that replace the options ``vi`` and ``emacs`` by ``nolog``, which bash ignores. The originals switch bash's
input within a command, and bash exits. Not functions: ``set`` in a function sets the function's arguments."""

PREPARE = (
    "exec 2>&4 4>&-; set +o history +H; unset HISTFILE; alias -- "
    f"{' '.join(f'{name}={shlex.quote(value)}' for name, value in _ALIASES.items())}; history -c\n"
).encode()
"""Bash's own errors and prompts go to the status socket; those of commands go to the terminal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a command that the next command can read.

    Attributes:
        status: ``$?``.
        pipes: ``PIPESTATUS``, if known.
        word: ``$_``.
    """

    status: int = 0
    pipes: tuple[int, ...] = ()
    word: str = ""


def _is_finished(command: str) -> bool:
    """Return whether a new line after a command cannot continue it; ``False`` in doubt."""
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
        on_end: called with the exit code of the running command, once.
        on_unusable: called when bash has failed to run a command and cannot run others.
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
        """Descriptor of bash's folder under ``/proc``, which stays bash's after its pid is reused."""
        self._terminal = 0
        self._nonce = ""
        self._mark = b""
        """Beginning of bash's reports about the running command; empty if none runs."""
        self._discarded: int | None = None
        """Exit code of a discarded line, until its end is reported."""
        self._end_requests = 0
        self.begun = False
        """Whether bash has read the whole line of the last command."""
        self.last = Outcome()
        self._loop.add_reader(self._status, self._read)

    def connect(self, pid: int, terminal: int) -> None:
        """Prepare a new bash, which owns the other ends of the sockets from now on.

        Args:
            pid: host pid of bash.
            terminal: number of bash's terminal in the sandbox.
        """
        self._terminal = terminal
        self.bash_commands.close()
        self.bash_status.close()
        with contextlib.suppress(FileNotFoundError):
            self._process = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._send(PREPARE)

    def run(self, command: str) -> None:
        """Let bash run a command, with the :class:`Outcome` of the last one.

        Raises:
            SandboxBroken: bash has ended.
        """
        self._nonce = secrets.token_hex(16)
        self._mark = f"/{self._nonce}/".encode()
        self._discarded, self._end_requests, self.begun = None, 0, False
        last, pipes = self.last, ""
        if last.pipes != (last.status,):
            pipes = "".join(f"PIPESTATUS[{place}]={status}," for place, status in enumerate(last.pipes))
        # Only an expansion can set these variables without a command, which a trap would see.
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
        """Request a report of the end of a line that bash has, or may have, discarded."""
        self._end_requests += 1
        if self.begun and self._mark and self._end_requests <= _MAX_END_REQUESTS:
            # A bash that was interrupted while it started a program waits for the program at its next simple command.
            # The comment closes quotes, in case another interrupt leaves only a part of this line.
            with contextlib.suppress(SandboxBroken):
                self._send(f'{self._report_command("discarded$?")}; <&0; {self._report_command("over")} #"\n'.encode())

    @property
    def unread(self) -> int:
        """Bytes that bash has not read, as the kernel counts them, with its overhead."""
        if self._commands.fileno() < 0:
            return 0
        queued = fcntl.ioctl(self._commands, termios.TIOCOUTQ, bytes(4))
        return len(self._unsent) + int(struct.unpack("i", queued)[0])

    def folder(self) -> str | None:
        """Return bash's working folder; ``None`` if it cannot be read, since bash has ended or is not dumpable."""
        try:
            folder = os.readlink("cwd", dir_fd=self._process)
            gone = folder.endswith(_DELETED) and not os.stat("cwd", dir_fd=self._process).st_nlink
        except OSError:
            return None
        return folder.removesuffix(_DELETED) if gone else folder

    def close(self) -> None:
        """Close every file, which ends bash's input."""
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
        # The process of bash reports its end.
        with contextlib.suppress(SandboxBroken):
            self._write()

    def _read(self) -> None:
        """Read one packet per callback, so that a flood does not block the loop."""
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
            fitting = (pipes if len(pipes) <= _PIPES else (), word if len(word) <= _WORD_CHARS else "")
            self._end(Outcome(int(report[2]), *fitting))
        elif report and report[5]:
            self._discarded = int(report[5]) if self._discarded is None else self._discarded
        elif self._discarded is not None:
            self._end(Outcome(self._discarded))  # also after another interrupt: bash then waits for no program
        elif _NO_TERMINAL.search(data):
            self._mark = b""
            self._on_unusable()
        else:
            self.ask_end()

    def _end(self, outcome: Outcome) -> None:
        self._mark, self.last = b"", outcome
        self._on_end(outcome.status)


_TIOCGPTN = 0x80045430
"""ioctl that returns the number of a terminal; PowerPC and MIPS have another value."""

_TIOCGPTPEER = 0x5441
"""ioctl that opens the other end of a terminal without a path (Linux 4.13). Python 3.13 has the constant."""

_READ_BYTES = 1 << 16  # more than the kernel's buffer of a terminal
_READS_PER_CALLBACK = 16
"""Reads before the loop runs other tasks, while a command floods the terminal."""

_LAST_READS = 64
"""Reads after a command's end; more than the kernel's buffer of a terminal can hold."""


class ContainerTerminal(PtyProcess):  # type: ignore[misc]  # has no types
    """Controlling end of a sandbox's terminal, non-blocking. The terminal's process is a child of the supervisor."""

    def __init__(self, pid: int, fd: int) -> None:
        super().__init__(pid, fd)
        self.closed: bool = False
        self._session = Session.of(pid)
        os.set_blocking(fd, False)
        self.number = int.from_bytes(fcntl.ioctl(fd, _TIOCGPTN, bytes(4)), sys.byteorder)
        """The terminal's path in the sandbox is ``/dev/pts/NUMBER``."""

    def press_control(self, key: str) -> None:
        """Press Ctrl and a key; the foreground programs have the signal when this returns.

        The key is lost if the terminal's buffer is full of unread input.
        """
        with contextlib.suppress(BlockingIOError):
            self.sendcontrol(key)
            self._take_typed()

    def _take_typed(self) -> None:
        """Make the kernel process typed input now.

        The kernel processes input asynchronously, but at once when the other end is polled for input. A late Ctrl-C
        would hit bash between two commands, or within the next command's line.
        """
        with contextlib.suppress(OSError):  # the terminal is closed at the other end, or the kernel is too old
            other_end = fcntl.ioctl(self.fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                look = select.poll()
                look.register(other_end, select.POLLIN)
                look.poll(0)
            finally:
                os.close(other_end)

    def foreground(self) -> int | None:
        """Return the foreground process group; ``None`` for bash itself, or without one."""
        # The call fails without a foreground group, or after the other end is closed.
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self.fd)
            return group if group != self.pid else None
        return None

    def kill_foreground(self) -> None:
        """Kill the foreground programs, but not bash. Blocks while members of the group are looked for."""
        with contextlib.suppress(OSError):
            if (group := self.foreground()) is not None:
                self._session.kill(group)

    def close(self, force: bool = False) -> None:
        """Close the controlling end, which sends SIGHUP to the terminal's session."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.fileobj.close()
            self.fd = -1


class TerminalOutput:
    """Output of one shell's terminal. Belongs to one event loop.

    Output of background jobs between two commands belongs to the next command.

    Args:
        limit: bytes kept of a command's output.
    """

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._terminal = -1
        self._limit = limit
        self._changed: asyncio.Future[None] | None = None
        self.kept = HeadTail(limit)
        self.heard = 0.0
        """Loop time of the last output."""

    def listen_to(self, terminal: int) -> None:
        """Start reading from a terminal, and drop the output of an earlier one."""
        self._terminal = terminal
        self.kept = HeadTail(self._limit)
        self._loop.add_reader(terminal, self._read)

    def stop(self) -> None:
        """Stop reading; to be called before the terminal is closed."""
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
        """Read all output that has been written so far."""
        self._take(_LAST_READS)

    def notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def change(self, until: float) -> None:
        """Wait for output or :meth:`notify`, at most until the loop time ``until``."""
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
        self.heard = self._loop.time()
        self.notify()

    def _take(self, most: int) -> bool:
        """Read at most ``most`` times; return whether more output may come."""
        for _ in range(most):
            if self._terminal < 0:
                return False
            try:
                data = os.read(self._terminal, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                # EIO: the other end is closed.
                if error.errno != errno.EIO:
                    raise
                return False
            self.kept.add(data)
        return True
