# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards as they are trained on, of rewards as the environment gave them. Pure.

Which groups have variance is decided before, on what the environment gave: a group of wrong answers of different
lengths would else be one that teaches brevity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nemo_gym_prorl.nemo_rl.settings import Overlong, ProrlSettings, RewardScaling


@dataclass(frozen=True, slots=True)
class Shaping:
    """Scaling, then what is taken off for length. Called with a reward and the number of tokens of the sequence."""

    scaling: RewardScaling | None = None
    overlong: Overlong | None = None

    @classmethod
    def of(cls, settings: ProrlSettings) -> Self:
        """As the block ``prorl:`` says."""
        return cls(settings.reward_scaling, settings.overlong)

    def __call__(self, reward: float, length: int) -> float:
        if self.scaling is not None:
            reward = scaled(reward, self.scaling)
        return reward if self.overlong is None else reward - overlong_penalty(length, self.overlong)


def scaled(reward: float, scaling: RewardScaling) -> float:
    """The reward in the target's range; one outside of the source's is its nearest end."""
    inside = min(max(reward, scaling.source_min), scaling.source_max)
    share = (inside - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def overlong_penalty(length: int, overlong: Overlong) -> float:
    """What is taken off: nothing below the buffer, then more with each token, and the whole penalty behind it."""
    into = length - (overlong.max_sequence_length - overlong.buffer_length)
    return overlong.penalty * min(max(into / overlong.buffer_length, 0.0), 1.0)
