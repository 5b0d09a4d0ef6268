# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of a fleet for :mod:`.fleet_soak`: killed processes, full disks, cut addresses, stopped agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.fleet import UP_S, FrontProcess
from nemo_gym_prorl.processes import ProcessMark, process_command_line, process_variables
from nemo_gym_prorl.sandbox.supervisor import state_dir
from tests.deployment.raylets import Raylets


KEY = "fleet-soak"
SHORT_S, LONG_S = 2.0, 20.0
"""Lengths of partitions; Ray gives a node up after 3 to 5 seconds."""
STOPPED_S, FULL_S = 25.0, 8.0
GONE_S = 20.0
"""Bound on the time from a raylet's death until all its processes are gone."""
SERVERS = {"prorl_code": "environment", "policy_model": "model", "prorl_code_agent": "agent"}
COMMANDS = {
    "ray::NodeActor": "actor",
    "processes.py PRORL_GYM_DEPLOYMENT": "reaper",
    "restarter.py": "restarter",
    "supervisor import server": "supervisor",
    "/gym env start": "gym",
}
FAULTS = {
    **{"sandbox": 6, "environment": 3, "model": 3, "agent": 3, "supervisor": 3, "restarter": 1},
    **{"raylet": 2, "actor": 1, "reaper": 1, "gym": 1},
    **{"full": 2, "cut_short": 2, "cut_long": 1, "stopped": 1, "front": 0.25},
}
"""Faults by weight. A killed front ends all deployments, which take minutes to start again."""


@dataclass
class Place:
    """Address and disk of one place in the fleet, and the id of its current node."""

    number: int
    folder: Path
    node: str = ""
    is_struck: bool = False

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def state(self) -> Path:
        return self.folder / "s"

    async def prepare(self, disk_mib: int) -> None:
        """Mount the disk and add the address."""
        self.folder.mkdir(mode=0o711)
        await run(f"mount -t tmpfs -o size={disk_mib}m,mode=711 tmpfs {self.folder}")
        await run(f"ip addr add {self.address}/32 dev lo")

    def running(self) -> dict[int, str]:
        """Return processes outside of sandboxes. A supervisor has no variables, but its command names the folder."""
        found = ProcessMark("PRORL_STATE", str(self.state)).processes()
        for pid in state_dir.process_ids():
            with contextlib.suppress(OSError):
                words = process_command_line(pid)
                if f"{self.state}/".encode() in words:
                    found[pid] = words.replace(b"\0", b" ").decode(errors="replace")
        return found

    def victims(self, kind: str) -> list[int]:
        """Return processes of a kind."""
        if kind == "sandbox":
            return [space.init for owner in self.state.glob("s-*") for space in state_dir.pid_namespaces_of(owner)]
        return [pid for pid, command in self.running().items() if _kind_of(pid, command) == kind]


def _kind_of(pid: int, command: str) -> str | None:
    for part, kind in COMMANDS.items():
        if part in command:
            return kind
    if command.endswith("app.py") and not command.startswith("/bin/bash"):
        with contextlib.suppress(OSError):
            for variable in process_variables(pid):
                name, _, value = variable.decode(errors="replace").partition("=")
                if name == "NEMO_GYM_CONFIG_PATH":
                    return SERVERS.get(value)
    return None


