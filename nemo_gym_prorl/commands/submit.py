# SPDX-License-Identifier: Apache-2.0
"""``prorl submit``: a file of rows becomes rollouts, each of which ends with one outcome, whatever happens between.

A rollout's id says where it comes from: ``<run>-<line>-<repeat>``. Submitting is therefore safe to repeat, and it is
the answer to everything that can happen: when the service went away, or has forgotten what was followed, whatever has
no outcome yet is submitted again. What still runs is joined, what is lost begins anew. The repeats of a row are one
group, since they answer the same prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import ValidationError
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nemo_gym_prorl.commands.jobs import connect
from nemo_gym_prorl.commands.report import Tally, print_refused, print_report
from nemo_gym_prorl.commands.rows import Place, Refusal, Results, read_rows
from nemo_gym_prorl.commands.watch import pools
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.rows import WISHES
from nemo_gym_prorl.rollout.schemas import JobView, StatusView, SubmitRequest
from nemo_gym_prorl.serving.problem_document import field_errors, in_words


PATIENCE_S = 600.0
"""How long a service may be away in mid-run. One that is started again by its keeper is back within a minute."""

_POLL_S = 0.5
_ANSWER_S = 60.0
_CANCEL_S = 30.0
_PAGE = 1000
_AT_ONCE = 8
_AWAY = frozenset({502, 503, 504})
_FATAL = frozenset({401, 403, 404, 405})
"""Refusals that have nothing to do with the row."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to submit and how.

    Attributes:
        rows: JSONL file.
        repeats: rollouts per row.
        run: name of the run, the beginning of every id; ``None`` goes on with the run of ``output``, or makes a name.
        environment: of all rows; ``None`` leaves it to each row's ``data_source``.
        client: under which the service shares its slots; ``None``: as a row says, else "cli".
        priority: higher goes first; ``None``: as a row says, else 0.
        output: JSONL file for the results.
        detach: leave when all is submitted.
        patience_s: how long the service may be away in mid-run.
    """

    rows: Path
    repeats: int = 1
    run: str | None = None
    environment: str | None = None
    client: str | None = None
    priority: int | None = None
    output: Path | None = None
    detach: bool = False
    patience_s: float = PATIENCE_S


async def submit(order: Order, url: str | None, token: str | None) -> bool:
    """Submit every row ``repeats`` times and follow the rollouts to their end.

    Interrupted, it cancels what it submitted. Returns whether every rollout was scored and no row refused.

    Raises:
        CallerError: the file has no rows, or an option is wrong. Nothing was submitted.
        InfrastructureError: the service cannot be reached, or was away for too long.
        ApiError: it refuses everything, not only a row.
    """
    console = Console()

    def say(what: str) -> None:
        console.print(what, style="yellow", markup=False, soft_wrap=True)

    rows, refused = read_rows(order.rows)
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(Results(order.output, rows, order.run)) if order.output else None
        name = (results.run if results else order.run) or f"submit-{secrets.token_hex(4)}"
        _check_options(name, order)
        tally = Tally(len(rows) * order.repeats, list(refused))
        print_refused(console, str(order.rows), refused)
        wanted = {Place(line, repeat): row for line, row in rows.items() for repeat in range(order.repeats)}
        for place, job in (results.done if results else {}).items():
            if wanted.pop(place, None) is not None:
                tally.add(place, job)
        if tally.ended:
            say(f"{tally.ended} results are in {order.output} already")
        if wanted:
            async with connect(url, token) as client:
                run = Run(client, name, order, tally, results, say)
                await (_detach(run, wanted, console) if order.detach else _follow(run, wanted, console))
        print_refused(console, str(order.rows), tally.refused[len(refused) :])
        if not order.detach:
            print_report(console, tally, order.repeats)
        return not tally.refused if order.detach else tally.fine


async def _detach(run: Run, wanted: dict[Place, dict[str, Any]], console: Console) -> None:
    async with _cancelled_with(run, console):
        await run.submit(wanted)
    for rollout_id in sorted(run.open, key=lambda rollout_id: run.open[rollout_id].place):
        console.print(rollout_id, highlight=False, soft_wrap=True)
    console.print(f"run {run.name}; the same command with --run {run.name} follows it", style="dim", soft_wrap=True)


async def _follow(run: Run, wanted: dict[Place, dict[str, Any]], console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task("rollouts", total=run.tally.total)
    console.print(f"run {run.name}", style="dim", soft_wrap=True)
    with Live(bar, console=console, transient=True) as live:

        def show(status: StatusView) -> None:
            bar.update(task, completed=run.tally.ended)
            live.update(Group(bar, run.tally.line(), pools(status)))

        async with _cancelled_with(run, console):
            await run.to_the_end(wanted, show)


@contextlib.asynccontextmanager
async def _cancelled_with(run: Run, console: Console) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        console.print("interrupted: cancelling what was submitted", style="yellow")
        await run.cancel()
        console.print(run.tally.line(), highlight=False, soft_wrap=True)
        raise


def _check_options(run: str, order: Order) -> None:
    """Ask the service's own model, before a service is asked."""
    row = {"responses_create_params": {"input": ""}}
    last = f"{run}-{2**31}-{order.repeats}"
    try:
        SubmitRequest.model_validate({"row": row, "id": last, "group": last, **_wishes(order, row)})
    except ValidationError as error:
        wrong = in_words(field_errors(error.errors()))
        raise CallerError(f"--run, --client or --priority is wrong: {wrong}") from None


