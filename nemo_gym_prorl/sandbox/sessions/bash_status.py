# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a shell's command ended and in which folder, by ways that no program in the sandbox holds.

Bash's own standard error, outside of commands, is a packet socket; a packet counts only if the kernel says that
bash's own process sent it. What a child, a subshell or a background job writes there is dropped.

Each command is one line, which bash has parsed to its end before it executes the first word, so that nothing of ours
waits in the pipe for a command to read::

    <&0; _prorl=(); ((1)) <"/MARK/begin" || ((1)) && \\eval -- 'COMMAND' </dev/pts/0 2>/dev/pts/0; ((1)) <"/MARK/$?"

Its begin and its end are arithmetic commands whose input can't be opened: bash says so itself, and names the file,
which is the action's mark of 128 random bits and the status. In that there is no word that could be an alias, a
function or a variable of the agent's, and bash comes to it before any trap, which so never sees the mark. (A
redirection to nothing new stands before them: after some syntax errors bash takes a line's first ``((`` for two
subshells.)

What throws the rest of a line away (Ctrl-C, an error in an expansion) brings bash back to its prompt, and the prompt
goes to the same socket. Only then the end is sent again, as a line of its own, in two steps: the status, and the end.
Between them is another redirection to nothing new, since bash that is interrupted just as it has started a program
comes back to its prompt while that runs, and waits for it with its next simple command, whatever that is. So the
command ends when its program does, or the next command would wait for it. An end without a begin means that
somebody took a part of the line, as a background job can that kept bash's input open: such a bash is of no use any
more, nor one whose whole line was taken (:mod:`.bash_commands`). The folder is the kernel's word.

``$?``, ``PIPESTATUS`` and ``$_`` are at a command's beginning what they were at the end of the one before
(:class:`Outcome`). The line itself would overwrite them. So the command saves them in an array at its end, in a
redirection that can't be opened either; the end of the line tells them with the status. A command that may be
unfinished (:func:`_is_finished`) saves nothing, since its end could become a part of it.

Not held: native code in bash's own process, a program of its own user that traces it or writes to its memory, bash
replaced by something else with ``exec``, and hooks that the agent set in its own shell can say of that shell what they
like. That is why nothing is graded by a shell's word: graders
use ``exec``, whose status is the one that the kernel gives to a process's parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass


PROMPT = "$ "
"""Says that bash is back; any other does as well, as long as there is one."""

_CREDENTIALS = struct.Struct("3i")
_LARGEST = 4096
"""Bytes of a packet that are looked at."""

_PACKETS_A_TURN = 64
_PAUSE_S = 0.005
"""After so many packets at once nothing is taken for so long: a flood waits in the socket, where it ends by itself."""

_NO_TERMINAL = re.compile(rb"[^ \n]+: (line \d+: )?/dev/pts/\d+: [^\n]+\n")
"""Bash's complaint when a command could not be given its terminal, as where no more files may be opened."""

_DELETED = " (deleted)"
"""What the kernel appends to the path of a folder that is no more."""

_BEGIN, _END, _THROWN = b"begin", b"end", b"thrown"

_LONGEST_WORD = 1024  # characters of ``$_`` that are restored; a packet holds some 4,000
_MOST_PIPES = 32  # statuses of a pipeline that are restored; each takes a fork

_SAVE = (
    '\n! ((1)) 2>/dev/null <"/-/${_prorl[0]:=$?}${_prorl[1]:=${PIPESTATUS[@]}}'
    f'${{_prorl[2]:=${{_:0:{_LONGEST_WORD + 1}}}}}"'
)
"""Saves what the next command is to find; after ``!``, so that no unfinished definition takes it for its body."""

_HEREDOC = re.compile(r"(?<!<)<<(-?)(?!<)[ \t]*(?:\\?([\w.-]+)|'([^'\n]+)'|\"([^\"\n]+)\")?")
_UNFINISHED = re.compile(r"(?:[|\\]|&&)\s*\Z")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, as the next one is to find it.

    Attributes:
        status: ``$?``.
        pipes: ``PIPESTATUS``, if it says more than ``status``.
        inverted: whether the pipeline began with ``!``.
        word: ``$_``; ``None`` if it is not known.
    """

    status: int = 0
    pipes: tuple[int, ...] = ()
    inverted: bool = False
    word: str | None = None

    def restore(self) -> str:
        """The beginning of a list that sets all of it; what comes next is executed in any case."""
        # ``eval`` leaves its last argument in ``$_``; a comment is all that it executes.
        word = "" if self.word is None else f"\\eval '#' {shlex.quote(self.word)} || ((1)) && "
        if self.pipes:
            status = "! " * self.inverted + " | ".join(f"(exit {one})" for one in self.pipes)
        elif self.status:
            status = f"(exit {self.status})"
        else:
            return f"((1)) && {word}"
        # Neither an error of ours nor, where somebody has redefined ``exit``, a success may end the line or the shell.
        return f"((1)) && {word}{status} && ((0)) ||" if self.status else f"((1)) && {word}{status} || ((1)) &&"


def _is_finished(command: str) -> bool:
    """Whether what follows a command on a new line can't become a part of it; errs on the side of no."""
    for found in _HEREDOC.finditer(command):
        tabs, *names = found.groups()
        name = next((name for name in names if name), None)
        indent = r"\t*" if tabs else ""
        if name is None or not re.search(f"^{indent}{re.escape(name)}$", command[found.end() :], re.MULTILINE):
            return False
    return not _UNFINISHED.search(command)


