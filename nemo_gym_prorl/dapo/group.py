# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rollouts of one prompt, on their way to a batch.

A group has as many members as the batch wants rollouts of a prompt. A member is tried until it is scored; each try is
a rollout with an id of its own, under the weights of its time.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from nemo_gym_prorl.dapo.fates import Usage
from nemo_gym_prorl.dapo.prefixes import NOTHING_KEPT, Helper, Kept, Search


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
