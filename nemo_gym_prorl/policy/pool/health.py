# SPDX-License-Identifier: Apache-2.0
"""How a backend fares: failure and half-open recovery, room, and slowness.

A backend that fails is down until a probe finds it alive, then on trial: one request at a time, until one succeeds.
The wait before a probe doubles with each failure in a row.
"""

from __future__ import annotations

from collections.abc import Collection

from nemo_gym_prorl.policy.pool.backend import Backend, Health


_PROBE_AFTER_S, _PROBE_AT_MOST_S = 1.0, 30.0
"""The first wait before a failed backend is probed, and the longest."""

_TURN_SMOOTHING = 0.08
"""Weight of the latest turn in a backend's mean turn time."""

_SHORTEST_S = 0.001
"""Turns count as at least this long; below it only noise differs."""

_OPINION = 12
"""How many turns a backend must have had before it can count as slow."""

_SLOW = 2.0
"""How many times longer than the median backend's a backend's turns must take for it to count as slow."""

_FULL = 0.9
"""The share of its cache from which a backend's long turns may come of prefixes that were evicted."""


def usable(backend: Backend) -> bool:
    """Whether the backend may be sent a request for a rollout that it has."""
    return backend.health is Health.UP or (backend.health is Health.TRIAL and not backend.in_flight)


def takes_new(backend: Backend) -> bool:
    """Whether the backend may be given a rollout that it does not have."""
    return not backend.draining and usable(backend)


def has_room(backend: Backend) -> bool:
    """Whether the backend can be given a rollout now. One that is hot gets no more than it has."""
    room = len(backend.live) < (1 if backend.hot else backend.limit)
    return takes_new(backend) and not backend.paused and room


def failed(backend: Backend, now: float) -> None:
    """A request or a probe failed; the next probe is due after a while."""
    backend.health = Health.DOWN
    backend.probe_at = now + min(_PROBE_AFTER_S * 2**backend.failures, _PROBE_AT_MOST_S)
    backend.failures = min(backend.failures + 1, 16)


def probe_due(backend: Backend, now: float) -> bool:
    """Whether to probe the backend now; says so once."""
    due = backend.probe_at is not None and backend.probe_at <= now
    if due:
        backend.probe_at = None
    return due


def recovers(backend: Backend) -> None:
    """A probe found the backend alive."""
    backend.health, backend.probe_at = Health.TRIAL, None


def answered(backend: Backend, seconds: float, all_backends: Collection[Backend]) -> None:
    """A request succeeded: the backend is up. Learn how long its turns take, and whether it is slow: it is from when
    they take far longer than others' until they take no longer. Rollouts that fill its cache explain that, and are no
    fault of the backend's."""
    backend.failures, backend.probe_at = 0, None
    backend.health = Health.UP
    backend.turns += 1
    # Turn times are heavy-tailed: in a geometric mean, one long answer says little.
    backend.turn_s *= (max(seconds, _SHORTEST_S) / backend.turn_s) ** max(1 / backend.turns, _TURN_SMOOTHING)
    known = sorted(peer.turn_s for peer in all_backends if peer.turns and peer.health is Health.UP)
    longer = backend.turn_s / known[(len(known) - 1) // 2]
    full = backend.capacity is not None and backend.demand > _FULL * backend.capacity
    if not full and backend.turns >= _OPINION and longer > _SLOW:
        backend.slowness = max(backend.slowness, longer)
    elif longer <= 1.0:
        backend.slowness = 1.0
