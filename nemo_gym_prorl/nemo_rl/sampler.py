# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which groups of NeMo RL's buffer a step trains on, by its hook for a sampler of one's own (``async_rl.sampler``).

Groups come to the buffer when they are due and no more of them than a step needs, so any policy would do. This one
says that checkpoints are to hold none of them: they are in the state of ours, and would else be trained on twice.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nemo_rl.algorithms.async_utils.staleness_sampler import WindowedSampler

from nemo_gym_prorl.nemo_rl.settings import ProrlSettings


class Due(WindowedSampler):  # type: ignore[misc]  # NeMo RL has no types here
    """NeMo RL's own that takes what is there, but for what it says of checkpoints."""

    supports_buffer_checkpoint: ClassVar[bool] = False


def configured(said: Any, settings: ProrlSettings) -> Any:
    """The block ``async_rl.sampler`` to start with.

    Args:
        said: what the configuration has there; one of somebody's own stays.
        settings: the block ``prorl:``.
    """
    if (said or {}).get("name") == "custom":
        return said
    return {"name": "custom", "target": f"{__name__}:{Due.__name__}", "max_staleness_versions": settings.max_staleness}
