# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl status | tail``: what a service does, at a glance, by rollout and as it happens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.cli.jobs import connect
from nemo_gym_prorl.cli.show import failure_line, told_once, visible
from nemo_gym_prorl.failures import CallerError, InfrastructureError, Stage


_RECONNECT_S = 2.0
_FAILED = ("failed", "timed_out")


def pools(status: Mapping[str, Any]) -> Table:
    """Return the stages of a service's ``/status`` as a table."""
    table = Table("stage", "waiting", "working", "slots", box=None, pad_edge=False)
    for stage in Stage:
        pool = status["stages"][stage]
        table.add_row(stage.value, str(pool["waiting"]), str(pool["working"]), str(pool["slots"]))
    return table


def pools_line(status: Mapping[str, Any]) -> str:
    """Return the stages in a line."""
    told = ((stage, status["stages"][stage]) for stage in Stage)
    return ", ".join(
        f"{stage.upper()} {pool['working']} of {pool['slots']} working, {pool['waiting']} waiting"
        for stage, pool in told
    )


def show_status(url: str | None, token: str | None) -> None:
    """Print the service's state."""
    status = connect(url, token).get("/status", "stages", "held", "states", "sessions", "draining")
    held = [
        Text(visible(f"{name} cannot be reached, so no rollout begins: {held['reason']}"), style="red")
        for name, held in status["held"].items()
    ]
    states = ", ".join(f"{count} {state}" for state, count in status["states"].items() if count) or "no rollouts"
    more = "; draining" if status["draining"] else ""
    console = Console(highlight=False, emoji=False)
    console.print(Group(pools(status), *held, f"{states}; {status['sessions']} sandboxes held{more}"))


def show_rollout(url: str | None, token: str | None, rollout_id: str) -> None:
    """Print one rollout's state, as JSON."""
    job = connect(url, token).rollout(rollout_id)
    Console().print_json(data={name: value for name, value in job.items() if name != "result"})


def show_rollouts(url: str | None, token: str | None, group: str | None, state: str | None, failed: bool) -> None:
    """Print the rollouts that fit, oldest first; failed ones with what happened.

    Raises:
        CallerError: both a state and failed ones are asked for.
    """
    if failed and state is not None:
        raise CallerError("give either --state or --failed")
    console = Console(highlight=False, emoji=False)
    table = Table("id", "state", box=None, pad_edge=False)
    for column in ("reward", "turns", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("failure", overflow="fold")
    count = 0
    service = connect(url, token)
    for wanted in _FAILED if failed else (state,):
        for job in service.rollouts(state=wanted, group=group):
            count += 1
            if failed:
                _print_failed(console, job)
            else:
                table.add_row(*_cells(job))
    if table.row_count:
        console.print(table)
    console.print(f"{count} rollouts", style="dim")


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = (job["finished_at"] or time.time()) - job["submitted_at"]
    reward = "" if job["reward"] is None else f"{job['reward']:g}"
    kind = job["failure"]["kind"] if job["failure"] else ""
    return escape(job["id"]), job["state"], reward, str(job["turns"]), f"{seconds:.1f}", kind


def _print_failed(console: Console, job: Mapping[str, Any]) -> None:
    """An entry for each thing that went wrong: the last one is why the rollout has failed."""
    console.print(f"[bold]{escape(job['id'])}[/] [red]{job['state']}[/]", soft_wrap=True)
    for failure, times in told_once(job):
        console.print(Padding(Text(visible(failure_line(failure, times))), (0, 0, 0, 2)))
        if failure.get("traceback"):
            console.print(Padding(Text(visible(failure["traceback"]), style="dim"), (0, 0, 0, 4)))


def tail(url: str | None, token: str | None, after: str | None, group: str | None) -> None:
    """Print transitions as they happen, until interrupted. A service that goes away is waited for."""
    from nemo_gym_prorl.http.problem_document import ApiError

    console = Console(highlight=False, emoji=False, soft_wrap=True)
    seen = after
    service = connect(url, token)
    service.get("/status", "stages")  # a service that is not there is told at once
    while True:
        try:
            for event in service.events(seen):
                seen = event["cursor"]
                if group in (None, event["group"]):
                    console.print(_transition(event), markup=False)
            why = "the service closed the connection"
        except ApiError as error:
            if error.problem.status != 410:
                raise
            why, seen = f"{error.problem.detail}; going on with what comes now", None
        except InfrastructureError as error:
            why = str(error)
        console.print(f"{why}; trying again", style="yellow", markup=False)
        time.sleep(_RECONNECT_S)


def _transition(event: Mapping[str, Any]) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    end = "" if event.get("reward") is None else f" reward {event['reward']:g}"
    end += "" if event.get("failure_kind") is None else f" {event['failure_kind']}"
    return f"{event['cursor']} {moment} {event['id']} {event['state']}{end}"
