# SPDX-License-Identifier: Apache-2.0
"""How many sandboxes start at a time on this machine, over all processes of a user.

A hundred starts at once only make each other slow: each mounts, reads the same files from a cold disk, and forks. So
there is one gate for the machine, through which some go at a time, and one for each image, which the first start of an
image that is not in memory yet passes alone; those that follow find it there.

A place in a gate is a lock on a file in the state folder, so the kernel gives it back when its holder dies.
Invariants:

- nobody waits at a gate for somebody who waits: whoever goes through the image's gate may wait at the machine's, where
  everybody in it only starts a sandbox, which is bounded in time;
- within a process the first to come is the first to go; only that one tries, every few milliseconds, and never blocks
  the loop. Processes take turns by chance;
- whoever waited for :data:`PATIENCE_S` at an image's gate goes on, and at the machine's gets an error.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import random
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError


POLL_S = 0.005
"""Pause between two tries of a process's first in line; a start takes ten times as long."""

PATIENCE_S = {"image": 30.0, "machine": 600.0}

WARM_S = 600.0
"""How long after a start an image's files are taken to be in memory still."""


class Gate:
    """One gate of this machine, as one event loop sees it.

    Args:
        folder: a node-local folder that all processes use.
        name: of the gate, a file name.
        places: how many go through at a time. Processes may disagree; each keeps to its own number.
        patience_s: how long one waits at most.
    """

    def __init__(self, folder: Path, name: str, places: int, patience_s: float) -> None:
        self._files = [folder / f"{name}-{number}" for number in range(places)]
        self._patience_s = patience_s
        self._line = asyncio.Lock()

    async def enter(self) -> int:
        """Wait for a place; what :meth:`leave` needs.

        Raises:
            TimeoutError: there was none for so long.
        """
        async with asyncio.timeout(self._patience_s), self._line:
            while (place := self._try()) is None:  # noqa: ASYNC110  # other processes ring no bell
                # By chance, so that no process is always a little earlier than another.
                await asyncio.sleep(random.uniform(0.5, 1.5) * POLL_S)
            return place

    @staticmethod
    def leave(place: int) -> None:
        """Give a place back."""
        # Closing alone would not do if a child was forked meanwhile: it has the open file too.
        fcntl.flock(place, fcntl.LOCK_UN)
        os.close(place)

    def _try(self) -> int | None:
        for file in self._files:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EWOULDBLOCK:
                    raise InfrastructureError(
                        f"{file} can't be locked ({error.strerror}): set PRORL_STATE to a folder on a local disk"
                    ) from error
                continue
            return descriptor
        return None


class StartGates:
    """The gates of one event loop, in a ``gates`` folder of the machine's state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gates: dict[tuple[str, int], Gate] = {}

    @classmethod
    def of(cls, state: Path) -> StartGates:
        """Those of the running loop; one for all, or its callers would not stand in one line."""
        known = _loops.setdefault(asyncio.get_running_loop(), {})
        if state not in known:
            folder = state / "gates"
            folder.mkdir(mode=0o700, exist_ok=True)
            known[state] = cls(folder)
        return known[state]

    @asynccontextmanager
    async def start(self, image: Path, places: int) -> AsyncIterator[None]:
        """Go through the image's gate and the machine's, and start a sandbox of ``image`` in this block.

        Raises:
            InfrastructureError: the machine's gate did not move for ten minutes.
        """
        key = hashlib.sha256(os.fsencode(image)).hexdigest()[:16]
        warm = self._folder / f"{key}.warm"
        async with AsyncExitStack() as passed:
            if not _is_warm(warm):
                try:
                    place = await self._gate(key, 1, "image").enter()
                except TimeoutError:
                    pass
                else:
                    if _is_warm(warm):
                        Gate.leave(place)
                    else:
                        passed.callback(Gate.leave, place)
            try:
                place = await self._gate("machine", places, "machine").enter()
            except TimeoutError as error:
                raise InfrastructureError(
                    f"no sandbox could start for {PATIENCE_S['machine']:g} s: all {places} that may start at a time "
                    "on this machine (concurrent_starts) hang"
                ) from error
            passed.callback(Gate.leave, place)
            yield
            warm.touch()

    def _gate(self, name: str, places: int, kind: str) -> Gate:
        known = self._gates.get((name, places))
        if known is None:
            known = self._gates[name, places] = Gate(self._folder, name, places, PATIENCE_S[kind])
        return known


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, StartGates]] = weakref.WeakKeyDictionary()


def _is_warm(file: Path) -> bool:
    try:
        age = time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return False
    return age < min(WARM_S, time.clock_gettime(time.CLOCK_BOOTTIME))
