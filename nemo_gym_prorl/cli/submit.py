# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl submit``: submits a file of rows as rollouts and follows each to exactly one outcome.

Ids are ``<run>-<line>-<repeat>``, so submitting is idempotent: running rollouts are joined, and lost rollouts are
submitted again, also after the service was away. An id that the service cancelled or forgot without an outcome is
followed by a new id, ``<run>-<line>-<repeat>.2``. The repeats of a row form a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from pydantic import ValidationError
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nemo_gym_prorl.cli.service import engine_outages, find_service, head_url, pools, pools_line, split_urls
from nemo_gym_prorl.cli.submit_report import (
    RefusedRow,
    ResultsFile,
    RowRepeat,
    RunSummary,
    print_refused,
    print_report,
    read_rows,
)
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.fleet.dispatcher import FleetDispatcher
from nemo_gym_prorl.fleet.forwarder import MAX_LOST_NODES, LossReason
from nemo_gym_prorl.fleet.placement import NodeList
from nemo_gym_prorl.http.keys import CLIENT_KEY
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, SubmitRequest, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import NO_CLIENT
from nemo_gym_prorl.rollout.status import StatusView
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY


PATIENCE_S = 600.0
"""How long a service may be unreachable during a submission; a restarted service is back within a minute."""

PROGRESS_S = 30.0  # between two lines of progress without a terminal, so that log files stay readable
FIND_S = 5.0
"""Interval at which the service's URL is read from the head server: a restarted deployment has new ports."""
NO_PROGRESS_S = 10.0  # without the end of a rollout, until engines that are down are reported
_ID_CHARACTERS = "must not contain / ? # or control characters such as line ends"
_POLL_S = 0.5
_CANCEL_TIMEOUT_S = 30.0  # for the cancellation of all rollouts after Ctrl-C: sandboxes end within seconds
_MAX_IN_FLIGHT = 10_000  # rollouts: above the slots of any service, and each takes memory here


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Options of ``prorl submit``.

    Attributes:
        run: name of the submission, the prefix of every id; ``None`` resumes that of ``output``, or generates a name.
        environment: environment of all rows; ``None`` selects it by each row's ``data_source``.
        patience_s: how long the service may be unreachable.
        client: client of rows that name none, for fair sharing.
    """

    rows: Path
    repeats: int = 1
    run: str | None = None
    environment: str | None = None
    output: Path | None = None
    patience_s: float = PATIENCE_S
    client: str = "cli"


async def submit(options: SubmitOptions, url: str | None, token: str | None) -> bool:
    """Submit every row ``repeats`` times and follow the rollouts to their end; cancel them when interrupted.

    Returns:
        Whether every rollout was scored and no row refused.

    Raises:
        CallerError: the file has no rows, or an option is invalid. Nothing was submitted.
        InfrastructureError: the service cannot be reached, or was unreachable for too long.
        ApiError: the service refuses all rows, for example because of the key.
    """
    console = Console()
    if (token or "").startswith(CLIENT_KEY):
        options = replace(options, client=NO_CLIENT)  # the key identifies the client

    def say(line: str) -> None:
        console.print(line, style="yellow", markup=False, soft_wrap=True)

    rows, refused = read_rows(options.rows)
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(ResultsFile(options.output, rows, options.run)) if options.output else None
        name = (results.run if results else options.run) or f"submit-{secrets.token_hex(4)}"
        _check_name(name, options.repeats)
        summary = RunSummary(len(rows) * options.repeats, list(refused))
        print_refused(console, str(options.rows), refused)
        pending = {RowRepeat(line, repeat): row for line, row in rows.items() for repeat in range(options.repeats)}
        for place, job in (results.done if results else {}).items():
            if pending.pop(place, None) is not None:
                summary.add(place, job)
        if summary.ended:
            say(
                f"{summary.ended} rollouts have a result in {options.output}; they are skipped; "
                "name another --output, and another --run if you name one, to run them again"
            )
        if pending:
            async with (
                services(url, token) as clients,
                SubmittedRun(clients, name, options, summary, results, say) as run,
            ):
                stack.callback(asyncio.create_task(_report_engines(clients, token, summary, say)).cancel)
                at = ", ".join(client.url for client in clients)
                console.print(f"submission {run.name} at {at}", style="dim", soft_wrap=True)
                with _progress(summary, console) as show:
                    async with _cancel_on_interrupt(run, console):
                        await run.complete(pending, show)
        print_refused(console, str(options.rows), summary.refused[len(refused) :])
        print_report(console, summary, options.repeats)
        return summary.all_scored


@contextlib.contextmanager
def _progress(summary: RunSummary, console: Console) -> Iterator[Callable[[StatusView | None], None]]:
    """Yield a function that shows the progress: a bar and the pools on a terminal, else a line every 30 s."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task("rollouts", total=summary.total)
    start = last_line = time.monotonic()

    def show(status: StatusView | None) -> None:
        nonlocal last_line
        if console.is_terminal:
            bar.update(task, completed=summary.ended)
            live.update(Group(bar, summary.line(), *([pools(status.model_dump())] if status else [])))
        elif (now := time.monotonic()) - last_line >= PROGRESS_S:
            last_line = now
            counts = f"{summary.ended} of {summary.total} rollouts; {summary.line()}"
            stages = f"; {pools_line(status.model_dump())}" if status else "; no status from the service yet"
            console.print(f"{now - start:.0f} s: {counts}{stages}", markup=False, highlight=False, soft_wrap=True)

    with Live(bar, console=console, transient=True) as live:
        yield show


