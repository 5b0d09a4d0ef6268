# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of anything, at any time, under load: nothing is left, and each rollout has one outcome.

One after the other, and then as Hypothesis draws, something is killed at some time while a real server process runs
rollouts with real sandboxes. Afterwards

- each rollout has exactly one outcome: it succeeded, with the right result, or it failed with a kind that says so;
- no process, folder or socket of its sandboxes is left after :func:`.gone_within_s`;
- where the server was killed, one that is started in its place takes the same rollouts, under the same ids, to their
  outcome, and cleans up what both left.

``make test-long`` draws 200 examples, ``PRORL_DEATHS=1000`` as many.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.sandbox.supervisor import state_dir
from tests.sandbox.running import gone_within_s


REPOSITORY = Path(__file__).parents[2]

KINDS = ("server", "supervisor", "init", "shell", "kernel", "helper", "launcher")

LONG = bool(os.environ.get("PRORL_TEST_LONG"))
EXAMPLES = int(os.environ.get("PRORL_DEATHS", "200" if LONG else "1"))

EXPECTED = {FailureKind.SESSION_LOST, FailureKind.PROVIDER_UNAVAILABLE}
"""What a rollout may fail with when something of its sandboxes was killed."""

Pids = set[tuple[int, int]]

pytestmark = pytest.mark.sandbox


@dataclass
class Service:
    """The server process of the moment, and every process of its sandboxes that was ever seen."""

    images: tuple[Path, Path]
    state: Path
    seen: Pids = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rollouts.py")), *map(str, self.images)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PRORL_STATE": str(self.state)},
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        assert self.url

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, kind: str, which: int) -> None:
        """Kill one process of a kind, if there is one, having noted down all that there are."""
        with urllib.request.urlopen(f"{self.url}/victims") as answer:
            victims = {kind: [(pid, started) for pid, started in found] for kind, found in json.load(answer).items()}
        for found in victims.values():
            self.seen.update(found)
        for space in spaces(self.state):
            self.seen.update((pid, state_dir.start_time(pid) or 0) for pid in space.members())
        if victims[kind]:
            pid, started = victims[kind][which % len(victims[kind])]
            if state_dir.start_time(pid) == started:
                os.kill(pid, signal.SIGKILL)
        if kind == "server":
            self.process.wait()

    def remains(self, *, owner_too: bool) -> list[str]:
        """What is there of sandboxes, and with ``owner_too`` of supervisors as well."""
        mine = {self.process.pid}
        if not owner_too:
            with urllib.request.urlopen(f"{self.url}/victims") as answer:
                victims = json.load(answer)
                mine |= {pid for kind in ("supervisor", "launcher") for pid, _started in victims[kind]}
        alive = [
            f"process {pid}" for pid, started in self.seen if pid not in mine and state_dir.start_time(pid) == started
        ]
        inside = [f"process {pid} inside" for space in spaces(self.state) for pid in space.members()]
        helpers = [f"helper {pid}" for owner in self.state.glob("s-*") for pid in state_dir.helpers_of(owner)]
        files = [str(path) for path in self.state.glob("s-*" if owner_too else "s-*/b-*")]
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.state) in line]
        return [*alive, *inside, *helpers, *files, *mounts]

    def wait_until_gone(self, *, owner_too: bool) -> None:
        deadline = time.monotonic() + gone_within_s()
        while remains := self.remains(owner_too=owner_too):
            assert time.monotonic() < deadline, remains
            time.sleep(0.05)
        self.seen.clear()


def spaces(state: Path) -> list[state_dir.PidNamespace]:
    """The PID namespaces of all sandboxes."""
    return [space for owner in state.glob("s-*") for space in state_dir.pid_namespaces_of(owner)]


@pytest.fixture(scope="module")
def service(image: Path, kernel_image: Path, state: Path) -> Iterator[Service]:
    own = state / "deaths"
    own.mkdir()
    # As :func:`.state_dir.state_root` would, if this process had sandboxes.
    state.chmod(0o711)
    live = Service((image, kernel_image), own)
    live.start()
    yield live
    live.end()
    live.wait_until_gone(owner_too=True)
    own.rmdir()
    print(f"{EXAMPLES} examples, outcomes: {dict(live.ends)}")


@pytest.mark.longer("200 examples")
@settings(
    max_examples=EXAMPLES,
    # A shrunk example would say little, as time plays its part, and take long.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    deaths=st.lists(st.tuples(st.floats(0, 0.6), st.sampled_from(KINDS), st.integers(0, 5)), min_size=1, max_size=3),
    turns=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    attempts=st.integers(1, 2),
)
@example(deaths=[(0.5, "server", 0)], turns=[2], attempts=1)
@example(deaths=[(0.5, "init", 0)], turns=[2], attempts=1)
@example(deaths=[(0.5, "kernel", 0)], turns=[2], attempts=1)
@example(deaths=[(0.3, "launcher", 0), (0.1, "launcher", 1), (0.1, "launcher", 2)], turns=[2, 2], attempts=1)
def test_whatever_is_killed_each_rollout_has_one_outcome_and_nothing_is_left(
    service: Service, deaths: list[tuple[float, str, int]], turns: list[int], attempts: int
) -> None:
    row = {"responses_create_params": {"input": "go"}}
    rows = {str(uuid.uuid4()): {**row, "turns": count} for count in turns}
    outcomes = asyncio.run(outcomes_under_fire(service, rows, attempts, deaths))
    if outcomes is None:
        service.start()
        outcomes = asyncio.run(outcomes_under_fire(service, rows, attempts, []))
        assert outcomes is not None
        assert all(outcome.state is JobState.SUCCEEDED for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert outcome.state in (JobState.SUCCEEDED, JobState.FAILED)
        if outcome.state is JobState.SUCCEEDED:
            assert outcome.result == {"reward": 1.0, "as_told": True}
        else:
            assert outcome.failure is not None
            assert outcome.failure.kind in EXPECTED, outcome
        service.ends[outcome.failure.kind if outcome.failure else "succeeded"] += 1
    service.wait_until_gone(owner_too=False)


async def outcomes_under_fire(
    service: Service, rows: dict[str, dict[str, Any]], attempts: int, deaths: list[tuple[float, str, int]]
) -> list[JobView] | None:
    """Submit the rollouts, kill as told, and wait for their outcomes; ``None`` if the server was killed."""
    async with RolloutClient(service.url) as client:
        cursor = (await client.list()).cursor
        for name, row in rows.items():
            await client.submit(row, id=name, max_attempts=attempts)
        for pause, kind, which in deaths:
            await asyncio.sleep(pause)
            await asyncio.to_thread(service.kill, kind, which)
            if not service.alive:
                return None
        async with asyncio.timeout(120):
            done = [await client.wait(name) for name in rows]
        # The log of outcomes holds each of them once.
        ended = await client.ended(cursor, limit=1000)
        assert Counter(job.id for job in ended.rollouts) == Counter(rows.keys())
        return done
