# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Check a fleet under a storm of faults: one outcome for each rollout, no wrong reward, nothing left behind.

``prorl serve --ray`` runs over nodes, each a raylet with a deployment, an address and a disk of its own. HumanEval
rollouts have a scripted policy that is right, wrong or cheats, or a broken row, so that each knows its reward. Faults
strike at random; with ``--faults`` the named ones strike once, one after another. A rollout may fail as
infrastructure, never with a wrong reward. The exit status is 1 if anything is wrong.
Run ``python -m tests.deployment.fleet_soak`` as root: it has a network, ``/tmp`` and ``/dev/shm`` of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.fleet import AGENT, front
from nemo_gym_prorl.cli.scripted.humaneval import script_for
from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.failures import FailureKind, InfrastructureError, Origin
from nemo_gym_prorl.fleet.dispatcher import SURVEY_S
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.deployment.fleet_faults import FAULTS, KEY, Place, Storm, run
from tests.deployment.raylets import raylets


SLOTS, DISK_MIB = 4, 256
"""Slots of each stage on a node, and the size of the node's disk."""
INSIDE = "PRORL_SOAK"
"""The process's own control group, or nothing; set in the process that has a network of its own."""
OWN = (Path("/tmp"), Path("/dev/shm"))
KINDS = {"reference": 60, "repair": 6, "stub": 16, "forge_tests": 8, "text_only": 4, "refused": 3, "mute": 3}
REWARDS = {"reference": 1.0, "repair": 1.0, "stub": 0.0, "forge_tests": 0.0, "text_only": 0.0}
"""Rewards by kind of rollout; other kinds have none."""


