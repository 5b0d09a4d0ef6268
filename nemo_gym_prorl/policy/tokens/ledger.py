# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of a rollout, exactly as they were sampled.

Text is a lossy view of tokens: many token sequences decode to the same text, and only one of them was sampled. So a
rollout is kept as a tree of *turns*, each of which adds two things to its parent's sequence: ids that were *observed*
(rendered from new messages, never trained on) and ids that were *sampled* (with their log-probs and the weights that
sampled them). A turn cannot be built any other way, which gives the invariants for nothing:

- a turn's prompt is its parent's whole sequence followed by the newly observed ids: an exact prefix chain;
- what was sampled is never tokenised again;
- ids, log-probs and mask of a sequence have equal length.

Two turns with the same parent are two *branches*: the history was sampled twice, or rewritten. Pure: no task, socket,
clock or thread.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.http.routed_experts import last_rows
from nemo_gym_prorl.policy.generation import Finish, Generation


class TokenMismatch(InfrastructureError):
    """What an engine answered cannot be the tokens of this rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of the policy. Never changed, and linked to the turn whose sequence it continues.

    Numbers are kept packed: as objects of their own they are most of what thousands of rollouts keep, and are strewn
    over memory.

    Attributes:
        parent: the turn that this one continues; ``None`` for the first turn of a branch.
        observed: ids rendered since the parent's end (uint32); the whole prompt for a first turn.
        sampled: ids that the policy sampled (uint32).
        log_probs: one per sampled id (float64).
        weight_version: the weights with which sampling began, if the backend has a label for them.
        last_version: those with which it ended; others than at first where weights changed meanwhile.
        finish: why sampling ended.
        start: number of tokens before ``sampled``, that is the length of the prompt.
        routed_experts: of these ids and the last one before, where the engine tells.
    """

    parent: Turn | None
    observed: array[int]
    sampled: array[int]
    log_probs: array[float]
    weight_version: str | None
    last_version: str | None
    finish: Finish
    start: int
    routed_experts: str | None = None

    @property
    def end(self) -> int:
        """Length of the sequence with this turn's sampled ids."""
        return self.start + len(self.sampled)

    def path(self) -> list[Turn]:
        """The turns from the first one of the branch to this one."""
        turns = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        turns.reverse()
        return turns

    def sequence(self) -> list[int]:
        """All token ids up to the end of this turn."""
        ids: list[int] = []
        for turn in self.path():
            ids.extend(turn.observed)
            ids.extend(turn.sampled)
        return ids

    def prompt(self) -> list[int]:
        """The ids that this turn was sampled from."""
        return self.sequence()[: self.start]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch ``[start, end)`` of a sequence that has one source."""

    start: int
    end: int
    sampled: bool
    weight_version: str | None


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One branch as a trainer wants it. ``ids``, ``log_probs`` and ``mask`` have equal length.

    Attributes:
        ids: all token ids (uint32).
        log_probs: of the sampled ones, 0 for all others (float64).
        spans: who is the source of which stretch, from the first token to the last.
    """

    ids: array[int]
    log_probs: array[float]
    spans: tuple[Span, ...]

    @property
    def mask(self) -> list[int]:
        """1 for what is trained on, 0 for all else."""
        mask: list[int] = []
        for span in self.spans:
            mask += [int(span.sampled)] * (span.end - span.start)
        return mask