def _wishes(order: Order, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the order says of its rollouts; where it says nothing, the service takes what the row says of its own."""
    own = row.get(WISHES)
    usual = {} if isinstance(own, Mapping) and "client" in own else {"client": "cli"}
    said = {"environment": order.environment, "client": order.client, "priority": order.priority}
    return {**usual, **{name: value for name, value in said.items() if value is not None}}


@dataclass(slots=True)
class _Rollout:
    place: Place
    row: dict[str, Any]
    take: int = 1
    """Which id it has: the service may remember those before as cancelled, or as forgotten."""
    known: bool = False
    """Whether this process has submitted it."""


class Run:
    """The rollouts of one run at one service.

    Args:
        client: of the service.
        name: the beginning of every id.
        order: what to submit and how.
        tally: counts the outcomes.
        results: takes them.
        say: is told when the service is away, and when it is back.
    """

    def __init__(
        self,
        client: RolloutClient,
        name: str,
        order: Order,
        tally: Tally,
        results: Results | None,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.tally = name, tally
        self.open: dict[str, _Rollout] = {}
        """Rollouts that may be at the service and have no outcome yet, by id."""
        self._client, self._order, self._results = client, order, results
        self._say = say
        self._away_since: float | None = None
        self._outages = 0
        """After each, the service may be another one, which knows nothing of this run."""
        self._queue: asyncio.Queue[_Rollout] = asyncio.Queue()
        self._left = 0
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def submit(self, wanted: dict[Place, dict[str, Any]]) -> None:
        """Submit and leave them."""
        await self._client.list(limit=1)  # a service that is not there is told at once
        await self._with_submitters(wanted, self._queue.join)

    async def to_the_end(self, wanted: dict[Place, dict[str, Any]], show: Callable[[StatusView], None]) -> None:
        """Submit, and return when each has its outcome. ``show`` is told the service's state now and then."""
        # The log is followed from before the first submission, so that no outcome can be missed.
        cursor = (await self._client.list(limit=1)).cursor

        async def follow() -> None:
            place, outages = cursor, 0
            while self._left:
                if outages != self._outages:
                    outages = self._outages
                    # Behind the new cursor nothing is missed; what ended before it is in the submissions' answers.
                    place = (await self._patiently(lambda: self._client.list(limit=1))).cursor
                    for rollout in self.open.values():
                        if rollout.known:  # the others are being submitted
                            self._queue.put_nowait(rollout)
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        page = await self._client.ended(place, wait=_POLL_S, limit=_PAGE)
                        show(await self._client.status())
                except (ApiError, InfrastructureError, aiohttp.ClientError, TimeoutError) as error:
                    if isinstance(error, ApiError) and error.problem.status not in _AWAY | {410}:
                        raise
                    self._outages += 1
                    await asyncio.sleep(_POLL_S)
                    continue
                place = page.cursor
                ours = [(self.open[job.id], job) for job in page.rollouts if job.id in self.open]
                await asyncio.gather(*(self._take(rollout, job) for rollout, job in ours))

        await self._with_submitters(wanted, follow)

    async def cancel(self) -> None:
        """Cancel what has no outcome; bounded in time, and no error if the service is not there."""
        ids = list(self.open)
        with contextlib.suppress(ApiError, InfrastructureError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                unknown = await self._cancel(ids)
                if unknown:  # a submission may have been under way
                    await asyncio.sleep(_POLL_S)
                    await self._cancel(unknown)

    async def _cancel(self, ids: list[str]) -> list[str]:
        pages = [ids[start : start + _PAGE] for start in range(0, len(ids), _PAGE)]
        answers = await asyncio.gather(*(self._client.cancel(page) for page in pages))
        return [rollout_id for answer in answers for rollout_id in answer.unknown]

    async def _with_submitters(
        self, wanted: dict[Place, dict[str, Any]], until: Callable[[], Awaitable[None]]
    ) -> None:
        for place, row in wanted.items():
            self._queue.put_nowait(_Rollout(place, row))
        self._left = len(wanted)
        try:
            async with asyncio.TaskGroup() as group:
                submitters = [group.create_task(self._submit_from_queue()) for _ in range(_AT_ONCE)]
                await until()
                for submitter in submitters:
                    submitter.cancel()
        except ExceptionGroup as several:
            raise _first(several) from None

    async def _submit_from_queue(self) -> None:
        while True:
            rollout = await self._queue.get()
            await self._submit(rollout)
            self._queue.task_done()

    async def _submit(self, rollout: _Rollout) -> None:
        while not rollout.known or self._id(rollout) in self.open:
            rollout_id = self._id(rollout)
            self.open[rollout_id] = rollout  # before it is sent: it may be there though no answer comes
            try:
                job = await self._patiently(lambda: self._post(rollout))
            except ApiError as error:
                if error.problem.status in _FATAL:
                    raise
                if error.problem.status == 410:
                    self._anew(rollout)  # it has ended, and its result is forgotten
                    continue
                if self.open.pop(rollout_id, None) is not None:
                    self._refuse(rollout, error)
                return
            if rollout_id not in self.open:
                return  # it has ended meanwhile
            if _shut_down(job) or (job.state is JobState.CANCELLED and not rollout.known):
                self._anew(rollout)  # remembered from an earlier interruption, ours or the service's
                continue
            rollout.known = True
            if job.state.terminal and not self._order.detach:
                await self._take(rollout, job)
            return

    def _anew(self, rollout: _Rollout) -> None:
        """That id is over, the rollout is not: it takes the next one."""
        self.open.pop(self._id(rollout), None)
        rollout.take += 1
        rollout.known = False

    def _refuse(self, rollout: _Rollout, error: ApiError) -> None:
        self._left -= 1
        refusal = Refusal(rollout.place.line, error.problem.detail)
        if refusal not in self.tally.refused:  # the repeats of a row are refused alike
            self.tally.refused.append(refusal)

    async def _post(self, rollout: _Rollout) -> JobView:
        group = f"{self.name}-{rollout.place.line}"
        wishes = _wishes(self._order, rollout.row)
        return await self._client.submit(rollout.row, id=self._id(rollout), group=group, **wishes)

    def _id(self, rollout: _Rollout) -> str:
        base = f"{self.name}-{rollout.place.line}-{rollout.place.repeat}"
        return base if rollout.take == 1 else f"{base}.{rollout.take}"

    async def _take(self, rollout: _Rollout, job: JobView) -> None:
        """An outcome. It is read whether it is written or not: a service keeps what its submitter has not read."""
        if _shut_down(job):
            self._queue.put_nowait(rollout)  # the service ended, not the rollout
            return
        try:
            async with self._gate:
                job = await self._patiently(lambda: self._client.get(job.id))
        except ApiError as error:
            if error.problem.status not in (404, 410):
                raise
            self._queue.put_nowait(rollout)  # gone before it was read: there is no other way to have it
            return
        if not job.state.terminal or self.open.pop(job.id, None) is None:
            return  # it runs again, or somebody else has taken it
        if self._results is not None:
            self._results.write(self.name, rollout.place, job)
        rollout.row = {}
        self._left -= 1
        self.tally.add(rollout.place, job)

    def _back(self) -> None:
        """The service has answered."""
        if self._away_since is not None:
            self._away_since = None
            self._outages += 1
            self._say("the service is back")

    async def _patiently[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call answers; a service that is away or going away is waited for."""
        pause = _POLL_S
        while True:
            try:
                answer = await call()
            except ApiError as error:
                if error.problem.status not in _AWAY:
                    self._back()
                    raise
                why = str(error)
            except (InfrastructureError, aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            else:
                self._back()
                return answer
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                self._say(f"waiting for the service: {why}")
            if now - self._away_since > self._order.patience_s:
                raise InfrastructureError(
                    f"the service has been away for {self._order.patience_s:g} s: {why}; the same command with "
                    f"--run {self.name} goes on",
                    kind=FailureKind.TRANSPORT_UNREACHABLE,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)


def _shut_down(job: JobView) -> bool:
    return job.failure is not None and job.failure.kind is FailureKind.SHUTDOWN


def _first(several: ExceptionGroup[Exception]) -> Exception:
    error = several.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
