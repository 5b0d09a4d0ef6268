# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Everything from nothing: warm starts, a rollout service, a training for each seed and arm, the curves.

    python -m examples.tiny_dapo

The service is a Gym deployment like any other, and each training a process that knows its URLs. A training that is
logged in the output folder already is not done again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from examples.tiny_dapo.curves import draw, logs, table
from examples.tiny_dapo.learning import Arm
from examples.tiny_dapo.warm_start import tokenizer_in
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.sandbox.images.building.default import DEFAULT, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime


FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


async def train(options: argparse.Namespace, console: Console) -> None:
    """The trainings that are not done yet, one after the other. Told to end, it ends them and the service."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    model = options.out / "model"
    await asyncio.to_thread(tokenizer_in, model)
    todo = [
        (seed, arm)
        for seed in range(options.seeds)
        for arm in options.arms
        if not (options.out / f"seed{seed}-{arm}.json").exists()
    ]
    for seed in sorted({seed for seed, _ in todo}):
        if not (file := options.out / f"warm-{seed}.pt").exists():
            await _run("warm_start", f"the warm start of seed {seed}", {"model": model, "seed": seed, "file": file})
    if not todo:
        return
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    console.print("Starting the rollout service")
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
            for setting in (f"tokenizer={_quoted(model.resolve())}", "engine=vllm", "tool_call_parser=hermes")
        ],
    ) as gym:
        for seed, arm in todo:
            await gym.guard(_train_one(gym, port, seed, arm, options))


async def _train_one(gym: GymDeployment, port: int, seed: int, arm: Arm, options: argparse.Namespace) -> None:
    arguments = {
        "service": gym.url("riddles_agent"),
        "model-server": gym.url("policy_model"),
        "port": port,
        "model": options.out / "model",
        "warm-start": options.out / f"warm-{seed}.pt",
        "out": options.out,
        "arm": arm,
        "seed": seed,
        "steps": options.steps,
    }
    await _run("train", f"the training of seed {seed}, {arm},", arguments)


async def _run(module: str, what: str, arguments: Mapping[str, object]) -> None:
    """A module of ours in a process of its own, which ends with this one."""
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"examples.tiny_dapo.{module}", *words, "--parent", str(os.getpid()), env=environment
    )
    try:
        if await process.wait():
            raise ChildProcessError(f"{what} ended with status {process.returncode}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _quoted(path: Path) -> str:
    """As Hydra takes any text for what it is."""
    return "'" + str(path).replace("'", "\\'") + "'"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_dapo", description="DAPO on a laptop")
    parser.add_argument("--seeds", type=_count, default=3, help="how many (default: 3)")
    parser.add_argument("--arms", nargs="+", type=Arm, choices=list(Arm), default=list(Arm), help="default: all")
    parser.add_argument("--steps", type=_count, default=40, help="batches of a training (default: 40)")
    parser.add_argument("--out", type=Path, default=ROOT / "out/tiny_dapo", help="folder of logs and weights")
    parser.add_argument("--plot", type=Path, help="file of the curves (default: curves.png in that folder)")
    options = parser.parse_args()
    console = Console()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    try:
        others = {len(log["steps"]) for of_arm in logs(options.out).values() for log in of_arm} - {options.steps}
    except ValueError as error:
        parser.error(f"--out: {error}")
    if others:
        parser.error(f"--steps: {options.out} has trainings of {min(others)} batches; name another folder with --out")
    plot = options.plot or options.out / "curves.png"
    if plot.suffix != ".png" or not plot.parent.is_dir():
        parser.error(f"--plot: {plot} is no PNG file in a folder that is there")
    ensure_runtime(print).activate()
    ensure_image(DEFAULT, print)
    try:
        asyncio.run(train(options, console))
    except ChildProcessError as error:
        raise SystemExit(str(error)) from None
    except asyncio.CancelledError:
        raise SystemExit("ended before all trainings were done; what is logged is not done again") from None
    console.print(table(options.out))
    draw(options.out, plot)
    console.print(f"Curves: {plot}")


if __name__ == "__main__":
    main()
