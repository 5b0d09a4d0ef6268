# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Classes that NeMo RL loads by name: our sampler of its buffer, and an environment that does nothing.

Groups come to the buffer when they are due and no more of them than a step needs, so any policy would do for the hook
``async_rl.sampler``. This sampler keeps checkpoints from holding any group: they are in the state of ours, and would
else be trained on twice.

NeMo RL requires an environment for each data set. With ``rollouts: service`` the trainer has none.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray
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


@ray.remote(num_cpus=0)
class NoEnvironment:
    """An actor that does nothing, as environments of NeMo RL are actors."""

    def __init__(self, config: Any) -> None:
        del config

    def shutdown(self) -> bool:
        """As of any environment."""
        return True
