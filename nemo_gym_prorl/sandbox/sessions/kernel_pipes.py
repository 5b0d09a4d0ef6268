# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server's ends of a kernel's pipes. :mod:`.kernel_driver` has the other ends and describes the protocol.

All input is untrusted: any program in the sandbox can write to these pipes. Text is kept up to a limit and rich
results up to :data:`DATA_LIMIT`; omitted bytes are counted. One event of bounded size is buffered in addition. Input
that violates the protocol raises :class:`Violation`. Each callback of the event loop reads once from a pipe; unread
data blocks the writer (backpressure).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from nemo_gym_prorl.sandbox.sessions.commands import HeadTail


OUTPUT_LIMIT = 64 << 10
"""Default of the bytes kept of a cell's text, and of its traceback: about 16k tokens for a model."""

DATA_LIMIT = 8 << 20
"""Bytes kept of a cell's rich results, enough for several large images."""

RESULT_COST = 1 << 10
"""Bytes charged against :data:`DATA_LIMIT` per result and per MIME type, to bound the number of short results."""

MAX_EVENT_BYTES = DATA_LIMIT + (64 << 10)
"""Largest event in bytes: a result of :data:`DATA_LIMIT`, and 64 KiB for names and lengths."""

MAX_PARTS = 256
"""Parts of one event: more than the 201 of a result with 100 MIME types."""

TEXT_BYTES = 64 << 10
EVENT_BYTES = 4 << 10
"""Bytes per read of the text pipe and of the event pipe; bounds the time that a callback blocks the event loop."""

DRAINED_READS = 64
"""Reads of each pipe after the kernel's exit, since a process that the kernel has started may write forever."""

CLOSED_GRACE_S = 1.0
"""Seconds in which a kernel that has closed its event pipe must exit; the kernel's exit closes the pipe, too."""

WORD_BYTES = 8
"""Length of the control word after a mark: the number of the cell that has ended."""

SIZE = struct.Struct("!I")  # length of a request, or of a part of an event
RECORD = struct.Struct("!HB")  # number of data bytes, flags
BEGINS, ENDS = 1, 2  # flags of the first and of the last record of an event


class Violation(Exception):
    """Input from a kernel's pipe that violates the protocol of :mod:`.kernel_driver`."""


class MarkedText:
    """Splitter of the text stream at its marks. Buffers only bytes that may be the beginning of a mark.

    Args:
        mark: bytes that precede each control word; the first is NUL.
        on_text: called with the text between the marks.
        on_mark: called with the control word after each mark, once all text before the mark is passed on.
    """

    def __init__(self, mark: bytes, on_text: Callable[[bytes], None], on_mark: Callable[[bytes], None]) -> None:
        self._mark = mark
        self._size = len(mark) + WORD_BYTES
        self._on_text, self._on_mark = on_text, on_mark
        self._held = b""

    def feed(self, data: bytes) -> None:
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
        """Pass on buffered bytes as text, at the end of the stream."""
        held, self._held = self._held, b""
        self._on_text(held)


