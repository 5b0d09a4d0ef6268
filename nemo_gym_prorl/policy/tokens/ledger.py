# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of a rollout, exactly as they were sampled.

Text is a lossy view of tokens: many token sequences decode to the same text, and only one of them was sampled. A
rollout is therefore a tree of *turns*. Each turn adds two things to its parent's sequence: *observed* ids (rendered
from new messages, never trained on) and *sampled* ids (with log-probs and weight labels).

Turns can only be built by :meth:`TokenLedger.append`, so these invariants hold by construction:

- a turn's prompt is its parent's whole sequence followed by the newly observed ids: an exact prefix chain;
- sampled ids are never tokenised again;
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
    """An engine's answer cannot be the tokens of this rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class LedgerTurn:
    """One immutable turn of the policy, linked to the turn whose sequence it continues.

    Numbers are stored in packed arrays, which take 4 bytes an id and 8 a log-prob.

    Attributes:
        parent: the turn that this turn continues; ``None`` if the prompt continues none.
        observed: prompt ids after the parent's sequence (uint32); without a parent, the whole prompt.
        sampled: ids that the policy sampled (uint32).
        log_probs: log-prob of each sampled id (float64).
        weight_version: label of the weights when sampling began, if the backend has one.
        last_version: label of the weights when sampling ended; differs after an update during sampling.
        finish: why sampling ended.
        start: length of the prompt, that is the number of ids before ``sampled``.
        routed_experts: experts of this turn's ids and of the last id before, where the engine reports experts.
    """

    parent: LedgerTurn | None
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
        """Length of the sequence including this turn's sampled ids."""
        return self.start + len(self.sampled)

    def path(self) -> list[LedgerTurn]:
        """Return the turns of the branch up to this turn, in order."""
        turns = []
        turn: LedgerTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        turns.reverse()
        return turns

    def sequence(self) -> list[int]:
        """Return all token ids up to the end of this turn."""
        ids: list[int] = []
        for turn in self.path():
            ids.extend(turn.observed)
            ids.extend(turn.sampled)
        return ids

    def prompt(self) -> list[int]:
        """Return the ids that this turn was sampled from."""
        return self.sequence()[: self.start]


@dataclass(frozen=True, slots=True)
class Span:
    """Part ``[start, end)`` of a sequence that is either all trained on (``sampled``) or not at all."""

    start: int
    end: int
    sampled: bool
    weight_version: str | None


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One branch in the form that a trainer needs. ``ids``, ``log_probs`` and ``mask`` have equal length.

    Attributes:
        ids: all token ids (uint32).
        log_probs: log-probs of the sampled ids, 0 for observed ids (float64).
        spans: consecutive spans that cover the sequence.
    """

    ids: array[int]
    log_probs: array[float]
    spans: tuple[Span, ...]

    @property
    def mask(self) -> list[int]:
        """Mask of the sequence: 1 for each token that is trained on, else 0."""
        mask: list[int] = []
        for span in self.spans:
            mask += [int(span.sampled)] * (span.end - span.start)
        return mask


class TokenLedger:
    """Turns of one rollout, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.turns: list[LedgerTurn] = []
        self._with_children: set[LedgerTurn] = set()
        self._by_tokens: dict[tuple[int, int], list[LedgerTurn]] = {}

    @property
    def longest(self) -> int:
        return max((turn.end for turn in self.turns), default=0)

    def append(
        self,
        parent: LedgerTurn | None,
        observed: Sequence[int],
        generation: Generation,
        weight_version: str | None = None,
        last_version: str | None = None,
    ) -> LedgerTurn:
        """Record a turn, with the labels of the weights when its sampling began and ended.

        Raises:
            TokenMismatch: log-probs are missing or not finite, an id is invalid, the prompt is empty, or rows of
                experts are missing.
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
        turn = LedgerTurn(
            parent=parent,
            observed=pack_ids(observed),
            sampled=pack_ids(generation.ids),
            log_probs=array("d", generation.log_probs),
            weight_version=weight_version,
            last_version=last_version,
            finish=generation.finish,
            start=(parent.end if parent else 0) + len(observed),
            routed_experts=experts,
        )
        self.turns.append(turn)
        self._by_tokens.setdefault((turn.start, ids_hash(turn.sampled)), []).append(turn)
        if parent is not None:
            self._with_children.add(parent)
        return turn

    def split_prompt(
        self, prompt_ids: Sequence[int], candidate: LedgerTurn | None
    ) -> tuple[LedgerTurn | None, list[int]]:
        """Split a prompt that an engine rendered into the turn that it continues and the ids after that turn.

        The candidate is kept if its sequence is an exact prefix of the prompt. Otherwise the engine rewrote history,
        and the prompt starts a branch.
        """
        ids = list(prompt_ids)
        if candidate is not None and ids[: candidate.end] == candidate.sequence():
            return candidate, ids[candidate.end :]
        return None, ids

    def would_branch(self, parent: LedgerTurn | None) -> bool:
        """Return whether a turn after ``parent``, or a first turn for ``None``, would start another branch."""
        return parent in self._with_children if parent is not None else bool(self.turns)

    def find(self, prompt_ids: Sequence[int], sampled: Sequence[int]) -> LedgerTurn | None:
        """Return the latest turn with exactly this prompt and these sampled ids; ``None`` if there is none."""
        ids = pack_ids(sampled)
        candidates = [
            turn for turn in self._by_tokens.get((len(prompt_ids), ids_hash(ids)), ()) if turn.sampled == ids
        ]
        prompt = list(prompt_ids)
        return next((turn for turn in reversed(candidates) if turn.prompt() == prompt), None)

    def leaves(self) -> Iterator[LedgerTurn]:
        """Return the last turn of every branch."""
        return (turn for turn in self.turns if turn not in self._with_children)

    @property
    def branches(self) -> int:
        """Number of branches; 1 for a rollout whose history never branched."""
        return sum(1 for _ in self.leaves())

    def sequences(self) -> list[TrainingSequence]:
        """Return every branch as a training sequence.

        A turn that several branches share is marked as sampled only in the first of them, so no token is trained on
        twice.
        """
        seen: set[LedgerTurn] = set()
        return [self._sequence(leaf, seen) for leaf in self.leaves()]

    @staticmethod
    def _sequence(leaf: LedgerTurn, seen: set[LedgerTurn]) -> TrainingSequence:
        ids, log_probs, spans = array("I"), array("d"), list[Span]()
        for turn in leaf.path():
            trained = turn not in seen
            seen.add(turn)
            ids += turn.observed + turn.sampled
            log_probs += array("d", bytes(log_probs.itemsize * len(turn.observed))) + turn.log_probs
            spans.append(Span(turn.start - len(turn.observed), turn.start, False, None))
            spans.append(Span(turn.start, turn.end, trained, turn.weight_version))
        return TrainingSequence(ids, log_probs, tuple(span for span in spans if span.end > span.start))


def pack_ids(ids: Sequence[int]) -> array[int]:
    """Return ids as a packed array.

    Raises:
        TokenMismatch: a value cannot be a token id.
    """
    try:
        return array("I", ids)
    except (OverflowError, TypeError) as error:
        raise TokenMismatch(f"not a token id: {error}") from error


def ids_hash(ids: Sequence[int]) -> int:
    """Return a hash of ids that does not depend on the type of the sequence."""
    return hash((ids if isinstance(ids, array) else pack_ids(ids)).tobytes())