async def _report_engines(
    clients: Sequence[RolloutClient], token: str | None, summary: RunSummary, say: Callable[[str], None]
) -> NoReturn:
    """Report each engine outage once, while no rollout ends: rollouts wait for an engine without failing."""
    said = set[str]()
    while True:
        ended = summary.ended
        await asyncio.sleep(NO_PROGRESS_S)
        for client in clients if ended == summary.ended else ():
            for line in await asyncio.to_thread(list, engine_outages(client.url, token)):
                if line not in said:
                    said.add(line)
                    say(line)


@contextlib.asynccontextmanager
async def _cancel_on_interrupt(run: SubmittedRun, console: Console) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        console.print("interrupted: cancelling the submitted rollouts", style="yellow")
        if uncancelled := await run.cancel():
            why = "because the service does not answer; they continue if the service still runs"
            console.print(f"{uncancelled} rollouts were not cancelled, {why}", style="yellow", soft_wrap=True)
        console.print(run.summary.line(), highlight=False, soft_wrap=True)
        raise


def _check_name(name: str, repeats: int) -> None:
    """Validate the longest id of a submission with the service's request model."""
    row = {"responses_create_params": {"input": ""}}
    try:
        SubmitRequest.model_validate({"row": row, "id": f"{name}-{2**31}-{repeats}"})
    except ValidationError as error:
        first = error.errors()[0]
        wrong = _ID_CHARACTERS if first["type"] == "string_pattern_mismatch" else in_words(field_errors([first]))
        raise CallerError(wrong, field="--run") from None


