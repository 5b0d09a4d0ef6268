# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl submit``: a file of rows becomes rollouts, each of which ends with one outcome, whatever happens between.

A rollout's id says where it comes from: ``<run>-<line>-<repeat>``. Submitting is therefore safe to repeat: what still
runs is joined, what is lost begins anew, and :mod:`nemo_gym_prorl.fleet` does so whenever the service went
away. An id that is over without an outcome, since its rollout was cancelled or is forgotten, is followed by the next
one, ``<run>-<line>-<repeat>.2``. The repeats of a row are one group, since they answer the same prompt.
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
from typing import Any, Self

from pydantic import ValidationError
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nemo_gym_prorl.cli.jobs import find_service, head_url, split_urls
from nemo_gym_prorl.cli.report import Tally, print_refused, print_report
from nemo_gym_prorl.cli.rows import Place, Refusal, Results, read_rows
from nemo_gym_prorl.cli.watch import pools, pools_line
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.fleet.dispatcher import FleetDispatcher
from nemo_gym_prorl.fleet.forwarder import MAX_LOST_NODES, LossReason
from nemo_gym_prorl.fleet.nodes import NodeList
from nemo_gym_prorl.http.keys import CLIENT_KEY
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, SubmitRequest, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import NO_CLIENT
from nemo_gym_prorl.rollout.status import StatusView
from nemo_gym_prorl.rollout.turns import ROLLOUT_OPTIONS_KEY


PATIENCE_S = 600.0
"""How long a service may be away in mid-run. One that is started again by its restarter is back within a minute."""

PROGRESS_S = 30.0
"""Seconds between two lines of progress where there is no terminal: a log file stays readable."""
FIND_S = 5.0
"""Pause between two looks where the service is, of those that a head server knows: a deployment that is started anew
has its servers at other ports."""
_ID_CHARACTERS = "may have any characters but / ? # and control characters such as line ends"
_LOOK_S = 0.5
_CANCEL_S = 30.0
_AT_ONCE = 10_000
"""Rollouts under way: enough for any service, and each costs some memory here."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to submit and how.

    Attributes:
        rows: JSONL file.
        repeats: rollouts per row.
        run: name of the run, the beginning of every id; ``None`` goes on with the run of ``output``, or makes a name.
        environment: of all rows; ``None`` leaves it to each row's ``data_source``.
        client: under which the service shares its slots; ``None``: as a row says, else ``usual_client``.
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
    usual_client: str = "cli"


async def submit(order: Order, url: str | None, token: str | None) -> bool:
    """Submit every row ``repeats`` times and follow the rollouts to their end.

    Interrupted, it cancels what it submitted. Returns whether every rollout was scored and no row refused.

    Raises:
        CallerError: the file has no rows, or an option is wrong. Nothing was submitted.
        InfrastructureError: the service cannot be reached, or was away for too long.
        ApiError: it refuses everything, not only a row.
    """
    console = Console()
    if (token or "").startswith(CLIENT_KEY):
        order = replace(order, usual_client=NO_CLIENT)  # the service knows whose key it is

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
            async with services(url, token) as clients, Run(clients, name, order, tally, results, say) as run:
                await (_detach(run, wanted, console) if order.detach else _follow(run, wanted, console))
        print_refused(console, str(order.rows), tally.refused[len(refused) :])
        if not order.detach:
            print_report(console, tally, order.repeats)
        return not tally.refused if order.detach else tally.fine


async def _detach(run: Run, wanted: dict[Place, dict[str, Any]], console: Console) -> None:
    with _shown(run, console, "submitted") as show:
        async with _cancelled_with(run, console):
            await run.to_the_end(wanted, show)
    for rollout in sorted(run.left, key=lambda rollout: rollout.place):
        console.print(run.id_of(rollout), highlight=False, soft_wrap=True)
    console.print(f"run {run.name}; the same command with --run {run.name} follows it", style="dim", soft_wrap=True)


async def _follow(run: Run, wanted: dict[Place, dict[str, Any]], console: Console) -> None:
    console.print(f"run {run.name}", style="dim", soft_wrap=True)
    with _shown(run, console, "rollouts") as show:
        async with _cancelled_with(run, console):
            await run.to_the_end(wanted, show)


@contextlib.contextmanager
def _shown(run: Run, console: Console, what: str) -> Iterator[Callable[[StatusView | None], None]]:
    """Yield a function that shows how far the run is: on a terminal a bar and the pools, else a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task(what, total=run.tally.total)
    began = said = time.monotonic()

    def show(status: StatusView | None) -> None:
        nonlocal said
        done = run.tally.ended + len(run.left)
        if console.is_terminal:
            bar.update(task, completed=done)
            live.update(Group(bar, run.tally.line(), *([pools(status.model_dump())] if status else [])))
        elif (now := time.monotonic()) - said >= PROGRESS_S:
            said = now
            told = f"{done} of {run.tally.total} {what}; {run.tally.line()}"
            where = f"; {pools_line(status.model_dump())}" if status else "; the service has said nothing yet"
            console.print(f"{now - began:.0f} s: {told}{where}", markup=False, highlight=False, soft_wrap=True)

    with Live(bar, console=console, transient=True) as live:
        yield show


