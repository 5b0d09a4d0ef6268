# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Program of a kernel process: an IPython shell that receives cells over a pipe.

The image's own Python (3.7 or later, with IPython 7.34 or later) runs the text of this module with ``python3 -c``, so
the module imports nothing of this package. :mod:`.kernel_pipes` has the other ends of these pipes, by descriptor:

- 1 and 2: *text*. Output of the process, its threads and its children, in the order of their writes. Marks, each
  written atomically, separate the text of cells.
- 3: *requests*. The first request is the mark, each other request a cell: a length and that many bytes.
- 4: *events*. Rich results, tracebacks and ends of cells. Each event is a sequence of records, each written
  atomically. An interrupt between two records leaves no partial record, and the reader drops the incomplete event.

One event loop runs during cells and between them, so tasks of earlier cells continue, and cells may use ``await``.
"""

from __future__ import annotations

import sys


# The working directory, added again for cells, may have modules such as random.py, which this module must not import.
sys.path[:] = filter(None, sys.path)

# ruff: noqa: E402
import asyncio
import base64
import builtins
import contextlib
import fcntl
import getpass
import io
import json
import os
import re
import select
import signal
import struct
import threading
from collections.abc import Mapping
from typing import Any


try:
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.error import StdinNotImplementedError
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets import Type
    from traitlets.config import Config
except ImportError as missing:
    sys.exit(str(missing))


TEXT, REQUESTS, EVENTS = 1, 3, 4
"""Descriptors of the pipes when the kernel starts."""

MIN_OWN_FD = 100
"""Lowest descriptor of the driver's copies of the pipes, since cells may close or replace low descriptors."""

MAX_RESULT_BYTES = 8 << 20
"""Largest rich result in bytes that is sent, the server's limit; for a larger result only the size is sent."""

MAX_TRACEBACK_CHARS = 1 << 20
"""Longest traceback that is sent completely, above the server's limit; else its beginning and end are sent."""

MAX_MIME_TYPES = 100
"""MIME types of one rich result that are sent, below the server's limit of parts; further types are dropped."""

SIZE = struct.Struct("!I")  # length of a request, or of a part of an event
RECORD = struct.Struct("!HB")  # number of data bytes, flags
BEGINS, ENDS = 1, 2  # flags of the first and of the last record of an event
_RECORD_DATA_BYTES = select.PIPE_BUF - RECORD.size  # bytes of an event per record: writes up to PIPE_BUF are atomic

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Text(io.FileIO):
    """The text pipe as a file for ``sys.stdout`` and ``sys.stderr``; writes all bytes."""

    def __init__(self) -> None:
        super().__init__(fcntl.fcntl(TEXT, fcntl.F_DUPFD_CLOEXEC, MIN_OWN_FD), "w", closefd=False)

    def close(self) -> None:
        """Do nothing: garbage collection of a wrapper that a cell has created would close the file."""

    def write(self, data: Any) -> int:
        """Write all bytes and return their number."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = super().write(view[done:])
            if count is None:  # a child process has set O_NONBLOCK, which all users of the pipe share
                waiting = select.poll()
                waiting.register(self.fileno(), select.POLLOUT)
                waiting.poll()
            done += count or 0
        return done


class Channel:
    """The text pipe and the event pipe to the server."""

    def __init__(self) -> None:
        self.text = Text()
        self.mark = b""
        self._events = fcntl.fcntl(EVENTS, fcntl.F_DUPFD_CLOEXEC, MIN_OWN_FD)
        self._lock = threading.RLock()
        self._process = os.getpid()

    def send(self, kind: bytes, *parts: bytes) -> None:
        """Send an event; a no-op in a forked child, since the pipe belongs to the kernel's own process."""
        if os.getpid() != self._process:
            return
        size = sum(map(len, parts))
        if size > MAX_RESULT_BYTES:
            kind, parts = b"omitted", (b"%d" % size,)
        event = b"".join(SIZE.pack(len(part)) + part for part in (kind, *parts))
        with self._lock:
            for begin in range(0, len(event), _RECORD_DATA_BYTES):
                part = event[begin : begin + _RECORD_DATA_BYTES]
                flags = (BEGINS if begin == 0 else 0) | (ENDS if begin + _RECORD_DATA_BYTES >= len(event) else 0)
                os.write(self._events, RECORD.pack(len(part), flags) + part)

    def show(self, data: Mapping[str, Any]) -> None:
        """Send a rich result, content by MIME type."""
        parts = []
        for kind, value in list(data.items())[:MAX_MIME_TYPES]:
            if isinstance(value, bytes):
                value = base64.b64encode(value).decode()
            elif not isinstance(value, str):
                value = json.dumps(value, default=repr)
            parts += [encoded(kind), encoded(value)]
        self.send(b"data", *parts)

    def end(self, number: int) -> None:
        """Report the end of a cell, after all of its output."""
        self.text.write(self.mark + (b"%d" % number).rjust(8))
        self.send(b"end", b"%d" % number)


