# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grades made tasks for real: the fix, nothing at all, and each half of a double bug.

Through the ``prorl_swe`` server as an agent would ask it, or through the whole service: ``--through prorl_agent`` has
Gym's own command line start and ask ``prorl_agent``, with a policy that plays turns. The fix must be resolved, all
else must earn 0. Prints a table; exit code 1 if it says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.scripted.server import serve
from nemo_gym_prorl.scripted.text import MODEL_NAME
from resources_servers.prorl_swe.app import ProRLSweConfig, ProRLSweServer
from scripts.scripted_turns.swe import VARIANTS, patching, with_turns
from scripts.swe_tasks.making import PARTIAL, ROWS, default_folder


RESPONSE = {
    "id": "resp_1",
    "created_at": 0,
    "model": "none",
    "object": "response",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
REPOSITORY = Path(__file__).parents[1]
EXPECTED = {"fix": 1.0, "nothing": 0.0, "half": 0.0}
ENVIRONMENT, AGENT = "prorl_swe", "prorl_swe_agent"
LONGEST_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is tried on a task: a patch, and by what name it goes."""

    kind: str
    row: dict[str, Any]
    patch: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What it earned; ``reward`` is ``None`` if it was no reward."""

    attempt: Attempt
    reward: float | None
    verdict: str
    seconds: float
    canaries: int = 0

    @property
    def as_expected(self) -> bool:
        return self.reward == EXPECTED[self.attempt.kind]


def attempts(folder: Path, packages: list[str]) -> list[Attempt]:
    rows = [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]
    halves = [json.loads(line) for line in (folder / PARTIAL).read_text().splitlines()]
    found = []
    for row in rows:
        name = row["instance_id"]
        if packages and package_of(row) not in packages:
            continue
        found += [Attempt("fix", row, row["swe"]["patch"]), Attempt("nothing", row, "")]
        found += [Attempt("half", row, half["patch"]) for half in halves if half["instance_id"] == name]
    return found


def package_of(row: dict[str, Any]) -> str:
    return str(row["instance_id"]).removeprefix("made__").rpartition("-")[0]


@asynccontextmanager
async def serving(unpack: bool) -> AsyncIterator[str]:
    """The server, as it is shipped; its base URL."""
    shipped = OmegaConf.load(REPOSITORY / "resources_servers/prorl_swe/configs/prorl_swe.yaml")
    shipped.sandbox.singularity.unpack = unpack
    settings = OmegaConf.to_container(shipped.prorl_swe.resources_servers.prorl_swe)
    server = ProRLSweServer(
        config=ProRLSweConfig(port=1, name="prorl_swe", **settings),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=shipped
        ),
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(server.setup_webserver(), log_level="warning", timeout_graceful_shutdown=5))
    running = asyncio.create_task(web.serve([listener]))
    while not web.started:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        await running
        listener.close()


async def attempt(base_url: str, tried: Attempt) -> Outcome:
    """A whole session, as an agent server has it."""
    started = time.monotonic()
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of an IP address
    async with aiohttp.ClientSession(base_url, cookie_jar=jar, timeout=aiohttp.ClientTimeout(1800)) as http:

        async def post(path: str, body: Any) -> Any:
            async with http.post(path, json=body) as answer:
                said = await answer.text()
                if answer.status != 200:
                    raise RuntimeError(f"{path}: {answer.status}: {said[:500]}")
                return json.loads(said) if "json" in answer.headers.get("Content-Type", "") else said

        try:
            await post("/seed_session", tried.row)
            for turn in turns(tried):
                for call in turn["tool_calls"]:
                    said = await post(f"/{call['name']}", call["arguments"])
                    if call["name"] == "bash" and "[exit code: 0]" not in said:
                        raise RuntimeError(f"the patch does not apply: {said[:500]}")
            graded = await post("/verify", tried.row | {"response": RESPONSE})
        except RuntimeError as error:
            return Outcome(tried, None, str(error), time.monotonic() - started)
        finally:
            async with http.post("/close_session", json={}):
                pass
    return outcome_of(tried, graded, time.monotonic() - started)


async def verify(tried: list[Attempt], in_flight: int, unpack: bool) -> list[Outcome]:
    places = asyncio.Semaphore(in_flight)
    async with serving(unpack) as base_url:

        async def one(each: Attempt) -> Outcome:
            async with places:
                outcome = await attempt(base_url, each)
            name, told = each.row["instance_id"], f"{outcome.reward} {outcome.verdict}, {outcome.canaries} canaries"
            print(f"{name:24} {each.kind:8} {told} {outcome.seconds:.1f} s", flush=True)
            return outcome

        return await asyncio.gather(*map(one, tried))