def _rollout_options(options: SubmitOptions, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields given by the options; the service takes missing fields from the row."""
    own = row.get(ROLLOUT_OPTIONS_KEY)
    given = {} if isinstance(own, Mapping) and "client" in own else {"client": options.client}
    return given if options.environment is None else {**given, "environment": options.environment}


@contextlib.asynccontextmanager
async def services(url: str | None, token: str | None) -> AsyncIterator[list[RolloutClient]]:
    """Yield unopened clients of the services at ``url`` (comma-separated), or of the head server's ``prorl_agent``.

    The URL of the latter is updated while the context is open, because a restarted deployment has new ports.

    Raises:
        InfrastructureError, CallerError: see :func:`~nemo_gym_prorl.cli.service.find_service`.
    """
    if urls := split_urls(url):
        yield [RolloutClient(service_url, token) for service_url in urls]
        return
    client = RolloutClient(await asyncio.to_thread(find_service, head_url(), token), token)
    updating = asyncio.create_task(_update_url(client, token))
    try:
        yield [client]
    finally:
        updating.cancel()


async def _update_url(client: RolloutClient, token: str | None) -> None:
    while True:
        await asyncio.sleep(FIND_S)
        with contextlib.suppress(RolloutError, ApiError):
            client.url = await asyncio.to_thread(find_service, head_url(), token)


async def _check_service(client: RolloutClient) -> None:
    """Raise unless the service answers, accepts the key and has a compatible version."""
    await client.list(limit=1)
    if trouble := (await client.status()).version_mismatch():
        raise InfrastructureError(f"{client.url} is not compatible: {trouble}")


@dataclass(eq=False, slots=True)
class _Rollout:
    place: RowRepeat
    row: dict[str, Any]
    id_number: int = 1
    """Number of ids used so far; the service may remember earlier ids as cancelled."""
    submitted: bool = False
    """Whether this process has submitted the current id."""


class SubmittedRun:
    """Rollouts of one submission at one or several services. An async context manager; leaving cancels nothing.

    Args:
        clients: unopened clients of the services that share the rollouts.
        name: name of the submission, the prefix of every id.
        options: options of the command.
        summary: counts the outcomes.
        results: file for the results, if any.
        say: called with a line when a service goes away or comes back.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        name: str,
        options: SubmitOptions,
        summary: RunSummary,
        results: ResultsFile | None,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.summary = name, summary
        self._clients, self._options, self._results = clients, options, results
        self._say = say
        self._held_lines: list[str] | None = []
        """Lines to print once a service has answered; without an answer, the error has the same content."""
        self._services = FleetDispatcher(
            NodeList(clients, field="--url"),
            tokens=TokenForm.ITEMS,
            on_ended=self._ended,
            on_lost=self._lost,
            on_error=lambda node, error: self._broke(error),
            report=lambda line: self._held_lines.append(line) if self._held_lines is not None else say(line),
            is_wanted=self._follows,
            patient=len(clients) > 1,
        )
        self._queue: deque[_Rollout] = deque()
        self._open: dict[str, _Rollout] = {}
        """Submitted rollouts without an outcome, by id."""
        self._cancelled = False
        self._error: BaseException | None = None
        self._done = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._services.start()
        try:
            checks = [_check_service(client) for client in self._clients]
            answers = await asyncio.gather(*checks, return_exceptions=True)
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            if len(errors) == len(answers):
                raise errors[0]  # no service is usable: fail at once
            lines, self._held_lines = self._held_lines or [], None
            for line in lines:
                self._say(line)
        except BaseException:
            await self._services.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._services.close()

    async def complete(
        self, pending: dict[RowRepeat, dict[str, Any]], show: Callable[[StatusView | None], None] = lambda status: None
    ) -> None:
        """Submit rollouts; return when each has an outcome.

        ``show`` is called twice a second with the services' status, ``None`` before the first status.
        """
        self._queue.extend(_Rollout(place, row) for place, row in pending.items())
        self._submit_next()
        away_since: float | None = None
        while not self._done.is_set():
            away_since = (away_since or time.monotonic()) if self._services.away else None
            if away_since is not None and time.monotonic() - away_since > self._options.patience_s:
                raise InfrastructureError(
                    f"the service has been unreachable for {self._options.patience_s:g} s; to continue, repeat the "
                    f"command with --run {self.name}",
                    kind=FailureKind.TRANSPORT_UNREACHABLE,
                )
            statuses = self._services.statuses
            show(StatusView.sum(statuses.values()) if statuses else None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), _POLL_S)
        if self._error is not None:
            raise self._error

    async def cancel(self) -> int:
        """Cancel rollouts without an outcome, within 30 s; return how many the service has not confirmed."""
        self._cancelled = True
        self._done.clear()
        for rollout_id in self._open:
            self._services.cancel(rollout_id)
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while self._open and not self._services.away and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), _POLL_S)
        return len(self._open)

    def id_of(self, rollout: _Rollout) -> str:
        base = f"{self.name}-{rollout.place.line}-{rollout.place.repeat}"
        return base if rollout.id_number == 1 else f"{base}.{rollout.id_number}"

    def _submit_next(self) -> None:
        """Submit queued rollouts up to the limit in flight; signal the end if none is open."""
        while self._queue and self._services.load < _MAX_IN_FLIGHT and not self._cancelled:
            rollout = self._queue.popleft()
            self._open[self.id_of(rollout)] = rollout
            group = f"{self.name}-{rollout.place.line}"
            body = {"row": rollout.row, "group": group, **_rollout_options(self._options, rollout.row)}
            self._services.submit(self.id_of(rollout), body)
        if not self._open:
            self._done.set()

    def _requeue(self, rollout: _Rollout, *, new_id: bool) -> None:
        if new_id:
            rollout.id_number += 1
            rollout.submitted = False
        self._queue.appendleft(rollout)

    # Callbacks of the dispatcher

    def _follows(self, job: JobView) -> bool:
        rollout = self._open[job.id]
        if not (_was_shut_down(job) or (job.state is JobState.CANCELLED and not rollout.submitted)):
            rollout.submitted = True
            return True
        self._requeue(rollout, new_id=True)  # the id's outcome dates from an earlier interruption
        del self._open[job.id]
        self._submit_next()
        return False

    def _ended(self, job: JobView) -> None:
        rollout = self._open.pop(job.id)
        if _was_shut_down(job):
            self._requeue(rollout, new_id=False)  # the service shut down before the rollout had an outcome
        elif not (self._cancelled and job.state is JobState.CANCELLED):
            if self._results is not None:
                self._results.write(self.name, rollout.place, job)
            self.summary.add(rollout.place, job)
        self._submit_next()

    def _lost(self, rollout_id: str, loss: LossReason, why: str) -> None:
        rollout = self._open.pop(rollout_id)
        if loss in (LossReason.FORGOTTEN, LossReason.AWAY) and rollout.id_number < MAX_LOST_NODES:
            self._requeue(rollout, new_id=True)
        elif loss is not LossReason.CANCELLED:
            refusal = RefusedRow(rollout.place.line, why)
            if refusal not in self.summary.refused:  # all repeats of a row have the same refusal
                self.summary.refused.append(refusal)
        self._submit_next()

    def _broke(self, error: BaseException) -> None:
        self._error = self._error or error
        self._done.set()


def _was_shut_down(job: JobView) -> bool:
    return job.failure is not None and job.failure.kind is FailureKind.SHUTDOWN
