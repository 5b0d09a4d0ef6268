# SPDX-License-Identifier: Apache-2.0
"""The process that owns the containers of one server, and outlives it just long enough to leave nothing behind.

It is a process of its own because a server may be killed with SIGKILL, and because joining a container needs a forked
child of a small single-threaded process. It is started by :mod:`.own_supervisor`, with one socket, and ends with it:

- the *server* dies: the socket closes; every container is killed, proven gone, its files removed; then this ends too;
- this process dies: each container's PID 1 sees its end of a socket close and exits, and the runtime's starter is
  killed by the kernel; the server's :mod:`.client` removes the files;
- both die at once: the same, and the files go with the next start of any supervisor (:func:`.state_dir.sweep`).

One loop, no threads, no blocking call: what may take long (joining, copying, deleting) happens in forked children.
This module takes the questions, and answers each, with an error if need be: none of them, and nothing that goes wrong
for one sandbox, ends the others. What becomes of a sandbox is :mod:`.lifecycle`'s.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.isolation.files import copies, snapshots
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import cgroups, descriptors
from nemo_gym_prorl.sandbox.supervisor.lifecycle import NoSandbox, Sandboxes
from nemo_gym_prorl.sandbox.supervisor.networks import Networks
from nemo_gym_prorl.sandbox.supervisor.processes import freezer
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children, failure
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.processes.spawns import Spawns
from nemo_gym_prorl.sandbox.supervisor.pty_server import Sessions
from nemo_gym_prorl.sandbox.supervisor.rpc import peers
from nemo_gym_prorl.sandbox.supervisor.rpc.connections import Client, Request
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, close_all, receive
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.sandbox.supervisor.zygotes import Zygotes


Handler = Callable[[Request, Message, list[int]], None]


class Supervisor:
    """See the module. ``folder`` is the owner's folder, which exists, and whose lock this process holds."""

    def __init__(self, folder: Path, owner: socket.socket, listener: socket.socket) -> None:
        self.folder = folder
        self._children = Children()
        self._loop = Loop(self._reap, self.end)
        self._launcher = Launcher(self._loop, self._children, folder)
        groups = _groups()
        self._sandboxes = Sandboxes(folder, self._loop, self._children, groups, self._launcher)
        self._networks = Networks(self._children, self._launcher, self._sandboxes)
        self._spawns = Spawns(self._loop, self._children, self._launcher)
        self._zygotes = Zygotes(folder, self._loop, self._children, groups)
        self._sessions = Sessions(self._loop, self._spawns, self._sandboxes)
        self._handlers: dict[str, Handler] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }
        self._ending = False
        self._listener = listener
        self._listener.setblocking(False)
        self._loop.watch(self._listener, self._accept)
        self._owner_pid = peers.peer(owner)[0]
        self._owner = self._add_client(owner)

    def run(self) -> None:
        """Serve until the owner is gone and everything is cleaned up."""
        self._children.fork(partial(_sweep, self.folder.parent), lambda _answer, _files: None, files=())
        # What is there by now stays as it is: a forked child is to copy none of it for want of counting it.
        gc.collect()
        gc.freeze()
        while not (self._ending and not self._sandboxes):
            self._loop.turn()
        state_dir.clear(self.folder)

    def _reap(self) -> None:
        self._sandboxes.orphans_ended(self._children.reap())

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
            if peers.trusted(connection, self._owner_pid):
                self._add_client(connection)
            else:
                connection.close()

    def _serve(self, client: Client) -> None:
        """Take one question of a client; others have their turn before the next."""
        client.flush()
        try:
            if client.gone:
                raise PeerGone
            if client.behind:
                return
            message, files = receive(client.connection)
        except BlockingIOError:
            return
        except PeerGone:
            client.close()
            if client is self._owner:
                self.end()
            return
        number = message.get("id")
        request = Request(client, number if isinstance(number, int) else None)
        try:
            if message.get("torn"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            handler = self._handlers.get(str(message.get("do")))
            if handler is None:
                request.answer({"error": f"there is no request {message.get('do')!r}"})
            else:
                handler(request, message, files)
        except NoSandbox as error:
            request.answer({"error": str(error), "lost": True})
        except Exception as error:
            request.answer(failure(error))
        finally:
            close_all(files)

    # Their questions

    def _do_create(self, request: Request, order: Message, files: list[int]) -> None:
        if self._ending:
            raise OSError("the supervisor is ending")
        self._sandboxes.create(request, order, files)

    def _do_check(self, request: Request, order: Message, _files: list[int]) -> None:
        """Whoever asks is told of its end."""
        self._sandboxes.check(request, order["sandbox"], memory=order.get("memory", False))

    def _do_destroy(self, request: Request, order: Message, _files: list[int]) -> None:
        self._sandboxes.destroy(request, order["sandbox"])

    def _do_spawn(self, request: Request, order: Message, files: list[int]) -> None:
        """Answered with the process's number; its end is told by an ``exit`` event under the name that was chosen."""
        name, sandbox = str(order["spawn"]), self._sandboxes.up(order["sandbox"])

        def ended(status: int) -> None:
            self._sandboxes.process_ended(sandbox.name, status)
            request.client.send({"event": "exit", "spawn": name, "status": os.waitstatus_to_exitcode(status)}, [])

        def started(answer: Message, returned: list[int]) -> None:
            request.answer(answer, returned)
            if "pid" in answer:
                self._sandboxes.process_started(sandbox.name, answer["pid"])
            elif "exhausted" in answer:
                self._sandboxes.start_refused(sandbox.name, answer["exhausted"])

        joiner = self._zygotes.joiner(sandbox, order)
        place = sandbox.place_to_join()
        self._spawns.start(name, place, order, files, sandbox.group, started, ended, joiner)

    def _do_signal(self, request: Request, order: Message, _files: list[int]) -> None:
        """Signal the process group of a program by its name; SIGKILL also if it is only on its way."""
        self._spawns.signal(order["spawn"], order["signal"])
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
        assert sandbox.place
        # From now on, or what is started meanwhile would run on.
        sandbox.paused = True

        def done(answer: Message, _files: list[int]) -> None:
            sandbox.paused = "error" not in answer
            request.answer(answer)

        self._children.fork(partial(freezer.pause, sandbox.space, sandbox.place), done)

    def _do_resume(self, request: Request, order: Message, _files: list[int]) -> None:
        sandbox = self._sandboxes.up(order["sandbox"])
        assert sandbox.space
        sandbox.paused = False
        self._children.fork(partial(freezer.resume, sandbox.space), request.answer)

    def _do_connect(self, request: Request, order: Message, _files: list[int]) -> None:
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        self._launcher.ask(requests.connect(place, order["port"]), request.answer)

    def _do_address(self, request: Request, order: Message, _files: list[int]) -> None:
        self._networks.address(request, order["sandbox"])

    def _do_introduce(self, request: Request, order: Message, _files: list[int]) -> None:
        self._networks.introduce(request, order)

    def _do_reach(self, request: Request, order: Message, _files: list[int]) -> None:
        self._networks.reach(request, order)

    def _do_listen(self, request: Request, order: Message, _files: list[int]) -> None:
        self._networks.listen(request, order)

    def _do_snapshot(self, request: Request, order: Message, files: list[int]) -> None:
        """Of one that is paused, or it would change meanwhile."""
        sandbox = self._sandboxes.up(order["sandbox"])
        if not sandbox.paused or sandbox.place is None:
            raise OSError("only a sandbox that is paused can be copied")
        layer, limit = str(sandbox.folder / "overlay" / "upper"), sandbox.order["disk_mib"] << 20
        action = partial(snapshots.pack, sandbox.place, layer, order["header"], limit, files[0])
        self._children.fork(action, request.answer, files=files[:1])

    def _do_restore(self, request: Request, order: Message, files: list[int]) -> None:
        sandbox = self._sandboxes.up(order["sandbox"])
        limit = sandbox.order["disk_mib"] << 20
        action = partial(snapshots.unpack, sandbox.place_to_join(), limit, files[0])
        self._children.fork(action, request.answer, sandbox.group, files=files[:1])

    def _do_put(self, request: Request, order: Message, files: list[int]) -> None:
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        action = partial(copies.put, place, order["path"], order["mode"], files[0])
        self._children.fork(action, request.answer, files=files[:1])

    def _do_get(self, request: Request, order: Message, files: list[int]) -> None:
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        action = partial(copies.get, place, order["path"], order["limit"], files[0])
        self._children.fork(action, request.answer, files=files[:1])


def _groups() -> Path | None:
    """Where sandboxes get their control groups; ``None`` if they can't have any."""
    granted = cgroups.delegation()
    if granted is None:
        return None
    cgroups.hand_out(granted)
    return granted.base


def _sweep(root: Path) -> tuple[Message, list[int]]:
    state_dir.sweep(root)
    return {}, []


def main() -> None:
    """``supervisor FOLDER OWNER LISTENER``: the numbers of the open socket to the owner, and of the one for others."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    # Nothing of ours is for the runtime: with the lock, what it leaves behind would seem to have a live owner.
    descriptors.raise_limit()
    for inherited in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(inherited), int(inherited) <= 2)
    owner, listener = (socket.socket(fileno=int(number)) for number in sys.argv[2:])
    Supervisor(Path(sys.argv[1]), owner, listener).run()


if __name__ == "__main__":
    main()
