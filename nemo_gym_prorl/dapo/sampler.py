# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling that never waits for a round (DAPO, arXiv 2503.14476, section 3.2; ProRL Agent, arXiv 2603.18815,
section 3.4), and trains on what the policy samples.

Each prompt gets a group of rollouts. A group of which all are as good as each other teaches nothing and is dropped; a
batch is so many groups with variance. Instead of rounds, the rollout service is kept full: whatever ends makes room
for the next rollout at once.

**Versions.** The batch ``b`` (0, 1, ...) is trained on weights ``first_version + b``, and gives the next ones. A
rollout carries the weights it began under, and is of use to batches at most ``max_staleness`` versions ahead of it. So
many groups are under way as can still be of use (:class:`~.queue.Admission`); while the trainer works, and from batch
to batch, they go on.

**Order.** A batch is the first groups with variance in the order of their prompts. So who is trained on is settled
before anybody knows how long it takes, and a batch waits for its slowest rollout, for which it has had
``max_staleness`` batches' time. Nothing is sampled again for having been slow: until a batch has passed over a prompt
it can't become too old *by its own doing*. What is ended early is ended by its place in the queue: with a batch
complete, groups behind it that began under weights too old for the next one begin again, whether they run, are
complete, or were found to have no variance. With ``max_staleness`` 0 these are all.

:mod:`~nemo_gym_prorl.dapo.bias` measures how far what is trained on differs from what is sampled.

**Prefixes.** With ``prefix_tries`` a group without variance may be followed by one that begins at a prefix
(:mod:`prefixes`). It comes in the place of the next prompt, so that no batch waits for it, and is a group like others.

**Failures** of machines are no rewards: the member is tried again; a group that can't be completed is dropped, never
filled up with a copy of a sibling. What the policy itself brought to a bad end has an outcome (``agent_failures``).

