# SPDX-License-Identifier: Apache-2.0
"""Programs on their way into a sandbox, and in it: each can be killed at any stage, by the name that its asker chose.

A *joiner* that the launcher forks enters the sandbox's namespaces, starts one process there as our own child, says
which one it is, lets it begin, and ends. That process executes the program. Whatever is inside may stop it before
(``kill -STOP -1``), for ever: nobody waits for it but who asked. The channel tells what became of it: a complaint, or
nothing when the program was executed and the channel so closed.

So a kill is effective whenever it comes: the joiner is ended, and what it started, known or not, begins nothing
without its joiner's word.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from nemo_gym_prorl.sandbox.isolation.joining import Place
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.launcher.requests import Request
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.processes.children import EXHAUSTED, KILLED, Children, Done, no_process
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import TRIES, Launcher
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, close_all, socket_pair


@dataclass(slots=True, eq=False)
class Spawn:
    """One program.

    ``joiner`` and ``process`` are the numbers of unreaped children of ours, ``request`` and the files ``given`` are
    for the launcher if the joiner is not of its making.
    """

    name: str
    place: Place
    channel: socket.socket | None
    started: Done
    ended: Callable[[int], None]
    group: Group | None
    request: Request | None = None
    given: list[int] = field(default_factory=list)
    tries: int = TRIES
    joiner: int | None = None
    which: int = 0
    process: int | None = None
    doomed: bool = False
    answer: Message = field(default_factory=dict)
    files: list[int] = field(default_factory=list)
    status: int | None = None


class Spawns:
    """All programs that run, or are to run, in the sandboxes of a supervisor."""

    def __init__(self, loop: Loop, children: Children, launcher: Launcher) -> None:
        self._loop = loop
        self._children = children
        self._launcher = launcher
        self._all: dict[str, Spawn] = {}

    def start(
        self,
        name: str,
        place: Place,
        order: Message,
        files: list[int],
        group: Group | None,
        started: Done,
        ended: Callable[[int], None],
        joiner: Callable[..., NoReturn] | None = None,
    ) -> None:
        """Start a program.

        Args:
            name: by which it can be signalled.
            place: where.
            order: as for :func:`.requests.spawn`.
            files: its open files; the caller's.
            group: the control group it is to be in.
            started: told once that it runs (``pid``), with its terminal if it has one, or why not (``error``).
            ended: told its status, after ``started``, if it ran.
            joiner: what else may enter the sandbox and start it there, forked; if it says that nothing was done, the
                launcher has its turn.
        """
        if name in self._all:
            raise OSError(f"there is a program {name} already")
        spawn = Spawn(name, place, None, started, ended, group)
        try:
            spawn.request = requests.spawn(place, order)
            if joiner:
                spawn.given = [os.dup(file) for file in files]
                self._by_fork(spawn, partial(joiner, place, order), files)
            else:
                self._launch(spawn, files)
        except OSError as error:
            close_all(spawn.given)
            started(no_process(error, group), [])
            return
        self._all[name] = spawn

    def _by_fork(self, spawn: Spawn, joiner: Callable[..., NoReturn], files: list[int]) -> None:
        ours, theirs = socket_pair()
        with theirs:
            try:
                spawn.joiner, spawn.which = self._children.start(
                    partial(joiner, files, theirs), partial(self._joiner_ended, spawn, ours), spawn.group
                )
            except OSError:
                ours.close()
                raise
        self._listen(spawn, ours)

    def _launch(self, spawn: Spawn, files: list[int]) -> None:
        assert spawn.request
        ours, theirs = socket_pair()
        with theirs:
            # Of both ends only this one is waited on.
            theirs.setblocking(True)
            try:
                spawn.which = self._launcher.start(
                    spawn.request,
                    [theirs.fileno(), *files],
                    spawn.group,
                    begun=partial(self._begun, spawn, ours),
                    ended=partial(self._joiner_ended, spawn, ours),
                    failed=partial(self._failed, spawn, ours),
                    lost=partial(self._lost, spawn, ours),
                )
            except OSError:
                ours.close()
                raise
        self._listen(spawn, ours)

    def _listen(self, spawn: Spawn, channel: socket.socket) -> None:
        spawn.channel = channel
        self._loop.watch(channel, partial(self._heard, spawn))

    def _begun(self, spawn: Spawn, channel: socket.socket, joiner: int) -> None:
        """The launcher has started what joins, which goes on if it is wanted still, and ends otherwise."""
        if spawn.channel is channel:
            spawn.joiner = joiner
            with contextlib.suppress(ConnectionError):
                # It may have failed already, and says why.
                channel.send(requests.GO)

    def _failed(self, spawn: Spawn, channel: socket.socket, error: OSError) -> None:
        if spawn.channel is channel:
            self._settle(spawn, no_process(error, spawn.group))

    def _lost(self, spawn: Spawn, channel: socket.socket, files: list[int]) -> None:
        """The launcher has been killed. What it may have started gets no word, and begins nothing."""
        if spawn.channel is not channel:
            return
        spawn.tries -= 1
        if spawn.tries:
            self._again(spawn, files[1:])
        else:
            self._settle(spawn, KILLED)

    def _again(self, spawn: Spawn, files: list[int]) -> None:
        """Nothing of it has begun: have it launched, once more or after all."""
        assert spawn.channel
        self._loop.drop(spawn.channel)
        spawn.channel = None
        try:
            self._launch(spawn, files)
        except OSError as error:
            del self._all[spawn.name]
            spawn.started(no_process(error, spawn.group), [])

    def signal(self, name: str, number: int) -> None:
        """Signal a program and its process group; nothing happens if it has ended. SIGKILL works before it runs."""
        spawn = self._all.get(name)
        if spawn is None:
            return
        if number == signal.SIGKILL:
            spawn.doomed = True
            if spawn.joiner is not None:
                os.kill(spawn.joiner, signal.SIGKILL)
                # It may have said what it started; what it has not said does not begin.
                return
            self._strike(spawn)
        elif spawn.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(spawn.process, number)

    def _strike(self, spawn: Spawn) -> None:
        """Kill what was started. Not reaped, so the number is its own; as long as it is in our session, it has no
        group."""
        if spawn.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(spawn.process, signal.SIGKILL)
            os.kill(spawn.process, signal.SIGKILL)
        elif spawn.channel is not None and spawn.status is None:
            # Nothing will ever run, though it may lie there stopped until its sandbox ends.
            self._settle(spawn, KILLED)

    def _joiner_ended(self, spawn: Spawn, channel: socket.socket, _status: int) -> None:
        if spawn.channel not in (channel, None):
            # Another has its place.
            return
        spawn.joiner = None
        while spawn.channel is not None and spawn.process is None:
            if not self._take(spawn):
                break
        if spawn.doomed:
            self._strike(spawn)

    def _heard(self, spawn: Spawn) -> None:
        self._take(spawn)

    def _take(self, spawn: Spawn) -> bool:
        """Take one message off the channel; whether there was any."""
        assert spawn.channel is not None
        try:
            message, files = requests.receive(spawn.channel)
        except BlockingIOError:
            return False
        except PeerGone:
            self._settle(spawn, spawn.answer or KILLED)
            return False
        if "pid" in message:
            spawn.answer, spawn.files = message, files
            spawn.process = message["pid"]
            self._children.adopt(message["pid"], partial(self._ended, spawn), spawn.which)
        elif "error" in message or spawn.doomed:
            close_all(files)
            self._settle(spawn, message)
        else:
            self._again(spawn, spawn.given)
            close_all(spawn.given)
        return True

    def _settle(self, spawn: Spawn, answer: Message) -> None:
        """It runs, or never will."""
        assert spawn.channel is not None
        self._loop.drop(spawn.channel)
        spawn.channel = None
        close_all(spawn.given)
        if spawn.doomed:
            # Whether it had begun or not, nobody is to take it for running.
            answer = KILLED
        if "error" in answer:
            close_all(spawn.files)
            if answer.get("errno") == errno.EAGAIN and _is_full(spawn):
                answer = EXHAUSTED
            self._all.pop(spawn.name, None)
            spawn.started(answer, [])
            return
        spawn.started(answer, spawn.files)
        if spawn.status is not None:
            self._finish(spawn)

    def _ended(self, spawn: Spawn, status: int) -> None:
        spawn.process = None
        spawn.status = status
        if spawn.channel is None:
            self._finish(spawn)

    def _finish(self, spawn: Spawn) -> None:
        # One that never ran has been forgotten, and only had to be reaped.
        if self._all.pop(spawn.name, None) and spawn.status is not None:
            spawn.ended(spawn.status)


def _is_full(spawn: Spawn) -> bool:
    """Whether its sandbox has as many processes as it may; of all users together, where there are several."""
    if spawn.group and spawn.group.full():
        return True
    with contextlib.suppress(FileNotFoundError):
        space = os.stat(f"/proc/{spawn.place.pid}/ns/pid").st_ino
        # With one left no command could be started that starts another.
        return usage.threads_in(space) >= spawn.place.limits[resource.RLIMIT_NPROC] - 1
    return False