class EventReader:
    """Assembler of events from a stream of records; buffers at most one event.

    Args:
        listener: called for each event with its kind, such as ``data``, and its other parts.
    """

    def __init__(self, listener: Callable[[str, list[bytes]], None]) -> None:
        self._listener = listener
        self._rest = b""
        self._event: bytearray | None = None

    def feed(self, data: bytes) -> None:
        """Process bytes from the event pipe, in pieces of any size.

        Raises:
            Violation: an event is too large or malformed; the reader must not be used again.
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
        if self._event is None:  # an interrupt of the driver dropped the first record of this event
            return
        self._event += piece
        if len(self._event) > MAX_EVENT_BYTES:
            raise Violation(f"an event of more than {MAX_EVENT_BYTES} bytes")
        if flags & ENDS:
            event, self._event = self._event, None
            kind, *parts = _parts(event)
            self._listener(kind.decode("ascii", "replace"), parts)


def _parts(event: bytearray) -> list[bytes]:
    parts: list[bytes] = []
    begin = 0
    while not parts or begin < len(event):
        body = begin + SIZE.size
        begin = body + SIZE.unpack_from(event, begin)[0] if body <= len(event) else body
        if begin > len(event) or len(parts) == MAX_PARTS:
            raise Violation("a malformed event")
        parts.append(bytes(event[body:begin]))
    return parts


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > WORD_BYTES:
        raise Violation("an event with a malformed number")
    return int(text)


class RichResults:
    """Newest rich results and traceback of a cell, so that a loop that updates a display keeps its last state.
    ``omitted`` counts bytes beyond the limits, here or in the driver."""

    def __init__(self) -> None:
        self.error = b""
        self.omitted = 0
        self._kept: deque[tuple[int, int, dict[str, str]]] = deque()
        """Size in bytes, share of the limit and content of each result, oldest first."""
        self._left = DATA_LIMIT

    @property
    def data(self) -> list[dict[str, str]]:
        return [result for _, _, result in self._kept]

    def take(self, kind: str, parts: list[bytes]) -> None:
        """Apply an event other than ``end``.

        Raises:
            Violation: the event is malformed, or its kind is unknown.
        """
        match kind, parts:
            case "data", pairs if len(pairs) % 2 == 0:
                self._show(pairs)
            case "error", [text]:
                self.error = text
            case "omitted", [size]:
                self.omitted += _number(size)
            case _:
                raise Violation("a malformed event")

    def _show(self, pairs: list[bytes]) -> None:
        size = sum(map(len, pairs))
        cost = size + RESULT_COST * (1 + len(pairs) // 2)
        if cost > DATA_LIMIT:
            self.omitted += size
            return
        self._left -= cost
        texts = [part.decode("utf-8", "replace") for part in pairs]
        self._kept.append((size, cost, dict(zip(texts[::2], texts[1::2], strict=True))))
        while self._left < 0:
            gone, freed, _ = self._kept.popleft()
            self.omitted += gone
            self._left += freed


def _pipes(count: int) -> list[tuple[int, int]]:
    """Return ``count`` new pipes, reading end first; after an error, no descriptor is left open."""
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
    """Output of a cell: text, and rich results with the traceback."""

    text: HeadTail
    results: RichResults


class KernelPipes:
    """Pipes to one kernel. Belongs to one event loop.

    Output of threads and tasks between two cells counts as output of the next cell.

    Args:
        on_unusable: called with the reason when the kernel violates the protocol or stops reading cells.

    Attributes:
        driver_ends: descriptors that become the driver's descriptors 1 to 4; empty once closed.
        over: future of the running cell's output; first, of the output until the kernel is ready.
    """

    def __init__(self, on_unusable: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_unusable = on_unusable
        mark = b"\0" + secrets.token_hex(8).encode()
        self._marked = MarkedText(mark, lambda text: self._text.add(text), self._on_mark)
        self._events = EventReader(self._on_event)
        self._number = -1
        self._text, self._results, self._unsent = HeadTail(OUTPUT_LIMIT), RichResults(), bytearray()
        (self._text_pipe, text), (requests, self._request_pipe), (self._event_pipe, events) = _pipes(3)
        self.driver_ends = [text, text, requests, events]
        self._ours = [self._text_pipe, self._request_pipe, self._event_pipe]
        for descriptor in self._ours:
            os.set_blocking(descriptor, False)
        self._loop.add_reader(self._text_pipe, self._read_text)
        self._loop.add_reader(self._event_pipe, self._read_events)
        self._begin(mark)

    def close_driver_ends(self) -> None:
        """Close this process's copies of the driver's ends, after the kernel's process was started or failed."""
        for descriptor in set(self.driver_ends):
            os.close(descriptor)
        self.driver_ends = []

    def begin(self, code: str, limit: int) -> asyncio.Future[CellOutput]:
        """Send a cell and return :attr:`over`. Of the cell's text, ``limit`` bytes are kept."""
        late, self._text = self._text, HeadTail(limit)
        if late.total:
            self._text.add(late.text().encode())
        return self._begin(code.encode("utf-8", "surrogatepass"))

    def drain(self) -> CellOutput:
        """Read the output that an ended kernel has left in its pipes; return the output of the cell that ran."""
        for read in (self._read_text, self._read_events) if self._ours else ():
            for _ in range(DRAINED_READS):
                if not read():
                    break
        self._marked.flush()
        return self.over.result() if self.over.done() else CellOutput(self._ended_text or self._text, self._results)

    def close(self) -> None:
        """Close all descriptors. Idempotent; no callback runs afterwards."""
        self.close_driver_ends()
        for descriptor in self._ours:
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
            os.close(descriptor)
        self._ours = []

    def _begin(self, request: bytes) -> asyncio.Future[CellOutput]:
        self._number += 1
        self._ended_text: HeadTail | None = None
        self._ended_results: RichResults | None = None
        self.over: asyncio.Future[CellOutput] = self._loop.create_future()
        if self._unsent:
            self._report_unusable("it does not read its cells")
        self._unsent += SIZE.pack(len(request)) + request
        self._send()
        return self.over

    def _report_unusable(self, reason: str) -> None:
        if self._ours:
            self._loop.remove_reader(self._event_pipe)
            self._on_unusable(reason)

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
            self._report_unusable(f"it sends {violation}")
            return False
        if not data:
            self._loop.remove_reader(self._event_pipe)
            self._loop.call_later(CLOSED_GRACE_S, self._report_unusable, "it has closed its pipe")
        return bool(data)

    def _on_mark(self, word: bytes) -> None:
        if word == b"%d" % self._number and self._ended_text is None:
            self._ended_text, self._text = self._text, HeadTail(OUTPUT_LIMIT)
            self._end_if_complete()

    def _on_event(self, kind: str, parts: list[bytes]) -> None:
        if kind != "end" or len(parts) != 1:
            self._results.take(kind, parts)
        elif _number(parts[0]) == self._number and self._ended_results is None:
            self._ended_results, self._results = self._results, RichResults()
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._ended_text is not None and self._ended_results is not None and not self.over.done():
            self.over.set_result(CellOutput(self._ended_text, self._ended_results))

    def _send(self) -> None:
        self._loop.remove_writer(self._request_pipe)
        # The exit of the kernel's process reports the end of the kernel.
        with contextlib.suppress(BrokenPipeError):
            try:
                while self._unsent:
                    del self._unsent[: os.write(self._request_pipe, self._unsent)]
            except BlockingIOError:
                self._loop.add_writer(self._request_pipe, self._send)
