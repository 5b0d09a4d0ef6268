# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Assign turns to backends: events in, decisions out.

The pool places rollouts, not requests. A rollout's prefix is cached where its last turn ran, so the rollout stays on
that backend unless the backend is dead, removed or overloaded. The pool balances the number of *live* rollouts, which
falls when rollouts finish, so neither past load nor a late start distorts this number:

- :mod:`.backend_choice` chooses a rollout's backend, and the time at which the rollout leaves;
- a backend that joins late is credited with the least load of another backend until the rollouts of that time have
  finished, so that the backend takes new rollouts without a burst of cold prefixes;
- a backend whose turns take far longer than the others' counts as more loaded by that factor;
- at most ``limit`` rollouts are live per backend; all others wait in *one* FIFO queue, from which a backend with room
  takes the first.

A live rollout whose agent runs a tool keeps its slot, to keep its cache. While others wait, the rollouts that have
been idle longest become *inactive*: they lose the slot, remember their backend, and queue ahead of new rollouts when
they return. A rollout whose turn was withdrawn becomes inactive at once.

Backends and rollouts belong to training *runs*, each with its own queue. No rollout is placed on another run's
backend; a rollout whose run has no backend waits.

Waiting has no limit while any turn of the run is in flight. Otherwise the run has an outage (no backend, no backend
that answers, or all paused), and after a timeout its turns are given up.

Pure: no task, socket, clock or thread. The caller passes the time (seconds of a monotonic clock) and carries out the
:class:`Decision` s that every event returns. Every ticket ends in exactly one of ``answered`` and ``withdraw``, and
has at most one :class:`Assign` at a time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from nemo_gym_prorl.policy.pool import backend_choice
from nemo_gym_prorl.policy.pool.backend import (
    KV_SATURATED,
    Abort,
    Assign,
    Backend,
    BackendExists,
    Decision,
    GiveUp,
    Health,
    NoSuchBackend,
    Probe,
    Rollout,
    RunQueue,
    Ticket,
    first_of,
)


_MAX_INACTIVE = 100_000
"""Maximum of inactive rollouts whose backend is remembered, to bound memory."""


