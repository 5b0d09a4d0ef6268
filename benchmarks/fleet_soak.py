# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a fleet under a storm: whatever dies, each has one outcome, none a wrong reward, and nothing is left.

``prorl serve --ray`` over nodes, each a raylet with a deployment, an address and a disk of its own on one machine;
HumanEval rollouts in real sandboxes, whose scripted policy is right, wrong or cheats, or whose rows are broken. Each
row knows its truth: its reward, and the verdict that its like had before the storm.

While they run, at random: SIGKILL of the front, which begins again with its journal, of raylets, of the actor, the
reaper, Gym and the restarters that keep a deployment, of agents, environment and model servers, of supervisors of
sandboxes and of single sandboxes; a disk is full; a node's address is nobody's any more, so that packets to it vanish
while it goes on, for shorter and for longer than Ray waits; an agent is stopped, and answers late.

A rollout may fail with what was done to its node, never with a reward. What was lost is told in turns: those that the
policy was asked for and that are in no scored rollout.

Run with ``python -m benchmarks.fleet_soak [--quick] [--rollouts N] [--within S] [--nodes N] [--faults NAME,NAME]
[--every S] [--seed N]`` as root, since it has a network and mounts of its own, from a folder that is not below /tmp.
Quick takes 2 nodes and 60 rollouts; where faults are named, each of them strikes once, one after the other, and
nothing is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from benchmarks import processes
from benchmarks.fleet import AGENT, FrontProcess, front
from benchmarks.raylets import Raylets, raylets
from benchmarks.report import Figure, publish
from nemo_gym_prorl import proc_files
from nemo_gym_prorl.demo_scripts import create, script_for
from nemo_gym_prorl.failures import FailureKind, InfrastructureError, Origin
from nemo_gym_prorl.processes import ProcessMark
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.fleet.dispatcher import SURVEY_S
from nemo_gym_prorl.rollout.schemas import JobView
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.scripted.server import create_app
from nemo_gym_prorl.scripted.turns import call, turn
from nemo_gym_prorl.serving.embedded import served
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems


NODES, ROLLOUTS, EVERY_S = 8, 10_000, 8.0
QUICK_NODES, QUICK_ROLLOUTS = 2, 60
SLOTS = 4
"""Of RUN, of a node."""
DISK_MIB = 256
SHORT_S, LONG_S = 2.0, 20.0
"""Of partitions: Ray gives a node up after 3 to 5 seconds."""
STOPPED_S, FULL_S = 25.0, 8.0
GONE_S = 20.0
"""In which all that a dead node ran must be gone."""
UP_S = 900.0
KEY = "fleet-soak"
INSIDE = "PRORL_SOAK"
"""Set where this is the process that has a network of its own."""
OWN = (Path("/tmp"), Path("/dev/shm"))
"""Of which it has its own, too."""

KINDS = {
    **{"right": 52, "reference": 8, "repair": 6},
    **{"stub": 16, "forge_tests": 8, "text_only": 4},
    **{"refused": 3, "mute": 3},
}
"""What rollouts do, and how often."""
REWARDS = {
    **dict.fromkeys(("right", "reference", "repair"), 1.0),
    **dict.fromkeys(("stub", "forge_tests", "text_only"), 0.0),
}
"""Others have none."""
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
"""What is done to nodes, and how often; with the front all deployments end, which takes minutes to mend here."""


def row_of(number: int, kind: str, seed: int) -> dict[str, Any]:
    """The row of a rollout; its turns take some seconds, else there would be little to kill."""
    rng = random.Random(f"{seed}-{number}")
    problem = rng.choice([*problems().values()])
    if kind == "right":
        check = call("bash", command=f"python3 -c 'import solution; print(solution.{problem.entry_point})'")
        turns = [*(turn("Next.", each) for each in (create(problem.reference_source), check, call("submit")))]
        script: dict[str, Any] = {"turns": [*turns, turn("Submitted.")]}
    else:
        script = dict(script_for(problem, kind if kind in REWARDS else "stub"))
    script["turns"] = [{**each, "latency_s": rng.uniform(0.3, 2.5)} for each in script["turns"]]
    row = humaneval_row(problem, script)
    if kind == "refused":
        row["verifier_metadata"] = {}
    if kind == "mute":  # the policy refuses to answer
        row["responses_create_params"]["metadata"]["script"] = "{"
    return row


