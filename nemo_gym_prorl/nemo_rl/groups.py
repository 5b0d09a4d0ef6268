# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of groups to NeMo RL's training records.

Pure, except for :func:`record_of`, which needs NeMo RL and torch.

Invariants:

- A sequence alternates observed tokens (prompts, tool results) with sampled tokens. The prompt of each turn begins
  with all tokens before the turn. A rollout is one sequence, or several if its agent compacted its context. Each
  sampled token is trained on in one sequence, with the advantage of the rollout.
- NeMo RL trains on messages with log-probabilities, so only messages of sampled tokens get log-probabilities.
- A rollout that is masked or has no valid tokens has no sequences and gets no loss. The rollout's reward stays in the
  metrics and does not enter the baseline of its siblings (:class:`~.controller_replacements.GroupAdvantages`).
- Turns that a rollout inherited from a prefix become part of its prompt, so their tokens are not trained on.
- A group of which no rollout has tokens is an error: the model server does not return tokens.
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

type RewardFunction = Callable[[float, int], float]
"""Function from a raw reward and the length of the whole sequence in tokens to the reward to train on."""


@dataclass(frozen=True, slots=True)
class TrainingMember:
    """One rollout of a training group.

    Attributes:
        rollout: id of the rollout.
        sequences: sequences to train on, each as turns; empty if the rollout gets no loss.
        reward: reward after scaling and overlong penalty.
        version: weight version under which the rollout began.
    """

    rollout: str
    sequences: tuple[tuple[TurnTokens, ...], ...]
    reward: float
    version: int


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The rollouts of one prompt.

    Attributes:
        prompt: token ids of the prompt, from the first rollout that has tokens.
        members: ``grpo.num_generations_per_prompt`` rollouts.
        row: dataset row.
    """

    prompt: Sequence[int]
    members: tuple[TrainingMember, ...]
    row: Mapping[str, Any]

    @property
    def version(self) -> int:
        """Oldest weight version under which a rollout of the group began."""
        return min(member.version for member in self.members)


def turns_of(tokens: Sequence[TurnTokens], inherited: int = 0) -> tuple[TurnTokens, ...]:
    """Return the turns with sampled tokens; inherited turns become observed tokens of the first turn after them.

    Args:
        tokens: turns of a rollout.
        inherited: number of first turns that were inherited from a prefix.

    Raises:
        ValueError: no turn has sampled tokens, or the turns are not one sequence.
    """
    turns: list[TurnTokens] = []
    seen, inherited_turns = 0, 0
    for index, turn in enumerate(tokens):
        if not turn.sampled:
            continue
        if turn.kept != seen:
            raise ValueError(f"the prompt of response.output.{turn.item} does not begin with the tokens before it")
        turns.append(turn)
        inherited_turns += index < inherited
        seen += len(turn.observed) + len(turn.sampled)
    if inherited_turns:
        turns[: inherited_turns + 1] = _as_prompt(turns[:inherited_turns], turns[inherited_turns:])
    if not turns:
        raise ValueError("no item of response.output has sampled token ids with log-probabilities")
    return tuple(turns)


def _as_prompt(inherited: Sequence[TurnTokens], others: Sequence[TurnTokens]) -> list[TurnTokens]:
    """Return the first of ``others`` with the inherited turns' tokens as part of its prompt; empty without others."""
    if not others:
        return []
    prompt, experts = array[int]("i"), None
    for turn in inherited:
        prompt += turn.observed + turn.sampled
        experts = continued(experts, turn.routed_experts, len(prompt))
    prompt += others[0].observed
    experts = continued(experts, others[0].routed_experts, len(prompt) + len(others[0].sampled))
    return [replace(others[0], kept=0, observed=prompt, routed_experts=experts)]


