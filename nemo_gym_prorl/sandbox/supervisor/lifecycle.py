# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
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

import asyncio
import contextlib
import errno
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_gym_prorl.background import PROCESS_LOOPS, log_exceptions, spawn_task
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.filesystems import filesystem_type, is_in_memory
from nemo_gym_prorl.sandbox.binds import check_image_folder, checked
from nemo_gym_prorl.sandbox.isolation.mounts import MAX_TERMINALS
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import rlimits, usage
from nemo_gym_prorl.sandbox.limits.rlimits import file_size_violation
from nemo_gym_prorl.sandbox.supervisor import limit_watch, state_dir
from nemo_gym_prorl.sandbox.supervisor.connection import Message, close_all, drop
from nemo_gym_prorl.sandbox.supervisor.creation import Creation, StartLimiter, look_for_first
from nemo_gym_prorl.sandbox.supervisor.errors import Refused, failure, in_words
from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest, StartReply
from nemo_gym_prorl.sandbox.supervisor.processes import Answer, Children, Launcher
from nemo_gym_prorl.sandbox.supervisor.sandbox import STUCK_S, Client, NoSandbox, Sandbox, Stage, step_down


TICK_S = 0.5
"""How often unfinished ends are tried again."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How our child for a sandbox ends if its first process was killed: by the runtime's own word where it is that."""

SOON_S = 5.0
"""A sandbox that dies so soon after it used too much memory died of that."""

NO_MEMORY = "the machine ran out of memory, and the kernel ended a process"

_NAME = re.compile(r"b-[0-9a-f]{12}")


