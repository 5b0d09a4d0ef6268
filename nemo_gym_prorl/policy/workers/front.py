# SPDX-License-Identifier: Apache-2.0
"""The one address of several workers: each request is handed on, as the bytes that it is, to the worker that has its
rollout.

Of a request only the head is looked at, for the rollout's name and for where the body ends; of an answer, for where
it ends. A connection to a worker carries one request at a time and is then used for another one. A caller that hangs
up takes the connection to the worker along, which cancels the turn there. Nothing is held back: whoever reads slowly
slows down who writes.

A worker that is being started again has its socket all the while, so requests wait there until it answers. Those that
it had when it died are answered here: 410 where a rollout was named, as what was kept of it is lost, else 500.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.policy.turns import RolloutGone
from nemo_gym_prorl.policy.workers.framing import Body, Head, Malformed, read_head, without_upgrade
from nemo_gym_prorl.serving.problems import ProblemError, problem_of


_log = logging.getLogger(__name__)

_IDLE_S = 30.0
"""How long a caller's connection may be idle: longer than callers keep theirs, as Gym has it."""
_SWEEP_S = 5.0
_AHEAD_BYTES = 256 * 1024
"""How much of its next requests a caller may send before it has read its answer."""
_CONNECT_AGAIN_S = 0.02

type Route = Callable[[Head], tuple[str | None, int]]
"""The rollout that a request names, and the worker that is to answer it."""


class Front:
    """The connections of callers, and those to the workers.

    Args:
        route: which worker a request is for.
        paths: the socket of each worker.
    """

    def __init__(self, route: Route, paths: list[str]) -> None:
        self.route = route
        self._paths = paths
        self._idle: list[list[Upstream]] = [[] for _ in paths]
        self.callers: set[Caller] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Answer callers from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Caller(self), sock=sock, backlog=2048)
        self.spawn(self._sweep())

    async def aclose(self) -> None:
        """Take no further connections, and end those there are."""
        if self._server is not None:
            self._server.close()
        for task in list(self._background):
            task.cancel()
        for caller in list(self.callers):
            caller.end()
        for idle in self._idle:
            for upstream in list(idle):
                upstream.hang_up()
        await asyncio.sleep(0)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def upstream(self, worker: int, caller: Caller) -> Upstream:
        """A connection to a worker, for one request."""
        while self._idle[worker]:
            known = self._idle[worker].pop()
            if not known.lost:
                known.caller = caller
                return known
        fresh = Upstream(self, worker, caller)
        self.spawn(fresh.connect(self._paths[worker]))
        return fresh

    def give_back(self, upstream: Upstream) -> None:
        """The request is answered, and the connection is as good as before."""
        upstream.caller = None
        self._idle[upstream.worker].append(upstream)

    def forget(self, upstream: Upstream) -> None:
        """The connection is gone."""
        with suppress(ValueError):
            self._idle[upstream.worker].remove(upstream)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for caller in list(self.callers):
                if caller.idle_since is not None and loop.time() - caller.idle_since > _IDLE_S:
                    caller.end()


class Upstream(asyncio.Protocol):
    """A connection to a worker."""

    def __init__(self, front: Front, worker: int, caller: Caller) -> None:
        self.front = front
        self.worker = worker
        self.caller: Caller | None = caller
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []

    async def connect(self, path: str) -> None:
        """Connect, and send what was written meanwhile."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            while not self.lost:
                try:
                    sock.connect(path)
                except BlockingIOError:  # its queue is full
                    await asyncio.sleep(_CONNECT_AGAIN_S)
                else:
                    await loop.create_connection(lambda: self, sock=sock)
                    return
        except OSError as error:
            _log.error("worker %d: %s", self.worker, error)
            self.connection_lost(error)
        sock.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)
        if self.lost:
            self._transport.abort()
            return
        self._transport.writelines(self._early)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        if self.caller is not None:
            self.caller.answered(data)
        else:
            self.hang_up()  # nobody asked

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self.lost = True
        self.front.forget(self)
        caller, self.caller = self.caller, None
        if caller is not None:
            caller.worker_gone()

    def pause_writing(self) -> None:
        """Part of asyncio's protocol."""
        if self.caller is not None:
            self.caller.hold(True)

    def resume_writing(self) -> None:
        """Part of asyncio's protocol."""
        if self.caller is not None:
            self.caller.hold(False)

    def write(self, data: bytes | bytearray) -> None:
        """Send more of the request."""
        if self._transport is None:
            self._early.append(bytes(data))
        else:
            self._transport.write(data)

    def hold(self, held: bool) -> None:
        """The caller reads too slowly, or can read again."""
        if self._transport is not None and not self._transport.is_closing():
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def hang_up(self) -> None:
        """End the connection: whatever the worker does for it is for nobody."""
        self.caller = None
        self.lost = True
        self.front.forget(self)
        if self._transport is not None:
            self._transport.abort()


