# SPDX-License-Identifier: Apache-2.0
"""The process that owns the containers of one server, and outlives it just long enough to leave nothing behind.

It is a process of its own because a server may be killed with SIGKILL, and because joining a container needs a forked
child of a small single-threaded process. It is started by :mod:`.link`, with one socket, and ends with it:

- the *server* dies: the socket closes; every container is killed, proven gone, its files removed; then this ends too;
- this process dies: each container's PID 1 sees its end of a socket close and exits, and the runtime's starter is
  killed by the kernel; the server's :mod:`.link` removes the files;
- both die at once: the same, and the files go with the next start of any supervisor (:func:`.lease.sweep`).

One loop, no threads, no blocking call: what may take long (joining, copying, deleting) happens in forked children.
This module takes the questions; what becomes of a sandbox is :mod:`.life`'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox import enter, lease, linux
from nemo_gym_prorl.sandbox.children import Children
from nemo_gym_prorl.sandbox.clients import Client, Request, close_all
from nemo_gym_prorl.sandbox.life import NoSandbox, Sandboxes
from nemo_gym_prorl.sandbox.loop import Loop
from nemo_gym_prorl.sandbox.wire import Message


TICK_S = 0.5
"""How often memory and disk use are looked at, and unfinished ends are tried again."""


class Supervisor:
    """See the module. ``folder`` is the owner's folder, which exists, and whose lock this process holds."""

    def __init__(self, folder: Path, owner: socket.socket) -> None:
        self.folder = folder
        self._children = Children()
        self._loop = Loop(self._children.reap, self.end)
        self._sandboxes = Sandboxes(folder, self._loop, self._children)
        self._ending = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o600)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._loop.watch(self._listener, self._accept)
        self._owner = self._add_client(owner)

    def run(self) -> None:
        """Serve until the owner is gone and everything is cleaned up."""
        self._children.fork(partial(_sweep, self.folder.parent), lambda _answer, _files: None)
        next_tick = time.monotonic() + TICK_S
        while not (self._ending and not self._sandboxes):
            self._loop.turn(next_tick)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._sandboxes.tick()
        lease.clear(self.folder)

    def end(self) -> None:
        """Take everything down; :meth:`run` returns when it is."""
        if not self._ending:
            self._ending = True
            self._sandboxes.close_all()

    # Clients

    def _add_client(self, connection: socket.socket) -> Client:
        client = Client(connection, self._loop)
        self._loop.watch(connection, partial(self._serve, client))
        return client

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _address = self._listener.accept()
            self._add_client(connection)

    def _serve(self, client: Client) -> None:
        client.flush()
        messages = client.inbox.receive()
        if messages is None or client.gone:
            client.gone = True
            self._loop.drop(client.connection)
            if client is self._owner:
                self.end()
            return
        for message, files in messages:
            request = Request(client, message["id"])
            try:
                getattr(self, f"_do_{message['do']}")(request, message, files)
            except NoSandbox as error:
                request.answer({"error": str(error), "lost": True})
            except OSError as error:
                request.answer({"error": str(error)})
            finally:
                close_all(files)

    # Their questions

    def _do_create(self, request: Request, order: Message, _files: list[int]) -> None:
        if self._ending:
            raise OSError("the supervisor is ending")
        self._sandboxes.create(request, order)

    def _do_check(self, request: Request, order: Message, _files: list[int]) -> None:
        """Answered if the container is up; whoever asks is told of its end."""
        self._sandboxes.up(order["sandbox"]).clients.append(request.client)
        request.answer({})

    def _do_destroy(self, request: Request, order: Message, _files: list[int]) -> None:
        self._sandboxes.destroy(request, order["sandbox"])

    def _do_spawn(self, request: Request, order: Message, files: list[int]) -> None:
        """Answered with the process's number; its end is told by an ``exit`` event."""

        def spawned(answer: Message, returned: list[int]) -> None:
            request.answer(answer, returned)
            if "pid" in answer:
                self._children.on_end(answer["pid"], partial(self._tell_exit, request.client, answer["pid"]))

        self._children.fork(partial(enter.spawn, self._sandboxes.place(order["sandbox"]), order, files), spawned)

    def _tell_exit(self, client: Client, pid: int, status: int) -> None:
        client.send({"event": "exit", "pid": pid, "status": os.waitstatus_to_exitcode(status)}, [])

    def _do_signal(self, request: Request, order: Message, _files: list[int]) -> None:
        """Signal the process group of a process that was spawned here and lives."""
        if order["pid"] in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(order["pid"], order["signal"])
        request.answer({})

    def _do_put(self, request: Request, order: Message, files: list[int]) -> None:
        place = self._sandboxes.place(order["sandbox"])
        self._children.fork(partial(enter.put, place, order["path"], order["mode"], files[0]), request.answer)

    def _do_get(self, request: Request, order: Message, files: list[int]) -> None:
        place = self._sandboxes.place(order["sandbox"])
        self._children.fork(partial(enter.get, place, order["path"], order["limit"], files[0]), request.answer)


def _sweep(root: Path) -> tuple[Message, list[int]]:
    lease.sweep(root)
    return {}, []


def main() -> None:
    """``supervisor FOLDER SOCKET``: the number of the open socket to the owner."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    owner = socket.socket(fileno=number)
    owner.set_inheritable(False)
    Supervisor(folder, owner).run()


if __name__ == "__main__":
    main()
