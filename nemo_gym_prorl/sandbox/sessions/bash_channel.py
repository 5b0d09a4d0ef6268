# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
r"""How a persistent bash receives commands and reports their exit codes: two private sockets; and its terminal.

Bash reads commands from a stream socket, its standard input. Bash's own standard error, outside of commands, is a
packet socket, the *status socket*. The standard files of a command are the terminal. Each command is one line::

    <&0 _prorl=(); if ((1)) <"/NONCE/begin"; then :; fi; \eval -- 'COMMAND' <TTY 2>TTY; if ((1)) <"/NONCE/$?/"; then …

``((1)) <"/NONCE/…"`` redirects from a file that does not exist. Bash's complaint names the file, and so carries the
begin or the end of the command to the status socket. No word of these lines can be an alias or a function of the
agent's, and a failed redirection runs no ``DEBUG`` or ``ERR`` trap. The condition of an ``if`` is exempt from
``set -e``. (The line begins with a redirection to nothing new: after some syntax errors bash misreads the first
parenthesis of the next line.)

The command is an argument of ``eval``: unfinished quotes are a syntax error of that command alone. Ctrl-C, or an error
in an expansion, discards the rest of the line, and bash prints its prompt to the status socket. Then the end is asked
for in a line of its own.

``$?``, ``PIPESTATUS`` and ``$_`` are at the beginning of a command what they were at the end of the one before
(:class:`Outcome`). Since ``eval`` overwrites them, the command saves them at its end (:data:`_SAVE`).

A program that writes the nonce to the status socket ends its own command early. Nothing is graded by the word of a
shell: graders use ``exec``, whose exit code comes from the kernel.

The terminal (:class:`ContainerTerminal`) is one of the container's own ``devpts``, or a program could not open it by
its name, and bash is born in the container's namespaces; so the supervisor makes both. The supervisor returns the
controlling end, and a process that is no child of this one: it can be neither waited for nor killed from here.
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
"""Tells that bash has discarded a line. Any other prompt does as well, but not an empty one."""

_PACKET_BYTES = 16 << 10
_MAX_QUESTIONS = 50  # that a command which floods the status socket can cause
# The longest ``$_`` and ``PIPESTATUS`` that are restored. Bash writes a kilobyte at a time: of a longer report, which
# comes in several packets, only the exit code is read.
_WORD_CHARS = 512
_PIPES = 64


_NO_TERMINAL = re.compile(rb"/dev/pts/\d+: \w")
"""Bash's complaint when a command could not be given its terminal, as where no more files may be opened."""

_DELETED = " (deleted)"
"""What the kernel appends to the path of a folder that is no more."""

_SAVE = (
    f'\nif ((1)) 2>/dev/null <"/-/${{_prorl[0]:=$?}}${{_prorl[1]:=${{PIPESTATUS[@]:0:{_PIPES + 1}}}}}'
    f'${{_prorl[2]:=${{_:0:{_WORD_CHARS + 1}}}}}"; then :; fi'
)
"""Saves what the next command is to find; also makes ``eval`` succeed, so that ``ERR`` is trapped once."""

_HEREDOC = re.compile(r"(?<!<)<<(-?)(?!<)[ \t]*(?:\\?([\w.-]+)|'([^'\n]+)'|\"([^\"\n]+)\")?")
_UNFINISHED = re.compile(r"(?:[|\\]|&&|\bin|\(\s*\)?|\bfunction\s+\S+)\s*\Z")

_OPTION = '-- "$@"; \\eval \'_prorl() {{ \\unset -f _prorl; {edited}; \\set {sign}o "$@"; }}; _prorl\''
_SHOPT = "\\eval '_prorl() {{ \\unset -f _prorl; {edited}; \\shopt \"$@\"; }}; _prorl'"
_EDITED = '\\set -- "${@/#vi/nolog}"; \\set -- "${@/#emacs/nolog}"'
_ALIASES = {
    "set": "set ",
    **{f"{sign}o": _OPTION.format(edited=_EDITED, sign=sign) for sign in "-+"},
    "shopt": _SHOPT.format(edited=_EDITED),
}
"""Put ``nolog``, which bash ignores, in place of the options ``vi`` and ``emacs``: those switch the source of bash's
input in the middle of a command, and bash dies of that. A function's ``set`` would set its own arguments only."""

PREPARE = (
    "exec 2>&4 4>&-; set +o history +H; unset HISTFILE; alias -- "
    f"{' '.join(f'{name}={shlex.quote(value)}' for name, value in _ALIASES.items())}; history -c\n"
).encode()
"""Bash's own errors and prompts go to the status socket; those of commands go to the terminal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, as the next one is to find it.

    Attributes:
        status: ``$?``.
        pipes: ``PIPESTATUS``, if known.
        word: ``$_``.
    """

    status: int = 0
    pipes: tuple[int, ...] = ()
    word: str = ""


