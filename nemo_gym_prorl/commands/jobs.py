# SPDX-License-Identifier: Apache-2.0
"""``prorl submit | status | cancel | tail``: a running service from the command line.

The service is found by ``--url``, else ``PRORL_URL``, else by asking Gym's head server which of its servers is a
``prorl_agent``. A control token comes from ``PRORL_TOKEN``, never from the command line, where others could read it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import aiohttp
import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView, StatusView


DEFAULT_HEAD = "http://127.0.0.1:11000"
"""Where Gym's head server listens unless told otherwise."""

_POLL_S = 0.5


@asynccontextmanager
async def connect(url: str | None) -> AsyncIterator[RolloutClient]:
    """A client of the service at ``url``, or of the one that Gym's head server knows."""
    found = url or os.environ.get("PRORL_URL") or await find_service(os.environ.get("PRORL_HEAD", DEFAULT_HEAD))
    async with RolloutClient(found, os.environ.get("PRORL_TOKEN")) as client:
        yield client


async def find_service(head: str) -> str:
    """URL of the one ``prorl_agent`` of a running Gym deployment.

    Raises:
        InfrastructureError: no head server answers.
        CallerError: the deployment has none, or several.
    """
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{head}/server_instances") as response:
            instances = orjson.loads(await response.read())
    except aiohttp.ClientError as error:
        raise InfrastructureError(
            f"no NeMo Gym deployment answers at {head}: {error}; start one, or give --url or PRORL_URL",
            kind=FailureKind.TRANSPORT_UNREACHABLE,
        ) from error
    agents = {entry["process_name"]: entry["url"] for entry in instances if entry["name"] == "prorl_agent"}
    if len(agents) != 1:
        names = ", ".join(f"{name} ({url})" for name, url in agents.items()) or "none"
        raise CallerError(f"the deployment at {head} must have one prorl_agent, has {names}", field="--url")
    return str(next(iter(agents.values())))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file.

    Raises:
        CallerError: a line is no JSON object; names the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise CallerError(f"is not JSON: {error}", field=f"{path}:{number}") from error
            if not isinstance(row, dict):
                raise CallerError("must be a JSON object", field=f"{path}:{number}")
            yield row


@dataclass
class Tally:
    """What became of the submitted rollouts so far."""

    total: int
    states: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)

    def add(self, job: JobView) -> None:
        """Count one that ended."""
        self.states[job.state] += 1
        if job.failure is not None:
            self.failures[job.failure.kind] += 1
        if job.reward is not None:
            self.rewards.append(job.reward)

    @property
    def ended(self) -> int:
        """Rollouts with an outcome."""
        return self.states.total()

    def line(self) -> str:
        """In words."""
        parts = [f"{count} {state}" for state, count in sorted(self.states.items())]
        if self.rewards:
            parts.append(f"mean reward {sum(self.rewards) / len(self.rewards):.3f} over {len(self.rewards)}")
        parts += [f"{kind}: {count}" for kind, count in sorted(self.failures.items())]
        return ", ".join(parts) or "none ended yet"


async def submit(
    path: Path, *, url: str | None, repeats: int, client_name: str, priority: int, output: Path | None, detach: bool
) -> int:
    """Submit every row ``repeats`` times and follow the rollouts to their end.

    Interrupted, it cancels what it submitted. Returns the number of rollouts that failed.
    """
    rows = list(read_rows(path))
    group = f"submit-{os.getpid()}-{int(time.time())}"
    console = Console()
    async with connect(url) as client:
        cursor = (await client.list(limit=1)).cursor
        if detach:
            for row in rows:
                for _ in range(repeats):
                    console.print((await client.submit(row, group=group, client=client_name, priority=priority)).id)
            console.print(f"group {group}", style="dim")
            return 0
        tally = Tally(len(rows) * repeats)
        try:
            submitting = asyncio.create_task(_submit_all(client, rows, repeats, group, client_name, priority))
            await _follow(client, group, cursor, tally, submitting, output, console)
        except asyncio.CancelledError:
            console.print("interrupted: cancelling what was submitted", style="yellow")
            submitting.cancel()
            await client.cancel(group=group)
            raise
        console.print(tally.line())
        return tally.ended - tally.states[JobState.SUCCEEDED]


async def _submit_all(
    client: RolloutClient, rows: list[dict[str, Any]], repeats: int, group: str, client_name: str, priority: int
) -> None:
    for row in rows:
        for _ in range(repeats):
            await client.submit(row, group=group, client=client_name, priority=priority)


async def _follow(
    client: RolloutClient,
    group: str,
    cursor: str,
    tally: Tally,
    submitting: asyncio.Task[None],
    output: Path | None,
    console: Console,
) -> None:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = bar.add_task("rollouts", total=tally.total)
    sink: IO[bytes] | None = output.open("wb") if output else None
    try:
        with Live(bar, console=console, transient=True) as live:
            while tally.ended < tally.total:
                if submitting.done():
                    submitting.result()  # a refused row ends the command
                # With results also where nobody wants them: what was never read stays in the service's memory.
                page = await client.ended(cursor, group=group, wait=_POLL_S, results=True)
                cursor = page.cursor
                for job in page.rollouts:
                    tally.add(job)
                    if sink is not None:
                        sink.write(orjson.dumps(_line(job)) + b"\n")
                bar.update(task, completed=tally.ended)
                live.update(Group(bar, tally.line(), pools(await client.status())))
    finally:
        if sink is not None:
            sink.close()


def _line(job: JobView) -> dict[str, Any]:
    about = job.model_dump(mode="json", exclude={"result"})
    return {**(job.result or {}), "rollout": about}


def pools(status: StatusView) -> Table:
    """The stages of a service as a table."""
    table = Table("stage", "waiting", "working", "slots", box=None, pad_edge=False)
    for stage in Stage:
        pool = status.stages[stage]
        table.add_row(stage.value, str(pool.waiting), str(pool.working), str(pool.slots))
    return table


async def show_status(url: str | None, rollout_id: str | None) -> None:
    """Print the service's state, or one rollout's."""
    console = Console()
    async with connect(url) as client:
        if rollout_id is not None:
            console.print_json((await client.get(rollout_id)).model_dump_json(exclude={"result"}))
            return
        status = await client.status()
        console.print(pools(status))
        states = ", ".join(f"{count} {state}" for state, count in status.states.items() if count) or "no rollouts"
        console.print(f"{states}; {status.sessions} sandboxes held{'; draining' if status.draining else ''}")


async def cancel(url: str | None, ids: list[str], group: str | None) -> int:
    """Cancel rollouts; returns how many ids the service does not know.

    Raises:
        CallerError: neither ids nor a group are given, or both.
    """
    if bool(ids) == (group is not None):
        raise CallerError("give either rollout ids or --group", field="IDS")
    console = Console()
    async with connect(url) as client:
        answer = await client.cancel(ids or None, group=group)
    for job in answer.rollouts:
        console.print(f"{job.id} {job.state}")
    for unknown in answer.unknown:
        console.print(f"{unknown} unknown", style="red")
    return len(answer.unknown)


async def tail(url: str | None, after: str | None) -> None:
    """Print transitions as they happen, until interrupted."""
    console = Console()
    async with connect(url) as client:
        async for event in client.events(after):
            moment = time.strftime("%H:%M:%S", time.localtime(event.at))
            end = "" if event.reward is None else f" reward {event.reward:g}"
            end += "" if event.failure_kind is None else f" {event.failure_kind}"
            console.print(f"{event.cursor} {moment} {event.id} {event.state}{end}", highlight=False, soft_wrap=True)
