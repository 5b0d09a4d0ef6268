# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Groups that are not in a batch yet, admission of new groups, and rollouts in flight. Pure.

**Admission.** A group that begins under weights ``v`` is usable by batches up to the batch for ``v + max_staleness``.
The number of batches bounds the groups with variance that may be ready or open, as in the staleness control of AReaL
and SkyRL. The number of open groups that will have variance is estimated from the share of earlier groups with
variance. A bound on all open groups would leave services idle when variance is rare.

An excess of groups costs more than a lack: a group that becomes too old before its batch starts again, and the next
batch waits for it. Therefore the estimate is an upper bound of two standard deviations. With ``max_staleness`` 0 all
groups after a batch start again anyway, and the estimate is a lower bound.

**In flight.** A rollout in flight becomes unusable if its group is dropped or starts again. Unusable rollouts are
cancelled, except the references of :mod:`~nemo_gym_prorl.dapo.bias`, which run to their end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from nemo_gym_prorl.dapo.bias import BiasMeter
from nemo_gym_prorl.dapo.contract import Decision, NothingToLearn, SamplerConfig, Submission
from nemo_gym_prorl.dapo.group import Group, Member, OutcomeTotals, RolloutOutcome, Usage


_GROUPS = TypeAdapter(list[Group])


class GroupQueue:
    """Groups by progress, each in one of three tables by group number, and a heap of members that wait for submission.

    Attributes:
        open: groups that are not complete.
        ready: complete groups with variance, in order of completion.
        zero_variance: complete groups without variance that may start again, if a batch ends before them.
    """

    def __init__(self) -> None:
        self.open: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.zero_variance: dict[int, Group] = {}
        self._waiting: list[tuple[int, int]] = []
        """Heap of group number and member index of members that wait for submission."""

    def put(self, group: Group) -> None:
        """Open or reopen a group, and queue its members without a rollout."""
        self.drop(group.number)
        self.open[group.number] = group
        for member in group.members:
            if member.waits:
                heapq.heappush(self._waiting, (group.number, member.index))

    def drop(self, number: int) -> None:
        for groups in (self.open, self.ready, self.zero_variance):
            groups.pop(number, None)

    def next_waiting(self) -> tuple[Group, Member] | None:
        """Remove and return the first waiting member of the oldest group; ``None`` if no member waits."""
        while self._waiting:
            number, index = heapq.heappop(self._waiting)
            group = self.open.get(number)
            if group is not None and group.members[index].waits:
                return group, group.members[index]
        return None

    @property
    def usable(self) -> list[Group]:
        return [*self.open.values(), *self.ready.values()]

    @property
    def scored(self) -> list[Member]:
        return [member for group in self.usable for member in group.scored]

    def first_open(self) -> float:
        """Return the number of the oldest group that is not complete; infinity if there is none."""
        return min(self.open, default=math.inf)

    def older_than(self, version: int) -> Iterator[Group]:
        """Return groups with a member that began under weights before this version."""
        groups = [*self.ready.values(), *self.open.values(), *self.zero_variance.values()]
        return (group for group in groups if any(group.older_than(version)))

    def state(self) -> dict[str, Any]:
        tables = {"open": self.open, "ready": self.ready, "zero_variance": self.zero_variance}
        return {name: _GROUPS.dump_python([*groups.values()], mode="json") for name, groups in tables.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for groups, saved in ((self.ready, state["ready"]), (self.zero_variance, state["zero_variance"])):
            groups.update((group.number, group) for group in _GROUPS.validate_python(saved))
        for group in _GROUPS.validate_python(state["open"]):
            self.put(group)


_AVERAGED_GROUPS = 256
"""Number of latest groups over which the share of groups with variance is averaged."""
_MIN_SHARE = 1 / 8
"""Lower bound of the estimated share, which bounds the surplus of groups when the true share rises again."""
_DEVIATIONS = 2.0
"""Standard deviations from the expected number of groups with variance to the bound that admission assumes."""


class GroupAdmission:
    """Bound on the number of open and ready groups, from an estimate of the share of groups with variance."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self.groups = 0
        self.share = 0.5

    def settled(self, *, trainable: bool) -> None:
        """Update the estimate with a complete group whose result is final."""
        self.groups += 1
        self.share += (trainable - self.share) / min(self.groups + 2, _AVERAGED_GROUPS)

    def admits(self, ready: int, running: int, behind: int) -> bool:
        """Return whether a batch could use another group.

        Args:
            ready: number of groups with variance that are in no batch yet.
            running: number of groups that are not complete.
            behind: weight versions between the current weights and those of the batch that is being filled.
        """
        room = self._config.groups_per_batch * (self._config.max_staleness + 1 - behind)
        share = max(self.share, _MIN_SHARE)
        deviations = _DEVIATIONS if self._config.max_staleness else -_DEVIATIONS
        return ready + share * running + deviations * math.sqrt(running * share * (1 - share)) < room


class StopConditions:
    """Counters of consecutive groups without variance, and of groups that could not be run, to end a training run.

    Attributes:
        reason: failure of the last group that could not be run.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self.zero_variance = self.not_run = 0
        self.reason = ""

    def completed_group(self, *, trainable: bool) -> None:
        self.not_run = 0
        self.zero_variance = 0 if trainable else self.zero_variance + 1

    def not_run_group(self, reason: str) -> None:
        self.not_run += 1
        self.reason = reason

    def check(self) -> None:
        """Refuse another group if a counter has reached its bound.

        Raises:
            NothingToLearn: ``max_dropped`` or ``max_fruitless`` is reached.
        """
        if self.not_run >= self._config.max_dropped:
            raise self.nothing_runs()
        if self.zero_variance >= self._config.max_fruitless:
            raise NothingToLearn(
                f"{self.zero_variance} groups in a row had rewards without variance: the task is too easy or too hard "
                "for the policy, or its rewards are broken",
                field="max_fruitless",
            )

    def nothing_runs(self) -> NothingToLearn:
        """Return the error for groups that cannot be run."""
        return NothingToLearn(
            f"{self.not_run} groups in a row could not be run; failure of the last: {self.reason}", field="max_dropped"
        )


class InFlightRollouts:
    """Submitted rollouts without an outcome: running, being cancelled, or references.

    Args:
        run: prefix of all rollout ids.
        bias: bias measurement; receives each member's first outcome.
        outcomes: totals that count unused rollouts.
    """

    def __init__(self, run: str, bias: BiasMeter, outcomes: OutcomeTotals) -> None:
        self._run, self._bias, self._outcomes = run, bias, outcomes
        self.running: dict[str, tuple[Group, Member]] = {}
        self._cancelling: set[str] = set()
        self._references: dict[str, tuple[int, int]] = {}
        """Weight version and prompt number of references, by rollout id."""

    def __len__(self) -> int:
        return len(self.running) + len(self._cancelling) + len(self._references)

    @property
    def abandoned(self) -> bool:
        """Return whether a rollout is in flight that no batch can use."""
        return bool(self._cancelling or self._references)

    def begin(self, group: Group, member: Member, rollout: str, version: int) -> Submission:
        member.begin(rollout, version)
        self.running[rollout] = (group, member)
        return self._submission(rollout, group, version)

    def record_score(self, rollout: str, length: float, accuracy: float) -> None:
        """Pass a score, with the number of sampled tokens, to the bias measurement, which takes first tries.

        Ignored unless the rollout runs or is a reference, and while an earlier try of the member is a reference.
        """
        if rollout not in self._references and rollout not in self.running:
            return
        key = group_and_member_of(rollout)
        others = self._references.keys() - {rollout}
        if rollout in self._references or key not in map(group_and_member_of, others):
            self._bias.record_outcome(*key, length, accuracy)

    def remove(self, rollout: str, usage: Usage) -> tuple[Group, Member] | None:
        """Remove an ended rollout; return its group and member, or ``None`` if no batch can use the rollout."""
        if self._references.pop(rollout, None) is not None:
            number, index = group_and_member_of(rollout)
            self._bias.gave_up(number, unless_recorded=index)
            self._outcomes.add(RolloutOutcome.REFERENCE, usage)
        elif rollout in self._cancelling:
            self._cancelling.discard(rollout)
            self._outcomes.add(RolloutOutcome.CANCELLED, usage)
        return self.running.pop(rollout, None)

    def abandon(self, group: Group, member: Member) -> list[str]:
        """Give up a member's running rollout; return the ids to cancel, empty if the rollout becomes a reference."""
        rollout = str(member.rollout)
        del self.running[rollout]
        if self._bias.cut(group.number, member.index):
            self._references[rollout] = (member.version, group.prompt)
            return []
        self._cancelling.add(rollout)
        return [rollout]

    def cancel_references(self) -> list[str]:
        """Turn all references into rollouts that are being cancelled; return their ids."""
        rollouts = [*self._references]
        self._cancelling.update(rollouts)
        self._references.clear()
        return rollouts

    def state(self) -> dict[str, Any]:
        """Return abandoned rollouts as JSON; the groups' states contain the running rollouts."""
        return {"ending": sorted(self._cancelling), "references": self._references}

    def restore(self, state: Mapping[str, Any], groups: list[Group]) -> Decision:
        """Continue from a saved state; return which rollouts to submit again and which to cancel again."""
        self._cancelling = set(state["ending"])
        self._references = {rollout: (version, prompt) for rollout, (version, prompt) in state["references"].items()}
        decision = Decision(cancel=sorted(self._cancelling))
        for group in groups:
            for member in group.members:
                if member.runs:
                    self.running[str(member.rollout)] = (group, member)
        for rollout, (group, member) in self.running.items():
            decision.submit.append(self._submission(rollout, group, member.version))
        for rollout, (version, prompt) in self._references.items():
            group_id = self._group_id(group_and_member_of(rollout)[0])
            decision.submit.append(Submission(rollout, group_id, prompt, version, urgent=False))
        return decision

    def _submission(self, rollout: str, group: Group, version: int) -> Submission:
        prefix = group.search.prefix if group.search else None
        group_id = self._group_id(group.number)
        return Submission(rollout, group_id, group.prompt, version, bool(group.scored), prefix)

    def _group_id(self, number: int) -> str:
        return f"{self._run}:{number}"


def group_and_member_of(rollout: str) -> tuple[int, int]:
    """Return group number and member index of a rollout id, which has the form ``run:group:member:try``."""
    _, number, index, _ = rollout.rsplit(":", 3)
    return int(number), int(index)
