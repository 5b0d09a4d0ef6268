# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL wants an environment for each data set. With ``rollouts: service`` there is none in the trainer: this one
is never asked for anything."""

from __future__ import annotations

from typing import Any

import ray


@ray.remote(num_cpus=0)
class NoEnvironment:
    """An actor that does nothing, as environments of NeMo RL are actors."""

    def __init__(self, config: Any) -> None:
        del config

    def shutdown(self) -> bool:
        """As of any environment."""
        return True
