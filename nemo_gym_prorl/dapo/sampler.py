# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling that never waits (DAPO, arXiv 2503.14476, section 3.2; ProRL Agent, arXiv 2603.18815, section 3.4).

Each prompt gets a group of rollouts. A group whose rewards are all the same teaches nothing and is dropped; a batch
is so many groups with variance. Instead of rounds, the rollout service is kept full: whatever ends makes room for the
next rollout at once.

**Versions.** The batch ``b`` (0, 1, ...) is trained on weights ``first_version + b``, and gives the next ones. A
rollout carries the weights it began under, and is of use to batches at most ``max_staleness`` versions ahead of it:

- 0 is strictly on-policy: when a batch is complete, everything else is too old for the next one. So the redundant
  rollouts are cancelled, and nothing is submitted until the next weights are announced.
- 1 or more: while the trainer works, rollouts for the next batches go on; those that are not ready when a batch is
  complete are carried over, with what their siblings have, and only the members that became too old start again.
  Batches take the groups that began under the oldest weights first.

A group keeps its place: older ones are submitted first, so a prompt whose rollouts take long comes back until it is
done. Only ``max_restarts`` ends that, and what was dropped is told with its length (:mod:`fates`).

**Failures** are no rewards. A member without a score is tried again; a group that can't be completed is dropped, never
filled up with a copy of a sibling.

