# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How many groups may be under way: as many as can still be trained on.

A group that begins under weights ``v`` is of use to batches up to that for ``v + max_staleness``. So there is room for
the groups of so many batches, of which some are complete already, some will be, and some will turn out to have no
variance. Those are told by the share of the groups before them: without it every group would have to be taken for one
with variance, and the service would stand empty where few are. Too many is dearer than too few: a group that becomes
too old before its turn comes begins again, right where the next batch waits for it. So it is the count that is hardly
ever exceeded. With ``max_staleness`` 0 everything behind a batch begins again anyway, and it is the count that hardly
ever falls short.

The room is that of AReaL's and SkyRL's staleness control, which count every group that runs as one to be trained on.

Pure.
"""

from __future__ import annotations

import math

from nemo_gym_prorl.dapo.contract import SamplerConfig


_MEMORY = 256
"""Groups over which the share is averaged."""
_LEAST = 1 / 8
"""Share below which nothing more is begun for being rare: most of it would be thrown away if that changes."""
_CAUTION = 2.0
"""Standard deviations between the expected count and the one that is reckoned with."""


class Admission:
    """The room, and the share of groups with variance.

    Args:
        config: what the trainer wants.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self.groups = 0
        self.share = 0.5

    def settled(self, *, taught: bool) -> None:
        """A group is complete, and its turn has come."""
        self.groups += 1
        self.share += (taught - self.share) / min(self.groups + 2, _MEMORY)

    def admits(self, ready: int, running: int, behind: int) -> bool:
        """Whether another group would be of use.

        Args:
            ready: groups with variance that no batch has taken.
            running: groups that are not complete.
            behind: versions that the weights of now are behind the batch that is being filled.
        """
        room = self._config.groups_per_batch * (self._config.max_staleness + 1 - behind)
        share = max(self.share, _LEAST)
        caution = _CAUTION if self._config.max_staleness else -_CAUTION
        return ready + share * running + caution * math.sqrt(running * share * (1 - share)) < room