class BashStatus:
    """The socket and the mark of one bash. Belongs to one event loop.

    Args:
        ended: gets the status of the command that runs, once.
        lost: the line that runs was thrown away, or will be soon: :meth:`end_again` is to be sent.
        unusable: bash can't run commands any more, and has not run this one as it was sent.
    """

    def __init__(self, ended: Callable[[int], None], lost: Callable[[], None], unusable: Callable[[], None]) -> None:
        self._ended = ended
        self._lost = lost
        self._unusable = unusable
        self._loop = asyncio.get_running_loop()
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._bash = 0
        self._process = -1
        """Its folder under ``/proc``, which stays this process's, whoever gets its number later."""
        self._mark: re.Pattern[bytes] | None = None
        self._nonce = ""
        self._terminal = ""
        self.last = Outcome()
        self._begun = False
        self._thrown: int | None = None
        """The status of a line that was thrown away, until its end is told."""
        self._loop.add_reader(self._ours, self._read)

    def listen_to(self, pid: int, terminal: str) -> None:
        """Only that process's word counts; its end of the socket is its own from now on.

        Args:
            pid: bash's.
            terminal: the path of its terminal inside.
        """
        self._bash = pid
        self._terminal = terminal
        self.theirs.close()
        with contextlib.suppress(FileNotFoundError):
            self._process = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def folder(self) -> str | None:
        """Where bash is; ``None`` if that can't be seen, since it has ended or made itself undumpable."""
        try:
            folder = os.readlink("cwd", dir_fd=self._process)
            gone = folder.endswith(_DELETED) and not os.stat("cwd", dir_fd=self._process).st_nlink
        except OSError:
            return None
        return folder.removesuffix(_DELETED) if gone else folder

    def line(self, command: str) -> bytes:
        """A command and its end; it begins with the :class:`Outcome` of the last one."""
        self._nonce = secrets.token_hex(16)
        marked = (self._nonce.encode(), _BEGIN, _END, _THROWN, self._nonce.encode())
        self._mark = re.compile(rb"/%b/(%b|%b|(%b)?([0-9]+)(?:/([0-9 ]*)/([a-z:-]*)/(.*)/%b/)?)" % marked, re.DOTALL)
        self._begun = False
        self._thrown = None
        mark, tty = f"/{self._nonce}/", self._terminal
        code = shlex.quote(command + _SAVE if _is_finished(command) else command)
        return (
            f'<&0; _prorl=(); ((1)) <"{mark}begin" || {self.last.restore()} \\eval -- {code} <{tty} 2>{tty}; '
            f'((1)) <"{mark}${{_prorl[0]:-$?}}/${{_prorl[1]-}}/$SHELLOPTS/${{_prorl[2]-}}{mark}" || ((1))\n'
        ).encode("utf-8", "surrogateescape")

    def end_again(self) -> bytes:
        """The end alone, for a line that was thrown away, or may not have arrived."""
        told = f'((1)) <"/{self._nonce}/thrown$?" || ((1)); <&0 || ((1)); ((1)) <"/{self._nonce}/end" || ((1))'
        return f"{told}\n".encode()

    @property
    def begun(self) -> bool:
        """Whether bash has taken over the last command; also when it has ended."""
        return self._begun or self.ended

    @property
    def ended(self) -> bool:
        """Whether the end of the last command was told, or can't be told any more."""
        return self._mark is None

    def give_up(self) -> None:
        """Bash can't have got the last command."""
        self._mark = None
        self._unusable()

    def close(self) -> None:
        """Nothing is told any more."""
        self._loop.remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _read(self) -> None:
        for _ in range(_PACKETS_A_TURN):
            try:
                data, ancillary, _flags, _address = self._ours.recvmsg(_LARGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            except ConnectionError:
                data, ancillary = b"", []
            if not ancillary:
                # Nobody has the other end any more.
                self._loop.remove_reader(self._ours)
                return
            if _CREDENTIALS.unpack(ancillary[0][2])[0] == self._bash:
                self._take(data)
            if self._ours.fileno() < 0:
                return
        self._loop.remove_reader(self._ours)
        self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._ours.fileno() >= 0:
            self._loop.add_reader(self._ours, self._read)

    def _take(self, data: bytes) -> None:
        found = self._mark.search(data) if self._mark else None
        if found and found[1] == _BEGIN:
            self._begun = True
        elif found and self._begun and found[2]:
            self._thrown = int(found[3]) if self._thrown is None else self._thrown
        elif found and self._begun and (status := found[3] or self._thrown) is not None:
            self._tell_end(_outcome(int(status), found))
        elif found or (self._begun and _NO_TERMINAL.fullmatch(data)):
            self.give_up()
        elif self._thrown is not None and self._mark:
            self._tell_end(Outcome(self._thrown))  # another interrupt, and bash waits for nothing any more
        elif self._begun and self._mark:
            self._lost()

    def _tell_end(self, outcome: Outcome) -> None:
        self._mark = None
        self.last = outcome
        self._ended(outcome.status)


def _outcome(status: int, told: re.Match[bytes]) -> Outcome:
    """What the end of a line tells, as far as it can be restored."""
    pipes = tuple(min(int(number), 255) for number in (told[4] or b"").split())
    if not pipes:
        return Outcome(status)
    failed = [number for number in pipes if number]
    plain = (failed or [0])[-1] if b"pipefail" in told[5] else pipes[-1]
    inverted = plain != status
    # Of a compound command these are the statuses of something in it.
    if (inverted and status != int(not plain)) or len(pipes) > _MOST_PIPES or pipes == (status,):
        pipes, inverted = (), False
    word = told[6].decode("utf-8", "surrogateescape")
    return Outcome(status, pipes, inverted, word if "\n" not in word and len(word) <= _LONGEST_WORD else None)
