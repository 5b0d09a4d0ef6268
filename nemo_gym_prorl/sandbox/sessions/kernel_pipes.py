# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server's ends of a kernel's pipes; :mod:`.kernel_driver` has the others and says what travels on them.

Everything that arrives is untrusted: any program inside can write to these pipes. Text is kept up to a limit, rich
results up to :data:`DATA_LIMIT`, and what is more is counted. Beside that one event is held, of bounded size. What no
driver sends is a :class:`Violation`. One turn of the event loop reads one piece of each pipe; the rest waits there and
holds up its own writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from nemo_gym_prorl.sandbox.sessions.commands import HeadTail


OUTPUT_LIMIT = 64 << 10
"""Bytes of a cell's text, and of its traceback, that are kept."""

DATA_LIMIT = 8 << 20
"""Bytes of a cell's rich results that are kept: some large images."""

RESULT_COST = 1 << 10
"""Bytes that a result takes, and each MIME type of it, however short it is."""

LARGEST_EVENT = DATA_LIMIT + (64 << 10)
"""Bytes. The driver sends of a result no more than :data:`DATA_LIMIT`; the rest is names and lengths."""

MOST_PARTS = 256
"""Of one event; a result with 100 MIME types has 202."""

TEXT_BYTES = 64 << 10
EVENT_BYTES = 4 << 10
"""Read at once. So many bytes of the shortest events take a millisecond to read."""

DRAINED_READS = 64
"""Pieces of each pipe that are read at most once the kernel has ended; a process that it left may write for ever."""

CLOSED_GRACE_S = 1.0
"""How long a kernel may live without its pipes: one that ends closes them a little before its end is told."""

WORD_BYTES = 8
"""Length of what follows the mark: ``clear``, or the number of the cell that has ended."""

SIZE = struct.Struct("!I")
RECORD = struct.Struct("!HB")
BEGINS, ENDS = 1, 2


class Violation(Exception):
    """What came is no driver's; says what."""


class MarkedText:
    """Splits a stream of text at its marks. Holds back what may be the beginning of a mark, and nothing else.

    Args:
        mark: begins with a NUL byte.
        on_text: gets all text.
        on_mark: gets the word of each mark, after the text before it.
    """

    def __init__(self, mark: bytes, on_text: Callable[[bytes], None], on_mark: Callable[[bytes], None]) -> None:
        self._mark = mark
        self._size = len(mark) + WORD_BYTES
        self._on_text, self._on_mark = on_text, on_mark
        self._held = b""

    def feed(self, data: bytes) -> None:
        """Take what came."""
        data, self._held = self._held + data, b""
        begin = 0
        while (at := data.find(self._mark, begin)) >= 0 and at + self._size <= len(data):
            self._on_text(data[begin:at])
            begin = at + self._size
            self._on_mark(data[at + len(self._mark) : begin].strip())
        end = data.find(b"\0", max(begin, len(data) - self._size + 1))
        end = len(data) if end < 0 else end
        self._held = data[end:]
        self._on_text(data[begin:end])

    def flush(self) -> None:
        """Give what was held back: there will be no more."""
        held, self._held = self._held, b""
        self._on_text(held)


class EventReader:
    """Puts events together from a stream of records; holds one event at most.

    Args:
        listener: gets each event: its kind, and its other parts.
    """

    def __init__(self, listener: Callable[[str, list[bytes]], None]) -> None:
        self._listener = listener
        self._rest = b""
        self._event: bytearray | None = None

    def feed(self, data: bytes) -> None:
        """Take what came.

        Raises:
            Violation: then nothing more is to be fed.
        """
        data, begin = self._rest + data, 0
        while (body := begin + RECORD.size) <= len(data):
            size, flags = RECORD.unpack_from(data, begin)
            if body + size > len(data):
                break
            begin = body + size
            self._take(data[body:begin], flags)
        self._rest = data[begin:]

    def _take(self, piece: bytes, flags: int) -> None:
        if flags & BEGINS:
            self._event = bytearray()
        if self._event is None:  # the driver was interrupted between two records of this one
            return
        self._event += piece
        if len(self._event) > LARGEST_EVENT:
            raise Violation(f"an event of more than {LARGEST_EVENT} bytes")
        if flags & ENDS:
            event, self._event = self._event, None
            kind, *parts = _parts(event)
            self._listener(kind.decode("ascii", "replace"), parts)


def _parts(event: bytearray) -> list[bytes]:
    """Return what is in an event: its kind, and whatever follows."""
    parts: list[bytes] = []
    begin = 0
    while not parts or begin < len(event):
        body = begin + SIZE.size
        begin = body + SIZE.unpack_from(event, begin)[0] if body <= len(event) else body
        if begin > len(event) or len(parts) == MOST_PARTS:
            raise Violation("an event that is none")
        parts.append(bytes(event[body:begin]))
    return parts


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > WORD_BYTES:
        raise Violation("an event with a number that is none")
    return int(text)


