# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Choice of a rollout's backend, and of the time to leave it despite its cached prefix.

Placement balances the number of live rollouts, because each live rollout slows its engine down. Cached prefixes and
free cache decide only where they make a difference:

- A new rollout goes to the backend with the fewest live rollouts; equally loaded backends take turns.
- A sibling joins its group's backend, which has their prompt cached, unless that backend's load is too far above the
  least load. The margin is the cost of a second copy of the prompt, in mean private lengths of live rollouts.
- A rollout leaves a backend that is unusable, far slower than the others, or overloaded.
- A rollout of at most mean length also leaves a backend whose rollouts do not fit into its cache, if another backend
  has room. The rollout's prefix is evicted either way, but on the new backend only once.
- A rollout that leaves goes to the acceptable backend with the most free cache.

With short prompts, siblings therefore spread and decode faster. With long prompts, or early rollouts, groups stay
together, and overloaded rollouts leave while their prefix is short. Prefixes shared with other groups count as
present, not as copied. Pure functions over the pool's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nemo_gym_prorl.policy.pool.backend import Backend, Rollout


_SIBLING_MARGIN = 1
"""Minimum margin, in live rollouts above the least loaded backend, within which a sibling joins its group."""

_LEAVE_MARGIN = 4
"""Live rollouts above the least loaded backend at which rollouts leave a *hot* backend, despite a cold prefix."""

REBALANCE_RATIO = 2.0
"""Multiple of the least loaded backend's load, plus ``_LEAVE_MARGIN``, at which rollouts leave a backend."""

_MIN_PRIVATE_TOKENS = 500
"""Lower bound of the mean private length in tokens. New rollouts have no private tokens; without the bound, a second
copy of any prompt would seem to cost more than overloading a backend.
"""

KV_OVERCOMMIT = 1.1
"""Ratio of KV demand to cache above which rollouts leave; above 1, as rollouts that run a tool need no cache."""

_KV_TARGET = 0.95
"""Ratio of KV demand to cache up to which a backend accepts rollouts that leave another for lack of cache."""


def choose_backend(rollout: Rollout, backends: Collection[Backend]) -> Backend | None:
    """Return the best backend with room for the rollout; ``None`` if no backend has room."""
    roomy = [backend for backend in backends if backend.has_room]
    if not roomy:
        return None
    least = min(roomy, key=lambda backend: (backend.weight, backend.last_placed, backend.order))
    if rollout.backend is not None:
        home = next((backend for backend in roomy if backend.id == rollout.backend), None)
        if home is not None and not must_leave(rollout, home, backends):
            return home
        acceptable = [backend for backend in roomy if backend.weight < _load_limit(backend, least.weight)]
        return min(
            acceptable or roomy, key=lambda b: (b.kv_demand + b.needs(rollout), b.weight, b.last_placed, b.order)
        )
    if rollout.group is not None:
        bound = least.weight + max(_SIBLING_MARGIN, _prompt_copy_cost(rollout, roomy))
        siblings = [backend for backend in roomy if backend.groups[rollout.group] and backend.weight <= bound]
        if siblings:
            return min(siblings, key=lambda backend: (backend.weight, backend.order))
    return least


def must_leave(rollout: Rollout, home: Backend, backends: Iterable[Backend]) -> bool:
    """Return whether staying costs more than a cold prefix on another backend."""
    if not home.usable:
        return True
    peers = [backend for backend in backends if backend.has_room]
    roomy = (peer for peer in peers if peer.capacity and _kv_ratio(peer, rollout) <= _KV_TARGET)
    if (
        _kv_ratio(home, rollout) > KV_OVERCOMMIT
        and home.needs(rollout) * len(home.live) <= home.kv_demand
        and any(roomy)
    ):
        return True
    least = min((backend.weight for backend in peers), default=home.weight)
    carried = (len(home.live) + 1) * home.slowness - 1
    if home.slowness > 1.0:
        return carried > least + 1
    return carried >= _load_limit(home, least)


def _prompt_copy_cost(rollout: Rollout, backends: Collection[Backend]) -> float:
    """Return the lowest cost of a prompt copy on a backend without siblings, in rollouts of mean private length."""
    copy = min(
        (backend.missing_prefix_tokens(rollout) for backend in backends if not backend.groups[rollout.group or ""]),
        default=0,
    )
    own = sum(backend.private_tokens for backend in backends) / max(1, sum(len(backend.live) for backend in backends))
    return copy / max(_MIN_PRIVATE_TOKENS, own)


def _kv_ratio(backend: Backend, rollout: Rollout) -> float:
    """Return the ratio of KV demand, this rollout included, to the backend's cache; 0 if the cache size is unknown."""
    more = 0 if rollout.id in backend.live else backend.needs(rollout)
    return (backend.kv_demand + more) / backend.capacity if backend.capacity else 0.0


def _load_limit(backend: Backend, least: float) -> float:
    """Return the load at which rollouts leave a backend, if the least loaded backend has the load ``least``."""
    return (1.0 if backend.hot else REBALANCE_RATIO) * least + _LEAVE_MARGIN
