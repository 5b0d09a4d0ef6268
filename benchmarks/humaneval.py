# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HumanEval through the job API: all 164 problems, 16 rollouts in flight, real containers, a scripted policy.

Reference solutions must all earn their reward; stubs, and solutions that tamper with the tests or print success
instead of solving the problem, none.

Beside ours are the containers of NeMo Gym's own ``apptainer`` provider, which has no sessions, so each call is a
process. All problems would take it half an hour: what is compared is every fourth one, 41 of them, in both. They solve
those three times and take turns at being first, each time in a new deployment, where it is the first that happens; in
ours all problems follow. What is told is the median, with the lowest and the highest. The other scripts run once.

The model is free, so what a rollout costs is processors' time: of the sandboxes, of all servers of the deployment, Ray
among them, and of this process, which is the policy and the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks import processes
from benchmarks.report import Figure, publish
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.schemas import JobView
from nemo_gym_prorl.sandbox.images.building.default import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.scripted import server as scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.code.rows import HumanEvalProblem, humaneval_row, problems
from scripts.scripted_turns.humaneval import script_for


AGENT = "prorl_code_agent"
OURS = "singularity"
PEER = "Gym apptainer"
PEER_SETTINGS = (
    "++peer.apptainer.create.extra_start_args=[--containall,--cleanenv,--writable-tmpfs,--net,--network,none]",
    "++peer.apptainer.exec.extra_exec_args=[--cleanenv]",
    "++prorl_code.resources_servers.prorl_code.sandbox_provider=peer",
)
"""Isolated as ours are."""

ROUNDS = 3
COMPARED = slice(None, None, 4)
"""Which of the problems are solved with the peer's containers too."""
IN_FLIGHT = 16
STAGES = {"init": 8, "ready": 0, "run": 12, "eval": 4}
"""12 rollouts before EVAL and 4 in it: 16 in flight."""

REFERENCE = "reference"
GOALS = {REFERENCE: 1.0, "stub": 0.0, "forge_tests": 0.0, "exit_on_import": 0.0, "exit_hard_on_import": 0.0}
"""Scripts and the reward that each must earn on every problem."""


@dataclass(frozen=True, slots=True)
class Played:
    """The rollouts of one script, the wall time in seconds, and the core-seconds of each."""

    jobs: list[JobView]
    seconds: float
    cores: float


async def play(client: RolloutClient, script: str, chosen: Sequence[HumanEvalProblem]) -> Played:
    """Some problems with one script."""
    started, used, count = time.perf_counter(), processes.core_seconds(os.getpid()), len(chosen)
    rows = [humaneval_row(problem, script_for(problem, script)) for problem in chosen]
    submitted = await asyncio.gather(*(client.submit(row, group=script) for row in rows))
    ended = await asyncio.gather(*(client.wait(job.id) for job in submitted))
    seconds, cores = time.perf_counter() - started, (processes.core_seconds(os.getpid()) - used) / count
    print(
        f"{script}: {sum(job.reward == 1.0 for job in ended)} of {count} rewarded, "
        f"{sum(job.reward is not None for job in ended)} scored, {seconds:.1f} s, {cores:.2f} core-s each",
        flush=True,
    )
    for job in ended:
        if job.reward != GOALS[script]:
            print(f"  {job.id}: reward {job.reward}, {job.failure}")
    return Played(list(ended), seconds, cores)


@contextlib.asynccontextmanager
async def serving(base_url: str, *settings: str) -> AsyncIterator[RolloutClient]:
    """The environment in a Gym deployment of its own."""
    stages = [f"++{AGENT}.responses_api_agents.prorl_agent.stages.{stage}={slots}" for stage, slots in STAGES.items()]
    deployment = GymDeployment(
        environment="prorl_code",
        model_type="vllm_model/vllm_model_for_training",
        policy_base_url=base_url,
        policy_model_name=MODEL_NAME,
        overrides=[*stages, *settings],
    )
    async with deployment, RolloutClient(deployment.url(AGENT)) as client:
        yield client


async def measure(chosen: Sequence[HumanEvalProblem], rounds: int) -> list[Figure]:
    """The figures of some problems."""
    compared: dict[str, list[Played]] = {OURS: [], PEER: []}
    whole: list[Played] = []
    scripts: dict[str, Played] = {}
    async with scripted.serve() as base_url:
        for number in range(rounds):
            order = [OURS, PEER] if number % 2 == 0 else [PEER, OURS]
            for who in order:
                print(f"round {number + 1}, {who}:", flush=True)
                async with serving(base_url, *(PEER_SETTINGS if who == PEER else ())) as client:
                    compared[who].append(await play(client, REFERENCE, chosen[COMPARED]))
                    if who == OURS:
                        whole.append(await play(client, REFERENCE, chosen))
                    if who == OURS and number == rounds - 1:
                        for script in [script for script in GOALS if script != REFERENCE]:
                            scripts[script] = await play(client, script, chosen)
    figures = _earned(REFERENCE, whole, len(chosen))
    goals = ("<= 30", "<= 0.35") if len(chosen) == len(problems()) else (None, None)
    title = f"wall time, {REFERENCE}, {IN_FLIGHT} in flight"
    figures.append(Figure.of(title, [played.seconds for played in whole], "s", goals[0]))
    figures.append(Figure.of(f"{REFERENCE}: CPU per rollout", [played.cores for played in whole], "core-s", goals[1]))
    figures += _against(compared, len(chosen[COMPARED]))
    for script in scripts:
        figures += _earned(script, [scripts[script]], len(chosen))
        figures.append(Figure(f"wall time, {script}, {IN_FLIGHT} in flight", scripts[script].seconds, "s"))
        figures.append(Figure(f"{script}: CPU per rollout", scripts[script].cores, "core-s"))
    return figures


def _against(compared: dict[str, list[Played]], count: int) -> list[Figure]:
    """Both on the same problems."""
    title, scored = f"every fourth problem, {REFERENCE}", {}
    for who, runs in compared.items():
        scored[who] = min(sum(job.reward == 1.0 for job in played.jobs) for played in runs)
    times = {who: [played.seconds for played in runs] for who, runs in compared.items()}
    cores = {who: [played.cores for played in runs] for who, runs in compared.items()}
    return [
        Figure(f"{title}: rewarded of {count}", scored.pop(OURS), "rollouts", peers=scored),
        Figure.of(f"{title}: wall time, {IN_FLIGHT} in flight", times.pop(OURS), "s", peers=times),
        Figure.of(f"{title}: CPU per rollout", cores.pop(OURS), "core-s", peers=cores),
    ]


def _earned(script: str, runs: list[Played], count: int) -> list[Figure]:
    """How many rollouts were rewarded and scored, in the worst of several runs."""
    rewarded = [sum(job.reward == 1.0 for job in played.jobs) for played in runs]
    scored = min(sum(job.reward is not None for job in played.jobs) for played in runs)
    worst, goal = (min(rewarded), f">= {count}") if GOALS[script] else (max(rewarded), "<= 0")
    return [
        Figure(f"{script}: rewarded of {count}", worst, "rollouts", goal),
        Figure(f"{script}: scored of {count}", scored, "rollouts", f">= {count}"),
    ]


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="8 problems, two of them with the peer too, once; writes nothing"
    )
    quick = parser.parse_args().quick
    processes.subreaper()
    ensure_runtime(print).activate()
    await asyncio.to_thread(ensure_image, KERNEL, print)
    figures = await measure(list(problems().values())[: 8 if quick else None], 1 if quick else ROUNDS)
    publish("humaneval", figures, packages=("nemo-gym",), quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
