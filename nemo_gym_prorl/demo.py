# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration: real rollouts of a real Gym deployment, seen while they run.

Everything here is what a user would run: Gym's own command line starts ``--environment prorl_code``, the rollouts go
through the job API, tools and tests run in containers. Only the policy may be a stand-in: without an endpoint in
``PRORL_MODEL_URL`` the answers are scripted, the output says so, and since a script's reward is known beforehand,
the demonstration also checks that every rollout earned what it deserves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.demo_scripts import script_for
from nemo_gym_prorl.failures import CallerError, InfrastructureError, RolloutError, Stage
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView, StatusView
from nemo_gym_prorl.sandbox.images.building.default import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.scripted import server as scripted
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.serving.keys import authorization
from nemo_gym_prorl.task_sandboxes import PROGRESS
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems


AGENT = "prorl_code_agent"
ENVIRONMENT = "prorl_code"
GROUP = "demo"

SCRIPTS = ("repair", "reference", "repair", "reference", "stub", "repair", "text_only", "forge_tests")
"""The scripts of a scripted demonstration, in turn: honest ones, lazy ones, one that tampers with the tests."""

DESERVED = {"repair": 1.0, "reference": 1.0, "stub": 0.0, "text_only": 0.0, "forge_tests": 0.0}
"""The reward that each script deserves."""