class Shown:
    """What a cell has shown and raised."""

    def __init__(self) -> None:
        self.error = b""
        self.omitted = 0
        self._clear()

    def take(self, kind: str, parts: list[bytes]) -> None:
        """Take an event.

        Raises:
            Violation: it is none.
        """
        match kind, parts:
            case "data" | "update", [name, *pairs] if len(pairs) % 2 == 0:
                self._show(name, pairs, update=kind == "update")
            case "clear", []:
                self._clear()
            case "error", [text]:
                self.error = text
            case "omitted", [size]:
                self.omitted += _number(size)
            case _:
                raise Violation("an event that is none")

    def _clear(self) -> None:
        self.data: list[dict[str, str]] = []
        self._left = DATA_LIMIT
        self._places: dict[bytes, int] = {}

    def _show(self, name: bytes, pairs: list[bytes], *, update: bool) -> None:
        size = sum(map(len, pairs))
        cost = size + RESULT_COST * (1 + len(pairs) // 2)
        if cost > self._left:
            self.omitted += size
            return
        self._left -= cost
        texts = [part.decode("utf-8", "replace") for part in pairs]
        data = dict(zip(texts[::2], texts[1::2], strict=True))
        if update and name in self._places:
            self.data[self._places[name]] = data
            return
        if name:
            self._places[name] = len(self.data)
        self.data.append(data)


def _pipes(count: int) -> list[tuple[int, int]]:
    """Return that many pipes, reading end first, or raise and leave none."""
    made: list[tuple[int, int]] = []
    try:
        while len(made) < count:
            made.append(os.pipe2(os.O_CLOEXEC))
    except OSError:
        for descriptor in itertools.chain(*made):
            os.close(descriptor)
        raise
    return made


class CellOutput(NamedTuple):
    """All of a cell."""

    text: HeadTail
    shown: Shown


class KernelPipes:
    """Pipes to one kernel. Belongs to one event loop.

    What comes between two cells, as of threads and tasks of earlier ones, is of the next cell.

    Args:
        lost: told the reason if the kernel is of no use any more.

    Attributes:
        driver_ends: descriptors of the kernel's ends, in the order that the driver has them from 1 on.
        over: done once the kernel has told the end of the cell that runs; at first, once the kernel has started.
    """

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        mark = b"\0" + secrets.token_hex(8).encode()
        self._marked = MarkedText(mark, lambda text: self._text.add(text), self._on_mark)
        self._events = EventReader(self._on_event)
        self._number = -1
        self._text, self._shown, self._unsent = HeadTail(OUTPUT_LIMIT), Shown(), bytearray()
        (self._text_pipe, text), (requests, self._request_pipe), (self._event_pipe, events) = _pipes(3)
        self.driver_ends = [text, text, requests, events]
        self._ours = [self._text_pipe, self._request_pipe, self._event_pipe]
        for descriptor in self._ours:
            os.set_blocking(descriptor, False)
        self._loop.add_reader(self._text_pipe, self._read_text)
        self._loop.add_reader(self._event_pipe, self._read_events)
        self._begin(mark)

    def handed_over(self) -> None:
        """Close the driver's ends here: the kernel has them, or never will."""
        for descriptor in set(self.driver_ends):
            os.close(descriptor)
        self.driver_ends = []

    def begin(self, code: str, limit: int) -> asyncio.Future[CellOutput]:
        """Send a cell, of whose text ``limit`` bytes are to be kept; returns :attr:`over`."""
        late, self._text = self._text, HeadTail(limit)
        if late.total:
            self._text.add(late.text().encode())
        return self._begin(code.encode("utf-8", "surrogatepass"))

    def drain(self) -> CellOutput:
        """Read what a kernel that has ended left in its pipes, and return what there is of the cell that ran."""
        for read in (self._read_text, self._read_events) if self._ours else ():
            for _ in range(DRAINED_READS):
                if not read():
                    break
        self._marked.flush()
        return self.over.result() if self.over.done() else CellOutput(self._ended_text or self._text, self._shown)

    def close(self) -> None:
        """Close all ends; nothing is told any more."""
        self.handed_over()
        for descriptor in self._ours:
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
            os.close(descriptor)
        self._ours = []

    def _begin(self, request: bytes) -> asyncio.Future[CellOutput]:
        self._number += 1
        self._ended_text: HeadTail | None = None
        self._ended_shown: Shown | None = None
        self.over: asyncio.Future[CellOutput] = self._loop.create_future()
        if self._unsent:
            self._lose("it does not take what it is sent")
        self._unsent += SIZE.pack(len(request)) + request
        self._send()
        return self.over

    def _lose(self, reason: str) -> None:
        if self._ours:
            self._loop.remove_reader(self._event_pipe)
            self._lost(reason)

    def _read_text(self) -> bool:
        try:
            data = os.read(self._text_pipe, TEXT_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._text_pipe)
        self._marked.feed(data)
        return bool(data)

    def _read_events(self) -> bool:
        try:
            data = os.read(self._event_pipe, EVENT_BYTES)
            self._events.feed(data)
        except BlockingIOError:
            return False
        except Violation as violation:
            self._lose(f"it sends {violation}")
            return False
        if not data:
            self._loop.remove_reader(self._event_pipe)
            self._loop.call_later(CLOSED_GRACE_S, self._lose, "it has closed its pipe")
        return bool(data)

    def _on_mark(self, word: bytes) -> None:
        if word == b"clear":
            self._text = HeadTail(self._text.limit)
        elif word == b"%d" % self._number and self._ended_text is None:
            self._ended_text, self._text = self._text, HeadTail(OUTPUT_LIMIT)
            self._end_if_complete()

    def _on_event(self, kind: str, parts: list[bytes]) -> None:
        if kind != "end" or len(parts) != 1:
            self._shown.take(kind, parts)
        elif _number(parts[0]) == self._number and self._ended_shown is None:
            self._ended_shown, self._shown = self._shown, Shown()
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._ended_text is not None and self._ended_shown is not None and not self.over.done():
            self.over.set_result(CellOutput(self._ended_text, self._ended_shown))

    def _send(self) -> None:
        self._loop.remove_writer(self._request_pipe)
        # What a kernel that has ended does not take is nobody's.
        with contextlib.suppress(BrokenPipeError):
            try:
                while self._unsent:
                    del self._unsent[: os.write(self._request_pipe, self._unsent)]
            except BlockingIOError:
                self._loop.add_writer(self._request_pipe, self._send)
