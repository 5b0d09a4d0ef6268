# SPDX-License-Identifier: Apache-2.0
"""Early termination on the real service: how long the sandboxes of redundant rollouts outlive a complete batch.

A deployment of ``prorl_code`` has 64 slots of RUN, and a strictly on-policy sampler fills them with groups of 4. Every
fourth prompt is solved by half of its rollouts within a few turns; the others run a command in their sandbox and wait
for their next turn for an hour. So when a batch of two groups is complete some 56 rollouts are redundant. Told is the
time from the batch until each of them has its outcome, which is when its sandbox is gone; the next weights are
announced at once, and it takes so long until all slots are at work again. The policy is scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import processes
from benchmarks.report import Figure, publish
from nemo_gym_prorl.dapo.decision import SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import Runner
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.sandbox.images.building.default import ensure_kernel_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.scripted import server as scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.humaneval.problems import SOLUTION_FILE, Problem, problems, row_for


AGENT = "prorl_code_agent"
SLOTS, QUICK_SLOTS = 64, 16
STEPS, QUICK_STEPS = 6, 2
GROUPS, SIZE = 2, 4


def rows() -> Iterator[dict[str, Any]]:
    """Every fourth prompt comes to an end."""
    for number, problem in enumerate(problems().values()):
        turns = _coin(problem) if number % 4 == 0 else _endless()
        yield row_for(problem, {"turns": turns})


def _coin(problem: Problem) -> list[dict[str, Any]]:
    command = f"if [ $((RANDOM % 2)) = 0 ]; then cat > {SOLUTION_FILE} <<'EOF'\n{problem.reference_source}\nEOF\nfi"
    return [
        {"content": "A coin decides.", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]},
        {"content": "Submitted.", "tool_calls": [{"name": "submit", "arguments": {}}]},
        {"content": "Done."},
    ]


def _endless() -> list[dict[str, Any]]:
    command = "(while :; do sleep 1; date > now; done) & echo begun"
    return [
        {"content": "I begin.", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]},
        {"content": "Still thinking.", "latency_s": 3600.0},
    ]


async def cancelled(client: RolloutClient, times: dict[str, float]) -> None:
    """When each rollout was cancelled, in seconds since the epoch."""
    async for event in client.events():
        if event.state is JobState.CANCELLED:
            times[event.id] = event.at


async def at_work(client: RolloutClient, rollouts: int) -> None:
    """Return when RUN works on so many."""
    while (await client.status()).stages[Stage.RUN].working < rollouts:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def measure(slots: int, steps: int) -> list[Figure]:
    """The figures."""
    stages = {"init": 8, "ready": 0, "run": slots, "eval": 4}
    settings = [f"++{AGENT}.responses_api_agents.prorl_agent.stages.{stage}={size}" for stage, size in stages.items()]
    until_gone: list[float] = []
    until_full: list[float] = []
    redundant = 0
    async with (
        scripted.serve() as base_url,
        GymDeployment(
            environment="prorl_code",
            model_type="vllm_model/vllm_model_for_training",
            policy_base_url=base_url,
            policy_model_name=MODEL_NAME,
            overrides=settings,
        ) as gym,
        RolloutClient(gym.url(AGENT)) as client,
    ):
        prompts = Epochs([*rows()], seed=None)
        sampler = DynamicSampler(SamplerConfig(GROUPS, SIZE, slots, max_staleness=0, max_restarts=1000), prompts)
        times: dict[str, float] = {}
        following = asyncio.create_task(cancelled(client, times))
        async with Runner(sampler, prompts, [RolloutClient(gym.url(AGENT))]) as runner:
            for step in range(steps):
                await at_work(client, slots)
                batch = await runner.batch()
                complete = time.time()
                if batch is None:
                    raise RuntimeError("there are prompts enough")
                ending = sampler.in_flight
                redundant += ending
                before = set(times)
                runner.weights(batch.version + 1)
                while len(set(times) - before) < ending:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                until_gone += [max(0.0, times[rollout] - complete) for rollout in set(times) - before]
                await at_work(client, slots)
                until_full.append(time.time() - complete)
                print(
                    f"step {step}: {ending} redundant, the last gone in {max(until_gone[-ending:]):.2f} s", flush=True
                )
        following.cancel()
        left = (await client.status()).sessions
    gone = sorted(until_gone)
    return [
        Figure(f"redundant rollouts in {steps} steps, {slots} in flight", redundant, ""),
        Figure("from the batch to a sandbox gone, p99", gone[int(0.99 * (len(gone) - 1))], "s", "<= 2"),
        Figure("the same, median", statistics.median(gone), "s"),
        Figure.of("from the batch until all slots work for the next one", until_full, "s"),
        Figure("sessions left at the end", left, "", "<= 0"),
    ]


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="how long redundant sandboxes outlive a complete batch")
    parser.add_argument("--quick", action="store_true", help="16 slots, 2 steps; writes nothing")
    quick = parser.parse_args().quick
    processes.subreaper()
    ensure_runtime(print).activate()
    await asyncio.to_thread(ensure_kernel_image, print)
    figures = await measure(*((QUICK_SLOTS, QUICK_STEPS) if quick else (SLOTS, STEPS)))
    publish("early_termination", figures, quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
