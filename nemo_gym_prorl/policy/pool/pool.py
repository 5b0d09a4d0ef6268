# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which backend samples the next turn: events in, decisions out.

Rollouts are placed, not requests. A rollout's prefix is cached where its last turn ran, so it stays there until it may
not: its backend is dead, gone, or hot past a margin. What is balanced is the number of *live* rollouts, which falls
when they finish, so neither a long past nor a late start distorts it:

- where a rollout lives, and when it leaves, is decided in :mod:`.placement`;
- a late joiner counts as if it carried the load that was there when it joined, until that load has finished: it gets
  its share of the new rollouts and no burst of cold prefixes;
- a backend whose turns take far longer than the others' counts as more loaded by that factor;
- at most ``limit`` rollouts are live per backend; the rest wait in *one* queue, first come first served, and a backend
  that has room takes from it. Private queues behind a full engine never form.

A live rollout whose agent is busy with a tool holds its slot, for its cache's sake. When others wait, the rollouts
that have been idle longest *rest*: they lose the slot, remember their backend, and queue ahead of new rollouts when
they return. Those whose turn was withdrawn rest at once.

Backends and rollouts belong to *runs*, each with a queue of its own: what is said above holds among those of one run,
and no rollout is ever placed on another run's backend. One whose run has none waits.

Waiting is nobody's failure, so it has no bound as long as anything of the run is under way. Where nothing is, that is
an outage (there is no backend, or none that answers, or all are paused), and turns are given up after a while of it.

Pure: no task, socket, clock or thread. Whoever drives it passes the time and carries out the :class:`Decision` s,
which every event returns. Every ticket ends in exactly one of ``answered`` and ``withdraw``, and gets at most one
:class:`Assign` at a time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.pool import placement
from nemo_gym_prorl.policy.pool.backend import (
    Abort,
    AlreadyThere,
    Assign,
    Backend,
    Decision,
    GiveUp,
    Health,
    Line,
    NoSuchBackend,
    Probe,
    Rollout,
    Ticket,
    first_of,
)


KV_SATURATED = 0.9
"""The share of its cache in use from which an engine has no more to give."""

_REMEMBERED = 100_000
"""How many resting rollouts keep the memory of their backend."""


