# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Compatibility of agent programs: each harness in each environment, with a scripted policy and the whole service.

``python -m benchmarks.harnesses`` runs the programs whose bundles are built, in sandboxes without a network. The
policy lists files, then alternately solves the task or does nothing, so half of the rollouts deserve reward 1. The
result of a program in an environment (a cell) replaces the last cell of the same program, environment, Gym and user
in ``results/harnesses.json``. A rollout works if it has the deserved reward and exit code 0, if no output of a
command is lost, and if each trained turn has the engine's tokens and continues the turn before. A cell is

- *validated* if all its rollouts work,
- *unstable* if only some rollouts work, and *unsupported* if none works or the bundle is missing.

Tokens are bytes, so prompts are four times as long as with a real tokenizer. Core-seconds are those of the whole
service, of its sandboxes with set-up and scoring, and of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import re
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import processes, report
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.harness.bundles import find_bundles
from nemo_gym_prorl.harness.specification import load_harness, shipped_harnesses
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.agent.peers import address, deployment, reference
from tests.policy.families import TEMPLATES
from tests.policy.runtimes import server
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.tokenizers import tokenizer_of
from tests.prorl_code.conftest import build
from tests.rollout.serving import serve
from tests.tasks.harbor import folders
from tests.tasks.swe import tally


CHATML = (TEMPLATES / "chatml.jinja").read_text()
BYTES = tokenizer_of("bytes", CHATML, "<|im_end|>")

CONTEXT = 1_000_000
"""Context window of the engine, in bytes; the longest first prompt has 80,000."""

AT_ONCE = 2
"""Concurrent rollouts."""

TURNS = 3
"""Turns of a rollout: two commands and a final answer. The policy repeats a command whose output is lost."""

SHELLS = {"exec_command": "cmd", "Bash": "command", "run_shell_command": "command", "bash": "command"}
"""Names of the programs' shell tools, each with the argument for the command."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Command that ends mini-swe-agent, whose prompt names it."""


