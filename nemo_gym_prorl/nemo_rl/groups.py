# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From a finished group to what NeMo RL trains on: tokens as they were sampled, and which of them the policy chose.

Each turn's prompt begins with all tokens before it; so a conversation is one sequence, in which prompts and what tools
answered alternate with what was sampled. NeMo RL knows the latter by its log-probabilities: a message without them is
not trained on.

A rollout without a loss is masked, or has no tokens that can be trusted. Such a rollout has no turns here. Its reward
stays in the metrics, and does not enter the baseline of its siblings (``GroupAdvantages``). What a
rollout has of the one from whose prefix it began belongs to its prompt: nothing of it is trained on. NeMo RL tells
groups apart by their prompts, so that rollout is not taken for one that began elsewhere. A group in which no rollout
has tokens is a deployment that does not keep them, and an error.

Pure, but for :func:`record_of`, which needs NeMo RL and torch.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.dapo.runner import TrainedRollout
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.routed_experts import RoutedExperts, continued
from nemo_gym_prorl.rollout.gym_rows import TurnTokens


if TYPE_CHECKING:
    from nemo_rl.experience.interfaces import PromptGroupRecord

LOG = logging.getLogger(__name__)

type Shape = Callable[[float, int], float]
"""The reward to train on, of a raw reward and the number of tokens that the policy sampled."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One rollout of a group, as it is trained on.

    Attributes:
        rollout: its id.
        turns: none, if it is not to be trained on.
        reward: after scaling and shaping.
        version: weights that it began under.
    """

    rollout: str
    turns: tuple[TurnTokens, ...]
    reward: float
    version: int


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt.

    Attributes:
        prompt: tokens of the first prompt.
        members: as many as ``grpo.num_generations_per_prompt``.
        row: of the data set.
    """

    prompt: Sequence[int]
    members: tuple[Sampled, ...]
    row: Mapping[str, Any]

    @property
    def version(self) -> int:
        """The oldest weights among those that its rollouts began under."""
        return min(member.version for member in self.members)


def turns_of(tokens: Sequence[TurnTokens], inherited: int = 0) -> tuple[TurnTokens, ...]:
    """The turns in which something was sampled; of the first one, all that was inherited counts as observed.

    Raises:
        ValueError: there are none, or they are not one sequence.
    """
    turns: list[TurnTokens] = []
    seen, taken_over = 0, 0
    for place, turn in enumerate(tokens):
        if not turn.sampled:
            continue
        if turn.kept != seen:
            raise ValueError(f"the prompt of response.output.{turn.item} does not begin with the tokens before it")
        turns.append(turn)
        taken_over += place < inherited
        seen += len(turn.observed) + len(turn.sampled)
    if taken_over:
        turns[: taken_over + 1] = _as_prompt(turns[:taken_over], turns[taken_over:])
    if not turns:
        raise ValueError("no item of response.output has ids that were sampled, with a log-probability for each")
    return tuple(turns)


def _as_prompt(inherited: Sequence[TurnTokens], others: Sequence[TurnTokens]) -> list[TurnTokens]:
    """The first of the other turns, if there is one, with all tokens that were inherited as part of its prompt."""
    if not others:
        return []
    prompt, experts = array[int]("i"), None
    for turn in inherited:
        prompt += turn.observed + turn.sampled
        experts = continued(experts, turn.routed_experts, len(prompt))
    prompt += others[0].observed
    experts = continued(experts, others[0].routed_experts, len(prompt) + len(others[0].sampled))
    return [replace(others[0], kept=0, observed=prompt, routed_experts=experts)]


def group_of(rollouts: Sequence[TrainedRollout], shape: Shape) -> Group:
    """A group of the sampler's, with rewards as they are trained on.

    Raises:
        CallerError: none of its rollouts has tokens to train on.
    """
    members, prompts, why = [], [], ""
    for rollout in rollouts:
        try:
            turns = turns_of(rollout.tokens, rollout.inherited)
        except ValueError as error:
            why = str(error)
            LOG.warning("%s gets no loss: %s", rollout.id, why)
            turns = ()
        length = sum(len(turn.observed) + len(turn.sampled) for turn in turns)
        prompts += [turn.observed for turn in turns[:1]]
        trained = () if rollout.masked else turns
        members.append(Sampled(rollout.id, trained, shape(rollout.reward, length), rollout.version))
    if not prompts:
        raise CallerError(
            f"the rollouts of a group have no tokens to train on ({why}); the model server must keep them "
            "(return_token_id_information: true)",
            field="response.output",
        )
    return Group(prompts[0], tuple(members), rollouts[0].prompt)


def with_loss(groups: Iterable[Group]) -> list[bool]:
    """Of each rollout, whether it is trained on."""
    return [bool(member.turns) for group in groups for member in group.members]


def record_of(group: Group, number: int) -> PromptGroupRecord:
    """The group in NeMo RL's terms.

    Args:
        group: of as many rollouts as NeMo RL expects.
        number: of the group in this run.
    """
    from nemo_rl.experience.interfaces import Completion, PromptGroupRecord

    completions = [
        Completion(
            message_log=_message_log(member, group.prompt),
            env_extras={"rollout": member.rollout, "weight_version": member.version},
            truncated=False,
            reward=member.reward,
        )
        for member in group.members
    ]
    return PromptGroupRecord(
        prompt_idx=number,
        prompt=[_message("user", group.prompt)],
        extra_env_info=dict(group.row),
        metadata={"task_name": "nemo_gym"},
        completions=completions,
        rollout_metrics={},
    )


def _message_log(member: Sampled, prompt: Sequence[int]) -> list[dict[str, Any]]:
    if not member.turns:
        return [_message("user", prompt)]
    messages: list[dict[str, Any]] = []
    for turn in member.turns:
        messages.append(_message("user", turn.observed))
        messages.append(_message("assistant", turn.sampled, turn.log_probs))
        if turn.routed_experts is not None:
            add_experts(messages, turn)
    return messages


def add_experts(messages: list[dict[str, Any]], turn: TurnTokens) -> None:
    """Give a turn's two messages, which are the last, the experts of their tokens; the token before gets those with
    which it was read, since it had none while it was the last that was sampled."""
    import torch

    assert turn.routed_experts is not None
    before = messages[-3].get("routed_experts") if len(messages) > 2 else None
    seam, own = int(before is not None), len(turn.observed) + len(turn.sampled)
    told = RoutedExperts.read(turn.routed_experts)
    rows = torch.frombuffer(bytearray(told.last(own + seam)), dtype=getattr(torch, told.numbers))
    rows = rows.reshape(own + seam, told.layers, told.top)
    if before is not None:
        before[-1] = rows[0]
    messages[-2]["routed_experts"], messages[-1]["routed_experts"] = (
        rows[seam : seam + len(turn.observed)],
        rows[seam + len(turn.observed) :],
    )


def _message(role: str, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> dict[str, Any]:
    import torch

    message = {"role": role, "content": "", "token_ids": torch.tensor(tokens, dtype=torch.int64)}
    if log_probs is not None:
        message["generation_logprobs"] = torch.tensor(log_probs, dtype=torch.float32)
    return message