def training_group(rollouts: Sequence[TrainedRollout], reward_of: RewardFunction) -> TrainingGroup:
    """Convert a group of a batch.

    Args:
        rollouts: rollouts of one prompt.
        reward_of: scaling and overlong penalty of rewards.

    Raises:
        CallerError: no rollout has tokens to train on.
    """
    members, prompts, why = [], [], ""
    for rollout in rollouts:
        try:
            sequences = tuple(map(turns_of, rollout.traces)) or (turns_of(rollout.tokens, rollout.inherited),)
        except ValueError as error:
            why = str(error)
            LOG.warning("rollout %s gets no loss: %s", rollout.id, why)
            sequences = ()
        lengths = (sum(len(turn.observed) + len(turn.sampled) for turn in turns) for turns in sequences)
        reward = reward_of(rollout.reward, max(lengths, default=0))
        prompts += [turns[0].observed for turns in sequences[:1]]
        members.append(TrainingMember(rollout.id, () if rollout.masked else sequences, reward, rollout.version))
    if not prompts:
        raise CallerError(
            f"the rollouts of a group have no tokens to train on ({why}); set return_token_id_information: true "
            "at the model server",
            field="response.output",
        )
    return TrainingGroup(prompts[0], tuple(members), rollouts[0].prompt)


def with_loss(groups: Iterable[TrainingGroup]) -> list[bool]:
    return [bool(member.sequences) for group in groups for member in group.members]


def rows_of(group: TrainingGroup, multiple: int = 1) -> list[tuple[int, tuple[TurnTokens, ...]]]:
    """Return the group's training rows: the index of each row's member, and the row's turns.

    A member has a row for each sequence, or one row without turns. The number of rows beyond one per member is filled
    up to a multiple of ``multiple`` by rows without turns and with index -1, because NeMo RL divides a batch evenly.
    """
    rows = [(index, turns) for index, member in enumerate(group.members) for turns in member.sequences or ((),)]
    return rows + [(-1, ())] * ((len(group.members) - len(rows)) % multiple)


def record_of(group: TrainingGroup, number: int, multiple: int = 1) -> PromptGroupRecord:
    """Convert a training group to NeMo RL's record, with a completion for each of :func:`rows_of`.

    Args:
        group: training group with the number of rollouts that NeMo RL expects.
        number: number of the group in this training run.
        multiple: see :func:`rows_of`.
    """
    from nemo_rl.experience.interfaces import Completion, PromptGroupRecord

    completions = [
        Completion(
            message_log=_message_log(turns, group.prompt),
            env_extras={"rollout": group.members[index].rollout, "weight_version": group.members[index].version},
            truncated=False,
            reward=group.members[index].reward,
        )
        for index, turns in rows_of(group, multiple)
    ]
    return PromptGroupRecord(
        prompt_idx=number,
        prompt=[_message("user", group.prompt)],
        extra_env_info=dict(group.row),
        metadata={"task_name": "nemo_gym"},
        completions=completions,
        rollout_metrics={},
    )


def _message_log(turns: Sequence[TurnTokens], prompt: Sequence[int]) -> list[dict[str, Any]]:
    if not turns:
        return [_message("user", prompt)]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append(_message("user", turn.observed))
        messages.append(_message("assistant", turn.sampled, turn.log_probs))
        if turn.routed_experts is not None:
            add_experts(messages, turn)
    return messages


def add_experts(messages: list[dict[str, Any]], turn: TurnTokens) -> None:
    """Set the experts of the last two messages, which are those of ``turn``.

    The last token of the previous turn gets its experts from ``turn`` as well. An engine routes a token when it is
    read, which for the last sampled token of a turn happens in the next turn.
    """
    import torch

    assert turn.routed_experts is not None
    before = messages[-3].get("routed_experts") if len(messages) > 2 else None
    shared, own = int(before is not None), len(turn.observed) + len(turn.sampled)
    experts = RoutedExperts.read(turn.routed_experts)
    rows = torch.frombuffer(bytearray(experts.last(own + shared)), dtype=getattr(torch, experts.numbers))
    rows = rows.reshape(own + shared, experts.layers, experts.top)
    if before is not None:
        before[-1] = rows[0]
    messages[-2]["routed_experts"], messages[-1]["routed_experts"] = (
        rows[shared : shared + len(turn.observed)],
        rows[shared + len(turn.observed) :],
    )


def _message(role: str, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> dict[str, Any]:
    import torch

    message = {"role": role, "content": "", "token_ids": torch.tensor(tokens, dtype=torch.int64)}
    if log_probs is not None:
        message["generation_logprobs"] = torch.tensor(log_probs, dtype=torch.float32)
    return message
