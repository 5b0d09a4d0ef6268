# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which rollouts are not to be trained on, though they have a reward: one reading, for whoever asks.

A verifier says so in the row that it answers with. There are two places for it, and who reads one of them does not
know of the other: Gym ≥ 0.7 has ``mask_sample`` at the top level, NeMo RL reads ``instance_config``. So either
counts, and what leaves the service has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


_FLAG = "mask_sample"
_NESTED = "instance_config"


def is_masked(result: Mapping[str, Any]) -> bool:
    """Whether a row with its verdict says, in either place, that nobody is to train on it."""
    nested = result.get(_NESTED)
    return bool(result.get(_FLAG)) or (isinstance(nested, Mapping) and bool(nested.get(_FLAG)))


def masked(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the mask in both places."""
    nested = result.get(_NESTED)
    return {**result, _FLAG: True, _NESTED: {**(nested if isinstance(nested, Mapping) else {}), _FLAG: True}}


def unmasked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without it in either place."""
    bare = {name: value for name, value in row.items() if name != _FLAG}
    if isinstance(nested := row.get(_NESTED), Mapping):
        bare[_NESTED] = {name: value for name, value in nested.items() if name != _FLAG}
        if not bare[_NESTED]:
            del bare[_NESTED]
    return bare