class TokenLedger:
    """The turns of one rollout, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._with_children: set[Turn] = set()
        self._by_tokens: dict[tuple[int, int], list[Turn]] = {}

    def append(
        self,
        parent: Turn | None,
        observed: Sequence[int],
        generation: Generation,
        weight_version: str | None = None,
        last_version: str | None = None,
    ) -> Turn:
        """Record a turn, with the labels of the weights when its sampling began and ended.

        Raises:
            TokenMismatch: log-probs are missing or not numbers, ids are none, the prompt is empty, or a token has no
                experts where others have.
        """
        if parent is None and not observed:
            raise TokenMismatch("the prompt has no tokens: the engine or the chat template rendered nothing")
        if len(generation.ids) != len(generation.log_probs):
            raise TokenMismatch(
                f"{len(generation.ids)} tokens were sampled but {len(generation.log_probs)} log-probs came with them: "
                "the engine must return the log-prob of every sampled token"
            )
        if None in generation.log_probs or not all(map(math.isfinite, generation.log_probs)):
            raise TokenMismatch("a sampled token has a log-prob that is not a finite number")
        experts = generation.routed_experts
        if experts is not None:
            own = len(observed) + len(generation.ids)
            try:
                experts = last_rows(experts, own if parent is None else own + 1)
            except ValueError as error:
                raise TokenMismatch(str(error)) from error
        turn = Turn(
            parent=parent,
            observed=packed_ids(observed),
            sampled=packed_ids(generation.ids),
            log_probs=array("d", generation.log_probs),
            weight_version=weight_version,
            last_version=last_version,
            finish=generation.finish,
            start=(parent.end if parent else 0) + len(observed),
            routed_experts=experts,
        )
        self.turns.append(turn)
        self._by_tokens.setdefault((turn.start, hash_of_ids(turn.sampled)), []).append(turn)
        if parent is not None:
            self._with_children.add(parent)
        return turn

    def place(self, prompt_ids: Sequence[int], candidate: Turn | None) -> tuple[Turn | None, list[int]]:
        """Split a prompt that an engine rendered into the turn it continues and what it adds.

        The candidate is kept if its sequence is an exact prefix of the prompt; otherwise the engine rewrote history,
        and the prompt starts a branch of its own.
        """
        ids = list(prompt_ids)
        if candidate is not None and ids[: candidate.end] == candidate.sequence():
            return candidate, ids[candidate.end :]
        return None, ids

    def forks(self, parent: Turn | None) -> bool:
        """Whether a turn after this one, or a first turn, would start a branch beside one that is there."""
        return parent in self._with_children if parent is not None else bool(self.turns)

    def find(self, prompt_ids: Sequence[int], sampled: Sequence[int]) -> Turn | None:
        """The latest turn with exactly these tokens."""
        ids = packed_ids(sampled)
        alike = [turn for turn in self._by_tokens.get((len(prompt_ids), hash_of_ids(ids)), ()) if turn.sampled == ids]
        prompt = list(prompt_ids)
        return next((turn for turn in reversed(alike) if turn.prompt() == prompt), None)

    def leaves(self) -> Iterator[Turn]:
        """The last turn of every branch."""
        return (turn for turn in self.turns if turn not in self._with_children)

    @property
    def branches(self) -> int:
        """Number of sequences that it takes to hold all sampled tokens; 1 for a rollout whose history never forked."""
        return sum(1 for _ in self.leaves())

    def sequences(self) -> list[TrainingSequence]:
        """Every branch as a training sequence.

        A turn that several branches share is marked as sampled in the first of them only, so that no sampled token is
        trained on twice.
        """
        seen: set[Turn] = set()
        return [self._sequence(leaf, seen) for leaf in self.leaves()]

    @staticmethod
    def _sequence(leaf: Turn, seen: set[Turn]) -> TrainingSequence:
        ids, log_probs, spans = array("I"), array("d"), list[Span]()
        for turn in leaf.path():
            trained = turn not in seen
            seen.add(turn)
            ids += turn.observed + turn.sampled
            log_probs += array("d", bytes(log_probs.itemsize * len(turn.observed))) + turn.log_probs
            spans.append(Span(turn.start - len(turn.observed), turn.start, False, None))
            spans.append(Span(turn.start, turn.end, trained, turn.weight_version))
        return TrainingSequence(ids, log_probs, tuple(span for span in spans if span.end > span.start))


def packed_ids(ids: Sequence[int]) -> array[int]:
    """Ids as they are kept.

    Raises:
        TokenMismatch: what cannot be one is among them.
    """
    try:
        return array("I", ids)
    except (OverflowError, TypeError) as error:
        raise TokenMismatch(f"not a token id: {error}") from error


def hash_of_ids(ids: Sequence[int]) -> int:
    """Equal for equal ids, in whatever sequence."""
    return hash((ids if isinstance(ids, array) else packed_ids(ids)).tobytes())
