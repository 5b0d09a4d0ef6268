# SPDX-License-Identifier: Apache-2.0
"""The zygotes of a supervisor: one per mould in whose sandboxes kernels are started, a few at most.

The first kernel of a mould is started as any program, and its zygote begins to import meanwhile: nobody waits for it.
Each is in a control group, noted down as those of sandboxes are: whatever it has forked ends with it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from nemo_gym_prorl.sandbox.isolation.mould import zygote
from nemo_gym_prorl.sandbox.isolation.mould.cast import Mould
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, socket_pair
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.sandbox.supervisor.storage.erase import remove_tree


MOST = 4
"""Each takes some 40 MiB; the one that was not used for longest goes first."""

Joiner = Callable[..., NoReturn]


@dataclass(slots=True)
class _Zygote:
    mould: Mould
    folder: Path
    group: cgroups.Group
    pid: int | None = None
    channel: socket.socket | None = None
    ready: bool = False


class Zygotes:
    """See the module. ``folder`` is the owner's, ``groups`` where control groups are made, if they can be."""

    def __init__(self, folder: Path, loop: Loop, children: Children, groups: Path | None) -> None:
        self._folder = folder
        self._groups = groups
        self._loop = loop
        self._children = children
        self._all: dict[int, _Zygote] = {}
        """By the identity of the mould. The last in order was used last."""

    def joiner(self, sandbox: Sandbox, order: Message) -> Joiner | None:
        """What starts that program from a zygote, in place of the launcher; ``None`` if none is there."""
        mould = sandbox.mould
        if mould is None or os.geteuid() != 0 or order["tty"] or order["user"] is not None:
            return None
        if self._groups is None:
            return None
        if not zygote.stands_for(order["argv"]):
            return None
        if _python_of(order["env"]) != _python_of(mould.environment):
            return None
        try:
            found = self._all.pop(id(mould)) if id(mould) in self._all else self._start(mould, self._groups)
        except OSError:
            return None
        self._all[id(mould)] = found
        if not found.ready or found.channel is None:
            return None
        return partial(zygote.spawn, found.channel.fileno(), sandbox.group)

    def _start(self, mould: Mould, groups: Path) -> _Zygote:
        folder = self._folder / f"z-{secrets.token_hex(6)}"
        started = _Zygote(mould, folder, cgroups.Group(groups / cgroups.name_of(folder), frozenset()))
        try:
            self._begin(started)
        except OSError:
            _remove(folder, started.group)
            raise
        living = [other for other in self._all.values() if other.pid is not None]
        for other in living[: len(living) + 1 - MOST]:
            self._end(other)
        return started

    def _begin(self, which: _Zygote) -> None:
        which.folder.mkdir(mode=0o700)
        state_dir.note_group(which.folder, which.group.path)
        which.group = cgroups.Group.make(which.group.path)
        which.group.bound(memory=zygote.MEMORY_MIB << 20, processes=zygote.PROCESSES, cpus=0)
        ours, theirs = socket_pair()
        with theirs:
            try:
                program = partial(zygote.become, which.mould, theirs)
                which.pid, _which = self._children.start(program, partial(self._ended, which), which.group)
            except OSError:
                ours.close()
                raise
        which.channel = ours
        self._loop.watch(ours, partial(self._heard, which))

    def _heard(self, which: _Zygote) -> None:
        assert which.channel
        self._loop.ignore(which.channel)
        which.ready = which.channel.recv(16) == b"ready"

    def _end(self, which: _Zygote) -> None:
        which.ready = False
        if which.pid is not None:
            os.kill(which.pid, signal.SIGKILL)
        self._all = {key: other for key, other in self._all.items() if other is not which}

    def _ended(self, which: _Zygote, _status: int) -> None:
        """Not started again: an image whose Python ends once ends again."""
        which.pid = None
        which.ready = False
        which.group.kill()
        self._children.fork(partial(_remove, which.folder, which.group), lambda _answer, _files: None, files=())
        if which.channel:
            self._loop.drop(which.channel)
            which.channel = None


def _remove(folder: Path, group: cgroups.Group) -> tuple[Message, list[int]]:
    """What can't be removed is left to the end of the supervisor's own folder."""
    group.remove()
    remove_tree(folder)
    return {}, []


def _python_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide which Python runs, and what it imports."""
    return {
        name: value
        for name, value in environment.items()
        if name == "PATH" or name.startswith(("PYTHON", "LD_", "VIRTUAL_ENV"))
    }
