# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous dynamic sampling (DAPO, arXiv 2503.14476, section 3.2; ProRL Agent, arXiv 2603.18815, section 3.4).

Each prompt gets a group of rollouts. A zero-variance group, whose members all have the same accuracy, is dropped. A
batch is a fixed number of groups with variance. There are no rounds: each rollout that ends makes room for the next.

**Versions.** Batch ``b`` (0, 1, ...) trains weights ``first_version + b`` and produces the next version. A rollout is
labelled with the version under which the rollout began, and can be used by batches at most ``max_staleness`` versions
ahead. :class:`~nemo_gym_prorl.dapo.queue.GroupAdmission` bounds the open groups. Rollouts run while the trainer works.

**Order.** A batch takes the first groups with variance in the order of their prompts. Therefore membership of a batch
does not depend on the duration of rollouts, and a batch waits for its slowest rollout. Once a batch is complete,
groups after it that are too old for the next batch start again regardless of their progress, so cancellation does not
favour short rollouts. With ``max_staleness`` 0 all groups after the batch are too stale.

:mod:`~nemo_gym_prorl.dapo.bias` measures how trained rollouts differ from all sampled rollouts.

**Prefixes.** With ``prefix_tries`` a zero-variance group may be followed by a group that begins at a prefix
(:mod:`~nemo_gym_prorl.dapo.group`). A prefix group gets the next group number, so that no earlier batch waits for it.

**Failures.** An infrastructure failure is never a reward: the member is tried again. A group that cannot be completed
is dropped, never filled with a copy of a sibling. Agent failures are outcomes (``agent_failures``).

Pure: methods record events, and :meth:`DynamicSampler.decide` returns the actions. The whole state is JSON.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nemo_gym_prorl.dapo.bias import BiasMeter, Estimate
from nemo_gym_prorl.dapo.contract import AgentFailures, Batch, BatchRollout, Decision, NothingToLearn, SamplerConfig
from nemo_gym_prorl.dapo.group import (
    NO_CHECKPOINTS,
    CheckpointRef,
    Group,
    Member,
    OutcomeTotals,
    PrefixSampling,
    PrefixSearch,
    RolloutOutcome,
    Usage,
)
from nemo_gym_prorl.dapo.prompts import Curriculum, Epochs
from nemo_gym_prorl.dapo.queue import GroupAdmission, GroupQueue, InFlightRollouts, StopConditions, group_and_member_of
from nemo_gym_prorl.failures import CallerError, Origin


