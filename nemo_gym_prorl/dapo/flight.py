# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rollouts that were submitted and have no outcome.

Some are waited for; the others are of no use any more. Most of these are cancelled, and some run to their end all the
same, as references of bias.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.dapo.bias import BiasMeter
from nemo_gym_prorl.dapo.contract import Decision, Submission
from nemo_gym_prorl.dapo.fates import Fate, Fates, Usage
from nemo_gym_prorl.dapo.group import Group, Member


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
