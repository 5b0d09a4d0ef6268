# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatcher of rollouts to many services (nodes): for a trainer, ``prorl submit``, or a fleet gateway.

The dispatcher reports exactly one result per rollout, as a :class:`~.forwarder.JobForwarder` does for one service.
:class:`~.placement.Placement` chooses nodes. Rollouts without a node wait in the dispatcher, in fair order. A rollout
whose node is lost is reported as lost. The dispatcher's owner submits such a rollout again under another id, so that
late results of the first try are ignored.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.fleet.forwarder import JobForwarder, LossReason
from nemo_gym_prorl.fleet.placement import Capacity, NodeJoined, NodeLeft, NodeSource, Placement
from nemo_gym_prorl.rollout.api.client import ApiError
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.scheduling.fair_queue import FairQueue, is_under_fair_share
from nemo_gym_prorl.rollout.status import StatusView


SURVEY_S = 5.0
"""Seconds between two status requests to a node."""
_SURVEYS_PER_S = 100.0
"""Status requests per second to all nodes together, so that a thousand nodes cause little load."""
_ANSWER_S = 10.0
"""Time limit of a status request in seconds."""

_FIRST_S = 1.0
"""Seconds that :meth:`FleetDispatcher.start` waits for the nodes' sizes: the first node with a known size would
otherwise get all rollouts."""

