# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NodeSource of a fleet: where they come from, and which of them a rollout goes to.

A node is a rollout service with a client for it. A source of nodes tells which there are: a list of addresses
(:class:`NodeList`), or the nodes of a Ray cluster, which come and go (:mod:`nemo_gym_prorl.deployment.ray_nodes`).

:class:`Placement` is pure. Rollouts last from seconds to an hour, unknown beforehand, so dealing them out in turn
would leave nodes idle while others have queues. Each node gets no more than its *window*: what its INIT, READY and
RUN hold. All others wait, still free to go anywhere. Among nodes with room

1. a group goes where it is, since siblings share prompt, image and page cache, and an image where it lies, as long as
   a slot of RUN is free there: an advantage of a second is not worth a wait;
2. else the least filled one is next.

A group that is scored together is never parted: its verifier would wait for ever. A single node has no window, since
nothing could go elsewhere: its own queue is fair among callers, the fleet's knows only one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from yarl import URL

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.api.client import RolloutClient


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is there. ``client`` is not open yet; whoever uses the node opens and closes it."""

    node: str
    client: RolloutClient


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node is gone for good, and whatever it ran."""

    node: str
    why: str


class NodeSource(Protocol):
    """A source of nodes."""

    @property
    def present(self) -> Sequence[NodeJoined]:
        """Those that are there before any change is waited for."""
        ...

    def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        """What comes and goes after that; ends if nothing ever will. An id that has left may join again."""
        ...


