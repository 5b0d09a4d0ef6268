# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts over many services, for whoever has more of them than one node: a trainer, ``prorl submit``, a front.

It is handed rollouts and tells the outcome of each, once, as a :class:`~.forwarder.JobForwarder` does for one service. Which
node a rollout goes to, and when, is :class:`~.nodes.Placement`'s to say; those that wait do so here, in a fair
order. A rollout whose node is lost is told as lost: to begin it again is its owner's business, under another id, so
that what a node still says of the first try concerns nobody.
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

from nemo_gym_prorl.background import BackgroundLoops
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.fleet.forwarder import JobForwarder, LossReason
from nemo_gym_prorl.fleet.nodes import Capacity, NodeJoined, NodeLeft, NodeSource, Placement
from nemo_gym_prorl.rollout.api.client import ApiError
from nemo_gym_prorl.rollout.api.schemas import JobView, TokenForm
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.queues import FairQueue, is_under_fair_share
from nemo_gym_prorl.rollout.status import StatusView


SURVEY_S = 5.0
"""So often a node is asked how large it is, and whether it drains."""
_SURVEYS_PER_S = 100.0
"""Of all nodes together, so that a thousand of them are no load."""
_ANSWER_S = 10.0
"""How long it may take to say so."""

_FIRST_S = 1.0
"""How long a start waits for nodes to say how large they are: the first to do so would get all there is."""

