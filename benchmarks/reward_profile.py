# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a real model earns in each environment, however small it is: Gym's own reward profiles.

The model is SmolLM2-135M-Instruct, which a package of the index carries along, in a vLLM on the CPU; `prorl_model`
renders and reads its turns. Rows are the environments' own (HumanEval's, the examples of science and of repositories)
and, since mathematics that it could do are in no dataset, sums of two numbers behind two that are done, so that it
knows where the answer goes. Gym's command line does the rest: `gym eval run` collects several rollouts of each row,
`gym eval profile` makes the profile that these figures are of.

A profile says whether an environment can be learnt from: a mean reward between its ends, and rows whose rollouts
differ (with variance). This model can't do software engineering, and hardly uses tools; a failure of our own would
show as a masked rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_engines import SCRIPTS, engines
from benchmarks.report import Figure, publish
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.tasks.math.task import row_of


ROOT = Path(__file__).parents[1]
ROWS, REPEATS = 16, 4
MODEL = "tiny"
"""Its name at the engine."""
LIMITS = {"max_steps": 4}
"""Turns of a rollout."""
TOKENS = 256
"""Of one turn."""
DONE = [
    {"role": "user", "content": "What is 4 + 3?"},
    {"role": "assistant", "content": "4 + 3 = 7, so the answer is \\boxed{7}."},
    {"role": "user", "content": "What is 12 + 9?"},
    {"role": "assistant", "content": "12 + 9 = 21, so the answer is \\boxed{21}."},
]


def rows_of(environment: str, count: int) -> list[dict[str, Any]]:
    """The first rows of an environment."""
    if environment == "prorl_math":
        pairs = [(3 * number + 2, 5 * number % 9 + 1) for number in range(count)]
        sums = [row_of({"problem": f"What is {a} + {b}?", "answer": a + b}) for a, b in pairs]
        for row in sums:
            row["agent_ref"] = {"type": "responses_api_agents", "name": f"{environment}_agent"}
            row["responses_create_params"]["input"][1:1] = DONE
        return sums
    folder = ROOT / "resources_servers" / environment / "data"
    files = [folder / "train.jsonl", folder / "example.jsonl"]
    lines = next(path for path in files if path.is_file()).read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


async def profile(environment: str, url: str, model: Path, rows: int, repeats: int, folder: Path) -> list[Figure]:
    """An environment's profile by Gym's commands, as figures."""
    agent = f"{environment}_agent"
    asked, rollouts = folder / "rows.jsonl", folder / "rollouts.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows_of(environment, rows)))
    ours = "++policy_model.responses_api_models.prorl_model.policy"
    deployment = GymDeployment(
        environment=environment,
        model_type="prorl_model",
        policy_base_url=f"{url}/v1",
        policy_model_name=MODEL,
        overrides=[
            f"{ours}.engine=vllm",
            f"{ours}.tokenizer={model}",
            *(f"++{agent}.responses_api_agents.prorl_agent.{name}={limit}" for name, limit in LIMITS.items()),
        ],
    )
    async with deployment as gym:
        wanted = ["--num-repeats", str(repeats), "--max-output-tokens", str(TOKENS), "--temperature", "0.7"]
        files = ["-i", str(asked), "-o", str(rollouts)]
        await gym.run_gym("eval", "run", "--no-serve", "--agent", agent, *files, *wanted, timeout_s=3000)
        inputs = folder / "rollouts_materialized_inputs.jsonl"
        await gym.run_gym("eval", "profile", "--inputs", str(inputs), "--rollouts", str(rollouts))
    profiled = folder / "rollouts_reward_profiling.jsonl"
    return figures(environment, _lines(profiled), _lines(rollouts))


def figures(
    environment: str, tasks: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    """Of Gym's profile of each task, and of the rollouts themselves."""
    rewards = [task["mean/reward"] for task in tasks]
    varied = [task for task in tasks if task["max/reward"] > task["min/reward"]]
    best = [task for task in tasks if task["max/reward"] > 0]
    masked = sum(bool(rollout.get("mask_sample")) for rollout in rollouts)
    turns = sum(rollout["rollout"]["turns"] for rollout in rollouts) / len(rollouts)
    calls = sum(rollout["rollout"]["tool_calls"] > 0 for rollout in rollouts) / len(rollouts)
    boxed = [(box, rollout) for rollout in rollouts if len(box := _BOX.findall(json.dumps(rollout["response"]))) == 1]
    wrong = [
        row for [box], row in boxed if "expected_answer" in row and (box == row["expected_answer"]) != row["reward"]
    ]
    told = [Figure(f"{environment}: one number in a box, and another reward", len(wrong), f"of {len(boxed)}", "<= 0")]
    return [
        *(told if environment == "prorl_math" else []),
        Figure(f"{environment}: rollouts", len(rollouts), ""),
        Figure(f"{environment}: masked", masked, "", "<= 0"),
        Figure(f"{environment}: mean reward", sum(rewards) / len(rewards), ""),
        Figure(f"{environment}: rows with variance", len(varied) / len(tasks), ""),
        Figure(f"{environment}: rows with a reward at all", len(best) / len(tasks), ""),
        Figure(f"{environment}: turns", turns, ""),
        Figure(f"{environment}: rollouts with a tool call", calls, ""),
    ]


_BOX = re.compile(r"boxed\{(\d+)\}")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(environments: Sequence[str], rows: int, repeats: int) -> list[Figure]:
    """All environments, one after the other, on one engine."""
    done = subprocess.run([SCRIPTS / "setup_vllm.sh"], check=True, capture_output=True, text=True)
    python = Path(done.stdout.strip().splitlines()[-1])
    model = python.parents[1] / "small-model"
    if not (model / "config.json").is_file():
        subprocess.run([python, SCRIPTS / "make_small_model.py", model], check=True, capture_output=True)
    made = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        [url] = stack.enter_context(engines(python, 1, folder, model))
        for environment in environments:
            own = folder / environment
            own.mkdir()
            made += asyncio.run(profile(environment, url, model, rows, repeats, own))
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of it; writes nothing")
    quick = parser.parse_args().quick
    every = ["prorl_code", "prorl_math", "prorl_stem", "prorl_swe"]
    share = 4 if quick else 1
    publish("reward_profile", measure(every, ROWS // share, REPEATS // share), quick=quick)


if __name__ == "__main__":
    main()