_HELD = frozenset({JobState.QUEUED, JobState.INITIALIZING, JobState.READY, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class _WaitingJob:
    """Rollout that waits for a node, or that may wait again if its node accepts no new rollouts."""

    body: Mapping[str, Any]
    client: str
    priority: int

    @property
    def group(self) -> str | None:
        return self.body.get("group")

    @property
    def image(self) -> str | None:
        """Sandbox image that the row names; ``None`` if it names none."""
        row = self.body.get("row")
        image = row.get("image") if isinstance(row, Mapping) else None
        return image if isinstance(image, str) else None


@dataclass(frozen=True, slots=True)
class NodeView:
    """Status of a node for clients.

    Attributes:
        node: the node's id.
        url: address of the node's service.
        usable: whether the node's size is known, the node answers, and accepts new rollouts.
        draining: whether the node gets no new rollouts, by a request to the fleet or to the node.
        rollouts: number of the fleet's rollouts at the node without an outcome.
        run_slots: slots of RUN; ``None`` while unknown.
    """

    node: str
    url: str
    usable: bool
    draining: bool
    rollouts: int
    run_slots: int | None


class FleetDispatcher:
    """Dispatcher of rollouts to nodes. :meth:`start` opens the nodes' clients, and :meth:`close` closes them.

    Args:
        nodes: source of the nodes.
        tokens, on_ended, on_lost, report, is_wanted: as for :class:`~.forwarder.JobForwarder`.
        on_error: called with a node and an error that stopped its forwarder; with an empty node for other errors.
        on_state: called with every observed state of a rollout without an outcome.
        on_placed: called with a rollout and its node before the submission.
        on_survey: called with a node after each of the node's answers to a status request.
        patient, loops: as for a forwarder.
    """

    def __init__(
        self,
        nodes: NodeSource,
        *,
        tokens: TokenForm,
        on_ended: Callable[[JobView], None],
        on_lost: Callable[[str, LossReason, str], None],
        on_error: Callable[[str, BaseException], None],
        report: Callable[[str], None],
        is_wanted: Callable[[JobView], bool] = lambda job: True,
        on_state: Callable[[str, JobState], None] = lambda rollout, state: None,
        on_placed: Callable[[str, str], None] = lambda rollout, node: None,
        on_survey: Callable[[str], None] = lambda node: None,
        patient: bool = False,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.statuses: dict[str, StatusView] = {}
        """Last status of each node."""
        self._nodes, self._patient = nodes, patient
        self._loops = loops or BackgroundLoops(restart=False)
        self._tokens, self._report, self._is_wanted = tokens, report, is_wanted
        self._on_ended, self._on_lost, self._on_error = on_ended, on_lost, on_error
        self._on_state, self._on_placed, self._on_survey = on_state, on_placed, on_survey
        self.placement = Placement()
        self._forwarders: dict[str, JobForwarder] = {}
        self._waiting: dict[str, _WaitingJob] = {}
        self._waiting_of: Counter[str] = Counter()
        self._shares: Mapping[str, float] = {}
        self._queue = FairQueue(lambda client, environment: 0.0)
        self._sent: dict[str, _WaitingJob] = {}
        """Rollouts at nodes, with their bodies."""
        self._holding: set[str] = set()
        """Rollouts in a node's window, which count as load of their clients."""
        self._drained: set[str] = set()
        self._rejected: dict[str, str] = {}
        """Nodes that cannot join this fleet, with the reason."""
        self._surveys: dict[str, asyncio.Task[None]] = {}
        self._sized: dict[str, asyncio.Event] = {}
        """Per node, set once its size is known."""
        self._change: NodeJoined | NodeLeft | None = None
        """Change of the node source that is being applied; after an exception, the next pass applies it again."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def load(self) -> int:
        """Number of rollouts without a result, waiting or at nodes."""
        return len(self._waiting) + sum(forwarder.load for forwarder in self._forwarders.values())

    @property
    def waiting(self) -> int:
        """Number of rollouts that wait for a node."""
        return len(self._waiting)

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Nodes, and whether each answers and accepts new rollouts."""
        return {node: not forwarder.away for node, forwarder in self._forwarders.items()}

    def may_wait(self, client: str, bound: int) -> bool:
        """Return whether a client may add one more waiting rollout: fewer than ``bound`` wait, or the client is under
        its fair share."""
        return len(self._waiting) < bound or is_under_fair_share(client, bound, self._waiting_of, self._shares)

    def share(self, clients: Mapping[str, float]) -> None:
        """Set the clients' shares of the nodes, relative to each other; 1 by default."""
        self._shares = clients
        self._queue.share(clients)

    def views(self) -> list[NodeView]:
        return [
            NodeView(
                node,
                forwarder.client.url,
                usable=status is not None and not forwarder.away and node not in self._drained,
                draining=node in self._drained or (status is not None and status.draining),
                rollouts=forwarder.load,
                run_slots=status.stages[Stage.RUN].slots if status else None,
            )
            for node, forwarder in self._forwarders.items()
            for status in [self.statuses.get(node)]
        ]

    @property
    def away(self) -> bool:
        """Whether no node answers and accepts new rollouts."""
        return all(forwarder.away for forwarder in self._forwarders.values())

    def unusable_nodes(self) -> dict[str, str]:
        """Return the nodes that get no new rollouts, each with the reason."""
        reasons = {
            view.node: self._forwarders[view.node].last_error
            or ("it drains" if view.draining else "its size is not known yet" if not view.usable else "")
            or self._rejected.get(view.node, "")
            for view in self.views()
        }
        return {node: why for node, why in reasons.items() if why}

    async def start(self) -> None:
        """Open the present nodes, wait up to 1 s for their sizes, and follow the node source's changes."""
        for joined in self._nodes.present:
            await self._join(joined)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await asyncio.gather(*(sized.wait() for sized in self._sized.values()))
        self._track(self._loops.start("fleet-nodes", self._watch))

    async def close(self) -> None:
        """Stop all tasks and close the nodes' clients; rollouts at nodes continue there."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for forwarder in [*self._forwarders.values()]:
            await _close_forwarder(forwarder)

    def submit(self, rollout: str, body: Mapping[str, Any], *, node: str | None = None) -> None:
        """Forward a rollout to a node with room, or let the rollout wait for one.

        Args:
            rollout: the rollout's id.
            body: ``row`` and the options of the submission.
            node: node to use regardless of room, because the rollout may be there already; ignored if it has left.
        """
        waiting = _WaitingJob(body, str(body.get("client", "")), int(body.get("priority") or 0))
        if node in self._forwarders:
            self._queue.add_load(waiting.client, 1)
            self._put(rollout, waiting, node)
        else:
            self._wait(rollout, waiting)

    def cancel(self, rollout: str) -> None:
        """Cancel a rollout. Its result is reported once its sandbox is released, or once the rollout is lost."""
        if rollout in self._waiting:
            waiting = self._no_longer_waits(rollout)
            self._queue.remove(rollout, waiting.client, waiting.priority, "")
            self._spawn(self._tell_cancelled(rollout))
        elif (node := self.placement.node_of(rollout)) in self._forwarders:
            self._forwarders[node].cancel(rollout)

    async def _tell_cancelled(self, rollout: str) -> None:
        self._on_lost(rollout, LossReason.CANCELLED, "cancelled before it was submitted")

    def cancel_unknown(self, rollout: str, node: str) -> None:
        """Cancel a rollout that an earlier process submitted to a node; the node must exist."""
        self.placement.put(rollout, node)
        self.placement.holds(rollout, False)
        self._forwarders[node].cancel_unknown(rollout)

    async def result(self, rollout: str, node: str | None) -> JobView:
        """Return the result of a rollout that ended under an earlier process.

        Raises:
            InfrastructureError: the rollout's node does not exist, or has no result.
        """
        if node not in self._forwarders:
            raise InfrastructureError(f"node {node} has left the fleet", kind=FailureKind.SESSION_LOST)
        return await self._forwarders[node].result(rollout)

    async def kept_turns(self, rollouts: Sequence[str]) -> list[int] | None:
        """Return the turns after which a rollout can be forked, for the first of the rollout's ids that has any;
        empty without any, ``None`` if no node answers."""
        for rollout in rollouts:
            turns = await self._kept_turns(rollout)
            if turns is None or turns:
                return turns
        return []

    async def _kept_turns(self, rollout: str) -> list[int] | None:
        for forwarder in [forwarder for forwarder in self._forwarders.values() if not forwarder.away]:
            try:
                return await forwarder.client.checkpoints(rollout)
            except ApiError as error:
                if error.problem.status == 404:
                    return []
            except InfrastructureError:
                continue
        return None

    def drain(self, node: str, drained: bool = True) -> None:
        """Exclude a node from new rollouts, or include the node again. The node's current rollouts continue.

        Raises:
            CallerError: the node does not exist.
        """
        if node not in self._forwarders:
            known = ", ".join(self._forwarders) or "none"
            raise CallerError(f"no node {node!r}; known nodes: {known}", field="node")
        (self._drained.add if drained else self._drained.discard)(node)
        self._usable(node)

    async def _watch(self) -> None:
        if self._change is not None:
            await self._take(self._change)
        async for change in self._nodes.changes():
            self._change = change
            await self._take(change)

    async def _take(self, change: NodeJoined | NodeLeft) -> None:
        if isinstance(change, NodeLeft):
            self._leave(change)
        elif change.node not in self._forwarders:
            await self._join(change)
        self._change = None

    async def _join(self, joined: NodeJoined) -> None:
        node, client = joined.node, joined.client
        await client.__aenter__()
        self._forwarders[node] = forwarder = JobForwarder(
            client,
            tokens=self._tokens,
            on_ended=self._ended,
            on_lost=self._lost,
            on_error=partial(self._on_error, node),
            report=self._report,
            is_wanted=self._is_followed,
            replaceable=lambda: any(not other.away for other in self._forwarders.values() if other is not forwarder),
            on_state=self._moved,
            on_availability=lambda away: self._usable(node),
            patient=self._patient,
            loops=self._loops,
        )
        self.placement.join(node)
        self._usable(node)
        forwarder.start()
        self._sized[node] = asyncio.Event()
        self._surveys[node] = self._track(self._loops.start("node-survey", partial(self._survey, node, forwarder)))
        self._go_on()

    def _leave(self, left: NodeLeft) -> None:
        forwarder = self._forwarders.pop(left.node, None)
        if forwarder is None:
            return
        self.statuses.pop(left.node, None)
        self._drained.discard(left.node)
        self._rejected.pop(left.node, None)
        self._surveys.pop(left.node).cancel()
        del self._sized[left.node]
        self.placement.leave(left.node)
        self._report(f"{left.node} is gone: {left.why}")
        forwarder.give_up(f"{left.node} is gone: {left.why}")
        self._spawn(_close_forwarder(forwarder))

    async def _survey(self, node: str, forwarder: JobForwarder) -> float:
        """Request a node's status, and return the seconds until the next request. A node gets no rollouts before its
        first answer."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await forwarder.client.status()
        except TimeoutError:
            forwarder.record_probe(InfrastructureError(f"no answer in {_ANSWER_S:g} s"))
        except (ApiError, InfrastructureError):
            pass  # the node's forwarder meets the same error and handles it
        else:
            mismatch = status.version_mismatch() or self._folder_mismatch(node, status)
            if mismatch and mismatch != self._rejected.get(node):
                self._report(f"{node} gets no rollouts: {mismatch}")
            if mismatch:
                self._rejected[node] = mismatch
            else:
                self._rejected.pop(node, None)
            self.statuses[node] = status
            self._sized[node].set()
            forwarder.record_probe(None)
            run = status.stages[Stage.RUN].slots
            window = status.stages[Stage.INIT].slots + status.ready_slots + run
            self.placement.resize(node, Capacity(run, 0 if status.draining or mismatch else window))
            self._on_survey(node)
            self._usable(node)
        pause = max(SURVEY_S, len(self._forwarders) / _SURVEYS_PER_S)
        return pause * random.uniform(0.8, 1.2) if self._sized[node].is_set() else 0.2

    def _folder_mismatch(self, node: str, status: StatusView) -> str | None:
        """Return why a node could not resume rollouts of other nodes, or ``None``: all nodes must have the same
        checkpoint folder as the first node."""
        others = (other for name, other in self.statuses.items() if name != node and name not in self._rejected)
        if status.checkpoint_folder == next(others, status).checkpoint_folder:
            return None
        its = "is not set" if status.checkpoint_folder is None else "differs"
        return f"its checkpoint_folder {its}, unlike the first node's; set the same folder at all nodes, or at none"

    def _usable(self, node: str) -> None:
        if (forwarder := self._forwarders.get(node)) is not None:
            self.placement.use(node, not forwarder.away and node not in self._drained and node in self.statuses)
            self._go_on()

    def _wait(self, rollout: str, waiting: _WaitingJob) -> None:
        self._waiting[rollout] = waiting
        self._waiting_of[waiting.client] += 1
        self._queue.push(rollout, waiting.client, waiting.priority, "")
        self._go_on()

    def _no_longer_waits(self, rollout: str) -> _WaitingJob:
        waiting = self._waiting.pop(rollout)
        self._waiting_of[waiting.client] -= 1
        if not self._waiting_of[waiting.client]:
            del self._waiting_of[waiting.client]  # callers choose client names, so the counter must not grow
        return waiting

    def _go_on(self) -> None:
        while self._queue and self._room():
            rollout = self._queue.pop()
            waiting = self._no_longer_waits(rollout)
            self._queue.add_load(waiting.client, 1)
            node = self._choose(waiting)
            assert node is not None, "_room() found a node"
            self._put(rollout, waiting, node)

    def _room(self) -> bool:
        return self.placement.choose() is not None

    def _choose(self, waiting: _WaitingJob) -> str | None:
        together = any(
            environment.scores_groups_of > 1
            for status in islice(self.statuses.values(), 1)  # nodes of a fleet run the same environments
            for environment in status.environments.values()
        )
        return self.placement.choose(waiting.group, waiting.image, together=together)

    def _put(self, rollout: str, waiting: _WaitingJob, node: str) -> None:
        """Forward a rollout that is already counted as load of its client."""
        self._sent[rollout] = waiting
        self._holding.add(rollout)
        self.placement.put(rollout, node, waiting.group, waiting.image)
        self._on_placed(rollout, node)
        self._forwarders[node].submit(rollout, waiting.body)

    def _moved(self, rollout: str, state: JobState) -> None:
        self._holds(rollout, state in _HELD)
        self._on_state(rollout, state)
        self._go_on()

    def _holds(self, rollout: str, holds: bool) -> None:
        self.placement.holds(rollout, holds)
        sent = self._sent.get(rollout)
        if sent is None or (rollout in self._holding) is holds:
            return
        if holds:
            self._holding.add(rollout)
            self._queue.add_load(sent.client, 1)
        else:
            self._holding.discard(rollout)
            self._queue.add_load(sent.client, -1)

    def _gone(self, rollout: str) -> _WaitingJob | None:
        self._holds(rollout, False)
        self.placement.gone(rollout)
        return self._sent.pop(rollout, None)

    def _ended(self, job: JobView) -> None:
        self._gone(job.id)
        self._on_ended(job)
        self._go_on()

    def _lost(self, rollout: str, loss: LossReason, why: str) -> None:
        node = self.placement.node_of(rollout)
        sent = self._gone(rollout)
        if loss is LossReason.AWAY and node is not None:
            # Another service may run at the node's address by now, so the node is unusable until its next status.
            self.statuses.pop(node, None)
            self._usable(node)
        if loss is LossReason.UNTAKEN and sent is not None:
            self._wait(rollout, sent)
            return
        self._on_lost(rollout, loss, why)
        self._go_on()

    def _is_followed(self, job: JobView) -> bool:
        followed = self._is_wanted(job)
        if not followed:
            self._gone(job.id)
        return followed

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._track(asyncio.create_task(work))

    def _track[T](self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error("", error)


async def _close_forwarder(forwarder: JobForwarder) -> None:
    await forwarder.close()
    await forwarder.client.__aexit__(None, None, None)
