# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Interactive sessions that live in the supervisor, so that a terminal outlives whoever opened it.

The supervisor keeps the controlling end. Who attaches gets one end of a packet socket; each packet is one byte of what
it is, and its contents:

- to the holder: ``o`` output, ``e`` errors, ``w`` a word of the program's own, ``x`` the exit status once all output
  before it is through, ``t`` that somebody else took the session over;
- from the holder: ``i`` input, ``r`` rows and columns.

One holder at a time. What was put into its socket counts as read; of that, and of what nobody has read yet, up to
:data:`KEPT` bytes stay for the next holder. A program that has written more while nobody reads waits, as it would on
any terminal.

A *word* is a mark and a status, ``/MARK/STATUS``, in what the program itself writes to its file 3, a socket: the
kernel says who writes there, so no other has the program say anything (``run_detached`` of
:class:`..compose.terminal.Terminal`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import termios
from io import FileIO

from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.processes.children import Answer
from nemo_gym_prorl.sandbox.supervisor.programs import Programs
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import PAUSE_S, File, drop
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, close_all
from nemo_gym_prorl.sandbox.supervisor.sandbox import NoSandbox
from nemo_gym_prorl.sandbox.supervisor.scrollback import Window


KEPT = 1 << 20

PACKET = 1 << 15
"""Most bytes of contents in a packet; a socket's buffer holds several."""

MOST_A_TURN = 8
"""Packets of each kind before other sandboxes get their turn, however much a program says or a holder types."""

SIZE = struct.Struct("!HH")

WORD = re.compile(rb"/([0-9a-f]{32})/([0-9]{1,3})")

_CREDENTIALS = struct.Struct("3i")
_LARGEST_WORD = 4096


class Session:
    """One program with its terminal or its three pipes.

    Args:
        group: the program, whose number is that of its process group.
        sandbox: where it runs.
        ends: our ends of its files: ``i`` input, ``o`` output, ``e`` errors. A terminal is both ``i`` and ``o``.
        words: our end of where it says its words, which has the kernel say who does.
    """

    def __init__(self, group: int, sandbox: str, ends: dict[str, FileIO], words: socket.socket) -> None:
        self.group = group
        self.sandbox = sandbox
        self.mode = "pipe" if "e" in ends else "pty"
        self.status: int | None = None
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        self._window = Window(KEPT)
        self._input = b""
        self._holder: socket.socket | None = None
        self._words = words
        self._word = b""
        """The last, until a holder has it."""
        words.setblocking(False)
        self._loop.add_reader(words, self._hear)
        for end in ends.values():
            os.set_blocking(end.fileno(), False)
        self.turn()

    @property
    def held(self) -> bool:
        """Whether somebody is attached."""
        return self._holder is not None

    def hold(self, since: int | None) -> int:
        """Attach, in place of whoever held it: the descriptor to give to the holder, who gets to read what waits.

        Args:
            since: read again from this byte of all output on; ``None`` for what nobody has read.
        """
        self._let_go(b"t")
        if since is not None:
            self._window.go_back(since)
        self._holder, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._holder.setblocking(False)
        self.turn()
        return theirs.detach()

    def exited(self, status: int) -> None:
        """The program has ended."""
        self.status = status
        self.turn()

    def close(self) -> None:
        """Hang up."""
        self._let_go()
        drop(self._words)
        while self._ends:
            self._finish(next(iter(self._ends)))

    def turn(self) -> None:
        """Do whatever can be done without waiting, and wait for the rest."""
        try:
            self._turn()
        except Exception:
            # It would be its turn again at once, and fail again.
            for file in [*self._ends.values(), self._holder]:
                if file:
                    self._attend(file, read=False, write=False)
            self._loop.call_later(PAUSE_S, self.turn)
            raise

    def _turn(self) -> None:
        quiet = self._take_output()
        self._hand_on(quiet)
        self._take_input()
        if self._holder:
            # Output, or the exit status that its socket had no room for.
            waits = bool(self._word) or self._window.next() is not None or (quiet and self.status is not None)
            self._attend(self._holder, read=not self._input, write=waits)
        typed = self._ends.get("i")
        outputs = [self._ends.get("o"), self._ends.get("e")]
        for end in set(self._ends.values()):
            reads = end in outputs and not self._window.full
            self._attend(end, read=reads, write=end is typed and bool(self._input))

    def _attend(self, file: File, *, read: bool, write: bool) -> None:
        """Have its turn when a file can be read, or written, as wanted, whatever was wanted before."""
        if read:
            self._loop.add_reader(file, self.turn)
        else:
            self._loop.remove_reader(file)
        if write:
            self._loop.add_writer(file, self.turn)
        else:
            self._loop.remove_writer(file)

    def _hear(self) -> None:
        for _ in range(MOST_A_TURN):
            try:
                said, ancillary, _flags, _address = self._words.recvmsg(
                    _LARGEST_WORD, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            except ConnectionError:
                said, ancillary = b"", []
            if not ancillary:
                # Nobody has the other end any more.
                self._loop.remove_reader(self._words)
                return
            if _CREDENTIALS.unpack(ancillary[0][2])[0] == self.group and (word := WORD.search(said)):
                self._word = word[0]
                self.turn()

    def _take_output(self) -> bool:
        """Read as long as there is room; whether there is nothing more for now."""
        for stream in "oe":
            reads = 0
            while end := self._ends.get(stream):
                if self._window.full or reads == MOST_A_TURN:
                    return False
                reads += 1
                try:
                    data = os.read(end.fileno(), PACKET)
                except BlockingIOError:
                    break
                except OSError:
                    # A terminal that nobody has open any more.
                    data = b""
                if not data:
                    self._finish(stream)
                self._window.add(stream, data)
        return True

    def _hand_on(self, quiet: bool) -> None:
        if self._holder and self._word and self._send(b"w" + self._word):
            self._word = b""
        for _ in range(2 * MOST_A_TURN):
            if not self._holder or not (piece := self._window.next()):
                break
            if not self._send(piece.stream.encode() + piece.data):
                return
            self._window.read(piece)
        else:
            return
        if self._holder and quiet and self.status is not None and self._send(b"x%d" % self.status):
            self._let_go()

    def _send(self, packet: bytes) -> bool:
        assert self._holder
        try:
            self._holder.send(packet)
        except BlockingIOError:
            return False
        except OSError:
            self._let_go()
            return False
        return True

    def _take_input(self) -> None:
        """Type what the holder sent. While the program does not take it, the holder is not asked for more."""
        for _ in range(MOST_A_TURN):
            if not self._type() or not self._holder:
                return
            try:
                packet = self._holder.recv(PACKET + 1)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            kind, contents = packet[:1], packet[1:]
            if not kind:
                self._let_go()
            elif kind == b"i":
                self._input = contents
            elif kind == b"r" and len(contents) == SIZE.size and self.mode == "pty" and "o" in self._ends:
                with contextlib.suppress(termios.error):
                    termios.tcsetwinsize(self._ends["o"].fileno(), SIZE.unpack(contents))

    def _type(self) -> bool:
        """Write what was typed; whether all of it is."""
        while self._input and (end := self._ends.get("i")):
            try:
                self._input = self._input[os.write(end.fileno(), self._input) :]
            except BlockingIOError:
                return False
            except OSError:
                # Nobody reads any more.
                break
        self._input = b""
        return True

    def _let_go(self, last: bytes = b"") -> None:
        """Close the holder's socket, with a last word if it takes one; else the end of the socket says it."""
        if self._holder:
            if last:
                with contextlib.suppress(OSError):
                    self._holder.send(last)
            drop(self._holder)
            self._holder = None

    def _finish(self, stream: str) -> None:
        """Close our end of a stream; for a terminal that is its output and its input."""
        end = self._ends.pop(stream)
        if end in self._ends.values():
            self._ends = {other: file for other, file in self._ends.items() if file is not end}
        drop(end)


class Sessions:
    """All sessions of one supervisor. One is here until it is closed, or until its sandbox has ended."""

    def __init__(self, programs: Programs, sandboxes: Sandboxes) -> None:
        self._programs = programs
        self._sandboxes = sandboxes
        self._all: dict[str, Session] = {}
        sandboxes.on_gone.append(self._gone)

    async def open(self, order: Message) -> Answer:
        """Start a program, with a terminal or with pipes; answered when it runs.

        Args:
            order: as for :func:`.requests.spawn`, and ``session``, the name to attach by.
        """
        sandbox = self._sandboxes.up(order["sandbox"])
        theirs: list[int] = []
        ours: dict[str, FileIO] = {}
        with contextlib.ExitStack() as unless_it_runs:
            try:
                if not order["tty"]:
                    for stream in "ioe":
                        reader, writer = os.pipe()
                        mine, its = (writer, reader) if stream == "i" else (reader, writer)
                        theirs.append(its)
                        ours[stream] = unless_it_runs.enter_context(FileIO(mine, "w" if stream == "i" else "r"))
                        # So that the program can open them by name, as /dev/stdout.
                        os.fchown(its, sandbox.order["host_uid"], sandbox.order["host_gid"])
                words, its_words = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.append(its_words.detach())
                unless_it_runs.enter_context(words)
                words.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                name = order["session"]
                group, returned = await self._programs.start(
                    name, sandbox, order, theirs, lambda code: self._exited(name, code)
                )
                unless_it_runs.pop_all()
            finally:
                close_all(theirs)
        if returned:
            terminal = FileIO(returned[0], "r+")
            ours.update(i=terminal, o=terminal)
        self._all[name] = Session(group, sandbox.name, ours, words)
        return {"group": group}, []

    def attach(self, order: Message) -> Answer:
        """Answered with the holder's socket, and whether the session has a terminal."""
        session = self._find(order)
        if session.held and not order["takeover"]:
            raise OSError(f"session {order['session']} is held by somebody else")
        return {"group": session.group, "mode": session.mode}, [session.hold(order["since"])]

    def close(self, order: Message) -> Answer:
        """End a session, with its process group; harmless if it has ended."""
        self._programs.signal(order["session"], signal.SIGKILL)
        if session := self._all.pop(order["session"], None):
            session.close()
        return {}, []

    def _find(self, order: Message) -> Session:
        session = self._all.get(order["session"])
        if session is None or session.sandbox != order["sandbox"]:
            raise NoSandbox(f"there is no session {order['session']} in sandbox {order['sandbox']}")
        return session

    def _exited(self, name: str, code: int) -> None:
        if session := self._all.get(name):
            session.exited(code)

    def _gone(self, sandbox: str) -> None:
        for name in [name for name, session in self._all.items() if session.sandbox == sandbox]:
            self._all.pop(name).close()
