# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer: a process of its own, which knows a rollout service and a model server by their URLs and nothing else.

    python -m examples.tiny_dapo.train --service URL --model-server URL --port PORT --model FOLDER --out FOLDER

It serves its policy at ``PORT``, where the model server finds it, takes batches from the service by way of
``nemo_gym_prorl.dapo``, trains, and announces each new version of the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from examples.tiny_dapo.engine import Engine
from examples.tiny_dapo.learning import Arm, learn, retokenised, sample_of, samples_of
from examples.tiny_dapo.model import Shape, TinyModel
from examples.tiny_dapo.riddles import KINDS, Riddle, draw_riddles
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import Runner, TrainingBatch
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.sandbox.isolation.syscalls import end_with


GROUPS, GROUP_SIZE = 8, 8
IN_FLIGHT = 64
STALENESS = 2
LEARNING_RATE, LAST_SHARE = 5e-4, 0.1
"""It falls to that share of itself, in equal steps: the last few per cent want small ones."""
HELD_OUT = 150
GLIMPSE = 48
"""Held-out riddles that are tried now and then; all of them before and after the training."""
EVERY = 8


class Trainer:
    """One training.

    Args:
        options: of the command line.
        console: where to show how it goes.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.arm = Arm(options.arm)
        self.tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        shape = Shape(self.tokenizer.get_vocab_size())
        self.model = TinyModel(shape)
        start = torch.load(options.warm_start)
        self.model.load_state_dict(start["weights"])
        self.imitation_s: float = start["seconds"]
        self.engine = Engine(shape, self.tokenizer, seed=options.seed)
        self.engine.load(self.model.state_dict())
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimiser, 1.0, LAST_SHARE, options.steps)
        self.console = console
        self.rng = random.Random(options.seed)
        self.held_out = draw_riddles(HELD_OUT, "held out")
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.began = time.monotonic()
        self.name = f"tiny-{time.time_ns():x}"
        """Begins the ids of evaluations, which no other training may have had."""

    async def run(self) -> None:
        """All of it; writes the log."""
        options = self.options
        riddles = draw_riddles(2000, f"training {options.seed}", frozenset(self.held_out))
        prompts = Epochs([riddle.row() for riddle in riddles], seed=options.seed)
        sampler = DynamicSampler(SamplerConfig(GROUPS, GROUP_SIZE, IN_FLIGHT, STALENESS), prompts)
        async with (
            self.engine.serve(options.port),
            RolloutClient(options.service) as service,
            aiohttp.ClientSession(options.model_server) as models,
        ):
            await self._announce(models, 0)
            await self._evaluate(service, 0, self.held_out)
            with _progress(self.console) as progress:
                bar = progress.add_task(f"seed {options.seed}, {self.arm}", total=options.steps, told="")
                async with Runner(sampler, prompts, [RolloutClient(options.service)]) as runner:
                    while len(self.steps) < options.steps and (batch := await runner.batch()) is not None:
                        step = await asyncio.to_thread(self._learn, batch)
                        self.engine.load(self.model.state_dict())
                        await self._announce(models, batch.version + 1)
                        runner.weights(batch.version + 1)
                        self.steps.append(step | {"dropped": dict(sampler.dropped), "submitted": sampler.submitted})
                        if len(self.steps) % EVERY == 0 and len(self.steps) < options.steps:
                            await self._evaluate(service, len(self.steps), self.held_out[:GLIMPSE])
                        last = self.evaluations[-1]["success"]
                        told = f"batch {step['reward']:.2f}, held out {last:.2f}, loss {step['loss']:+.3f}"
                        progress.update(bar, completed=len(self.steps), told=told)
            await self._evaluate(service, len(self.steps), self.held_out)
        self._write()

    def _learn(self, batch: TrainingBatch) -> dict[str, Any]:
        began = time.monotonic()
        rollouts = [rollout for group in batch.groups for rollout in group]
        sampled = [sample_of(rollout.tokens, 0.0) for rollout in rollouts]
        drifted = sum(retokenised(sample, self.tokenizer).ids != sample.ids for sample in sampled)
        told = learn(self.model, self.optimiser, samples_of(batch, self.arm, self.tokenizer, self.rng))
        self.schedule.step()
        return told | {
            "step": batch.number + 1,
            "at_s": time.monotonic() - self.began,
            "training_s": time.monotonic() - began,
            "reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
            "staleness": sum(batch.version - rollout.version for rollout in rollouts) / len(rollouts),
            "drifted": drifted / len(rollouts),
        }

    async def _announce(self, models: aiohttp.ClientSession, version: int) -> None:
        async with models.post("/v1/backends/weight_version", json={"weight_version": str(version)}) as answer:
            answer.raise_for_status()

    async def _evaluate(self, service: RolloutClient, step: int, riddles: Sequence[Riddle]) -> None:
        """Success on riddles that nothing was trained on: one rollout each, sampled as in training."""
        began = time.monotonic()
        run = f"{self.name}-{step}"
        jobs = [
            await service.submit(riddle.row(), id=f"{run}-{number}", client="evaluation", priority=1)
            for number, riddle in enumerate(riddles)
        ]
        ended = [await service.wait(job.id) for job in jobs]
        rewards: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for riddle, job in zip(riddles, ended, strict=True):
            if job.reward is not None:
                rewards[riddle.kind].append(job.reward)
        scored = [reward for of_kind in rewards.values() for reward in of_kind]
        if not scored:
            why = ended[0].failure.reason if ended[0].failure else ended[0].state.value
            raise RuntimeError(f"none of {len(riddles)} held-out riddles could be tried: {why}")
        told = {
            "step": step,
            "at_s": time.monotonic() - self.began,
            "took_s": time.monotonic() - began,
            "success": sum(scored) / len(scored),
            "by_kind": {kind: sum(of_kind) / len(of_kind) for kind, of_kind in rewards.items() if of_kind},
            "rollouts": len(scored),
            "failed": len(riddles) - len(scored),
        }
        self.evaluations.append(told)
        kinds = ", ".join(f"{kind} {value:.0%}" for kind, value in told["by_kind"].items())
        self.console.print(
            f"[{told['at_s']:5.0f} s] seed {self.options.seed}, {self.arm}, step {step}: "
            f"{told['success']:.0%} of {len(scored)} held-out riddles ({kinds})",
            markup=False,
            highlight=False,
        )

    def _write(self) -> None:
        log = {
            "seed": self.options.seed,
            "arm": self.arm,
            "imitation_s": self.imitation_s,
            "training_s": time.monotonic() - self.began,
            "sampled_tokens": self.engine.sampled,
            "evaluations": self.evaluations,
            "steps": self.steps,
        }
        file: Path = self.options.out / f"seed{self.options.seed}-{self.arm}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(log, indent=1))
        part.replace(file)


def _progress(console: Console) -> Progress:
    told = TextColumn("{task.fields[told]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), told)
    return Progress(*columns, console=console)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train the tiny policy against a running rollout service")
    parser.add_argument("--service", required=True, help="URL of prorl_agent")
    parser.add_argument("--model-server", required=True, help="URL of prorl_model")
    parser.add_argument("--port", required=True, type=int, help="where that model server looks for the policy")
    parser.add_argument("--model", required=True, type=Path, help="folder of the tokenizer")
    parser.add_argument("--warm-start", required=True, type=Path, help="weights to begin with")
    parser.add_argument("--out", required=True, type=Path, help="folder of the log")
    parser.add_argument("--arm", default=Arm.FULL, choices=list(Arm), help="what is trained on")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--steps", default=40, type=int, help="batches")
    parser.add_argument("--parent", type=int, help="number of the process to end with")
    return parser.parse_args()


def main() -> None:
    """The command."""
    torch.set_num_threads(1)  # the other core is the sandboxes'
    options = _options()
    if options.parent is not None:
        end_with(options.parent)
    torch.manual_seed(options.seed)
    asyncio.run(Trainer(options, Console()).run())


if __name__ == "__main__":
    main()
