# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""All four families as one mixture: `environments/prorl_mixture` as Gym's command line starts it, a scripted policy.

First what it says: of each family the rows solved and the rows left alone, 16 in flight. Then 400 rows of all at 32 in
flight, with shares that differ; shares are told of the time in which rows of every family wait, since only then they
bind. Then the same rows while the server of one family is killed, and started again, and then hangs (SIGSTOP) for
longer than rollouts wait for it: what the other families take is held against the run before, and the dead one's rows
may be masked, but never scored as 0; behind that its rows succeed again. Software engineering has the tasks
of `make swe-tasks`, again and again. A policy's turn takes 0.3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import processes
from benchmarks.mixed_rows import FAMILIES, NULL, ORACLE, Row, rows_of
from benchmarks.report import Figure, publish
from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView
from nemo_gym_prorl.sandbox.images.building.default import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.sandbox.supervisor.storage.state_dir import SPACE_FILE
from nemo_gym_prorl.scripted import server as scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME


ENVIRONMENT = "prorl_mixture"
SETTINGS = f"++{ENVIRONMENT}.responses_api_agents.prorl_agent"
STAGES = {16: {"init": 6, "ready": 2, "run": 9, "eval": 5}, 32: {"init": 8, "ready": 4, "run": 22, "eval": 6}}
"""READY, RUN and EVAL together are what is in flight."""
SHARES = {"code": 2.0, "math": 1.0, "stem": 1.0, "swe": 1.0}
ROWS = {"code": 140, "math": 110, "stem": 110, "swe": 40}
"""So many that rows of every family wait most of the time; 400."""
SAID = {"code": 60, "math": 30, "stem": 30, "swe": 31}
THINK_S = 0.3
DEAD = "stem"
UNREACHABLE_S, HANGS_S = 45.0, 90.0
_SAMPLE_S = 0.25


@dataclass
class Watched:
    """What was seen of a run while it went on.

    Attributes:
        sessions: seconds of sandboxes by family, while rows of every family waited; and so on.
        slots: of RUN and EVAL.
        window: when that was, by the clock of jobs.
        most_mib: memory of all processes together.
    """

    sessions: Counter[str] = field(default_factory=Counter)
    slots: Counter[str] = field(default_factory=Counter)
    window: tuple[float, float] | None = None
    most_mib: float = 0.0


@dataclass(frozen=True)
class Ran:
    """A run: the jobs by family, in seconds the whole and of each family until its last row ended."""

    jobs: Mapping[str, Sequence[JobView]]
    seconds: float
    ended: Mapping[str, float]
    watched: Watched

    @property
    def all(self) -> list[JobView]:
        return [job for jobs in self.jobs.values() for job in jobs]


class Mixture:
    """The deployment, and its job API."""

    def __init__(self, gym: GymDeployment, client: RolloutClient, state: Path) -> None:
        self.gym, self.client, self._state = gym, client, state
        self._runs = 0

    async def run(self, rows: Sequence[Row], beside: asyncio.Task[None] | None = None) -> Ran:
        """Run rows, in a mixed order that is always the same.

        Raises:
            RuntimeError: the service's log does not tell the end of each row once.
        """
        mixed = [*rows]
        random.Random(7).shuffle(mixed)
        self._runs += 1
        group = f"run-{self._runs}"
        begun = time.time()
        ids = [
            (await self.client.submit(row, id=f"{group}-{number}", group=group)).id for number, row in enumerate(mixed)
        ]
        watching = asyncio.create_task(self._watch(watched := Watched()))
        jobs = await asyncio.gather(*map(self.client.wait, ids))
        watching.cancel()
        if beside is not None:
            await beside
        told = Counter[str]()
        before, page = "0", await self.client.ended("0", group=group)
        while page.cursor != before:
            told.update(job.id for job in page.rollouts)
            before, page = page.cursor, await self.client.ended(page.cursor, group=group)
        if told != Counter(ids):
            raise RuntimeError(
                f"{(Counter(ids) - told).total()} rollouts lost, {(told - Counter(ids)).total()} told twice"
            )
        by_family = {name: [job for job in jobs if job.environment == name] for name in FAMILIES}
        finished = {name: max((j.finished_at or 0) - begun for j in own) for name, own in by_family.items() if own}
        return Ran(by_family, max(finished.values()), finished, watched)

    def send(self, family: str, number: signal.Signals) -> None:
        """A signal to the server of a family."""
        os.kill(server_process(self.gym, f"prorl_{family}"), number)

    def sandboxes(self) -> int:
        """How many live."""
        return len([*self._state.glob(f"*/*/{SPACE_FILE}")])

    async def _watch(self, watched: Watched) -> None:
        sampled = 0.0
        while True:
            status = await self.client.status()
            if all(status.environments[name].waiting[Stage.INIT] for name in FAMILIES):
                for name in FAMILIES:
                    seen = status.environments[name]
                    has = seen.working[Stage.INIT] + seen.waiting[Stage.RUN] + seen.working[Stage.RUN]
                    watched.sessions[name] += has
                    watched.slots[name] += seen.working[Stage.RUN] + seen.working[Stage.EVAL]
                now = time.time()
                watched.window = (watched.window or (now, now))[0], now
            if time.monotonic() - sampled > 5:
                pids = await asyncio.to_thread(self.gym.cli.mark.processes)
                watched.most_mib = max(watched.most_mib, await asyncio.to_thread(processes.memory_mib, pids))
                sampled = time.monotonic()
            await asyncio.sleep(_SAMPLE_S)