class DynamicSampler:
    """State machine of dynamic sampling; see the module.

    Args:
        config: settings.
        prompts: stream of prompts.
        curriculum: selection of prompts to skip; ``None`` skips none.
        run: prefix of all rollout ids; random by default. Services remember ids, so each training run needs its own
            prefix.
    """

    def __init__(
        self,
        config: SamplerConfig,
        prompts: Epochs,
        curriculum: Curriculum | None = None,
        run: str | None = None,
    ) -> None:
        self.config = config
        self.outcomes = OutcomeTotals()
        self.dropped: Counter[str] = Counter()
        """Number of dropped groups by reason."""
        self.submitted = 0
        """Number of submitted rollouts."""
        self.asked = 0
        """Number of batches that the trainer asked for."""
        self.emitted = 0
        """Number of batches that :meth:`decide` has returned."""
        self.version = config.first_version
        """Newest weight version that was announced."""
        self._prompts = prompts
        self._curriculum = curriculum
        self._run = run or f"dapo-{uuid.uuid4().hex[:8]}"
        self._restore_id = ""
        """Random part of rollout ids after a restore, so that ids differ from those used after the state was saved, by
        this training run or by another that was restored from the same state."""
        self._next_prompt = 0
        self._next_number = 0
        """Number of the next group; a prefix group has its own group number, and the prompt number of its source."""
        self._passed = 0
        """First group number that a later batch can use; all groups with lower numbers are in a batch or dropped."""
        self._exhausted = False
        self._admission = GroupAdmission(config)
        self._stop = StopConditions(config)
        self.prefixes = PrefixSampling(config.prefix_tries)
        self._bias = BiasMeter(config.reference_share, self._run)
        self._queue = GroupQueue()
        self._in_flight = InFlightRollouts(self._run, self._bias, self.outcomes)
        self._decision = Decision()

    def scored(
        self,
        rollout: str,
        reward: float,
        usage: Usage = Usage(),
        *,
        accuracy: float | None = None,
        masked: bool = False,
        checkpoints: CheckpointRef = NO_CHECKPOINTS,
    ) -> None:
        """Record the score of a rollout.

        Args:
            rollout: id of the rollout.
            reward: raw reward of the environment.
            usage: cost; see :class:`.Usage`.
            accuracy: value that the variance filter compares; the reward by default.
            masked: whether the rollout gets no loss and does not enter the baseline of its group.
            checkpoints: checkpoints from which other rollouts can be forked.

        Raises:
            ValueError: reward or accuracy is not finite. The rollout has no outcome yet; call :meth:`failed` instead.
        """
        accuracy = reward if accuracy is None else accuracy
        if not (math.isfinite(reward) and math.isfinite(accuracy)):
            raise ValueError(f"reward and accuracy of {rollout} must be finite numbers: {reward}, {accuracy}")
        self._in_flight.record_score(rollout, usage.length, accuracy)
        if (removed := self._in_flight.remove(rollout, usage)) is None:
            return
        group, member = removed
        member.reward, member.accuracy, member.masked = reward, accuracy, masked
        member.usage, member.checkpoints = usage, checkpoints
        if group.complete:
            self._complete(group)

    def failed(self, rollout: str, origin: Origin, usage: Usage = Usage(), why: str = "") -> None:
        """Record a rollout that ended without a reward: score 0 for an agent failure, else another try if possible."""
        if origin is Origin.AGENT:
            masked = self.config.agent_failures == AgentFailures.MASK
            self.scored(rollout, 0.0, usage, accuracy=0.0, masked=masked)
            return
        if (removed := self._in_flight.remove(rollout, usage)) is None:
            return
        group, member = removed
        self.outcomes.add(RolloutOutcome.FAILED, usage)
        member.failures += 1
        member.reset()
        refused = origin in (Origin.TASK, Origin.CALLER)
        if refused and group.search is not None:
            self.prefixes.refused(group.key, group.search)
            self._drop(group, "refused", RolloutOutcome.GROUP_FAILED)
        elif refused or member.failures > self.config.max_failures:
            self._stop.not_run_group(why)
            self._bias.gave_up(group.number)
            self._drop(group, "refused" if refused else "failed", RolloutOutcome.GROUP_FAILED)
        else:
            self._queue.put(group)

    def cancelled(self, rollout: str, usage: Usage = Usage()) -> None:
        """Record that a rollout was cancelled, which is an infrastructure failure unless the sampler asked for it."""
        self.failed(rollout, Origin.INFRASTRUCTURE, usage)

    def interrupted(self, rollout: str, usage: Usage = Usage()) -> None:
        """Record that a rollout that was in flight when the state was saved has been cancelled since.

        Rollouts in flight are mostly slow. Resampling only these would train on fewer slow rollouts, so all groups
        that are in no batch start again.
        """
        if (removed := self._in_flight.remove(rollout, usage)) is None:
            return
        self.outcomes.add(RolloutOutcome.FAILED, usage)
        removed[1].reset()
        for group in [*self._queue.usable, *self._queue.zero_variance.values()]:
            self._restart(group, RolloutOutcome.LEFT_OVER)

    def lost(self, rollout: str) -> None:
        """Record that the result of a scored rollout is lost, so that its member is tried again."""
        number, _ = group_and_member_of(rollout)
        for group in self._queue.usable:
            member = next((member for member in group.scored if member.rollout == rollout), None)
            if group.number == number and member:
                self.outcomes.add(RolloutOutcome.FAILED, member.usage)
                member.reset()
                self._queue.put(group)

    def weights(self, version: int) -> None:
        """Record the weight version from which the engines sample now.

        Raises:
            ValueError: the version is older than the current one, or newer than the complete batches allow.
        """
        if not self.version <= version <= self._due:
            raise ValueError(
                f"weights {version} were announced; expected {self.version} to {self._due}, "
                f"with {self.emitted} batches complete"
            )
        self.version = version

    def ask(self) -> None:
        """Record that the trainer wants one more batch."""
        self.asked += 1

    def decide(self) -> Decision:
        """Return the actions that follow from the events since the last call.

        Raises:
            NothingToLearn: training cannot make progress.
        """
        while (batch := self._batch()) is not None:
            self._decision.batches.append(batch)
        self._settle_zero_variance(self._certainly_passed())
        try:
            self._submit()
            ever_complete = self.emitted or self._queue.ready or self.outcomes[RolloutOutcome.NO_VARIANCE].rollouts
            if self.finished and self._stop.not_run and not ever_complete:
                raise self._stop.nothing_runs()
        except NothingToLearn:
            # Pending actions come first, and a rollout in flight may still complete a group with variance.
            if self._decision == Decision() and not self.in_flight:
                raise
        decision, self._decision = self._decision, Decision()
        return decision

    @property
    def in_flight(self) -> int:
        """Number of rollouts that were submitted or are being cancelled, and have no outcome yet."""
        return len(self._in_flight)

    @property
    def awaits_weights(self) -> bool:
        """Return whether no rollout is in flight, and none may begin before newer weights are announced."""
        return not self.in_flight and self._due - self.version > self.config.max_staleness

    def wants(self, rollout: str) -> bool:
        """Return whether a rollout runs and a batch may use its result."""
        return rollout in self._in_flight.running

    def results(self) -> list[str]:
        """Return the ids of scored rollouts whose results a batch may use."""
        return [member.rollout for member in self._queue.scored if member.rollout is not None]

    @property
    def finished(self) -> bool:
        """Return whether no further batch can come: prompts have ended, and no group is open or rollout in flight."""
        return self._exhausted and not (self.prefixes.backlog or self._queue.open or self._in_flight.abandoned)

    @property
    def length_bias(self) -> Estimate | None:
        """Ratio of mean lengths, trained rollouts over first tries that pass the filter (:class:`.BiasMeter`)."""
        return self._bias.length(self._passed)

    @property
    def accuracy_bias(self) -> Estimate | None:
        """Ratio of mean accuracies, trained rollouts over first tries that pass the filter (:class:`.BiasMeter`)."""
        return self._bias.accuracy(self._passed)

    def close(self) -> Decision:
        """End training: cancel rollouts in flight, whose outcomes the sampler still expects, and forget results."""
        for group in self._queue.usable:
            self._bias.gave_up(group.number)
            self._drop(group, "left_over", RolloutOutcome.LEFT_OVER)
        self._decision.cancel += self._in_flight.cancel_references()
        self._exhausted = True
        self.prefixes.backlog.clear()
        self._stop.not_run = 0  # decide() must not raise NothingToLearn after the end
        decision, self._decision = self._decision, Decision()
        return decision

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore` as JSON. Emitted batches count as trained on and are not saved."""
        return {  # the keys are the format of saved states
            "run": self._run,
            "version": self.version,
            "emitted": self.emitted,
            "submitted": self.submitted,
            "next_prompt": self._next_prompt,
            "next_number": self._next_number,
            "passed": self._passed,
            "fruitless": self._stop.zero_variance,
            "unrun": self._stop.not_run,
            "why": self._stop.reason,
            "queue": self._queue.state(),
            "flight": self._in_flight.state(),
            "bias": self._bias.state(),
            "settled": [self._admission.groups, self._admission.share],
            "fates": self.outcomes.state(),
            "dropped": dict(self.dropped),
            "curriculum": self._curriculum.state() if self._curriculum else None,
        }

    def restore(self, state: Mapping[str, Any]) -> Decision:
        """Continue from a saved state, on a new sampler.

        Returns:
            Rollouts to submit again under the same ids, and rollouts to cancel: those whose cancellation was pending,
            and those that are too old because ``max_staleness`` is smaller now.

        Raises:
            CallerError: ``group_size`` has changed, or another version of this package saved the state.
        """
        if missing := self.state().keys() - state.keys():
            raise CallerError(
                f"another version of nemo-gym-prorl saved the state: {min(missing)!r} is missing; train anew",
                field="state",
            )
        self._run, self._restore_id = state["run"], f"{uuid.uuid4().hex[:6]}."
        self._stop.zero_variance, self._stop.not_run = state["fruitless"], state["unrun"]
        self._stop.reason = state["why"]
        self.version, self.emitted = state["version"], state["emitted"]
        self.asked = self.emitted
        self.submitted = state["submitted"]
        self._next_prompt, self._next_number = state["next_prompt"], state["next_number"]
        self._passed = state["passed"]
        self._bias.restore(state["bias"], self._run)
        self._admission.groups, self._admission.share = state["settled"]
        self.outcomes = OutcomeTotals(state["fates"])
        self.dropped = Counter(state["dropped"])
        if self._curriculum and state["curriculum"] is not None:
            self._curriculum.restore(state["curriculum"])
        self._queue.restore(state["queue"])
        groups = [*self._queue.usable, *self._queue.zero_variance.values()]
        if sizes := {len(group.members) for group in groups} - {self.config.group_size}:
            raise CallerError(
                f"is {self.config.group_size}, and saved groups have {sizes.pop()} rollouts; set it to that",
                field="group_size",
            )
        self._in_flight = InFlightRollouts(self._run, self._bias, self.outcomes)
        again = self._in_flight.restore(state["flight"], groups)
        for group in [*self._queue.open.values()]:  # services may have deleted the checkpoints of prefixes
            if group.search is not None:
                self._drop(group, "left_over", RolloutOutcome.LEFT_OVER)
        self._restart_stale()
        decision, self._decision = self._decision, Decision()
        stale = {*decision.cancel}
        decision.cancel += again.cancel
        decision.submit = [submission for submission in again.submit if submission.rollout not in stale]
        return decision

    @property
    def _due(self) -> int:
        """Weight version of the batch that is being filled."""
        return self.config.first_version + self.emitted

    def _complete(self, group: Group) -> None:
        self._stop.completed_group(trainable=group.is_trainable)
        self._queue.drop(group.number)
        if group.is_trainable:
            self._queue.ready[group.number] = group
        else:
            self.dropped["no_variance"] += 1
            for member in group.members:
                self.outcomes.add(RolloutOutcome.NO_VARIANCE, member.usage)
                self._decision.forget.append(str(member.rollout))
            if group.search is None:
                self._queue.zero_variance[group.number] = group
        self.prefixes.plan(group, self._queue.usable)
        if group.search is not None and not group.is_trainable:
            self._settle(group)

    def _drop(self, group: Group, reason: str, outcome: RolloutOutcome) -> None:
        """Drop a group: cancel its running rollouts, and count its scored rollouts under ``outcome``."""
        self.dropped[reason] += 1
        self._queue.drop(group.number)
        for member in group.members:
            self._discard(group, member, outcome)

    def _discard(self, group: Group, member: Member, outcome: RolloutOutcome) -> None:
        if member.rollout is None:
            return
        if member.runs:
            self._decision.cancel += self._in_flight.abandon(group, member)
        else:
            self.outcomes.add(outcome, member.usage)
            self._decision.forget.append(member.rollout)
        member.reset()

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
        self._settle_zero_variance(self._passed)
        self._restart_stale()
        return batch

    def _certainly_passed(self) -> float:
        """Return the number below which all groups come before the end of the next batch, so none can start again."""
        first_open, wanted = self._queue.first_open(), self.config.groups_per_batch
        ready = sorted(number for number in self._queue.ready if number < first_open)
        return ready[wanted - 1] if len(ready) >= wanted else first_open

    def _settle_zero_variance(self, end: float) -> None:
        for number in sorted(number for number in self._queue.zero_variance if number < end):
            self._settle(self._queue.zero_variance.pop(number))

    def _settle(self, group: Group) -> None:
        """Pass the result of a group that cannot start again to admission and curriculum."""
        self._admission.settled(trainable=group.is_trainable)
        if self._curriculum and group.search is None:
            self._curriculum.saw(group.key, [member.accuracy for member in group.members])

    def _scored(self, number: int) -> list[BatchRollout]:
        group = self._queue.ready.pop(number)
        self._settle(group)
        trained = [member for member in group.members if not member.masked]
        self._bias.emitted(number, [(member.usage.length, member.accuracy) for member in trained])
        rollouts = []
        for member in group.members:
            if member.rollout is None or member.reward is None:
                raise AssertionError(f"group {number} is not complete")
            self.outcomes.add(RolloutOutcome.EMITTED, member.usage)
            rollouts.append(BatchRollout(member.rollout, member.reward, member.version, member.masked))
        return rollouts

    def _restart_stale(self) -> None:
        """Start groups again that have a rollout too old for the batch that is being filled."""
        for group in self._queue.older_than(self._due - self.config.max_staleness):
            self._restart(group, RolloutOutcome.STALE)

    def _restart(self, group: Group, outcome: RolloutOutcome) -> None:
        """Start all members of a group again, regardless of scores: resampling only some members would be biased."""
        results_are_forgotten = group.number in self._queue.zero_variance
        for member in group.members:
            if results_are_forgotten:
                member.reset()
            else:
                self._discard(group, member, outcome)
        self._queue.put(group)

    def _submit(self) -> None:
        """Submit rollouts up to ``max_in_flight``: waiting members of the oldest groups first, then new groups."""
        if self._due - self.version > self.config.max_staleness:
            return
        while self.in_flight < (self.config.max_in_flight or math.inf):
            next_one = self._queue.next_waiting() or self._next_group()
            if next_one is None:
                return
            group, member = next_one
            rollout = f"{self._run}:{group.number}:{member.index}:{self._restore_id}{member.tries}"
            self.submitted += 1
            self._decision.submit.append(self._in_flight.begin(group, member, rollout, self.version))

    def _next_group(self) -> tuple[Group, Member] | None:
        """Open the next group and return its first member; ``None`` if no batch could use another group now."""
        behind = self._due - self.version
        if (self._exhausted and not self.prefixes.backlog) or not self._admission.admits(
            len(self._queue.ready), len(self._queue.open), behind
        ):
            return None
        self._stop.check()
        if self.prefixes.backlog:
            return self._open(*self.prefixes.backlog.popleft())
        for _ in range(self._prompts.size):
            number = self._next_prompt
            prompt = self._prompts[number]
            if prompt is None:
                self._exhausted = True
                return None
            self._next_prompt += 1
            if self._curriculum and self._curriculum.skips(prompt.key):
                continue
            self._bias.opened(self._next_number, self.config.group_size)
            return self._open(number, prompt.key)
        raise NothingToLearn("the curriculum skips every prompt", field="curriculum")

    def _open(self, prompt: int, key: str, search: PrefixSearch | None = None) -> tuple[Group, Member] | None:
        members = [Member(index) for index in range(self.config.group_size)]
        self._queue.put(Group(self._next_number, prompt, key, members, search))
        self._next_number += 1
        return self._queue.next_waiting()