@contextlib.asynccontextmanager
async def _cancelled_with(run: Run, console: Console) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        console.print("interrupted: cancelling what was submitted", style="yellow")
        if uncancelled := await run.cancel():
            why = "since the service does not answer; where it still runs, they go on"
            console.print(f"{uncancelled} could not be cancelled, {why}", style="yellow", soft_wrap=True)
        console.print(run.tally.line(), highlight=False, soft_wrap=True)
        raise


def _check_options(run: str, order: Order) -> None:
    """Check the options by the service's own model, before a service is asked.

    Raises:
        CallerError: names the option.
    """
    row = {"responses_create_params": {"input": ""}}
    try:
        SubmitRequest.model_validate({"row": row, "id": f"{run}-{2**31}-{order.repeats}", **_wishes(order, row)})
    except ValidationError as error:
        first, field = error.errors()[0], str(error.errors()[0]["loc"][0])
        wrong = _ID_CHARACTERS if first["type"] == "string_pattern_mismatch" else in_words(field_errors([first]))
        raise CallerError(wrong, field="--run" if field == "id" else f"--{field}") from None


def _wishes(order: Order, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the order says of its rollouts; where it says nothing, the service takes what the row says of its own."""
    own = row.get(ROLLOUT_OPTIONS_KEY)
    usual = {} if isinstance(own, Mapping) and "client" in own else {"client": order.usual_client}
    said = {"environment": order.environment, "client": order.client, "priority": order.priority}
    return {**usual, **{name: value for name, value in said.items() if value is not None}}


@contextlib.asynccontextmanager
async def services(url: str | None, token: str | None) -> AsyncIterator[list[RolloutClient]]:
    """Clients, not open yet, of the services at ``url``, with commas between, or of the one that Gym's head server
    knows, wherever that is by then.

    Raises:
        InfrastructureError, CallerError: see :func:`~nemo_gym_prorl.cli.jobs.find_service`.
    """
    if urls := split_urls(url):
        yield [RolloutClient(one, token) for one in urls]
        return
    client = RolloutClient(await asyncio.to_thread(find_service, head_url(), token), token)
    following = asyncio.create_task(_follow_service(client, token))
    try:
        yield [client]
    finally:
        following.cancel()


async def _follow_service(client: RolloutClient, token: str | None) -> None:
    while True:
        await asyncio.sleep(FIND_S)
        with contextlib.suppress(RolloutError, ApiError):
            client.url = await asyncio.to_thread(find_service, head_url(), token)


async def _usable(client: RolloutClient) -> None:
    """Ask a service whether it is one, of our version and ours to use."""
    await client.list(limit=1)
    if trouble := (await client.status()).version_mismatch():
        raise InfrastructureError(f"{client.url} is of no use: {trouble}")


@dataclass(eq=False, slots=True)
class _Rollout:
    place: Place
    row: dict[str, Any]
    take: int = 1
    """Which id it has: the service may remember those before as cancelled, or as forgotten."""
    known: bool = False
    """Whether this process has submitted it."""


class Run:
    """The rollouts of one run. An async context manager; the services are told nothing on leaving.

    Args:
        clients: of the services that share them; not open yet.
        name: the beginning of every id.
        order: what to submit and how.
        tally: counts the outcomes.
        results: takes them.
        say: is told when the service is away, and when it is back.

    Attributes:
        left: rollouts that the service has, where they are not followed.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        name: str,
        order: Order,
        tally: Tally,
        results: Results | None,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.tally = name, tally
        self.left: list[_Rollout] = []
        self._clients, self._order, self._results = clients, order, results
        self._say = say
        self._unsaid: list[str] | None = []
        """Lines to print once a service has answered; an error repeats them otherwise."""
        self._at: dict[str, str] = {}
        """Services, by id."""
        self._services = FleetDispatcher(
            NodeList(clients, field="--url"),
            tokens=TokenForm.ITEMS,
            on_ended=self._ended,
            on_lost=self._lost,
            on_error=lambda node, error: self._broke(error),
            report=lambda what: self._unsaid.append(what) if self._unsaid is not None else say(what),
            is_wanted=self._follows,
            on_placed=self._at.__setitem__,
            bounded=not order.detach,
            patient=len(clients) > 1,
        )
        self._waiting: deque[_Rollout] = deque()
        self._open: dict[str, _Rollout] = {}
        """Rollouts that may be at the service and have no outcome yet, by id."""
        self._cancelled = False
        self._broken: BaseException | None = None
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._services.start()
        try:
            asked = [_usable(client) for client in self._clients]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            if len(errors) == len(answers):
                raise errors[0]  # a service that is not there is told at once
            unsaid, self._unsaid = self._unsaid or [], None
            for what in unsaid:
                self._say(what)
        except BaseException:
            await self._services.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._services.close()

    async def to_the_end(
        self, wanted: dict[Place, dict[str, Any]], show: Callable[[StatusView | None], None] = lambda status: None
    ) -> None:
        """Submit, and return when each has its outcome, or is with the service, where no outcome is waited for.

        Twice a second ``show`` gets the service's state, ``None`` before the service has told it.
        """
        self._waiting.extend(_Rollout(place, row) for place, row in wanted.items())
        self._go_on()
        away_since: float | None = None
        while not self._over.is_set():
            away_since = (away_since or time.monotonic()) if self._services.away else None
            if away_since is not None and time.monotonic() - away_since > self._order.patience_s:
                raise InfrastructureError(
                    f"the service has been away for {self._order.patience_s:g} s; the same command with "
                    f"--run {self.name} goes on",
                    kind=FailureKind.TRANSPORT_UNREACHABLE,
                )
            statuses = self._services.statuses
            show(StatusView.sum(statuses.values()) if statuses else None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _LOOK_S)
        if self._broken is not None:
            raise self._broken

    async def cancel(self) -> int:
        """Cancel what has no outcome; bounded in time, and no error if the service is not there. Returns of how many
        the service has not said how they ended."""
        self._cancelled = True
        self._over.clear()
        for rollout_id in self._open:
            self._services.cancel(rollout_id)
        for rollout in self.left:
            self._open[self.id_of(rollout)] = rollout
            self._services.cancel_unknown(self.id_of(rollout), self._at[self.id_of(rollout)])
        deadline = time.monotonic() + _CANCEL_S
        while self._open and not self._services.away and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _LOOK_S)
        return len(self._open)

    def id_of(self, rollout: _Rollout) -> str:
        """The id that it has now."""
        base = f"{self.name}-{rollout.place.line}-{rollout.place.repeat}"
        return base if rollout.take == 1 else f"{base}.{rollout.take}"

    def _go_on(self) -> None:
        """Hand over what is next; once nothing is left, it is over."""
        while self._waiting and self._services.load < _AT_ONCE and not self._cancelled:
            rollout = self._waiting.popleft()
            self._open[self.id_of(rollout)] = rollout
            group = f"{self.name}-{rollout.place.line}"
            body = {"row": rollout.row, "group": group, **_wishes(self._order, rollout.row)}
            self._services.submit(self.id_of(rollout), body)
        if not self._open:
            self._over.set()

    def _again(self, rollout: _Rollout, *, anew: bool) -> None:
        """Its id is over, or at least its job; the rollout is not."""
        if anew:
            rollout.take += 1
            rollout.known = False
        self._waiting.appendleft(rollout)

    # What the carrier tells

    def _follows(self, job: JobView) -> bool:
        rollout = self._open[job.id]
        if _shut_down(job) or (job.state is JobState.CANCELLED and not rollout.known):
            self._again(rollout, anew=True)  # remembered from an earlier interruption, ours or the service's
        elif self._order.detach:
            self.left.append(rollout)
        else:
            rollout.known = True
            return True
        del self._open[job.id]
        self._go_on()
        return False

    def _ended(self, job: JobView) -> None:
        rollout = self._open.pop(job.id)
        if _shut_down(job):
            self._again(rollout, anew=False)  # the service ended, not the rollout
        elif not (self._cancelled and job.state is JobState.CANCELLED):
            if self._results is not None:
                self._results.write(self.name, rollout.place, job)
            self.tally.add(rollout.place, job)
        self._go_on()

    def _lost(self, rollout_id: str, loss: LossReason, why: str) -> None:
        rollout = self._open.pop(rollout_id)
        if loss in (LossReason.FORGOTTEN, LossReason.AWAY) and rollout.take < MAX_LOST_NODES:
            self._again(rollout, anew=True)
        elif loss is not LossReason.CANCELLED:
            refusal = Refusal(rollout.place.line, why)
            if refusal not in self.tally.refused:  # the repeats of a row are refused alike
                self.tally.refused.append(refusal)
        self._go_on()

    def _broke(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._over.set()


def _shut_down(job: JobView) -> bool:
    return job.failure is not None and job.failure.kind is FailureKind.SHUTDOWN
