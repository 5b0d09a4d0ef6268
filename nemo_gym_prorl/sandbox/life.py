# SPDX-License-Identifier: Apache-2.0
"""The life of a sandbox, as its supervisor sees it: creating, up, closing, gone.

- *creating*: the runtime was started; whoever asked waits.
- *up*: its PID 1, a plain ``sh`` that only waits, has said so on its socket, where the kernel tells the number of the
  process that spoke, and its limits are set. Only now can it be joined.
- *closing*: somebody asked for its end, or its starter ended, or it ran into a limit. There is no way back.
- *gone*: the starter is reaped *and* no process is in its PID namespace or control group *and* its folder and group
  are removed. Whoever asked for the end is told now and not before; who asked for its creation, too, if it failed.

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

from nemo_gym_prorl.sandbox import cgroup, enter, lease
from nemo_gym_prorl.sandbox.children import Children, in_words
from nemo_gym_prorl.sandbox.clients import Client, Request, close_all
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
        kill: processes to send SIGKILL; all of the control group besides, where there is one.
        delete: nothing of it lives: its files can go.
        report: it takes too long: those who wait are told.
    """

    kill: tuple[int, ...] = ()
    delete: bool = False
    report: bool = False


def step_down(
    *, starter: int | None, inside: Sequence[int] | None, grouped: Sequence[int] = (), closing_s: float
) -> Step:
    """The next step towards a sandbox's end.

    Args:
        starter: the runtime's process outside of the container; ``None`` once it is reaped, or if there was none.
        inside: the live processes of the container; ``None`` if it never got as far as having any.
        grouped: the live processes of its control group, which are all of its own; empty without one.
        closing_s: for how long it has been closing.
    """
    late = closing_s > STUCK_S
    victims = list(dict.fromkeys([*(inside or ()), *grouped]))
    # Without a group the starter ends its helpers once the inside is dead, so it is left alone unless that takes long.
    if starter is not None and starter not in victims and (inside is None or late):
        victims.append(starter)
    if starter is None and not victims:
        return Step(delete=True)
    return Step(kill=tuple(victims), report=late)


@dataclass(slots=True)
class Sandbox:
    """One container. ``place`` and ``space`` are known once its first process has spoken; ``starter`` is the runtime's
    process outside of it as long as there is one."""

    name: str
    folder: Path
    channel: socket.socket
    order: Message
    clients: list[Client]
    creating: Request | None
    starter: int | None = None
    group: cgroup.Group | None = None
    oom_kills: int = 0
    stage: Stage = Stage.CREATING
    place: enter.Place | None = None
    space: lease.Space | None = None
    closing_since: float = 0.0
    closing: list[tuple[Request, Message]] = field(default_factory=list)
    deleting: bool = False
    paused: bool = False
    held: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    born: float = field(default_factory=time.monotonic)

    def place_to_join(self) -> enter.Place:
        """Where to join it, when it is up.

        Raises:
            OSError: it is paused.
        """
        if self.paused:
            raise OSError("the sandbox is paused; resume it first")
        assert self.place
        return self.place

    def tell(self, event: str, reason: str = "") -> None:
        """Have everybody who uses the sandbox know."""
        for client in self.clients:
            if not client.gone:
                client.send({"event": event, "sandbox": self.name, "reason": reason}, [])


