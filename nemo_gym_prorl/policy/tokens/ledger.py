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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.policy.generation import Finish, Generation


class TokenMismatch(InfrastructureError):
    """What an engine answered cannot be the tokens of this rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of the policy. Immutable, and linked to the turn whose sequence it continues.

    Attributes:
        parent: the turn that this one continues; ``None`` for the first turn of a branch.
        observed: ids rendered since the parent's end; the whole prompt for a first turn.
        sampled: ids that the policy sampled.
        log_probs: one per sampled id.
        weight_version: the weights with which sampling began, if the backend has a label for them.
        last_version: those with which it ended; others than at first where weights changed meanwhile.
        finish: why sampling ended.
        start: number of tokens before ``sampled``, that is the length of the prompt.
    """

    parent: Turn | None
    observed: tuple[int, ...]
    sampled: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_version: str | None
    last_version: str | None
    finish: Finish
    start: int

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
    """One branch as a trainer wants it. ``ids``, ``mask`` and ``log_probs`` have equal length."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    log_probs: tuple[float, ...]
    spans: tuple[Span, ...]


class TokenLedger:
    """The turns of one rollout, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._with_children: set[Turn] = set()
        self._by_tokens: dict[tuple[int, tuple[int, ...]], list[Turn]] = {}

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
            TokenMismatch: log-probs are missing or not numbers, or the prompt is empty.
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
        turn = Turn(
            parent=parent,
            observed=tuple(observed),
            sampled=tuple(generation.ids),
            log_probs=tuple(generation.log_probs),
            weight_version=weight_version,
            last_version=last_version,
            finish=generation.finish,
            start=(parent.end if parent else 0) + len(observed),
        )
        self.turns.append(turn)
        self._by_tokens.setdefault((turn.start, turn.sampled), []).append(turn)
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
        alike = self._by_tokens.get((len(prompt_ids), tuple(sampled)), ())
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
        ids: list[int] = []
        mask: list[bool] = []
        log_probs: list[float] = []
        spans: list[Span] = []
        for turn in leaf.path():
            trained = turn not in seen
            seen.add(turn)
            ids += turn.observed + turn.sampled
            mask += [False] * len(turn.observed) + [trained] * len(turn.sampled)
            log_probs += (0.0,) * len(turn.observed) + turn.log_probs
            spans.append(Span(turn.start - len(turn.observed), turn.start, False, None))
            spans.append(Span(turn.start, turn.end, trained, turn.weight_version))
        return TrainingSequence(tuple(ids), tuple(mask), tuple(log_probs), tuple(s for s in spans if s.end > s.start))
