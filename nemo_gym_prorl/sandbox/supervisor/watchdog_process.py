# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The watchdog process: a child of the supervisor that measures resource usage of sandboxes, since measuring blocks.

If a sandbox exceeds its memory limit, the watchdog kills processes, after checking their identity, and reports that.
If a sandbox exceeds its disk limit, the supervisor ends it. :mod:`..limits.watchdog` makes the decisions.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from nemo_gym_prorl.async_tasks import PROCESS_LOOPS
from nemo_gym_prorl.sandbox import signals
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.limits.rlimits import file_size_violation
from nemo_gym_prorl.sandbox.limits.watchdog import (
    COLD_BUDGET_S,
    SCAN_FRACTION,
    SCAN_TURN_S,
    TICK_S,
    Watched,
    WatchList,
    is_memory_dropping,
)
from nemo_gym_prorl.sandbox.supervisor.children import Children, send_from_child
from nemo_gym_prorl.sandbox.supervisor.connection import Connection, Message, PeerGone, receive, socket_pair
from nemo_gym_prorl.sandbox.supervisor.protocol import Refused
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox


RETRY_S = 0.5
"""Seconds until a killed watchdog process is restarted: one tick of measuring."""


def watch_entry(sandbox: Sandbox, *, in_memory: bool) -> Message | None:
    """Return the fields of :class:`..limits.watchdog.Watched` for a sandbox; ``None`` without a PID namespace."""
    wanted, controllers = sandbox.request, sandbox.group.controllers if sandbox.group else frozenset()
    memory = 0 if "memory" in controllers else wanted.memory_mib << 20
    if sandbox.pid_namespace is None:
        return None
    return {
        "name": sandbox.name,
        "space": sandbox.pid_namespace.number,
        "init": sandbox.pid_namespace.init,
        "group": str(sandbox.group.path) if sandbox.group else "",
        "folder": str(sandbox.folder / "overlay" / "upper"),
        "memory_limit": memory,
        "disk_limit": wanted.disk_mib << 20,
        "shared_memory_mib": wanted.shared_memory_mib,
        "in_memory": in_memory,
    }


class Watchdog:
    """Supervisor's side of the watchdog process, which is restarted after its death.

    Args:
        on_violation: called with each report of the watchdog process.
        entries: returns the messages by which a new watchdog process learns the sandboxes.
    """

    def __init__(
        self, children: Children, on_violation: Callable[[Message], None], entries: Callable[[], list[Message]]
    ) -> None:
        self._children = children
        self._on_violation = on_violation
        self._entries = entries
        self._connection: Connection[Message, list[int]] | None = None

    def post(self, message: Message) -> None:
        """Send a message to the watchdog process; a no-op while none runs, since ``entries`` informs the next one."""
        if self._connection:
            self._connection.post(message)

    async def run_once(self) -> float:
        """Run one watchdog process until it ends; return the seconds to wait before the next start."""
        with contextlib.suppress(OSError, Refused):
            ours, theirs = socket_pair()
            connection = Connection(ours, lambda message, _files: self._on_violation(message), lambda: None)
            try:
                with theirs:
                    child = self._children.fork(partial(serve, theirs), [theirs.fileno()])
                self._connection = connection
                for message in self._entries():
                    connection.post(message)
                await child.wait()
            finally:
                self._connection = None
                connection.close()
        return RETRY_S


def serve(channel: socket.socket) -> None:
    """Run the watchdog in a forked child until the supervisor closes its end of ``channel``."""
    channel.setblocking(True)
    # select.select does not support descriptors above 1023.
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    watch = UsageMonitor(channel)
    threading.Thread(target=partial(PROCESS_LOOPS.run_thread, "disk-watch", watch.scan_disks), daemon=True).start()
    due = 0.0
    while True:
        wait_s = max(0.0, due - time.monotonic()) if watch.watched.all else None
        try:
            while poll.poll(None if wait_s is None else math.ceil(wait_s * 1000)):
                message, _files = receive(channel)
                watch.handle(message)
                wait_s = 0.0
        except PeerGone:
            return
        if time.monotonic() >= due:
            watch.tick()
            due = time.monotonic() + TICK_S