def _is_finished(command: str) -> bool:
    """Return whether what follows a command on a new line cannot become a part of it; errs on the side of no."""
    for found in _HEREDOC.finditer(command):
        tabs, *names = found.groups()
        name = next((name for name in names if name), None)
        indent = r"\t*" if tabs else ""
        if name is None or not re.search(f"^{indent}{re.escape(name)}$", command[found.end() :], re.MULTILINE):
            return False
    return not _UNFINISHED.search(command)


class BashChannel:
    """The command and status sockets of one bash. Belongs to one event loop.

    Args:
        on_end: gets the exit code of the running command, once.
        on_unusable: bash cannot run commands any more, and has not run this one as it was sent.
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
        """Bash's folder under ``/proc``, which stays this process's, whoever gets its number later."""
        self._terminal = 0
        self._nonce = ""
        self._report: re.Pattern[bytes] | None = None
        """What bash reports of the running command; ``None`` if none runs."""
        self._discarded: int | None = None
        """The exit code of a line that was discarded, until its end is reported."""
        self._questions = 0
        self.begun = False
        """Whether bash has read all of the last command's line."""
        self.last = Outcome()
        self._loop.add_reader(self._status, self._read)

    def connect(self, pid: int, terminal: int) -> None:
        """Prepare a fresh bash, which owns the other ends from now on.

        Args:
            pid: bash's.
            terminal: number of its terminal in the sandbox.
        """
        self._terminal = terminal
        self.bash_commands.close()
        self.bash_status.close()
        with contextlib.suppress(FileNotFoundError):
            self._process = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._send(PREPARE)

    def run(self, command: str) -> None:
        """Have bash run a command, which finds the :class:`Outcome` of the last one.

        Raises:
            SandboxBroken: bash has ended.
        """
        self._nonce = secrets.token_hex(16)
        nonce = self._nonce.encode()
        self._report = re.compile(rb"/%b/(?:begin|(\d+)/(?:([\d ]*)/(.*)/%b/)?|discarded(\d+)|over)" % (nonce, nonce))
        self._discarded, self._questions, self.begun = None, 0, False
        last, pipes = self.last, ""
        if last.pipes != (last.status,):
            pipes = "".join(f"PIPESTATUS[{place}]={status}," for place, status in enumerate(last.pipes))
        # Nothing but an expansion can set these without a command that a trap would see.
        code = shlex.quote(command + _SAVE if _is_finished(command) else command)
        self._send(
            f"<&0 _prorl=(); if ((1)) </{self._nonce}/begin${{_:={shlex.quote(last.word)}}}; then :; fi; "
            f"{f'(exit {last.status}) && ((0)) || ' if last.status else ''}\\eval -- {code} "
            f'</dev/pts/{self._terminal} 2>"/dev/pts/$(({pipes}{self._terminal}))"; '
            f"{self._tell(f'${{_prorl[0]:-$?}}/${{_prorl[1]-}}/${{_prorl[2]-}}/{self._nonce}/')}\n".encode(
                "utf-8", "surrogateescape"
            )
        )

    def ask_end(self) -> None:
        """Have bash report the end of a line that it has discarded, or may have."""
        self._questions += 1
        if self.begun and self._report and self._questions <= _MAX_QUESTIONS:
            # Bash that was interrupted as it started a program waits for that with its next simple command. What is
            # left of this line after another interrupt ends with it: quotes are closed in the comment.
            with contextlib.suppress(SandboxBroken):
                self._send(f'{self._tell("discarded$?")}; <&0; {self._tell("over")} #"\n'.encode())

    @property
    def unread(self) -> int:
        """Bytes on their way to bash, as the kernel counts them, which is somewhat more."""
        if self._commands.fileno() < 0:
            return 0
        queued = fcntl.ioctl(self._commands, termios.TIOCOUTQ, bytes(4))
        return len(self._unsent) + int(struct.unpack("i", queued)[0])

    def folder(self) -> str | None:
        """Return where bash is; ``None`` if that cannot be seen, since it has ended or made itself undumpable."""
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

    def _tell(self, what: str) -> str:
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
        # The end of bash is reported by its process.
        with contextlib.suppress(SandboxBroken):
            self._write()

    def _read(self) -> None:
        """Read one packet: a flood gets one turn of the loop for each."""
        try:
            data = self._status.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._status)
        elif self._report and self.begun:
            self._take(data, self._report.search(data))
        elif self._report:
            self.begun = self._report.search(data) is not None

    def _take(self, data: bytes, report: re.Match[bytes] | None) -> None:
        if report and report[1]:
            pipes = tuple(min(int(status), 255) for status in (report[2] or b"").split())
            word = (report[3] or b"").decode("utf-8", "surrogateescape")
            fitting = (pipes if len(pipes) <= _PIPES else (), word if len(word) <= _WORD_CHARS else "")
            self._end(Outcome(int(report[1]), *fitting))
        elif report and report[4]:
            self._discarded = int(report[4]) if self._discarded is None else self._discarded
        elif self._discarded is not None:
            self._end(Outcome(self._discarded))  # also after another interrupt: bash waits for nothing any more
        elif _NO_TERMINAL.search(data):
            self._report = None
            self._on_unusable()
        else:
            self.ask_end()

    def _end(self, outcome: Outcome) -> None:
        self._report, self.last = None, outcome
        self._on_end(outcome.status)