Pure: outcomes are told by method, and :meth:`DynamicSampler.decide` says what follows. All of its state is JSON.
"""

from __future__ import annotations

import heapq
import math
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.dapo.contract import Batch, Decision, NothingToLearn, SamplerConfig, Scored, Submission
from nemo_gym_prorl.dapo.fates import Fate, Fates, Usage
from nemo_gym_prorl.dapo.group import Group, Member
from nemo_gym_prorl.dapo.prompts import Curriculum, PromptStream
from nemo_gym_prorl.failures import CallerError, Origin


class DynamicSampler:
    """The state machine; see the module.

    Args:
        config: what the trainer wants.
        prompts: the stream of prompts.
        curriculum: which prompts to leave out.
        run: begins all ids. A service knows ids for long, so no other run may have had it; by default it is drawn.
    """

    def __init__(
        self,
        config: SamplerConfig,
        prompts: PromptStream,
        curriculum: Curriculum | None = None,
        run: str | None = None,
    ) -> None:
        self.config = config
        self.fates = Fates()
        self.dropped: Counter[str] = Counter()
        """Groups by why they were dropped."""
        self.submitted = 0
        """Rollouts."""
        self.asked = 0
        """Batches that the trainer asked for."""
        self.emitted = 0
        """Batches."""
        self.version = config.first_version
        """The newest weights that were announced."""
        self._prompts = prompts
        self._curriculum = curriculum
        self._run = run or f"dapo-{uuid.uuid4().hex[:8]}"
        self._life = ""
        """Drawn when a state is restored, and part of ids: what was submitted after it was saved must not be met
        again, nor what another run submitted that began from it."""
        self._next_prompt = 0
        self._fruitless = 0
        self._unrun = 0
        """Groups in a row that could not be run, and why the last one."""
        self._why = ""
        self._exhausted = False
        self._groups: dict[int, Group] = {}
        """Those that are not complete, by number."""
        self._ready: dict[int, Group] = {}
        """Complete, with variance, in the order in which that came."""
        self._waiting: list[tuple[int, int]] = []
        """A heap of group and place of the members that wait."""
        self._running: dict[str, tuple[Group, Member]] = {}
        self._ending: set[str] = set()
        """Cancelled, without an outcome yet."""
        self._decision = Decision()

    # What happened

    def scored(self, rollout: str, reward: float, usage: Usage = Usage()) -> None:
        """A rollout has its raw reward.

        Raises:
            ValueError: the reward is no number. Nothing was changed; tell it as a failure.
        """
        if not math.isfinite(reward):
            raise ValueError(f"the reward of {rollout} is {reward}")
        if self._ended_early(rollout, usage) or rollout not in self._running:
            return
        group, member = self._running.pop(rollout)
        member.reward, member.usage = reward, usage
        if group.complete:
            self._complete(group)

    def failed(self, rollout: str, origin: Origin, usage: Usage = Usage(), why: str = "") -> None:
        """A rollout ended without a reward: for the machines' sake, the policy's, or since its row can't be run."""
        if self._ended_early(rollout, usage) or rollout not in self._running:
            return
        group, member = self._running.pop(rollout)
        self.fates.add(Fate.FAILED, usage)
        member.failures += 1
        member.reset()
        refused = origin in (Origin.TASK, Origin.CALLER)
        if refused or member.failures > self.config.max_failures:
            self._unrun += 1
            self._why = why
            self._drop(group, "refused" if refused else "failed", Fate.GROUP_FAILED)
        else:
            self._wait(group, member)

    def cancelled(self, rollout: str, usage: Usage = Usage()) -> None:
        """A rollout was cancelled: by us, or else by somebody who had no right to, which is a failure."""
        self.failed(rollout, Origin.INFRASTRUCTURE, usage)

    def lost(self, rollout: str) -> None:
        """The result of a scored rollout can't be had any more: it was never scored. Others are passed over."""
        number = int(rollout.split(":")[-3])
        group = self._groups.get(number) or self._ready.get(number)
        for member in group.members if group else ():
            if group and member.rollout == rollout and member.reward is not None:
                self.fates.add(Fate.FAILED, member.usage)
                member.reset()
                self._ready.pop(number, None)
                self._groups[number] = group
                self._wait(group, member)

    def weights(self, version: int) -> None:
        """The service samples from these weights now.

        Raises:
            ValueError: they can't be: older ones, or those of a batch that was never complete.
        """
        if not self.version <= version <= self._due:
            raise ValueError(f"weights {version} after {self.version}, with {self.emitted} batches complete")
        self.version = version

    def ask(self) -> None:
        """The trainer is ready for a batch, or for one more ahead."""
        self.asked += 1

    # What follows

    def decide(self) -> Decision:
        """What is to be done since the last call.

        Raises:
            NothingToLearn: there is no use in going on.
        """
        while (batch := self._batch()) is not None:
            self._decision.batches.append(batch)
        try:
            self._submit()
            if self.finished and self._unrun and not self._ever_complete:
                raise self._nothing_runs()
        except NothingToLearn:
            # What was decided comes first; so does what is in flight, which may tell otherwise.
            if self._decision == Decision() and not self.in_flight:
                raise
        decision, self._decision = self._decision, Decision()
        return decision

    @property
    def in_flight(self) -> int:
        """Rollouts submitted, or cancelled, that have no outcome yet."""
        return len(self._running) + len(self._ending)

    @property
    def held(self) -> int:
        """Scored rollouts that wait for their group, or for their batch."""
        groups = [*self._groups.values(), *self._ready.values()]
        return sum(len(group.rewards) for group in groups)

    def wants(self, rollout: str) -> bool:
        """Whether the result of this rollout may be of use."""
        return rollout in self._running

    def results(self) -> list[str]:
        """The scored rollouts whose results are still of use."""
        groups = [*self._groups.values(), *self._ready.values()]
        members = (member for group in groups for member in group.members)
        return [member.rollout for member in members if member.rollout is not None and member.reward is not None]

    @property
    def finished(self) -> bool:
        """Whether there are no more prompts, and nothing in flight: no batch will come."""
        return self._exhausted and not self._groups and not self._ending

    def close(self) -> Decision:
        """Training is over: cancels what runs and lets go of the rest. The outcomes of the former are still told."""
        for group in [*self._groups.values(), *self._ready.values()]:
            self._drop(group, "left_over", Fate.LEFT_OVER)
        self._exhausted = True
        self._unrun = 0  # that nothing could be run is no news to who does not go on
        decision, self._decision = self._decision, Decision()
        return decision

    # Saved and restored

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs, as JSON. Batches that were decided on count as trained on."""
        return {
            "run": self._run,
            "version": self.version,
            "emitted": self.emitted,
            "submitted": self.submitted,
            "next_prompt": self._next_prompt,
            "fruitless": self._fruitless,
            "unrun": self._unrun,
            "why": self._why,
            "groups": [group.state() for group in self._groups.values()],
            "ready": [group.state() for group in self._ready.values()],
            "ending": sorted(self._ending),
            "fates": self.fates.state(),
            "dropped": dict(self.dropped),
            "curriculum": self._curriculum.state() if self._curriculum else None,
        }

    def restore(self, state: Mapping[str, Any]) -> Decision:
        """Goes on from there; to be called on a new sampler.

        Returns:
            The rollouts that were in flight, to be submitted again under their ids, those to be cancelled again, and
            those that are too old, if ``max_staleness`` is smaller now.

        Raises:
            CallerError: groups are of another size now.
        """
        self._run, self._life = state["run"], f"{uuid.uuid4().hex[:6]}."
        self._unrun, self._why = state["unrun"], state["why"]
        self.version, self.emitted = state["version"], state["emitted"]
        self.asked = self.emitted
        self.submitted, self._next_prompt = state["submitted"], state["next_prompt"]
        self._fruitless = state["fruitless"]
        self._ending = set(state["ending"])
        self.fates = Fates(state["fates"])
        self.dropped = Counter(state["dropped"])
        if self._curriculum and state["curriculum"] is not None:
            self._curriculum.restore(state["curriculum"])
        for saved in state["ready"]:
            group = self._restored(saved)
            self._ready[group.number] = group
        for saved in state["groups"]:
            group = self._restored(saved)
            self._groups[group.number] = group
            for member in group.members:
                if member.runs and member.rollout is not None:
                    self._running[member.rollout] = (group, member)
                elif member.waits:
                    self._wait(group, member)
        self._end_stale()
        decision, self._decision = self._decision, Decision()
        decision.cancel = sorted(self._ending)
        decision.submit = [self._submission(*place, rollout) for rollout, place in self._running.items()]
        return decision

    def _restored(self, saved: Mapping[str, Any]) -> Group:
        group = Group.of_saved(saved)
        if len(group.members) != self.config.group_size:
            raise CallerError(f"groups that were saved have {len(group.members)} rollouts", field="group_size")
        return group

    # Groups

    @property
    def _due(self) -> int:
        """Weights of the batch that is being filled."""
        return self.config.first_version + self.emitted

    @property
    def _oldest_of_use(self) -> int:
        return self._due - self.config.max_staleness

    def _ended_early(self, rollout: str, usage: Usage) -> bool:
        """Whether the outcome is of a rollout that we cancelled. It may be a reward, which comes too late."""
        if rollout not in self._ending:
            return False
        self._ending.discard(rollout)
        self.fates.add(Fate.CANCELLED, usage)
        return True

    @property
    def _ever_complete(self) -> bool:
        """Whether any group had all its rewards."""
        return bool(self.emitted or self._ready or self.fates[Fate.NO_VARIANCE].rollouts)

    def _complete(self, group: Group) -> None:
        self._unrun = 0
        if self._curriculum:
            self._curriculum.saw(group.key, group.rewards)
        if not group.varies:
            self._fruitless += 1
            self._drop(group, "no_variance", Fate.NO_VARIANCE)
            return
        self._fruitless = 0
        del self._groups[group.number]
        self._ready[group.number] = group

    def _drop(self, group: Group, why: str, fate: Fate) -> None:
        """Lets go of a group: cancels what runs; what was scored meets its fate."""
        self.dropped[why] += 1
        self._groups.pop(group.number, None)
        self._ready.pop(group.number, None)
        for member in group.members:
            self._void(member, fate)

    def _void(self, member: Member, fate: Fate) -> None:
        """The member's rollout, if it has one, is of no use."""
        if member.rollout is None:
            return
        if member.runs:
            del self._running[member.rollout]
            self._ending.add(member.rollout)
            self._decision.cancel.append(member.rollout)
        else:
            self.fates.add(fate, member.usage)
            self._decision.forget.append(member.rollout)
        member.reset()

    def _wait(self, group: Group, member: Member) -> None:
        heapq.heappush(self._waiting, (group.number, member.place))

    # Batches

    def _batch(self) -> Batch | None:
        wanted = self.config.groups_per_batch
        if self.emitted == self.asked or len(self._ready) < wanted:
            return None
        if self.config.in_order:
            first_open = min(self._groups, default=math.inf)
            numbers = sorted(number for number in self._ready if number < first_open)[:wanted]
        else:
            numbers = sorted(self._ready, key=lambda number: self._ready[number].version)[:wanted]
        if len(numbers) < wanted:
            return None
        batch = Batch(self.emitted, self._due, {number: self._scored(number) for number in sorted(numbers)})
        self.emitted += 1
        self._end_stale()
        return batch

    def _scored(self, number: int) -> list[Scored]:
        rollouts = []
        for member in self._ready.pop(number).members:
            if member.rollout is None or member.reward is None:
                raise AssertionError(f"group {number} is not complete")
            self.fates.add(Fate.EMITTED, member.usage)
            rollouts.append(Scored(member.rollout, member.reward, member.version))
        return rollouts

    def _end_stale(self) -> None:
        """With another batch to fill, some rollouts are too old: their members start again, if they still may."""
        for group in [*self._ready.values(), *self._groups.values()]:
            stale = [*group.older_than(self._oldest_of_use)]
            if not stale:
                continue
            if not self.config.in_order and max(m.restarts for m in stale) >= self.config.max_restarts:
                self._drop(group, "too_late", Fate.STALE)
                continue
            self._ready.pop(group.number, None)
            self._groups[group.number] = group
            for member in stale:
                member.restarts += 1
                self._void(member, Fate.STALE)
                self._wait(group, member)

    # Submissions

    def _submit(self) -> None:
        """Fills the service: first members of groups that there are, the oldest group first, then the next prompts."""
        while self.in_flight < self.config.max_in_flight and self._due - self.version <= self.config.max_staleness:
            if not self._waiting and not self._next_group():
                return
            number, place = heapq.heappop(self._waiting)
            group = self._groups.get(number)
            if group is None:
                continue
            member = group.members[place]
            rollout = f"{self._run}:{number}:{place}:{self._life}{member.tries}"
            member.begin(rollout, self.version)
            self._running[rollout] = (group, member)
            self.submitted += 1
            self._decision.submit.append(self._submission(group, member, rollout))

    def _submission(self, group: Group, member: Member, rollout: str) -> Submission:
        return Submission(rollout, f"{self._run}:{group.number}", group.number, member.version, bool(group.rewards))

    def _nothing_runs(self) -> NothingToLearn:
        return NothingToLearn(
            f"{self._unrun} groups in a row could not be run, the last for this: {self._why}", field="max_dropped"
        )

    def _next_group(self) -> bool:
        """Opens the next group, if it can be of use to a batch that today's weights are good for."""
        ahead = len(self._ready) // self.config.groups_per_batch
        if self._exhausted or self._due + ahead - self.version > self.config.max_staleness:
            return False
        if self._unrun >= self.config.max_dropped:
            raise self._nothing_runs()
        if self._fruitless >= self.config.max_fruitless:
            raise NothingToLearn(
                f"{self._fruitless} groups in a row had rewards without variance: the task is too easy or too hard "
                "for the policy, or its rewards are broken",
                field="max_fruitless",
            )
        for _ in range(self._prompts.size):
            number = self._next_prompt
            prompt = self._prompts[number]
            if prompt is None:
                self._exhausted = True
                return False
            self._next_prompt += 1
            if self._curriculum and self._curriculum.skips(prompt.key):
                continue
            group = Group(number, prompt.key, [Member(place) for place in range(self.config.group_size)])
            self._groups[number] = group
            for member in group.members:
                self._wait(group, member)
            return True
        raise NothingToLearn("the curriculum leaves out every prompt there is", field="curriculum")
