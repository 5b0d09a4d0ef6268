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

from nemo_gym_prorl.sandbox import cgroup, enter, lease, linux, pause
from nemo_gym_prorl.sandbox.children import Children, in_words
from nemo_gym_prorl.sandbox.clients import Client, Request, close_all
from nemo_gym_prorl.sandbox.life import NoSandbox, Sandboxes
from nemo_gym_prorl.sandbox.loop import Loop
from nemo_gym_prorl.sandbox.sessions import Sessions
from nemo_gym_prorl.sandbox.wire import Message


TICK_S = 0.5
"""How often memory and disk use are looked at, and unfinished ends are tried again."""


class Supervisor:
    """See the module. ``folder`` is the owner's folder, which exists, and whose lock this process holds."""

    def __init__(self, folder: Path, owner: socket.socket, listener: socket.socket) -> None:
        self.folder = folder
        self._children = Children()
        self._loop = Loop(self._reap, self.end)
        self._sandboxes = Sandboxes(folder, self._loop, self._children, _groups())
        self._sessions = Sessions(self._loop, self._children, self._sandboxes)
        self._ending = False
        self._listener = listener
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

    def _reap(self) -> None:
        if self._children.reap():
            # Where a control group was killed at once, its last process may be an orphan that came to us.
            self._sandboxes.step_down_all()

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
                request.answer({"error": in_words(error), "errno": error.errno})
            finally:
                close_all(files)

    # Their questions

    def _do_create(self, request: Request, order: Message, files: list[int]) -> None:
        if self._ending:
            raise OSError("the supervisor is ending")
        try:
            self._sandboxes.create(request, order, files)
        except OSError as error:
            request.answer({"error": f"it can't be prepared: {in_words(error)}"})

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
                told = partial(self._tell_exit, request.client, order["sandbox"], answer["pid"])
                self._children.adopt(answer["pid"], told)

        sandbox = self._sandboxes.up(order["sandbox"])
        self._children.fork(partial(enter.spawn, sandbox.place_to_join(), order, files), spawned, sandbox.group)

    def _tell_exit(self, client: Client, sandbox: str, pid: int, status: int) -> None:
        self._sandboxes.process_ended(sandbox)
        client.send({"event": "exit", "pid": pid, "status": os.waitstatus_to_exitcode(status)}, [])

    def _do_signal(self, request: Request, order: Message, _files: list[int]) -> None:
        """Signal the process group of a process that was spawned here and lives."""
        if order["pid"] in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(order["pid"], order["signal"])
        request.answer({})

    def _do_open(self, request: Request, order: Message, _files: list[int]) -> None:
        self._sessions.open(request, order)

    def _do_attach(self, request: Request, order: Message, _files: list[int]) -> None:
        self._sessions.attach(request, order)

    def _do_hang_up(self, request: Request, order: Message, _files: list[int]) -> None:
        self._sessions.close(request, order)

    def _do_pause(self, request: Request, order: Message, _files: list[int]) -> None:
        sandbox = self._sandboxes.up(order["sandbox"])
        assert sandbox.space
        # From now on, or what is started meanwhile would run on.
        sandbox.paused = True

        def done(answer: Message, _files: list[int]) -> None:
            sandbox.paused = "error" not in answer
            request.answer(answer)

        self._children.fork(partial(pause.pause, sandbox.space), done)

    def _do_resume(self, request: Request, order: Message, _files: list[int]) -> None:
        sandbox = self._sandboxes.up(order["sandbox"])
        assert sandbox.space
        sandbox.paused = False
        self._children.fork(partial(pause.resume, sandbox.space), request.answer)

    def _do_connect(self, request: Request, order: Message, _files: list[int]) -> None:
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        self._children.fork(partial(enter.connect, place, order["port"]), request.answer)

    def _do_put(self, request: Request, order: Message, files: list[int]) -> None:
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        self._children.fork(partial(enter.put, place, order["path"], order["mode"], files[0]), request.answer)

    def _do_get(self, request: Request, order: Message, files: list[int]) -> None:
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        self._children.fork(partial(enter.get, place, order["path"], order["limit"], files[0]), request.answer)


def _groups() -> Path | None:
    """Where sandboxes get their control groups; ``None`` if they can't have any."""
    granted = cgroup.delegation()
    if granted is None:
        return None
    cgroup.hand_out(granted)
    return granted.base


def _sweep(root: Path) -> tuple[Message, list[int]]:
    lease.sweep(root)
    return {}, []


def main() -> None:
    """``supervisor FOLDER OWNER LISTENER``: the numbers of the open socket to the owner, and of the one for others."""
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    # Nothing of ours is for the runtime: with the lock, what it leaves behind would seem to have a live owner.
    for inherited in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(inherited), int(inherited) <= 2)
    owner, listener = (socket.socket(fileno=int(number)) for number in sys.argv[2:])
    Supervisor(Path(sys.argv[1]), owner, listener).run()


if __name__ == "__main__":
    main()
