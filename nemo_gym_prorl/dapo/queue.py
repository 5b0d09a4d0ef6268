# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The groups on their way to a batch, how many there may be, and the rollouts in flight. Pure.

**Admission.** A group that begins under weights ``v`` is of use to batches up to that for ``v + max_staleness``. So
there is room for the groups of so many batches, of which some are complete already, some will be, and some will turn
out to have no variance. Those are estimated by the share of the groups before them: else every group would have to be
taken for one with variance, and the service would stand empty where few are. Too many is dearer than too few: a group
that becomes too old before its turn comes begins again, right where the next batch waits for it. So the count is
chosen that is hardly ever exceeded. With ``max_staleness`` 0 everything behind a batch begins again anyway, and it is
the count that hardly ever falls short. The room is that of AReaL's and SkyRL's staleness control, which count every
group that runs as one to be trained on.

**In flight.** Some rollouts without an outcome are waited for; the others are of no use any more. Most of these are
cancelled, and some run to their end all the same, as references of bias.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym_prorl.dapo.bias import BiasMeter
from nemo_gym_prorl.dapo.contract import Decision, SamplerConfig, Submission
from nemo_gym_prorl.dapo.group import Fate, Fates, Group, Member, Usage


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


_MEMORY = 256
"""Groups over which the share is averaged."""
_LEAST = 1 / 8
"""Share below which nothing more is begun for being rare: most of it would be thrown away if that changes."""
_CAUTION = 2.0
"""Standard deviations between the expected count and the one that is reckoned with."""


class Admission:
    """The room, and the share of groups with variance.

    Args:
        config: what the trainer wants.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self.groups = 0
        self.share = 0.5

    def settled(self, *, taught: bool) -> None:
        """A group is complete, and its turn has come."""
        self.groups += 1
        self.share += (taught - self.share) / min(self.groups + 2, _MEMORY)

    def admits(self, ready: int, running: int, behind: int) -> bool:
        """Whether another group would be of use.

        Args:
            ready: groups with variance that no batch has taken.
            running: groups that are not complete.
            behind: versions that the weights of now are behind the batch that is being filled.
        """
        room = self._config.groups_per_batch * (self._config.max_staleness + 1 - behind)
        share = max(self.share, _LEAST)
        caution = _CAUTION if self._config.max_staleness else -_CAUTION
        return ready + share * running + caution * math.sqrt(running * share * (1 - share)) < room


class Flight:
    """See the module.

    Args:
        run: begins all ids.
        bias: told of each first outcome.
        fates: told of those that are of no use.
    """

    def __init__(self, run: str, bias: BiasMeter, fates: Fates) -> None:
        self._run, self._bias, self._fates = run, bias, fates
        self.running: dict[str, tuple[Group, Member]] = {}
        self._ending: set[str] = set()
        """Cancelled."""
        self._references: dict[str, tuple[int, int]] = {}
        """Versions and prompts."""

    def __len__(self) -> int:
        return len(self.running) + len(self._ending) + len(self._references)

    @property
    def abandoned(self) -> bool:
        """Whether anything runs that is of no use."""
        return bool(self._ending or self._references)

    def begin(self, group: Group, member: Member, rollout: str, version: int) -> Submission:
        """Another try of a member."""
        member.begin(rollout, version)
        self.running[rollout] = (group, member)
        return self._submission(rollout, group, version)

    def heard(self, rollout: str, length: float, accuracy: float) -> None:
        """An outcome came: for the meter, if it is the first of a member."""
        if rollout not in self._references and rollout not in self.running:
            return
        place = place_of(rollout)
        others = self._references.keys() - {rollout}
        if rollout in self._references or place not in map(place_of, others):  # else it is a later try
            self._bias.ended(*place, length, accuracy)

    def landed(self, rollout: str, usage: Usage) -> tuple[Group, Member] | None:
        """It ended. Whose it was, if it was waited for; it may be a reward that comes too late."""
        if self._references.pop(rollout, None) is not None:
            self._bias.gave_up(place_of(rollout)[0], unless_heard=place_of(rollout)[1])
            self._fates.add(Fate.REFERENCE, usage)
        elif rollout in self._ending:
            self._ending.discard(rollout)
            self._fates.add(Fate.CANCELLED, usage)
        return self.running.pop(rollout, None)

    def abandon(self, group: Group, member: Member) -> list[str]:
        """A member's rollout is of no use any more: it is to be cancelled, unless it is a reference."""
        rollout = str(member.rollout)
        del self.running[rollout]
        if self._bias.cut(group.number, member.place):
            self._references[rollout] = (member.version, group.prompt)
            return []
        self._ending.add(rollout)
        return [rollout]

    def end_references(self) -> list[str]:
        """They are to be cancelled, too."""
        rollouts = [*self._references]
        self._ending.update(rollouts)
        self._references.clear()
        return rollouts

    def state(self) -> dict[str, Any]:
        """What groups do not say of themselves, as JSON."""
        return {"ending": sorted(self._ending), "references": self._references}

    def restore(self, state: Mapping[str, Any], groups: list[Group]) -> Decision:
        """Goes on from there: what is to be submitted again under its id, and cancelled again."""
        self._ending = set(state["ending"])
        self._references = {rollout: (version, prompt) for rollout, (version, prompt) in state["references"].items()}
        decision = Decision(cancel=sorted(self._ending))
        for group in groups:
            for member in group.members:
                if member.runs:
                    self.running[str(member.rollout)] = (group, member)
        for rollout, (group, member) in self.running.items():
            decision.submit.append(self._submission(rollout, group, member.version))
        for rollout, (version, prompt) in self._references.items():
            group_id = self._group_id(place_of(rollout)[0])
            decision.submit.append(Submission(rollout, group_id, prompt, version, urgent=False))
        return decision

    def _submission(self, rollout: str, group: Group, version: int) -> Submission:
        prefix = group.search.prefix if group.search else None
        group_id = self._group_id(group.number)
        return Submission(rollout, group_id, group.prompt, version, bool(group.scored), prefix)

    def _group_id(self, number: int) -> str:
        return f"{self._run}:{number}"


def place_of(rollout: str) -> tuple[int, int]:
    """Numbers of the group and of the member: ids are ``run:group:member:try``."""
    _, number, place, _ = rollout.rsplit(":", 3)
    return int(number), int(place)