@dataclass
class Book:
    """What was accepted, what came of it, and whatever is wrong with that."""

    kinds: dict[str, str] = field(default_factory=dict)
    """By id."""
    ended: dict[str, JobView] = field(default_factory=dict)
    verdicts: dict[str, Any] = field(default_factory=dict)
    """By kind, of the first, which are before the storm."""
    wrong: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Of rollouts that should have had a reward."""
    again: Counter[str] = field(default_factory=Counter)
    """Of attempts, of all."""

    def note(self, what: str) -> None:
        """Something is wrong."""
        self.wrong.append(what)
        print(f"WRONG: {what}", flush=True)

    def take(self, job: JobView) -> None:
        """An outcome, as the log tells it."""
        kind = self.kinds.get(job.id)
        if kind is None or job.id in self.ended:
            self.note(f"{job.id} was not submitted, or has another outcome already: {self.ended.get(job.id)}, {job}")
            return
        self.ended[job.id] = job.model_copy(update={"result": None, "steps": None, "tokens": None})
        right = REWARDS.get(kind)
        if right is not None:
            self.again.update(failure.kind.value for failure in job.failed_attempts)
        if job.reward is not None:
            verdict = (job.result or {}).get("verdict")
            if job.reward != right or verdict != self.verdicts.setdefault(kind, verdict):
                self.note(f"{job.id} ({kind}) has reward {job.reward} and verdict {verdict!r}: {job.result}")
        elif job.failure is None or not job.masked:
            self.note(f"{job.id} ({kind}) has neither a reward nor a failure: {job}")
        elif job.failure.origin is Origin.INFRASTRUCTURE and right is not None:
            self.failures[job.failure.kind.value] += 1
        elif right is not None or job.failure.kind is not FailureKind.BAD_ROW:
            self.note(f"{job.id} ({kind}) is blamed for what was done to it: {job.failure}")


class Policy:
    """The scripted policy, which counts the turns that it gave."""

    def __init__(self) -> None:
        self._app = create_app()
        self.turns = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["path"].endswith("completions"):
                self.turns += message["status"] == 200
            await send(message)

        await self._app(scope, receive, told)


@dataclass
class Place:
    """Where one node is, and then the next."""

    number: int
    folder: Path
    node: str = ""
    struck: bool = False
    """Something is being done to it."""

    @property
    def address(self) -> str:
        """Its own."""
        return f"10.77.0.{self.number + 1}"

    @property
    def state(self) -> Path:
        """Of its sandboxes."""
        return self.folder / "s"

    def running(self) -> dict[int, str]:
        """What runs there, outside of sandboxes. Their supervisor has no variables, but is told its folder."""
        found = ProcessMark("PRORL_STATE", str(self.state)).processes()
        for pid in state_dir.process_ids():
            with contextlib.suppress(OSError):
                words = proc_files.command_line(pid)
                if f"{self.state}/".encode() in words:
                    found[pid] = words.replace(b"\0", b" ").decode(errors="replace")
        return found

    def victims(self, kind: str) -> list[int]:
        """Processes of a kind."""
        if kind == "sandbox":
            return [space.init for owner in self.state.glob("s-*") for space in state_dir.spaces_of(owner)]
        found = defaultdict(list)
        for pid, command in self.running().items():
            found[_kind_of(pid, command)].append(pid)
        return found[kind]


def _kind_of(pid: int, command: str) -> str | None:
    for part, kind in COMMANDS.items():
        if part in command:
            return kind
    if command.endswith("app.py") and not command.startswith("/bin/bash"):
        with contextlib.suppress(OSError):
            for variable in proc_files.variables(pid):
                name, _, value = variable.decode(errors="replace").partition("=")
                if name == "NEMO_GYM_CONFIG_PATH":
                    return SERVERS.get(value)
    return None


class Storm:
    """What is done to nodes."""

    def __init__(self, cluster: Raylets, places: list[Place], book: Book, front: FrontProcess, seed: int) -> None:
        self._cluster, self.places, self._book, self._front = cluster, places, book, front
        self._rng = random.Random(seed)
        self._one = asyncio.Lock()
        """The cluster takes one order at a time."""
        self.done: Counter[str] = Counter()
        self.slowest_end_s = 0.0
        self._striking: set[asyncio.Task[None]] = set()
        self._whole = asyncio.current_task()
        others: dict[str, Callable[[Place], Awaitable[None]]] = {
            "raylet": self._replace,
            "full": self._full,
            "cut_short": lambda place: self._cut(place, SHORT_S),
            "cut_long": lambda place: self._cut(place, LONG_S),
            "stopped": self._stopped,
            "front": lambda _: self._restart(),
        }
        self._ways = others

    async def add(self, place: Place) -> None:
        """A node."""
        for folder in (place.state, place.folder / "t"):
            folder.mkdir(mode=0o711, exist_ok=True)
        about = {"ADDRESS": place.address, "PRORL_STATE": str(place.state), "TMPDIR": str(place.folder / "t")}
        async with self._one:
            place.node = await self._cluster.add(**about)

    async def usable(self) -> set[str]:
        """The nodes that the front uses."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            headers = {"Authorization": f"Bearer {KEY}"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.get(f"{self._front.url}/v1/nodes") as answer,
            ):
                return {view["node"] for view in await answer.json() if view["usable"] and view["run_slots"]}
        return set()

    async def all_up(self) -> None:
        """Wait until the front uses every node."""
        async with asyncio.timeout(UP_S):
            while not {place.node for place in self.places} <= await self.usable():  # noqa: ASYNC110
                await asyncio.sleep(1)

    async def strike(self, fault: str) -> bool:
        """Do something to a node that is up, as a task; whether there was anything to do it to."""
        usable = await self.usable()
        able = [place for place in self.places if place.node in usable and not place.struck]
        self._rng.shuffle(able)
        for place in able:
            if fault in self._ways:
                work = self._ways[fault](place)
            elif pids := await asyncio.to_thread(place.victims, fault):
                work = _kill(self._rng.choice(pids))
            else:
                continue
            self.done[fault] += 1
            print(f"{time.strftime('%X')} {fault} at {place.number} ({place.node})", flush=True)
            task = asyncio.create_task(self._struck(place, work))
            self._striking.add(task)
            return True
        return False

    async def rage(self, every_s: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            (fault,) = self._rng.choices([*FAULTS], [*FAULTS.values()])
            await self.strike(fault)

    async def over(self) -> None:
        """Wait for what is being done."""
        await asyncio.gather(*self._striking)

    async def _struck(self, place: Place, work: Awaitable[None]) -> None:
        place.struck = True
        try:
            await work
        except Exception as error:  # the storm is broken, and nothing it waits for will come
            print(f"at {place.number}: {error!r}", flush=True)
            assert self._whole is not None, "it is made within"
            self._whole.cancel()
            raise
        finally:
            place.struck = False

    async def _replace(self, place: Place) -> None:
        async with self._one:
            await self._cluster.kill(place.node)
        started = time.monotonic()
        while left := await asyncio.to_thread(place.running):
            if time.monotonic() - started > GONE_S:
                self._book.note(f"processes of a dead node live on: {left}")
                break
            await asyncio.sleep(0.1)
        self.slowest_end_s = max(self.slowest_end_s, time.monotonic() - started)
        await self.add(place)

    async def _full(self, place: Place) -> None:
        await asyncio.to_thread(_fill, place.folder / "filler")
        await asyncio.sleep(FULL_S)
        (place.folder / "filler").unlink()

    async def _cut(self, place: Place, seconds: float) -> None:
        await _call(f"ip addr del {place.address}/32 dev lo")
        await asyncio.sleep(seconds)
        await _call(f"ip addr add {place.address}/32 dev lo")
        if seconds >= LONG_S:  # Ray has given it up, and it must find that out
            await self._replace(place)

    async def _restart(self) -> None:
        await self._front.end(signal.SIGKILL)
        await self._front.start()

    async def _stopped(self, place: Place) -> None:
        pids = await asyncio.to_thread(place.victims, "agent")
        for number, pause in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.0)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(pause)


