# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Classes that NeMo RL loads by name: a buffer sampler, and an environment that does nothing.

Groups reach NeMo RL's buffer in order, and never more groups than a step needs, so any sampler fits the hook
``async_rl.sampler``. :class:`UncheckpointedSampler` keeps groups out of NeMo RL's checkpoints: the saved state of the
dynamic sampler contains the same groups, which would otherwise be trained on twice.

NeMo RL requires an environment for each data set; with ``rollouts: service`` the trainer has none.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray
from nemo_rl.algorithms.async_utils.staleness_sampler import WindowedSampler

from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings


class UncheckpointedSampler(WindowedSampler):  # type: ignore[misc]  # NeMo RL has no types here
    """NeMo RL's windowed sampler, without groups in checkpoints."""

    supports_buffer_checkpoint: ClassVar[bool] = False


def sampler_block(configured: Any, settings: ProrlSettings) -> Any:
    """Return the block ``async_rl.sampler`` with which training starts.

    Args:
        configured: the configuration's own block, if any; a custom sampler of the user is kept.
        settings: the block ``prorl:``.
    """
    if (configured or {}).get("name") == "custom":
        return configured
    target = f"{__name__}:{UncheckpointedSampler.__name__}"
    return {"name": "custom", "target": target, "max_staleness_versions": settings.max_staleness}


@ray.remote(num_cpus=0)
class NoEnvironment:
    """Environment that does nothing, as a Ray actor."""

    def __init__(self, config: Any) -> None:
        del config

    def shutdown(self) -> bool:
        return True