_HELD = frozenset({JobState.QUEUED, JobState.INITIALIZING, JobState.READY, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class _WaitingJob:
    """A rollout that is at no node yet."""

    body: Mapping[str, Any]
    client: str
    priority: int

    @property
    def group(self) -> str | None:
        """Whose member it is."""
        return self.body.get("group")

    @property
    def image(self) -> str | None:
        """What its row wants its sandbox to be made of."""
        row = self.body.get("row")
        image = row.get("image") if isinstance(row, Mapping) else None
        return image if isinstance(image, str) else None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as others are told of it.

    Attributes:
        node: its id.
        url: its service's address.
        usable: it has said how large it is, answers, and takes what is new.
        draining: it was told to take nothing new, or says so itself.
        rollouts: of this fleet, that have no outcome yet.
        run_slots: ``None`` as long as it has not said.
    """

    node: str
    url: str
    usable: bool
    draining: bool
    rollouts: int
    run_slots: int | None


class FleetDispatcher:
    """See the module. Between :meth:`start` and :meth:`close` it opens and closes the nodes' clients.

    Args:
        nodes: where they come from.
        tokens, ended, lost, say, follows: as for :class:`~.forwarder.JobForwarder`.
        broke: told of an error that no repetition mends, with the node where it was met.
        moved: told of every state that a rollout without an outcome is seen in.
        placed: told where a rollout goes, before it does.
        surveyed: told when a node has said how it is.
        bounded: hold back what no node works on; else each goes to a node at once, and waits there.
        patient, loops: as for a forwarder.
    """

    def __init__(
        self,
        nodes: NodeSource,
        *,
        tokens: TokenForm,
        ended: Callable[[JobView], None],
        lost: Callable[[str, LossReason, str], None],
        broke: Callable[[str, BaseException], None],
        say: Callable[[str], None],
        follows: Callable[[JobView], bool] = lambda job: True,
        moved: Callable[[str, JobState], None] = lambda rollout, state: None,
        placed: Callable[[str, str], None] = lambda rollout, node: None,
        surveyed: Callable[[str], None] = lambda node: None,
        bounded: bool = True,
        patient: bool = False,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.statuses: dict[str, StatusView] = {}
        """What each node said of itself last."""
        self._nodes, self._bounded, self._patient = nodes, bounded, patient
        self._loops = loops or BackgroundLoops(restart=False)
        self._tokens, self._say, self._follows = tokens, say, follows
        self._on_ended, self._on_lost, self._on_broke = ended, lost, broke
        self._on_moved, self._on_placed, self._on_surveyed = moved, placed, surveyed
        self.placement = Placement()
        self._forwarders: dict[str, JobForwarder] = {}
        self._waiting: dict[str, _WaitingJob] = {}
        self._waiting_of: Counter[str] = Counter()
        self._shares: Mapping[str, float] = {}
        self._queue = FairQueue(lambda client, environment: 0.0)
        self._sent: dict[str, _WaitingJob] = {}
        """What waited, of the rollouts that are at a node."""
        self._holding: set[str] = set()
        """Those of them that count as their clients', since they have a place in a node's window."""
        self._drained: set[str] = set()
        self._troubled: dict[str, str] = {}
        """Those that get nothing, since they are no parts of this fleet, and why."""
        self._surveys: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, asyncio.Event] = {}
        """Set when a node has said how large it is."""
        self._change: NodeJoined | NodeLeft | None = None
        """What a source told last, until that is done; a pass that fails is made again with that."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def load(self) -> int:
        """Rollouts under way."""
        return len(self._waiting) + sum(forwarder.load for forwarder in self._forwarders.values())

    @property
    def waiting(self) -> int:
        """Of these, those that are at no node yet."""
        return len(self._waiting)

    @property
    def nodes(self) -> Mapping[str, bool]:
        """The nodes that are there, and whether each answers and takes what is new."""
        return {node: not forwarder.away for node, forwarder in self._forwarders.items()}

    def may_wait(self, client: str, bound: int) -> bool:
        """Whether a client may have one more wait, where ``bound`` may in all: as long as there are fewer, or it has
        less than its part."""
        return len(self._waiting) < bound or is_under_fair_share(client, bound, self._waiting_of, self._shares)

    def share(self, clients: Mapping[str, float]) -> None:
        """From now on clients have these shares of the nodes, in proportion to each other's; 1 where none is said."""
        self._shares = clients
        self._queue.share(clients)

    def views(self) -> list[NodeView]:
        """What there is to tell of each node."""
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
        """No node answers and takes what is new."""
        return all(forwarder.away for forwarder in self._forwarders.values())

    def troubles(self) -> dict[str, str]:
        """The nodes that get no rollouts, each with the reason."""
        reasons = {
            view.node: self._forwarders[view.node].trouble
            or ("it drains" if view.draining else "it has not said how large it is" if not view.usable else "")
            or self._troubled.get(view.node, "")
            for view in self.views()
        }
        return {node: why for node, why in reasons.items() if why}

    async def start(self) -> None:
        """ResumePoint with the nodes that are there, and watch for others."""
        for joined in self._nodes.present:
            await self._join(joined)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await asyncio.gather(*(heard.wait() for heard in self._heard.values()))
        self._track(self._loops.start("fleet-nodes", self._watch))

    async def close(self) -> None:
        """Stop whatever is under way here; nodes are told nothing."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for forwarder in [*self._forwarders.values()]:
            await _close_forwarder(forwarder)

    def submit(self, rollout: str, body: Mapping[str, Any], *, node: str | None = None) -> None:
        """Have a rollout forwarded to where there is room for it.

        Args:
            rollout: its id.
            body: what is submitted: ``row`` and the wishes beside it.
            node: where it is to go whatever the room there, since it may be there already.
        """
        waiting = _WaitingJob(body, str(body.get("client", "")), int(body.get("priority") or 0))
        if node in self._forwarders:
            self._queue.add_load(waiting.client, 1)
            self._put(rollout, waiting, node)
        else:
            self._wait(rollout, waiting)

    def cancel(self, rollout: str) -> None:
        """The outcome of a rollout is of no use. It is told all the same, when its sandbox is gone."""
        if rollout in self._waiting:
            waiting = self._no_longer_waits(rollout)
            self._queue.remove(rollout, waiting.client, waiting.priority, "")
            self._spawn(self._tell_cancelled(rollout))
        elif (node := self.placement.node_of(rollout)) in self._forwarders:
            self._forwarders[node].cancel(rollout)

    async def _tell_cancelled(self, rollout: str) -> None:
        self._on_lost(rollout, LossReason.CANCELLED, "cancelled before it was submitted")

    def cancel_unknown(self, rollout: str, node: str) -> None:
        """Cancel what an earlier process submitted to a node, which must be there."""
        self.placement.put(rollout, node)
        self.placement.holds(rollout, False)
        self._forwarders[node].cancel_unknown(rollout)

    async def result(self, rollout: str, node: str | None) -> JobView:
        """A rollout that had its outcome under an earlier process.

        Raises:
            InfrastructureError: its node is not there, or has no result of it.
        """
        if node not in self._forwarders:
            raise InfrastructureError("its service is not there any more", kind=FailureKind.SESSION_LOST)
        return await self._forwarders[node].result(rollout)

    async def kept_turns(self, rollouts: Sequence[str]) -> list[int] | None:
        """The turns after which a rollout can be forked that nodes have had under these ids: those of the first id of
        which there are any. ``None`` if no node answers."""
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
        """Give a node nothing new, or again. What it has goes on.

        Raises:
            CallerError: there is no such node.
        """
        if node not in self._forwarders:
            known = ", ".join(self._forwarders) or "none"
            raise CallerError(f"there is no {node!r}; there are {known}", field="node")
        (self._drained.add if drained else self._drained.discard)(node)
        self._usable(node)

    # NodeSource come and go

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
            ended=self._ended,
            lost=self._lost,
            broke=partial(self._on_broke, node),
            say=self._say,
            follows=self._is_followed,
            replaceable=lambda: any(not other.away for other in self._forwarders.values() if other is not forwarder),
            moved=self._moved,
            turned=lambda away: self._usable(node),
            patient=self._patient,
            loops=self._loops,
        )
        self.placement.join(node)
        self._usable(node)
        forwarder.start()
        self._heard[node] = asyncio.Event()
        self._surveys[node] = self._track(self._loops.start("node-survey", partial(self._survey, node, forwarder)))
        self._go_on()

    def _leave(self, left: NodeLeft) -> None:
        forwarder = self._forwarders.pop(left.node, None)
        if forwarder is None:
            return
        self.statuses.pop(left.node, None)
        self._drained.discard(left.node)
        self._troubled.pop(left.node, None)
        self._surveys.pop(left.node).cancel()
        del self._heard[left.node]
        self.placement.leave(left.node)
        self._say(f"{left.node} is gone: {left.why}")
        forwarder.give_up(f"{left.node} is gone: {left.why}")
        self._spawn(_close_forwarder(forwarder))

    async def _survey(self, node: str, forwarder: JobForwarder) -> float:
        """Ask a node how large it is; returns the pause. A node gets nothing before its first answer."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await forwarder.client.status()
        except TimeoutError:
            forwarder.heard(InfrastructureError(f"no answer in {_ANSWER_S:g} s"))
        except (ApiError, InfrastructureError):
            pass  # its forwarder finds that out
        else:
            trouble = status.version_trouble() or self._folder_trouble(node, status)
            if trouble and trouble != self._troubled.get(node):
                self._say(f"{node} gets no rollouts: {trouble}")
            if trouble:
                self._troubled[node] = trouble
            else:
                self._troubled.pop(node, None)
            self.statuses[node] = status
            self._heard[node].set()
            forwarder.heard(None)
            run = status.stages[Stage.RUN].slots
            window = status.stages[Stage.INIT].slots + status.ready_slots + run
            self.placement.resize(node, Capacity(run, 0 if status.draining or trouble else window))
            self._on_surveyed(node)
            self._usable(node)
        pause = max(SURVEY_S, len(self._forwarders) / _SURVEYS_PER_S)
        return pause * random.uniform(0.8, 1.2) if self._heard[node].is_set() else 0.2

    def _folder_trouble(self, node: str, status: StatusView) -> str | None:
        """Why a node could not go on with what others had; that of the first of those which get rollouts is the
        fleet's."""
        others = (other for name, other in self.statuses.items() if name != node and name not in self._troubled)
        if status.checkpoint_folder == next(others, status).checkpoint_folder:
            return None
        its = "is not set" if status.checkpoint_folder is None else "is another one"
        return f"its checkpoint_folder {its}, unlike the first node's; set the same at each, or at none"

    def _usable(self, node: str) -> None:
        if (forwarder := self._forwarders.get(node)) is not None:
            self.placement.use(node, not forwarder.away and node not in self._drained and node in self.statuses)
            self._go_on()

    # Rollouts

    def _wait(self, rollout: str, waiting: _WaitingJob) -> None:
        self._waiting[rollout] = waiting
        self._waiting_of[waiting.client] += 1
        self._queue.push(rollout, waiting.client, waiting.priority, "")
        self._go_on()

    def _no_longer_waits(self, rollout: str) -> _WaitingJob:
        waiting = self._waiting.pop(rollout)
        self._waiting_of[waiting.client] -= 1
        if not self._waiting_of[waiting.client]:
            del self._waiting_of[waiting.client]  # callers name themselves as they like
        return waiting

    def _go_on(self) -> None:
        """Hand over whatever there is room for."""
        while self._queue and self._room():
            rollout = self._queue.pop()
            waiting = self._no_longer_waits(rollout)
            self._queue.add_load(waiting.client, 1)
            node = self._choose(waiting)
            assert node is not None, "there is room"
            self._put(rollout, waiting, node)

    def _room(self) -> bool:
        return (self.placement.choose() if self._bounded else self.placement.anyone()) is not None

    def _choose(self, waiting: _WaitingJob) -> str | None:
        if not self._bounded:
            return self.placement.anyone()
        together = any(
            environment.scores_groups_of > 1
            for status in islice(self.statuses.values(), 1)  # nodes of a fleet run the same environments
            for environment in status.environments.values()
        )
        return self.placement.choose(waiting.group, waiting.image, together=together)

    def _put(self, rollout: str, waiting: _WaitingJob, node: str) -> None:
        """The client holds a slot for it already."""
        self._sent[rollout] = waiting
        self._holding.add(rollout)
        self.placement.put(rollout, node, waiting.group, waiting.image)
        self._on_placed(rollout, node)
        self._forwarders[node].submit(rollout, waiting.body)

    def _moved(self, rollout: str, state: JobState) -> None:
        self._holds(rollout, state in _HELD)
        self._on_moved(rollout, state)
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
            # It may be another one by now, also where it answers: it says again how large it is, and what it runs.
            self.statuses.pop(node, None)
            self._usable(node)
        if loss is LossReason.UNTAKEN and sent is not None:
            self._wait(rollout, sent)
            return
        self._on_lost(rollout, loss, why)
        self._go_on()

    def _is_followed(self, job: JobView) -> bool:
        followed = self._follows(job)
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
            self._on_broke("", error)


async def _close_forwarder(forwarder: JobForwarder) -> None:
    await forwarder.close()
    await forwarder.client.__aexit__(None, None, None)
