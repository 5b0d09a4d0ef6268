# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Complete training runs of a tiny policy: warm starts, a rollout service, and a training run for each seed.

    python -m examples.tiny_dapo

The service is a Gym deployment. A training run only knows the service's URLs: the run serves its policy at a port for
the model server, takes batches from ``nemo_gym_prorl.dapo``, trains, and announces each new weight version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer

from examples.tiny_dapo.engine import Engine
from examples.tiny_dapo.lessons import Carelessness, demonstrate, lesson, make_tokenizer
from examples.tiny_dapo.policy import TinyModel, imitate, learn, samples_of
from examples.tiny_dapo.riddles import Riddle, draw_riddles
from nemo_gym_prorl.dapo.contract import SamplerConfig
from nemo_gym_prorl.dapo.prompts import Epochs
from nemo_gym_prorl.dapo.runner import Runner
from nemo_gym_prorl.dapo.sampler import DynamicSampler
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime


FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent

IMITATION_STEPS = 3000
GROUPS, GROUP_SIZE = 8, 8
IN_FLIGHT = 64
STALENESS = 2
LEARNING_RATE, LAST_SHARE = 5e-4, 0.1  # the share of the rate is left at the end of its linear decay
HELD_OUT, TRAINING = 150, 2000  # number of riddles for each seed


def warm_start(tokenizer: Tokenizer, seed: int) -> TinyModel:
    """Return a new model that was trained to imitate demonstrations."""
    torch.manual_seed(seed)
    rng = random.Random(f"demonstrations {seed}")
    model = TinyModel(tokenizer.get_vocab_size())

    def lessons() -> Iterator[tuple[list[int], list[bool]]]:
        while True:
            yield lesson(demonstrate(Riddle.draw(rng), rng, Carelessness()), tokenizer)

    imitate(model, lessons(), IMITATION_STEPS, f"seed {seed}, imitation")
    return model


async def train(
    service_url: str, model_server: str, port: int, tokenizer: Tokenizer, model: TinyModel, seed: int, steps: int
) -> dict[str, Any]:
    """Train ``model`` in place on ``steps`` batches; return the log."""
    torch.manual_seed(seed)
    rng, began = random.Random(seed), time.monotonic()
    engine = Engine(TinyModel(tokenizer.get_vocab_size()), tokenizer, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, LAST_SHARE, steps)
    riddles = draw_riddles(HELD_OUT + TRAINING, f"riddles {seed}")
    prompts = Epochs([riddle.row() for riddle in riddles[HELD_OUT:]], seed=seed)
    sampler = DynamicSampler(SamplerConfig(GROUPS, GROUP_SIZE, IN_FLIGHT, STALENESS), prompts)
    done: list[dict[str, Any]] = []
    async with (
        engine.serve(port),
        RolloutClient(service_url) as service,
        aiohttp.ClientSession(model_server) as models,
    ):

        async def announce(version: int) -> None:
            engine.load(model.state_dict())
            async with models.post("/v1/backends/weight_version", json={"weight_version": str(version)}) as answer:
                answer.raise_for_status()

        await announce(0)
        before = await success(service, riddles[:HELD_OUT])
        print(f"seed {seed}: {before:.0%} of held-out riddles after the warm start", flush=True)
        async with Runner(sampler, prompts, [RolloutClient(service_url)]) as runner:
            while len(done) < steps and (batch := await runner.batch()) is not None:
                loss = await asyncio.to_thread(learn, model, optimiser, samples_of(batch, rng))
                schedule.step()
                await announce(batch.version + 1)
                runner.weights(batch.version + 1)
                rewards = [rollout.reward for group in batch.groups for rollout in group]
                done.append({"step": len(done) + 1, "reward": sum(rewards) / len(rewards), "loss": loss})
                at = f"{time.monotonic() - began:.0f} s, batch {len(done)} of {steps}"
                print(f"seed {seed}: {at}, reward {done[-1]['reward']:.2f}, loss {loss:+.3f}", flush=True)
        after = await success(service, riddles[:HELD_OUT])
    return {"seed": seed, "seconds": time.monotonic() - began, "before": before, "after": after, "steps": done}


async def success(service: RolloutClient, riddles: Sequence[Riddle]) -> float:
    """Return the success rate on held-out riddles, with one rollout each, sampled as in training.

    Raises:
        RuntimeError: no rollout has a reward.
    """
    run = f"tiny-{time.time_ns():x}"  # services remember ids, so each evaluation needs its own
    for number, riddle in enumerate(riddles):
        await service.submit(riddle.row(), id=f"{run}-{number}", client="evaluation", priority=1)
    ended = [await service.wait(f"{run}-{number}") for number in range(len(riddles))]
    scored = [job.reward for job in ended if job.reward is not None]
    if not scored:
        why = ended[0].failure.reason if ended[0].failure else ended[0].state.value
        raise RuntimeError(f"no rollout of {len(riddles)} held-out riddles has a reward: {why}")
    return sum(scored) / len(scored)


async def train_all(starts: Sequence[TinyModel], steps: int, out: Path, tokenizer: Tokenizer) -> None:
    """Train the model of each seed in turn with one rollout service, and write each log to a file."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    model = str((out / "model").resolve()).replace("'", "\\'")
    print("Starting the rollout service", flush=True)
    async with GymDeployment(
        config_paths=[
            FOLDER / "resources_servers/riddles/configs/riddles.yaml",
            "responses_api_models/prorl_model/configs/prorl_model.yaml",
        ],
        model_type=None,
        policy_base_url=f"http://127.0.0.1:{port}/v1",
        policy_model_name="tiny",
        cwd=FOLDER,
        env={"PYTHONPATH": str(ROOT)},
        overrides=[
            f"++policy_model.responses_api_models.prorl_model.policy.{setting}"
            for setting in (f"tokenizer='{model}'", "engine=vllm", "tool_call_parser=hermes")
        ],
    ) as gym:
        for seed, start in enumerate(starts):
            urls = gym.url("riddles_agent"), gym.url("policy_model")
            log = await gym.guard(train(*urls, port, tokenizer, start, seed, steps))
            (out / f"seed{seed}-steps{steps}.json").write_text(json.dumps(log, indent=1))
            rates = f"{log['before']:.0%} after the warm start, {log['after']:.0%} after {steps} batches"
            print(f"seed {seed}: held-out riddles solved: {rates} in {log['seconds'] / 60:.1f} min", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_dapo", description="DAPO on a laptop")
    parser.add_argument("--seeds", type=int, default=3, help="number of trainings (default: 3)")
    parser.add_argument("--steps", type=int, default=40, help="number of batches of a training (default: 40)")
    parser.add_argument("--out", type=Path, default=ROOT / "out/tiny_dapo", help="folder of logs and tokenizer")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the sandboxes need the other cores
    tokenizer = make_tokenizer(options.out / "model")
    starts = [warm_start(tokenizer, seed) for seed in range(options.seeds)]
    ensure_runtime(print).activate()
    ensure_image(DEFAULT, print)
    asyncio.run(train_all(starts, options.steps, options.out, tokenizer))


if __name__ == "__main__":
    main()
