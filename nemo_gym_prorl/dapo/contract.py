# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the sampler, and the types of its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nemo_gym_prorl.dapo.group import Prefix
from nemo_gym_prorl.failures import CallerError


class AgentFailures(StrEnum):
    """Treatment of agent failures: a rollout that exceeds its time, turn or token limit, or has no scorable result.

    An agent failure is an outcome and is never sampled again: resampling until a rollout fits its budget would train
    on short rollouts only.
    """

    ZERO = "zero"
    """Reward and accuracy 0, trained on."""
    MASK = "mask"
    """No loss, and excluded from variance and baseline of the group; biases training to shorter rollouts."""


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """Settings of :class:`~nemo_gym_prorl.dapo.sampler.DynamicSampler`.

    Attributes:
        groups_per_batch: prompts of a batch.
        group_size: rollouts of each prompt, at least 2; a single rollout has no variance.
        max_in_flight: maximum number of submitted rollouts without an outcome, at least ``group_size``. ``None``: only
            the number of groups that can still be trained on bounds the rollouts.
        max_staleness: maximum number of weight versions between a rollout's first token and the batch that uses it.
        max_failures: maximum number of infrastructure failures of a member; one more failure drops the group.
        filter_on: verdict field that is the accuracy, by which groups vary. ``None``: the reward, which must be 0 or 1
            (:mod:`nemo_gym_prorl.dapo.scoring`).
        agent_failures: treatment of agent failures.
        reference_share: share of prompts whose first tries always run to their end, to measure bias, 0 to 1.
            References cost the work that cancelling their rollouts would have saved.
        max_fruitless: number of consecutive zero-variance groups after which training ends.
        max_dropped: number of consecutive groups that could not be run after which training ends.
        first_version: weight version of the first batch.
        prefix_tries: maximum number of groups that begin at a prefix after a zero-variance group. Prefix groups
            **change the training distribution** (:mod:`nemo_gym_prorl.dapo.group`).

    Raises:
        CallerError: a setting has an invalid type or is out of range.
    """

    groups_per_batch: int
    group_size: int
    max_in_flight: int | None = None
    max_staleness: int = 4
    max_failures: int = 3
    filter_on: str | None = None
    agent_failures: AgentFailures = AgentFailures.ZERO
    reference_share: float = 0.125
    max_fruitless: int = 1000
    max_dropped: int = 32
    first_version: int = 0
    prefix_tries: int = 0

    def __post_init__(self) -> None:
        if self.agent_failures not in (names := [*AgentFailures]):
            raise CallerError(f"must be one of {', '.join(names)}", field="agent_failures")
        if not isinstance(self.reference_share, int | float) or not 0 <= self.reference_share <= 1:
            raise CallerError("must be a number from 0 to 1", field="reference_share")
        least = {"groups_per_batch": 1, "group_size": 2, "max_in_flight": 1, "max_fruitless": 1, "max_dropped": 1}
        for name in ("max_staleness", "max_failures", "prefix_tries"):
            least[name] = 0
        for name, bound in least.items():
            value = getattr(self, name)
            if value is None and name == "max_in_flight":
                continue
            if type(value) is not int or value < bound:
                raise CallerError(f"must be an integer of at least {bound}", field=name)
        if self.max_in_flight is not None and self.max_in_flight < self.group_size:
            # A verifier that compares siblings would wait forever for members that are never submitted.
            raise CallerError(
                f"{self.max_in_flight} is less than group_size ({self.group_size}); set at least {self.group_size}: "
                "a service queues rollouts that it cannot run at once",
                field="max_in_flight",
            )


class NothingToLearn(CallerError):
    """No recent group has variance or could be run, or the curriculum skips every prompt."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A rollout to submit.

    Attributes:
        rollout: id of the rollout.
        group: id that all rollouts of the group share.
        prompt: number of the prompt in the stream of prompts.
        version: weight version under which the rollout begins.
        urgent: whether siblings of the rollout are scored already.
        prefix: prefix at which the rollout begins; ``None`` if it begins at the prompt.
    """

    rollout: str
    group: str
    prompt: int
    version: int
    urgent: bool
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True)
class BatchRollout:
    """A scored rollout of a batch.

    Attributes:
        reward: raw reward of the environment.
        version: weight version under which the rollout began.
        masked: whether the rollout gets no loss and does not enter the baseline of its group.
    """

    rollout: str
    reward: float
    version: int
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of equal size to train on, each with variance.

    Attributes:
        number: batch number, from 0.
        version: weight version that the batch trains.
        groups: rollouts in the order of members, by group number.
        prompts: prompt numbers by group number.
    """

    number: int
    version: int
    groups: dict[int, list[BatchRollout]]
    prompts: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Decision:
    """Actions that the sampler asks its runner for.

    Attributes:
        submit: rollouts to submit, in order of urgency.
        cancel: ids of rollouts to cancel; the sampler still expects their outcomes.
        forget: ids of scored rollouts whose results can be deleted.
        batches: batches that became complete.
    """

    submit: list[Submission] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