class BackendPool:
    """Placement of rollouts on backends; see the module.

    Args:
        limit: maximum of live rollouts per backend.
        patience_s: seconds of idleness after which a live rollout becomes inactive while others wait.
        unreachable_s: seconds of a run's outage (no turn in flight) after which the run's waiting turns are given up.
    """

    def __init__(self, *, limit: int = 256, patience_s: float = 30.0, unreachable_s: float = 900.0) -> None:
        self.limit = limit
        self._parts: dict[str | None, int] = {}
        """Number of pools that share a run's backends, by run; 1 for runs that are not listed."""
        self._patience = patience_s
        self._unreachable = unreachable_s
        self.backends: dict[str, Backend] = {}
        self.migrations = 0
        self._rollouts: dict[str, Rollout] = {}
        self._inactive: OrderedDict[str, Rollout] = OrderedDict()
        self._tickets: dict[int, Ticket] = {}
        self._run_queues: dict[str | None, RunQueue] = {}
        self._clock = 0
        self._now = 0.0

    def add(
        self, backend_id: str, url: str, weight_version: str | None = None, run: str | None = None
    ) -> list[Decision]:
        """Add a backend for a run, or, if ``run`` is ``None``, for rollouts that name no run.

        Raises:
            BackendExists: the id is in use.
        """
        if backend_id in self.backends:
            raise BackendExists(f"a backend {backend_id!r} exists already: choose another id", field="id")
        peers = self.of_run(run)
        backend = Backend(backend_id, url, weight_version, self._limit_of(run), self._tick(), run)
        if taking := [peer for peer in peers if peer.takes_new]:
            backend.load_credit = min(len(peer.live) for peer in taking)
            backend.load_at_join = backend.load_at_join_left = sum(len(peer.live) for peer in peers)
        self.backends[backend_id] = backend
        return self._dispatch()

    def share(self, parts: int, run: str | None = None) -> list[Decision]:
        """Set the number of pools that share a run's backends; this pool then uses ``limit / parts``, rounded up."""
        self._parts[run] = parts
        for backend in self.of_run(run):
            backend.limit = self._limit_of(run)
        return self._dispatch()

    def _limit_of(self, run: str | None) -> int:
        return -(-self.limit // self._parts.get(run, 1))

    def drain(self, backend_id: str) -> list[Decision]:
        """Place no new rollouts on the backend; its live rollouts stay, so the returned list is empty."""
        self._get(backend_id).draining = True
        return []

    def remove(self, backend_id: str) -> list[Decision]:
        """Remove a backend at once: abort its requests and move its rollouts."""
        return self._remove(self._get(backend_id)) + self._dispatch()

    def clear(self, run: str | None = None) -> list[Decision]:
        """Remove every backend of a run; tickets wait for new backends."""
        return [decision for backend in self.of_run(run) for decision in self._remove(backend)]

    def pause(self, backend_id: str | None = None, run: str | None = None, now: float = 0.0) -> list[Backend]:
        """Start no request on the backend, or on all of the run, until ``resume``. Requests in flight may finish.

        Returns:
            The paused backends.
        """
        self._now = max(self._now, now)
        chosen = self.chosen(backend_id, run)
        for backend in chosen:
            backend.paused_since = self._now if backend.paused_since is None else backend.paused_since
        return chosen

    def resume(
        self, backend_id: str | None = None, weight_version: str | None = None, run: str | None = None
    ) -> list[Decision]:
        for backend in self.chosen(backend_id, run):
            backend.paused_since = None
            if weight_version is not None:
                backend.weight_version = weight_version
        return self._dispatch()

    def label(self, weight_version: str, backend_id: str | None = None, run: str | None = None) -> None:
        """Label the weights of the backend, or of all backends of the run, without a pause."""
        for backend in self.chosen(backend_id, run):
            backend.weight_version = weight_version

    def report(self, backend_id: str, *, waiting: int, kv_use: float, capacity: int | None = None) -> list[Decision]:
        """Update a backend's load. A backend is hot if requests wait in its queue and its KV cache is saturated."""
        backend = self.backends.get(backend_id)
        if backend is None:
            return []
        backend.capacity = capacity
        backend.hot = waiting > 0 and kv_use > KV_SATURATED
        return self._dispatch()

    def probed(self, backend_id: str, alive: bool, now: float) -> list[Decision]:
        """Record the result of a :class:`Probe`; ignored unless the backend is down."""
        backend = self.backends.get(backend_id)
        if backend is None or backend.health is not Health.DOWN:
            return []
        if alive:
            backend.recovers()
            return self._dispatch()
        backend.failed(now)
        return []

    def tick(self, now: float) -> list[Decision]:
        """Advance the time: request probes, free idle rollouts' slots if others wait, and give up turns in outages."""
        self._now = max(self._now, now)
        decisions: list[Decision] = [Probe(b.id) for b in self.backends.values() if b.probe_due(now)]
        for run, line in self._run_queues.items():
            if not line:
                continue
            idle = [r for r in self._rollouts.values() if r.run == run and r.idle_since is not None and r.backend]
            idle.sort(key=lambda rollout: rollout.idle_since or 0.0)
            for rollout in idle[: len(line)]:
                if now - (rollout.idle_since or 0.0) >= self._patience:
                    self._deactivate(rollout)
        return decisions + self._dispatch() + self._give_up_on_outages()

    def _give_up_on_outages(self) -> list[Decision]:
        """Give up turns after ``unreachable_s`` of waiting during an outage of their run."""
        decisions: list[Decision] = []
        for run, line in [*self._run_queues.items()]:
            peers = self.of_run(run)
            waiting = [queue for queue in (line.returning, line.fresh, *(b.held for b in peers)) if queue]
            if not waiting and not peers:
                del self._run_queues[run]
            if not waiting or any(peer.in_flight for peer in peers):
                line.moved = self._now
                continue
            states = ", ".join(f"{b.url} {'paused' if b.paused else b.health}" for b in peers) or "there is none"
            reason = f"no engine{f' of training {run!r}' if run else ''} served for {self._unreachable:g} s ({states})"
            for ticket in [ticket for queue in waiting for ticket in queue.values()]:
                if self._now - max(line.moved, ticket.since) >= self._unreachable:
                    decisions.append(GiveUp(ticket.id, reason))
        return decisions

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
        """Request a backend of the run for a turn with a prompt of ``tokens`` tokens, 0 if unknown.

        A rollout's first turn may pass the blocks (:func:`.backend.blocks_of`) of its prompt, so that shared prefixes
        count once. Later turns' blocks are ignored.
        """
        self._now = max(self._now, now)
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            rollout = self._inactive.pop(rollout_id, None)
            if rollout is None or rollout.run != run:
                rollout = Rollout(rollout_id, group, self._tick(), run, blocks=blocks)
            self._rollouts[rollout_id] = rollout
        ticket = self._tickets[ticket_id] = Ticket(ticket_id, rollout, since=now)
        rollout.tickets.add(ticket_id)
        rollout.idle_since = None
        if (home := self._home_of(rollout)) is not None:
            home.grow(rollout, tokens)
        else:
            rollout.tokens = tokens
        return self._route(ticket, home)

    def answered(self, ticket_id: int, now: float) -> list[Decision]:
        """End a ticket whose request succeeded."""
        ticket = self._tickets[ticket_id]
        if (backend := self._backend_of_ticket(ticket)) is not None:
            backend.answered(now - ticket.since, self.of_run(backend.run))
        self._end(ticket, now)
        return self._dispatch()

    def failed(self, ticket_id: int, now: float) -> list[Decision]:
        """Record a request that failed because of its backend. The ticket is placed again, possibly at once."""
        self._now = max(self._now, now)
        ticket = self._tickets[ticket_id]
        if (backend := self._backend_of_ticket(ticket)) is not None:
            backend.failovers += 1
            backend.failed(now)
            self._requeue(ticket)
            self._evacuate(backend)
        return self._dispatch()

    def withdraw(self, ticket_id: int, now: float) -> list[Decision]:
        """End a ticket whose caller has given up, whether the ticket waits or runs; unknown tickets are ignored.

        A rollout without another turn becomes inactive at once, because its agent runs no tool.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            return []
        self._end(ticket, now)
        return self._dispatch() + self.finish(ticket.rollout.id)

    def finish(self, rollout_id: str) -> list[Decision]:
        """Make a rollout without turns inactive. The pool remembers the rollout's backend for a later turn."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None or rollout.tickets:
            return []
        self._deactivate(rollout)
        return self._dispatch()

    def drop(self, rollout_id: str, now: float) -> list[Decision]:
        """End a live rollout: withdraw its turns and free its slot."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return []
        for ticket_id in sorted(rollout.tickets):
            self._end(self._tickets[ticket_id], now)
        self._deactivate(rollout)
        return self._dispatch()

    @property
    def waiting_of(self) -> dict[str | None, int]:
        """Number of tickets without a request in flight, by run."""
        waiting: Counter[str | None] = Counter({None: 0})
        waiting.update({run: len(line) for run, line in self._run_queues.items()})
        for backend in self.backends.values():
            waiting[backend.run] += len(backend.held)
        return waiting

    def of_run(self, run: str | None) -> list[Backend]:
        """Return the backends of a run; ``None`` selects the backends of rollouts that name no run."""
        return [backend for backend in self.backends.values() if backend.run == run]

    def backend_of(self, rollout_id: str) -> str | None:
        """Return the id of the backend with a live or inactive rollout's prefix; ``None`` if there is none."""
        rollout = self._rollouts.get(rollout_id) or self._inactive.get(rollout_id)
        return rollout.backend if rollout else None

    def _route(self, ticket: Ticket, home: Backend | None) -> list[Decision]:
        """Queue a ticket at its rollout's backend ``home`` or in its run's queue, and dispatch."""
        rollout = ticket.rollout
        if home is not None and not backend_choice.must_leave(rollout, home, self.of_run(rollout.run)):
            ticket.enqueue(home.held)
        else:
            self._vacate(rollout)
            line = self._run_queue(rollout)
            ticket.enqueue(line.fresh if rollout.backend is None else line.returning)
        return self._dispatch()

    def _dispatch(self) -> list[Decision]:
        """Assign queued tickets: first those queued at a backend, then returning rollouts, then new rollouts."""
        decisions: list[Decision] = []
        for backend in self.backends.values():
            self._serve(backend, decisions)
        for run, line in self._run_queues.items():
            peers = self.of_run(run) if line else []
            for queue in (line.returning, line.fresh):
                while queue:
                    rollout = first_of(queue).rollout
                    chosen = backend_choice.choose_backend(rollout, peers)
                    if chosen is None:
                        break
                    self._place(rollout, chosen)
                    self._serve(chosen, decisions)
        return decisions

    def _serve(self, backend: Backend, decisions: list[Decision]) -> None:
        """Assign the tickets that wait for this backend to it, as far as its health permits."""
        held = backend.held
        while held and not backend.paused and backend.usable:
            ticket = first_of(held)
            ticket.unqueue()
            ticket.backend, ticket.since = backend.id, self._now
            backend.in_flight.add(ticket.id)
            decisions.append(Assign(ticket.id, backend.id, backend.weight_version))

    def _place(self, rollout: Rollout, backend: Backend) -> None:
        """Make the rollout live on the backend, and move the rollout's waiting tickets to the backend's queue."""
        self._vacate(rollout)
        backend.take(rollout)
        backend.last_placed = self._tick()
        self.migrations += rollout.backend not in (None, backend.id)
        rollout.backend = backend.id
        for ticket_id in sorted(rollout.tickets):
            ticket = self._tickets[ticket_id]
            if ticket.backend is None:
                ticket.unqueue()
                ticket.enqueue(backend.held)

    def _requeue(self, ticket: Ticket) -> None:
        """Put a ticket back at the front of its run's queue, because the ticket has waited once already."""
        if (backend := self._backend_of_ticket(ticket)) is not None:
            backend.in_flight.discard(ticket.id)
        ticket.backend, ticket.since = None, self._now
        ticket.enqueue(self._run_queue(ticket.rollout).returning, first=True)

    def _remove(self, backend: Backend) -> list[Decision]:
        decisions: list[Decision] = []
        for ticket_id in sorted(backend.in_flight):
            decisions.append(Abort(ticket_id, backend.id))
            self._requeue(self._tickets[ticket_id])
        self._evacuate(backend)
        del self.backends[backend.id]
        return decisions

    def _evacuate(self, backend: Backend) -> None:
        """Free the slots of a backend's rollouts without requests in flight, and queue its waiting tickets again."""
        flying = {self._tickets[ticket_id].rollout.id for ticket_id in backend.in_flight}
        for rollout_id in sorted(backend.live - flying):
            self._vacate(self._rollouts[rollout_id])
        for ticket in list(backend.held.values()):
            ticket.unqueue()
            ticket.enqueue(self._run_queue(ticket.rollout).returning)

    def _end(self, ticket: Ticket, now: float) -> None:
        self._now = max(self._now, now)
        if (backend := self._backend_of_ticket(ticket)) is not None:
            backend.in_flight.discard(ticket.id)
        ticket.unqueue()
        del self._tickets[ticket.id]
        ticket.rollout.tickets.discard(ticket.id)
        if not ticket.rollout.tickets:
            ticket.rollout.idle_since = now

    def _vacate(self, rollout: Rollout) -> None:
        """Free the rollout's slot; ``rollout.backend`` still names the backend with its prefix."""
        if (home := self._home_of(rollout)) is not None:
            home.release(rollout)

    def _deactivate(self, rollout: Rollout) -> None:
        del self._rollouts[rollout.id]
        rollout.idle_since = None
        self._vacate(rollout)
        for peer in self.of_run(rollout.run):
            if peer.load_at_join_left and rollout.seen_order < peer.order:
                peer.load_at_join_left -= 1
        self._inactive[rollout.id] = rollout
        while len(self._inactive) > _MAX_INACTIVE:
            self._inactive.popitem(last=False)

    def _home_of(self, rollout: Rollout) -> Backend | None:
        backend = self.backends.get(rollout.backend or "")
        return backend if backend is not None and rollout.id in backend.live else None

    def _backend_of_ticket(self, ticket: Ticket) -> Backend | None:
        return self.backends.get(ticket.backend or "")

    def _run_queue(self, rollout: Rollout) -> RunQueue:
        return self._run_queues.setdefault(rollout.run, RunQueue(self._now))

    def chosen(self, backend_id: str | None, run: str | None) -> list[Backend]:
        """Return one backend, or all of a run.

        Raises:
            NoSuchBackend: the backend does not exist, or the named run has no backend.
        """
        chosen = self.of_run(run)
        if run is not None and not chosen:
            raise NoSuchBackend(f"training {run!r} has no engine: register one first", field="run")
        return chosen if backend_id is None else [self._get(backend_id)]

    def _get(self, backend_id: str) -> Backend:
        try:
            return self.backends[backend_id]
        except KeyError:
            known = ", ".join(f"{each.id} ({each.url})" for each in self.backends.values()) or "none"
            raise NoSuchBackend(f"no backend {backend_id!r}; there are: {known}", field="id") from None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