class Player(ScriptedEngine):
    """Engine whose policy runs the command of the task whose mark (``[task m3]``) is in the prompt.

    Attributes:
        commands: command by mark of the task.
        answers: prompt ids and sampled ids of all turns.
    """

    def __init__(self) -> None:
        super().__init__(BYTES, context=CONTEXT)
        self.commands: dict[str, str] = {}
        self.answers: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def say(self, body: dict[str, Any]) -> str:
        """Return the next turn: a call of the program's shell tool, or the final answer."""
        said = f"{self._turn(BYTES.decode(body['prompt']))}<|im_end|>"
        self.answers.add((tuple(body["prompt"]), tuple(BYTES.encode(said))))
        return said

    def _turn(self, prompt: str) -> str:
        mark = re.search(r"\[task (\w+)\]", prompt)
        tool = next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)
        if mark is None or tool is None:
            return "A title."
        commands = ["pwd; ls", self.commands[mark[1]], *([SUBMIT] if SUBMIT in prompt else [])]
        done = len(set(re.findall(r"turn-(\d)-over", prompt)))
        if done >= len(commands):
            return "All done."
        # The shell computes the mark of the turn, so only the command's output contains it, not the command.
        end = "" if commands[done] == SUBMIT else f"\necho turn-$(({done}+1))-over"
        extra: dict[str, Any] = {"description": "works"} if tool in ("Bash", "bash") else {}
        extra |= {"is_background": False} if tool == "run_shell_command" else {}
        call = {"name": tool, "arguments": {SHELLS[tool]: commands[done] + end, **extra}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def cases(environment: str, folder: Path, count: int) -> list[tuple[dict[str, Any], str]]:
    if environment == "prorl_swe":
        return [(tally.row(), tally.APPLY_FIX)] * count
    if environment == "prorl_harbor":
        return [(folders.row_of(folders.make_task(folder / "task")), folders.ANSWER)] * count
    chosen = itertools.islice(itertools.cycle(problems().values()), count)
    write = "echo {} | base64 -d > solution.py"
    return [
        (humaneval_row(one), write.format(base64.b64encode(one.reference_source.encode()).decode())) for one in chosen
    ]


def marked(row: dict[str, Any], mark: str) -> dict[str, Any]:
    row = json.loads(json.dumps(row))
    params = row["responses_create_params"]
    params["input"] = [*params["input"], {"role": "user", "content": f"[task {mark}]"}]
    return dict(row)


@dataclass(frozen=True)
class Rollout:
    """Result of one rollout.

    Attributes:
        deserved: reward that the policy's commands deserve.
        exact: whether each trained turn has the engine's tokens and continues the tokens of the turn before.
    """

    deserved: float
    reward: float | None
    exit_code: int | None
    turns: int
    exact: bool
    token_in_rate: float | None
    seconds: float
    failure: str

    @property
    def works(self) -> bool:
        ended = self.exit_code == 0 and self.turns == TURNS
        return self.reward == self.deserved and ended and self.exact and self.token_in_rate == 1.0


def measured(deserved: float, answer: dict[str, Any], engine: Player) -> Rollout:
    about = answer.get("rollout") or {}
    ran = about.get("harness") or {}
    items = [item for item in answer.get("response", {}).get("output", []) if "generation_token_ids" in item]
    turns = [(tuple(item["prompt_token_ids"]), tuple(item["generation_token_ids"])) for item in items]
    continued = all(
        later[: len(prompt) + len(ids)] == prompt + ids for (prompt, ids), (later, _) in itertools.pairwise(turns)
    )
    return Rollout(
        deserved,
        answer.get("reward"),
        ran.get("exit_code"),
        about.get("turns") or 0,
        bool(turns) and continued and all(turn in engine.answers for turn in turns),
        about.get("token_in_rate"),
        ran.get("seconds") or 0.0,
        answer.get("failure_reason") or ran.get("output") or "",
    )


async def run_cell(harness: str, environment: str, count: int, folder: Path) -> list[Rollout]:
    engine = Player()
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(serve(engine.app()))
        policy = {"engine": "vllm", "tokenizer": saved(folder, BYTES, CHATML), "tool_call_parser": "hermes"}
        model = server(upstream, folder, policy=policy)
        model_url = await stack.enter_async_context(serve(model.setup_webserver()))
        environment_url = await stack.enter_async_context(serve(build(environment).setup_webserver()))
        at = await stack.enter_async_context(
            deployment(
                elsewhere={"task": address(environment_url), "policy_model": address(model_url)},
                resources_server=reference("task"),
                handler="harness",
                handler_config={"harness": harness},
                budgets={"run": 300.0},
            )
        )
        limit = asyncio.Semaphore(AT_ONCE)

        async def run(number: int, row: dict[str, Any], command: str) -> Rollout:
            mark, deserved = f"m{number}", float(number % 2 == 0)
            engine.commands[mark] = command if deserved else "echo nothing"
            collected = {"_ng_task_index": number, "_ng_rollout_index": 0}  # `/run` then reports a failure as a row
            async with limit, at.http.post(f"{at.url}/run", json=marked(row, mark) | collected) as reply:
                answer = await reply.json(content_type=None)
            if reply.status != 200:
                answer = {"failure_reason": f"status {reply.status}: {answer}"}
            return measured(deserved, answer, engine)

        rows = cases(environment, folder, count)
        return await asyncio.gather(*(run(number, *case) for number, case in enumerate(rows)))


async def cell_of(name: str, environment: str, count: int) -> dict[str, Any]:
    """Run the rollouts of a harness in an environment, and return the cell; rewards are sums over the rollouts."""
    cell: dict[str, Any] = {"harness": name, "version": load_harness(name).version, "environment": environment}
    cell |= {"gym": version("nemo-gym"), "user": "ordinary" if os.geteuid() else "root", "rollouts": count}
    try:
        find_bundles(load_harness(name), name)
    except InfrastructureError as error:
        return {**cell, "verdict": "unsupported", "works": 0, "note": error.reason}
    load, used = os.getloadavg()[0], processes.core_seconds(os.getpid())
    with tempfile.TemporaryDirectory(prefix="prorl-harness-") as folder:
        rollouts = await run_cell(name, environment, count, Path(folder))
    used = processes.core_seconds(os.getpid()) - used
    works, calls = sum(one.works for one in rollouts), sum(one.turns for one in rollouts)
    broken = next((one for one in rollouts if not one.works), None)
    return cell | {
        "verdict": "validated" if works == count else "unstable" if works else "unsupported",
        "works": works,
        "deserved": sum(one.deserved for one in rollouts),
        "given": sum(one.reward or 0.0 for one in rollouts),
        "token_in_rate": min(one.token_in_rate or 0.0 for one in rollouts),
        "calls": calls,
        "seconds": round(report.median([one.seconds for one in rollouts]), 2),
        "core_seconds_per_call": round(used / max(calls, 1), 3),
        "load": round(load, 1),
        "note": str(broken)[:600] if broken else "",
    }


async def measure(options: argparse.Namespace) -> None:
    processes.subreaper()
    for name, environment in itertools.product(options.harnesses, options.environments):
        cell = await cell_of(name, environment, 2 if options.quick else options.tasks)
        print(json.dumps(cell), flush=True)
        report.publish_cell(cell, quick=options.quick)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--harnesses", nargs="+", default=shipped_harnesses())
    parser.add_argument("--environments", nargs="+", default=["prorl_code", "prorl_swe", "prorl_harbor"])
    parser.add_argument("--tasks", type=int, default=16)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
