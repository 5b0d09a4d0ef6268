# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer may ask of the sampler, and what the sampler decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nemo_gym_prorl.dapo.prefixes import Prefix
from nemo_gym_prorl.failures import CallerError


class AgentFailures(StrEnum):
    """What becomes of a rollout that the policy itself brought to a bad end: it used up its time, its turns or its
    tokens, or gave nothing that can be scored. It is an outcome, never a reason to sample again: what is redrawn until
    it fits is as short as the budget."""

    ZERO = "zero"
    """Reward and accuracy 0, trained on."""
    MASK = "mask"
    """No loss, and no part in variance and baseline of the group: trained rollouts are shorter than sampled ones."""


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """What a trainer wants.

    Attributes:
        groups_per_batch: prompts of a batch.
        group_size: rollouts of each prompt, at least 2: one alone has no variance.
        max_in_flight: rollouts that may be submitted and have no outcome, at least a group: what the services run at
            once, if it is known. ``None``: as many as can still be trained on.
        max_staleness: weight versions between a rollout's first token and the batch that uses it.
        max_failures: tries of a member that the machines may break; one more drops its group.
        filter_on: the field of a verdict that says how good a rollout was, by which groups vary. ``None``: the reward,
            where it is 0 or 1, and an error where it is not (:mod:`nemo_gym_prorl.dapo.outcome`).
        agent_failures: what a rollout counts as that the policy brought to a bad end.
        reference_share: of prompts whose first tries always run to their end, as what bias is measured against, 0 to
            1. They cost what would have been cancelled of them.
        max_fruitless: so many groups in a row without variance end the training.
        max_dropped: so many groups in a row that can't be run end it, too.
        first_version: weights of the first batch.
        prefix_tries: groups that begin at a prefix after one without variance, at most. Faster where most have none,
            and **trains on other prompts and states** (:mod:`nemo_gym_prorl.dapo.prefixes`).
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
            raise CallerError(f"it must be one of {', '.join(names)}", field="agent_failures")
        if not isinstance(self.reference_share, int | float) or not 0 <= self.reference_share <= 1:
            raise CallerError("it must be a share, from 0 to 1", field="reference_share")
        least = {"groups_per_batch": 1, "group_size": 2, "max_in_flight": 1, "max_fruitless": 1, "max_dropped": 1}
        for name in ("max_staleness", "max_failures", "prefix_tries"):
            least[name] = 0
        for name, bound in least.items():
            value = getattr(self, name)
            if value is None and name == "max_in_flight":
                continue
            if type(value) is not int or value < bound:
                raise CallerError(f"it must be a whole number, at least {bound}", field=name)
        if self.max_in_flight is not None and self.max_in_flight < self.group_size:
            # Where a verifier compares siblings, those that are there would wait for the others for ever.
            raise CallerError(
                f"{self.max_in_flight} rollouts are fewer than a group of {self.group_size}; at least "
                f"{self.group_size} (group_size): what the services do not run at once waits there",
                field="max_in_flight",
            )


class NothingToLearn(CallerError):
    """No group has had variance for long, none can be run, or the curriculum leaves every prompt out."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A rollout to submit.

    Attributes:
        rollout: its id.
        group: the id that its siblings share.
        prompt: number of its prompt in the stream.
        version: weights of now.
        urgent: whether siblings wait for it already.
        prefix: where it begins, if not at the prompt.
    """

    rollout: str
    group: str
    prompt: int
    version: int
    urgent: bool
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout of a batch.

    Attributes:
        rollout: its id.
        reward: raw, as its environment gave it.
        version: weights that it began under.
        masked: whether it gets no loss, and does not enter the baseline of its group.
    """

    rollout: str
    reward: float
    version: int
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups to train on, each with variance, and of equal size.

    Attributes:
        number: of the batch, from 0.
        version: weights that it is meant for.
        groups: by group's number, its rollouts in the order of members.
        prompts: by group's number, that of its prompt in the stream.
    """

    number: int
    version: int
    groups: dict[int, list[Scored]]
    prompts: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Decision:
    """What is to be done now.

    Attributes:
        submit: rollouts, those that others wait for first.
        cancel: ids of rollouts whose outcome nobody needs; it must be told all the same.
        forget: ids of scored rollouts that are of no use any more.
        batches: those that became complete.
    """

    submit: list[Submission] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