class Sandboxes:
    """All sandboxes of one supervisor; each is here from its creation until it is gone."""

    def __init__(self, folder: Path, children: Children, groups: Path | None, launcher: Launcher) -> None:
        """``groups`` is where control groups are made, if they can be."""
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._all: dict[str, Sandbox] = {}
        self._leaving = False
        """All end, since their server has."""
        self._inits: dict[int, Sandbox] = {}
        """By the number of their first process, those that close."""
        self.on_gone: list[Callable[[str], object]] = []
        """Told the name of each sandbox that is gone."""
        self._starts = StartLimiter()
        self._creation = Creation(
            folder, children, groups, launcher, lambda: (sandbox.prepared for sandbox in self._all.values())
        )
        self._children = children
        self._launcher = launcher
        self._watchdog = limit_watch.Watchdog(children, self._overran, self._watches)
        # Later there may be no process to be had.
        PROCESS_LOOPS.start("limit-watch", self._watchdog.run_once)
        self._in_memory = is_in_memory(filesystem_type(folder))
        self._active: dict[str, list[int]] = {}
        """Those in which something was started that the watchdog has not been told of, and what."""

    def up(self, name: str) -> Sandbox:
        """The sandbox of that name.

        Raises:
            NoSandbox: there is none, or none that is up.
        """
        sandbox = self._all.get(name)
        if sandbox is None or sandbox.stage is not Stage.UP:
            raise NoSandbox(f"sandbox {name} has ended")
        return sandbox

    async def living(self, name: str) -> None:
        """Whether it is up and stays so; the end of one that is about to end is waited for.

        Raises:
            NoSandbox: it has ended.
        """
        sandbox = self.up(name)
        if sandbox.space and sandbox.space.ending:
            await sandbox.gone()
            raise NoSandbox(f"sandbox {name} has ended")

    async def check(self, client: Client, name: str, *, memory: bool) -> Answer:
        """Answered if it is up; one that is about to end has ended. With ``memory``, only if nothing in it was ended
        for want of the machine's memory."""
        sandbox = self.up(name)
        if client not in sandbox.clients:
            sandbox.clients.append(client)
        await self.living(name)
        if memory and self._lacked_memory(sandbox):
            raise NoSandbox(f"sandbox {name}: {NO_MEMORY}")
        return {}, []

    @staticmethod
    def _lacked_memory(sandbox: Sandbox) -> bool:
        """Whether the kernel may have ended something in it though it kept within its own limit."""
        group = sandbox.group
        if group and "memory" in group.controllers:
            return bool(group.oom_kills()) and not group.exceeded_memory()
        return usage.oom_kills() > sandbox.machine_kills and not sandbox.over_memory

    async def create(self, client: Client, order: CreateRequest, files: list[int]) -> Answer:
        """Start one; answered with the variables of its image when it is up, or why it is not when nothing of it is
        left. ``files`` are taken, and stay open until it is gone: the lock on its image."""
        begun, timeout_s = self._loop.time(), order.start_timeout_s
        sandbox = self._accepted(client, order, files)
        try:
            async with sandbox.wanted, self._starts.of(order.image):
                sandbox.took["turn"] = self._loop.time() - begun
                # Its end may have been asked for in the very turn of the loop in which its own turn came.
                if sandbox.stage is Stage.WAITING:
                    sandbox.wanted.reschedule(self._loop.time() + timeout_s)
                    sandbox.stage = Stage.CREATING
                    await self._creation.create(sandbox)
                if sandbox.stage is Stage.CREATING:
                    return vars(self._is_up(sandbox)), []
            trouble: Refused = NoSandbox(f"sandbox {sandbox.name} has ended")
        except Refused as error:
            trouble = error
        except TimeoutError:
            trouble = Refused({"error": f"the sandbox was not up within {timeout_s:g} s: {sandbox.steps()}"})
        except OSError as error:
            trouble = Refused({"error": f"it can't be prepared: {in_words(error)}"})
        except Exception as error:
            trouble = Refused({"error": f"its order is wrong: {type(error).__name__}: {error}"})
        finally:
            sandbox.created.set()
        self._close(sandbox)
        with contextlib.suppress(Refused):
            await sandbox.gone()
        raise trouble

    def _accepted(self, client: Client, order: CreateRequest, files: list[int]) -> Sandbox:
        """A sandbox that may be made.

        Raises:
            Refused: it may not; says why.
        """
        if not _NAME.fullmatch(order.sandbox) or order.sandbox in self._all:
            raise ValueError(f"no name for a sandbox: {order.sandbox}")
        if trouble := rlimits.descriptor_shortage(len(self._all)):
            raise Refused({"error": trouble, "quota": True})
        folder = self._folder / order.sandbox
        try:
            check_image_folder(order.image, self._folder.parent)
            order = replace(order, binds=checked(order.binds, self._folder.parent, Path(order.image)))
        except CallerError as error:
            raise Refused({"error": error.complaint, "field": error.field}) from error
        sandbox = Sandbox(order.sandbox, folder, order, [client], files.copy())
        files.clear()
        self._all[sandbox.name] = sandbox
        return sandbox

    def _is_up(self, sandbox: Sandbox) -> StartReply:
        sandbox.stage = Stage.UP
        sandbox.machine_kills = usage.oom_kills()
        if ttl_s := sandbox.order.ttl_s:
            sandbox.expiry = self._loop.call_later(ttl_s, self.end_early, sandbox, f"time to live: {ttl_s:g} s")
        if order := limit_watch.order(sandbox, in_memory=self._in_memory):
            self._watchdog.tell({"watch": order})
        spawn_task(self._watch_starter(sandbox), expected=Refused)
        return StartReply(
            sandbox.environment,
            sorted(sandbox.group.controllers) if sandbox.group else [],
            sandbox.start_method,
            sandbox.fallback_reason,
            self._in_memory,
            sandbox.steps(),
        )

    def _watches(self) -> list[Message]:
        """Whom the watchdog has to watch."""
        up = (box for box in self._all.values() if box.stage is Stage.UP)
        return [{"watch": order} for box in up if (order := limit_watch.order(box, in_memory=self._in_memory))]

    def process_started(self, name: str, pid: int) -> None:
        """Something was started in a sandbox; the watchdog is told of all such once in a while."""
        if not self._active:
            self._loop.call_later(TICK_S, self._tell_active)
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
        sandbox.over_memory, sandbox.over_memory_at = reason, self._loop.time()
        sandbox.tell("limit", reason, "memory")

    async def destroy(self, name: str) -> Answer:
        """End one; answered when no process and no file of it is left. An unknown one is gone already."""
        if sandbox := self._all.get(name):
            self._close(sandbox)
            await sandbox.gone()
        return {}, []

    async def close_all(self) -> None:
        """End every one; returns when no process of any is left, nor a file that can be removed."""
        self._leaving = True
        while self._all:
            for sandbox in list(self._all.values()):
                self._close(sandbox)
            await asyncio.gather(*(sandbox.gone() for sandbox in self._all.values()), return_exceptions=True)

    def orphan_ended(self, pid: int) -> None:
        """A stranger was reaped, who may have been the first process of a sandbox that closes."""
        if sandbox := self._inits.get(pid):
            sandbox.changed.set()

    def process_ended(self, name: str, code: int) -> None:
        """Something that ran in it has ended: if it was the kernel's doing, who uses the sandbox is told first."""
        sandbox = self._all.get(name)
        if sandbox is None or sandbox.stage is not Stage.UP:
            return
        if code == -signal.SIGKILL:
            self._look_at_kills(sandbox)
        elif code in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ) and sandbox.order.disk_mib:
            # By its own word where it is a shell's.
            sandbox.note(file_size_violation(sandbox.order.disk_mib), "file size")

    def start_refused(self, name: str, resource: str) -> None:
        """Nothing more could be started in it."""
        if sandbox := self._all.get(name):
            most = sandbox.order.processes if resource == "processes" else MAX_TERMINALS
            sandbox.note(f"{resource}: all of {most} in use", resource)

    def _look_at_kills(self, sandbox: Sandbox) -> None:
        if sandbox.group and "memory" in sandbox.group.controllers:
            kills = sandbox.group.oom_kills()
            if kills > sandbox.oom_kills:
                sandbox.oom_kills = kills
                if sandbox.group.exceeded_memory():
                    allowed = sandbox.order.memory_mib
                    self._over_memory(sandbox, f"memory: all of {allowed} MiB used, the kernel ended a process")
                else:
                    sandbox.tell("limit", NO_MEMORY)

    async def _watch_starter(self, sandbox: Sandbox) -> None:
        """One that is up ends when our child for it does."""
        assert sandbox.starter
        code = await sandbox.starter.wait()
        if sandbox.stage is Stage.UP:
            self._look_at_kills(sandbox)
            if code in KILLED and sandbox.over_memory and self._loop.time() - sandbox.over_memory_at < SOON_S:
                self.end_early(sandbox, sandbox.over_memory, "memory")
            else:
                self.end_early(sandbox, inside=not self._was_killed(sandbox, code))

    def _was_killed(self, sandbox: Sandbox, code: int) -> bool:
        """Whether its first process was killed from outside: nothing inside can kill it, but by want of memory. It may
        have been made to end as if, where commands have its rights: the runtime can't tell that from a kill."""
        by_the_runtimes_word = code == 128 + signal.SIGKILL
        return code in KILLED and (not by_the_runtimes_word or sandbox.order.uid == 0 or self._lacked_memory(sandbox))

    def end_early(self, sandbox: Sandbox, reason: str = "", resource: str = "", *, inside: bool = False) -> None:
        """One that is up ends without having been asked to: who uses it is told, and whether from ``inside``."""
        if sandbox.stage is not Stage.UP:
            return
        if reason:
            sandbox.tell("limit", reason, resource)
        sandbox.tell("gone", reason, resource, inside=inside)
        self._close(sandbox)

    def _close(self, sandbox: Sandbox) -> None:
        """Begin to end a sandbox, if need be."""
        if sandbox.stage in (Stage.CLOSING, Stage.GONE):
            return
        sandbox.stage = Stage.CLOSING
        if sandbox.expiry:
            # Else it would keep all that is known of the sandbox until then.
            sandbox.expiry.cancel()
        if not sandbox.created.is_set() and not sandbox.wanted.expired():
            sandbox.wanted.reschedule(0.0)
        spawn_task(self._end(sandbox))

    async def _end(self, sandbox: Sandbox) -> None:
        """From the beginning of its end until nothing of it is left. Whatever fails is tried again."""
        since = self._loop.time()
        with log_exceptions():
            self._watchdog.tell({"forget": sandbox.name})
        with log_exceptions():
            if sandbox.channel:
                # A first process that we have not heard of yet ends by that.
                sandbox.channel.shutdown(socket.SHUT_RDWR)
        await sandbox.created.wait()
        with log_exceptions():
            look_for_first(sandbox)
        if sandbox.starter:
            sandbox.starter.wait().add_done_callback(lambda _status: sandbox.changed.set())
        if sandbox.space:
            self._inits[sandbox.space.init] = sandbox
        ended = False
        while True:
            sandbox.changed.clear()
            with log_exceptions():
                try:
                    if ended := self._take_down(sandbox, self._loop.time() - since):
                        await self._delete(sandbox)
                        break
                except (Refused, OSError) as error:
                    trouble, late = failure(error), self._loop.time() - since > STUCK_S
                    # As long as what removes what is left can't be had, or is killed, somebody may wait.
                    passes = isinstance(error, OSError) or trouble.get("errno") == errno.EAGAIN
                    if not (passes or trouble.get("killed")) or late:
                        sandbox.tell_gone(Refused(trouble))
                    if ended and late and self._leaving:
                        break  # its files are left to the next start of a supervisor
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await sandbox.changed.wait()
        sandbox.stage = Stage.GONE
        close_all(sandbox.held)
        del self._all[sandbox.name]
        if sandbox.space:
            self._inits.pop(sandbox.space.init, None)
        for told in self.on_gone:
            with log_exceptions():
                told(sandbox.name)
        sandbox.tell_gone()

    def _take_down(self, sandbox: Sandbox, closing_s: float) -> bool:
        """Have its processes end; whether all have.

        Raises:
            Refused: it takes too long.
        """
        group, space, starter = sandbox.group, sandbox.space, sandbox.starter
        if group:
            group.kill()
        step = step_down(
            starter=starter is not None and starter.alive,
            init=space.alive if space else None,
            closing_s=closing_s,
        )
        if step.kill_init and space:
            space.kill()
        if step.kill_starter and starter:
            starter.kill()
        if step.report and sandbox.ends:
            living = sorted({*(space.members() if space else ()), *(group.processes() if group else ())})
            raise Refused({"error": f"processes {living} of {sandbox.name} do not die; tried again until they do"})
        return step.delete

    async def _delete(self, sandbox: Sandbox) -> None:
        """Have its files removed, and its control group.

        Raises:
            Refused: something is left.
        """
        if sandbox.channel:
            drop(sandbox.channel)
            sandbox.channel = None
        sandbox.take_log()
        request = requests.erase(sandbox.folder, sandbox.group.path if sandbox.group else None)
        try:
            await self._launcher.run(request)
        except Refused as error:
            if error.answer.get("errno") not in state_dir.OTHERS or is_machine_root():
                raise
            await self._children.run(partial(_remove_tree, sandbox.folder))


def _remove_tree(folder: Path) -> Answer:
    state_dir.remove_tree(folder)
    return {}, []