def server_process(gym: GymDeployment, name: str) -> int:
    """The process of a server now: in a supervised deployment the instance's own is its restarter."""
    wanted = f"NEMO_GYM_CONFIG_PATH={name}".encode()
    for pid, command in gym.cli.mark.processes().items():
        if not command.endswith("app.py") or "restarter" in command or command.startswith("/bin/bash"):
            continue
        if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise LookupError(f"{name} has no process now")


@asynccontextmanager
async def mixture(in_flight: int, *settings: str) -> AsyncIterator[Mixture]:
    """The mixture as it is shipped, but for pools, shares and further settings."""
    pools = [f"{SETTINGS}.stages.{stage}={slots}" for stage, slots in STAGES[in_flight].items()]
    shares = [f"{SETTINGS}.environments.{name}.share={share}" for name, share in SHARES.items()]
    with tempfile.TemporaryDirectory(prefix="prorl-m-", dir="/tmp") as state:
        os.chmod(state, 0o777)  # noqa: PTH101 - sandboxes may run as nobody
        async with (
            scripted.serve() as base_url,
            GymDeployment(
                environment=ENVIRONMENT,
                model_type="vllm_model/vllm_model_for_training",
                policy_base_url=base_url,
                policy_model_name=MODEL_NAME,
                overrides=[*pools, *shares, *settings],
                env={"PRORL_STATE": state},
                supervised=True,
                start_timeout_s=600,
            ) as gym,
            RolloutClient(gym.url(ENVIRONMENT)) as client,
        ):
            yield Mixture(gym, client, Path(state))


def mixed(variant: str, counts: Mapping[str, int]) -> list[Row]:
    """Rows of all families."""
    return [row for name, most in counts.items() for row in rows_of(name, variant, most, think_s=THINK_S)]


async def said(counts: Mapping[str, int]) -> list[Figure]:
    """Rows solved and left alone, by family."""
    figures = []
    async with mixture(16) as there:
        for variant, reward in ((ORACLE, 1.0), (NULL, 0.0)):
            ran = await there.run(mixed(variant, counts))
            for name, jobs in ran.jobs.items():
                right = sum(job.reward == reward for job in jobs)
                _complain(job for job in jobs if job.reward != reward)
                title = f"{name}, {variant}: rewarded {reward:g}, of {len(jobs)}"
                figures.append(Figure(title, right, "rollouts", f">= {len(jobs)}"))
            print(f"{variant}: {len(ran.all)} rollouts, {ran.seconds:.0f} s", flush=True)
        figures.append(Figure("16 in flight: sandboxes left", there.sandboxes(), "", "<= 0"))
    return figures


async def shared(counts: Mapping[str, int]) -> list[Figure]:
    """Shares in a steady state, and one family's server dead."""
    rows = mixed(ORACLE, counts)
    async with mixture(32, f"{SETTINGS}.unreachable_s={UNREACHABLE_S}") as there:
        whole = await there.run(rows)
        figures = _of_steady_state(whole, there.sandboxes())
        hanging = await there.run(rows, asyncio.create_task(_kill_then_hang(there)))
        back = await there.run(rows_of(DEAD, ORACLE, 20))
        figures += _of_dead(whole, hanging, back)
        figures.append(Figure("32 in flight: sandboxes left", there.sandboxes(), "", "<= 0"))
    return figures


