# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prefix sampling (arXiv 2605.05112): after a group without variance comes one that begins part of the way along a
rollout that ended otherwise.

Where all failed, that is a rollout of the same prompt that succeeded: its first turns are a head start. Where all
succeeded it is one that failed, and they are a handicap. So who can help is never of the group itself, which has
nothing but equals: it is of an earlier epoch. A group's own prefix is no help: from there the outcome is surer than
from the start, for all that is known, so where no other is known, or its checkpoints are erased, nothing comes of the
group, as it would be.

From the start the prompt ends in one way, from the end of the helping rollout in the other. Somewhere between both
come about, and bisection finds it: a group that is still as the first one was began too early, one that is all as the
helping rollout is began too late. It is given up after so many tries, or where there is no turn left between.

All members begin there, and are compared among each other: what sets them apart came after, and a baseline of first
tries would credit them with what the prefix did. The prefix was chosen by nobody but the rollout it is of, which was
trained on in its own group, if that had variance; so it gets no loss here.

**Bias.** This trains on other prompts than the filter lets pass, and on states that the policy reaches seldom: it is
not the gradient of dynamic sampling, and no weight makes it so, since the turns of the prefix get nothing.
:mod:`~nemo_gym_prorl.dapo.bias` counts such groups in.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self


if TYPE_CHECKING:
    from nemo_gym_prorl.dapo.group import Group


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a rollout that ended can be gone on from.

    Attributes:
        node: who keeps it.
        turns: after which, in ascending order.
    """

    node: str | None
    turns: Sequence[int]


NOTHING_KEPT = Kept(None, ())


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where a rollout begins.

    Attributes:
        rollout: whose turns it takes over.
        turn: how many.
        node: who keeps them.
    """

    rollout: str
    turn: int
    node: str | None


@dataclass(frozen=True, slots=True)
class Helper:
    """A rollout of a prompt, from whose turns others may begin."""

    rollout: str
    accuracy: float
    kept: Kept


@dataclass(slots=True)
class Search:
    """For the turn from which both outcomes come about.

    Attributes:
        helper: whose turns.
        accuracy: of all the first tries.
        early: place of the last turn that is known to be too early.
        late: of the first one that is known to be too late.
        tries: groups that were begun.
    """

    helper: Helper
    accuracy: float
    early: int
    late: int
    tries: int = 1

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The search that was written as JSON."""
        helper = saved["helper"]
        return cls(**{**saved, "helper": Helper(**{**helper, "kept": Kept(**helper["kept"])})})

    @property
    def prefix(self) -> Prefix:
        """Where the members begin now."""
        kept = self.helper.kept
        return Prefix(self.helper.rollout, kept.turns[self._place], kept.node)

    @property
    def over(self) -> bool:
        """Whether there is no turn left to try."""
        return self._place == self.early

    @property
    def _place(self) -> int:
        return (self.early + self.late) // 2

    def ended(self, accuracy: float) -> None:
        """All members ended alike again."""
        if accuracy == self.accuracy:
            self.early = self._place
        else:
            self.late = self._place
        self.tries += 1


class Prefixes:
    """Who could help, of all prompts, and what came of it.

    Args:
        tries: groups that may come after one; 0 for none.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._helpers: dict[str, list[Helper]] = {}
        """The worst and the best of each prompt, of equals the newest."""
        self.counts: Counter[str] = Counter()
        """Groups: ``begun`` from a prefix, ``helped`` to variance by it, ``given_up``, ``refused`` by the service."""

    def after(self, group: Group) -> Search | None:
        """A group is complete: where one is to begin that comes after it, for its want of variance."""
        accuracy = group.members[0].accuracy
        if group.search is not None:
            if group.teaches:
                self.counts["helped"] += 1
            return group.search if not group.varies and self._goes_on(group.search, accuracy) else None
        search = self._search(group.key, accuracy) if self._tries and not group.varies else None
        self._saw(group.key, group.helpers)
        return search

    def refused(self, key: str, search: Search) -> None:
        """Nothing is kept of it any more."""
        self.counts["refused"] += 1
        helpers = [helper for helper in self._helpers.pop(key, ()) if helper.rollout != search.helper.rollout]
        self._saw(key, helpers)

    def _saw(self, key: str, ended: Sequence[Helper]) -> None:
        for helper in ended if self._tries else ():
            if helper.kept.turns:
                worst, best = self._helpers.get(key, [helper, helper])
                worst = helper if helper.accuracy <= worst.accuracy else worst
                best = helper if helper.accuracy >= best.accuracy else best
                self._helpers[key] = [worst, best]

    def _search(self, key: str, accuracy: float) -> Search | None:
        others = [helper for helper in self._helpers.get(key, ()) if helper.accuracy != accuracy]
        if not others:
            return None
        helper = max(others, key=lambda other: abs(other.accuracy - accuracy))
        self.counts["begun"] += 1
        return Search(helper, accuracy, -1, len(helper.kept.turns))

    def _goes_on(self, search: Search, accuracy: float) -> bool:
        search.ended(accuracy)
        if search.tries > self._tries or search.over:
            self.counts["given_up"] += 1
            return False
        self.counts["begun"] += 1
        return True