class BackendPool:
    """The pool's whole state.

    Args:
        limit: live rollouts per backend at most.
        patience_s: how long a live rollout may be idle before it rests while others wait.
        unreachable_s: how long nothing of a run may be under way before its turns that wait are given up.
    """

    def __init__(self, *, limit: int = 256, patience_s: float = 30.0, unreachable_s: float = 900.0) -> None:
        if limit < 1:
            raise CallerError("must be at least 1", field="limit")
        self.limit = limit
        self._parts: dict[str | None, int] = {}
        """How many pools share the backends of a run, where that is not this one alone."""
        self._patience = patience_s
        self._unreachable = unreachable_s
        self.backends: dict[str, Backend] = {}
        self.migrations = 0
        self._rollouts: dict[str, Rollout] = {}
        self._resting: OrderedDict[str, Rollout] = OrderedDict()
        self._tickets: dict[int, Ticket] = {}
        self._lines: dict[str | None, Line] = {}
        self._clock = 0
        self._now = 0.0

    # Backends

    def add(
        self, backend_id: str, url: str, weight_version: str | None = None, run: str | None = None
    ) -> list[Decision]:
        """A backend joins, for a run.

        Raises:
            AlreadyThere: there is one of that id.
        """
        if backend_id in self.backends:
            raise AlreadyThere(f"there is a backend {backend_id!r} already", field="id")
        peers = self.of_run(run)
        backend = Backend(backend_id, url, weight_version, self._limit_of(run), self._tick(), run)
        if taking := [peer for peer in peers if peer.takes_new]:
            backend.head_start = min(len(peer.live) for peer in taking)
            backend.load_at_join = backend.load_at_join_left = sum(len(peer.live) for peer in peers)
        self.backends[backend_id] = backend
        return self._dispatch()

    def share(self, parts: int, run: str | None = None) -> list[Decision]:
        """So many pools have the backends of a run, which are to have their limit once."""
        self._parts[run] = parts
        for backend in self.of_run(run):
            backend.limit = self._limit_of(run)
        return self._dispatch()

    def _limit_of(self, run: str | None) -> int:
        return -(-self.limit // self._parts.get(run, 1))

    def drain(self, backend_id: str) -> list[Decision]:
        """Give the backend no new rollouts; those it has stay."""
        self._get(backend_id).draining = True
        return []

    def remove(self, backend_id: str) -> list[Decision]:
        """A backend leaves at once. Its requests are aborted and its rollouts move."""
        return self._remove(self._get(backend_id)) + self._dispatch()

    def clear(self, run: str | None = None) -> list[Decision]:
        """Every backend of a run leaves; tickets wait for new ones."""
        return [decision for backend in self.of_run(run) for decision in self._remove(backend)]

    def pause(self, backend_id: str | None = None, run: str | None = None) -> list[Backend]:
        """Start nothing on the backend, or on any of the run's, until ``resume``; what is under way may finish.

        Returns:
            Those that are meant.
        """
        chosen = self.chosen(backend_id, run)
        for backend in chosen:
            backend.paused = True
        return chosen

    def resume(
        self, backend_id: str | None = None, weight_version: str | None = None, run: str | None = None
    ) -> list[Decision]:
        """Go on, with new weights if a version is given."""
        for backend in self.chosen(backend_id, run):
            backend.paused = False
            if weight_version is not None:
                backend.weight_version = weight_version
        return self._dispatch()

    def label(self, weight_version: str, backend_id: str | None = None, run: str | None = None) -> None:
        """The backend, or every one of the run, samples with other weights from now on, without a pause."""
        for backend in self.chosen(backend_id, run):
            backend.weight_version = weight_version

    def report(self, backend_id: str, *, waiting: int, kv_use: float, capacity: int | None = None) -> list[Decision]:
        """What the backend says of itself. It is hot while requests wait there and its cache is full."""
        backend = self.backends.get(backend_id)
        if backend is None:
            return []
        backend.capacity = capacity
        backend.hot = waiting > 0 and kv_use > KV_SATURATED
        return self._dispatch()

    def probed(self, backend_id: str, alive: bool, now: float) -> list[Decision]:
        """The answer to a :class:`Probe`."""
        backend = self.backends.get(backend_id)
        if backend is None or backend.health is not Health.DOWN:
            return []
        if alive:
            backend.recovers()
            return self._dispatch()
        backend.failed(now)
        return []

    def tick(self, now: float) -> list[Decision]:
        """Time passes: due probes, rest for the idle while others wait, and an end to outages that last."""
        self._now = max(self._now, now)
        decisions: list[Decision] = [Probe(b.id) for b in self.backends.values() if b.probe_due(now)]
        for run, line in self._lines.items():
            if not line:
                continue
            idle = [r for r in self._rollouts.values() if r.run == run and r.idle_since is not None and r.backend]
            idle.sort(key=lambda rollout: rollout.idle_since or 0.0)
            for rollout in idle[: len(line)]:
                if now - (rollout.idle_since or 0.0) >= self._patience:
                    self._rest(rollout)
        return decisions + self._dispatch() + self._given_up()

    def _given_up(self) -> list[Decision]:
        """The turns that have waited through too long an outage of their run."""
        decisions: list[Decision] = []
        for run, line in [*self._lines.items()]:
            peers = self.of_run(run)
            waiting = [queue for queue in (line.returning, line.fresh, *(b.held for b in peers)) if queue]
            if not waiting and not peers:
                del self._lines[run]
            if not waiting or any(peer.in_flight for peer in peers):
                line.moved = self._now
                continue
            states = ", ".join(f"{b.id} {'paused' if b.paused else b.health}" for b in peers) or "there is none"
            reason = f"no backend{f' of run {run!r}' if run else ''} served for {self._unreachable:g} s ({states})"
            for ticket in [ticket for queue in waiting for ticket in queue.values()]:
                if self._now - max(line.moved, ticket.since) >= self._unreachable:
                    decisions.append(GiveUp(ticket.id, reason))
        return decisions

    # Rollouts

    def request(
        self,
        ticket_id: int,
        rollout_id: str,
        group: str | None = None,
        now: float = 0.0,
        tokens: int = 0,
        blocks: bytes = b"",
        run: str | None = None,
    ) -> list[Decision]:
        """A turn wants a backend of its run for a prompt of so many tokens, if they are known.

        The first turn of a rollout may say which blocks (:func:`.prefixes.blocks_of`) its prompt has; what other
        rollouts share of it is counted once.
        """
        self._now = max(self._now, now)
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            rollout = self._resting.pop(rollout_id, None)
            if rollout is None or rollout.run != run:
                rollout = Rollout(rollout_id, group, self._tick(), run, blocks=blocks)
            self._rollouts[rollout_id] = rollout
        ticket = self._tickets[ticket_id] = Ticket(ticket_id, rollout, since=now)
        rollout.tickets.add(ticket_id)
        rollout.idle_since = None
        if (home := self._home(rollout)) is not None:
            home.grow(rollout, tokens)
        else:
            rollout.tokens = tokens
        return self._route(ticket, home)

    def answered(self, ticket_id: int, now: float) -> list[Decision]:
        """The ticket's request at its backend ended well."""
        ticket = self._tickets[ticket_id]
        if (backend := self._where(ticket)) is not None:
            backend.answered(now - ticket.since, self.of_run(backend.run))
        self._end(ticket, now)
        return self._dispatch()

    def failed(self, ticket_id: int, now: float) -> list[Decision]:
        """The ticket's request failed by its backend's doing. It is placed again, perhaps at once."""
        self._now = max(self._now, now)
        ticket = self._tickets[ticket_id]
        if (backend := self._where(ticket)) is not None:
            backend.failovers += 1
            backend.failed(now)
            self._requeue(ticket)
            self._evacuate(backend)
        return self._dispatch()

    def withdraw(self, ticket_id: int, now: float) -> list[Decision]:
        """Whoever wanted the turn is gone, whether it waits or runs. A rollout that has no other turn rests at once:
        its agent has no tool to wait for, and should it ask again, it finds its backend again."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            return []
        self._end(ticket, now)
        return self._dispatch() + self.finish(ticket.rollout.id)

    def finish(self, rollout_id: str) -> list[Decision]:
        """The rollout is over, or looks so; should it return, it finds its backend again."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None or rollout.tickets:
            return []
        self._rest(rollout)
        return self._dispatch()

    def drop(self, rollout_id: str, now: float) -> list[Decision]:
        """The rollout is over for good: its turns are withdrawn, wherever they are, and its slot is free."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return []
        for ticket_id in sorted(rollout.tickets):
            self._end(self._tickets[ticket_id], now)
        self._rest(rollout)
        return self._dispatch()

    # Numbers

    @property
    def waiting(self) -> int:
        """Tickets that no backend has."""
        return sum(self.waiting_of.values())

    @property
    def waiting_of(self) -> dict[str | None, int]:
        """The same by run, for each run that there is."""
        waiting: Counter[str | None] = Counter({None: 0})
        waiting.update({run: len(line) for run, line in self._lines.items()})
        for backend in self.backends.values():
            waiting[backend.run] += len(backend.held)
        return waiting

    def of_run(self, run: str | None) -> list[Backend]:
        """The backends of a run."""
        return [backend for backend in self.backends.values() if backend.run == run]

    def backend_of(self, rollout_id: str) -> str | None:
        """Where a live or resting rollout's prefix is."""
        rollout = self._rollouts.get(rollout_id) or self._resting.get(rollout_id)
        return rollout.backend if rollout else None

    # Decisions

    def _route(self, ticket: Ticket, home: Backend | None) -> list[Decision]:
        """Queue a ticket where it belongs, and hand out what can be."""
        rollout = ticket.rollout
        if home is not None and not placement.must_leave(rollout, home, self.of_run(rollout.run)):
            ticket.enqueue(home.held)
        else:
            self._leave(rollout)
            line = self._line(rollout)
            ticket.enqueue(line.fresh if rollout.backend is None else line.returning)
        return self._dispatch()

    def _dispatch(self) -> list[Decision]:
        """Give queued tickets the room there is: at home first, then those that return, then new ones."""
        decisions: list[Decision] = []
        for backend in self.backends.values():
            self._serve(backend, decisions)
        for run, line in self._lines.items():
            peers = self.of_run(run) if line else []
            for queue in (line.returning, line.fresh):
                while queue:
                    rollout = first_of(queue).rollout
                    chosen = placement.choose(rollout, peers)
                    if chosen is None:
                        break
                    self._settle(rollout, chosen)
                    self._serve(chosen, decisions)
        return decisions

    def _serve(self, backend: Backend, decisions: list[Decision]) -> None:
        """Start what waits for this very backend."""
        held = backend.held
        while held and not backend.paused and backend.usable:
            ticket = first_of(held)
            ticket.unqueue()
            ticket.backend, ticket.since = backend.id, self._now
            backend.in_flight.add(ticket.id)
            decisions.append(Assign(ticket.id, backend.id, backend.weight_version))

    def _settle(self, rollout: Rollout, backend: Backend) -> None:
        """Make the backend the rollout's home; all its waiting tickets come along."""
        self._leave(rollout)
        backend.take(rollout)
        backend.last_placed = self._tick()
        self.migrations += rollout.backend not in (None, backend.id)
        rollout.backend = backend.id
        for ticket_id in sorted(rollout.tickets):
            ticket = self._tickets[ticket_id]
            if ticket.backend is None:
                ticket.unqueue()
                ticket.enqueue(backend.held)

    # Bookkeeping

    def _requeue(self, ticket: Ticket) -> None:
        """Back to the front of the queue: this turn has waited once already."""
        if (backend := self._where(ticket)) is not None:
            backend.in_flight.discard(ticket.id)
        ticket.backend, ticket.since = None, self._now
        ticket.enqueue(self._line(ticket.rollout).returning, first=True)

    def _remove(self, backend: Backend) -> list[Decision]:
        decisions: list[Decision] = []
        for ticket_id in sorted(backend.in_flight):
            decisions.append(Abort(ticket_id, backend.id))
            self._requeue(self._tickets[ticket_id])
        self._evacuate(backend)
        del self.backends[backend.id]
        return decisions

    def _evacuate(self, backend: Backend) -> None:
        """No rollout with nothing in flight lives on a backend that is gone."""
        flying = {self._tickets[ticket_id].rollout.id for ticket_id in backend.in_flight}
        for rollout_id in sorted(backend.live - flying):
            self._leave(self._rollouts[rollout_id])
        for ticket in list(backend.held.values()):
            ticket.unqueue()
            ticket.enqueue(self._line(ticket.rollout).returning)

    def _end(self, ticket: Ticket, now: float) -> None:
        self._now = max(self._now, now)
        if (backend := self._where(ticket)) is not None:
            backend.in_flight.discard(ticket.id)
        ticket.unqueue()
        del self._tickets[ticket.id]
        ticket.rollout.tickets.discard(ticket.id)
        if not ticket.rollout.tickets:
            ticket.rollout.idle_since = now

    def _leave(self, rollout: Rollout) -> None:
        """Take the rollout's slot; it keeps the memory of where it was."""
        if (home := self._home(rollout)) is not None:
            home.release(rollout)

    def _rest(self, rollout: Rollout) -> None:
        del self._rollouts[rollout.id]
        rollout.idle_since = None
        self._leave(rollout)
        for peer in self.of_run(rollout.run):
            if peer.load_at_join_left and rollout.born < peer.order:
                peer.load_at_join_left -= 1
        self._resting[rollout.id] = rollout
        while len(self._resting) > _REMEMBERED:
            self._resting.popitem(last=False)

    def _home(self, rollout: Rollout) -> Backend | None:
        """Where the rollout is live, if it is."""
        backend = self.backends.get(rollout.backend or "")
        return backend if backend is not None and rollout.id in backend.live else None

    def _where(self, ticket: Ticket) -> Backend | None:
        """Where the ticket's request is in flight, if it is."""
        return self.backends.get(ticket.backend or "")

    def _line(self, rollout: Rollout) -> Line:
        return self._lines.setdefault(rollout.run, Line(self._now))

    def chosen(self, backend_id: str | None, run: str | None) -> list[Backend]:
        """Return one backend, or all of a run.

        Raises:
            NoSuchBackend: there is none.
        """
        chosen = self.of_run(run)
        if run is not None and not chosen:
            raise NoSuchBackend(f"run {run!r} has no backend: register them first", field="run")
        return chosen if backend_id is None else [self._get(backend_id)]

    def _get(self, backend_id: str) -> Backend:
        try:
            return self.backends[backend_id]
        except KeyError:
            known = ", ".join(self.backends) or "none"
            raise NoSuchBackend(f"no backend {backend_id!r}; there are: {known}", field="id") from None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