def _note_end(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # somebody else's
        os.waitpid(pid, os.WNOHANG)


async def _reap() -> None:
    """Take note of the ends of those who lost their parents, as an init does: what nobody has taken note of keeps the
    namespace alive that it was in, and so a sandbox."""
    seen: set[int] = set()
    while True:
        dead = {pid for pid in processes.below(os.getpid()) if not _lives(pid)}
        for pid in dead & seen:  # our own are taken note of at once
            _note_end(pid)
        seen = dead
        await asyncio.sleep(1)


async def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


async def _call(words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words.split())
    if await process.wait():
        raise RuntimeError(f"{words}: status {process.returncode}")


async def _submit(client: RolloutClient, book: Book, name: str, kind: str, row: dict[str, Any]) -> None:
    book.kinds[name] = kind
    while True:
        try:
            await client.submit(row, id=name, group=f"{kind}-{len(book.kinds) // 8}")
            return
        except (ApiError, InfrastructureError) as error:
            print(f"front: {error}", flush=True)
            await asyncio.sleep(1)


async def _follow(client: RolloutClient, book: Book, told: Callable[[], None]) -> None:
    cursor = "0"
    while True:
        try:
            page = await client.ended(cursor, wait=30, results=True)
        except InfrastructureError:  # the front was killed
            await asyncio.sleep(1)
            continue
        cursor = page.cursor
        for job in page.rollouts:
            book.take(job)
            told()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def world(places: list[Place]) -> set[str]:
    """Whatever could be left."""
    # Whoever lost its parent is this process's child, see processes.subreaper; sandboxes have no variables of ours.
    found = {f"process {pid}" for pid in processes.below(os.getpid()) - {os.getpid()} if _lives(pid)}
    paths = [*(path for folder in OWN for path in folder.iterdir())]
    paths += [path for place in places for path in place.folder.glob("*/*")]
    # Gym imports wandb, which has folders that it removes at its end, unless that is SIGKILL.
    found |= {f"{path}" for path in paths if "wandb" not in path.name}
    found |= {f"mount {line.split()[1]}" for line in Path("/proc/self/mounts").read_text().splitlines()}
    found |= {f"cgroup {path}" for path in Path("/sys/fs/cgroup").rglob("*prorl*")}
    for table in ("unix", "tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if table == "unix" and len(words) > 7:
                found.add(f"socket {words[7]}")
            elif table != "unix" and words[3] == "0A":
                found.add(f"port {words[1]}")
    return found


async def soak(options: argparse.Namespace, folder: Path) -> list[Figure]:
    """The whole of it."""
    faults = options.faults.split(",") if options.faults else []
    book, policy = Book(), Policy()
    places = [Place(number, folder / str(number)) for number in range(options.nodes)]
    for place in places:
        place.folder.mkdir(mode=0o711)
        await _call(f"mount -t tmpfs -o size={DISK_MIB}m,mode=711 tmpfs {place.folder}")
        await _call(f"ip addr add {place.address}/32 dev lo")
    before = await asyncio.to_thread(world, places)
    reaping = asyncio.create_task(_reap())
    words = [f"--journal={folder / 'journal'}"]
    words += [f"{AGENT}.stages.{stage}={SLOTS}" for stage in ("init", "ready", "run", "eval")]
    async with (
        served(policy) as policy_url,
        raylets(0) as cluster,
        front(cluster.address, f"{policy_url}/v1", folder / "front.log", KEY, *words) as process,
        RolloutClient(process.url, KEY) as client,
    ):
        storm = Storm(cluster, places, book, process, options.seed)
        for place in places:
            await storm.add(place)
        await storm.all_up()
        gate = asyncio.Semaphore(options.nodes * SLOTS * 3)
        following = asyncio.create_task(_follow(client, book, gate.release))

        async def run(name: str, kinds: Iterable[str]) -> None:
            for number, kind in enumerate(kinds):
                await gate.acquire()
                if following.done():
                    following.result()
                await _submit(client, book, f"{name}-{number}", kind, row_of(number, kind, options.seed))

        async def end() -> None:
            while len(book.ended) < len(book.kinds):
                if following.done():
                    following.result()
                await asyncio.sleep(0.2)

        used, started = processes.core_seconds(os.getpid()), time.monotonic()
        calm = [*KINDS] * (1 if faults else 4)
        await run("calm", calm)
        await end()
        used = (processes.core_seconds(os.getpid()) - used) / len(calm)
        print(f"calm: {used:.2f} core-seconds a rollout; {book.verdicts}; {book.failures}", flush=True)

        started = time.monotonic()
        rng = random.Random(options.seed)
        raging = asyncio.create_task(_faults(storm, faults, options))
        try:
            kinds = _drawn(rng, options.rollouts, lambda: bool(faults) and not raging.done())
            await run("storm", takewhile(lambda _: time.monotonic() < started + options.within, kinds))
        finally:
            raging.cancel()
            await asyncio.gather(raging, return_exceptions=True)
        await storm.over()
        await end()
        seconds = time.monotonic() - started
        await storm.all_up()
        await run("after", calm)
        await end()
        following.cancel()
        _check(book, [job async for job in client.every()], calm)
        await asyncio.sleep(2 * SURVEY_S)  # nodes have said how they are since
        boxes = [str(box) for place in places for box in place.state.glob("s-*/b-*")]
        if (sessions := (await client.status()).sessions) or boxes:
            locks = await asyncio.to_thread(Path("/proc/locks").read_text)
            book.note(f"{sessions} sessions and {boxes} while nothing runs; {locks}")
    print((folder / "front.log").read_text(), flush=True)
    reaping.cancel()
    left = await asyncio.to_thread(world, places) - before
    for one in left:
        book.note(f"left: {one}")
    for place in places:
        await _call(f"umount --lazy {place.folder}")
    return _figures(book, storm, policy, options, seconds, used, len(left))


def _drawn(rng: random.Random, count: int, longer: Callable[[], bool]) -> Iterator[str]:
    """Kinds of rollouts: so many, and then as long as there are to be any."""
    while count > 0 or longer():
        count -= 1
        yield rng.choices([*KINDS], [*KINDS.values()])[0]


async def _faults(storm: Storm, faults: list[str], options: argparse.Namespace) -> None:
    """The storm, or each of some faults again and again."""
    if not faults:
        await storm.rage(options.every)
    for fault in faults:
        await asyncio.sleep(options.every)
        while not await storm.strike(fault):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        await storm.over()
        await storm.all_up()


def _check(book: Book, listed: list[JobView], calm: list[str]) -> None:
    """That the front says in the end what it said when each ended, and that no harm lasts."""
    for job in listed:
        ended = book.ended.get(job.id)
        if ended is None or (ended.state, ended.reward) != (job.state, job.reward):
            book.note(f"{job.id} ended as {ended}, and is listed as {job}")
    if missing := book.kinds.keys() - book.ended.keys():
        book.note(f"without an outcome: {sorted(missing)}")
    for number, kind in enumerate(calm):
        job = book.ended[f"after-{number}"]
        if job.reward != REWARDS.get(kind) or (job.failed_attempts and kind in REWARDS):
            book.note(f"after the storm: {job}")


def _figures(
    book: Book,
    storm: Storm,
    policy: Policy,
    options: argparse.Namespace,
    seconds: float,
    used: float,
    left: int,
) -> list[Figure]:
    done = ", ".join(f"{count} {fault}" for fault, count in sorted(storm.done.items()))
    scored = sum(job.turns for job in book.ended.values() if job.reward is not None)
    print(f"attempts that failed: {dict(book.again)}; rollouts: {dict(book.failures)}", flush=True)
    accepted = len(book.kinds)
    return [
        Figure(f"rollouts with an outcome, of {accepted}, {options.nodes} nodes", len(book.ended), "",
               goal=f">= {accepted}"),
        Figure("wrong rewards, second outcomes and whatever else is wrong", len(book.wrong) - left, "", goal="<= 0"),
        Figure("processes, sockets, files, mounts and control groups left", left, "", goal="<= 0"),
        Figure(f"faults: {done}", sum(storm.done.values()), ""),
        Figure("rollouts that failed by what was done to them", sum(book.failures.values()) / accepted, "share"),
        Figure("turns that are in no scored rollout", 1 - scored / policy.turns, "share"),
        Figure("until all that a dead node ran was gone, at most", storm.slowest_end_s, "s", goal=f"<= {GONE_S:g}"),
        Figure("rollouts a second in the storm", len(book.kinds) / seconds, "1/s"),
        Figure("a rollout without a storm, all of it", used, "core-s"),
    ]  # fmt: skip


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rollouts", type=int)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds after which no more are submitted")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--faults", help="only these, one after the other")
    parser.add_argument("--every", type=float, default=EVERY_S, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.nodes = options.nodes or (QUICK_NODES if options.quick else NODES)
    options.rollouts = options.rollouts or (QUICK_ROLLOUTS if options.quick else ROLLOUTS)
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", *sys.orig_argv])
    processes.subreaper()
    for folder in OWN:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder], check=True)
    for words in (("link", "set", "lo", "up"), ("route", "add", "10.77.0.0/24", "dev", "lo")):
        subprocess.run(["ip", *words], check=True)
    folder = Path(tempfile.mkdtemp(prefix="prorl-soak-"))
    folder.chmod(0o711)
    figures = asyncio.run(soak(options, folder))
    shutil.rmtree(folder)  # unless there was an error
    publish("fleet_soak", figures, packages=("nemo-gym", "ray"), quick=options.quick or bool(options.faults))


if __name__ == "__main__":
    main()