class UsageMonitor:
    """Measures the watched sandboxes, kills processes of sandboxes over their memory limit, and reports violations."""

    def __init__(self, channel: socket.socket) -> None:
        self.watched = WatchList()
        self._channel = channel
        self._available = usage.available_memory()
        self._total = os.sysconf("SC_PHYS_PAGES") * usage.PAGE_BYTES

    def handle(self, message: Message) -> None:
        if "watch" in message:
            self.watched.all[message["watch"]["name"]] = Watched(**message["watch"])
        elif "forget" in message:
            self.watched.all.pop(message["forget"], None)
        for name in message.get("active", ()):
            if box := self.watched.all.get(name):
                box.hot = box.unmeasured = True

    def tick(self) -> None:
        """Measure the processes of hot sandboxes; then, within their time budget, of cold sandboxes."""
        before, self._available = self._available, usage.available_memory()
        # Without control groups, one scan of the machine's processes finds those of all sandboxes.
        spaces = [box.space for box in self.watched.all.values() if not box.group]
        members = usage.processes_by_namespace(spaces) if spaces else {}
        for box in self.watched.hot():
            self._measure_processes(box, members)
        end = time.monotonic() + COLD_BUDGET_S
        check_all = is_memory_dropping(before, self._available, self._total)
        for box in self.watched.cold():
            self._measure_processes(box, members)
            if not check_all and time.monotonic() > end:
                break

    def _measure_processes(self, box: Watched, members: dict[int, set[int]]) -> None:
        pids = _group_members(box.group) if box.group else members[box.space]
        processes = [found for pid in pids if (found := usage.read_process(pid))]
        box.record_measurement(processes)
        if box.hot and box.shared_memory_mib and not _shared_memory_free(box):
            reason = f"shared memory: all of {box.shared_memory_mib} MiB in use"
            self._report(box, "shared memory", reason, ended=False)
        if not box.may_exceed_memory(processes):
            return
        # The control group also contains processes of the runtime, which are not in the sandbox's PID namespace.
        inside = {process.pid: process for process in processes if _is_inside(process.pid, box)}
        over = box.memory_victims({pid: usage.proportional_memory(pid) for pid in inside})
        if over is None:
            return
        victims, reason = over
        self._report(box, "memory", reason, ended=not victims)
        for victim in victims:
            signals.send(victim, signal.SIGKILL, partial(_is_same, inside[victim], box))

    def scan_disks(self) -> None:
        """Scan disk use for ever, in a thread: a scan may take seconds, and memory grows faster. Scans
        take turns, so that a sandbox of many files delays no other's limit."""
        scans: deque[tuple[Watched, usage.DiskScan]] = deque()
        while True:
            now, pause_s = time.monotonic(), TICK_S
            if box := self.watched.next_to_scan(now, {box.name for box, _ in scans}):
                # Reset before the scan, so that activity during the scan causes another scan.
                box.unmeasured, box.scanned = False, now
                scans.append((box, usage.DiskScan(box.folder, tuple(box.members), box.disk_limit or sys.maxsize)))
            if scans:
                box, scan = scans.popleft()
                before = scan.found.seconds
                ended = scan.advance(SCAN_TURN_S)
                if self.watched.all.get(box.name) is box:
                    if ended:
                        self._record_scan(box, scan.found)
                    else:
                        scans.append((box, scan))
                pause_s = (scan.found.seconds - before) / SCAN_FRACTION
            time.sleep(pause_s)

    def _record_scan(self, box: Watched, found: usage.DiskUsage) -> None:
        box.disk = found.disk
        if reason := box.disk_violation(found):
            self._report(box, "disk", reason, ended=True)
        elif box.disk_limit and found.largest >= box.disk_limit:
            self._report(box, "file size", file_size_violation(box.disk_limit >> 20), ended=False)

    def _report(self, box: Watched, resource: str, reason: str, *, ended: bool) -> None:
        send_from_child(self._channel, {"sandbox": box.name, "resource": resource, "reason": reason, "ended": ended})


def _group_members(group: str) -> set[int]:
    try:
        with open(f"{group}/cgroup.procs", "rb") as file:
            return {int(number) for number in file.read().split()}
    except OSError:
        return set()


def _shared_memory_free(box: Watched) -> int:
    """Return the free blocks or inodes of ``/dev/shm``, whichever are fewer; if unknown 1, which causes no report."""
    try:
        found = os.statvfs(f"/proc/{box.init}/root/dev/shm")
    except OSError:
        return 1
    return min(found.f_bavail, found.f_favail)


def _is_inside(pid: int, box: Watched) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == box.space
    except OSError:
        return False


def _is_same(process: usage.Process, box: Watched) -> bool:
    now = usage.read_process(process.pid)
    return now is not None and now.started == process.started and _is_inside(process.pid, box)