async def verify_through_agent(tried: list[Attempt], in_flight: int, unpack: bool) -> list[Outcome]:
    """The whole service, by Gym's command line."""
    with tempfile.TemporaryDirectory(prefix="prorl-verify-") as scratch:
        rows, results = Path(scratch, "rows.jsonl"), Path(scratch, "results.jsonl")
        lines = (json.dumps(with_turns(each.row, turns(each)) | {"tried": i}) for i, each in enumerate(tried))
        await asyncio.to_thread(rows.write_text, "".join(f"{line}\n" for line in lines))
        stages = f"++{AGENT}.responses_api_agents.prorl_agent.stages"
        overrides = (
            *(f"{stages}.{name}={in_flight}" for name in ("run", "eval")),
            f"++sandbox.singularity.unpack={str(unpack).lower()}",
        )
        async with (
            serve() as policy,
            GymDeployment(
                environment=ENVIRONMENT,
                model_type="prorl_model",
                policy_base_url=policy,
                policy_model_name=MODEL_NAME,
                overrides=overrides,
            ) as gym,
        ):
            words = ("eval", "run", "--no-serve", "--agent", AGENT, "-i", str(rows), "-o", str(results))
            await gym.run_gym(*words, timeout_s=LONGEST_S)
        done = await asyncio.to_thread(rows_of, results)
    return [outcome_of(each, done.get(i)) for i, each in enumerate(tried)]


def rows_of(results: Path) -> dict[int, dict[str, Any]]:
    """What Gym wrote, by attempt; rollouts that failed are in a file of their own."""
    lines = [line for file in results.parent.glob(f"{results.stem}*.jsonl") for line in file.read_text().splitlines()]
    return {row["tried"]: row for row in map(json.loads, lines) if "tried" in row and "reward" in row}


def turns(tried: Attempt) -> list[dict[str, Any]]:
    return patching(tried.patch) if tried.patch else VARIANTS["null"]("")


def outcome_of(tried: Attempt, row: dict[str, Any] | None, seconds: float | None = None) -> Outcome:
    if row is None:
        return Outcome(tried, None, "Gym wrote no row of it", 0.0)
    if seconds is None:
        seconds = sum(stage["worked"] for stage in row.get("rollout", {}).get("seconds", {}).values())
    if row.get("mask_sample"):
        return Outcome(tried, None, f"{row['failure_kind']}: {row['failure_reason']}"[:500], seconds)
    return Outcome(tried, row["reward"], row["verdict"], seconds, row["canaries_failed"])


def table(outcomes: list[Outcome]) -> Table:
    titles = ("fix resolved", "nothing resolved", "halves resolved", "fix with a canary")
    shown = Table("package", "tasks", *titles, box=None, pad_edge=False)
    packages = dict.fromkeys(package_of(outcome.attempt.row) for outcome in outcomes)
    for package in [*packages, "all"]:
        own = [outcome for outcome in outcomes if package in (package_of(outcome.attempt.row), "all")]
        tried = Counter(outcome.attempt.kind for outcome in own)
        solved = Counter(outcome.attempt.kind for outcome in own if outcome.reward == 1.0)
        fixes = [outcome for outcome in own if outcome.attempt.kind == "fix"]
        counts = [f"{solved[kind]}/{tried[kind]}" for kind in EXPECTED]
        asked = sum(outcome.canaries > 0 for outcome in fixes)
        shown.add_row(package, str(tried["fix"]), *counts, f"{asked}/{len(fixes)}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--through", choices=["server", "prorl_agent"], default="server")
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--mount", action="store_true", help="mount images and unpack none: less disk, slower starts")
    options = parser.parse_args()
    require_runtime().activate()
    started = time.monotonic()
    tried = attempts(options.folder, options.packages)
    how = verify if options.through == "server" else verify_through_agent
    outcomes = asyncio.run(how(tried, options.in_flight, not options.mount))
    console = Console(highlight=False)
    console.print(table(outcomes))
    wrong = [outcome for outcome in outcomes if not outcome.as_expected]
    for outcome in wrong:
        console.print(
            f"{outcome.attempt.row['instance_id']}, {outcome.attempt.kind}: {outcome.reward}, {outcome.verdict}",
            markup=False,
        )
    console.print(
        f"{len(outcomes)} rollouts through {options.through}, {options.in_flight} in flight, "
        f"{time.monotonic() - started:.0f} s, {len(wrong)} not as expected"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
