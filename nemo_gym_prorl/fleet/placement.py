# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of a fleet: sources of nodes, and the placement of rollouts on nodes.

A node is a rollout service with a client for it. A node source reports the nodes: a list of addresses
(:class:`NodeList`), or the nodes of a Ray cluster, which join and leave (:mod:`nemo_gym_prorl.deployment.ray_nodes`).

:class:`Placement` is pure. Rollouts take from seconds to an hour, unknown in advance, so round-robin would leave nodes
idle while others have queues. Each node gets at most its *window*: the slots of its INIT, READY and RUN. All other
rollouts wait in the dispatcher. Among the nodes with room, the choice is:

1. While a slot of RUN is free there: the node of the rollout's group, since siblings share prompt, image and page
   cache; else a node that has run the rollout's image.
2. Else the node with the least filled window.

A group that is scored together is never split, because its verifier would wait for ever. A single node has no window,
since no other node could take the rest, and the node's own queue is fair among clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from yarl import URL

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.api.client import RolloutClient


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node has joined. ``client`` is not open; the receiver of the event opens and closes the client."""

    node: str
    client: RolloutClient


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node has left for good, and its rollouts are lost."""

    node: str
    why: str


class NodeSource(Protocol):
    """Interface by which the dispatcher learns which services are nodes of the fleet."""

    @property
    def present(self) -> Sequence[NodeJoined]:
        """Nodes that are known when the dispatcher starts."""
        ...

    def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        """Yield later changes, and end if there will be no more. A node that left may join again."""
        ...


class NodeList:
    """Node source with a fixed list of services.

    Args:
        clients: one client per service.
        field: setting that lists the services, for errors.

    Raises:
        CallerError: the list is empty, or has a duplicate or an invalid URL.
    """

    def __init__(self, clients: Sequence[RolloutClient], *, field: str = "services") -> None:
        urls = [client.url for client in clients]
        if not urls:
            raise CallerError("name at least one rollout service", field=field)
        for url in urls:
            if not (URL(url).scheme in ("http", "https") and URL(url).host):
                raise CallerError(f"{url!r} is no URL; it must begin with http:// or https://", field=field)
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise CallerError(f"{twice[0]} is listed twice; name each service once", field=field)
        self._present = [NodeJoined(client.url, client) for client in clients]

    @property
    def present(self) -> Sequence[NodeJoined]:
        return self._present

    async def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        """Yield nothing: the list never changes."""
        for change in list[NodeJoined | NodeLeft]():
            yield change


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slots of a node.

    Attributes:
        run: slots of RUN.
        window: slots of INIT, READY and RUN; 0 for a node that takes no new rollouts.
    """

    run: int
    window: int


@dataclass(slots=True)
class _Node:
    """State of a node.

    Attributes:
        number: position of the node in the order of joining.
        capacity: slots of the node; ``None`` while unknown.
        usable: whether the node answers and accepts new rollouts.
        held: number of rollouts that count against the node's window.
        load: number of the fleet's rollouts at the node without an outcome.
        images: images of the node's latest rollouts, the most recent last.
    """

    number: int
    capacity: Capacity | None = None
    usable: bool = True
    held: int = 0
    load: int = 0
    images: dict[str, None] = field(default_factory=dict)

    @property
    def filled(self) -> float:
        """Used fraction of the window; a node at 1 has no room."""
        if self.capacity is None:
            return float(self.held)  # a window of 1 until the capacity is known
        return self.held / self.capacity.window if self.capacity.window else 1.0

    @property
    def slot_free(self) -> bool:
        """Whether the node has room and a free slot of RUN, counting only this fleet's rollouts."""
        return self.usable and self.capacity is not None and self.held < self.capacity.run and self.filled < 1


@dataclass(slots=True)
class _Placed:
    """Node and group of a rollout, and whether the rollout counts against the node's window."""

    node: str
    group: str | None
    holds: bool = True


IMAGES = 1000
"""Images remembered per node, the most recently used ones, to bound memory."""