class Caller(asyncio.Protocol):
    """A caller's connection: requests one after the other, each with its answer before the next one is handed on."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._ahead = bytearray()
        self._held = False
        self.idle_since: float | None = None
        self._rollout: str | None = None
        self._upstream: Upstream | None = None
        self._request: Head | None = None
        self._sending: Body | None = None
        self._response: Head | None = None
        self._receiving: Body | None = None
        self._begun = bytearray()
        self._too_early = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._front.callers.add(self)
        self.idle_since = asyncio.get_running_loop().time()

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self._front.callers.discard(self)
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.hang_up()

    def end(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def hold(self, held: bool) -> None:
        """The worker reads too slowly, or can read again."""
        if self._transport is not None and not self._transport.is_closing() and held != self._held:
            self._held = held
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Part of asyncio's protocol."""
        if self._upstream is not None:
            self._upstream.hold(True)

    def resume_writing(self) -> None:
        """Part of asyncio's protocol."""
        if self._upstream is not None:
            self._upstream.hold(False)

    # Requests

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        try:
            self._received(data)
        except Malformed as error:
            self._refuse(ProblemError(400, "malformed-request", str(error)))

    def _received(self, data: bytes) -> None:
        if self._upstream is not None and self._sending is not None and not self._sending.done:
            taken = self._sending.take(data)
            self._upstream.write(data if taken == len(data) else data[:taken])
            self._ahead += data[taken:]
            self._over()
        elif self._request is not None:
            self._ahead += data
            if len(self._ahead) > _AHEAD_BYTES:
                self.hold(True)
        else:
            self._ahead += data
            self._next()

    def _next(self) -> None:
        """Hand on the next request, if its head is there."""
        head = read_head(self._ahead)
        if head is None:
            return
        body = Body(head.length or 0, head.chunked)
        size = head.size + body.take(self._ahead[head.size :])
        if not head.start[2].startswith(b"HTTP/1."):
            raise Malformed("this is no HTTP/1.1")
        self.idle_since = None
        self._request, self._sending = head, body
        self._rollout, worker = self._front.route(head)
        self._upstream = self._front.upstream(worker, self)
        if b"upgrade" in head.headers:
            self._upstream.write(without_upgrade(self._ahead[: head.size]))
            self._upstream.write(self._ahead[head.size : size])
        else:
            self._upstream.write(self._ahead[:size])
        del self._ahead[:size]

    # Answers

    def answered(self, data: bytes) -> None:
        """The worker says something."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            if self._receiving is None:
                data = self._answer_begins(data)
            elif self._receiving.take(data) < len(data):
                raise Malformed("more than the answer")
        except Malformed as error:
            _log.error("a worker's answer: %s", error)
            self._transport.abort()
            return
        if data:
            self._transport.write(data)
        if self._receiving is not None and self._receiving.done:
            # An answer to half a request: the worker may take the rest for anything.
            self._too_early = self._sending is not None and not self._sending.done
            self._over()

    def _answer_begins(self, data: bytes) -> bytes:
        """What can be passed on of an answer whose head is not complete yet."""
        self._begun += data
        passed = bytearray()
        while self._receiving is None and (head := read_head(self._begun)) is not None:
            status = head.start[1]
            if status.startswith(b"1"):
                passed += self._begun[: head.size]
                del self._begun[: head.size]
                continue
            assert self._request is not None
            empty = self._request.start[0] == b"HEAD" or status in (b"204", b"304")
            self._response = head
            self._receiving = Body(0, False) if empty else Body(head.length, head.chunked)
            if self._receiving.take(self._begun[head.size :]) < len(self._begun) - head.size:
                raise Malformed("more than the answer")
            passed += self._begun
            self._begun.clear()
        return bytes(passed)

    def _over(self) -> None:
        """If the request is sent and answered, go on to the next one."""
        if self._sending is None or self._receiving is None or not (self._sending.done and self._receiving.done):
            return
        assert self._request is not None
        assert self._response is not None
        assert self._transport is not None
        upstream, self._upstream = self._upstream, None
        closes = self._response.closes(self._response.start[0])
        if upstream is not None:
            if closes or self._too_early:
                upstream.hang_up()
            else:
                self._front.give_back(upstream)
        last = closes or self._request.closes(self._request.start[2])
        self._request = self._sending = self._response = self._receiving = None
        self._too_early = False
        self.hold(False)
        self.idle_since = asyncio.get_running_loop().time()
        if last:
            self._transport.close()
        elif self._ahead:
            try:
                self._next()
            except Malformed as error:
                self._refuse(ProblemError(400, "malformed-request", str(error)))

    def worker_gone(self) -> None:
        """The connection to the worker has ended."""
        self._upstream = None
        if self._transport is None or self._transport.is_closing():
            return
        if self._receiving is not None:
            # Its end is the answer's, or the answer is cut off; either way the caller must see it end.
            self._transport.close()
        elif self._rollout is not None:
            self._refuse(
                problem_of(
                    RolloutGone(
                        f"the process that kept the tokens of {self._rollout!r} ended during this request",
                        field="rollout",
                    )
                )
            )
        else:
            self._refuse(
                problem_of(
                    InfrastructureError("the process that answered ended", kind=FailureKind.TRANSPORT_PEER_DROP)
                )
            )

    def _refuse(self, problem: ProblemError) -> None:
        """Answer in the worker's place, and close the connection."""
        assert self._transport is not None
        answer = problem.response()
        lines = [f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self._transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(answer.body)]))
        self._transport.close()
