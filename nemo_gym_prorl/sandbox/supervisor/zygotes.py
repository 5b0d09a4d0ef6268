# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The zygotes of a supervisor: one per prepared image in whose sandboxes kernels are started, a few at most.

The first kernel of an image is started as any program, and its zygote begins to import meanwhile: nobody waits for it.
Each is in a control group, noted down as those of sandboxes are: whatever it has forked ends with it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_gym_prorl.background import spawn_task
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.zygote import zygote
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.supervisor.processes.children import Child, Children
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.programs import Joiner
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Refused
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import ready
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, socket_pair
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


MOST = 4
"""Each takes some 40 MiB; the one that was not used for longest goes first."""


@dataclass(slots=True)
class _Zygote:
    prepared: PreparedImage
    folder: Path
    group: cgroups.Group
    process: Child | None = None
    channel: socket.socket | None = None
    """Where it takes requests, when it is ready to."""


class Zygotes:
    """See the module. ``folder`` is the owner's, ``groups`` where control groups are made, if they can be."""

    def __init__(self, folder: Path, children: Children, launcher: Launcher, groups: Path | None) -> None:
        self._folder = folder
        self._groups = groups
        self._children = children
        self._launcher = launcher
        self._all: dict[int, _Zygote] = {}
        """By the identity of the prepared image. The last in order was used last."""

    def joiner(self, sandbox: Sandbox, order: Message) -> Joiner | None:
        """What starts that program from a zygote, in place of the launcher; ``None`` if none is there."""
        prepared, groups = sandbox.prepared, self._groups
        if prepared is None or groups is None or not is_machine_root() or order["tty"] or order["user"] is not None:
            return None
        if not zygote.stands_for(order["argv"]) or _python_of(order["env"]) != _python_of(prepared.environment):
            return None
        found = self._all.pop(id(prepared), None) or self._start(prepared, groups)
        if found.process:
            self._all[id(prepared)] = found
        if found.channel is None:
            return None
        asked, place = found.channel.fileno(), sandbox.place_to_join()

        def join(files: list[int]) -> tuple[Child, socket.socket]:
            ours, theirs = socket_pair()
            with theirs:
                program = partial(zygote.spawn, asked, sandbox.group, place, order, files, theirs)
                given = [*files, theirs.fileno(), asked, place.process.number]
                return self._children.fork(program, given, sandbox.group), ours

        return join

    def _start(self, prepared: PreparedImage, groups: Path) -> _Zygote:
        folder = self._folder / f"z-{secrets.token_hex(6)}"
        started = _Zygote(prepared, folder, cgroups.Group(groups / cgroups.name_of(folder), frozenset()))
        living = [other for other in self._all.values() if other.process and other.process.alive]
        for other in living[: len(living) + 1 - MOST]:
            self._end(other)
        spawn_task(self._live(started), expected=Refused)
        return started

    async def _live(self, which: _Zygote) -> None:
        """From its beginning to its end. It is not started again: an image whose Python ends once ends again."""
        try:
            which.folder.mkdir(mode=0o700)
            state_dir.note_group(which.folder, which.group.path)
            which.group = cgroups.Group.make(which.group.path)
            which.group.bound(memory=zygote.MEMORY_MIB << 20, processes=zygote.PROCESSES, cpus=0)
            ours, theirs = socket_pair()
            with ours:
                with theirs:
                    program = partial(zygote.become, which.prepared, theirs)
                    files = [which.prepared.image, which.prepared.parent_namespace, theirs.fileno()]
                    which.process = self._children.fork(program, files, which.group)
                await ready(ours, unless=which.process.wait())
                which.channel = ours if ours.recv(16) == b"ready" else None
                await which.process.wait()
        except (OSError, Refused):
            # Kernels are started as any program then.
            pass
        finally:
            which.channel = None
            which.group.kill()
            # What can't be removed is left to the end of the supervisor's own folder.
            await self._launcher.run(requests.erase(which.folder, which.group.path))

    def _end(self, which: _Zygote) -> None:
        which.channel = None
        if which.process:
            which.process.kill()
        self._all = {key: other for key, other in self._all.items() if other is not which}


def _python_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide which Python runs, and what it imports."""
    return {
        name: value
        for name, value in environment.items()
        if name == "PATH" or name.startswith(("PYTHON", "LD_", "VIRTUAL_ENV"))
    }
