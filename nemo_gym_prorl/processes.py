# SPDX-License-Identifier: Apache-2.0
"""Finding and ending every process of a tree that does not stay a tree.

Servers daemonise, orphans are adopted by init, Ray starts sessions of its own: neither parents, process groups nor
names find them all again. What every descendant does inherit is the environment, so a tree is marked with one unique
variable at its root and found by reading ``/proc``. Linux only, like the sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """An environment variable that marks a process tree.

    Attributes:
        name: the variable.
        value: what makes it unique.
    """

    name: str
    value: str

    def processes(self) -> dict[int, str]:
        """Living processes that carry the mark, as pid → command line; zombies and ourselves do not count."""
        needle = f"{self.name}={self.value}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            # A process may end, or belong to somebody else, at any of these reads.
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    # An empty command line is a zombie's or a kernel thread's.
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if command:
                        found[int(entry.name)] = command
        return found

    async def wait_gone(self, timeout_s: float) -> dict[int, str]:
        """Wait until no marked process lives, at most ``timeout_s``; gives those that still do."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = await asyncio.to_thread(self.processes)
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(_POLL_S)

    async def kill(self, *, settle_s: float, kill_s: float) -> dict[int, str]:
        """Let marked processes end by themselves for ``settle_s``, then kill them for up to ``kill_s``.

        Returns:
            Those that live on in spite of it; empty on success.
        """
        left = await self.wait_gone(settle_s)
        deadline = time.monotonic() + kill_s
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            left = await self.wait_gone(_POLL_S)
        return left