class Sandboxes:
    """All sandboxes of one supervisor; each is here from its creation until it is gone."""

    def __init__(self, folder: Path, loop: Loop, children: Children, groups: Path | None) -> None:
        """``groups`` is where control groups are made, if they can be."""
        self._folder = folder
        self._groups = groups
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

    def create(self, request: Request, order: Message, files: list[int]) -> None:
        """Start one; answered with its first process's environment when it is up. ``files`` stay open until it is
        gone: the lock on its image."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # Makes the kernel say which process writes.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        folder = self._folder / order["sandbox"]
        folder.mkdir(mode=0o700)
        sandbox = Sandbox(order["sandbox"], folder, ours, order, [request.client], request)
        sandbox.held.extend(os.dup(file) for file in files)
        self._all[sandbox.name] = sandbox
        self._loop.watch(ours, partial(self._keeper_spoke, sandbox))
        try:
            self._lay_out(sandbox)
            self._start(sandbox, theirs)
        except OSError as error:
            self._give_up(sandbox, {"error": f"it can't be prepared: {in_words(error)}"})
        finally:
            theirs.close()

    def _lay_out(self, sandbox: Sandbox) -> None:
        """Make what is on disk of it, and its control group."""
        order = sandbox.order
        overlay = Path(order["overlay"])
        for path in (sandbox.folder, overlay, overlay / "upper", overlay / "work", Path(order["shared"])):
            path.mkdir(mode=0o700, exist_ok=path == sandbox.folder)
            os.chown(path, order["host_uid"], order["host_gid"])
        (overlay / "upper").chmod(0o755)
        sandbox.usage.memory_limit = order["memory_mib"] << 20
        if self._groups:
            path = self._groups / cgroup.name_of(sandbox.folder)
            lease.note_group(sandbox.folder, path)
            sandbox.group = cgroup.Group.make(path)
            if "memory" in sandbox.group.controllers:
                sandbox.usage.memory_limit = 0

    def _start(self, sandbox: Sandbox, channel: socket.socket) -> None:
        log = os.open(sandbox.folder / "log", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            starter = sandbox.group.fork() if sandbox.group else os.fork()
            if starter == 0:
                become_runtime(sandbox.order, sandbox.folder, channel, log)
        finally:
            os.close(log)
        sandbox.starter = starter
        self._children.on_end(starter, partial(self._starter_ended, sandbox))
        lease.note_starter(sandbox.folder, starter)

    def _give_up(self, sandbox: Sandbox, answer: Message) -> None:
        """End one that did not come up; whoever asked for it gets ``answer`` when nothing of it is left."""
        request, sandbox.creating = sandbox.creating, None
        self._close(sandbox, request, answer)

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
        self.step_down_all()
        watched = {box.space.number: box for box in self._all.values() if box.space and box.stage is Stage.UP}
        for space, victim, reason in excess({space: box.usage for space, box in watched.items()}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            watched[space].tell("limit", reason)
        for box in watched.values():
            self._look_at_kills(box)
            if box.order["ttl_s"] and time.monotonic() - box.born > box.order["ttl_s"]:
                self._end_early(box, f"time to live: {box.order['ttl_s']:g} s")
            elif self._ticks % DISK_TICKS == 0 and box.order["disk_mib"] and not box.usage.measuring:
                self._measure_disk(box)

    def step_down_all(self) -> None:
        """Try again to finish all that are to end."""
        for sandbox in list(self._all.values()):
            if sandbox.stage is Stage.CLOSING:
                self._step_down(sandbox)

    def process_ended(self, name: str) -> None:
        """Something that ran in it has ended: if it was the kernel's doing, who uses the sandbox is told first."""
        if (sandbox := self._all.get(name)) and sandbox.stage is Stage.UP:
            self._look_at_kills(sandbox)

    def _look_at_kills(self, sandbox: Sandbox) -> None:
        if sandbox.group and "memory" in sandbox.group.controllers:
            kills = sandbox.group.oom_kills()
            if kills > sandbox.oom_kills:
                sandbox.oom_kills = kills
                sandbox.tell(
                    "limit", f"memory: all of {sandbox.order['memory_mib']} MiB used, the kernel ended a process"
                )

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
        limits = {int(key): value for key, value in order["limits"].items()}
        sandbox.place = enter.Place(pid, order["uid"], limits)
        try:
            sandbox.space = lease.Space.of(pid)
            sandbox.space.note(sandbox.folder)
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
        except OSError as error:
            self._give_up(sandbox, {"error": f"it can't be noted down: {in_words(error)}"})
            return
        environment = dict(pair.split("=", 1) for pair in variables.split("\0") if "=" in pair)
        self._children.fork(
            partial(enter.prepare, sandbox.place, order["shared_memory_mib"]),
            partial(self._prepared, sandbox, environment),
        )

    def _prepared(self, sandbox: Sandbox, environment: dict[str, str], answer: Message, _files: list[int]) -> None:
        if sandbox.stage is not Stage.CREATING or sandbox.creating is None:
            return
        if trouble := answer.get("error") or _bound(sandbox):
            self._give_up(sandbox, {"error": f"its limits could not be set: {trouble}"})
            return
        sandbox.stage = Stage.UP
        request, sandbox.creating = sandbox.creating, None
        controllers = sorted(sandbox.group.controllers) if sandbox.group else []
        request.answer({"environment": environment, "controllers": controllers})

    def _starter_ended(self, sandbox: Sandbox, status: int) -> None:
        sandbox.starter = None
        if sandbox.creating:
            log = (sandbox.folder / "log").read_bytes()[-LOG_KEPT:].decode("utf-8", "replace")
            code = os.waitstatus_to_exitcode(status)
            self._give_up(sandbox, {"error": f"the runtime ended with {code}", "log": log.strip()})
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
        group = sandbox.group
        if group:
            group.kill()
        step = step_down(
            starter=sandbox.starter,
            inside=sandbox.space.members() if sandbox.space else None,
            grouped=group.processes() if group else (),
            closing_s=time.monotonic() - sandbox.closing_since,
        )
        for pid in step.kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if step.delete:
            sandbox.deleting = True
            self._loop.drop(sandbox.channel)
            self._children.fork(partial(_delete, sandbox.folder, group), partial(self._deleted, sandbox))
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
            close_all(sandbox.held)
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


def _bound(sandbox: Sandbox) -> str:
    """Set the limits of its control group, if it has one; returns what went wrong."""
    order = sandbox.order
    try:
        if sandbox.group:
            sandbox.group.bound(memory=order["memory_mib"] << 20, processes=order["processes"], cpus=order["cpus"])
    except OSError as error:
        return in_words(error)
    return ""


def _delete(folder: Path, group: cgroup.Group | None) -> tuple[Message, list[int]]:
    if group:
        group.remove()
    lease.remove_tree(folder)
    return {}, []
