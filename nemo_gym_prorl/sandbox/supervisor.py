# SPDX-License-Identifier: Apache-2.0
"""The process that owns the containers of one server, and outlives it just long enough to leave nothing behind.

It is a process of its own because a server may be killed with SIGKILL, and because joining a container needs a forked
child of a small single-threaded process. It is started by :mod:`.link`, with one socket, and ends with it:

- the *server* dies: the socket closes; every container is killed, proven gone, its files removed; then this ends too;
- this process dies: each container's PID 1 sees its end of a socket close and exits, and the runtime's starter is
  killed by the kernel; the server's :mod:`.link` removes the files;
- both die at once: the same, and the files go with the next start of any supervisor (:func:`.lease.sweep`).

A container is up when its PID 1, a plain ``sh`` that only waits, has said so on its socket: the kernel tells the
number of the process that spoke. It is down when the runtime's starter is reaped *and* no process is in its PID
namespace.

One loop, no threads, no blocking call: what may take long (joining, copying, deleting) happens in forked children.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox import enter, lease, linux
from nemo_gym_prorl.sandbox.watch import Usage, excess
from nemo_gym_prorl.sandbox.wire import Inbox, Message, pack, send_files


KEEPER = "exec 3<&0; echo; while :; do (read -r _) <&3 & wait $!; case $? in 1) exit;; esac; done"
"""The container's PID 1, in plain ``sh``: reaps whatever loses its parent, and exits when its input ends. A child does
the reading because ``wait`` reaps and ``read`` does not; that child may be killed from inside, and is replaced."""

TICK_S = 0.5
"""How often memory and disk use are looked at, and unfinished ends are tried again."""

DISK_TICKS = 4
"""Disk use is looked at every so many ticks: it walks the overlay."""

STUCK_S = 5.0
"""After this long a container that does not die is reported as such; it is tried again for ever."""

Action = Callable[[], tuple[Message, list[int]]]


@dataclass(slots=True)
class Request:
    """One question of a client; answered exactly once."""

    client: Client
    number: int

    def answer(self, message: Message, files: list[int] | None = None) -> None:
        self.client.send({**message, "id": self.number}, files or [])


@dataclass(slots=True)
class Sandbox:
    """One container. ``place`` and ``space`` are known once it is up."""

    name: str
    folder: Path
    starter: int
    channel: socket.socket
    order: Message
    clients: list[Client]
    creating: Request | None
    place: enter.Place | None = None
    space: lease.Space | None = None
    reaped: bool = False
    closing_since: float | None = None
    closing: list[tuple[Request, Message]] = field(default_factory=list)
    deleting: bool = False
    usage: Usage = field(default_factory=Usage)
    born: float = field(default_factory=time.monotonic)

    def tell(self, event: str, reason: str = "") -> None:
        """Have everybody who uses the sandbox know."""
        for client in self.clients:
            if not client.gone:
                client.send({"event": event, "sandbox": self.name, "reason": reason}, [])


class Client:
    """One connection of a server; messages wait here when it does not read."""

    def __init__(self, connection: socket.socket, supervisor: Supervisor) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.inbox = Inbox(connection)
        self._supervisor = supervisor
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self.gone = False

    def send(self, message: Message, files: list[int]) -> None:
        """Queue a message; ``files`` are closed here once they are sent."""
        self._outbox.append((pack({**message, "files": len(files)}), files))
        self.flush()

    def flush(self) -> None:
        while self._outbox and not self.gone:
            data, files = self._outbox[0]
            try:
                sent = send_files(self.connection, data, files)
            except BlockingIOError:
                break
            except OSError:
                self.gone = True
                break
            _close(files)
            self._outbox[0] = (data[sent:], [])
            if sent == len(data):
                self._outbox.popleft()
        if self.gone:
            while self._outbox:
                _close(self._outbox.popleft()[1])
        self._supervisor.wants_to_write(self, bool(self._outbox))


class Supervisor:
    """See the module. ``root`` is the owner's folder, which exists, and whose lock this process holds."""

    def __init__(self, folder: Path, owner: socket.socket) -> None:
        self.folder = folder
        self._selector = selectors.DefaultSelector()
        self._sandboxes: dict[str, Sandbox] = {}
        self._children: dict[int, Callable[[int], None]] = {}
        self._unclaimed: dict[int, int] = {}
        self._ending = False
        self._ticks = 0
        self._signals, wakeup = socket.socketpair()
        for end in (self._signals, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._wakeup = wakeup
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._signals, selectors.EVENT_READ, self._drain_signals)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o600)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._owner = self._add_client(owner)

    # The loop

    def run(self) -> None:
        """Serve until the owner is gone and everything is cleaned up."""
        self._fork(partial(_sweep, self.folder.parent), lambda _answer, _files: None)
        next_tick = time.monotonic() + TICK_S
        while not (self._ending and not self._sandboxes):
            for key, _events in self._selector.select(max(0.0, next_tick - time.monotonic())):
                # One of those that were ready at the same time may have led to this one's end.
                if key.fd in self._selector.get_map():
                    key.data()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._tick()
        lease.clear(self.folder)

    def end(self) -> None:
        """Take everything down; :meth:`run` returns when it is."""
        if not self._ending:
            self._ending = True
            for sandbox in list(self._sandboxes.values()):
                self._close(sandbox, None)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            self.end()

    def _drain_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._signals.recv(4096):
                pass
        self._reap()

    def _tick(self) -> None:
        self._ticks += 1
        for sandbox in list(self._sandboxes.values()):
            if sandbox.closing_since is not None:
                self._try_to_finish(sandbox)
        watched = {
            box.space.number: box for box in self._sandboxes.values() if box.space and box.closing_since is None
        }
        for space, victim, reason in excess({space: box.usage for space, box in watched.items()}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            watched[space].tell("limit", reason)
        for box in watched.values():
            if box.order["ttl_s"] and time.monotonic() - box.born > box.order["ttl_s"]:
                box.tell("limit", f"time to live: {box.order['ttl_s']:g} s")
                self._end_early(box)
        if self._ticks % DISK_TICKS == 0:
            for box in watched.values():
                if box.order["disk_mib"] and not box.usage.measuring:
                    self._measure_disk(box)

    def _drop(self, connection: socket.socket) -> None:
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()

    # Clients

    def _add_client(self, connection: socket.socket) -> Client:
        client = Client(connection, self)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._serve, client))
        return client

    def wants_to_write(self, client: Client, wanted: bool) -> None:
        """Have :meth:`Client.flush` called again when its socket takes more."""
        if client.gone:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, partial(self._serve, client))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _address = self._listener.accept()
            self._add_client(connection)

    def _serve(self, client: Client) -> None:
        client.flush()
        messages = client.inbox.receive()
        if messages is None or client.gone:
            client.gone = True
            self._drop(client.connection)
            if client is self._owner:
                self.end()
            return
        for message, files in messages:
            request = Request(client, message["id"])
            try:
                getattr(self, f"_do_{message['do']}")(request, message, files)
            except KeyError:
                request.answer({"error": f"sandbox {message['sandbox']} has ended", "lost": True})
            except OSError as error:
                request.answer({"error": str(error)})
            finally:
                _close(files)

    # Containers

    def _do_create(self, request: Request, order: Message, _files: list[int]) -> None:
        """Start a container; answered with its first process's environment when it is up."""
        if self._ending:
            raise OSError("the supervisor is ending")
        folder = self.folder / order["sandbox"]
        overlay = Path(order["overlay"])
        for path in (folder, overlay, overlay / "upper", overlay / "work", Path(order["shared"])):
            path.mkdir(mode=0o700)
            os.chown(path, order["host_uid"], order["host_gid"])
        (overlay / "upper").chmod(0o755)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # Makes the kernel say which process writes.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        log = os.open(folder / "log", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        starter = os.fork()
        if starter == 0:
            _start_runtime(order, folder, theirs, log)
        theirs.close()
        os.close(log)
        lease.note_starter(folder, starter)
        sandbox = Sandbox(order["sandbox"], folder, starter, ours, order, [request.client], request)
        sandbox.usage.memory_limit = order["memory_mib"] << 20
        self._sandboxes[sandbox.name] = sandbox
        self._children[starter] = partial(self._starter_ended, sandbox)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._keeper_spoke, sandbox))

    def _keeper_spoke(self, sandbox: Sandbox) -> None:
        self._selector.unregister(sandbox.channel)
        data, ancillary, _flags, _address = sandbox.channel.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
        if not data or not ancillary:
            # The starter's end says why.
            return
        pid, _uid, _gid = struct.unpack("3i", ancillary[0][2])
        if sandbox.closing_since is not None:
            os.kill(pid, signal.SIGKILL)
            return
        order = sandbox.order
        sandbox.space = lease.Space.of(pid)
        sandbox.space.note(sandbox.folder)
        sandbox.place = enter.Place(pid, order["uid"], {int(key): value for key, value in order["limits"].items()})
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
        environment = dict(pair.split("=", 1) for pair in variables.split("\0") if "=" in pair)

        def prepared(answer: Message, _files: list[int]) -> None:
            if request := sandbox.creating:
                sandbox.creating = None
                if "error" in answer:
                    self._close(sandbox, request, {"error": f"its limits could not be set: {answer['error']}"})
                else:
                    request.answer({"environment": environment})

        self._fork(partial(enter.prepare, sandbox.place, order["shared_memory_mib"]), prepared)

    def _do_check(self, request: Request, order: Message, _files: list[int]) -> None:
        """Answered if the container is up; whoever asks is told of its end."""
        self._place(order)
        self._sandboxes[order["sandbox"]].clients.append(request.client)
        request.answer({})

    def _do_destroy(self, request: Request, order: Message, _files: list[int]) -> None:
        """Answered when no process and no file of the container is left. An unknown one is gone already."""
        sandbox = self._sandboxes.get(order["sandbox"])
        if sandbox is None:
            request.answer({})
        else:
            self._close(sandbox, request)

    def _close(self, sandbox: Sandbox, request: Request | None, answer: Message | None = None) -> None:
        """Begin to end a sandbox, if need be; ``request`` gets ``answer`` when nothing of it is left."""
        if request:
            sandbox.closing.append((request, answer or {}))
        if sandbox.closing_since is None:
            sandbox.closing_since = time.monotonic()
            sandbox.channel.shutdown(socket.SHUT_RDWR)
            self._try_to_finish(sandbox)

    def _end_early(self, sandbox: Sandbox) -> None:
        """The sandbox ends without having been asked to: who uses it is told."""
        sandbox.tell("gone")
        self._close(sandbox, None)

    def _starter_ended(self, sandbox: Sandbox, status: int) -> None:
        sandbox.reaped = True
        if sandbox.closing_since is None and not sandbox.creating:
            self._end_early(sandbox)
        sandbox.closing_since = sandbox.closing_since or time.monotonic()
        if request := sandbox.creating:
            sandbox.creating = None
            log = (sandbox.folder / "log").read_bytes()[-4000:].decode("utf-8", "replace")
            code = os.waitstatus_to_exitcode(status)
            self._close(sandbox, request, {"error": f"the runtime ended with {code}", "log": log.strip()})
        self._try_to_finish(sandbox)

    def _try_to_finish(self, sandbox: Sandbox) -> None:
        """One step towards the end: kill what lives, and once nothing does, delete. Called again on every change."""
        if sandbox.deleting:
            return
        alive = sandbox.space.members() if sandbox.space else []
        if not sandbox.reaped and not sandbox.space:
            alive.append(sandbox.starter)
        late = time.monotonic() - (sandbox.closing_since or 0.0) > STUCK_S
        if late and not sandbox.reaped:
            alive.append(sandbox.starter)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if sandbox.reaped and not alive:
            sandbox.deleting = True
            self._drop(sandbox.channel)
            self._fork(partial(_delete, sandbox.folder), partial(self._deleted, sandbox))
        elif late:
            for request, _answer in sandbox.closing:
                request.answer({"error": f"processes {alive} of {sandbox.name} do not die; tried again until they do"})
            sandbox.closing.clear()

    def _deleted(self, sandbox: Sandbox, answer: Message, _files: list[int]) -> None:
        if "error" in answer:
            sandbox.deleting = False
        else:
            del self._sandboxes[sandbox.name]
        for request, wanted in sandbox.closing:
            request.answer({**answer, **wanted})
        sandbox.closing.clear()

    def _measure_disk(self, sandbox: Sandbox) -> None:
        sandbox.usage.measuring = True

        def measured(answer: Message, _files: list[int]) -> None:
            sandbox.usage.measuring = False
            if answer.get("bytes", 0) > sandbox.order["disk_mib"] << 20 and sandbox.closing_since is None:
                reason = f"disk: wrote {answer['bytes'] >> 20} MiB of {sandbox.order['disk_mib']} MiB"
                sandbox.tell("limit", reason)
                self._end_early(sandbox)

        self._fork(partial(_disk_use, sandbox.folder), measured)

    # Inside containers

    def _place(self, order: Message) -> enter.Place:
        sandbox = self._sandboxes[order["sandbox"]]
        if sandbox.place is None or sandbox.closing_since is not None:
            raise KeyError(order["sandbox"])
        return sandbox.place

    def _do_spawn(self, request: Request, order: Message, files: list[int]) -> None:
        """Answered with the process's number; its end is told by an ``exit`` event."""

        def spawned(answer: Message, returned: list[int]) -> None:
            request.answer(answer, returned)
            if "pid" in answer:
                self._await(answer["pid"], partial(self._tell_exit, request.client, answer["pid"]))

        self._fork(partial(enter.spawn, self._place(order), order, files), spawned)

    def _tell_exit(self, client: Client, pid: int, status: int) -> None:
        client.send({"event": "exit", "pid": pid, "status": os.waitstatus_to_exitcode(status)}, [])

    def _do_signal(self, request: Request, order: Message, _files: list[int]) -> None:
        """Signal the process group of a process that was spawned here and lives."""
        if order["pid"] in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(order["pid"], order["signal"])
        request.answer({})

    def _do_put(self, request: Request, order: Message, files: list[int]) -> None:
        action = partial(enter.put, self._place(order), order["path"], order["mode"], files[0])
        self._fork(action, request.answer)

    def _do_get(self, request: Request, order: Message, files: list[int]) -> None:
        action = partial(enter.get, self._place(order), order["path"], order["limit"], files[0])
        self._fork(action, request.answer)

    # Children

    def _fork(self, action: Action, done: Callable[[Message, list[int]], None]) -> None:
        """Run ``action`` in a forked child; ``done`` gets what it returns, or ``{"error": ...}``."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _run_child(action, theirs)
        theirs.close()

        def ended(_status: int) -> None:
            ours.setblocking(False)
            received = Inbox(ours).receive()
            ours.close()
            answer, files = received[0] if received else ({"error": "the child of the supervisor died"}, [])
            done(answer, files)

        self._children[pid] = ended

    def _await(self, pid: int, ended: Callable[[int], None]) -> None:
        if pid in self._unclaimed:
            ended(self._unclaimed.pop(pid))
        else:
            self._children[pid] = ended

    def _reap(self) -> None:
        """Collect every dead child. A process spawned by a forked child becomes ours when that child ends, and may
        be reaped before we have heard of it: its status waits for :meth:`_await`."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if ended := self._children.pop(pid, None):
                ended(status)
            else:
                self._unclaimed[pid] = status
                if len(self._unclaimed) > 1024:
                    del self._unclaimed[next(iter(self._unclaimed))]


