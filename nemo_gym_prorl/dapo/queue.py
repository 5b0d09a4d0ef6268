# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The groups on their way to a batch, by the number of their prompt: which are open, complete, found to be fruitless.

Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym_prorl.dapo.group import Group, Member


class Queue:
    """A group is in one of three places, and a member that is to be submitted waits besides.

    Attributes:
        open: groups that are not complete.
        ready: complete, with variance, in the order in which that came.
        fruitless: complete without variance, of which it is not settled that a batch passes over them.
    """

    def __init__(self) -> None:
        self.open: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.fruitless: dict[int, Group] = {}
        self._waiting: list[tuple[int, int]] = []
        """A heap of group and place of the members that wait."""

    def put(self, group: Group) -> None:
        """It is open, for the first time or again; those of its members wait that have no rollout."""
        self.drop(group.number)
        self.open[group.number] = group
        for member in group.members:
            if member.waits:
                heapq.heappush(self._waiting, (group.number, member.place))

    def drop(self, number: int) -> None:
        """It is nowhere any more."""
        for groups in (self.open, self.ready, self.fruitless):
            groups.pop(number, None)

    def next_waiting(self) -> tuple[Group, Member] | None:
        """The first member that waits, of the oldest group."""
        while self._waiting:
            number, place = heapq.heappop(self._waiting)
            group = self.open.get(number)
            if group is not None and group.members[place].waits:
                return group, group.members[place]
        return None

    @property
    def kept(self) -> list[Group]:
        """Groups whose results are of use."""
        return [*self.open.values(), *self.ready.values()]

    @property
    def scored(self) -> list[Member]:
        """Members whose results are."""
        return [member for group in self.kept for member in group.scored]

    def first_open(self, otherwise: float = math.inf) -> float:
        """The oldest group that is not complete."""
        return min(self.open, default=otherwise)

    def older_than(self, version: int) -> Iterator[Group]:
        """Groups with a member that began under older weights."""
        groups = [*self.ready.values(), *self.open.values(), *self.fruitless.values()]
        return (group for group in groups if any(group.older_than(version)))

    def state(self) -> dict[str, Any]:
        """It as JSON."""
        return {
            name: [group.state() for group in groups.values()]
            for name, groups in (("open", self.open), ("ready", self.ready), ("fruitless", self.fruitless))
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        for groups, saved in ((self.ready, state["ready"]), (self.fruitless, state["fruitless"])):
            for group in map(Group.of_saved, saved):
                groups[group.number] = group
        for group in map(Group.of_saved, state["open"]):
            self.put(group)
