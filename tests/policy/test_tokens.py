# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ledger under arbitrary growth and branching."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn, TokenLedger, TokenMismatch


IDS = st.lists(st.integers(0, 9), max_size=6)


def generation(ids: list[int]) -> Generation:
    return Generation(ids, [-float(i + 1) for i in ids], Finish.STOP)


@st.composite
def ledgers(draw: st.DrawFn) -> TokenLedger:
    ledger = TokenLedger()
    for version in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *ledger.turns]))
        observed = draw(IDS if parent else IDS.filter(bool))
        ledger.append(parent, observed, generation(draw(IDS)), str(version))
    return ledger


@given(ledger=ledgers())
def test_every_turn_extends_its_parent_exactly(ledger: TokenLedger) -> None:
    for turn in ledger.turns:
        sequence = turn.sequence()
        assert turn.prompt() + list(turn.sampled) == sequence
        assert len(sequence) == turn.end
        if turn.parent:
            assert sequence[: turn.parent.end] == turn.parent.sequence()


@given(ledger=ledgers())
def test_sequences_hold_every_sampled_token_once(ledger: TokenLedger) -> None:
    sequences = ledger.sequences()
    assert len(sequences) == ledger.branches
    trained = 0
    for sequence in sequences:
        assert len(sequence.ids) == len(sequence.mask) == len(sequence.log_probs)
        assert all(
            p == -float(i + 1) for i, p, m in zip(sequence.ids, sequence.log_probs, sequence.mask, strict=True) if m
        )
        assert sum(span.end - span.start for span in sequence.spans) == len(sequence.ids)
        for span in sequence.spans:
            assert set(sequence.mask[span.start : span.end]) == {span.sampled}
        trained += sum(sequence.mask)
    assert trained == sum(len(turn.sampled) for turn in ledger.turns)


@given(prompt=IDS.filter(bool), first=IDS, more=IDS, flip=st.integers(0, 20))
def test_a_prompt_that_an_engine_rendered_continues_only_what_it_repeats(
    prompt: list[int], first: list[int], more: list[int], flip: int
) -> None:
    ledger = TokenLedger()
    turn = ledger.append(None, prompt, generation(first))
    rendered = turn.sequence() + more
    assert ledger.split_prompt(rendered, turn) == (turn, more)
    changed = list(rendered)
    changed[flip % turn.end] += 1
    assert ledger.split_prompt(changed, turn) == (None, changed)


@pytest.mark.parametrize(
    ("observed", "answer", "said"),
    [
        ([], generation([1]), "prompt has no tokens"),
        ([1], Generation([1, 2], [-1.0], Finish.STOP), "2 tokens were sampled but 1 log-probs"),
        ([1], Generation([1], [math.nan], Finish.STOP), "not a finite number"),
        ([2**32], generation([1]), "not a token id"),
        ([1], Generation(["1"], [-1.0], Finish.STOP), "not a token id"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(observed: list[int], answer: Generation, said: str) -> None:
    ledger = TokenLedger()
    with pytest.raises(TokenMismatch, match=said):
        ledger.append(None, observed, answer)
    assert not ledger.turns


def test_weight_versions_are_kept_per_span() -> None:
    ledger = TokenLedger()
    turn: LedgerTurn | None = None
    for version in ("1", "2"):
        turn = ledger.append(turn, [1], generation([2, 3]), version)
    (sequence,) = ledger.sequences()
    assert [(s.start, s.end, s.sampled, s.weight_version) for s in sequence.spans] == [
        (0, 1, False, None),
        (1, 3, True, "1"),
        (3, 4, False, None),
        (4, 6, True, "2"),
    ]
