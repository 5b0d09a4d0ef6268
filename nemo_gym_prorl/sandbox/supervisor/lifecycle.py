# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Life cycle of a sandbox in its supervisor: creating, up, closing, gone.

- *creating*: the sandbox waits for a start slot, then its first process is started (:mod:`.creation`).
- *up*: the first process has reported, and limits are set. Only in this stage do clients' requests join the sandbox.
- *closing*: a client requested the end, the start failed, the first process ended, the time to live is over, or the
  sandbox exceeded a limit. Irreversible.
- *gone*: all processes have ended, the supervisor's child for the sandbox is reaped, and the control group and the
  folder are removed. Requests to end a sandbox, and failed requests to create one, get their reply in this stage. An
  error reply comes earlier if closing is stuck.

A step of closing runs when the first process or the supervisor's child for the sandbox ends, and twice a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import signal
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_gym_prorl.async_tasks import PROCESS_LOOPS, log_exceptions, spawn_task
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.filesystems import filesystem_type, is_in_memory
from nemo_gym_prorl.network_access import POLICY_PORT
from nemo_gym_prorl.sandbox.binds import check_binds, check_image_folder
from nemo_gym_prorl.sandbox.isolation.mounts import MAX_TERMINALS
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import rlimits, usage
from nemo_gym_prorl.sandbox.limits.rlimits import file_size_violation
from nemo_gym_prorl.sandbox.supervisor import state_dir, watchdog_process
from nemo_gym_prorl.sandbox.supervisor.children import Children, Launcher, Reply
from nemo_gym_prorl.sandbox.supervisor.connection import Message, close_all, drop
from nemo_gym_prorl.sandbox.supervisor.creation import Creation, StartLimiter, find_pid_namespace
from nemo_gym_prorl.sandbox.supervisor.egress_process import Egress
from nemo_gym_prorl.sandbox.supervisor.protocol import (
    CreateRequest,
    PolicyRequest,
    Refused,
    StartReply,
    error_text,
    failure,
)
from nemo_gym_prorl.sandbox.supervisor.sandbox import STUCK_S, Client, NoSandbox, Sandbox, SandboxStage


TICK_S = 0.5
"""Seconds between retries while a sandbox closes, and between reports of started programs to the watchdog."""

KILL_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of the supervisor's child that mean that the sandbox's first process was killed: -9 if the child is that
process (direct start), 137 if the child is the runtime's process."""

MEMORY_DEATH_WINDOW_S = 5.0
"""Seconds after a memory violation in which a kill of the first process is attributed to the violation."""

NO_MEMORY = "the machine ran out of memory, and the kernel ended a process"

_NAME = re.compile(r"b-[0-9a-f]{12}")