async def _kill_then_hang(there: Mixture) -> None:
    await asyncio.sleep(10)
    there.send(DEAD, signal.SIGKILL)
    await asyncio.sleep(60)
    there.send(DEAD, signal.SIGSTOP)
    await asyncio.sleep(HANGS_S)
    there.send(DEAD, signal.SIGCONT)


def _of_steady_state(ran: Ran, left: int) -> list[Figure]:
    figures, watched = [], ran.watched
    _complain(job for job in ran.all if job.reward != 1.0)
    begin, end = watched.window or (0.0, 0.0)
    finished = Counter(job.environment for job in ran.all if begin <= (job.finished_at or 0) <= end)
    print(f"steady for {end - begin:.0f} of {ran.seconds:.0f} s")
    for name, share in SHARES.items():
        wanted = 100 * share / sum(SHARES.values())
        of_time = 100 * watched.sessions[name] / max(1, watched.sessions.total())
        off = abs(of_time - wanted)
        figures += [
            Figure(f"{name}: sandbox time, share {wanted:g} %", of_time, "%", "<= 5", goal_value=off),
            Figure(f"{name}: slots", 100 * watched.slots[name] / max(1, watched.slots.total()), "%"),
            Figure(f"{name}: finished", 60 * finished[name] / max(1e-9, end - begin), "1/min"),
        ]
    count = len(ran.all)
    return [
        Figure("rewarded of 400" if count == 400 else f"rewarded of {count}", _rewarded(ran.all), "", f">= {count}"),
        Figure("rollouts, 32 in flight", 60 * count / ran.seconds, "1/min"),
        *figures,
        Figure("memory at most, all servers and sandboxes", ran.watched.most_mib, "MiB"),
        Figure("sandboxes left", left, "", "<= 0"),
    ]


def _of_dead(whole: Ran, hanging: Ran, back: Ran) -> list[Figure]:
    others = [name for name in FAMILIES if name != DEAD and whole.jobs[name]]
    _complain(job for name in others for job in hanging.jobs[name] if job.reward != 1.0)
    dead = hanging.jobs[DEAD]
    masked = [job for job in dead if job.state is JobState.FAILED]
    print(f"{DEAD} dead: {Counter(job.failure.kind for job in masked if job.failure)}")
    figures = [
        Figure(f"{name}: last row, while {DEAD}'s server is dead", hanging.ended[name], "s", "<= 1.1", ratio, peers)
        for name in others
        for ratio in [hanging.ended[name] / whole.ended[name]]
        for peers in [{"all alive": whole.ended[name]}]
    ]
    unscored = sum(job.reward is None for job in masked)
    return [
        *figures,
        Figure(
            "others: rewarded",
            sum(_rewarded(hanging.jobs[name]) for name in others),
            "",
            f">= {sum(len(hanging.jobs[name]) for name in others)}",
        ),
        Figure(f"{DEAD}: masked of {len(dead)}", len(masked), ""),
        Figure(f"{DEAD}: masked with a reward", len(masked) - unscored, "", "<= 0"),
        Figure(f"{DEAD}: scored 0", sum(job.reward == 0.0 for job in dead), "", "<= 0"),
        Figure(f"{DEAD}, alive again: rewarded of {len(back.all)}", _rewarded(back.all), "", f">= {len(back.all)}"),
    ]


def _rewarded(jobs: Sequence[JobView]) -> int:
    return sum(job.reward == 1.0 for job in jobs)


def _complain(jobs: Iterable[JobView]) -> None:
    for job in [*jobs][:10]:
        print(f"  {job.id} of {job.environment}: {job.state}, reward {job.reward}, {job.failure}", flush=True)


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, without faults; writes nothing")
    parser.add_argument("--only", choices=("said", "shared"), help="one part; writes nothing")
    options = parser.parse_args()
    quick = options.quick
    processes.subreaper()
    ensure_runtime(print).activate()
    await asyncio.to_thread(ensure_image, KERNEL, print)
    figures = []
    if options.only != "shared":
        figures += await said({name: most // 10 if quick else most for name, most in SAID.items()})
    if options.only != "said" and not quick:
        figures += await shared(ROWS)
    publish("mixture", figures, quick=quick or options.only is not None)


if __name__ == "__main__":
    asyncio.run(main())