class Storm:
    """Fault injection for the places of a fleet; ``seed`` fixes the order, and ``note`` records errors."""

    def __init__(
        self, cluster: Raylets, places: list[Place], front: FrontProcess, seed: int, note: Callable[[str], None]
    ) -> None:
        self._cluster, self._places, self._front, self._note = cluster, places, front, note
        self._rng = random.Random(seed)
        self._one_order = asyncio.Lock()
        self._striking: set[asyncio.Task[None]] = set()
        self.done: Counter[str] = Counter()

    async def begin(self) -> None:
        """Add a node at each place."""
        for place in self._places:
            await self._add(place)
        await self._all_up()

    async def rage(self, every_s: float) -> None:
        """Inject faults at random until cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            (fault,) = self._rng.choices([*FAULTS], [*FAULTS.values()])
            await self._strike(fault)

    async def each(self, faults: list[str], every_s: float) -> None:
        """Inject each fault once, and wait after each until all nodes are up."""
        for fault in faults:
            await asyncio.sleep(every_s)
            while not await self._strike(fault):
                await asyncio.sleep(0.5)
            await self.settle()

    async def settle(self) -> None:
        """Wait for the end of all faults, and until all nodes are up."""
        await asyncio.gather(*self._striking)
        await self._all_up()

    async def _add(self, place: Place) -> None:
        for folder in (place.state, place.folder / "t"):
            folder.mkdir(mode=0o711, exist_ok=True)
        about = {"ADDRESS": place.address, "PRORL_STATE": str(place.state), "TMPDIR": str(place.folder / "t")}
        async with self._one_order:
            place.node = await self._cluster.add(**about)

    async def _usable(self) -> set[str]:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            url, headers = f"{self._front.url}/v1/nodes", {"Authorization": f"Bearer {KEY}"}
            async with aiohttp.ClientSession(headers=headers) as http, http.get(url) as answer:
                return {view["node"] for view in await answer.json() if view["usable"] and view["run_slots"]}
        return set()

    async def _all_up(self) -> None:
        async with asyncio.timeout(UP_S):
            while not {place.node for place in self._places} <= await self._usable():
                await asyncio.sleep(1)

    async def _strike(self, fault: str) -> bool:
        """Begin a fault at a node that is up; return whether there was such a node."""
        usable = await self._usable()
        able = [place for place in self._places if place.node in usable and not place.is_struck]
        self._rng.shuffle(able)
        for place in able:
            pids = await asyncio.to_thread(place.victims, "agent" if fault == "stopped" else fault)
            if (work := self._fault(fault, place, pids)) is not None:
                self.done[fault] += 1
                print(f"{time.strftime('%X')} {fault} at {place.number} ({place.node})", flush=True)
                self._striking.add(asyncio.create_task(self._struck(place, work)))
                return True
        return False

    def _fault(self, fault: str, place: Place, pids: list[int]) -> Awaitable[None] | None:
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "raylet": lambda: self._replace(place),
            "full": lambda: self._fill(place),
            "cut_short": lambda: self._cut(place, SHORT_S),
            "cut_long": lambda: self._cut(place, LONG_S),
            "front": self._restart_front,
        }
        if fault in ways:
            return ways[fault]()
        if not pids:
            return None
        if fault == "stopped":
            return self._stop(pids)
        return asyncio.to_thread(_signal, self._rng.choice(pids), signal.SIGKILL)

    async def _struck(self, place: Place, work: Awaitable[None]) -> None:
        place.is_struck = True
        try:
            await work
        except Exception as error:
            self._note(f"the fault at {place.number} failed: {error!r}")
        finally:
            place.is_struck = False

    async def _replace(self, place: Place) -> None:
        async with self._one_order:
            await self._cluster.kill(place.node)
        started = time.monotonic()
        while left := await asyncio.to_thread(place.running):
            if time.monotonic() - started > GONE_S:
                self._note(f"processes of a dead node live on: {left}")
                break
            await asyncio.sleep(0.1)
        await self._add(place)

    async def _fill(self, place: Place) -> None:
        filler = place.folder / "filler"
        await asyncio.to_thread(_write_until_full, filler)
        await asyncio.sleep(FULL_S)
        filler.unlink()

    async def _cut(self, place: Place, seconds: float) -> None:
        await run(f"ip addr del {place.address}/32 dev lo")
        await asyncio.sleep(seconds)
        await run(f"ip addr add {place.address}/32 dev lo")
        if seconds >= LONG_S:  # Ray has given the node up, and the node must learn that
            await self._replace(place)

    async def _restart_front(self) -> None:
        await self._front.end(signal.SIGKILL)
        await self._front.start()

    async def _stop(self, pids: list[int]) -> None:
        for number, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.0)):
            for pid in pids:
                _signal(pid, number)
            await asyncio.sleep(pause_s)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _write_until_full(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


async def run(words: str) -> None:
    """Run a command; raises RuntimeError for another status than 0."""
    process = await asyncio.create_subprocess_exec(*words.split())
    if await process.wait():
        raise RuntimeError(f"{words}: status {process.returncode}")