def _start_runtime(order: Message, folder: Path, channel: socket.socket, log: int) -> None:
    """In a forked child: become the runtime, as the only user of a new user namespace. Never returns."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        image, inside = order["image"], order["uid"]
        host = order["host_uid"], order["host_gid"]
        owner = linux.user_namespace(inside, *host)
        if os.geteuid() == 0:
            # Neither are root's folders open to the sandbox's user, nor could it change in its overlay what is root's.
            unpacked = os.path.isdir(image)
            image = str(folder / "image")
            os.close(os.open(image, os.O_CREAT)) if not unpacked else os.mkdir(image)
            linux.private_mounts()
            linux.mount_for(order["image"], image, linux.user_namespace(0, *host) if unpacked else None)
        os.setns(owner)
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
        # Changed ids made the kernel forget it.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, descriptor in enumerate((channel.fileno(), channel.fileno(), log)):
            os.dup2(descriptor, number)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(order["argv"][0], [*order["argv"], image, "/bin/sh", "-c", KEEPER], order["env"])
    except OSError as error:
        os.write(log, str(error).encode())
    finally:
        os._exit(127)


def _run_child(action: Action, channel: socket.socket) -> None:
    """In a forked child: run ``action``, send what it returns, and end."""
    try:
        signal.set_wakeup_fd(-1)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            answer, files = action()
        except OSError as error:
            answer, files = {"error": error.strerror or str(error), "errno": error.errno}, []
            if error.filename:
                answer["error"] = f"{error.filename}: {error.strerror}"
        send_files(channel, pack({**answer, "files": len(files)}), files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _sweep(root: Path) -> tuple[Message, list[int]]:
    lease.sweep(root)
    return {}, []


def _delete(folder: Path) -> tuple[Message, list[int]]:
    lease.remove_tree(folder)
    return {}, []


def _disk_use(folder: Path) -> tuple[Message, list[int]]:
    """Bytes on disk below ``folder``; what vanishes meanwhile does not count."""
    total = 0
    for path, _folders, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(f"{path}/{name}").st_blocks * 512
    return {"bytes": total}, []


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def main() -> None:
    """``supervisor FOLDER SOCKET``: the number of the open socket to the owner."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    owner = socket.socket(fileno=number)
    owner.set_inheritable(False)
    Supervisor(folder, owner).run()


if __name__ == "__main__":
    main()
