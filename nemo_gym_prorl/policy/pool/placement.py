# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which backend a rollout lives on, and when it is worth a cold prefix to leave it.

What is balanced is the number of live rollouts, as engines slow down with each. Memory comes second, where it makes a
difference:

- A new rollout goes to the backend with the fewest live ones; equal ones take turns.
- A sibling joins its group's backend, where their prompt is cached, while that is within a margin: as many rollouts
  as a second copy of the prompt is worth, in tokens that live rollouts have for themselves in the mean. So much room
  it takes, and so much work it is to read. Where prompts are short, siblings spread and decode faster; where they are
  long, or few have come far yet, groups stay whole, and who is crowded then leaves while it has little to lose. What a
  prompt shares with those of other groups is not copied, but there already.
- A rollout leaves a backend that is gone, far slower than the others, or crowded; and, if it is no longer than most
  there, one whose rollouts do not fit into its cache, for one where they do: there it is evicted once more, here again
  and again. Its prefix is lost either way, so it settles where the most of a cache stays free for others, among those
  that are not crowded themselves.

Pure functions over what the pool knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nemo_gym_prorl.policy.pool.backend import Backend, Rollout


_SIBLINGS = 1
"""How many live rollouts more than the least loaded backend a group's backend may have for a sibling to join it, at
least."""

_ESCAPE = 4
"""How many live rollouts more than the least loaded backend a *hot* one must have for a rollout to leave it."""

REBALANCE_RATIO = 2.0
"""How many times the least loaded backend's load, plus the escape margin, a rollout bears before it leaves."""

_BEGUN = 500
"""Tokens that live rollouts are taken to have for themselves in the mean, at least. Those that have just begun have
none yet, and no prompt is worth that all crowd one backend."""

KV_OVERCOMMIT = 1.1
"""How many times its cache a backend's rollouts may need before some leave. Above 1: some wait for tools for long."""

_ROOM = 0.95
"""The share of its cache that a backend's rollouts may need once another one has come for room."""


def choose(rollout: Rollout, backends: Collection[Backend]) -> Backend | None:
    """A home with room for the rollout, if there is one."""
    roomy = [backend for backend in backends if backend.has_room]
    if not roomy:
        return None
    least = min(roomy, key=lambda backend: (backend.weight, backend.last_placed, backend.order))
    if rollout.backend is not None:
        home = next((backend for backend in roomy if backend.id == rollout.backend), None)
        if home is not None and not must_leave(rollout, home, backends):
            return home
        bearable = [backend for backend in roomy if backend.weight < _bearable(backend, least.weight)]
        return min(bearable or roomy, key=lambda b: (b.kv_demand + b.needs(rollout), b.weight, b.last_placed, b.order))
    if rollout.group is not None:
        bound = least.weight + max(_SIBLINGS, _copy(rollout, roomy))
        siblings = [backend for backend in roomy if backend.groups[rollout.group] and backend.weight <= bound]
        if siblings:
            return min(siblings, key=lambda backend: (backend.weight, backend.order))
    return least


def must_leave(rollout: Rollout, home: Backend, backends: Iterable[Backend]) -> bool:
    """Whether staying is worse than a cold prefix elsewhere."""
    if not home.usable:
        return True
    peers = [backend for backend in backends if backend.has_room]
    roomy = (peer for peer in peers if peer.capacity and _fills(peer, rollout) <= _ROOM)
    if _fills(home, rollout) > KV_OVERCOMMIT and home.needs(rollout) * len(home.live) <= home.kv_demand and any(roomy):
        return True
    least = min((backend.weight for backend in peers), default=home.weight)
    carried = (len(home.live) + 1) * home.slowness - 1
    if home.slowness > 1.0:
        return carried > least + 1
    return carried >= _bearable(home, least)


def _copy(rollout: Rollout, backends: Collection[Backend]) -> float:
    """How many rollouts a second copy of the rollout's prompt is worth, away from its siblings, where it takes least.
    What is there without them is shared more widely, and will be everywhere."""
    copy = min(
        (backend.missing_prefix_tokens(rollout) for backend in backends if not backend.groups[rollout.group or ""]),
        default=0,
    )
    own = sum(backend.private_tokens for backend in backends) / max(1, sum(len(backend.live) for backend in backends))
    return copy / max(_BEGUN, own)


def _fills(backend: Backend, rollout: Rollout) -> float:
    """How many times the backend's cache its rollouts need, with this one; 0 if it does not say what it holds."""
    more = 0 if rollout.id in backend.live else backend.needs(rollout)
    return (backend.kv_demand + more) / backend.capacity if backend.capacity else 0.0


def _bearable(backend: Backend, least: float) -> float:
    """How loaded a backend may be before its rollouts leave it for the least loaded one."""
    return (1.0 if backend.hot else REBALANCE_RATIO) * least + _ESCAPE
