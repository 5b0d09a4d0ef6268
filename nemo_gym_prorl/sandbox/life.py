# SPDX-License-Identifier: Apache-2.0
"""The life of a sandbox, as its supervisor sees it: creating, up, closing, gone.

- *creating*: the runtime was started; whoever asked waits.
- *up*: its PID 1, a plain ``sh`` that only waits, has said so on its socket, where the kernel tells the number of the
  process that spoke, and its limits are set. Only now can it be joined.
- *closing*: somebody asked for its end, or its starter ended, or it ran into a limit. There is no way back.
- *gone*: the starter is reaped *and* no process is in its PID namespace *and* its folder is deleted. Whoever asked for
  the end is told now and not before; who asked for it to be created, too, if it never came up.

What to do on the way down is one pure function, :func:`step_down`, asked again on every change and twice a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox import enter, lease
from nemo_gym_prorl.sandbox.children import Children
from nemo_gym_prorl.sandbox.clients import Client, Request
from nemo_gym_prorl.sandbox.loop import Loop
from nemo_gym_prorl.sandbox.starter import become_runtime
from nemo_gym_prorl.sandbox.watch import Usage, disk_use, excess
from nemo_gym_prorl.sandbox.wire import Message


DISK_TICKS = 4
"""Disk use is looked at every so many ticks: it walks the overlay."""

STUCK_S = 5.0
"""After this long a container that does not die is reported as such; it is tried again for ever."""

LOG_KEPT = 4000


class Stage(StrEnum):
    """See the module."""

    CREATING = "creating"
    UP = "up"
    CLOSING = "closing"
    GONE = "gone"


class NoSandbox(Exception):
    """There is no such sandbox, or it is not up."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next with a sandbox that is to end.

    Attributes:
        kill: processes to send SIGKILL.
        delete: nothing of it lives: its files can go.
        report: it takes too long: those who wait are told.
    """

    kill: tuple[int, ...] = ()
    delete: bool = False
    report: bool = False


def step_down(*, starter: int | None, inside: Sequence[int] | None, closing_s: float) -> Step:
    """The next step towards a sandbox's end.

    Args:
        starter: the runtime's process outside of the container; ``None`` once it is reaped.
        inside: the live processes of the container; ``None`` if it never got as far as having any.
        closing_s: for how long it has been closing.
    """
    late = closing_s > STUCK_S
    victims = list(inside or ())
    # The starter cleans up after itself once the inside is dead, so it is left alone unless that takes too long.
    if starter is not None and (inside is None or late):
        victims.append(starter)
    if starter is None and not victims:
        return Step(delete=True)
    return Step(kill=tuple(victims), report=late)


@dataclass(slots=True)
class Sandbox:
    """One container. ``place`` and ``space`` are known once its first process has spoken."""

    name: str
    folder: Path
    starter: int
    channel: socket.socket
    order: Message
    clients: list[Client]
    creating: Request | None
    stage: Stage = Stage.CREATING
    place: enter.Place | None = None
    space: lease.Space | None = None
    reaped: bool = False
    closing_since: float = 0.0
    closing: list[tuple[Request, Message]] = field(default_factory=list)
    deleting: bool = False
    usage: Usage = field(default_factory=Usage)
    born: float = field(default_factory=time.monotonic)

    def tell(self, event: str, reason: str = "") -> None:
        """Have everybody who uses the sandbox know."""
        for client in self.clients:
            if not client.gone:
                client.send({"event": event, "sandbox": self.name, "reason": reason}, [])


class Sandboxes:
    """All sandboxes of one supervisor; each is here from its creation until it is gone."""

    def __init__(self, folder: Path, loop: Loop, children: Children) -> None:
        self._folder = folder
        self._loop = loop
        self._children = children
        self._all: dict[str, Sandbox] = {}
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._all)

    def up(self, name: str) -> Sandbox:
        """The sandbox of that name.

        Raises:
            NoSandbox: there is none, or none that is up.
        """
        sandbox = self._all.get(name)
        if sandbox is None or sandbox.stage is not Stage.UP:
            raise NoSandbox(f"sandbox {name} has ended")
        return sandbox

    def place(self, name: str) -> enter.Place:
        """Where to join it; raises as :meth:`up`."""
        place = self.up(name).place
        assert place
        return place

    def create(self, request: Request, order: Message) -> None:
        """Start one; answered with its first process's environment when it is up."""
        folder = self._folder / order["sandbox"]
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
            become_runtime(order, folder, theirs, log)
        theirs.close()
        os.close(log)
        lease.note_starter(folder, starter)
        sandbox = Sandbox(order["sandbox"], folder, starter, ours, order, [request.client], request)
        sandbox.usage.memory_limit = order["memory_mib"] << 20
        self._all[sandbox.name] = sandbox
        self._children.on_end(starter, partial(self._starter_ended, sandbox))
        self._loop.watch(ours, partial(self._keeper_spoke, sandbox))

    def destroy(self, request: Request, name: str) -> None:
        """End one; answered when no process and no file of it is left. An unknown one is gone already."""
        if sandbox := self._all.get(name):
            self._close(sandbox, request)
        else:
            request.answer({})

    def close_all(self) -> None:
        """Begin to end every one."""
        for sandbox in list(self._all.values()):
            self._close(sandbox)

    def tick(self) -> None:
        """Look at everything that nobody tells: limits, times to live, and ends that take long."""
        self._ticks += 1
        for sandbox in list(self._all.values()):
            if sandbox.stage is Stage.CLOSING:
                self._step_down(sandbox)
        watched = {box.space.number: box for box in self._all.values() if box.space and box.stage is Stage.UP}
        for space, victim, reason in excess({space: box.usage for space, box in watched.items()}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            watched[space].tell("limit", reason)
        for box in watched.values():
            if box.order["ttl_s"] and time.monotonic() - box.born > box.order["ttl_s"]:
                self._end_early(box, f"time to live: {box.order['ttl_s']:g} s")
            elif self._ticks % DISK_TICKS == 0 and box.order["disk_mib"] and not box.usage.measuring:
                self._measure_disk(box)

    def _keeper_spoke(self, sandbox: Sandbox) -> None:
        self._loop.ignore(sandbox.channel)
        data, ancillary, _flags, _address = sandbox.channel.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
        if not data or not ancillary:
            # The starter's end says why.
            return
        pid, _uid, _gid = struct.unpack("3i", ancillary[0][2])
        if sandbox.stage is not Stage.CREATING:
            os.kill(pid, signal.SIGKILL)
            return
        order = sandbox.order
        sandbox.space = lease.Space.of(pid)
        sandbox.space.note(sandbox.folder)
        sandbox.place = enter.Place(pid, order["uid"], {int(key): value for key, value in order["limits"].items()})
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
        environment = dict(pair.split("=", 1) for pair in variables.split("\0") if "=" in pair)
        self._children.fork(
            partial(enter.prepare, sandbox.place, order["shared_memory_mib"]),
            partial(self._prepared, sandbox, environment),
        )

    def _prepared(self, sandbox: Sandbox, environment: dict[str, str], answer: Message, _files: list[int]) -> None:
        if sandbox.stage is not Stage.CREATING or sandbox.creating is None:
            return
        request, sandbox.creating = sandbox.creating, None
        if "error" in answer:
            self._close(sandbox, request, {"error": f"its limits could not be set: {answer['error']}"})
        else:
            sandbox.stage = Stage.UP
            request.answer({"environment": environment})

    def _starter_ended(self, sandbox: Sandbox, status: int) -> None:
        sandbox.reaped = True
        if request := sandbox.creating:
            sandbox.creating = None
            log = (sandbox.folder / "log").read_bytes()[-LOG_KEPT:].decode("utf-8", "replace")
            code = os.waitstatus_to_exitcode(status)
            self._close(sandbox, request, {"error": f"the runtime ended with {code}", "log": log.strip()})
        elif sandbox.stage is Stage.UP:
            self._end_early(sandbox)
        else:
            self._step_down(sandbox)

    def _close(self, sandbox: Sandbox, request: Request | None = None, answer: Message | None = None) -> None:
        """Begin to end a sandbox, if need be; ``request`` gets ``answer`` when nothing of it is left."""
        if request:
            sandbox.closing.append((request, answer or {}))
        if sandbox.stage is not Stage.CLOSING:
            sandbox.stage = Stage.CLOSING
            sandbox.closing_since = time.monotonic()
            sandbox.channel.shutdown(socket.SHUT_RDWR)
        self._step_down(sandbox)

    def _end_early(self, sandbox: Sandbox, reason: str = "") -> None:
        """The sandbox ends without having been asked to: who uses it is told."""
        if reason:
            sandbox.tell("limit", reason)
        sandbox.tell("gone")
        self._close(sandbox)

    def _step_down(self, sandbox: Sandbox) -> None:
        if sandbox.deleting:
            return
        step = step_down(
            starter=None if sandbox.reaped else sandbox.starter,
            inside=sandbox.space.members() if sandbox.space else None,
            closing_s=time.monotonic() - sandbox.closing_since,
        )
        for pid in step.kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if step.delete:
            sandbox.deleting = True
            self._loop.drop(sandbox.channel)
            self._children.fork(partial(_delete, sandbox.folder), partial(self._deleted, sandbox))
        elif step.report:
            for request, _answer in sandbox.closing:
                living = list(step.kill)
                request.answer(
                    {"error": f"processes {living} of {sandbox.name} do not die; tried again until they do"}
                )
            sandbox.closing.clear()

    def _deleted(self, sandbox: Sandbox, answer: Message, _files: list[int]) -> None:
        if "error" in answer:
            sandbox.deleting = False
        else:
            sandbox.stage = Stage.GONE
            del self._all[sandbox.name]
        for request, wanted in sandbox.closing:
            request.answer({**answer, **wanted})
        sandbox.closing.clear()

    def _measure_disk(self, sandbox: Sandbox) -> None:
        sandbox.usage.measuring = True

        def measured(answer: Message, _files: list[int]) -> None:
            sandbox.usage.measuring = False
            if answer.get("bytes", 0) > sandbox.order["disk_mib"] << 20 and sandbox.stage is Stage.UP:
                written = answer["bytes"] >> 20
                self._end_early(sandbox, f"disk: wrote {written} MiB of {sandbox.order['disk_mib']} MiB")

        self._children.fork(lambda: ({"bytes": disk_use(sandbox.folder)}, []), measured)


def _delete(folder: Path) -> tuple[Message, list[int]]:
    lease.remove_tree(folder)
    return {}, []