Pure: outcomes are told by method, and :meth:`DynamicSampler.decide` says what follows. All of its state is JSON.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.dapo.bias import BiasMeter, Estimate
from nemo_gym_prorl.dapo.contract import (
    AgentFailures,
    Batch,
    Decision,
    NothingToLearn,
    SamplerConfig,
    Scored,
)
from nemo_gym_prorl.dapo.group import Fate, Fates, Group, Member, Usage
from nemo_gym_prorl.dapo.prefixes import NOTHING_KEPT, Kept, Prefixes, Search
from nemo_gym_prorl.dapo.prompts import Curriculum, Epochs
from nemo_gym_prorl.dapo.queue import Admission, Flight, Queue, place_of
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
        prompts: Epochs,
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
        self._next_number = 0
        """Of a group. Those that begin at a prefix have numbers, too, and no prompt of their own in the stream."""
        self._backlog: deque[tuple[int, str, Search]] = deque()
        """Prompts, with their names, of groups to come that begin at a prefix."""
        self._passed = 0
        """Groups that a batch has passed over."""
        self._fruitless = 0
        self._unrun = 0
        """Groups in a row that could not be run, and why the last one."""
        self._why = ""
        self._exhausted = False
        self._admission = Admission(config)
        self.prefixes = Prefixes(config.prefix_tries)
        self._bias = BiasMeter(config.reference_share, self._run)
        self._queue = Queue()
        self._flight = Flight(self._run, self._bias, self.fates)
        self._decision = Decision()

    # What happened

    def scored(
        self,
        rollout: str,
        reward: float,
        usage: Usage = Usage(),
        *,
        accuracy: float | None = None,
        masked: bool = False,
        kept: Kept = NOTHING_KEPT,
    ) -> None:
        """A rollout has its outcome.

        Args:
            rollout: its id.
            reward: raw, as its environment gave it.
            usage: what it cost.
            accuracy: what the filter looks at; by default the reward.
            masked: it gets no loss, and does not enter the baseline of its group.
            kept: where others can go on from it.

        Raises:
            ValueError: the reward is no number. Nothing was changed; tell it as a failure.
        """
        accuracy = reward if accuracy is None else accuracy
        if not (math.isfinite(reward) and math.isfinite(accuracy)):
            raise ValueError(f"the reward of {rollout} is {reward}, its accuracy {accuracy}")
        self._flight.heard(rollout, usage.length, accuracy)
        if (landed := self._flight.landed(rollout, usage)) is None:
            return
        group, member = landed
        member.reward, member.accuracy, member.masked = reward, accuracy, masked
        member.usage, member.kept = usage, kept
        if group.complete:
            self._complete(group)

    def failed(self, rollout: str, origin: Origin, usage: Usage = Usage(), why: str = "") -> None:
        """A rollout ended without a reward: for the machines' sake, the policy's, or since its row can't be run."""
        if origin is Origin.AGENT:
            masked = self.config.agent_failures == AgentFailures.MASK
            self.scored(rollout, 0.0, usage, accuracy=0.0, masked=masked)
            return
        if (landed := self._flight.landed(rollout, usage)) is None:
            return
        group, member = landed
        self.fates.add(Fate.FAILED, usage)
        member.failures += 1
        member.reset()
        refused = origin in (Origin.TASK, Origin.CALLER)
        if refused and group.search is not None:
            self.prefixes.refused(group.key, group.search)
            self._drop(group, "refused", Fate.GROUP_FAILED)
        elif refused or member.failures > self.config.max_failures:
            self._unrun += 1
            self._why = why
            self._bias.gave_up(group.number)
            self._drop(group, "refused" if refused else "failed", Fate.GROUP_FAILED)
        else:
            self._queue.put(group)

    def cancelled(self, rollout: str, usage: Usage = Usage()) -> None:
        """A rollout was cancelled: by us, or else by somebody who had no right to, which is a failure."""
        self.failed(rollout, Origin.INFRASTRUCTURE, usage)

    def interrupted(self, rollout: str, usage: Usage = Usage()) -> None:
        """A rollout that was in flight when the state was saved was ended meanwhile: who left cancelled it.

        What was in flight then is what is slow. Were only that sampled again, less of it would be trained on, so all
        begins again that no batch has passed over.
        """
        if (landed := self._flight.landed(rollout, usage)) is None:
            return
        self.fates.add(Fate.FAILED, usage)
        landed[1].reset()
        for group in [*self._queue.kept, *self._queue.fruitless.values()]:
            self._begin_again(group, Fate.LEFT_OVER)

    def lost(self, rollout: str) -> None:
        """The result of a scored rollout can't be had any more: it was never scored. Others are passed over."""
        number, _ = place_of(rollout)
        for group in self._queue.kept:
            member = next((member for member in group.scored if member.rollout == rollout), None)
            if group.number == number and member:
                self.fates.add(Fate.FAILED, member.usage)
                member.reset()
                self._queue.put(group)

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
        self._settle_fruitless(self._sure_to_be_passed())
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
        return len(self._flight)

    @property
    def awaits_weights(self) -> bool:
        """Whether nothing may begin, and nothing runs, until newer weights are announced."""
        return not self.in_flight and self._due - self.version > self.config.max_staleness

    @property
    def held(self) -> int:
        """Scored rollouts that wait for their group, or for their batch."""
        return len(self._queue.scored)

    def wants(self, rollout: str) -> bool:
        """Whether the result of this rollout may be of use."""
        return rollout in self._flight.running

    def results(self) -> list[str]:
        """The scored rollouts whose results are still of use."""
        return [member.rollout for member in self._queue.scored if member.rollout is not None]

    @property
    def finished(self) -> bool:
        """Whether there are no more prompts, and nothing in flight: no batch will come."""
        return self._exhausted and not (self._backlog or self._queue.open or self._flight.abandoned)

    @property
    def length_bias(self) -> Estimate | None:
        """Mean length of what is trained on over that of what the policy samples, in tokens; see :mod:`bias`."""
        return self._bias.length(self._passed)

    @property
    def accuracy_bias(self) -> Estimate | None:
        """The same of accuracy."""
        return self._bias.accuracy(self._passed)

    def close(self) -> Decision:
        """Training is over: cancels what runs and lets go of the rest. The outcomes of the former are still told."""
        for group in self._queue.kept:
            self._bias.gave_up(group.number)
            self._drop(group, "left_over", Fate.LEFT_OVER)
        self._decision.cancel += self._flight.end_references()
        self._exhausted = True
        self._backlog.clear()
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
            "next_number": self._next_number,
            "passed": self._passed,
            "fruitless": self._fruitless,
            "unrun": self._unrun,
            "why": self._why,
            "queue": self._queue.state(),
            "flight": self._flight.state(),
            "bias": self._bias.state(),
            "settled": [self._admission.groups, self._admission.share],
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
            CallerError: groups are of another size now, or another version of this package saved it.
        """
        if missing := self.state().keys() - state.keys():
            raise CallerError(f"another version saved it: it has no {min(missing)!r}", field="state")
        self._run, self._life = state["run"], f"{uuid.uuid4().hex[:6]}."
        self._unrun, self._why = state["unrun"], state["why"]
        self.version, self.emitted = state["version"], state["emitted"]
        self.asked = self.emitted
        self.submitted = state["submitted"]
        self._next_prompt, self._next_number = state["next_prompt"], state["next_number"]
        self._passed = state["passed"]
        self._fruitless = state["fruitless"]
        self._bias.restore(state["bias"], self._run)
        self._admission.groups, self._admission.share = state["settled"]
        self.fates = Fates(state["fates"])
        self.dropped = Counter(state["dropped"])
        if self._curriculum and state["curriculum"] is not None:
            self._curriculum.restore(state["curriculum"])
        self._queue.restore(state["queue"])
        groups = [*self._queue.kept, *self._queue.fruitless.values()]
        if sizes := {len(group.members) for group in groups} - {self.config.group_size}:
            raise CallerError(f"groups that were saved have {sizes.pop()} rollouts", field="group_size")
        self._flight = Flight(self._run, self._bias, self.fates)
        again = self._flight.restore(state["flight"], groups)
        for group in [*self._queue.open.values()]:  # who keeps prefixes may have forgotten them, or us
            if group.search is not None:
                self._drop(group, "left_over", Fate.LEFT_OVER)
        self._end_stale()
        decision, self._decision = self._decision, Decision()
        stale = {*decision.cancel}
        decision.cancel += again.cancel
        decision.submit = [submission for submission in again.submit if submission.rollout not in stale]
        return decision

    # Groups

    @property
    def _due(self) -> int:
        """Weights of the batch that is being filled."""
        return self.config.first_version + self.emitted

    @property
    def _oldest_of_use(self) -> int:
        return self._due - self.config.max_staleness

    @property
    def _ever_complete(self) -> bool:
        """Whether any group had all its rewards."""
        return bool(self.emitted or self._queue.ready or self.fates[Fate.NO_VARIANCE].rollouts)

    def _complete(self, group: Group) -> None:
        self._unrun = 0
        self._queue.drop(group.number)
        if group.teaches:
            self._fruitless = 0
            self._queue.ready[group.number] = group
        else:
            self._fruitless += 1
            self.dropped["no_variance"] += 1
            for member in group.members:
                self.fates.add(Fate.NO_VARIANCE, member.usage)
                self._decision.forget.append(str(member.rollout))
            if group.search is None:
                self._queue.fruitless[group.number] = group
        if not self._is_followed(group) and (search := self.prefixes.after(group)) is not None:
            self._backlog.append((group.prompt, group.key, search))
        if group.search is not None and not group.teaches:
            self._settle(group)

    def _is_followed(self, group: Group) -> bool:
        """Whether one from a prefix is there already, since this one began again for its age."""
        at_prefixes = [it.prompt for it in self._queue.kept if it.search is not None and it is not group]
        return group.search is None and group.prompt in [*at_prefixes, *(prompt for prompt, *_ in self._backlog)]

    def _drop(self, group: Group, why: str, fate: Fate) -> None:
        """Lets go of a group: cancels what runs; what was scored meets its fate."""
        self.dropped[why] += 1
        self._queue.drop(group.number)
        for member in group.members:
            self._void(group, member, fate)

    def _void(self, group: Group, member: Member, fate: Fate) -> None:
        """The member's rollout, if it has one, is of no use."""
        if member.rollout is None:
            return
        if member.runs:
            self._decision.cancel += self._flight.abandon(group, member)
        else:
            self.fates.add(fate, member.usage)
            self._decision.forget.append(member.rollout)
        member.reset()

    # Batches

    def _batch(self) -> Batch | None:
        wanted, ready = self.config.groups_per_batch, self._queue.ready
        if self.emitted == self.asked or len(ready) < wanted:
            return None
        first_open = self._queue.first_open()
        numbers = sorted(number for number in ready if number < first_open)[:wanted]
        if len(numbers) < wanted:
            return None
        prompts = {number: ready[number].prompt for number in numbers}
        batch = Batch(self.emitted, self._due, {number: self._scored(number) for number in numbers}, prompts)
        self.emitted += 1
        self._passed = numbers[-1] + 1
        self._settle_fruitless(self._passed)
        self._end_stale()
        return batch

    def _sure_to_be_passed(self) -> float:
        """The next batch passes over prompts before this one, whatever happens behind them."""
        first_open, wanted = self._queue.first_open(), self.config.groups_per_batch
        ready = sorted(number for number in self._queue.ready if number < first_open)
        return ready[wanted - 1] if len(ready) >= wanted else first_open

    def _settle_fruitless(self, end: float) -> None:
        """Groups without variance before this prompt count."""
        for number in sorted(number for number in self._queue.fruitless if number < end):
            self._settle(self._queue.fruitless.pop(number))

    def _settle(self, group: Group) -> None:
        """It counts: nothing of it is sampled again."""
        self._admission.settled(taught=group.teaches)
        if self._curriculum and group.search is None:
            self._curriculum.saw(group.key, [member.accuracy for member in group.members])

    def _scored(self, number: int) -> list[Scored]:
        group = self._queue.ready.pop(number)
        self._settle(group)
        trained = [member for member in group.members if not member.masked]
        self._bias.emitted(number, [(member.usage.length, member.accuracy) for member in trained])
        rollouts = []
        for member in group.members:
            if member.rollout is None or member.reward is None:
                raise AssertionError(f"group {number} is not complete")
            self.fates.add(Fate.EMITTED, member.usage)
            rollouts.append(Scored(member.rollout, member.reward, member.version, member.masked))
        return rollouts

    def _end_stale(self) -> None:
        """With another batch to fill, groups with a rollout that is too old start again."""
        for group in self._queue.older_than(self._oldest_of_use):
            self._begin_again(group, Fate.STALE)

    def _begin_again(self, group: Group, fate: Fate) -> None:
        """All of its members, whatever they gave: if only some were sampled again, which ones would matter."""
        results_are_gone = group.number in self._queue.fruitless
        for member in group.members:
            if results_are_gone:
                member.reset()
            else:
                self._void(group, member, fate)
        self._queue.put(group)

    # Submissions

    def _submit(self) -> None:
        """Fills the service: first members of groups that there are, the oldest group first, then the next prompts."""
        if self._due - self.version > self.config.max_staleness:
            return
        while self.in_flight < (self.config.max_in_flight or math.inf):
            next_one = self._queue.next_waiting() or self._next_group()
            if next_one is None:
                return
            group, member = next_one
            rollout = f"{self._run}:{group.number}:{member.place}:{self._life}{member.tries}"
            self.submitted += 1
            self._decision.submit.append(self._flight.begin(group, member, rollout, self.version))

    def _nothing_runs(self) -> NothingToLearn:
        return NothingToLearn(
            f"{self._unrun} groups in a row could not be run, the last for this: {self._why}", field="max_dropped"
        )

    def _next_group(self) -> tuple[Group, Member] | None:
        """Opens the next group, if it can be of use to a batch that today's weights are good for."""
        behind = self._due - self.version
        if (self._exhausted and not self._backlog) or not self._admission.admits(
            len(self._queue.ready), len(self._queue.open), behind
        ):
            return None
        if self._unrun >= self.config.max_dropped:
            raise self._nothing_runs()
        if self._fruitless >= self.config.max_fruitless:
            raise NothingToLearn(
                f"{self._fruitless} groups in a row had rewards without variance: the task is too easy or too hard "
                "for the policy, or its rewards are broken",
                field="max_fruitless",
            )
        if self._backlog:
            return self._open(*self._backlog.popleft())
        for _ in range(self._prompts.size):
            place = self._next_prompt
            prompt = self._prompts[place]
            if prompt is None:
                self._exhausted = True
                return None
            self._next_prompt += 1
            if self._curriculum and self._curriculum.skips(prompt.key):
                continue
            self._bias.opened(self._next_number, self.config.group_size)
            return self._open(place, prompt.key)
        raise NothingToLearn("the curriculum leaves out every prompt there is", field="curriculum")

    def _open(self, prompt: int, key: str, search: Search | None = None) -> tuple[Group, Member] | None:
        members = [Member(place) for place in range(self.config.group_size)]
        self._queue.put(Group(self._next_number, prompt, key, members, search))
        self._next_number += 1
        return self._queue.next_waiting()