class NodeList:
    """Services that somebody else has started, each under its address; nobody tells of their end.

    Args:
        clients: one of each.

    Raises:
        CallerError: there is none, or one twice, or what is no address.
    """

    def __init__(self, clients: Sequence[RolloutClient], *, field: str = "services") -> None:
        urls = [client.url for client in clients]
        if not urls:
            raise CallerError("at least one rollout service is needed", field=field)
        for url in urls:
            if not (URL(url).scheme in ("http", "https") and URL(url).host):
                raise CallerError(f"{url!r} is no address; it begins with http:// or https://", field=field)
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise CallerError(f"{twice[0]} is there twice", field=field)
        self._present = [NodeJoined(client.url, client) for client in clients]

    @property
    def present(self) -> Sequence[NodeJoined]:
        """All of them."""
        return self._present

    async def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        """None."""
        for change in list[NodeJoined | NodeLeft]():
            yield change


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node works on at once.

    Attributes:
        run: slots of RUN.
        window: those of INIT, READY and RUN; 0 takes nothing on, as a node that drains.
    """

    run: int
    window: int


@dataclass(slots=True)
class _Node:
    """A node, whose number is the order in which nodes came.

    Attributes:
        capacity: ``None`` as long as nobody knows.
        usable: it answers, and takes what is new.
        held: rollouts that count against its window.
        load: all of ours that have no outcome.
    """

    number: int
    capacity: Capacity | None = None
    usable: bool = True
    held: int = 0
    load: int = 0
    images: dict[str, None] = field(default_factory=dict)

    @property
    def filled(self) -> float:
        """Of its window; at 1 it has no room."""
        if self.capacity is None:
            return float(self.held)  # one to begin with
        return self.held / self.capacity.window if self.capacity.window else 1.0

    @property
    def slot_free(self) -> bool:
        """Of RUN, as far as ours go."""
        return self.usable and self.capacity is not None and self.held < self.capacity.run and self.filled < 1


@dataclass(slots=True)
class _Placed:
    """A rollout at a node."""

    node: str
    group: str | None
    holds: bool = True


IMAGES = 1000
"""So many images are remembered of a node, the last ones that it was given."""


class Placement:
    """The nodes, and what is where. A decision costs O(log n) in the number of nodes, amortised."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._placed: dict[str, _Placed] = {}
        self._homes: dict[str, str] = {}
        """NodeSource of groups, as long as a rollout of theirs is anywhere."""
        self._members: Counter[str] = Counter()
        self._owners: dict[str, dict[str, None]] = {}
        """NodeSource by image."""
        self._order: list[tuple[float, int, str]] = []
        """A heap of nodes by how far they are filled; entries that are no longer true are skipped."""
        self._joined = 0

    @property
    def nodes(self) -> list[str]:
        """All of them, in the order in which they came."""
        return [*self._nodes]

    def join(self, node: str) -> None:
        """A node is there. Until its capacity is known it is given one rollout."""
        self._joined += 1
        self._nodes[node] = _Node(self._joined)
        self._rank(node)

    def leave(self, node: str) -> None:
        """A node is gone. What was there is still counted as such, until it is told to be gone, too."""
        for image in [*self._nodes[node].images]:
            self._disown(image, node)
        del self._nodes[node]
        for group in [group for group, home in self._homes.items() if home == node]:
            del self._homes[group]

    def resize(self, node: str, capacity: Capacity) -> None:
        """A node says what it works on at once."""
        if node in self._nodes and self._nodes[node].capacity != capacity:
            self._nodes[node].capacity = capacity
            self._rank(node)

    def use(self, node: str, usable: bool) -> None:
        """A node answers and takes what is new, or it does not."""
        if node in self._nodes and self._nodes[node].usable != usable:
            self._nodes[node].usable = usable
            self._rank(node)

    def choose(self, group: str | None = None, image: str | None = None, *, together: bool = False) -> str | None:
        """Where a rollout goes now; ``None`` if it has to wait.

        Args:
            group: whose member it is.
            image: what its sandbox is made of.
            together: the group is scored together.
        """
        home = self._nodes.get(self._homes.get(group, "")) if group is not None else None
        if home is not None and home.usable and group is not None and (together or home.slot_free):
            return self._homes[group]
        if len(self._nodes) == 1:
            return next((name for name, node in self._nodes.items() if node.usable and not _closed(node)), None)
        if image is not None:
            there = [name for name in self._owners.get(image, ()) if self._nodes[name].slot_free]
            if there:
                return min(there, key=lambda name: (self._nodes[name].filled, self._nodes[name].number))
        return self._least_filled()

    def anyone(self) -> str | None:
        """The usable node with the least load for its size, windows or not; for what is left there."""
        able = [(name, node) for name, node in self._nodes.items() if node.usable and not _closed(node)]
        if not able:
            return None
        return min(able, key=lambda it: (it[1].load / (it[1].capacity.run if it[1].capacity else 1), it[1].number))[0]

    def put(self, rollout: str, node: str, group: str | None = None, image: str | None = None) -> None:
        """A rollout is at a node."""
        self._placed[rollout] = _Placed(node, group)
        if group is not None:
            self._members[group] += 1
            self._homes[group] = node
        it = self._nodes[node]
        it.held += 1
        it.load += 1
        self._rank(node)
        if image is not None:
            it.images.pop(image, None)
            it.images[image] = None
            self._owners.setdefault(image, {})[node] = None
            if len(it.images) > IMAGES:
                self._disown(next(iter(it.images)), node)

    def holds(self, rollout: str, holds: bool) -> None:
        """Whether a rollout counts against the window of its node; one that is being scored does not."""
        placed = self._placed.get(rollout)
        if placed is None or placed.holds is holds:
            return
        placed.holds = holds
        if (it := self._nodes.get(placed.node)) is not None:
            it.held += 1 if holds else -1
            self._rank(placed.node)

    def gone(self, rollout: str) -> None:
        """A rollout is nowhere any more; no-op for one that is nowhere."""
        placed = self._placed.pop(rollout, None)
        if placed is None:
            return
        if (it := self._nodes.get(placed.node)) is not None:
            it.held -= placed.holds
            it.load -= 1
            self._rank(placed.node)
        if placed.group is not None:
            self._members[placed.group] -= 1
            if not self._members[placed.group]:
                del self._members[placed.group]
                self._homes.pop(placed.group, None)

    def node_of(self, rollout: str) -> str | None:
        """Where it is."""
        placed = self._placed.get(rollout)
        return placed.node if placed else None

    def at(self, node: str) -> Iterable[str]:
        """What is at a node."""
        return [rollout for rollout, placed in self._placed.items() if placed.node == node]

    def _least_filled(self) -> str | None:
        while self._order:
            filled, number, name = self._order[0]
            node = self._nodes.get(name)
            if node is not None and node.number == number and node.usable and node.filled == filled:
                return name if filled < 1 else None
            heapq.heappop(self._order)
        return None

    def _rank(self, name: str) -> None:
        node = self._nodes[name]
        if node.usable:
            heapq.heappush(self._order, (node.filled, node.number, name))
        if len(self._order) > 4 * len(self._nodes) + 64:
            self._order = [(it.filled, it.number, each) for each, it in self._nodes.items() if it.usable]
            heapq.heapify(self._order)

    def _disown(self, image: str, node: str) -> None:
        del self._nodes[node].images[image]
        self._owners[image].pop(node, None)
        if not self._owners[image]:
            del self._owners[image]


def _closed(node: _Node) -> bool:
    return node.capacity is not None and not node.capacity.window
