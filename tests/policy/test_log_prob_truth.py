# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Each rule of sampling gives the distribution computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.policy.log_prob_truth import Vocabulary, log_distribution


VOCABULARY = Vocabulary(
    texts=(b"y", b"es", b"yes", b"no", None, None, None),
    ends={4},
    thinking=(5, 6),
    encode=lambda text: {"no": [3], " no": [3], "y es": [0, 1], " y es": [0, 1]}[text],
)
P = (0.4, 0.2, 0.2, 0.1, 0.05, 0.03, 0.02)
"""Probabilities of the seven tokens at temperature 1."""


def _normalised(weights: dict[int, float]) -> list[float]:
    whole = sum(weights.values())
    return [weights.get(token, 0.0) / whole for token in range(len(P))]


ALL = dict(enumerate(P))
CASES: dict[str, tuple[dict[str, Any], list[int], list[int], list[float]]] = {
    "nothing": ({}, [0], [], list(P)),
    "temperature 0.5": ({"temperature": 0.5}, [0], [], _normalised({i: p**2 for i, p in ALL.items()})),
    "temperature 2": ({"temperature": 2.0}, [0], [], _normalised({i: p**0.5 for i, p in ALL.items()})),
    "temperature 0": ({"temperature": 0.0}, [0], [], _normalised({0: 1.0})),
    "greedy after a bias": ({"temperature": 0.0, "logit_bias": {"3": 9.0}}, [0], [], _normalised({3: 1.0})),
    "top_k 1": ({"top_k": 1}, [0], [], _normalised({0: 1.0})),
    "top_k of equal tokens": ({"top_k": 2}, [0], [], _normalised({0: 0.4, 1: 0.2, 2: 0.2})),
    "top_k 4": ({"top_k": 4}, [0], [], _normalised({0: 0.4, 1: 0.2, 2: 0.2, 3: 0.1})),
    "top_k -1": ({"top_k": -1}, [0], [], list(P)),
    "top_p 0.5": ({"top_p": 0.5}, [0], [], _normalised({0: 0.4, 1: 0.2})),
    "top_p 0.85": ({"top_p": 0.85}, [0], [], _normalised({0: 0.4, 1: 0.2, 2: 0.2, 3: 0.1})),
    "top_p after temperature": ({"top_p": 0.5, "temperature": 0.5}, [0], [], _normalised({0: 1.0})),
    "top_p after top_k": ({"top_p": 0.7, "top_k": 3}, [0], [], _normalised({0: 0.4, 1: 0.2})),
    "min_p": ({"min_p": 0.2}, [0], [], _normalised({0: 0.4, 1: 0.2, 2: 0.2, 3: 0.1})),
    "min_p after temperature": ({"min_p": 0.2, "temperature": 0.5}, [0], [], _normalised({0: 4, 1: 1, 2: 1})),
    "logit_bias": ({"logit_bias": {"3": float(np.log(4))}}, [0], [], _normalised(ALL | {3: 0.4})),
    "presence": ({"presence_penalty": float(np.log(2))}, [1], [0, 0], _normalised(ALL | {0: 0.2})),
    "frequency": ({"frequency_penalty": float(np.log(2))}, [1], [0, 0], _normalised(ALL | {0: 0.1})),
    "repetition, of the prompt too": (
        {"repetition_penalty": 2.0},
        [1],
        [0],
        _normalised(ALL | {0: 0.4**2, 1: 0.2**2}),
    ),
    "min_tokens": ({"min_tokens": 2}, [0], [1], _normalised({i: p for i, p in ALL.items() if i != 4})),
    "min_tokens, reached": ({"min_tokens": 1}, [0], [1], list(P)),
    "bad word": ({"bad_words": ["no"]}, [0], [], _normalised({i: p for i, p in ALL.items() if i != 3})),
    "bad words, begun": ({"bad_words": ["y es"]}, [0], [0], _normalised({i: p for i, p in ALL.items() if i != 1})),
    "bad words, not begun": ({"bad_words": ["y es"]}, [0], [3], list(P)),
    "allowed": ({"allowed_token_ids": [1, 3]}, [0], [], _normalised({1: 0.2, 3: 0.1})),
    "choice, at its start": (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        [0],
        [],
        _normalised({0: 0.4, 2: 0.2, 3: 0.1}),
    ),
    "choice, within": ({"structured_outputs": {"choice": ["yes", "no"]}}, [0], [0], _normalised({1: 1.0})),
    "choice, at its end": ({"structured_outputs": {"choice": ["yes", "no"]}}, [0], [2], _normalised({4: 1.0})),
    "choice, at an end or not": (
        {"structured_outputs": {"choice": ["yes", "yesno"]}},
        [0],
        [2],
        _normalised({3: 0.1, 4: 0.05}),
    ),
    "thinking budget, left": ({"thinking_token_budget": 3}, [5, 0], [1], list(P)),
    "thinking budget, spent": ({"thinking_token_budget": 3}, [5, 0], [1, 1], _normalised({6: 1.0})),
    "thinking budget, thought over": ({"thinking_token_budget": 3}, [5, 0], [1, 6], list(P)),
    "mixture": (
        {"temperature": 0.5, "top_k": 3, "repetition_penalty": 2.0},
        [0],
        [],
        _normalised({1: 0.2**2, 2: 0.2**2, 0: 0.4**4}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_is_the_one_computed_by_hand(name: str) -> None:
    sampling, prompt, output, expected = CASES[name]
    found = np.exp(log_distribution(np.log(P), sampling, prompt, output, VOCABULARY))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_repetition_lowers_logits_of_either_sign() -> None:
    logits = np.array([2.0, -2.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    found = log_distribution(logits, {"repetition_penalty": 2.0}, [0], [1], VOCABULARY)
    np.testing.assert_allclose(found - found[2], [0.5, -4.5, 0, 0, 0, 0, 0], atol=1e-12)
