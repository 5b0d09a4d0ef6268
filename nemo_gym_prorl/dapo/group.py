# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of rollouts, prefixes from which rollouts may begin, and counts of rollout outcomes. Pure.

Invariants:

- A group has one member for each rollout that a batch needs of its prompt.
- A member is tried until it has a reward. Each try is a rollout with its own id and weight version.
- Each submitted rollout is counted under exactly one :class:`RolloutOutcome`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class RolloutOutcome(StrEnum):
    """Final use of a submitted rollout."""

    EMITTED = "emitted"
    """Scored and handed to the trainer."""
    NO_VARIANCE = "no_variance"
    """Scored, in a group whose members all have the same accuracy."""
    STALE = "stale"
    """Scored under weights that are too old for the next batch."""
    GROUP_FAILED = "group_failed"
    """Scored, in a group of which another member could not be run."""
    LEFT_OVER = "left_over"
    """Scored, and in no batch when training ended or a saved state was restored."""
    CANCELLED = "cancelled"
    """Cancelled by the sampler, because no batch could use its result."""
    FAILED = "failed"
    """Never scored, because of infrastructure or of its row; or scored, with a result that was lost."""
    REFERENCE = "reference"
    """Run to its end to measure bias, although no batch could use its result."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Cost of a rollout.

    Attributes:
        seconds: seconds that the stages worked on the rollout.
        length: number of tokens that the policy sampled.
    """

    seconds: float = 0.0
    length: float = 0.0


@dataclass(slots=True)
class UsageTotal:
    """Number of rollouts with one outcome, and the sum of their costs."""

    rollouts: int = 0
    seconds: float = 0.0
    length: float = 0.0

    def add(self, usage: Usage) -> None:
        self.rollouts += 1
        self.seconds += usage.seconds
        self.length += usage.length


class OutcomeTotals:
    """Totals of rollouts and of their costs for each outcome, restored from ``saved`` (:meth:`state`) if given."""

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._totals = {outcome: UsageTotal(**(saved or {}).get(outcome.value, {})) for outcome in RolloutOutcome}

    def __getitem__(self, outcome: RolloutOutcome) -> UsageTotal:
        return self._totals[outcome]

    def add(self, outcome: RolloutOutcome, usage: Usage) -> None:
        self._totals[outcome].add(usage)

    @property
    def rollouts(self) -> int:
        return sum(total.rollouts for total in self._totals.values())

    @property
    def wasted(self) -> float:
        """Share of all working time spent on rollouts that were not emitted, 0 to 1."""
        spent = sum(total.seconds for total in self._totals.values())
        return 1 - self._totals[RolloutOutcome.EMITTED].seconds / spent if spent else 0.0

    def state(self) -> dict[str, Any]:
        return {outcome.value: asdict(total) for outcome, total in self._totals.items()}


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Checkpoints of an ended rollout, from which other rollouts can be forked.

    Attributes:
        node: URL of the service that keeps the checkpoints; ``None`` without checkpoints.
        turns: numbers of turns after which there is a checkpoint, in ascending order.
    """

    node: str | None
    turns: Sequence[int]


NO_CHECKPOINTS = CheckpointRef(None, ())


@dataclass(frozen=True, slots=True)
class Prefix:
    """First turns of an ended rollout, from which another rollout begins.

    Attributes:
        rollout: id of the ended rollout.
        turn: number of first turns that are inherited.
        node: URL of the service that keeps the checkpoint.
    """

    rollout: str
    turn: int
    node: str | None


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """An ended rollout from whose turns other rollouts of its prompt may begin."""

    rollout: str
    accuracy: float
    checkpoints: CheckpointRef


@dataclass(slots=True)
class PrefixSearch:
    """Bisection for a turn of a source rollout from which a group varies.

    Attributes:
        source: rollout that provides the prefix.
        accuracy: accuracy of all members of the group that began at the prompt.
        early: index of the last checkpoint from which a group ended with ``accuracy``; -1 for the prompt.
        late: index of the first checkpoint from which a group ended with another accuracy; at first the number of
            checkpoints.
        tries: number of groups that began at a prefix, the next group included.
    """

    source: PrefixSource
    accuracy: float
    early: int
    late: int
    tries: int = 1

    @property
    def prefix(self) -> Prefix:
        """Prefix from which the next group begins."""
        checkpoints = self.source.checkpoints
        return Prefix(self.source.rollout, checkpoints.turns[self._middle], checkpoints.node)

    @property
    def exhausted(self) -> bool:
        return self._middle == self.early

    @property
    def _middle(self) -> int:
        return (self.early + self.late) // 2

    def narrow(self, accuracy: float) -> None:
        """Narrow the search after a zero-variance group that began at :attr:`prefix`: go on at later checkpoints if
        the members' ``accuracy`` equals that of the search, else at earlier checkpoints."""
        if accuracy == self.accuracy:
            self.early = self._middle
        else:
            self.late = self._middle
        self.tries += 1


