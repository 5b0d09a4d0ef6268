# SPDX-License-Identifier: Apache-2.0
"""The life of a sandbox, as its supervisor sees it: waiting, creating, up, closing, gone.

- *waiting*: as many others as may are being created.
- *creating*: its first process is being made (:mod:`.creation`); whoever asked waits.
- *up*: its first process has said so, and its limits are set. Only now can it be joined.
- *closing*: somebody asked for its end, or its first process ended, or it ran into a limit. There is no way back.
- *gone*: our child for it is reaped *and* its first process has ended, which the kernel lets happen only after all
  others inside, *and* its control group and its folder are removed. Whoever asked for the end is told now and not
  before; who asked for its creation, too, if it failed.

What to do on the way down is one pure function, :func:`.sandbox.step_down`, asked again whenever a process of it ends,
and twice a second. It takes the same few system calls however many processes the machine has.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.binds import check_image_folder, checked
from nemo_gym_prorl.sandbox.disks import in_memory, kind_under
from nemo_gym_prorl.sandbox.limits import descriptors, usage
from nemo_gym_prorl.sandbox.limits.kernel_shares import TERMINALS
from nemo_gym_prorl.sandbox.limits.report import file_size_reached
from nemo_gym_prorl.sandbox.runtime.command import SHARED_FOLDER
from nemo_gym_prorl.sandbox.supervisor import watch
from nemo_gym_prorl.sandbox.supervisor.creation import Creation
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop, guarded
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.processes.servant import Servant
from nemo_gym_prorl.sandbox.supervisor.rpc.connections import Request
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, close_all
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox, Stage, step_down
from nemo_gym_prorl.sandbox.supervisor.storage import janitor
from nemo_gym_prorl.sandbox.supervisor.storage.volumes import Volumes


TICK_S = 0.5
"""How often unfinished ends are tried again."""

TRIES_A_TICK = 200
"""Of those, at most so many at a time: others wait for the loop meanwhile."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How our child for a sandbox ends if its first process was killed: by the runtime's own word where it is that."""

SOON_S = 5.0
"""A sandbox that dies so soon after it used too much memory died of that."""

NO_MEMORY = "the machine ran out of memory, and the kernel ended a process"

_NAME = re.compile(r"b-[0-9a-f]{12}")


class NoSandbox(Exception):
    """There is no such sandbox, or it is not up."""