class Results(DisplayHook):  # type: ignore[misc]
    """Display hook that sends the value of a cell's last expression."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Mapping[str, Any], md_dict: Any = None) -> None:
        self.shell.channel.show(format_dict)

    def finish_displayhook(self) -> None:
        pass


class Displays(DisplayPublisher):  # type: ignore[misc]
    """Display publisher that sends the results of ``display``."""

    def publish(self, data: Mapping[str, Any], *_described: Any, **_named: Any) -> None:
        self.shell.channel.show(data)

    def clear_output(self, wait: bool = False) -> None:
        """Do nothing: a cell's output is kept for its reader."""


class Shell(InteractiveShell):  # type: ignore[misc]
    """IPython without a terminal. :class:`Driver` sets ``channel`` before the first cell."""

    displayhook_class = Type(Results)
    display_pub_class = Type(Displays)
    channel: Channel
    error_sent = False
    interrupted = False

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: there is no screen, and asyncio's loop runs anyway."""

    def ask_exit(self) -> None:
        self.exit_now = True

    def system(self, cmd: str) -> None:
        """Run a shell command, whose output goes directly to the text pipe, after flushing the cell's output."""
        flush()
        self.system_raw(cmd)

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        self.error_sent = True
        if self.interrupted and issubclass(etype, asyncio.CancelledError):
            stb = [*stb, "KeyboardInterrupt"]
        text = _COLOURS.sub("", "\n".join(stb))
        if len(text) > MAX_TRACEBACK_CHARS:
            self.channel.send(b"omitted", b"%d" % (len(text) - MAX_TRACEBACK_CHARS))
            text = text[: MAX_TRACEBACK_CHARS // 2] + text[-MAX_TRACEBACK_CHARS // 2 :]
        self.channel.send(b"error", encoded(text))


class Driver:
    """Runs cells one after the other, on an event loop that also runs between cells."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.channel = Channel()
        for name, errors in (("stdout", "surrogateescape"), ("stderr", "backslashreplace")):
            # Line buffering, so that the output of several processes does not mix within a line.
            stream = io.TextIOWrapper(self.channel.text, "utf-8", errors, line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        os.register_at_fork(before=flush)
        builtins.input = getpass.getpass = refuse_input
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        os.environ.update(PAGER="cat", GIT_PAGER="cat")
        sys.argv[:] = [""]
        # IPython would write its history to a database on disk after each cell.
        config = Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "NoColor"})
        self.shell = Shell.instance(config=config)
        self.shell.channel = self.channel
        self.shell.set_hook("show_in_pager", self._page, 99)
        sys.path.insert(0, "")
        self._cell: asyncio.Task[None] | None = None
        self._requests = fcntl.fcntl(REQUESTS, fcntl.F_DUPFD_CLOEXEC, MIN_OWN_FD)
        self._received = bytearray()
        for descriptor in (REQUESTS, EVENTS):
            os.close(descriptor)

    async def serve(self) -> None:
        """Run cells until the server closes the request pipe or a cell calls ``exit``."""
        signal.signal(signal.SIGINT, self._interrupt)
        self.channel.mark = await self._next_request() or b""
        number = 0
        while True:
            # End 0 reports the start. The end of a cell that calls exit is not reported, so that the server waits for
            # the exit of the process instead of sending another cell.
            flush()
            if self.shell.exit_now:
                return
            self.channel.end(number)
            request = await self._next_request()
            if request is None:
                return
            number += 1
            self.shell.error_sent = self.shell.interrupted = False
            self._cell = self.loop.create_task(self._run(request.decode("utf-8", "surrogatepass")))
            try:
                await self._cell
            except BaseException as error:
                self._send_error(error)
            self._cell = None
            signal.signal(signal.SIGINT, self._interrupt)

    async def _run(self, code: str) -> None:
        shell, process = self.shell, os.getpid()
        trouble: Any = None
        try:
            transformed = shell.transform_cell(code)
        except Exception:
            transformed, trouble = code, sys.exc_info()
        how = {"transformed_cell": transformed, "preprocessing_exc_tuple": trouble}
        if shell.should_run_async(code, **how):
            result = None
            try:
                result = await shell.run_cell_async(code, store_history=True, **how)
            finally:
                shell.events.trigger("post_execute")
                shell.events.trigger("post_run_cell", result)
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result = shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        if os.getpid() != process:
            # A child that the cell has forked must not use its parent's event loop and pipes.
            flush()
            status = error.code if isinstance(error, SystemExit) else None
            os._exit(status if isinstance(status, int) else error is not None)
        self._send_error(error)

    def _send_error(self, error: BaseException | None) -> None:
        """Send type and message of a cell's error, if there is one and IPython has not sent its traceback."""
        if error is not None and not self.shell.error_sent:
            try:
                text = f"{type(error).__name__}: {error}"
            except BaseException:
                text = type(error).__name__
            self.channel.send(b"error", encoded(text))

    def _interrupt(self, *_signal: Any) -> None:
        """Handle SIGINT outside of synchronous cells: interrupt a cell that uses ``await``; a no-op between cells."""
        cell = self._cell
        if cell is None or cell.done():
            return
        self.shell.interrupted = True
        if asyncio.current_task(self.loop) is cell:
            raise KeyboardInterrupt
        self.loop.call_soon_threadsafe(cell.cancel)

    async def _next_request(self) -> bytes | None:
        """Return the next request; ``None`` when the server has closed the request pipe."""
        received = self._received
        while len(received) < SIZE.size or len(received) < SIZE.size + SIZE.unpack_from(received)[0]:
            ready = asyncio.Event()
            self.loop.add_reader(self._requests, ready.set)
            await ready.wait()
            self.loop.remove_reader(self._requests)
            data = os.read(self._requests, 1 << 16)
            if not data:
                return None
            received += data
        end = SIZE.size + SIZE.unpack_from(received)[0]
        request = bytes(received[SIZE.size : end])
        del received[:end]
        return request

    def _page(self, _shell: Any, data: Any, start: Any = 0, screen_lines: Any = 0) -> None:
        """Print text that IPython would otherwise show in a pager, such as the help for ``len?``."""
        text = data.get("text/plain", "") if isinstance(data, dict) else data
        print(_COLOURS.sub("", text))


def flush() -> None:
    """Flush the standard streams, and the objects by which a cell has replaced them; errors are ignored."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def encoded(text: str) -> bytes:
    """Encode text as UTF-8; surrogate escapes become the bytes for which they stand, other lone surrogates ``?``."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate outside of the range of surrogate escapes
        return text.encode("utf-8", "replace")


def refuse_input(*_arguments: Any, **_named: Any) -> str:
    """Refuse ``input`` and ``getpass``.

    Raises:
        StdinNotImplementedError: always.
    """
    raise StdinNotImplementedError("input() is not available in this kernel: put the value into the code")


def main() -> None:
    driver = Driver()
    serving = driver.loop.create_task(driver.serve())
    while not serving.done() and not driver.loop.is_closed():
        # An exception of a cell's background task, or a stopped event loop, must not end the kernel.
        with contextlib.suppress(KeyboardInterrupt, SystemExit, RuntimeError):
            driver.loop.run_until_complete(serving)


if __name__ == "__main__":
    main()
