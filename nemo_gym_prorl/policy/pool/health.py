# SPDX-License-Identifier: Apache-2.0
"""How a backend fares: failure and half-open recovery, slowness, and how much it can take.

A backend that fails is down until a probe finds it alive, then on trial: one request at a time, until one succeeds.
The wait before a probe doubles with each failure in a row.
"""

from __future__ import annotations

from collections.abc import Collection

from nemo_gym_prorl.policy.pool.backend import Backend, Health


_TURN_SMOOTHING = 0.08
"""Weight of the latest turn in a backend's mean turn time."""

_SHORTEST_S = 0.001
"""Turns count as at least this long; below it only noise differs."""

_OPINION = 12
"""How many turns a backend must have had before it can count as slow."""

_SLOW = 2.0
"""How many times longer than the median backend's a backend's turns must take for it to count as slow."""

_FEWER = 1.5
"""How many times fewer turns than the median backend it must end."""

_FULL = 0.9
"""The share of its cache from which a backend's long turns may come of prefixes that were evicted."""

_FORGIVEN = 0.97
"""What is left of its slowness after a turn of a backend whose turns take no longer than the median backend's."""


def usable(backend: Backend) -> bool:
    """Whether the backend may be sent a request for a rollout that it has."""
    return backend.health is Health.UP or (backend.health is Health.TRIAL and not backend.in_flight)


def takes_new(backend: Backend) -> bool:
    """Whether the backend may be given a rollout that it does not have."""
    return not backend.draining and usable(backend)


def has_room(backend: Backend) -> bool:
    """Whether the backend can be given a rollout now."""
    return takes_new(backend) and not backend.paused and len(backend.live) < backend.limit


def failed(backend: Backend, now: float, probe_after: float, probe_at_most: float) -> None:
    """A request or a probe failed; the next probe is due after a while."""
    backend.health = Health.DOWN
    backend.probe_at = now + min(probe_after * 2**backend.failures, probe_at_most)
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


def answered(backend: Backend, seconds: float, all_backends: Collection[Backend], *, cold: bool = False) -> None:
    """A request succeeded: the backend is up. Learn how long its turns take, and whether it is slow.

    A backend with more to do takes longer for each turn, and is none the worse for it: by Little's law it ends as many
    turns as others if its turns take as much longer as there are more of them in flight. So it counts as slow if it
    takes far longer than others *and* ends fewer turns; unless its rollouts fill its cache, which explains both and is
    no fault of the backend.

    Rollouts leave a slow backend, so its turns become as short as others', and it must not count as fast for that: it
    would be filled again at once. Its slowness is forgiven little by little, while its turns take no longer than
    others': it gets the load that makes them equally long.

    A rollout's first turn there is *cold*: it takes long because the whole prompt is read, which is no fault of the
    backend. A backend that was just given many rollouts would count as slow, and lose them to others where all that is
    read again.
    """
    backend.failures, backend.probe_at = 0, None
    backend.health = Health.UP
    if cold:
        return
    backend.turns += 1
    weight = max(1 / backend.turns, _TURN_SMOOTHING)
    # Turn times are heavy-tailed: in a geometric mean, one long answer says little.
    spent = max(seconds, _SHORTEST_S)
    backend.turn_s *= (spent / backend.turn_s) ** weight
    backend.pace_s *= (spent / len(backend.in_flight) / backend.pace_s) ** weight
    known = [peer for peer in all_backends if peer.turns and peer.health is Health.UP]
    longer = backend.turn_s / _usual([peer.turn_s for peer in known])
    fewer = backend.pace_s / _usual([peer.pace_s for peer in known])
    full = backend.capacity is not None and backend.demand > _FULL * backend.capacity
    if not full and backend.turns >= _OPINION and longer > _SLOW and fewer > _FEWER:
        backend.slowness = max(backend.slowness, longer)
    elif longer <= 1.0:
        backend.slowness = max(1.0, backend.slowness * _FORGIVEN)


def _usual(values: list[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]


def reported(backend: Backend, ceiling: int, waiting: int, kv_use: float) -> None:
    """What the backend says of itself. Its limit falls while it is over capacity and recovers slowly after."""
    backend.hot = waiting > 0 and kv_use > 0.9
    if backend.hot:
        backend.limit = max(1, min(backend.limit, len(backend.live)) * 7 // 8)
    elif backend.limit < ceiling:
        backend.limit += 1