def row_of(number: int, kind: str, seed: int) -> dict[str, Any]:
    """Return the row of a rollout, whose turns take a few seconds, so that faults meet it."""
    rng = random.Random(f"{seed}-{number}")
    problem = rng.choice([*problems().values()])
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
    """Accepted rollouts, their outcomes, and errors in those.

    Attributes:
        kinds, ended: kinds of accepted rollouts, and outcomes, by id.
        failed: rollouts that failed as infrastructure, by kind of failure.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    ended: dict[str, JobView] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, message: str) -> None:
        """Record an error."""
        self.wrong.append(message)
        print(f"WRONG: {message}", flush=True)

    def take(self, job: JobView) -> None:
        """Check an outcome."""
        kind = self.kinds.get(job.id)
        if kind is None or job.id in self.ended:
            self.note(f"{job.id} was not submitted, or has another outcome already: {self.ended.get(job.id)}, {job}")
            return
        self.ended[job.id] = job.model_copy(update={"result": None, "steps": None, "tokens": None})
        right = REWARDS.get(kind)
        if job.reward is not None:
            if job.reward != right:
                self.note(f"{job.id} ({kind}) has reward {job.reward}: {job.result}")
        elif job.failure is None or not job.masked:
            self.note(f"{job.id} ({kind}) has neither a reward nor a failure: {job}")
        elif job.failure.origin is Origin.INFRASTRUCTURE and right is not None:
            self.failed[job.failure.kind.value] += 1
        elif right is not None or job.failure.kind is not FailureKind.BAD_ROW:
            self.note(f"{job.id} ({kind}) is blamed for a fault: {job.failure}")

    async def follow(self, client: RolloutClient, gate: asyncio.Semaphore) -> None:
        """Check outcomes as the front logs them."""
        cursor = "0"
        while True:
            try:
                page = await client.ended(cursor, wait=30, results=True)
            except InfrastructureError:  # the front was killed
                await asyncio.sleep(1)
                continue
            cursor = page.cursor
            for job in page.rollouts:
                self.take(job)
                gate.release()

    async def submit(self, client: RolloutClient, name: str, kind: str, row: dict[str, Any]) -> None:
        """Submit until the front accepts."""
        self.kinds[name] = kind
        while True:
            try:
                await client.submit(row, id=name, group=f"{kind}-{len(self.kinds) // 8}")
                return
            except (ApiError, InfrastructureError) as error:
                print(f"front: {error}", flush=True)
                await asyncio.sleep(1)


async def soak(options: argparse.Namespace, folder: Path) -> Book:
    """Run rollouts before, in and after the storm."""
    book, faults = Book(), options.faults.split(",") if options.faults else []
    places = [Place(number, folder / str(number)) for number in range(options.nodes)]
    for place in places:
        await place.prepare(DISK_MIB)
    before, reaping = await asyncio.to_thread(leftovers, places), asyncio.create_task(reap())
    words = [f"--journal={folder / 'journal'}"]
    words += [f"{AGENT}.stages.{stage}={SLOTS}" for stage in ("init", "ready", "run", "eval")]
    async with (
        serve_scripted(ScriptedConfig()) as policy,
        raylets(0) as cluster,
        front(cluster.address, policy, folder / "front.log", KEY, *words) as process,
        RolloutClient(process.url, KEY) as client,
    ):
        storm = Storm(cluster, places, process, options.seed, book.note)
        await storm.begin()
        await _play(options, faults, storm, client, book)
        listed = {job.id: (job.state, job.reward) async for job in client.every()}
        if listed != {name: (job.state, job.reward) for name, job in book.ended.items()}:
            book.note("the front lists other outcomes than it logged")
        await asyncio.sleep(2 * SURVEY_S)  # nodes have reported since
        if sessions := (await client.status()).sessions:
            book.note(f"{sessions} sessions while nothing runs")
        print(f"faults: {dict(storm.done)}", flush=True)
    reaping.cancel()
    for one in await asyncio.to_thread(leftovers, places) - before:
        book.note(f"left: {one}")
    for place in places:
        await run(f"umount --lazy {place.folder}")
    return book


async def _play(options: Any, faults: list[str], storm: Storm, client: RolloutClient, book: Book) -> None:
    gate = asyncio.Semaphore(options.nodes * SLOTS * 3)
    following, rng = asyncio.create_task(book.follow(client, gate)), random.Random(options.seed)

    async def play(name: str, kinds: Iterable[str]) -> None:
        for number, kind in enumerate(kinds):
            await gate.acquire()
            await book.submit(client, f"{name}-{number}", kind, row_of(number, kind, options.seed))
        while len(book.ended) < len(book.kinds):
            if following.done():
                following.result()
            await asyncio.sleep(0.2)

    await play("calm", KINDS)
    raging = asyncio.create_task(storm.each(faults, options.every) if faults else storm.rage(options.every))
    await play("storm", rng.choices([*KINDS], [*KINDS.values()], k=options.rollouts))
    if not faults:
        raging.cancel()
    await asyncio.gather(raging, return_exceptions=True)
    await storm.settle()
    await play("after", KINDS)
    following.cancel()
    for number, kind in enumerate(KINDS):
        job = book.ended[f"after-{number}"]
        if job.reward != REWARDS.get(kind) or (job.failed_attempts and kind in REWARDS):
            book.note(f"after the storm: {job}")


async def reap() -> None:
    """Reap orphans, as an init does: a zombie keeps its namespace alive, and so a sandbox."""
    seen: set[int] = set()
    while True:
        dead = {pid for pid in processes.below(os.getpid()) if not processes.is_alive(pid)}
        for pid in dead & seen:  # asyncio reaps its own at once
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - does not wait
        seen = dead
        await asyncio.sleep(1)


def leftovers(places: list[Place]) -> set[str]:
    """Return processes, files, mounts, control groups and sockets."""
    pids = processes.below(os.getpid()) - {os.getpid()}
    found = {f"process {pid}" for pid in pids if processes.is_alive(pid)}
    paths = [path for folder in OWN for path in folder.iterdir()]
    paths += [path for place in places for path in place.folder.glob("*/*")]
    # SIGKILL leaves the folders of wandb, which Gym imports.
    found |= {f"{path}" for path in paths if "wandb" not in path.name}
    found |= {f"mount {line.split()[1]}" for line in Path("/proc/self/mounts").read_text().splitlines()}
    found |= {f"cgroup {path}" for path in Path(os.environ[INSIDE] or "/nowhere").rglob("prorl-s-*")}
    for table in ("unix", "tcp", "tcp6"):
        for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if table == "unix" and len(words) > 7:
                found.add(f"socket {words[7]}")
            elif table != "unix" and words[3] == "0A":
                found.add(f"port {words[1]}")
    return found


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=8.0, help="mean seconds between faults")
    parser.add_argument("--faults", help=f"only these, one after another: {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if Path(__file__).is_relative_to("/tmp"):
        parser.error("the check has a /tmp of its own: run it from a clone that is not below /tmp")
    if INSIDE not in os.environ:
        os.environ[INSIDE] = str(processes.own_cgroup() or "")
        os.execvp("unshare", ["unshare", "--net", "--mount", *sys.orig_argv])
    processes.subreaper()
    commands = [f"mount -t tmpfs -o mode=1777 tmpfs {path}" for path in OWN]
    for command in (*commands, "ip link set lo up", "ip route add 10.77.0.0/24 dev lo"):
        subprocess.run(command.split(), check=True)
    folder = Path(tempfile.mkdtemp(prefix="prorl-soak-"))
    folder.chmod(0o711)
    book = asyncio.run(soak(options, folder))
    print(f"{len(book.ended)} of {len(book.kinds)} rollouts have an outcome; failed: {dict(book.failed)}")
    print(f"{len(book.wrong)} things are wrong", *book.wrong, sep="\n")
    print((folder / "front.log").read_text() if book.wrong else "")
    processes.leave_cgroup(os.environ[INSIDE])
    return int(bool(book.wrong) or len(book.ended) != len(book.kinds))


if __name__ == "__main__":
    sys.exit(main())