_REFRESH_S = 0.25
_STATE_STYLES = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.TIMED_OUT: "red",
    JobState.CANCELLED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.EVALUATING: "magenta",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An inference endpoint.

    Attributes:
        url: base URL, ending in ``/v1``.
        model: the model's name there.
        api_key: its key.
        scripted: whether it is the scripted policy.
    """

    url: str
    model: str
    api_key: str
    scripted: bool


@dataclass(slots=True)
class Entry:
    """One rollout of the demonstration."""

    rollout_id: str
    task_id: str
    script: str | None
    row: dict[str, Any]
    job: JobView | None = None

    @property
    def as_deserved(self) -> bool:
        """Scored, and if the answers were scripted, with the reward that the script deserves."""
        if self.job is None or self.job.reward is None:
            return False
        return self.script is None or self.job.reward == DESERVED[self.script]


@dataclass(slots=True)
class Demo:
    """What to run and where to write.

    Attributes:
        rollouts: how many.
        output: JSONL file for the finished rollouts.
        overrides: further Hydra overrides for Gym.
        console: where to print.
    """

    rollouts: int = 16
    output: Path = Path("out/demo.jsonl")
    overrides: Sequence[str] = ()
    console: Console = field(default_factory=lambda: Console(highlight=False))

    async def run(self) -> bool:
        """Run it; ``True`` if every rollout was scored, and scripted ones as they deserve. Cancelled, it ends all
        that it has started.

        Raises:
            RolloutError: something that the demonstration needs is missing or fails.
        """
        begin = time.monotonic()
        await asyncio.to_thread(self._provide_sandboxes)
        async with _endpoint() as endpoint:
            self._introduce(endpoint)
            deployment = GymDeployment(
                environment=ENVIRONMENT,
                model_type="prorl_model",
                policy_base_url=endpoint.url,
                policy_model_name=endpoint.model,
                policy_api_key=endpoint.api_key,
                overrides=self.overrides,
            )
            self.console.print(f"Starting Gym servers (log: {deployment.log_path})", soft_wrap=True)
            telling = asyncio.create_task(deployment.tell(self._say, PROGRESS))
            async with deployment, RolloutClient(deployment.url(AGENT)) as client:
                telling.cancel()
                self.console.print(f"{len(deployment.instances)} Gym servers up in {deployment.start_s:.1f} s")
                entries = await deployment.guard(self._roll_out(client, _entries(self.rollouts, endpoint.scripted)))
        return self._report(entries, endpoint, time.monotonic() - begin)

    def _provide_sandboxes(self) -> None:
        runtime = ensure_runtime(self._say)
        # Gym's servers find it through the environment that they inherit.
        runtime.activate()
        image = ensure_image(KERNEL, self._say)
        self.console.print(f"Sandboxes: {runtime.flavor} {runtime.version_text}, image {image}", soft_wrap=True)

    def _say(self, message: str) -> None:
        self.console.print(f"  {message}", markup=False, soft_wrap=True)

    def _introduce(self, endpoint: Endpoint) -> None:
        if endpoint.scripted:
            self.console.print(
                f"[yellow]Policy: {MODEL_NAME}, no language model.[/] Its answers are written beforehand; everything "
                "else is real. Set PRORL_MODEL_URL to use a model.",
            )
        else:
            self.console.print(f"Policy: {endpoint.model} at {endpoint.url}", markup=False)

    async def _roll_out(self, client: RolloutClient, entries: list[Entry]) -> list[Entry]:
        """Submit all, show them until the last one ends, then fetch the results."""
        try:
            await asyncio.gather(
                *(client.submit(entry.row, id=entry.rollout_id, group=GROUP, client="demo") for entry in entries)
            )
            with Live(console=self.console, refresh_per_second=8, transient=True) as live:
                while not all(entry.job and entry.job.state.terminal for entry in entries):
                    await self._refresh(client, entries, live)
            for entry in entries:
                entry.job = await client.get(entry.rollout_id)
        except BaseException:
            # Give the sandboxes back in order before the servers are stopped.
            with contextlib.suppress(RolloutError, ApiError, TimeoutError):
                await asyncio.wait_for(client.cancel(group=GROUP), 10)
            raise
        return entries

    async def _refresh(self, client: RolloutClient, entries: list[Entry], live: Live) -> None:
        listing, status = await asyncio.gather(client.list(group=GROUP, limit=1000), client.status())
        jobs = {job.id: job for job in listing.rollouts}
        for entry in entries:
            entry.job = jobs.get(entry.rollout_id, entry.job)
        live.update(Group(_stage_line(status), _table(entries)))
        await asyncio.sleep(_REFRESH_S)

    def _report(self, entries: list[Entry], endpoint: Endpoint, seconds: float) -> bool:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_bytes(b"".join(_line(entry, endpoint) for entry in entries))
        self.console.print(_table(entries))
        scored = [entry.job.reward for entry in entries if entry.job and entry.job.reward is not None]
        mean = sum(scored) / len(scored) if scored else 0.0
        self.console.print(
            f"{len(scored)} of {len(entries)} rollouts scored, mean reward {mean:.2f}, {seconds:.1f} s in total. "
            f"Trajectories: {self.output}"
        )
        for entry in entries:
            if entry.job and entry.job.failure:
                failure = entry.job.failure
                self.console.print(
                    f"{entry.task_id}: {failure.kind} in {failure.stage}: {failure.reason}", markup=False, style="red"
                )
        wrong = [entry for entry in entries if not entry.as_deserved]
        if endpoint.scripted:
            self.console.print(
                f"[yellow]The policy was scripted ({MODEL_NAME}, no language model)[/]: these rewards show that the "
                "machinery works, and nothing about a model."
            )
            for entry in wrong:
                self.console.print(f"{entry.task_id}: the script {entry.script!r} earned another reward", style="red")
        return not wrong


@contextlib.asynccontextmanager
async def _endpoint() -> AsyncIterator[Endpoint]:
    """The endpoint that the environment variables name, or a scripted policy for the time of the demonstration."""
    url = os.environ.get("PRORL_MODEL_URL")
    if not url:
        async with scripted.serve() as base_url:
            yield Endpoint(base_url, MODEL_NAME, "none", scripted=True)
        return
    url = url.rstrip("/")
    api_key = os.environ.get("PRORL_API_KEY", "none")
    model = os.environ.get("PRORL_MODEL_NAME") or await _only_model(url, api_key)
    yield Endpoint(url, model, api_key, scripted=False)


async def _only_model(url: str, api_key: str) -> str:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(f"{url}/models", headers=authorization(api_key)) as response,
        ):
            response.raise_for_status()
            names = [str(card["id"]) for card in orjson.loads(await response.read())["data"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise InfrastructureError(
            f"can't read the models of {url}: {type(error).__name__}: {error}; "
            "PRORL_MODEL_URL is the base URL, usually ending in /v1"
        ) from error
    if len(names) != 1:
        raise CallerError(f"{url} serves {', '.join(names) or 'no model'}: name one", field="PRORL_MODEL_NAME")
    return names[0]


def _entries(count: int, with_scripts: bool) -> list[Entry]:
    """``count`` rollouts, one problem each; they start over when the problems run out."""
    every = list(problems().values())
    entries = []
    for i in range(count):
        problem = every[i % len(every)]
        script = SCRIPTS[i % len(SCRIPTS)] if with_scripts else None
        row = humaneval_row(problem, script_for(problem, script) if script else None)
        entries.append(Entry(f"{GROUP}-{i}", problem.task_id, script, row))
    return entries


def _stage_line(status: StatusView) -> Text:
    line = Text()
    for stage, pool in status.stages.items():
        line.append(f"{stage.upper()} ", style="bold")
        waiting = "ready" if stage is Stage.RUN else "waiting"
        line.append(f"{pool.working}/{pool.slots} working, {pool.waiting} {waiting}   ")
    line.append(f"sandboxes {status.sessions}", style="dim")
    return line


def _table(entries: list[Entry]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption="INIT, RUN, EVAL, Queue: seconds",
        caption_justify="right",
    )
    scripted_policy = any(entry.script for entry in entries)
    for title in ("Task", *(["Script"] if scripted_policy else []), "State"):
        table.add_column(title, no_wrap=True)
    for title in ("Turns", "Tools", "Reward", *(stage.upper() for stage in Stage), "Queue"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in entries:
        job = entry.job
        names = [entry.task_id, *([entry.script or ""] if scripted_policy else [])]
        if job is None:
            table.add_row(*names)
            continue
        reward = "" if job.reward is None else f"{job.reward:g}"
        times = [job.timings.get(stage) for stage in Stage]
        worked = [f"{spent.worked_s:.1f}" if spent else "" for spent in times]
        queued = sum(spent.waited_s for spent in times if spent)
        state = Text(job.state.value, style=_STATE_STYLES.get(job.state, ""))
        table.add_row(*names, state, str(job.turns), str(job.tool_calls), reward, *worked, f"{queued:.1f}")
    return table


def _line(entry: Entry, endpoint: Endpoint) -> bytes:
    record = {
        "task_id": entry.task_id,
        "policy": endpoint.model,
        "scripted": endpoint.scripted,
        "script": entry.script,
        "rollout": entry.job.model_dump(mode="json") if entry.job else None,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