class Placement:
    """Nodes of a fleet, and the node of each rollout. A decision costs O(n) in the number of nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._placed: dict[str, _Placed] = {}
        self._homes: dict[str, str] = {}
        """Node of each group that has rollouts without an outcome."""
        self._members: Counter[str] = Counter()
        self._owners: dict[str, dict[str, None]] = {}
        """Nodes by image."""
        self._joined = 0

    def join(self, node: str) -> None:
        """Add a node. The node gets one rollout until its capacity is known."""
        self._joined += 1
        self._nodes[node] = _Node(self._joined)

    def leave(self, node: str) -> None:
        """Remove a node. The rollouts of the node stay recorded until :meth:`gone`."""
        for image in [*self._nodes[node].images]:
            self._disown(image, node)
        del self._nodes[node]
        for group in [group for group, home in self._homes.items() if home == node]:
            del self._homes[group]

    def resize(self, node: str, capacity: Capacity) -> None:
        if node in self._nodes:
            self._nodes[node].capacity = capacity

    def use(self, node: str, usable: bool) -> None:
        """Set whether a node answers and accepts new rollouts."""
        if node in self._nodes:
            self._nodes[node].usable = usable

    def choose(self, group: str | None = None, image: str | None = None, *, together: bool = False) -> str | None:
        """Return the node for a rollout; ``None`` if the rollout has to wait.

        Args:
            group: group of the rollout; ``None`` without one.
            image: sandbox image of the rollout; ``None`` if unknown.
            together: whether groups are scored together, so that a group's node is used regardless of its room.
        """
        home = self._nodes.get(self._homes.get(group, "")) if group is not None else None
        if home is not None and home.usable and group is not None and (together or home.slot_free):
            return self._homes[group]
        if len(self._nodes) == 1:
            return next((name for name, node in self._nodes.items() if node.usable and not _closed(node)), None)
        if image is not None:
            there = [name for name in self._owners.get(image, ()) if self._nodes[name].slot_free]
            if there:
                return self._least_filled(there)
        return self._least_filled(name for name, node in self._nodes.items() if node.usable and node.filled < 1)

    def put(self, rollout: str, node: str, group: str | None = None, image: str | None = None) -> None:
        """Record that a rollout is at a node, which becomes the node of ``group`` and a node with ``image``."""
        self._placed[rollout] = _Placed(node, group)
        if group is not None:
            self._members[group] += 1
            self._homes[group] = node
        it = self._nodes[node]
        it.held += 1
        it.load += 1
        if image is not None:
            it.images.pop(image, None)
            it.images[image] = None
            self._owners.setdefault(image, {})[node] = None
            if len(it.images) > IMAGES:
                self._disown(next(iter(it.images)), node)

    def holds(self, rollout: str, holds: bool) -> None:
        """Set whether a rollout counts against its node's window; a rollout in EVAL does not."""
        placed = self._placed.get(rollout)
        if placed is None or placed.holds is holds:
            return
        placed.holds = holds
        if (it := self._nodes.get(placed.node)) is not None:
            it.held += 1 if holds else -1

    def gone(self, rollout: str) -> None:
        """Forget a rollout; no-op for an unknown rollout."""
        placed = self._placed.pop(rollout, None)
        if placed is None:
            return
        if (it := self._nodes.get(placed.node)) is not None:
            it.held -= placed.holds
            it.load -= 1
        if placed.group is not None:
            self._members[placed.group] -= 1
            if not self._members[placed.group]:
                del self._members[placed.group]
                self._homes.pop(placed.group, None)

    def node_of(self, rollout: str) -> str | None:
        placed = self._placed.get(rollout)
        return placed.node if placed else None

    def _least_filled(self, names: Iterable[str]) -> str | None:
        return min(names, key=lambda name: (self._nodes[name].filled, self._nodes[name].number), default=None)

    def _disown(self, image: str, node: str) -> None:
        del self._nodes[node].images[image]
        self._owners[image].pop(node, None)
        if not self._owners[image]:
            del self._owners[image]


def _closed(node: _Node) -> bool:
    return node.capacity is not None and not node.capacity.window