@dataclass(slots=True)
class Member:
    """One rollout of a group, over all its tries.

    Attributes:
        index: index among the members.
        tries: number of rollouts that were begun for the member.
        rollout: id of the running or scored rollout; ``None`` while the member waits for submission.
        version: weight version under which that rollout was submitted.
        reward: raw reward of the environment; ``None`` until the rollout is scored.
        accuracy: value that the variance filter compares.
        masked: whether the rollout gets no loss.
        usage: cost of the scored rollout.
        checkpoints: checkpoints of the scored rollout.
        failures: number of tries that ended without a reward.
    """

    index: int
    tries: int = 0
    rollout: str | None = None
    version: int = 0
    reward: float | None = None
    accuracy: float = 0.0
    masked: bool = False
    usage: Usage = field(default_factory=Usage)
    checkpoints: CheckpointRef = NO_CHECKPOINTS
    failures: int = 0

    @property
    def waits(self) -> bool:
        return self.rollout is None

    @property
    def runs(self) -> bool:
        """Return whether the member was submitted and has no outcome yet."""
        return self.rollout is not None and self.reward is None

    def begin(self, rollout: str, version: int) -> None:
        self.tries += 1
        self.rollout = rollout
        self.version = version

    def reset(self) -> None:
        """Discard the current try, so that the member waits for submission again."""
        self.rollout = None
        self.reward = None
        self.accuracy = 0.0
        self.masked = False
        self.usage = Usage()
        self.checkpoints = NO_CHECKPOINTS


@dataclass(slots=True)
class Group:
    """Group of rollouts of one prompt.

    Attributes:
        number: position in the order of groups; older groups have lower numbers.
        prompt: number of the prompt.
        key: name of the prompt.
        members: one for each rollout that a batch needs of the prompt.
        search: search for the prefix from which the members begin; ``None`` if they begin at the prompt.
    """

    number: int
    prompt: int
    key: str
    members: list[Member]
    search: PrefixSearch | None = None

    @property
    def complete(self) -> bool:
        return all(member.reward is not None for member in self.members)

    @property
    def scored(self) -> list[Member]:
        """Members that have their reward."""
        return [member for member in self.members if member.reward is not None]

    @property
    def varies(self) -> bool:
        """Return whether accuracies of scored members differ. The standard deviation of equal floats may exceed 0."""
        return len({member.accuracy for member in self.scored}) > 1

    @property
    def is_trainable(self) -> bool:
        """Return whether two members with a loss differ in accuracy; masked members do not enter the baseline."""
        return len({member.accuracy for member in self.scored if not member.masked}) > 1

    @property
    def version(self) -> int:
        """Oldest weight version of the group's rollouts; the group must have a rollout."""
        return min(member.version for member in self.members if not member.waits)

    @property
    def prefix_sources(self) -> list[PrefixSource]:
        """Scored rollouts with a loss, from which other rollouts may begin."""
        scored = [member for member in self.scored if not member.masked]
        return [PrefixSource(str(member.rollout), member.accuracy, member.checkpoints) for member in scored]

    def older_than(self, version: int) -> Iterator[Member]:
        """Return members whose rollout began under weights before this version."""
        return (member for member in self.members if not member.waits and member.version < version)


