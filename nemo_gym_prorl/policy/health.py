# SPDX-License-Identifier: Apache-2.0
"""How a backend fares: failure and half-open recovery, slowness, and how much it can take.

A backend that fails is down until a probe finds it alive, then on trial: one request at a time, until one succeeds.
The wait before a probe doubles with each failure in a row.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemo_gym_prorl.policy.backend import Backend, Health


_TURN_SMOOTHING = 0.08
"""Weight of the latest turn in a backend's mean turn time."""

_OPINION = 12
"""How many turns a backend must have had before it can count as slow."""

_SLOW = 2.0
"""How many times longer than the median backend's a backend's turns must take for it to count as slow."""


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


def answered(backend: Backend, seconds: float, all_backends: Iterable[Backend]) -> None:
    """A request succeeded: the backend is up. Learn how long its turns take, and whether far longer than others'."""
    backend.failures, backend.probe_at = 0, None
    backend.turns += 1
    known = backend.turn_s or 0.0
    backend.turn_s = known + max(1 / backend.turns, _TURN_SMOOTHING) * (seconds - known)
    times = sorted(b.turn_s for b in all_backends if b.turn_s is not None and b.health is Health.UP)
    backend.health = Health.UP
    usual = times[(len(times) - 1) // 2] if times else 0.0
    ratio = backend.turn_s / usual if usual > 0.0 else 1.0
    backend.slowness = ratio if ratio > _SLOW and backend.turns >= _OPINION else 1.0


def reported(backend: Backend, ceiling: int, waiting: int, kv_use: float) -> None:
    """What the backend says of itself. Its limit falls while it is over capacity and recovers slowly after."""
    backend.hot = waiting > 0 and kv_use > 0.9
    if backend.hot:
        backend.limit = max(1, min(backend.limit, len(backend.live)) * 7 // 8)
    elif backend.limit < ceiling:
        backend.limit += 1