class Sandboxes:
    """All sandboxes of one supervisor; each is here from its creation until it is gone."""

    def __init__(self, folder: Path, loop: Loop, children: Children, groups: Path | None, launcher: Launcher) -> None:
        """``groups`` is where control groups are made, if they can be."""
        self._folder = folder
        self._loop = loop
        self._all: dict[str, Sandbox] = {}
        self._closing: dict[str, Sandbox] = {}
        self._inits: dict[int, Sandbox] = {}
        """By the number of their first process, those that close."""
        self._ticking = False
        self._volumes = Volumes(folder)
        self.on_gone: list[Callable[[str], None]] = []
        """Told the name of each sandbox that is gone."""
        self._creation = Creation(
            folder,
            loop,
            children,
            groups,
            launcher,
            held=lambda: (sandbox.mould for sandbox in self._all.values()),
            up=self._is_up,
            failed=self._give_up,
            ended=self._starter_ended,
        )
        self._janitor = Servant(loop, children, janitor.serve, self._deleted, self._deletions)
        self._janitor.start()
        self._watchdog = Servant(loop, children, watch.serve, self._overran, self._watches)
        self._in_memory = in_memory(kind_under(folder))
        self._active: dict[str, list[int]] = {}
        """Those in which something was started that the watchdog has not been told of, and what."""

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

    def check(self, request: Request, name: str, *, memory: bool) -> None:
        """Answered if it is up; one that is about to end has ended. With ``memory``, only if nothing in it was ended
        for want of the machine's memory."""
        sandbox = self.up(name)
        if request.client not in sandbox.clients:
            sandbox.clients.append(request.client)
        if sandbox.space and sandbox.space.ending:
            sandbox.closing.append((request, {"error": f"sandbox {name} has ended", "lost": True}))
        elif memory and self._lacked_memory(sandbox):
            request.answer({"error": f"sandbox {name}: {NO_MEMORY}", "lost": True})
        else:
            request.answer({})

    @staticmethod
    def _lacked_memory(sandbox: Sandbox) -> bool:
        """Whether the kernel may have ended something in it though it kept within its own limit."""
        group = sandbox.group
        if group and "memory" in group.controllers:
            return bool(group.oom_kills()) and not group.full_of_memory()
        return usage.oom_kills() > sandbox.machine_kills and not sandbox.over_memory

    def create(self, request: Request, order: Message, files: list[int]) -> None:
        """Start one; answered with the variables of its image when it is up. ``files`` stay open until it is gone:
        the lock on its image."""
        if not _NAME.fullmatch(order["sandbox"]) or order["sandbox"] in self._all:
            raise ValueError(f"no name for a sandbox: {order['sandbox']}")
        if trouble := descriptors.shortage(len(self._all)):
            request.answer({"error": trouble, "quota": True})
            return
        folder = self._folder / order["sandbox"]
        try:
            check_image_folder(order["image"], self._folder.parent)
            binds = checked(order["binds"], self._folder.parent, Path(order["image"]), order["volumes"])
            order["volumes"] = self._volumes.take(order["sandbox"], order["volumes"])
        except CallerError as error:
            request.answer({"error": error.complaint, "field": error.field})
            return
        order["binds"] = [f"{folder / 'shared'}:{SHARED_FOLDER}", *binds]
        sandbox = Sandbox(order["sandbox"], folder, order, [request.client], request)
        self._all[sandbox.name] = sandbox
        sandbox.held.extend(os.dup(file) for file in files)
        self._creation.begin(sandbox)

    def _is_up(self, sandbox: Sandbox, environment: dict[str, str]) -> None:
        sandbox.stage = Stage.UP
        sandbox.machine_kills = usage.oom_kills()
        request, sandbox.creating = sandbox.creating, None
        if ttl_s := sandbox.order["ttl_s"]:
            self._loop.call_in(ttl_s, partial(self.end_early, sandbox, f"time to live: {ttl_s:g} s"))
        if request:
            request.answer(
                {
                    "environment": environment,
                    "controllers": sorted(sandbox.group.controllers) if sandbox.group else [],
                    "start": sandbox.way,
                    "fallback": sandbox.fallback,
                    "in_memory": self._in_memory,
                }
            )
        if order := watch.order(sandbox, in_memory=self._in_memory):
            self._watchdog.tell({"watch": order})

    def _watches(self) -> list[Message]:
        """Whom the watchdog has to watch."""
        up = (box for box in self._all.values() if box.stage is Stage.UP)
        return [{"watch": order} for box in up if (order := watch.order(box, in_memory=self._in_memory))]

    def process_started(self, name: str, pid: int) -> None:
        """Something was started in a sandbox; the watchdog is told of all such once in a while."""
        if not self._active:
            self._loop.call_in(TICK_S, self._tell_active)
        self._active.setdefault(name, []).append(pid)

    def _tell_active(self) -> None:
        active, self._active = self._active, {}
        if any(box.stage is Stage.UP for name in active if (box := self._all.get(name))):
            self._watchdog.tell({"active": active})

    def _overran(self, message: Message) -> None:
        """The watchdog found that a sandbox uses too much."""
        sandbox = self._all.get(message["sandbox"])
        if sandbox and sandbox.stage is Stage.UP:
            if message["ended"]:
                self.end_early(sandbox, message["reason"], message["resource"])
            elif message["resource"] != "memory":
                sandbox.note(message["reason"], message["resource"])
            else:
                self._over_memory(sandbox, message["reason"])

    def _over_memory(self, sandbox: Sandbox, reason: str) -> None:
        sandbox.over_memory, sandbox.over_memory_at = reason, self._loop.now()
        sandbox.tell("limit", reason, "memory")

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

    def orphans_ended(self, pids: list[int]) -> None:
        """Strangers were reaped: one may have been the first process of a sandbox that closes."""
        for pid in pids:
            if sandbox := self._inits.get(pid):
                self._step_down(sandbox)

    def process_ended(self, name: str, status: int) -> None:
        """Something that ran in it has ended: if it was the kernel's doing, who uses the sandbox is told first."""
        sandbox = self._all.get(name)
        if sandbox is None or sandbox.stage is not Stage.UP:
            return
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            self._look_at_kills(sandbox)
        elif code in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ) and sandbox.order["disk_mib"]:
            # By its own word where it is a shell's.
            sandbox.note(file_size_reached(sandbox.order["disk_mib"]), "file size")

    def start_refused(self, name: str, resource: str) -> None:
        """Nothing more could be started in it."""
        if sandbox := self._all.get(name):
            most = sandbox.order["processes"] if resource == "processes" else TERMINALS
            sandbox.note(f"{resource}: all of {most} in use", resource)

    def _look_at_kills(self, sandbox: Sandbox) -> None:
        if sandbox.group and "memory" in sandbox.group.controllers:
            kills = sandbox.group.oom_kills()
            if kills > sandbox.oom_kills:
                sandbox.oom_kills = kills
                if sandbox.group.full_of_memory():
                    allowed = sandbox.order["memory_mib"]
                    self._over_memory(sandbox, f"memory: all of {allowed} MiB used, the kernel ended a process")
                else:
                    sandbox.tell("limit", NO_MEMORY)

    def _starter_ended(self, sandbox: Sandbox, status: int | None) -> None:
        if sandbox.stage is Stage.UP:
            self._look_at_kills(sandbox)
            # Nothing inside can kill its first process, but by want of memory.
            killed = status is None or os.waitstatus_to_exitcode(status) in KILLED
            if killed and sandbox.over_memory and self._loop.now() - sandbox.over_memory_at < SOON_S:
                self.end_early(sandbox, sandbox.over_memory, "memory")
            else:
                self.end_early(sandbox, inside=not killed)
        else:
            self._step_down(sandbox)

    def end_early(self, sandbox: Sandbox, reason: str = "", resource: str = "", *, inside: bool = False) -> None:
        """One that is up ends without having been asked to: who uses it is told, and whether from ``inside``."""
        if sandbox.stage is not Stage.UP:
            return
        if reason:
            sandbox.tell("limit", reason, resource)
        sandbox.tell("gone", reason, resource, inside=inside)
        self._close(sandbox)

    def _close(self, sandbox: Sandbox, request: Request | None = None, answer: Message | None = None) -> None:
        """Begin to end a sandbox, if need be; ``request`` gets ``answer`` when nothing of it is left."""
        if request:
            sandbox.closing.append((request, answer or {}))
        if sandbox.stage is not Stage.CLOSING:
            sandbox.stage = Stage.CLOSING
            sandbox.closing_since = self._loop.now()
            self._closing[sandbox.name] = sandbox
            # First, since whatever fails from here on is tried again then.
            if not self._ticking:
                self._ticking = True
                self._loop.call_in(TICK_S, self._tick)
            guarded(partial(self._take_leave, sandbox))
            self._creation.leave(sandbox)
        self._step_down(sandbox)

    def _take_leave(self, sandbox: Sandbox) -> None:
        if sandbox.channel:
            # A first process that we have not heard of yet ends by that.
            sandbox.channel.shutdown(socket.SHUT_RDWR)
        self._creation.look_for_first(sandbox)
        if sandbox.space:
            self._inits[sandbox.space.init] = sandbox
            self._watchdog.tell({"forget": sandbox.name})

    def _tick(self) -> None:
        """Try again to finish those that are to end, each in its turn."""
        self._ticking = bool(self._closing)
        if self._closing:
            self._loop.call_in(TICK_S, self._tick)
        for name in list(self._closing)[:TRIES_A_TICK]:
            sandbox = self._closing.pop(name)
            self._closing[name] = sandbox
            guarded(partial(self._step_down, sandbox))

    def _step_down(self, sandbox: Sandbox) -> None:
        if sandbox.deleting or sandbox.stage is not Stage.CLOSING:
            return
        group, space = sandbox.group, sandbox.space
        if group:
            group.kill()
        step = step_down(
            starter=sandbox.casting or sandbox.starter is not None,
            init=space.alive if space else None,
            closing_s=self._loop.now() - sandbox.closing_since,
        )
        if step.kill_init and space:
            space.kill()
        if step.kill_starter and sandbox.starter is not None:
            os.kill(sandbox.starter, signal.SIGKILL)
        if step.delete:
            self._volumes.release(sandbox.name, sandbox.folder)
            sandbox.deleting = True
            if sandbox.channel:
                self._loop.drop(sandbox.channel)
            self._janitor.tell(janitor.order(sandbox.name, sandbox.folder, group))
        elif step.report and sandbox.closing:
            living = sorted({*(space.members() if space else ()), *(group.processes() if group else ())})
            self._answer_closing(
                sandbox, {"error": f"processes {living} of {sandbox.name} do not die; tried again until they do"}
            )

    def _deletions(self) -> list[Message]:
        """What the janitor has to do."""
        return [janitor.order(box.name, box.folder, box.group) for box in self._closing.values() if box.deleting]

    def _deleted(self, answer: Message) -> None:
        sandbox = self._closing.get(answer.pop("sandbox"))
        if sandbox is None:
            return
        if "error" in answer:
            # Tried again with the next tick.
            sandbox.deleting = False
        else:
            sandbox.stage = Stage.GONE
            close_all(sandbox.held)
            del self._all[sandbox.name]
            del self._closing[sandbox.name]
            if sandbox.space:
                self._inits.pop(sandbox.space.init, None)
            for told in self.on_gone:
                guarded(partial(told, sandbox.name))
        self._answer_closing(sandbox, answer)

    def _answer_closing(self, sandbox: Sandbox, answer: Message) -> None:
        for request, wanted in sandbox.closing:
            request.answer({**answer, **wanted})
        sandbox.closing.clear()
