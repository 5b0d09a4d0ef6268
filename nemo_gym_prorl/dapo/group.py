# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rollouts of one prompt on their way to a batch, and the fate of each rollout. Pure.

A group has as many members as the batch wants rollouts of a prompt. A member is tried until it is scored; each try is
a rollout with an id of its own, under the weights of its time.

Each submitted rollout has one fate, and the sums tell what was wasted. How that changes the lengths that are trained
on is measured by :mod:`nemo_gym_prorl.dapo.bias`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from nemo_gym_prorl.dapo.prefixes import NOTHING_KEPT, Helper, Kept, Search


class Fate(StrEnum):
    """The end of a rollout, as the trainer sees it."""

    EMITTED = "emitted"
    NO_VARIANCE = "no_variance"
    """Scored, but all of its group have the same reward: nothing to learn."""
    STALE = "stale"
    """Scored, but under weights too old for the batch to come."""
    GROUP_FAILED = "group_failed"
    """Scored, but one of its group never was."""
    LEFT_OVER = "left_over"
    """Scored, when training ended."""
    CANCELLED = "cancelled"
    """Ended by us, since nothing of it could be used."""
    FAILED = "failed"
    """Never scored: a machine's or the row's doing."""
    REFERENCE = "reference"
    """Of no use any more, and run to its end all the same, to measure bias."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a rollout cost.

    Attributes:
        seconds: that stages worked on it.
        length: of what the policy wrote, in tokens.
    """

    seconds: float = 0.0
    length: float = 0.0


@dataclass(slots=True)
class Tally:
    """Rollouts of one fate, and sums of what they cost."""

    rollouts: int = 0
    seconds: float = 0.0
    length: float = 0.0

    def add(self, usage: Usage) -> None:
        """One more."""
        self.rollouts += 1
        self.seconds += usage.seconds
        self.length += usage.length


class Fates:
    """Tallies by fate.

    Args:
        saved: what :meth:`state` gave.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._tallies = {fate: Tally(**(saved or {}).get(fate.value, {})) for fate in Fate}

    def __getitem__(self, fate: Fate) -> Tally:
        return self._tallies[fate]

    def add(self, fate: Fate, usage: Usage) -> None:
        """A rollout met its fate."""
        self._tallies[fate].add(usage)

    @property
    def rollouts(self) -> int:
        """All that have met theirs."""
        return sum(tally.rollouts for tally in self._tallies.values())

    @property
    def wasted(self) -> float:
        """Share of all time that went into rollouts that were not emitted, 0 to 1."""
        spent = sum(tally.seconds for tally in self._tallies.values())
        return 1 - self._tallies[Fate.EMITTED].seconds / spent if spent else 0.0

    def state(self) -> dict[str, Any]:
        """The tallies as JSON, by fate."""
        return {fate.value: asdict(tally) for fate, tally in self._tallies.items()}


@dataclass(slots=True)
class Member:
    """One rollout of a group, over all its tries.

    Attributes:
        place: among the members.
        tries: ids that were given out for it.
        rollout: the id that runs or was scored; ``None`` while the member waits to be submitted.
        version: weights under which that one was submitted.
        reward: raw, as its environment gave it; ``None`` until then.
        accuracy: what the filter looks at.
        masked: whether it gets no loss.
        usage: of the scored rollout.
        kept: where that one can be gone on from.
        failures: tries that ended without a reward.
    """

    place: int
    tries: int = 0
    rollout: str | None = None
    version: int = 0
    reward: float | None = None
    accuracy: float = 0.0
    masked: bool = False
    usage: Usage = field(default_factory=Usage)
    kept: Kept = NOTHING_KEPT
    failures: int = 0

    @property
    def waits(self) -> bool:
        """Whether it is to be submitted."""
        return self.rollout is None

    @property
    def runs(self) -> bool:
        """Whether it was submitted and has no outcome."""
        return self.rollout is not None and self.reward is None

    def begin(self, rollout: str, version: int) -> None:
        """Another try."""
        self.tries += 1
        self.rollout = rollout
        self.version = version

    def reset(self) -> None:
        """The try is void; the member waits again."""
        self.rollout = None
        self.reward = None
        self.accuracy = 0.0
        self.masked = False
        self.usage = Usage()
        self.kept = NOTHING_KEPT


@dataclass(slots=True)
class Group:
    """The members of one prompt.

    Attributes:
        number: its place in the order of groups; those with lower ones are older.
        prompt: its prompt's place in the stream.
        key: its prompt's name.
        members: as many as the batch wants of a prompt.
        search: where they begin, if not at the prompt.
    """

    number: int
    prompt: int
    key: str
    members: list[Member]
    search: Search | None = None

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The group that :meth:`state` told of."""
        members = [
            Member(**(member | {"usage": Usage(**member["usage"]), "kept": Kept(**member["kept"])}))
            for member in saved["members"]
        ]
        search = Search.of_saved(saved["search"]) if saved["search"] else None
        return cls(saved["number"], saved["prompt"], saved["key"], members, search)

    @property
    def complete(self) -> bool:
        """Whether every member has its reward."""
        return all(member.reward is not None for member in self.members)

    @property
    def scored(self) -> list[Member]:
        """Members that have their reward."""
        return [member for member in self.members if member.reward is not None]

    @property
    def varies(self) -> bool:
        """Whether two accuracies differ, as they are: a standard deviation of equal floats need not be 0."""
        return len({member.accuracy for member in self.scored}) > 1

    @property
    def teaches(self) -> bool:
        """Return whether the accuracies of two members with a loss differ: others do not enter the baseline."""
        return len({member.accuracy for member in self.scored if not member.masked}) > 1

    @property
    def version(self) -> int:
        """The oldest weights that any of its rollouts began under; there must be one."""
        return min(member.version for member in self.members if not member.waits)

    @property
    def helpers(self) -> list[Helper]:
        """Its rollouts that are worth a loss, as others may begin from them."""
        scored = [member for member in self.scored if not member.masked]
        return [Helper(str(member.rollout), member.accuracy, member.kept) for member in scored]

    def older_than(self, version: int) -> Iterator[Member]:
        """Members whose rollout began under older weights."""
        return (member for member in self.members if not member.waits and member.version < version)

    def state(self) -> dict[str, Any]:
        """It as JSON."""
        return asdict(self)
