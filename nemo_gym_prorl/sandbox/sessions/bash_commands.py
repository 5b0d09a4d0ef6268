# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The way by which bash gets its commands: a stream socket that it reads as its standard input, and nothing else.

No program that bash runs has it: bash keeps it closed to them. Its own forks without a program, *subshells*, do have
it, and one in the background that reads there gets what was meant for bash. No shell can prevent that, so it is
noticed: what bash has taken over it tells within moments (:mod:`.bash_status`). Where that does not come although
nothing lies in the socket any more, the end of the command is sent once more. If bash tells an end without a begin,
the command was never bash's; the same is so where several such lines are taken and bash tells nothing. So it is for
the end of a line that bash has thrown away: its second end may be taken, too. As long as something lies in the socket
nobody has read it, and whatever bash does at that time is its business.

Nothing waits here: what the socket does not hold yet follows by itself, while the command's time limit runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import socket
import struct
import termios

from nemo_gym_prorl.sandbox.sessions.bash_status import BashStatus
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxBroken


PATIENCE_S = 0.25
"""Between two looks whether a command, or an end that was sent again, has arrived."""

PROBES = 3
"""Lines that may go without an answer."""

_OPTION = (
    '-- "$@"; \\eval \'_prorl() {{ \\unset -f _prorl; '
    'case ${{1-}} in vi|emacs) ;; *) \\set {sign}o "$@";; esac; }}; _prorl\''
)
"""``set -o NAME`` without ``vi`` and ``emacs``: they switch the source of bash's input in the middle of a command, and
bash dies of that. An alias stands in, since a function's ``set`` sets its own arguments only."""

_ALIASES = " ".join(f"{sign}o={shlex.quote(_OPTION.format(sign=sign))}" for sign in "-+")

PREPARE = (f"exec 2>&4 4>&-; set +o history +H; unset HISTFILE; alias -- set='set ' {_ALIASES}; history -c\n").encode()
"""Bash's own errors and prompts go to the status socket; those of commands go to the terminal."""

THROWN_AWAY = b"((1))\n" * 2
"""What a Ctrl-C that bash got as a command ended may end in place of the next: a line, or the rest of one."""


class BashCommands:
    """The commands of one bash. Belongs to one event loop.

    Args:
        status: where bash tells that it has taken a command over; is told when somebody else did.
    """

    def __init__(self, status: BashStatus) -> None:
        self._status = status
        self._loop = asyncio.get_running_loop()
        ours, self.theirs = socket.socketpair()
        # Nothing is to be heard by this way.
        ours.shutdown(socket.SHUT_RD)
        ours.setblocking(False)
        self._socket = ours.detach()
        self._rest = b""
        self._probes = 0
        self._asked_again = False
        self._look_again: asyncio.TimerHandle | None = None

    def send(self, line: bytes, *, watched: bool = True) -> None:
        """Send a line; ``watched`` if bash is to tell that it has it.

        Raises:
            SandboxBroken: bash has ended.
        """
        self._rest += line
        self._write()
        self._asked_again = False
        if self._look_again:
            self._look_again.cancel()
        if watched:
            self._probes = 0
            self._watch()

    def ask_again(self) -> None:
        """Have bash tell the end of the line that it has taken over, and see to it that bash gets the question."""
        if not self._asked_again:
            self._asked_again = True
            self._probes = 0
            self._send_end()
            self._watch()

    def close(self) -> None:
        """Bash's input ends."""
        if self._look_again:
            self._look_again.cancel()
        if self._socket >= 0:
            self._loop.remove_writer(self._socket)
            os.close(self._socket)
            self._socket = -1
        self.theirs.close()

    def _write(self) -> None:
        try:
            self._rest = self._rest[os.write(self._socket, self._rest) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise SandboxBroken("the shell has ended; restart it") from error
        if self._rest:
            self._loop.add_writer(self._socket, self._write_rest)

    def _write_rest(self) -> None:
        self._loop.remove_writer(self._socket)
        # That bash has ended is told by its process.
        with contextlib.suppress(SandboxBroken):
            self._write()

    def _send_end(self) -> None:
        """Send the end behind what is on its way. Where that was not taken, this is not needed."""
        if self._socket >= 0 and not self._rest:
            with contextlib.suppress(OSError):
                os.write(self._socket, self._status.end_again())

    def _watch(self) -> None:
        if self._look_again:
            self._look_again.cancel()
        self._look_again = self._loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        """See whether bash has what was sent."""
        if self._status.ended if self._asked_again else self._status.begun:
            return
        if not self.unread:
            if self._probes == PROBES:
                self._status.give_up()
                return
            self._probes += 1
            self._send_end()
        self._watch()

    @property
    def unread(self) -> int:
        """How much nobody has read of what was sent, or is to be; in the kernel's count, which is somewhat larger."""
        if self._socket < 0:
            return 0
        return len(self._rest) + int(struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))[0])