class PrefixSampling:
    """Prefix sampling (arXiv 2605.05112): follow a zero-variance group with a group that begins inside a rollout.

    If all members failed, the new group begins inside a rollout of the same prompt that succeeded, whose first turns
    are a head start. If all members succeeded, the new group begins inside a rollout that failed, whose first turns
    are a handicap. The source rollout is of an earlier epoch, since all members of the group itself ended alike.
    Without a source that has checkpoints, no group follows.

    A group that begins at the prompt ends with one accuracy, a group that begins at the source's end with the other.
    Bisection over the source's checkpoints finds a turn from which both occur. The search ends after a bounded number
    of groups, or when no untried turn is left.

    All members of a group begin at the same prefix and are compared with each other. Inherited turns get no loss,
    since the baseline covers only differences after the prefix, and the source was trained on in its own group.

    **Bias.** Prefix groups train on prompts that the filter rejects, and on states that the policy rarely reaches. The
    result is not the gradient of dynamic sampling, and no weighting makes it so, because inherited turns get no loss.
    :mod:`~nemo_gym_prorl.dapo.bias` includes prefix groups in its measurement.

    Args:
        tries: prefix groups that may follow one zero-variance group; 0 for none.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._sources: dict[str, list[PrefixSource]] = {}
        """Worst and best rollout of each prompt; among equals the newest."""
        self.counts: Counter[str] = Counter()
        """Number of prefix groups that were ``begun``, had variance (``helped``), or were ``refused`` by the service,
        and of searches that were ``given_up``."""
        self.backlog: deque[tuple[int, str, PrefixSearch]] = deque()
        """Prompt number, prompt name and search of prefix groups that are still to be opened."""

    def plan(self, group: Group, usable: Sequence[Group]) -> None:
        """Add the prefix group that follows a complete group, if any, to the backlog."""
        planned = [it.prompt for it in usable if it.search is not None and it is not group]
        planned += [prompt for prompt, *_ in self.backlog]
        if group.search is None and group.prompt in planned:
            return  # the group was complete before, and started again as stale
        if (search := self.next_search(group)) is not None:
            self.backlog.append((group.prompt, group.key, search))

    def next_search(self, group: Group) -> PrefixSearch | None:
        """Return the search of the prefix group that follows a complete group; ``None`` if no such group follows."""
        accuracy = group.members[0].accuracy
        if group.search is not None:
            if group.is_trainable:
                self.counts["helped"] += 1
            return group.search if not group.varies and self._continues(group.search, accuracy) else None
        search = self._search(group.key, accuracy) if self._tries and not group.varies else None
        self._add_sources(group.key, group.prefix_sources)
        return search

    def refused(self, key: str, search: PrefixSearch) -> None:
        """Forget a search's source, because the service could not fork its checkpoint."""
        self.counts["refused"] += 1
        sources = [source for source in self._sources.pop(key, ()) if source.rollout != search.source.rollout]
        self._add_sources(key, sources)

    def _add_sources(self, key: str, sources: Sequence[PrefixSource]) -> None:
        for source in sources if self._tries else ():
            if source.checkpoints.turns:
                worst, best = self._sources.get(key, [source, source])
                worst = source if source.accuracy <= worst.accuracy else worst
                best = source if source.accuracy >= best.accuracy else best
                self._sources[key] = [worst, best]

    def _search(self, key: str, accuracy: float) -> PrefixSearch | None:
        others = [source for source in self._sources.get(key, ()) if source.accuracy != accuracy]
        if not others:
            return None
        source = max(others, key=lambda other: abs(other.accuracy - accuracy))
        self.counts["begun"] += 1
        return PrefixSearch(source, accuracy, -1, len(source.checkpoints.turns))

    def _continues(self, search: PrefixSearch, accuracy: float) -> bool:
        search.narrow(accuracy)
        if search.tries > self._tries or search.exhausted:
            self.counts["given_up"] += 1
            return False
        self.counts["begun"] += 1
        return True