_TIOCGPTN = 0x80045430
"""Asks for the number of a terminal; another one on PowerPC and MIPS only."""

_TIOCGPTPEER = 0x5441
"""Opens the other end of a terminal, by no name. Python knows it from 3.13 on, Linux from 4.13."""

_READ_BYTES = 1 << 16
_READS_A_TURN = 16
"""Reads before other tasks of the loop get a turn while a command floods the terminal."""

_LAST_READS = 64
"""Reads after a command's end; more than all that the kernel holds of what it wrote."""


class ContainerTerminal(PtyProcess):  # type: ignore[misc]  # has no types
    """The controlling end, never blocking. Its process is known to the supervisor alone."""

    def __init__(self, pid: int, fd: int) -> None:
        super().__init__(pid, fd)
        self.closed: bool = False
        self._session = Session.of(pid)
        os.set_blocking(fd, False)
        self.number = int.from_bytes(fcntl.ioctl(fd, _TIOCGPTN, bytes(4)), sys.byteorder)
        """In the sandbox its path is ``/dev/pts/NUMBER``."""

    def press_control(self, key: str) -> None:
        """Press Ctrl and a key; who is in the foreground has the signal of it when this returns.

        It is lost where nobody has read what was typed before and no more fits.
        """
        with contextlib.suppress(BlockingIOError):
            self.sendcontrol(key)
            self._take_typed()

    def _take_typed(self) -> None:
        """Have the kernel take what was typed, which it else does in its own time.

        A Ctrl-C that is late by a millisecond strikes bash between two commands, or in the middle of the next one's
        line. The kernel takes what it has at once where somebody looks, at the other end, whether there is input.
        """
        with contextlib.suppress(OSError):  # nobody has the terminal any more, or the kernel is too old
            other_end = fcntl.ioctl(self.fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                look = select.poll()
                look.register(other_end, select.POLLIN)
                look.poll(0)
            finally:
                os.close(other_end)

    def foreground(self) -> int | None:
        """The process group in the foreground; ``None`` for the first process itself, or nobody."""
        # It fails where nobody is in the foreground, or nobody has the terminal any more.
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self.fd)
            return group if group != self.pid else None
        return None

    def kill_foreground(self) -> None:
        """Kill what runs in the foreground, if it is not the first process itself. May take some time."""
        with contextlib.suppress(OSError):
            if (group := self.foreground()) is not None:
                self._session.kill(group)

    def close(self, force: bool = False) -> None:
        """Close our end, which hangs up on everything in the terminal's session."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.fileobj.close()
            self.fd = -1


class TerminalOutput:
    """The output of one shell's terminal, and when there was some. Belongs to one event loop.

    Output that comes between two commands, from background jobs, belongs to the next command.

    Args:
        limit: bytes that are kept of a command's output.
    """

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._terminal = -1
        self._limit = limit
        self._changed: asyncio.Future[None] | None = None
        self.kept = HeadTail(limit)
        self.heard = 0.0
        """When there was output last, by the loop's clock."""

    def listen_to(self, terminal: int) -> None:
        """Read from a terminal's descriptor, and drop what came from another one."""
        self._terminal = terminal
        self.kept = HeadTail(self._limit)
        self._loop.add_reader(terminal, self._read)

    def stop(self) -> None:
        """Read no more; call it before the terminal is closed."""
        if self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
            self._terminal = -1

    def limit_to(self, limit: int) -> None:
        """Keep so many bytes from now on."""
        if limit != self._limit:
            earlier, self._limit = self.kept.text(), limit
            self.kept = HeadTail(limit)
            self.kept.add(earlier.encode())

    def clear(self) -> None:
        """Drop what was kept: its command has ended."""
        self.kept = HeadTail(self._limit)

    def take_last(self) -> None:
        """Read what was written until now."""
        self._take(_LAST_READS)

    def notify(self) -> None:
        """Wake the waiter of :meth:`change`, also when there is no output."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def change(self, until: float) -> None:
        """Wait for output or :meth:`notify`, or until a time of the loop's clock."""
        self._changed = self._loop.create_future()
        timer = self._loop.call_at(until, self.notify)
        try:
            await self._changed
        finally:
            timer.cancel()
            self._changed = None

    def _read(self) -> None:
        if not self._take(_READS_A_TURN) and self._terminal >= 0:
            self._loop.remove_reader(self._terminal)
        self.heard = self._loop.time()
        self.notify()

    def _take(self, most: int) -> bool:
        """Read so many times at most; return whether there may ever be more."""
        for _ in range(most):
            if self._terminal < 0:
                return False
            try:
                data = os.read(self._terminal, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                # A terminal whose last user is gone.
                if error.errno != errno.EIO:
                    raise
                return False
            self.kept.add(data)
        return True