class Sandboxes:
    """All sandboxes of one supervisor, from the create request until they are gone."""

    def __init__(self, folder: Path, children: Children, groups: Path | None, launcher: Launcher) -> None:
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._all: dict[str, Sandbox] = {}
        self._server_gone = False
        """Whether :meth:`close_all` was called: the supervisor is ending."""
        self._inits: dict[int, Sandbox] = {}
        """Closing sandboxes by the pid of the first process."""
        self._starts = StartLimiter()
        self._egress = Egress(children, launcher)
        self._creation = Creation(folder, children, groups, launcher, self._egress)
        self._children = children
        self._launcher = launcher
        self._watchdog = watchdog_process.Watchdog(children, self._on_violation, self._watch_entries)
        # Started before any sandbox, since sandboxes may use up this user's process limit.
        PROCESS_LOOPS.start("limit-watch", self._watchdog.run_once)
        self._in_memory = is_in_memory(filesystem_type(folder))
        self._active: set[str] = set()
        """Names of sandboxes in which programs have started since the last report to the watchdog."""

    def up(self, name: str) -> Sandbox:
        """Return a sandbox that is up.

        Raises:
            NoSandbox: the sandbox does not exist or is not up.
        """
        sandbox = self._all.get(name)
        if sandbox is None or sandbox.stage is not SandboxStage.UP:
            raise NoSandbox(f"sandbox {name} has ended")
        return sandbox

    async def check_not_ending(self, name: str) -> None:
        """Check that a sandbox is up and its first process is not exiting; otherwise wait until the sandbox is gone.

        Raises:
            NoSandbox: the sandbox has ended.
        """
        sandbox = self.up(name)
        if sandbox.pid_namespace and sandbox.pid_namespace.ending:
            await sandbox.wait_gone()
            raise NoSandbox(f"sandbox {name} has ended")

    async def check(self, client: Client, name: str, *, memory: bool) -> Reply:
        sandbox = self.up(name)
        if client not in sandbox.clients:
            sandbox.clients.append(client)
        await self.check_not_ending(name)
        if memory:
            self._check_oom_kills(sandbox)
        if memory and self._lacked_memory(sandbox):
            raise NoSandbox(f"sandbox {name}: {NO_MEMORY}")
        return {}, []

    @staticmethod
    def _lacked_memory(sandbox: Sandbox) -> bool:
        """Return whether the machine's OOM killer may have killed a process of a sandbox within its memory limit."""
        group = sandbox.group
        if group and "memory" in group.controllers:
            return bool(group.oom_kills()) and not group.exceeded_memory()
        return usage.oom_kills() > sandbox.machine_kills and not sandbox.over_memory

    async def egress_of(self, name: str) -> Reply:
        return {"hosts": await self._egress.report(self.up(name).name)}, []

    async def serve_policy(self, request: PolicyRequest) -> Reply:
        sandbox = self.up(request.sandbox)
        await self._egress.close(sandbox.name, POLICY_PORT)
        if request.url:
            await self._egress.open(sandbox, POLICY_PORT, {"url": request.url, "key": request.key})
            if sandbox.stage is not SandboxStage.UP:  # _end closed the ports before this port was opened
                await self._egress.close(sandbox.name)
        return {}, []

    async def create(self, client: Client, request: CreateRequest, files: list[int]) -> Reply:
        """Start a sandbox and return the fields of :class:`.protocol.StartReply`.

        Args:
            client: receives the sandbox's events.
            files: descriptors that stay open until the sandbox is gone, such as the lock on its image; emptied.

        Raises:
            Refused: the sandbox does not start; its processes and files are gone, or are still being removed.
        """
        begun, timeout_s = self._loop.time(), request.start_timeout_s
        sandbox = self._admit(client, request, files)
        try:
            async with sandbox.start_timeout, self._starts.slot(request.image):
                sandbox.step_seconds["turn"] = self._loop.time() - begun
                # A client may have ended the sandbox in the loop iteration in which the slot was granted.
                if sandbox.stage is SandboxStage.CREATING:
                    sandbox.start_timeout.reschedule(self._loop.time() + timeout_s)
                    await self._creation.create(sandbox)
                if sandbox.stage is SandboxStage.CREATING:
                    return vars(self._mark_up(sandbox)), []
            trouble: Refused = NoSandbox(f"sandbox {sandbox.name} has ended")
        except Refused as error:
            trouble = error
        except TimeoutError:
            trouble = Refused({"error": f"the sandbox was not up within {timeout_s:g} s: {sandbox.steps()}"})
        except OSError as error:
            trouble = Refused({"error": f"the sandbox can't be prepared: {error_text(error)}"})
        except Exception as error:
            trouble = Refused({"error": f"the create request is wrong: {type(error).__name__}: {error}"})
        finally:
            sandbox.created.set()
        self._close(sandbox)
        with contextlib.suppress(Refused):
            await sandbox.wait_gone()
        raise trouble

    def _admit(self, client: Client, request: CreateRequest, files: list[int]) -> Sandbox:
        """Validate the name, the binds and the descriptors left, and register the new sandbox."""
        if not _NAME.fullmatch(request.sandbox) or request.sandbox in self._all:
            raise ValueError(f"not a name for a sandbox, or in use: {request.sandbox}")
        if trouble := rlimits.descriptor_shortage(len(self._all)):
            raise Refused({"error": trouble, "quota": True})
        folder = self._folder / request.sandbox
        try:
            check_image_folder(request.image, self._folder.parent)
            request = replace(request, binds=check_binds(request.binds, self._folder.parent, Path(request.image)))
        except CallerError as error:
            raise Refused({"error": error.complaint, "field": error.field}) from error
        sandbox = Sandbox(request.sandbox, folder, request, [client], files.copy())
        files.clear()
        self._all[sandbox.name] = sandbox
        return sandbox

    def _mark_up(self, sandbox: Sandbox) -> StartReply:
        sandbox.stage = SandboxStage.UP
        sandbox.machine_kills = usage.oom_kills()
        if ttl_s := sandbox.request.ttl_s:
            sandbox.expiry = self._loop.call_later(ttl_s, self.end_early, sandbox, f"time to live: {ttl_s:g} s")
        if entry := watchdog_process.watch_entry(sandbox, in_memory=self._in_memory):
            self._watchdog.post({"watch": entry})
        spawn_task(self._watch_starter(sandbox), expected=Refused)
        return StartReply(
            sandbox.environment,
            sorted(sandbox.group.controllers) if sandbox.group else [],
            sandbox.start_method,
            sandbox.fallback_reason,
            self._in_memory,
            sandbox.steps(),
        )

    def _watch_entries(self) -> list[Message]:
        up = (box for box in self._all.values() if box.stage is SandboxStage.UP)
        entries = (watchdog_process.watch_entry(box, in_memory=self._in_memory) for box in up)
        return [{"watch": entry} for entry in entries if entry]

    def process_started(self, name: str) -> None:
        """Add a sandbox to the next report to the watchdog, sent at most once per :data:`TICK_S`."""
        if not self._active:
            self._loop.call_later(TICK_S, self._report_active)
        self._active.add(name)

    def _report_active(self) -> None:
        active, self._active = self._active, set()
        self._watchdog.post({"active": sorted(active)})

    def _on_violation(self, message: Message) -> None:
        sandbox = self._all.get(message["sandbox"])
        if sandbox and sandbox.stage is SandboxStage.UP:
            if message["ended"]:
                self.end_early(sandbox, message["reason"], message["resource"])
            elif message["resource"] != "memory":
                sandbox.report_limit(message["reason"], message["resource"])
            else:
                self._over_memory(sandbox, message["reason"])

    def _over_memory(self, sandbox: Sandbox, reason: str) -> None:
        sandbox.over_memory, sandbox.over_memory_at = reason, self._loop.time()
        sandbox.send_event("limit", reason, "memory")

    async def destroy(self, name: str) -> Reply:
        """End a sandbox and wait until it is gone (:meth:`.Sandbox.wait_gone`); a no-op for an unknown sandbox."""
        if sandbox := self._all.get(name):
            self._close(sandbox)
            await sandbox.wait_gone()
        return {}, []

    async def close_all(self) -> None:
        """End all sandboxes and wait until they are gone; files that cannot be removed are left for the next sweep."""
        self._server_gone = True
        while self._all:
            for sandbox in list(self._all.values()):
                self._close(sandbox)
            await asyncio.gather(*(sandbox.wait_gone() for sandbox in self._all.values()), return_exceptions=True)

    def orphan_ended(self, pid: int) -> None:
        """Continue closing the sandbox whose first process, with the reaped ``pid``, has ended; else a no-op."""
        if sandbox := self._inits.get(pid):
            sandbox.changed.set()

    def process_ended(self, name: str, code: int) -> None:
        """Report the limit that ended a program, as far as the exit code shows the limit, to the sandbox's clients."""
        sandbox = self._all.get(name)
        if sandbox is None or sandbox.stage is not SandboxStage.UP:
            return
        if code == -signal.SIGKILL:
            self._check_oom_kills(sandbox)
        elif code in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ) and sandbox.request.disk_mib:
            # A shell exits with 128 + N if signal N ended its command.
            sandbox.report_limit(file_size_violation(sandbox.request.disk_mib), "file size")

    def spawn_refused(self, name: str, resource: str) -> None:
        """Report to the sandbox's clients that no program could start because the limit of ``resource`` is used up."""
        if sandbox := self._all.get(name):
            most = sandbox.request.processes if resource == "processes" else MAX_TERMINALS
            sandbox.report_limit(f"{resource}: all of {most} in use", resource)

    def _check_oom_kills(self, sandbox: Sandbox) -> None:
        if sandbox.group and "memory" in sandbox.group.controllers:
            kills = sandbox.group.oom_kills()
            if kills > sandbox.oom_kills:
                sandbox.oom_kills = kills
                if sandbox.group.exceeded_memory():
                    allowed = sandbox.request.memory_mib
                    self._over_memory(sandbox, f"memory: all of {allowed} MiB used, the kernel ended a process")
                else:
                    sandbox.send_event("limit", NO_MEMORY)

    async def _watch_starter(self, sandbox: Sandbox) -> None:
        """Wait for the exit of the supervisor's child for a sandbox; then end the sandbox if it is up."""
        assert sandbox.starter
        code = await sandbox.starter.wait()
        if sandbox.stage is SandboxStage.UP:
            self._check_oom_kills(sandbox)
            if (
                code in KILL_STATUSES
                and sandbox.over_memory
                and self._loop.time() - sandbox.over_memory_at < MEMORY_DEATH_WINDOW_S
            ):
                self.end_early(sandbox, sandbox.over_memory, "memory")
            else:
                inside = not self._was_killed(sandbox, code)
                self.end_early(sandbox, inside=inside, ending=_first_process_ending(code, inside=inside))

    def _was_killed(self, sandbox: Sandbox, code: int) -> bool:
        """Return whether the first process was killed from outside the sandbox: by the machine or its users.

        The kernel ignores SIGKILL from a PID namespace's own processes to its first process, so -9 (direct start)
        comes from outside. The runtime reports a kill as exit code 137. Commands that are not root can trace the first
        process and make it exit with 137. As root the first process has more capabilities than commands, so commands
        cannot trace it. So 137 counts only if commands run as root, or if the machine lacked memory."""
        reported_by_runtime = code == 128 + signal.SIGKILL
        return code in KILL_STATUSES and (
            not reported_by_runtime or sandbox.request.uid == 0 or self._lacked_memory(sandbox)
        )

    def end_early(
        self, sandbox: Sandbox, reason: str = "", resource: str = "", *, inside: bool = False, ending: str = ""
    ) -> None:
        """End a sandbox without a client's request, and tell its clients; a no-op unless it is up. Either ``reason``
        and ``resource`` describe an exceeded limit, or ``ending`` how the first process ended, and ``inside`` whether
        sandboxed processes are the cause."""
        if sandbox.stage is not SandboxStage.UP:
            return
        if reason:
            sandbox.send_event("limit", reason, resource)
        sandbox.send_event("gone", reason or ending, resource, inside=inside)
        self._close(sandbox)

    def _close(self, sandbox: Sandbox) -> None:
        """Move a sandbox to the stage *closing* and start :meth:`_end`; a no-op in a later stage."""
        if sandbox.stage in (SandboxStage.CLOSING, SandboxStage.GONE):
            return
        sandbox.stage = SandboxStage.CLOSING
        if sandbox.expiry:
            # A pending timer would keep the sandbox's memory until the time to live is over.
            sandbox.expiry.cancel()
        if not sandbox.created.is_set() and not sandbox.start_timeout.expired():
            sandbox.start_timeout.reschedule(0.0)
        spawn_task(self._end(sandbox))

    async def _end(self, sandbox: Sandbox) -> None:
        """Kill the processes and remove the files of a closing sandbox; retry failed steps every :data:`TICK_S`."""
        since = self._loop.time()
        with log_exceptions():
            self._watchdog.post({"forget": sandbox.name})
        with log_exceptions():
            if sandbox.channel:
                # A first process that is not recorded yet exits when its channel is shut down.
                sandbox.channel.shutdown(socket.SHUT_RDWR)
        await sandbox.created.wait()
        spawn_task(self._egress.close(sandbox.name))
        with log_exceptions():
            find_pid_namespace(sandbox)
        if sandbox.starter:
            sandbox.starter.wait().add_done_callback(lambda _status: sandbox.changed.set())
        if sandbox.pid_namespace:
            self._inits[sandbox.pid_namespace.init] = sandbox
        ended = False
        while True:
            sandbox.changed.clear()
            with log_exceptions():
                try:
                    if ended := self._kill_processes(sandbox, self._loop.time() - since):
                        await self._delete(sandbox)
                        break
                except (Refused, OSError) as error:
                    trouble, late = failure(error), self._loop.time() - since > STUCK_S
                    # After a transient error, callers of wait_gone get an error only once STUCK_S have passed.
                    transient = isinstance(error, OSError) or trouble.get("errno") == errno.EAGAIN
                    if not (transient or trouble.get("killed")) or late:
                        sandbox.resolve_end_waiters(Refused(trouble))
                    if ended and late and self._server_gone:
                        break  # the next supervisor's sweep removes the files
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await sandbox.changed.wait()
        sandbox.stage = SandboxStage.GONE
        close_all(sandbox.held_files)
        del self._all[sandbox.name]
        if sandbox.pid_namespace:
            self._inits.pop(sandbox.pid_namespace.init, None)
        sandbox.resolve_end_waiters()

    def _kill_processes(self, sandbox: Sandbox, closing_s: float) -> bool:
        """Send the SIGKILLs that are due; return whether all processes of the sandbox have ended."""
        group, namespace, starter = sandbox.group, sandbox.pid_namespace, sandbox.starter
        late = closing_s > STUCK_S
        if group:
            group.kill()
        # The kernel kills all others with the first process.
        init = namespace if namespace and namespace.alive else None
        if init:
            init.kill()
        starting = starter if starter and starter.alive else None
        # Once the sandbox's processes have ended, the runtime's process ends its helpers; it gets STUCK_S for that.
        if starting and (namespace is None or late):
            starting.kill()
        if late and (init or starting) and sandbox.end_waiters:
            living = sorted({*(namespace.members() if namespace else ()), *(group.processes() if group else ())})
            raise Refused({"error": f"processes {living} of {sandbox.name} survive SIGKILL; retrying until they end"})
        return not init and not starting

    async def _delete(self, sandbox: Sandbox) -> None:
        if sandbox.channel:
            drop(sandbox.channel)
            sandbox.channel = None
        sandbox.take_log()
        request = requests.erase(sandbox.folder, sandbox.group.path if sandbox.group else None)
        try:
            await self._launcher.run(request)
        except Refused as error:
            if error.reply.get("errno") not in state_dir.OTHER_USERS_ERRORS or is_machine_root():
                raise
            await self._children.run(partial(_remove_tree, sandbox.folder))


def _first_process_ending(code: int, *, inside: bool) -> str:
    """Return how the first process of a sandbox ended, for a sandbox that neither a request nor a limit ended."""
    if inside or code not in KILL_STATUSES:
        return "its first process " + (f"was ended by signal {-code}" if code < 0 else f"exited with code {code}")
    return "its first process was killed (SIGKILL) from outside, by no request or limit of this service"


def _remove_tree(folder: Path) -> Reply:
    state_dir.remove_tree(folder)
    return {}, []
