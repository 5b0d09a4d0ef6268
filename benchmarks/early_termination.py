# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Early termination on the real service: how long the sandboxes of redundant rollouts outlive a complete batch.

A deployment of ``prorl_code`` has 64 slots of RUN, and a strictly on-policy sampler fills them with groups of 4. Every
second prompt is solved by half of its rollouts within a few turns; the others run a command in their sandbox and wait
for their next turn for an hour, so they are dropped with the batch instead of coming back with the next one. When a
batch of two groups is complete some 56 rollouts are redundant. Told is the time from the batch until each of them has
its outcome, which is when its sandbox is gone; the next weights are announced at once, and it takes so long until all
slots are at work again. The policy is scripted.
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
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import Runner
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.sandbox.images.building.default import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.scripted import server as scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.code.humaneval import SOLUTION_FILE, Problem, problems, row_for


AGENT = "prorl_code_agent"
SLOTS, QUICK_SLOTS = 64, 16
STEPS, QUICK_STEPS = 6, 2
GROUPS, QUICK_GROUPS = 2, 1
SIZE = 4


def rows() -> Iterator[dict[str, Any]]:
    """Every second prompt comes to an end."""
    for number, problem in enumerate(problems().values()):
        turns = _coin(problem) if number % 2 == 0 else _endless()
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


class Watch:
    """When each rollout began to run, and when it ended, in seconds since the epoch."""

    def __init__(self, client: RolloutClient) -> None:
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self._seen: set[str] = set()
        self._client = client
        self._news = asyncio.Condition()

    async def follow(self) -> None:
        """Goes on until it is cancelled."""
        async for event in self._client.events(after="0"):
            self._seen.add(event.id)
            if event.state is JobState.RUNNING:
                self.began[event.id] = event.at
            elif event.state.terminal:
                self.ended[event.id] = event.at
            async with self._news:
                self._news.notify_all()

    async def until_begun(self, rollouts: int, first_prompt: int) -> float:
        """Return when so many rollouts of these prompts have begun, and when the last of them did."""
        async with self._news:
            await self._news.wait_for(lambda: self._begun_since(first_prompt) >= rollouts)
        return sorted(at for rollout, at in self.began.items() if _prompt(rollout) >= first_prompt)[rollouts - 1]

    async def until_ended(self, prompts: int) -> list[float]:
        """Return when all rollouts of the first prompts that were seen have ended, and when they did, in order."""
        async with self._news:
            await self._news.wait_for(lambda: all(rollout in self.ended for rollout in self._of_first(prompts)))
        return sorted(self.ended[rollout] for rollout in self._of_first(prompts))

    def _begun_since(self, first_prompt: int) -> int:
        return sum(_prompt(rollout) >= first_prompt for rollout in self.began)

    def _of_first(self, prompts: int) -> list[str]:
        return [rollout for rollout in self._seen if _prompt(rollout) < prompts]


def _prompt(rollout: str) -> int:
    return int(rollout.split(":")[1])


async def measure(slots: int, steps: int, groups: int) -> list[Figure]:
    """The figures."""
    stages = {"init": 8, "ready": 0, "run": slots, "eval": 4}
    settings = [f"++{AGENT}.responses_api_agents.prorl_agent.stages.{stage}={size}" for stage, size in stages.items()]
    until_gone: list[float] = []
    until_full: list[float] = []
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
        asyncio.TaskGroup() as group,
    ):
        prompts = Epochs([*rows()], seed=None)
        sampler = DynamicSampler(SamplerConfig(groups, SIZE, slots, max_staleness=0), prompts)
        watch = Watch(client)
        following = group.create_task(watch.follow())
        async with Runner(sampler, prompts, [RolloutClient(gym.url(AGENT))]) as runner:
            await watch.until_begun(slots, 0)
            for step in range(steps):
                batch = await runner.batch()
                complete = time.time()
                if batch is None:
                    raise RuntimeError("there are prompts enough")
                redundant, next_prompt = sampler.in_flight, sampler.state()["next_prompt"]
                runner.weights(batch.version + 1)
                until_full.append(await watch.until_begun(slots, next_prompt) - complete)
                times = [at - complete for at in await watch.until_ended(next_prompt)][-redundant:]
                until_gone += times
                print(
                    f"step {step}: {redundant} redundant, the last gone in {max(times):.2f} s, "
                    f"all slots at work in {until_full[-1]:.2f} s",
                    flush=True,
                )
        following.cancel()
        left = (await client.status()).sessions
    until_gone.sort()
    return [
        Figure(f"redundant rollouts in {steps} steps, {slots} in flight", len(until_gone), ""),
        Figure("from the batch to a sandbox gone, p99", until_gone[int(0.99 * (len(until_gone) - 1))], "s", "<= 2"),
        Figure("the same, median", statistics.median(until_gone), "s"),
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
    await asyncio.to_thread(ensure_image, KERNEL, print)
    figures = await measure(*((QUICK_SLOTS, QUICK_STEPS, QUICK_GROUPS) if quick else (SLOTS, STEPS, GROUPS)))
    publish("early_termination", figures, quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
